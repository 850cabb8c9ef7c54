"""Stage times from the cost model, kept so that a step costs a few look-ups.

A slice's ops fall into three by what their cost depends on, which is asked of them, not known by name: the new tokens
of the step, the rows of logits, the KV lengths. The first two are priced once for every number of tokens and of rows.
Attention is priced for lengths rounded to 7 binary digits (6 for the tokens of a chunk, and for more than 64 decodes),
with the decodes at their mean length: 0.4 % off on average where a layer keeps every token; where windows cut some of
the lengths and not others, the mean is an approximation.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace

from plait.cost_models.profile import ModelProfile, OpFacts, UnitFacts
from plait.cost_models.roofline import rates, unit_s
from plait.cost_models.simulator.batch import Batch
from plait.ir.facts import Step
from plait.spec import Device

#: Seconds of a unit in a step.
Price = Callable[[UnitFacts, Step], float]

#: Lengths with nothing in common, so that ops show what they depend on.
_PROBE = Step((3, 5), (40, 60), 1)
_OTHER_KV = Step((3, 5), (400, 7000), 1)
_OTHER_ROWS = Step((3, 5), (40, 60), 8)

_KV_BITS, _TOKEN_BITS, _EXACT_DECODES = 7, 6, 64


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
        self._by_tokens = _Part(counts, price, lambda op: not _reads_kv(op) and not _makes_rows(op))
        self._by_rows = _Part(counts, price, lambda op: not _reads_kv(op) and _makes_rows(op))
        self._by_kv = _Part(counts, price, _reads_kv)
        self._tokens, self._rows, self._kv = dict[int, float](), dict[int, float](), dict[object, float]()

    def step_s(self, batch: Batch) -> float:
        tokens, rows = batch.tokens, batch.logit_rows
        fixed = self._tokens.get(tokens)
        if fixed is None:
            fixed = self._tokens[tokens] = self._overhead_s + self._by_tokens.seconds(Step((tokens,), (tokens,), 0))
        logits = self._rows.get(rows)
        if logits is None:
            logits = self._rows[rows] = self._by_rows.seconds(Step((1,) * rows, (1,) * rows, rows)) if rows else 0.0
        return fixed + logits + self._attention(batch)

    def _attention(self, batch: Batch) -> float:
        chunks, decodes = batch.chunks, batch.decodes
        mean = rounded(batch.decode_kv // decodes, _KV_BITS) if decodes else 0
        if chunks:
            chunks = tuple([(rounded(new, _TOKEN_BITS), rounded(kv, _KV_BITS)) for new, kv in chunks])
        counted = decodes if decodes <= _EXACT_DECODES else rounded(decodes, _TOKEN_BITS)
        key = (chunks, counted, mean)
        known = self._kv.get(key)
        if known is None:
            new, kv = ([chunk[i] for chunk in chunks] for i in (0, 1))
            lens = [max(pair) for pair in zip(new, kv, strict=True)]
            step = Step((*new, *(1,) * counted), (*lens, *(mean,) * counted), batch.logit_rows)
            known = self._kv[key] = self._by_kv.seconds(step)
        return known


class _Part:
    """Some ops of some units, and how often each unit is there."""

    def __init__(self, counts: Counter[UnitFacts], price: Price, has: Callable[[OpFacts], bool]) -> None:
        parts = [(replace(unit, ops=tuple(filter(has, unit.ops))), count) for unit, count in counts.items()]
        self._units, self._price = [(unit, count) for unit, count in parts if unit.ops], price

    def seconds(self, step: Step) -> float:
        return sum(count * self._price(unit, step) for unit, count in self._units)


def _reads_kv(op: OpFacts) -> bool:
    return op.cost(_PROBE) != op.cost(_OTHER_KV)


def _makes_rows(op: OpFacts) -> bool:
    return op.cost(_PROBE) != op.cost(_OTHER_ROWS)


def rounded(number: int, bits: int) -> int:
    """To the nearest whole number with so many significant binary digits."""
    shift = number.bit_length() - bits
    return number if shift <= 0 else (number + (1 << shift >> 1)) >> shift << shift


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
