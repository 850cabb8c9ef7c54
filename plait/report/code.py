"""The machine code of a slice as people read it: what its report.json says, as a table and totals.

A GPU's backend reports `kernels`, a TPU's `programs`; whatever else a backend writes is shown as its `lowering`.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from plait.words import bytes_text, count_text, counted, rate_text, seconds_text

Report = Mapping[str, Any]

#: What code is called in a slice's folder.
SUFFIXES = (".cubin", ".hsaco", ".tpu")


@dataclass(frozen=True)
class Code:
    """One slice.

    Attributes:
        none: why there is no machine code; empty where there is.
        columns, rows: the table; `numbers` are the columns that hold numbers, the first `keys` tell rows apart.
        totals: of the whole slice, by name.
        failed: what the checks of its binaries found, by row.
        why: why each row is as it is.
    """

    none: str = ""
    columns: tuple[str, ...] = ()
    rows: tuple[tuple[str, ...], ...] = ()
    numbers: tuple[str, ...] = ()
    keys: int = 1
    totals: tuple[tuple[str, str], ...] = ()
    failed: tuple[tuple[str, str], ...] = ()
    why: tuple[tuple[str, str], ...] = ()


def code_of(report: Report, sizes: Mapping[str, int]) -> Code:
    """What a report.json says of a slice's code.

    Args:
        sizes: bytes of the files in the slice's folder, by name.
    """
    for name, read in _READERS.items():
        if report.get(name):
            return read(report, {file: size for file, size in sizes.items() if file.endswith(SUFFIXES)})
    return Code(none=str(report.get("lowering", "its backend does not say")))


def slice_code(folder: Path) -> tuple[dict[str, Any], dict[str, int]]:
    """The arguments of `code_of`, from a slice's folder."""
    sizes = {path.name: path.stat().st_size for path in folder.iterdir() if path.is_file()}
    return json.loads((folder / "report.json").read_text("utf-8")), sizes


def label(kernel: Mapping[str, Any]) -> str:
    """`gemm 960x576`: a row of `kernels`, with the sizes that tell it from others."""
    sizes: Mapping[str, int] = kernel["sizes"]
    ordered = (str(sizes[name]) for name in sorted(sizes, key=lambda name: (name != "N", name)))
    return " ".join(filter(None, (kernel["kernel"], "x".join(ordered))))


def matrix_text(instruction: str | None) -> str:
    """The family of a matrix instruction: `wgmma`, `mma.sync`, `tcgen05`, `mfma`, `wmma`; `-` for none."""
    if instruction is None:
        return "-"
    found = re.match(r"wgmma|mma\.sync|tcgen05|v_(\w+?)_", instruction)
    return instruction if found is None else found[1] or found[0]


_KERNEL_COLUMNS = (
    *("kernel", "rows", "launches", "regs", "spills", "shared", "occupancy", "matrix", "flops", "bytes", "time"),
    "bound by",
)
_KERNEL_NUMBERS = ("rows", "launches", "regs", "spills", "shared", "occupancy", "flops", "bytes", "time")


def _kernels(report: Report, files: Mapping[str, int]) -> Code:
    kernels = report["kernels"]
    named = [(f"{label(row)}, {_rows_text(row)}", row) for row in kernels]
    failed = tuple((name, f"{check}: {why}") for name, row in named for check, why in row["checks"]["failed"].items())
    code = bytes_text(sum(files.values()))
    totals = (
        ("arch", str(report["arch"])),
        ("code", f"{code} in {counted(len(files), 'binary', 'binaries')}" + _made_with(report)),
        ("arena", bytes_text(report["arena_bytes"])),
        *_step_totals(report.get("steps", ())),
        ("checks", f"{len(failed)} failed" if failed else "every binary passed"),
    )
    return Code(
        columns=_KERNEL_COLUMNS,
        rows=tuple(map(_kernel_row, kernels)),
        numbers=_KERNEL_NUMBERS,
        keys=2,
        totals=totals,
        failed=failed,
        why=tuple((name, str(row["why"])) for name, row in named),
    )


