"""`plait plan`: where each block would go, and why. Reads no weights, imports no framework."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from plait.cli.options import Json, PlanOptions, Verbose, with_plan_options
from plait.outputs import write_whole

NAME = "plan"

HELP = """Say which device would run which layers, and why.

Reads the config and the headers of the weights, never the weights; a config.json alone is enough. Needs no device, no
PyTorch and no JAX.

\b
    plait plan smollm2 --targets h100,mi300
    plait plan config.json --targets 2xh100,mi300x,v5e --workload chat --context 8192
    plait plan smollm2 --targets h100,mi300 -o plan.yaml     # edit it, then:
    plait compile smollm2 --plan plan.yaml
"""


@with_plan_options
def command(
    options: PlanOptions,
    output: Annotated[
        Path | None, typer.Option("--output", "-o", metavar="FILE", help="Write the plan as YAML, to read and edit.")
    ] = None,
    as_json: Json = False,
    verbose: Verbose = False,
) -> None:
    from plait import api
    from plait.cli.screen import Screen
    from plait.cli.tables import plan_tables, request_facts
    from plait.registry import backend_names
    from plait.spec import to_dict, to_yaml

    screen = Screen(as_json=as_json)
    asked = api.request(**options.arguments())
    screen.show(request_facts(asked, None if output is None else str(output)))
    with screen.phases() as progress:
        planned = api.make_plan(asked, progress)
    for part in plan_tables(planned.plan, None, screen.width, verbose=verbose):
        screen.show(part)
    if output is not None:
        write_whole(output, to_yaml(planned.plan))
    command = None
    if missing := sorted({device.backend for device in asked.cluster.devices} - set(backend_names())):
        screen.note(f"there is no backend for {', '.join(missing)}: this can be planned, not compiled")
    else:
        screen.note("no backend was asked: plait compile also says where each slice really runs")
        command = next_command(options, output, has_weights=planned.checkpoint.weights is not None)
        screen.next(command)
    screen.result({"plan": to_dict(planned.plan), "output": output and str(output), "next": command})


def next_command(options: PlanOptions, output: Path | None, *, has_weights: bool) -> str:
    """Compile what was planned, from the written plan if there is one, with the weights if there were none."""
    model = options.model if has_weights else Path("MODEL")
    if output is None:
        return options.command("compile", model=model)
    return PlanOptions(model, plan=output, config=options.config).command("compile")
