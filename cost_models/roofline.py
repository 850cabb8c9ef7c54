"""Time of an op: the slower of its arithmetic and its traffic (Williams, Waterman, Patterson 2009, "Roofline").

    seconds = max(flops / (peak * achieved), bytes / (bandwidth * achieved))

summed over the ops of a slice, plus the overhead of a step. The low end of every estimate is the same with nominal
peaks and no overhead, which no device beats; the high end is `PESSIMISTIC` times the value.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from plait.cost_models.profile import ModelProfile, UnitFacts
from plait.cost_models.tables import Floats
from plait.errors import UserError
from plait.ir.facts import Step
from plait.spec import Device, Estimate, Workload

#: Assumed. Published rooflines of large GPUs come out 1.7 to 3.4 times too fast on nominal peaks; the achieved
#: fractions take about half of that already.
PESSIMISTIC = 2.0


@dataclass(frozen=True)
class Rates:
    flops_per_s: float
    bytes_per_s: float


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
    if nominal:
        return Rates(peak, device.bandwidth_bytes_per_s)
    return Rates(peak * device.achieved.get(dtype, 1.0), device.bandwidth_bytes_per_s * device.bandwidth_achieved)


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
    total = 0.0
    for step in steps:
        for op in facts.ops:
            cost = op.cost(step)
            total += max(cost.flops / at.flops_per_s, cost.bytes / at.bytes_per_s)
    return total


def memory_bound(facts: UnitFacts, steps: Sequence[Step], at: Rates) -> bool:
    """Whether traffic, not arithmetic, takes most of a unit's time."""
    costs = [op.cost(step) for step in steps for op in facts.ops]
    return sum(c.bytes for c in costs) / at.bytes_per_s > sum(c.flops for c in costs) / at.flops_per_s


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
    overhead = 0.0 if nominal else device.step_overhead_s
    return UnitTimes(both[:, 0], both[:, 1], overhead * len(prefill), overhead)


def estimate(value: float, low: float) -> Estimate:
    """A roofline estimate with its range."""
    return Estimate(value, min(low, value), value * PESSIMISTIC, "roofline")