def _kernel_row(row: Mapping[str, Any]) -> tuple[str, ...]:
    measured = row.get("measured")
    time = f"{seconds_text(measured['us'] / 1e6)} measured" if measured else seconds_text(row["predicted_us"] / 1e6)
    return (
        label(row),
        str(row["rows"]).replace("up to ", "<= "),
        str(row["launches"]),
        str(row["registers"]),
        str(row["spills"]),
        bytes_text(row["shared_bytes"]),
        f"{row['occupancy']:.0%}",
        matrix_text(row["matrix_instruction"]),
        _count_text(row["flops"]),
        bytes_text(row["bytes"]),
        time,
        str(row["bound_by"]),
    )


def _count_text(number: float) -> str:
    """`566 M`, `110,592`."""
    return rate_text(number, "") if number >= 1e6 else count_text(number)


def _rows_text(row: Mapping[str, Any]) -> str:
    return "any rows" if row["rows"] == "any" else f"{row['rows']} rows"


def _step_totals(steps: Any) -> Iterator[tuple[str, str]]:
    for step in steps:
        tokens, sequences = step["tokens"], step["sequences"]
        batch = f"a prompt of {tokens} tokens"
        if step["phase"] == "decode":
            batch = f"{sequences} x 1 token, {step['keys']} keys each"
        time = seconds_text(step["predicted_us"] / 1e6)
        yield step["phase"], f"{time} predicted for {batch}: {step['launches']} launches, bound by {step['bound_by']}"


_PROGRAM_COLUMNS = (
    "program",
    "cycles",
    "time",
    "bound by",
    "HBM",
    "temporary",
    "code",
    "flops",
    "bytes",
    "collectives",
)
_PROGRAM_NUMBERS = ("cycles", "time", "HBM", "temporary", "code", "flops", "bytes")


def _programs(report: Report, files: Mapping[str, int]) -> Code:
    programs: Mapping[str, Mapping[str, Any]] = report["programs"]
    totals = (
        ("arch", _group_text(report)),
        ("code", f"{bytes_text(sum(files.values()))} in {counted(len(files), 'program')}" + _made_with(report)),
        ("HBM", f"{bytes_text(max(map(_hbm_bytes, programs.values())))} at most, on each device"),
        *_program_totals(programs),
    )
    rows = tuple(_program_row(name, row) for name, row in programs.items())
    return Code(columns=_PROGRAM_COLUMNS, rows=rows, numbers=_PROGRAM_NUMBERS, totals=totals)


def _program_row(name: str, row: Mapping[str, Any]) -> tuple[str, ...]:
    cycles, time = row.get("estimated_cycles"), row.get("estimated_ms")
    return (
        name,
        "-" if cycles is None else _count_text(cycles),
        "-" if time is None else seconds_text(time / 1e3),
        str(row.get("bound_by", "-")),
        bytes_text(_hbm_bytes(row)),
        bytes_text(row["temporary_bytes"]),
        bytes_text(row["code_bytes"]),
        _count_text(row["flops"]),
        bytes_text(row["moved_bytes"]),
        ", ".join(f"{count} {kind}" for kind, count in row["collectives"].items()) or "none",
    )


def _hbm_bytes(row: Mapping[str, Any]) -> int:
    """What a program takes of one device: arguments, results that are not arguments again, and what it needs itself."""
    held = row["argument_bytes"] + row["output_bytes"] - row["aliased_bytes"]
    return int(held + row["temporary_bytes"] + row["code_bytes"])


def _program_totals(programs: Mapping[str, Mapping[str, Any]]) -> Iterator[tuple[str, str]]:
    """The slowest program of each phase."""
    for phase in ("decode", "prefill"):
        timed = {name: row for name, row in programs.items() if name.startswith(phase) and "estimated_ms" in row}
        if timed:
            name = max(timed, key=lambda name: timed[name]["estimated_ms"])
            row = timed[name]
            yield phase, f"{seconds_text(row['estimated_ms'] / 1e3)} predicted for {name}, bound by {row['bound_by']}"


def _group_text(report: Report) -> str:
    count = report.get("group_size", 1)
    return str(report["arch"]) if count == 1 else f"{report['arch']}, split over {count} devices"


def _made_with(report: Report) -> str:
    made = ", ".join(f"{name} {version}" for name, version in report.get("versions", {}).items())
    return f", made with {made}" if made else ""


#: By the key of report.json that says what code there is.
_READERS: dict[str, Callable[[Report, Mapping[str, int]], Code]] = {"kernels": _kernels, "programs": _programs}
