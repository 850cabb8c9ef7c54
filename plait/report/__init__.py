"""report.html: the plan for people, in one file that needs nothing else. The same inputs give the same bytes."""

from __future__ import annotations

import functools
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from typing import Any

import jinja2

from plait.backends.targets import is_emulated
from plait.partitioner.report import COLUMNS, MemoryBar, idle_rows, memory_bars, range_text, summary_rows, table_rows
from plait.report.code import Code
from plait.spec import Cause, Device, Estimate, Link, Manifest, ManifestSlice, Plan, PlannedSlice
from plait.words import bytes_text, rate_text, seconds_text

#: What the source of a predicted number means.
SOURCES = {
    "measured": "timed on this kind of device",
    "interpolated": "between numbers that were timed",
    "roofline": "from peak, bandwidth and the fraction of them that is usually reached",
    "assumed": "a guess that nothing was measured for",
}

#: What `plait.ir.quantise.QuantError` counts, and what tables call it.
_ERRORS = {"rms": "rms", "worst": "worst", "output": "output", "output_rounded": "output uncalibrated"}

#: Parts narrower than this cannot be seen; their numbers stand below the bar.
_VISIBLE = 0.1


@dataclass(frozen=True)
class Part:
    """A piece of a memory bar: its share of the bar in per cent, and its number."""

    name: str
    share: float
    text: str


@dataclass(frozen=True)
class Bar:
    device: str
    capacity: str
    parts: tuple[Part, ...]


@dataclass(frozen=True)
class Row:
    """One slice: the cells of the plan's table, predictions with their ranges, where it runs, and why it is there."""

    cells: tuple[tuple[str, str], ...]
    predictions: tuple[tuple[str, str], ...]
    target: str
    runs_on: str
    emulated: bool
    cause: tuple[tuple[str, str], ...]


def quantized_weights(artifact: Path, folders: Iterable[str]) -> dict[str, dict[str, Any]]:
    """What the slices' reports say of each weight that compile quantised, by name."""
    reports = (json.loads((artifact / folder / "report.json").read_text("utf-8")) for folder in folders)
    return {name: facts for report in reports for name, facts in report.get("quantized", {}).items()}


def quantized_rows(weights: Mapping[str, Mapping[str, Any]]) -> tuple[list[str], list[list[str]]]:
    """Columns and rows of how far weights that compile quantised are from what they were, the largest error first.

    Args:
        weights: as `quantized_weights` returns them.
    """
    known = [name for name in _ERRORS if any(name in facts for facts in weights.values())]
    ranked = sorted(weights.items(), key=lambda item: -item[1]["rms"])
    rows = [
        [name, facts["format"].removeprefix("!plait.quant"), *(_percent(facts.get(column)) for column in known)]
        for name, facts in ranked
    ]
    return ["name", "format", *(_ERRORS[name] for name in known)], rows


def _percent(value: float | None) -> str:
    return "" if value is None else f"{value:.2%}"


def render_report(
    plan: Plan,
    manifest: Manifest,
    codes: Sequence[Code] = (),
    quantized: Mapping[str, Mapping[str, Any]] | None = None,
) -> str:
    """The HTML of an artifact's plan: table, memory, predictions, causes, idle devices, assumptions; with `codes`, one
    for each slice, the machine code too; with `quantized`, see `quantized_rows`, those weights' errors.

    Self-contained: no script, no address outside the file. Every text is escaped.
    """
    return _template().render(
        plan=plan,
        manifest=manifest,
        rows=[_row(*row) for row in zip(table_rows(plan), plan.slices, manifest.slices, strict=True)],
        emulated=[
            "+".join(planned.devices)
            for planned, made in zip(plan.slices, manifest.slices, strict=True)
            if is_emulated(made.runs_on)
        ],
        summary=summary_rows(plan),
        bars=[_bar(bar) for bar in memory_bars(plan)],
        idle=idle_rows(plan),
        cause=_cause(plan.cause),
        codes=codes,
        quantized=quantized_rows(quantized) if quantized else None,
        sources={name: SOURCES[name] for name in _sources(plan)},
        devices=[_device(device, plan.dtype) for device in plan.cluster.devices],
        links=_links(plan),
        workload=_workload(plan),
    )


