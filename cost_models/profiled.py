"""Times of ops from a profile: interpolation in what was measured, nothing fitted.

Tables are called `op dtype`; their coordinates are

    linear      rows of the input, elements of the weight (those of `linears` together)
    logits      rows, elements of the weight
    decode      sequences with one new token each, bytes of KV each of them reads
    prefill     new tokens of one sequence, one more than the tokens before them; for `PREFILL_WIDTH` features of q
    any other   bytes of activations read and written

Between grid points the logarithm of the time is linear in the logarithms of the coordinates. Below the first point time
stays what it is there, since launching is what is left of it; beyond the last it grows with the work.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import product

from plait.cost_models.activations import gathered_tokens
from plait.cost_models.op_time import EXPERTS, kind_of
from plait.cost_models.profile import OpFacts
from plait.cost_models.profiles import Profile, Times, of
from plait.ir.facts import Step, visible_pairs
from plait.spec import Device, Source

LINEAR, LOGITS, DECODE, PREFILL = "linear", "logits", "decode", "prefill"

#: Features of q that prefill attention is measured with.
PREFILL_WIDTH = 512

#: Of the pages that profiles are measured with, and that plans have.
PAGE_TOKENS = 16

#: |log error| of times of whole steps on a quiet machine, most of them (`benchmarks/profile.py`).
INTERPOLATING = 0.15

#: What stands for ops that were not measured: they move activations, too.
_OTHER = "silu_mul"
_LIKE = {"gelu_mul": "silu_mul", "gelu": "silu_mul", "layer_norm": "rms_norm", "embed_positions": "embed"}

_PRODUCTS = frozenset({"linear", "linears", "latent_linear", "head_linear"})
_ATTENTIONS = frozenset({"attention", "latent_attention"})

_RANK: dict[Source, int] = {"measured": 0, "interpolated": 1, "roofline": 2, "assumed": 3}


@dataclass(frozen=True)
class Measure:
    """Seconds with the range that repeats had, and whether a point was met, lies between points or is like another."""

    seconds: float
    low: float
    high: float
    source: Source = "measured"

    def __add__(self, other: Measure) -> Measure:
        source = max(self.source, other.source, key=_RANK.__getitem__)
        return Measure(self.seconds + other.seconds, self.low + other.low, self.high + other.high, source)

    def times(self, factor: float) -> Measure:
        return Measure(self.seconds * factor, self.low * factor, self.high * factor, self.source)


NOTHING = Measure(0.0, 0.0, 0.0)


def look_up(times: Times, *at: float) -> Measure:
    """The time at a point."""
    weights, beyond, exact = [], 1.0, True
    for axis, value in zip(times.axes, at, strict=True):
        inside = min(max(value, axis[0]), axis[-1])
        beyond *= max(1.0, value / axis[-1])
        exact = exact and any(math.isclose(value, known, rel_tol=1e-3) for known in axis)
        weights.append(_between(axis, inside))
    middle, low, high = (_blend(times, weights, values) * beyond for values in (times.seconds, times.low, times.high))
    return Measure(middle, low, high, "measured" if exact else "interpolated")


def _between(axis: Sequence[float], value: float) -> tuple[tuple[int, float], ...]:
    """The neighbours of a value and how much each counts."""
    i = bisect_right(axis, value) - 1
    if i >= len(axis) - 1:
        return ((len(axis) - 1, 1.0),)
    part = math.log(value / axis[i]) / math.log(axis[i + 1] / axis[i])
    return ((i, 1 - part), (i + 1, part))


def _blend(times: Times, weights: Sequence[Sequence[tuple[int, float]]], values: Sequence[float]) -> float:
    total = 0.0
    for corner in product(*weights):
        index, share = 0, 1.0
        for (place, part), axis in zip(corner, times.axes, strict=True):
            index, share = index * len(axis) + place, share * part
        total += share * math.log(values[index])
    return math.exp(total)


@dataclass(frozen=True)
class MeasuredTimes:
    """A profile in one dtype. `slower` is what a device lacks of the machine that was measured."""

    profile: Profile
    dtype: str
    slower: float = 1.0

    def op(self, op: OpFacts, step: Step) -> Measure:
        """One op in one step; the engine's part with the logits, which a pipeline makes once."""
        name = op.name.removeprefix("plait.")
        if not step.tokens:
            return NOTHING
        if name == "logits":
            return self._logits(op, step).times(self.slower)
        if name in _ATTENTIONS:
            return self._attention(op, step).times(self.slower)
        if kind_of(op.name) == EXPERTS:
            return self._experts(op, step).times(self.slower)
        if name in _PRODUCTS and op.matrix is not None:
            elements = op.matrix.columns * op.matrix.inner
            return look_up(self._table(LINEAR), step.tokens, elements).times(self.slower)
        return self._moved(op, step, name).times(self.slower)

    def unit(self, ops: Sequence[OpFacts], steps: Sequence[Step]) -> Measure:
        """Ops of a unit; products of one input count as the one that they are compiled to."""
        return sum((self.op(op, step) for step in steps for op in together(ops)), NOTHING)

    def overhead_s(self, step: Step) -> float:
        """Of one slice in a step."""
        known = self.profile.overheads
        return known.slice_s + known.sequence_s * len(step.query_lens) + known.token_s * step.tokens

    def _table(self, name: str) -> Times:
        return self.profile.tables[f"{name} {self.dtype}"]

    def _logits(self, op: OpFacts, step: Step) -> Measure:
        known = self.profile.overheads
        engine = (known.engine_s + known.engine_sequence_s * len(step.query_lens)) / self.slower  # not the device's
        spent = Measure(engine, engine, engine)
        if not step.logit_rows or op.matrix is None:
            return spent
        return spent + look_up(self._table(LOGITS), step.logit_rows, op.matrix.columns * op.matrix.inner)

    def _moved(self, op: OpFacts, step: Step, name: str) -> Measure:
        known = next(
            (n for n in (name, _LIKE.get(name, ""), _OTHER) if f"{n} {self.dtype}" in self.profile.tables), None
        )
        assert known is not None, "profiles are read with every table"
        found = look_up(self._table(known), max(op.cost(step).activation_bytes, 1.0))
        return found if known == name else Measure(found.seconds, found.low, found.high, "assumed")

    def _experts(self, op: OpFacts, step: Step) -> Measure:
        """Each expert that is met: gate and up in one product, then down."""
        matrix, table = op.matrix, self._table(LINEAR)
        assert matrix is not None
        met = matrix.experts * (1 - (1 - matrix.chosen / matrix.experts) ** step.tokens)
        rows, elements = step.tokens * matrix.chosen / met, matrix.columns * matrix.inner
        each = look_up(table, rows, elements) + look_up(table, rows, elements / 2)
        moved = self._moved(op, step, _OTHER)
        total = each.times(met) + moved
        return Measure(total.seconds, total.low, total.high, "assumed")

    def _attention(self, op: OpFacts, step: Step) -> Measure:
        """Sequences with one token together, each other one by itself; the op's KV bytes and flops are split by what
        each sequence sees."""
        cost, total = op.cost(step), NOTHING
        lens = list(zip(step.query_lens, step.kv_lens, strict=True))
        single = [kv for query, kv in lens if query == 1]
        if single:
            read = (
                sum(gathered_tokens(kv, PAGE_TOKENS) for kv in single) if self.profile.backend == "cpu" else sum(single)
            )
            share = cost.kv_bytes * read / sum(step.kv_lens)
            total += look_up(self._table(DECODE), len(single), max(share / len(single), 1.0))
        pairs = sum(visible_pairs(query, kv, None) for query, kv in lens)
        for query, kv in lens:
            if query > 1:
                here = visible_pairs(query, kv, None)
                ratio = cost.flops * here / pairs / (4.0 * PREFILL_WIDTH * here)
                total += look_up(self._table(PREFILL), query, kv - query + 1).times(ratio)
        return total


