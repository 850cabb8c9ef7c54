"""`plait explain`: what an op costs on a device, why, and what would change it most."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, get_args

import typer

from plait.cli.options import Json
from plait.errors import UsageError, did_you_mean
from plait.words import bytes_text, count_text, rate_text, seconds_text

if TYPE_CHECKING:
    from plait.cli.screen import Screen
    from plait.cost_models.explain import OpExplained, Reached
    from plait.cost_models.profile import ModelProfile
    from plait.ir.facts import Step

NAME = "explain"

HELP = """Say what an op costs on a device, what that is made of, and what would change it most.

Without --op: all ops of the model, the dearest first. An op is named as in the table, with or without its shape; hop is
the boundary between two devices. The time is of one op in one step: with --phase decode one token of each request, with
prefill the whole prompt of each. The device need not be here, and nothing is run.

\b
    plait explain smollm2 --target h100
    plait explain smollm2 --target h100 --op linear --phase decode --batch 8 --context 4096
    plait explain smollm2 --target mi300 --op attention --phase prefill --context 2048
    plait explain smollm2 --target h100,mi300 --op hop
"""

Phase = Literal["decode", "prefill"]

#: Ops of the table without --op: the others take less than these.
_SHOWN = 12

#: Less than this is no change.
_LEAST = 5e-4

_BOUND = {
    "arithmetic": "compute: the arithmetic takes longest",
    "traffic": "memory: moving bytes takes longest",
    "launch": "launch: what is paid for every kernel or message takes longest",
    "wire": "wire: moving bytes between the devices takes longest",
}


def command(
    model: Annotated[
        Path,
        typer.Argument(metavar="MODEL", show_default=False, help="A checkpoint as for plait plan, or a config.json."),
    ],
    target: Annotated[
        str, typer.Option("--target", "-t", metavar="DEVICE", help="The device: h100; of a hop two: h100,mi300.")
    ],
    op: Annotated[
        str | None, typer.Option("--op", metavar="OP", help="linear, attention ...; 'linear 960x576'; hop.")
    ] = None,
    phase: Annotated[str, typer.Option("--phase", metavar="PHASE", help="decode or prefill.")] = "decode",
    batch: Annotated[int, typer.Option("--batch", metavar="N", help="Requests in the step.")] = 8,
    context: Annotated[
        int, typer.Option("--context", metavar="N", help="Tokens that each request holds after the step.")
    ] = 1024,
    dtype: Annotated[
        str | None,
        typer.Option("--dtype", metavar="DTYPE", help="Compute in float32, bfloat16 or float16; default: the model's."),
    ] = None,
    config: Annotated[
        Path | None, typer.Option("--config", metavar="FILE", help="The config.json of a weights file that lies alone.")
    ] = None,
    as_json: Json = False,
) -> None:
    from plait.cli.screen import Screen
    from plait.cost_models.catalogue import cluster_for
    from plait.cost_models.explain import HOP, chosen, explain_hop, explain_op, per_token_at_twice, placed_ops
    from plait.cost_models.profiles import default
    from plait.registry import out_of_tree
    from plait.spec import parse_targets

    step = _step(phase, batch, context)
    profiles, notes = default()
    cluster = cluster_for(parse_targets(target), backends=out_of_tree(), profiles=profiles)
    device = cluster.devices[0]
    screen = Screen(as_json=as_json)
    for note in notes:
        screen.note(note)
    profile = _profile(model, config, dtype, context)
    words = _command(model, target, phase, batch, context, dtype, config)
    asked = {"model": profile.model, "target": target, "phase": phase, "batch": batch, "context": context}
    step_text = f"{phase}, {batch} requests of {context} tokens"
    if op == HOP:
        hop = explain_hop(profile, step, cluster)
        _show(screen, hop, step_text)
        screen.result({**asked, "ops": [_document(hop)], "next": None})
        return
    placed = placed_ops(profile, step)
    found = placed if op is None else chosen(placed, op)
    told = [explain_op(one, step, device, profile.dtype) for one in found]
    order = sorted(range(len(told)), key=lambda i: -told[i].time.seconds * told[i].count)
    told, found = [told[i] for i in order], [found[i] for i in order]
    if op is None or len(told) > 1:
        _show_all(screen, told, f"{device.id}, {profile.dtype}: {step_text}")
    following = f"{words} --op {shlex.quote(told[0].op)}"
    if op is not None:
        twice = per_token_at_twice(found[0], step, device, profile.dtype)
        _show(screen, told[0], step_text, [(twice.what, seconds_text(twice.seconds), _percent(twice.change))])
        following = _next(words, told[0], phase, batch)
    screen.next(following)
    screen.result({**asked, "dtype": profile.dtype, "ops": [_document(one) for one in told], "next": following})


def _step(phase: str, batch: int, context: int) -> Step:
    from plait.api import MOST_REQUESTS
    from plait.ir.facts import Step

    if phase not in get_args(Phase):
        known = get_args(Phase)
        why = "known: " + ", ".join(known)
        raise UsageError("phase-unknown", f"no phase {phase!r}", why=why, hint=did_you_mean(phase, known))
    if not 1 <= batch <= MOST_REQUESTS:
        raise UsageError("batch", f"cannot explain {batch} requests", why=f"it must be 1 to {MOST_REQUESTS:,}")
    if context < 1:
        raise UsageError("context", f"a context of {context} tokens", why="it must be 1 or more")
    return Step.decode(batch, context) if phase == "decode" else Step((context,) * batch, (context,) * batch, batch)


def _profile(model: Path, config: Path | None, dtype: str | None, context: int) -> ModelProfile:
    from dataclasses import replace

    from plait.cost_models.profile import profile
    from plait.errors import CheckpointError
    from plait.frontend.checkpoint import open_checkpoint
    from plait.frontend.lower import lower
    from plait.pull import pulled

    try:
        opened = open_checkpoint(model, config, dtype)
    except CheckpointError as err:
        raise pulled(err, model) from err.__cause__
    if context > opened.max_positions:
        why = f"{opened.name} has {opened.max_positions:,} positions"
        raise UsageError("context", f"a context of {context} tokens", why=why)
    return replace(profile(lower(opened.at(context), dtype), opened.max_positions), model=opened.name)


def _command(
    model: Path, target: str, phase: str, batch: int, context: int, dtype: str | None, config: Path | None
) -> str:
    words = ["plait", NAME, str(model), "--target", target, "--phase", phase]
    words += ["--batch", str(batch), "--context", str(context)]
    for name, value in (("--dtype", dtype), ("--config", config)):
        words += [] if value is None else [name, str(value)]
    return shlex.join(words)


def _next(words: str, told: OpExplained, phase: str, batch: int) -> str:
    """What says more: many more requests where few tokens share what is read; else the other phase."""
    if phase == "decode" and told.time.bound != "arithmetic":
        words = words.replace(f"--batch {batch}", f"--batch {batch * 8}")
    else:
        words = words.replace(f"--phase {phase}", f"--phase {'prefill' if phase == 'decode' else 'decode'}")
    return f"{words} --op {shlex.quote(told.op)}"


def _show_all(screen: Screen, told: list[OpExplained], title: str) -> None:
    from plait.cli.tables import table

    columns = ("op", "times", "flops", "bytes", "each", "together", "bound")
    rows = [
        (
            one.op,
            f"{one.count}",
            count_text(one.time.flops),
            bytes_text(one.time.bytes),
            seconds_text(one.time.seconds),
            seconds_text(one.time.seconds * one.count),
            _BOUND[one.time.bound].partition(":")[0],
        )
        for one in told[:_SHOWN]
    ]
    screen.show(table(columns, rows, right=columns[1:6], title=title))
    if more := told[_SHOWN:]:
        rest = sum(one.time.seconds * one.count for one in more)
        screen.note(f"{len(more)} more ops, together {seconds_text(rest)}; --json has them")


def _show(screen: Screen, told: OpExplained, step: str, more: list[tuple[str, str, str]] | None = None) -> None:
    from plait.cli.tables import facts, table

    time = told.time
    intensity = f", {time.flops / time.bytes:.3g} flops for each byte" if time.bytes else ""
    rows = [
        ("op", told.op + (f", {told.count} times in the model" if told.count > 1 else "")),
        ("on", f"{told.device}{f', {told.dtype}' if told.dtype else ''}: {step}"),
        ("does", f"{rate_text(time.flops, 'FLOP')}, moves {bytes_text(time.bytes)}{intensity}"),
        ("takes", f"{_range(time.seconds, time.low, time.high)}, {time.source}"),
        ("bound", _BOUND[time.bound]),
        ("made of", ", ".join(f"{seconds_text(value)} {name}" for name, value in time.terms.items() if value)),
        ("efficiency", f"{time.efficiency:.0%} of the nominal roofline"),
        ("assumed", ", ".join(told.assumed)),
    ]
    screen.show(facts(rows, title="explained"))
    columns = ("computed with", "value", "range", "source")
    screen.show(table(columns, [_reached(item) for item in told.reached], right=("value", "range")))
    turned = ("with", "takes", "change")
    changes = [(one.what, seconds_text(one.seconds), _percent(one.change)) for one in told.changes]
    screen.show(table(turned, [*changes, *(more or [])], right=turned[1:], title="what would change it most"))


def _reached(item: Reached) -> tuple[str, str, str, str]:
    def text(value: float) -> str:
        if item.unit == "s":
            return seconds_text(value)
        return rate_text(value, item.unit) if item.unit else f"{value:.0%}"

    ends = "" if item.low == item.high else f"{text(item.low)} to {text(item.high)}"
    return item.what, text(item.value), ends, item.source


def _range(value: float, low: float, high: float) -> str:
    return f"{seconds_text(value)} ({seconds_text(low)} to {seconds_text(high)})"


def _percent(change: float) -> str:
    return f"{change:+.1%}" if abs(change) > _LEAST else "none"


def _document(told: OpExplained) -> dict[str, Any]:
    from plait.spec import to_dict

    return {**to_dict(told), "assumed": list(told.assumed)}
