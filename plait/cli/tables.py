"""Values as rich tables. Nothing here decides anything; the rows come from `plait.partitioner.report`."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from rich import box
from rich.cells import cell_len
from rich.table import Table

from plait.words import bytes_text, counted, seconds_text

if TYPE_CHECKING:
    from rich.console import JustifyMethod

    from plait.api import Request
    from plait.cli.screen import Screen
    from plait.errors import FitError
    from plait.spec import Cause, Manifest, Plan, Workload

#: Columns that hold numbers or short words; the others may fold.
NUMBERS = ("slice", "layers", "weights", "KV", "prefill", "decode", "needed", "free", "short by")

#: Columns whose words are copied into commands.
COPIED = ("name", "target", "device", "slice", "kernel", "program")

#: Most characters of a word that decide how narrow a column can get.
WORD = 12

#: Quantised weights shown where not all are asked for.
QUANTIZED_ROWS = 8

#: Narrower than this, causes stand below the plan's table and not in it.
CAUSE_COLUMN_FROM = 110


def table(
    columns: Iterable[str], rows: Iterable[Iterable[str]] = (), *, right: Iterable[str] = NUMBERS, title: str = ""
) -> Table:
    """A table; the columns named in `right` hold numbers. Neither they nor words to copy are ever cut or broken; the
    other columns keep room for a word where the screen is narrow."""
    made = Table(
        box=box.SIMPLE_HEAD,
        title=title or None,
        title_justify="left",
        title_style="bold",
        pad_edge=False,
        padding=(0, 1, 0, 0),
    )
    lines = [list(columns), *map(list, rows)]
    for index, name in enumerate(lines[0]):
        number = name in right
        whole = number or name in COPIED
        texts = [line[index] for line in lines]
        parts = texts if whole else [word[:WORD] for text in texts for word in text.split()]
        widest = max(map(cell_len, parts), default=0)
        justify: JustifyMethod = "right" if number else "left"
        made.add_column(name, justify=justify, overflow="fold", no_wrap=whole, min_width=widest)
    for line in lines[1:]:
        made.add_row(*line)
    return made


def fitted(
    columns: Sequence[str],
    rows: Iterable[Sequence[str]],
    width: int,
    *,
    keys: int = 1,
    right: Iterable[str] = NUMBERS,
) -> Iterable[Table]:
    """A table; where it is wider than `width`, several of some columns each, with the first `keys` columns in all."""
    from rich.console import Console
    from rich.measure import Measurement

    def made(chosen: Iterable[int]) -> Table:
        kept = [*range(keys), *chosen]
        return table([columns[i] for i in kept], [[row[i] for i in kept] for row in lines], right=right)

    lines, console, chosen = list(rows), Console(width=10_000), list[int]()
    for column in range(keys, len(columns)):
        if chosen and Measurement.get(console, console.options, made([*chosen, column])).minimum > width:
            yield made(chosen)
            chosen = []
        chosen.append(column)
    yield made(chosen)


def facts(rows: Iterable[tuple[str, str]], title: str = "") -> Table:
    """Name and value, one pair per line; pairs without a value are left out."""
    made = Table(
        box=None, show_header=False, title=title or None, title_justify="left", title_style="bold", pad_edge=False
    )
    made.add_column(style="dim", no_wrap=True)
    made.add_column(overflow="fold")
    for name, value in rows:
        if value:
            made.add_row(name, value)
    return made


def request_facts(asked: Request, output: str | None) -> Table:
    """What was understood, with every default filled in."""
    work = asked.workload
    times = (("first token", work.max_ttft_s), ("each output token", work.max_tpot_s))
    limits = [f"{name} within {seconds_text(limit)}" for name, limit in times if limit is not None]
    return facts(
        [
            ("model", str(asked.model)),
            ("config", str(asked.config or "")),
            ("devices", ", ".join(f"{d.id} ({d.backend}:{d.arch} on {d.host})" for d in asked.cluster.devices)),
            ("workload", ", ".join([f"{work.name}: {workload_text(work)}", *limits])),
            ("objective", asked.objective),
            ("dtype", asked.dtype or "the checkpoint's"),
            ("KV", kv_text(asked.kv_dtype)),
            ("adapters", ", ".join(map(str, asked.lora))),
            ("quantised", ", ".join(f"{name} to {quantize_text(*how)}" for name, how in asked.quantize.items())),
            ("layers", ", ".join(map(str, asked.layers or ()))),
            ("pins", ", ".join(f"{unit} on {device}" for unit, device in asked.pins.items())),
            ("no cut before", ", ".join(f"block {cut}" for cut in asked.forbidden_cuts)),
            ("plan", "given by hand, honoured exactly" if asked.plan is not None else ""),
            ("output", output or ""),
        ],
        title="resolved arguments",
    )


def kv_text(kv_dtype: str | None) -> str:
    """`fp8 (e4m3fn)`; empty where KV is stored in what is computed in."""
    return "" if kv_dtype is None else f"fp8 ({kv_dtype})"


def quantize_text(kind: str, group_size: int | None) -> str:
    """`int4 in groups of 64`."""
    return kind + {None: "", 0: " by rows"}.get(group_size, f" in groups of {group_size}")


def quantize_table(weights: Mapping[str, Mapping[str, Any]], *, everything: bool) -> Table:
    """How far quantised weights are from what they were: those of the largest error first, all with `everything`.

    `output` is there where a text was given to calibrate on; see `plait.ir.quantise.QuantError`.
    """
    from plait.report import quantized_rows

    columns, rows = quantized_rows(weights)
    shown = rows if everything else rows[:QUANTIZED_ROWS]
    more = f", the {len(shown)} largest" if len(shown) < len(rows) else ""
    return table(columns, shown, right=columns[2:], title=f"errors of {counted(len(rows), 'quantised weight')}{more}")


def workload_text(work: Workload) -> str:
    """`8 requests of 512 + 256 tokens`: how many at once, tokens in and out of each."""
    return f"{counted(work.concurrency, 'request')} of {work.prompt_tokens} + {work.output_tokens} tokens"


def plan_tables(plan: Plan, runs_on: Sequence[str] | None, width: int, *, verbose: bool = False) -> Iterable[Table]:
    """The plan: slices with their causes, what the pipeline is predicted to do, idle devices.

    Args:
        runs_on: where each slice really runs; None where no backend was asked.
        width: columns there are; narrow ones get the causes below the table.
        verbose: also every part of each slice's memory, and everything behind the causes.
    """
    from plait.partitioner.report import COLUMNS, summary_rows, table_rows

    wide = width >= CAUSE_COLUMN_FROM
    columns, rows = [*COLUMNS[:-1], "runs on", COLUMNS[-1]], []
    for index, (*cells, cause) in enumerate(table_rows(plan)):
        rows.append([*cells, runs_on[index] if runs_on else "", cause])
    hidden = {name for name, hide in (("runs on", not runs_on), (COLUMNS[-1], not wide)) if hide}
    keep = [i for i, name in enumerate(columns) if name not in hidden]
    dtypes = ", KV in ".join(filter(None, (plan.dtype, kv_text(plan.kv_dtype))))
    yield table(
        [columns[i] for i in keep],
        [[row[i] for i in keep] for row in rows],
        title=f"plan of {plan.model}: {counted(plan.blocks, 'layer')} in {dtypes}, for {workload_text(plan.workload)}",
    )
    if verbose or not wide:
        causes = ((f"slice {i}", cause_text(item.cause, verbose)) for i, item in enumerate(plan.slices))
        yield facts(causes, title="causes")
    if verbose:
        yield memory_table(plan)
    idle = ((f"{item.device} idle", cause_text(item.cause, True)) for item in plan.idle)
    notes = (("note", note) for note in plan.notes or ())
    yield facts([*summary_rows(plan), ("cause", cause_text(plan.cause, True)), *idle, *notes], title="predicted")


def warn_of_null(screen: Screen, manifest: Manifest) -> None:
    """A slice without a backend hands on zeros: one of them makes every text meaningless."""
    null = [str(index) for index, item in enumerate(manifest.slices) if item.backend == "null"]
    if null:
        screen.note(f"slice {' and '.join(null)} computes nothing (backend null): the text will mean nothing")


def warn_of_checks(screen: Screen, failed: Mapping[str, Sequence[tuple[str, str]]]) -> None:
    """Code that is not what its chip should run, by slice: right perhaps, but slower than was predicted."""
    for folder, found in failed.items():
        (row, why), *others = found
        more = f", and {len(others)} more" if others else ""
        screen.note(f"{folder}: a check of its machine code failed: {row}: {why}{more}; `plait inspect` lists them")


def cause_text(cause: Cause | None, everything: bool) -> str:
    """Why; with `everything` also the number behind it, its source and the runner-up."""
    if cause is None:
        return ""
    parts = (cause.why, cause.number, cause.source, cause.runner_up) if everything else (cause.why,)
    return "; ".join(part for part in parts if part)


def memory_table(plan: Plan) -> Table:
    """Every part of each slice's memory, and what is left."""
    from plait.partitioner.report import memory_bars

    bars = memory_bars(plan)
    names = [name for name, _ in bars[0].parts]
    rows = [[bar.device, *(bytes_text(size) for _, size in bar.parts), bytes_text(bar.capacity_bytes)] for bar in bars]
    return table(["device", *names, "of"], rows, right=(*names, "of"), title="memory")


def fit_table(error: FitError) -> Table:
    """Needed, free and short-by per device."""
    from plait.partitioner.report import FIT_COLUMNS, fit_rows

    return table(FIT_COLUMNS, fit_rows(error))
