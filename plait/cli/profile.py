"""`plait profile`: measure a device of this machine, for plans that predict what it really does."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from plait.cli.options import Json, Verbose
from plait.words import bytes_text, seconds_text

if TYPE_CHECKING:
    from plait.cost_models.profiles import Profile

NAME = "profile"

HELP = """Measure this machine: products, attention, copies, hops between processes, what a step costs.

Runs plait's own kernels through the device's backend, some minutes (half a minute with --quick), and writes a profile.
Plans on this machine take their times from it, and say so. Let nothing else run meanwhile.

\b
    plait profile                      # this host's CPU
    plait profile h100 -o h100.json    # a GPU that is here
    plait plan smollm2 --targets cpu
"""


def command(
    target: Annotated[str, typer.Argument(metavar="[TARGET]", help="cpu, or an accelerator that is here.")] = "cpu",
    output: Annotated[
        Path | None,
        typer.Option("--output", "-o", metavar="FILE", help="Write here; default: where plans on this machine look."),
    ] = None,
    quick: Annotated[bool, typer.Option("--quick", help="Half a minute: fewer points, fewer repeats.")] = False,
    threads: Annotated[
        int | None, typer.Option("--threads", metavar="N", help="Host threads to compute with; default: all cores.")
    ] = None,
    as_json: Json = False,
    verbose: Verbose = False,
) -> None:
    from plait import api
    from plait.cli.screen import Screen
    from plait.cli.tables import facts
    from plait.spec import to_dict

    screen = Screen(as_json=as_json)
    with screen.phases() as progress:
        made, path = api.profile_device(target, output=output, quick=quick, threads=threads, progress=progress)
    screen.show(facts(list(_said(made)), title=f"{made.device} on {made.machine.chip}"))
    screen.note(f"written to {path}")
    screen.next(f"plait plan MODEL --targets {target}" + ("" if output is None else f" --profile {path}"))
    screen.result({"output": str(path), "profile": to_dict(made)})


def _said(made: Profile) -> Iterator[tuple[str, str]]:
    """What most want to know of a profile."""
    from plait.cost_models.profiled import peak_flops_per_s, spread, stream_bytes_per_s

    for dtype in made.dtypes:
        yield f"products in {dtype}", f"{peak_flops_per_s(made, dtype) / 1e9:.1f} GFLOP/s at best"
    over = made.overheads
    rows: tuple[tuple[str, Any], ...] = (
        ("weights are read at", f"{bytes_text(int(stream_bytes_per_s(made)))}/s"),
        ("memory is copied at", f"{bytes_text(int(made.copy_bytes_per_s))}/s by one thread"),
        ("a step of a slice", f"{seconds_text(over.slice_s)} and {seconds_text(over.token_s)} a token"),
        ("a step of the engine", f"{seconds_text(over.engine_s)} and {seconds_text(over.engine_sequence_s)} a request"),
        ("a hop to a process", f"{seconds_text(made.shared.latency_s)}, {bytes_text(int(made.shared.bytes_per_s))}/s"),
        ("a hop over TCP", f"{seconds_text(made.loopback.latency_s)}, {bytes_text(int(made.loopback.bytes_per_s))}/s"),
        ("threads, software", f"{made.threads}, {made.machine.software}"),
        ("range", f"x{2.718281828 ** spread(made):.2f} either way"),
    )
    yield from rows
