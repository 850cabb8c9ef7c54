"""Times of a model's units on a device: the sums over their ops of what `op_time` says of each.

The low end of every estimate is no lower than the nominal roofline, which no device beats (Williams, Waterman,
Patterson 2009, "Roofline": the slower of arithmetic and traffic); the high end is what the fit's errors on unseen
groups allow, or `PESSIMISTIC` times the value where a backend has no measurements. A device with a profile of its own
(`profiles.py`) is timed by what was measured there, and its ranges are those of the measurements.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import exp

import numpy as np

from plait.cost_models.op_time import (
    KINDS,
    MATMUL,
    Shard,
    Speeds,
    Work,
    arithmetic_s,
    kind_of,
    op_row,
    seconds,
    smooth_max,
    traffic_s,
    unit_rows,
)
from plait.cost_models.profile import ModelProfile, OpFacts, UnitFacts
from plait.cost_models.profiled import MeasuredTimes, measured_times
from plait.cost_models.profiled import spread as repeats_spread
from plait.cost_models.profiles import of as profile_of
from plait.cost_models.speeds import DeviceSpeeds, Phase, device_speeds, spread
from plait.cost_models.tables import Floats
from plait.errors import UserError
from plait.ir.facts import Step
from plait.spec import Device, Estimate, Source, Workload

#: Assumed, where nothing was fitted. Published rooflines of large GPUs come out 1.7 to 3.4 times too fast on nominal
#: peaks; the achieved fractions take about half of that already.
PESSIMISTIC = 2.0


@dataclass(frozen=True)
class Rates:
    """What large products and streams reach, and what ops are timed with: what was `measured` of them, else `speeds`;
    without either all reach just that."""

    flops_per_s: float
    bytes_per_s: float
    speeds: DeviceSpeeds | None = None
    measured: MeasuredTimes | None = None


def rates(device: Device, dtype: str, *, nominal: bool = False) -> Rates:
    """What a device reaches in a dtype, or its nominal peaks.

    Raises:
        UserError: `device-dtype`, where the device has no peak for the dtype.
    """
    peak = device.peak_flops_per_s.get(dtype)
    if not peak:
        raise UserError(
            "device-dtype",
            f"{device.id} has no peak for {dtype}",
            why="it has " + ", ".join(device.peak_flops_per_s),
            hint=f"choose another dtype, or give peak_flops_per_s.{dtype} in cluster.yaml",
        )
    speeds = device_speeds(device, dtype, nominal=nominal)
    measured = None if nominal else measured_times(device, dtype)
    return Rates(speeds.flops[MATMUL], speeds.bytes[MATMUL], speeds, measured)


def prefill_steps(workload: Workload, max_step_tokens: int) -> tuple[Step, ...]:
    """One request's prompt in chunks; only the last asks for logits."""
    ends = [*range(max_step_tokens, workload.prompt_tokens, max_step_tokens), workload.prompt_tokens]
    starts = [0, *ends[:-1]]
    return tuple(
        Step((end - start,), (end,), int(end == workload.prompt_tokens))
        for start, end in zip(starts, ends, strict=True)
    )