def together(ops: Sequence[OpFacts]) -> list[OpFacts]:
    """The ops with products of one input in one, as `ir.passes.FuseLinearPass` has it."""
    out: dict[object, OpFacts] = {}
    for number, op in enumerate(ops):
        key = (op.name, op.input) if op.name == "plait.linear" and op.input is not None else number
        known = out.get(key)
        if known is None or known.matrix is None or op.matrix is None:
            out[key] = op
        else:
            out[key] = replace(known, matrix=replace(known.matrix, columns=known.matrix.columns + op.matrix.columns))
    return list(out.values())


def measured_times(device: Device, dtype: str) -> MeasuredTimes | None:
    """None where a device has no profile, or its profile not this dtype.

    Raises:
        UserError: the profile is not there any more, or damaged.
    """
    profile = of(device)
    if profile is None or dtype not in profile.dtypes:
        return None
    return MeasuredTimes(profile, dtype, peak_flops_per_s(profile, dtype) / device.peak_flops_per_s[dtype])


def spread(profile: Profile) -> float:
    """|log error| that a sum over ops is said to stay below: how far repeats lay from their medians, half of the points
    less, and no less than what interpolating between points costs."""
    ratios = sorted(
        max(math.log(value / low), math.log(high / value))
        for times in profile.tables.values()
        for low, value, high in zip(times.low, times.seconds, times.high, strict=True)
    )
    return max(INTERPOLATING, ratios[len(ratios) // 2])


def peak_flops_per_s(profile: Profile, dtype: str) -> float:
    """The best that any product reached."""
    times = profile.tables[f"{LINEAR} {dtype}"]
    work = (2 * rows * elements for rows, elements in product(*times.axes))
    return max(flops / seconds for flops, seconds in zip(work, times.seconds, strict=True))


_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}


def stream_bytes_per_s(profile: Profile) -> float:
    """The best rate that weights were read at."""
    return max(
        elements * _BYTES[dtype] / seconds
        for dtype in profile.dtypes
        for times in (profile.tables[f"{LINEAR} {dtype}"],)
        for (_, elements), seconds in zip(product(*times.axes), times.seconds, strict=True)
    )