@functools.cache
def _template() -> jinja2.Template:
    environment = jinja2.Environment(
        autoescape=True, undefined=jinja2.StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    return environment.from_string((files("plait") / "report.html.jinja").read_text("utf-8"))


def _row(cells: tuple[str, ...], planned: PlannedSlice, made: ManifestSlice) -> Row:
    named = tuple(zip(COLUMNS, cells, strict=True))[:-1]
    times = (
        ("prefill of one prompt", planned.prefill_s),
        ("one decode step", planned.decode_s),
        ("hop to the next slice", planned.hop_s),
    )
    predictions = tuple((name, range_text(found)) for name, found in times if found is not None)
    return Row(named, predictions, made.target, made.runs_on, is_emulated(made.runs_on), _cause(planned.cause))


def _cause(cause: Cause | None) -> tuple[tuple[str, str], ...]:
    if cause is None:
        return ()
    named = (("why", cause.why), ("number", cause.number), ("source", cause.source), ("runner-up", cause.runner_up))
    return tuple((name, text) for name, text in named if text)


def _bar(bar: MemoryBar) -> Bar:
    parts = []
    for name, size in bar.parts:
        share = 100 * max(size, 0) / bar.capacity_bytes
        parts.append(Part(name, round(share, 3) if share >= _VISIBLE else 0.0, bytes_text(size)))
    return Bar(bar.device, bytes_text(bar.capacity_bytes), tuple(parts))


def _sources(plan: Plan) -> list[str]:
    """The sources that predictions of this plan have, in the order of `SOURCES`."""
    used = {found.source for item in plan.slices for found in (item.prefill_s, item.decode_s, item.hop_s) if found}
    if plan.prediction is not None:
        whole: tuple[Estimate, ...] = (
            plan.prediction.ttft_s,
            plan.prediction.tpot_s,
            plan.prediction.output_tokens_per_s,
        )
        used |= {found.source for found in whole}
    return [name for name in SOURCES if name in used]


def _device(device: Device, dtype: str) -> dict[str, Any]:
    """What the planner took a device to be able to do."""
    peak, achieved = device.peak_flops_per_s.get(dtype), device.achieved.get(dtype)
    reached = "" if achieved is None else f", {achieved:.0%} of it reached"
    rate = rate_text(device.bandwidth_bytes_per_s, "B/s")
    facts = {
        "host": device.host,
        "memory": f"{bytes_text(device.memory_bytes)}, {bytes_text(device.reserve_bytes)} of it kept back",
        "bandwidth": f"{rate}, {device.bandwidth_achieved:.0%} of it reached",
        f"{dtype} peak": "none" if peak is None else rate_text(peak, "FLOP/s") + reached,
        "each step": seconds_text(device.step_overhead_s) if device.step_overhead_s else "",
        "numbers": device.confidence,
        "sources": ", ".join(device.sources),
    }
    return {"name": f"{device.id} ({device.backend}:{device.arch})", "facts": {k: v for k, v in facts.items() if v}}


def _links(plan: Plan) -> list[tuple[str, str]]:
    cluster = plan.cluster
    named = [(f"{link.a} to {link.b}", link) for link in cluster.links]
    rest = (("between other hosts", cluster.default_link), ("inside a host, without a peer link", cluster.local_link))
    return [(name, _link(link)) for name, link in (*named, *rest) if link is not None]


def _link(link: Link) -> str:
    source = f"; {link.source}" if link.source else ""
    return f"{link.kind}: {rate_text(link.bytes_per_s, 'B/s')}, {seconds_text(link.latency_s)} each{source}"


def _workload(plan: Plan) -> str:
    work = plan.workload
    limits = (("first token", work.max_ttft_s), ("each output token", work.max_tpot_s))
    within = "".join(f", {name} within {seconds_text(limit)}" for name, limit in limits if limit is not None)
    return (
        f"{work.name}: {work.concurrency} requests at once, {work.prompt_tokens} tokens in and {work.output_tokens} out"
        + within
    )
