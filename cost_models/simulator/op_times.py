"""Stage times from the cost model, kept so that a step costs a few look-ups.

A slice's ops fall into three by what their cost depends on, which is asked of them, not known by name: the new tokens
of the step, the rows of logits, the KV lengths. The first two are priced once for every number of tokens and of rows.
Attention is priced for rounded lengths (`Batch.lengths`), with the decodes at their mean: at most 1 % off where a layer
keeps every token; where windows cut some of the lengths and not others, the mean is an approximation.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import fields, replace
from functools import cache

from plait.cost_models.profile import ModelProfile, OpFacts, UnitFacts
from plait.cost_models.roofline import rates, unit_s
from plait.cost_models.simulator.batch import Batch, Lengths
from plait.ir.facts import Cost, Step
from plait.spec import Device

#: Seconds of a unit in a step.
Price = Callable[[UnitFacts, Step], float]

#: Lengths with nothing in common, so that ops show what they depend on.
_PROBE = Step((3, 5), (40, 60), 1)
_OTHER_KV = Step((3, 5), (400, 7000), 1)
_OTHER_ROWS = Step((3, 5), (40, 60), 8)
_COST = [field.name for field in fields(Cost)]


class OpTimes:
    """`StageTimes` of some units.

    Args:
        units: of the slice; equal ones are priced once.
        price: of a unit in a step.
        overhead_s: of every step, beside its ops.
    """

    def __init__(self, units: Sequence[UnitFacts], price: Price, overhead_s: float = 0.0) -> None:
        self._price, self._overhead_s = price, overhead_s
        counts = Counter(units)
        self._by_tokens = _part(counts, lambda op: not _reads_kv(op) and not _makes_rows(op))
        self._by_rows = _part(counts, lambda op: not _reads_kv(op) and _makes_rows(op))
        self._by_kv = [(unit, [_Additive(op) for op in unit.ops], count) for unit, count in _part(counts, _reads_kv)]
        self._tokens, self._rows, self._kv = dict[int, float](), dict[int, float](), dict[Lengths, float]()

    def step_s(self, batch: Batch) -> float:
        tokens, rows, lengths = batch.tokens, batch.logit_rows, batch.lengths
        fixed = self._tokens.get(tokens)
        if fixed is None:
            fixed = self._overhead_s + self._sum(self._by_tokens, Step((tokens,), (tokens,), 0))
            self._tokens[tokens] = fixed
        logits = self._rows.get(rows)
        if logits is None:
            logits = self._sum(self._by_rows, Step((1,) * rows, (1,) * rows, rows)) if rows else 0.0
            self._rows[rows] = logits
        attention = self._kv.get(lengths)
        if attention is None:
            attention = self._kv[lengths] = self._attention(lengths, rows)
        return fixed + logits + attention

    def _sum(self, units: list[tuple[UnitFacts, int]], step: Step) -> float:
        return sum(count * self._price(unit, step) for unit, count in units)

    def _attention(self, lengths: Lengths, rows: int) -> float:
        chunks, decodes, mean = lengths
        new = tuple(new for new, _ in chunks) + (1,) * decodes
        kv = tuple(max(chunk) for chunk in chunks) + (mean,) * decodes
        step, seconds = Step(new, kv, rows), 0.0
        for unit, ops, count in self._by_kv:
            fixed = replace(unit, ops=tuple(op.at(step, len(chunks)) for op in ops))
            seconds += count * self._price(fixed, step)
        return seconds


def _part(counts: Counter[UnitFacts], has: Callable[[OpFacts], bool]) -> list[tuple[UnitFacts, int]]:
    """Units with some of their ops only, where they have such, and how often each is there."""
    parts = [(replace(unit, ops=tuple(filter(has, unit.ops))), count) for unit, count in counts.items()]
    return [(unit, count) for unit, count in parts if unit.ops]


def _reads_kv(op: OpFacts) -> bool:
    return op.cost(_PROBE) != op.cost(_OTHER_KV)


def _makes_rows(op: OpFacts) -> bool:
    return op.cost(_PROBE) != op.cost(_OTHER_ROWS)


class _Additive:
    """An op whose cost in a step is the sum over its sequences, as attention's is, so that equal ones are asked once.
    One that is not (probed) is asked for the whole step."""

    def __init__(self, op: OpFacts) -> None:
        self._op = op
        self._one = cache(lambda new, kv: op.cost(Step((new,), (kv,), 0)))
        self._adds = all(
            self._close(op.cost(step), sum(map(self._one, step.query_lens, step.kv_lens), Cost()))
            for step in (_PROBE, _OTHER_KV)
        )

    def at(self, step: Step, chunks: int) -> OpFacts:
        """The op with its cost in a step of some chunks and then equal decodes."""
        decodes = len(step.query_lens) - chunks
        if not self._adds:
            return self._op
        total = sum(map(self._one, step.query_lens[:chunks], step.kv_lens[:chunks]), Cost())
        if decodes:
            one = self._one(1, step.kv_lens[-1])
            total = total + Cost(
                one.flops * decodes, one.weight_bytes, one.activation_bytes * decodes, one.kv_bytes * decodes
            )
        return replace(self._op, cost=lambda _: total)

    @staticmethod
    def _close(a: Cost, b: Cost) -> bool:
        return all(abs(getattr(a, f) - getattr(b, f)) <= 1e-9 * getattr(a, f) for f in _COST)


def slice_times(model: ModelProfile, device: Device, start: int, end: int) -> OpTimes:
    """Of blocks [start, end) on a device; the embedding goes with the first, the head with the last.

    Raises:
        UserError: `device-dtype`.
    """
    at = rates(device, model.dtype)
    units = list(model.units[start + 1 : end + 1])
    units += [model.embed] * (start == 0) + [model.head] * (end == len(model.blocks))
    return OpTimes(
        [unit.facts for unit in units], lambda facts, step: unit_s(facts, (step,), at), device.step_overhead_s
    )
