"""Ops as steps, and runs of equal blocks among them.

Blocks are equal where their ops are, with every attribute and type, and where each reads of the one before what the
next reads of it. `plait.add_rms_norm` is two steps, a sum that ends a block and a norm that begins the next: so the
first block, which has no sum before it, is like the others.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import groupby

from xdsl.dialects.builtin import ModuleOp, TensorType
from xdsl.ir import SSAValue

from plait.backends.xla.emit import LOWERING
from plait.backends.xla.trace import Trace
from plait.ir import signature
from plait.ir.module import ops
from plait.ir.ops import AddOp, AddRmsNormOp, PlaitOp, RmsNormOp, WeightOp
from plait.ir.types import KVType

_LONGEST_PERIOD = 8
"""Blocks of the longest pattern that is looked for: five local layers and a global one make six."""


@dataclass(frozen=True)
class Step:
    """One trace with the values it reads and makes. `kind` is equal for equal ops with equal attributes and types."""

    trace: Trace
    operands: tuple[SSAValue, ...]
    results: tuple[SSAValue, ...]
    kv: tuple[SSAValue, ...]
    kind: tuple[object, ...]
    block: int | None


@dataclass(frozen=True)
class Segment:
    """Steps that run `repeats` times. From the second time on, `carried` values stand where `entering` ones stood; what
    the last time makes is known outside by `leaving`, in the same order."""

    steps: tuple[Step, ...]
    repeats: int = 1
    entering: tuple[SSAValue, ...] = ()
    carried: tuple[SSAValue, ...] = ()
    leaving: tuple[SSAValue, ...] = ()


def segments(module: ModuleOp, scan: bool) -> list[Segment]:
    """The module in order; without `scan` nothing is repeated."""
    steps, outputs = _steps(module), set(signature(module).outputs.values())
    blocks = [tuple(part) for _, part in groupby(steps, key=lambda step: step.block)]
    found: list[Segment] = []
    at = 0
    while at < len(blocks):
        best = Segment(blocks[at])
        taken = 1
        for period in range(1, _LONGEST_PERIOD + 1 if scan else 1):
            repeats = 1
            first = blocks[at : at + period]
            while [_kinds(b) for b in blocks[at + repeats * period :][:period]] == [_kinds(b) for b in first]:
                repeats += 1
            if len(first) == period and repeats > 1 and repeats * period > taken:
                inside = [step for block in blocks[at : at + repeats * period] for step in block]
                segment = _repeated(inside, repeats, steps, outputs)
                if segment is not None:
                    best, taken = segment, repeats * period
        found.append(best)
        at += taken
    return found


def _steps(module: ModuleOp) -> list[Step]:
    """The ops, each as its traces."""
    steps: list[Step] = []
    made_in: dict[SSAValue, int] = {}
    for op in ops(module):
        traces = LOWERING.emit(op)
        if isinstance(op, WeightOp):
            continue
        if isinstance(op, AddRmsNormOp):
            # The sum belongs to the block that made its terms, or to none: the first block so begins as others do.
            block = max((made_in[x] for x in (op.x, op.y) if x in made_in), default=None)
            new = [
                _step(op, AddOp.name, traces[0], (op.x, op.y), (op.sum,), block),
                _step(op, RmsNormOp.name, traces[1], (op.sum,), (op.normed,), op.block_index),
            ]
        else:
            (trace,) = traces
            new = [_step(op, op.name, trace, tuple(_tensors(op)), tuple(op.results), op.block_index)]
        steps += new
        made_in |= {value: step.block for step in new for value in step.results if step.block is not None}
    return steps


def _step(
    op: PlaitOp,
    name: str,
    trace: Trace,
    operands: tuple[SSAValue, ...],
    results: tuple[SSAValue, ...],
    block: int | None,
) -> Step:
    kv = tuple(value for value in op.operands if isinstance(value.type, KVType))
    attributes = {key: str(value) for key, value in op.properties.items() if key != "block" and name != AddOp.name}
    shapes = [str(value.type) for value in op.operands if isinstance(value.owner, WeightOp) and trace.arrays]
    types = [str(value.type) for value in (*operands, *results, *kv)]
    return Step(trace, operands, results, kv, (name, tuple(sorted(attributes.items())), *shapes, *types), block)


def _tensors(op: PlaitOp) -> list[SSAValue]:
    """The activations it reads."""
    return [v for v in op.operands if isinstance(v.type, TensorType) and not isinstance(v.owner, WeightOp)]


def _kinds(block: tuple[Step, ...]) -> list[tuple[object, ...]]:
    return [step.kind for step in block]


def _repeated(inside: list[Step], repeats: int, steps: list[Step], outputs: set[SSAValue]) -> Segment | None:
    """The steps as one repeated segment, or None where one repetition reads what the one before did not hand on."""
    size = len(inside) // repeats
    parts = [inside[i * size : (i + 1) * size] for i in range(repeats)]
    wiring = [_wiring(part) for part in parts]
    entering = [outer for _, outer in wiring]
    if any(inner != wiring[0][0] for inner, _ in wiring):
        return None
    places = []
    for before, values in zip(parts, entering[1:], strict=False):
        made = [value for step in before for value in step.results]
        if not set(values) <= set(made):
            return None
        places.append([made.index(value) for value in values])
    if any(place != places[0] for place in places):
        return None
    leaving = [[value for step in part for value in step.results] for part in parts]
    handed = [[made[place] for place in places[0]] for made in leaving]
    # Nobody outside may read anything but what the last repetition hands on.
    own = {id(step) for step in inside}
    outside = {value for step in steps if id(step) not in own for value in step.operands} | outputs
    hidden = {value for made in leaving for value in made} - set(handed[-1])
    keys = [key for step in inside for key in step.trace.arrays]
    if outside & hidden or len(set(keys)) != len(keys):
        return None
    return Segment(tuple(inside), repeats, tuple(entering[0]), tuple(handed[0]), tuple(handed[-1]))


def _wiring(part: list[Step]) -> tuple[list[object], list[SSAValue]]:
    """Where every operand of a repetition comes from, and what comes from outside, in the order of first use."""
    inner = {value: number for number, value in enumerate(v for step in part for v in step.results)}
    outer: dict[SSAValue, int] = {}
    found: list[object] = []
    for step in part:
        for value in step.operands:
            if value in inner:
                found.append(inner[value])
            else:
                found.append(("outer", outer.setdefault(value, len(outer))))
    return found, list(outer)
