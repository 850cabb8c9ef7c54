"""Stage times from the cost model, kept so that a step costs a few look-ups.

A slice's ops fall into three by what their cost depends on, which is asked of them, not known by name: the new tokens
of the step, the rows of logits, the KV lengths. The first two are priced once for every number of tokens and of rows.
Attention is priced for rounded lengths (`Batch.lengths`), with the decodes at their mean: at most 1 % off where a layer
keeps every token; where windows cut some of the lengths and not others, the mean is an approximation.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, fields, replace
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


class UnitPrices:
    """Seconds of units on one kind of device, asked once for each length: what equal slices share.

    Args:
        price: of a unit in a step.
        overhead_s: of a slice in a step, beside its units; by the new tokens and the sequences.
    """

    def __init__(self, price: Price, overhead_s: Callable[[Step], float] = lambda step: 0.0) -> None:
        self._price, self.overhead_s, self._parts = price, overhead_s, dict[UnitFacts, _Parts]()
        self._known = dict[tuple[UnitFacts, Hashable], float]()

    def by_tokens(self, facts: UnitFacts, tokens: int) -> float:
        """Of the ops that depend on the new tokens alone."""
        return self._asked(self._parts_of(facts).by_tokens, tokens, lambda: Step((tokens,), (tokens,), 0))

    def by_rows(self, facts: UnitFacts, rows: int) -> float:
        """Of the ops that depend on the rows of logits; what they cost without any is in it."""
        step = Step((1,) * rows, (1,) * rows, rows) if rows else Step((1,), (1,), 0)
        return self._asked(self._parts_of(facts).by_rows, rows, lambda: step)

    def by_kv(self, facts: UnitFacts, lengths: Lengths, rows: int) -> float:
        """Of the ops that depend on KV lengths."""
        parts = self._parts_of(facts)
        if not parts.by_kv.ops:
            return 0.0
        seconds = self._known.get((parts.by_kv, lengths))
        if seconds is None:
            chunks, decodes, mean = lengths
            new = tuple(new for new, _ in chunks) + (1,) * decodes
            kv = tuple(max(chunk) for chunk in chunks) + (mean,) * decodes
            step = Step(new, kv, rows)
            fixed = replace(parts.by_kv, ops=tuple(op.at(step, len(chunks)) for op in parts.additive))
            seconds = self._known[parts.by_kv, lengths] = self._price(fixed, step)
        return seconds

    def _asked(self, part: UnitFacts, count: int, step: Callable[[], Step]) -> float:
        if not part.ops:
            return 0.0
        seconds = self._known.get((part, count))
        if seconds is None:
            seconds = self._known[part, count] = self._price(part, step())
        return seconds

    def _parts_of(self, facts: UnitFacts) -> _Parts:
        if facts not in self._parts:
            self._parts[facts] = _Parts.of(facts)
        return self._parts[facts]


@dataclass(frozen=True, eq=False)
class _Parts:
    """A unit by what its ops depend on."""

    by_tokens: UnitFacts
    by_rows: UnitFacts
    by_kv: UnitFacts
    additive: tuple[_Additive, ...]

    @classmethod
    def of(cls, facts: UnitFacts) -> _Parts:
        kinds: dict[str, list[OpFacts]] = {"tokens": [], "rows": [], "kv": []}
        for op in facts.ops:
            kinds["kv" if _reads_kv(op) else "rows" if _makes_rows(op) else "tokens"].append(op)
        by_tokens, by_rows, by_kv = (replace(facts, ops=tuple(ops)) for ops in kinds.values())
        return cls(by_tokens, by_rows, by_kv, tuple(map(_Additive, by_kv.ops)))


class OpTimes:
    """`StageTimes` of some units.

    Args:
        units: of the slice; equal ones are priced once.
        prices: of the slice's device; slices of equal devices share one.
    """

    def __init__(self, units: Sequence[UnitFacts], prices: UnitPrices) -> None:
        self._units, self._prices = tuple(Counter(units).items()), prices
        self._fixed = dict[tuple[int, int], float]()
        self._rows, self._kv = dict[int, float](), dict[Lengths, float]()

    def step_s(self, batch: Batch) -> float:
        tokens, rows, lengths = batch.tokens, batch.logit_rows, batch.lengths
        sequences = batch.decodes + len(batch.chunks)
        fixed = self._fixed.get((tokens, sequences))
        if fixed is None:
            new = (1,) * (sequences - 1) + (tokens - sequences + 1,)
            fixed = self._prices.overhead_s(Step(new, new, rows))
            fixed += sum(n * self._prices.by_tokens(unit, tokens) for unit, n in self._units)
            self._fixed[tokens, sequences] = fixed
        logits = self._rows.get(rows)
        if logits is None:
            logits = self._rows[rows] = sum(n * self._prices.by_rows(unit, rows) for unit, n in self._units)
        attention = self._kv.get(lengths)
        if attention is None:
            attention = sum(n * self._prices.by_kv(unit, lengths, rows) for unit, n in self._units)
            self._kv[lengths] = attention
        return fixed + logits + attention


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


def prices_of(model: ModelProfile, device: Device) -> UnitPrices:
    """What the cost model says of a device. Raises UserError `device-dtype`."""
    at = rates(device, model.dtype)

    def overhead_s(step: Step) -> float:
        return device.step_overhead_s if at.measured is None else at.measured.overhead_s(step)

    return UnitPrices(lambda facts, step: unit_s(facts, (step,), at), overhead_s)


def slice_times(model: ModelProfile, device: Device, start: int, end: int, prices: UnitPrices | None = None) -> OpTimes:
    """Of blocks [start, end) on a device; the embedding goes with the first, the head with the last.

    Args:
        prices: those of the device, to share them between slices.

    Raises:
        UserError: `device-dtype`.
    """
    units = list(model.units[start + 1 : end + 1])
    units += [model.embed] * (start == 0) + [model.head] * (end == len(model.blocks))
    return OpTimes([unit.facts for unit in units], prices or prices_of(model, device))
