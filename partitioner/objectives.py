"""From a problem to a placement: lexicographic objectives over the exact search, and the limits on TTFT and TPOT.

| objective | minimises, in this order |
| --- | --- |
| throughput | the busiest stage, the number of devices, minus the KV tokens of the tightest stage, the latency |
| latency | the latency of one request, the number of devices |
| capacity | minus the KV tokens of the tightest stage, the busiest stage, the number of devices, the latency |

A bottleneck is fixed by masking the slices that exceed it; the next criterion is searched among the rest, so every step
is exact. A limit on a sum (TTFT, TPOT) is met by bisecting the bottleneck over the values that slices have.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from plait.cost_models.tables import Floats
from plait.errors import UserError
from plait.partitioner.search import Counts, Mask, Placement, Space, Table
from plait.partitioner.tables import Measure, Tables

#: Relative slack that takes equal sums, added in another order, for equal.
EPS = 1e-9

#: What is fixed before the latency has the last word; `FIRST` is what an objective is about.
_CRITERIA = {"throughput": ("busy", "count", "kv"), "latency": (), "capacity": ("kv", "busy", "count")}
FIRST = {"throughput": "busy", "latency": "latency", "capacity": "kv"}


@dataclass(frozen=True, eq=False)
class Solution:
    """A placement and how it was found.

    Attributes:
        value: of the first criterion: seconds, or minus KV tokens.
        first: the table of the first criterion, for runner-ups (limits on sums left out of it).
        bound: the best value that was not ruled out; equal to `value` where the plan is proven best.
    """

    placement: Placement
    value: float
    first: Table
    bound: float

    @property
    def proven(self) -> bool:
        return self.bound >= self.value - abs(self.value) * EPS


@dataclass(frozen=True, eq=False)
class _Limits:
    """The sums that have a hard limit, each divided by it: a plan meets them where all are <= 1."""

    measures: tuple[Measure, ...]
    names: tuple[str, ...]

    @staticmethod
    def of(tables: Tables) -> _Limits:
        work = tables.problem.workload
        wanted = [("max_ttft_s", work.max_ttft_s, tables.prefill), ("max_tpot_s", work.max_tpot_s, tables.decode)]
        given = [(name, _scaled(measure, 1 / limit)) for name, limit, measure in wanted if limit is not None]
        return _Limits(tuple(m for _, m in given), tuple(n for n, _ in given))

    def met(self, placement: Placement) -> bool:
        return all(total(measure, placement) <= 1 + EPS for measure in self.measures)


def best(tables: Tables) -> Solution | None:
    """The best placement that fits, or None where nothing fits the memory.

    Raises:
        UserError: `plan-too-large`; `limits` where the workload's limits cannot be met, with the best that can.
    """
    counts = tuple(kind.count for kind in tables.kinds)
    space = Space.of(counts, tables.problem.blocks, [tables.prefill.hop, tables.decode.hop])
    space.check()
    limits = _Limits.of(tables)
    mask = Mask.of(space, tables.allowed & tables.fits)
    name = FIRST[tables.problem.objective]
    first = Table(mask, measure_of(tables, name), bottleneck=name != "latency")
    if not np.isfinite(first.best) and first.best > 0:
        return None
    search = _Search(tables, limits)
    search.require_limits(mask)
    placement, bound = search.lexicographic(mask, _CRITERIA[tables.problem.objective])
    value = total(measure_of(tables, name), placement, bottleneck=name != "latency")
    return Solution(placement, value, first, min(value, bound))


def total(measure: Measure, placement: Placement, *, bottleneck: bool = False) -> float:
    """A quantity of a placement: the sum, or the largest, over stages with the hop behind each."""
    following = [kind for kind, _, _ in placement[1:]]
    parts = [float(measure.stage[kind, start, end]) for kind, start, end in placement]
    for i, (following_kind, (kind, _, end)) in enumerate(zip(following, placement, strict=False)):
        parts[i] += float(measure.hop[kind, following_kind, end])
    return max(parts) if bottleneck else sum(parts)


@dataclass(frozen=True, eq=False)
class _Search:
    tables: Tables
    limits: _Limits

    def lexicographic(self, mask: Mask, names: tuple[str, ...]) -> tuple[Placement, float]:
        """Fix one criterion after the other; the last word is the latency, with the fewest devices that reach it.

        The second value: what the first criterion is proven not to beat."""
        most: int | None = None
        bounds: list[float] = []
        for name in names:
            if name == "count":
                most = self._fewest(mask)
                continue
            measure = measure_of(self.tables, name)
            limit, bound = self._bottleneck(mask, measure, most)
            mask = mask.within(measure, limit)
            bounds.append(bound)
        placement, bound = self._least_latency(mask, most)
        return placement, [*bounds, bound][0]

    def require_limits(self, mask: Mask) -> None:
        """Raises UserError `limits` where one limit alone cannot be met."""
        for name, measure in zip(self.limits.names, self.limits.measures, strict=True):
            best = Table(mask, measure, bottleneck=False).best
            if best > 1 + EPS:
                limit = getattr(self.tables.problem.workload, name)
                raise UserError(
                    "limits",
                    f"no plan meets {name} = {limit:.4g} s",
                    why=f"the fastest plan that fits takes {best * limit:.4g} s",
                    hint="raise the limit, lower the concurrency or the prompt, or add a faster device",
                )
        if self.limits.measures:
            self._required(mask)

    def _required(self, mask: Mask) -> None:
        placement, sure = self._feasible(mask, None)
        if placement is None:
            raise UserError(
                "limits" if sure else "limits-undecided",
                "no plan meets max_ttft_s and max_tpot_s together"
                if sure
                else "no plan was found that meets both limits",
                why="each can be met alone" if sure else "the search could neither find one nor rule it out",
                hint="raise one of the limits",
            )

    def _bottleneck(self, mask: Mask, measure: Measure, most: int | None) -> tuple[float, float]:
        """The smallest bottleneck of a plan found within the limits, and the smallest that is not ruled out."""
        best = Table(mask, measure, bottleneck=True, most=most).best
        slack = abs(best) * EPS if np.isfinite(best) else 0.0
        if not self.limits.measures:
            return best + slack, best + slack
        values = mask.costs(measure)
        values = values[values >= best - slack]
        low, high, possible = 0, len(values) - 1, 0
        while low < high:
            middle = (low + high) // 2
            found, sure = self._feasible(mask.within(measure, values[middle] + slack), most)
            if found is not None:
                high = middle
                continue
            low = middle + 1
            if sure:
                possible = low
        return float(values[low]) + slack, float(values[possible]) + slack

    def _fewest(self, mask: Mask) -> int:
        """The fewest devices that still reach what is fixed so far."""
        table = Table(mask, self.tables.latency, bottleneck=False)
        sizes = sorted({sum(s) for s, value in table.values.items() if np.isfinite(value)})
        return next(size for size in sizes if self._feasible(mask, size)[0] is not None)

    def _least_latency(self, mask: Mask, most: int | None) -> tuple[Placement, float]:
        """The least latency under the limits. TTFT and TPOT are the two sums that latency is made of, so the plans
        found by weighing them against each other hold the best one unless it lies inside their hull. The second value:
        the least latency without limits where they cost something."""
        table = Table(mask, self.tables.latency, bottleneck=False, most=most)
        placement = table.trace(_fewest_best(table))
        if self.limits.met(placement):
            return placement, table.best
        found, _ = self._feasible(mask, most)
        assert found is not None, "a plan within the limits was found before"
        best = found
        for plan in self._hull(mask, most):
            if self.limits.met(plan) and total(self.tables.latency, plan) < total(self.tables.latency, best):
                best = plan
        return best, table.best

    def _feasible(self, mask: Mask, most: int | None) -> tuple[Placement | None, bool]:
        """A plan that meets the limits, and whether the answer is certain.

        One limit is a shortest path. For two, any weights w and 1 - w bound both: where the least weighted sum exceeds
        1, no plan meets both.
        """
        if not self.limits.measures:
            return self._least(mask, self.tables.latency, most), True
        if len(self.limits.measures) == 1:
            plan = self._least(mask, self.limits.measures[0], most)
            return (plan if plan is not None and self.limits.met(plan) else None), True
        first, second = self.limits.measures
        low, high = 0.0, 1.0
        for step in range(26):
            weight = float(step) if step < 2 else (low + high) / 2
            mixed = _mix(first, weight, second, 1 - weight)
            plan = self._least(mask, mixed, most)
            if plan is None or total(mixed, plan) > 1 + EPS:
                return None, True
            if self.limits.met(plan):
                return plan, True
            if step >= 2:  # weigh the broken limit more
                low, high = (weight, high) if total(first, plan) > 1 else (low, weight)
        return None, False

    def _hull(self, mask: Mask, most: int | None) -> list[Placement]:
        found = (
            self._least(mask, _mix(self.tables.prefill, w, self.tables.decode, 1 - w), most)
            for w in np.linspace(0, 1, 17)
        )
        return [plan for plan in found if plan is not None]

    @staticmethod
    def _least(mask: Mask, measure: Measure, most: int | None) -> Placement | None:
        table = Table(mask, measure, bottleneck=False, most=most)
        return table.trace(_fewest_best(table)) if np.isfinite(table.best) else None


def _fewest_best(table: Table) -> Counts:
    """Among the sets that reach the best value, one with the fewest devices."""
    best = table.best
    slack = abs(best) * EPS
    return min((sum(s), s) for s, value in table.values.items() if value <= best + slack)[1]


def measure_of(tables: Tables, name: str) -> Measure:
    if name == "kv":
        return Measure(-tables.kv_tokens, np.zeros_like(tables.decode.hop))
    measure: Measure = getattr(tables, name)
    return measure


def _scaled(measure: Measure, factor: float) -> Measure:
    return Measure(measure.stage * factor, measure.hop * factor)


def _mix(a: Measure, wa: float, b: Measure, wb: float) -> Measure:
    def both(x: Floats, y: Floats) -> Floats:
        return wa * x + wb * y

    return Measure(both(a.stage, b.stage), both(a.hop, b.hop))