def decode_step(workload: Workload) -> Step:
    """One token of every request in flight, each half way through its output."""
    return Step.decode(workload.concurrency, workload.prompt_tokens + (workload.output_tokens + 1) // 2)


def unit_s(facts: UnitFacts, steps: Sequence[Step], at: Rates) -> float:
    """Seconds of a unit over some steps, without overhead."""
    if at.measured is not None:
        return at.measured.unit(facts.ops, steps).seconds
    rows = [row for step in steps for row in unit_rows(facts, step)]
    if not rows:
        return 0.0
    work = Work.of(rows)
    return float(seconds(work, speeds_of(work, at)).sum())


def speeds_of(work: Work, at: Rates) -> Speeds:
    """The rates of each op by its kind."""
    known = at.speeds
    if known is None:
        return Speeds(at.flops_per_s, 0.0, at.bytes_per_s, at.bytes_per_s, 0.0, 0.0, 0, 64.0)
    flops, traffic = (np.array([table[kind] for kind in KINDS])[work.kind] for table in (known.flops, known.bytes))
    return Speeds(
        *(flops, known.idle_rows, traffic, known.kv_bytes),
        *(known.launch_s, known.expert_launch_s, known.units, known.overlap),
    )


def memory_bound(facts: UnitFacts, steps: Sequence[Step], at: Rates) -> bool:
    """Whether traffic, not arithmetic, takes most of a unit's time."""
    costs = [op.cost(step) for step in steps for op in facts.ops]
    return sum(c.bytes for c in costs) / at.bytes_per_s > sum(c.flops for c in costs) / at.flops_per_s


@dataclass(frozen=True)
class OpTime:
    """What one op costs in one step on one device.

    Attributes:
        low, high: the range of `seconds`; nothing is faster than `low`'s floor, the nominal roofline.
        bytes: that must move at least once.
        bound: what takes longest: `arithmetic`, `traffic`, or `launch`.
        efficiency: nominal roofline to `seconds`.
        terms: seconds of arithmetic, traffic and launches, which overlap in part.
    """

    seconds: float
    low: float
    high: float
    flops: float
    bytes: float
    bound: str
    efficiency: float
    source: Source
    terms: dict[str, float]


def op_time(op: OpFacts, step: Step, on: Device, dtype: str, *, kv_heads: int = 1) -> OpTime:
    """Raises UserError `device-dtype`."""
    at, best = rates(on, dtype), rates(on, dtype, nominal=True)
    work = Work.of([op_row(op, step, Shard(), kv_heads)])
    speeds = speeds_of(work, at)
    value, floor = (float(seconds(work, s)[0]) for s in (speeds, speeds_of(work, best)))
    found = None if at.measured is None else at.measured.op(op, step)
    value = value if found is None else found.seconds
    terms = {"arithmetic": float(arithmetic_s(work, speeds)[0]), "traffic": float(traffic_s(work, speeds)[0])}
    terms["launch"] = max(0.0, value - float(smooth_max(terms["arithmetic"], terms["traffic"], speeds.overlap)))
    cost = op.cost(step)
    range_ = estimate(value, floor, on, "prefill" if step.tokens > len(step.query_lens) else "decode")
    assert at.speeds is not None
    return OpTime(
        seconds=value,
        low=range_.low,
        high=range_.high,
        flops=cost.flops,
        bytes=cost.bytes,
        bound=max(terms, key=terms.__getitem__),
        efficiency=floor / value if value else 1.0,
        source=at.speeds.sources[kind_of(op.name)] if found is None else found.source,
        terms=terms,
    )


@dataclass(frozen=True, eq=False)
class UnitTimes:
    """Seconds of each unit (embedding, blocks, head) on one device, for the workload: its prompt, one decode step."""

    prefill_s: Floats
    decode_s: Floats
    prefill_overhead_s: float
    decode_overhead_s: float


def unit_times(
    model: ModelProfile, device: Device, workload: Workload, max_step_tokens: int, *, nominal: bool = False
) -> UnitTimes:
    """Cost every distinct unit once. Raises UserError `device-dtype`."""
    at = rates(device, model.dtype, nominal=nominal)
    prefill, decode = prefill_steps(workload, max_step_tokens), (decode_step(workload),)
    kinds = {unit.facts for unit in model.units}
    seconds = {facts: (unit_s(facts, prefill, at), unit_s(facts, decode, at)) for facts in kinds}
    both = np.array([seconds[unit.facts] for unit in model.units])

    def overhead_s(steps: Sequence[Step]) -> float:
        if nominal:
            return 0.0
        if at.measured is None:
            return device.step_overhead_s * len(steps)
        return sum(map(at.measured.overhead_s, steps))

    return UnitTimes(both[:, 0], both[:, 1], overhead_s(prefill), overhead_s(decode))


def estimate(value: float, low: float, device: Device | None = None, phase: Phase = "decode") -> Estimate:
    """A time with its range.

    Args:
        low: the nominal roofline's.
        device: whose fit gives the range; None for one without.
    """
    if device is not None and (known := profile_of(device)) is not None:
        repeats = repeats_spread(known)
        return Estimate(value, value * exp(-repeats), value * exp(repeats), "interpolated")
    factor = None if device is None else spread(device, phase)
    if factor is None:
        return Estimate(value, min(low, value), value * PESSIMISTIC, "roofline")
    return Estimate(value, min(value, max(low, value * exp(-factor))), value * exp(factor), "interpolated")
