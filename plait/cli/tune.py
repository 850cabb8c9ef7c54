"""`plait tune`: measure the tiles of an artifact's kernels on the device they are for."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from plait.cli.options import Json, Verbose
from plait.errors import PlaitError, UsageError, UserError
from plait.words import seconds_text

if TYPE_CHECKING:
    from plait.artifact import Artifact
    from plait.backends.kernels.gpu.here import Devices
    from plait.backends.kernels.gpu.kernel import Tile
    from plait.backends.kernels.gpu.tune import Result

NAME = "tune"

HELP = """Measure the kernels of an artifact on the GPU they are for.

Compiles every tile worth trying for each kernel and number of rows, times it on the device with the slice's own
weights and pages, and keeps the times in the cache. The artifact stays as it is: the next compile on this machine takes
the tiles that were fastest, and plait inspect says "measured".

\b
    plait tune smollm2.plait
    plait tune smollm2.plait --slice 1
"""

_COLUMNS = ("kernel", "rows", "tile now", "time", "fastest tile", "time of it", "gain")
_NUMBERS = ("rows", "time", "time of it", "gain")


def command(
    path: Annotated[Path, typer.Argument(metavar="ARTIFACT", show_default=False, help="What plait compile wrote.")],
    part: Annotated[int | None, typer.Option("--slice", metavar="N", help="Tune this slice only.")] = None,
    as_json: Json = False,
    verbose: Verbose = False,
) -> None:
    from plait.artifact import check_weights, read_artifact
    from plait.cli.screen import Screen
    from plait.cli.tables import table

    screen = Screen(as_json=as_json)
    artifact = read_artifact(path)
    count = len(artifact.manifest.slices)
    if part is not None and not 0 <= part < count:
        raise UsageError("tune-slice", f"{path} has no slice {part}", why=f"it has {count}, numbered from 0")
    numbers = range(count) if part is None else (part,)
    ready = _ready(screen, artifact, numbers)
    check_weights(artifact)
    done = []
    for number, here in ready.items():
        with screen.phases() as progress:
            results = _tuned(artifact, number, here, progress)
        rows = [row for row in map(_row, results) if row is not None]
        item = artifact.manifest.slices[number]
        device = next((result.tuned.device for result in results if result.tuned is not None), item.device)
        screen.show(table(_COLUMNS, map(_cells, rows), right=_NUMBERS, title=f"{item.folder} on {device}"))
        done.append({"slice": number, "device": device, "kernels": rows})
    command = next_command(artifact, path)
    screen.note("the times are in the cache; the artifact is as it was")
    screen.next(command)
    screen.result({"slices": done, "next": command})


def _ready(screen: Any, artifact: Artifact, numbers: Any) -> dict[int, Devices]:
    """The slices whose device is here; the others are said.

    Raises:
        UserError: `tune-nothing`: no slice has GPU code. `no-device`: none of their devices is here.
    """
    from plait.backends.kernels.gpu.backend import GpuBackend, read_plan
    from plait.backends.kernels.gpu.here import devices, emulation_asked
    from plait.registry import load_backend

    ready, absent = dict[int, Any](), dict[str, str]()
    for number in numbers:
        item = artifact.manifest.slices[number]
        backend = load_backend(item.backend)
        plan = read_plan(artifact.folder / item.folder)
        if not isinstance(backend, GpuBackend) or plan is None:
            continue
        try:
            here = None if emulation_asked(item.device) else devices(backend.vendor)
            if here is None:
                absent[item.device] = f"this machine has no {backend.vendor.upper()} GPU"
                continue
            here.fitting(plan.arch)
            ready[number] = here
        except PlaitError as error:  # another GPU, or no cupy: others may be tuned all the same
            absent[item.device] = "; ".join(filter(None, (error.what, error.why)))
    why = "; ".join(f"{device}: {reason}" for device, reason in absent.items())
    if not ready and not absent:
        raise UserError(
            "tune-nothing",
            f"{artifact.folder} has no GPU code to tune",
            why="tiles are chosen for GPUs only, and not with --no-device-code",
            hint="plait inspect says what each slice has",
        )
    if not ready:
        raise UserError(
            "no-device",
            f"nothing can be measured here: {', '.join(absent)} {'is' if len(absent) == 1 else 'are'} not here",
            why=why,
            hint="run the same command where the device is, with cupy (plait[cuda12], [cuda13] or [rocm7]) and Triton "
            "(plait[gpu]), and compile there; without it tiles are chosen by a model of the device",
        )
    if absent:
        screen.note(f"not tuned: {why}")
    return ready


def _tuned(artifact: Artifact, number: int, here: Devices, progress: Any) -> list[Result]:
    from plait.assemble import compile_options
    from plait.backends.base import LoadOptions
    from plait.backends.kernels.gpu.tune import tune_slice
    from plait.runtime.slices import page_allocator, slice_specs

    manifest = artifact.manifest
    pages = page_allocator(manifest, manifest.max_sequences)
    spec = slice_specs(manifest, artifact.folder, pages, max_sequences=manifest.max_sequences, threads=None)[number]
    load = LoadOptions(
        pages=spec.pages,
        page_tokens=spec.page_tokens,
        max_step_tokens=spec.max_step_tokens,
        max_sequences=spec.max_sequences,
        weight_root=Path(spec.weight_root),
        ordinal=spec.ordinal,
    )
    item = manifest.slices[number]
    options = compile_options(artifact.plan)
    return tune_slice(Path(spec.folder), item.target, here, options, load, progress)


def _row(result: Result) -> dict[str, Any] | None:
    """What was measured of one launch; None where nothing was."""
    from plait.backends.kernels.gpu.pick import sizes_of
    from plait.report.code import label

    if result.tuned is None:
        return None
    item, times = result.asked, result.tuned.times
    now = next((timed.us for timed in times if timed.tile == result.now), None)
    return {
        "kernel": label({"kernel": item.need.kernel.name, "sizes": sizes_of(item.need)}),
        "rows": "any" if item.most is None else f"up to {item.most}",
        "now": None if result.now is None else {"tile": _tile(result.now), "us": now},
        "times": [{"tile": _tile(timed.tile), "us": timed.us} for timed in times],
    }


def _tile(tile: Tile) -> str:
    from plait.backends.kernels.gpu.choose import shape

    return shape(tile)


def _cells(row: dict[str, Any]) -> tuple[str, ...]:
    now, best = row["now"], row["times"][0]
    known = now is not None and now["us"] is not None
    return (
        row["kernel"],
        row["rows"].replace("up to ", "<= "),
        now["tile"] if now else "-",
        seconds_text(now["us"] / 1e6) if known else "-",
        best["tile"],
        seconds_text(best["us"] / 1e6),
        f"{now['us'] / best['us'] - 1:.0%}" if known else "-",
    )


def next_command(artifact: Artifact, path: Path) -> str:
    """The same compile again, now with what was measured."""
    plan = artifact.folder / "plan.yaml"
    return shlex.join(["plait", "compile", str(_model(artifact)), "--plan", str(plan), "-o", str(path)])


def _model(artifact: Artifact) -> Path:
    """The checkpoint that it was compiled from, as far as the artifact knows it."""
    root, files = artifact.weight_root, tuple(artifact.manifest.weights)
    if not files:
        return Path("MODEL")  # the weights are inside
    if (root / "config.json").is_file():
        return root
    return root / files[0]
