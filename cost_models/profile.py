"""A model as the planner sees it: what each unit costs and holds. Made from the IR once, then the IR is not needed.

Units are the embedding (everything before block 0), the blocks, and the head (everything after the last block). The
embedding always goes with block 0 and the head with the last block.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from math import prod
from typing import Any

from xdsl.dialects.builtin import ModuleOp, StringAttr, TensorType
from xdsl.ir import Attribute, SSAValue

from plait.cost_models.activations import Held, held
from plait.ir.facts import Cost, Step
from plait.ir.module import block_count, ops
from plait.ir.ops import (
    CACHING,
    SCORING,
    ExpertsOp,
    LinearOp,
    LinearsOp,
    LogitsOp,
    OpaqueOp,
    PlaitOp,
    WeightOp,
)
from plait.ir.quant import held_dtype
from plait.ir.types import Quant, dtype_bytes, dtype_name, tensor_bytes
from plait.spec import ring_pages

#: Of one element; what is computed in has more.
FP8_BYTES = 1


@dataclass(frozen=True)
class Matrix:
    """The weights of a product: `columns` outputs from `inner` inputs; of a stack, those of one of its `experts`, of
    which each token meets `chosen`."""

    columns: int
    inner: int
    experts: int = 1
    chosen: int = 1


@dataclass(frozen=True, eq=False)
class OpFacts:
    """One op: its name (`plait.linear`), and its flops and bytes in a step; where it is a product its `matrix`, and a
    number that products of the same `input` share."""

    name: str
    cost: Callable[[Step], Cost]
    matrix: Matrix | None = None
    input: int | None = None


@dataclass(frozen=True)
class KVFacts:
    """The KV of one attention."""

    kv_heads: int
    head_dim: int
    dtype_bytes: int
    window: int | None = None
    sides: int = 2
    """K and V, or K alone, which holds the values too."""

    @property
    def bytes_per_token(self) -> int:
        return self.sides * self.kv_heads * self.head_dim * self.dtype_bytes

    @property
    def is_fp8(self) -> bool:
        return self.dtype_bytes == FP8_BYTES

    def pages(self, tokens: int, page_tokens: int, max_step_tokens: int) -> int:
        """Pages one request of `tokens` tokens holds: all of them, or the ring of a window."""
        every = -(-tokens // page_tokens)
        return every if self.window is None else min(every, ring_pages(self.window, page_tokens, max_step_tokens))


@dataclass(frozen=True, eq=False)
class UnitFacts:
    """What equal units share; compared by identity, so that equal blocks are costed once.

    `activation_bytes_per_token` is the sum of all results of its ops: an upper bound that counts on no reuse; `held` is
    what stands at each op.
    """

    ops: tuple[OpFacts, ...]
    kv: tuple[KVFacts, ...]
    activation_bytes_per_token: int
    held: tuple[Held, ...] = ()


@dataclass(frozen=True)
class QuantisedWeight:
    """A weight that is stored quantised.

    Attributes:
        more_bytes: than it is stored in, where it is held in the dtype that is computed in.
        kind: its element type.
        readers: names of the unit's ops that take it.
    """

    name: str
    more_bytes: int
    kind: Attribute
    readers: frozenset[str]


@dataclass(frozen=True)
class Unit:
    """`weights` are (name, bytes) of the tensors it uses; a name in two units is one tensor (a tied embedding).
    `quantised` are those that are stored quantised."""

    facts: UnitFacts
    weights: tuple[tuple[str, int], ...]
    quantised: tuple[QuantisedWeight, ...] = ()

    @property
    def weight_bytes(self) -> int:
        return sum(size for _, size in self.weights)


@dataclass(frozen=True)
class ModelProfile:
    """Attributes:
    boundary_bytes_per_token: what crosses each cut, for cuts 1 .. blocks - 1.
    logits_bytes_per_row: the float32 scores of one row.
    max_positions: positions the model was made for, where known.
    """

    model: str
    dtype: str
    embed: Unit
    blocks: tuple[Unit, ...]
    head: Unit
    boundary_bytes_per_token: tuple[int, ...]
    logits_bytes_per_row: int
    max_positions: int | None = None

    @property
    def units(self) -> tuple[Unit, ...]:
        """The embedding, the blocks, the head."""
        return (self.embed, *self.blocks, self.head)

    @property
    def weight_bytes(self) -> int:
        """Each tensor once."""
        return sum(dict(weight for unit in self.units for weight in unit.weights).values())


def profile(module: ModuleOp, max_positions: int | None = None) -> ModelProfile:
    """Read the IR. O(ops); equal blocks share one `UnitFacts`."""
    count = block_count(module)
    assert count > 0, "a model has blocks"
    members: list[list[PlaitOp]] = [[] for _ in range(count + 2)]
    number: dict[PlaitOp, int] = {}
    for op, unit in _numbered(module, count):
        members[unit].append(op)
        number[op] = unit
    weights = _weights(module, number, count + 2)
    through = _through(number, count + 2)
    shared: dict[Any, UnitFacts] = {}
    units: list[Unit] = []
    for group, (stored, more) in zip(members, weights, strict=True):
        kind = _kind(group), through[len(units)]
        if kind not in shared:
            shared[kind] = _facts(group, number, through[len(units)])
        units.append(Unit(shared[kind], stored, more))
    scores = next(op for op in ops(module) if isinstance(op, SCORING))
    name = module.attributes["plait.model"]
    assert isinstance(name, StringAttr)
    return ModelProfile(
        model=name.data,
        dtype=_dtype(scores),
        embed=units[0],
        blocks=tuple(units[1:-1]),
        head=units[-1],
        boundary_bytes_per_token=_boundaries(number, count),
        logits_bytes_per_row=_bytes(scores.result.type),
        max_positions=max_positions,
    )


def _dtype(scores: LogitsOp | OpaqueOp) -> str:
    """What the model computes in: the dtype before the head, or of most of an opaque program's weights."""
    if isinstance(scores, OpaqueOp):
        return scores.dtype
    kind = scores.x.type
    assert isinstance(kind, TensorType)
    return dtype_name(kind.element_type)


def at_element_bytes(model: ModelProfile, ratio: float, dtype: str) -> ModelProfile:
    """The same model in another dtype, for memory questions only: sizes change by `ratio`, costs and FP8 KV do not."""
    shared: dict[UnitFacts, UnitFacts] = {}

    def scaled(unit: Unit) -> Unit:
        facts = shared.get(unit.facts)
        if facts is None:
            facts = shared[unit.facts] = replace(
                unit.facts,
                kv=tuple(
                    kv if kv.is_fp8 else replace(kv, dtype_bytes=int(kv.dtype_bytes * ratio)) for kv in unit.facts.kv
                ),
                activation_bytes_per_token=int(unit.facts.activation_bytes_per_token * ratio),
                held=tuple(
                    replace(
                        op,
                        alive=int(op.alive * ratio),
                        results=int(op.results * ratio),
                        element=int(op.element * ratio),
                    )
                    for op in unit.facts.held
                ),
            )
        # What is quantised stays as it is stored; where it is dequantised, that changes.
        stored, names = dict(unit.weights), {weight.name for weight in unit.quantised}
        return Unit(
            facts,
            tuple((name, size if name in names else int(size * ratio)) for name, size in unit.weights),
            tuple(
                replace(weight, more_bytes=int((size + weight.more_bytes) * ratio) - size)
                for weight in unit.quantised
                for size in (stored[weight.name],)
            ),
        )

    return replace(
        model,
        dtype=dtype,
        embed=scaled(model.embed),
        blocks=tuple(scaled(unit) for unit in model.blocks),
        head=scaled(model.head),
        boundary_bytes_per_token=tuple(int(size * ratio) for size in model.boundary_bytes_per_token),
    )


def with_fp8_kv(model: ModelProfile) -> ModelProfile:
    """The same model with KV in FP8, for memory questions only: costs do not change."""
    shared: dict[UnitFacts, UnitFacts] = {}

    def stored(unit: Unit) -> Unit:
        if unit.facts not in shared:
            shared[unit.facts] = replace(
                unit.facts, kv=tuple(replace(kv, dtype_bytes=FP8_BYTES) for kv in unit.facts.kv)
            )
        return replace(unit, facts=shared[unit.facts])

    return replace(model, blocks=tuple(stored(unit) for unit in model.blocks))


def _numbered(module: ModuleOp, count: int) -> Iterator[tuple[PlaitOp, int]]:
    """Every op but weights with its unit: 0 the embedding, 1 .. count the blocks, count + 1 the head."""
    inside = False
    for op in ops(module):
        if isinstance(op, WeightOp):
            continue
        inside = inside or op.block_index is not None
        yield op, op.block_index + 1 if op.block_index is not None else (count + 1 if inside else 0)


def _weights(
    module: ModuleOp, number: dict[PlaitOp, int], units: int
) -> list[tuple[tuple[tuple[str, int], ...], tuple[QuantisedWeight, ...]]]:
    """The tensors each unit uses, in the order of the module, and the quantised among them: `Unit`'s fields."""
    held: list[list[tuple[str, int]]] = [[] for _ in range(units)]
    quantised: list[list[QuantisedWeight]] = [[] for _ in range(units)]
    for op in ops(module):
        if not isinstance(op, WeightOp):
            continue
        name, kind = op.symbol.data, op.result.type
        size = _bytes(kind)
        assert isinstance(kind, TensorType)
        wide = prod(kind.get_shape()) * dtype_bytes(held_dtype(op)) - size
        users = [use.operation for use in op.result.uses if isinstance(use.operation, PlaitOp)]
        for unit in sorted({number[user] for user in users}):
            held[unit].append((name, size))
            if isinstance(kind.element_type, Quant):
                readers = frozenset(user.name for user in users if number[user] == unit)
                quantised[unit].append(QuantisedWeight(name, wide, kind.element_type, readers))
    return [(tuple(stored), tuple(beside)) for stored, beside in zip(held, quantised, strict=True)]


def _kind(group: list[PlaitOp]) -> Any:
    """What makes two units cost the same: ops, operand types and properties but the block's number."""
    return tuple(
        (op.name, op.operand_types, frozenset(item for item in op.properties.items() if item[0] != "block"))
        for op in group
    )


def _through(number: dict[PlaitOp, int], units: int) -> list[int]:
    """Bytes per token of values that pass each unit by: made before it, read after it, and not in it."""
    passing = [0] * units
    for op, unit in number.items():
        for result in op.results:
            readers = {number[use.operation] for use in result.uses if isinstance(use.operation, PlaitOp)}
            for between in range(unit + 1, max(readers, default=unit)):
                if between not in readers:
                    passing[between] += _bytes(result.type)
    return passing


def _facts(group: list[PlaitOp], unit_of: dict[PlaitOp, int], through: int) -> UnitFacts:
    results = [r.type for op in group if not isinstance(op, SCORING) for r in op.results]
    inputs: dict[tuple[SSAValue, bool], int] = {}

    def number(op: PlaitOp) -> int | None:
        return inputs.setdefault((op.x, op.bias is not None), len(inputs)) if isinstance(op, LinearOp) else None

    return UnitFacts(
        ops=tuple(OpFacts(op.name, op.cost, _matrix(op), number(op)) for op in group),
        kv=tuple(
            KVFacts(
                op.cache.kv_heads.data,
                op.cache.head_dim.data,
                dtype_bytes(op.cache.dtype),
                op.cache.window_tokens,
                1 if op.cache.is_latent else 2,
            )
            for op in group
            if isinstance(op, CACHING)
        ),
        activation_bytes_per_token=sum(_bytes(kind) for kind in results),
        held=held(group, unit_of, through),
    )


def _matrix(op: PlaitOp) -> Matrix | None:
    """The shape of a product's weights: of several on one input side by side, of experts gate and up."""
    if isinstance(op, LinearOp | LogitsOp):
        columns, inner = _shape(op.weight)
        return Matrix(columns, inner)
    if isinstance(op, LinearsOp):
        shapes = [_shape(weight) for weight in op.weights]
        return Matrix(sum(columns for columns, _ in shapes), shapes[0][1])
    if isinstance(op, ExpertsOp):
        experts, inner, hidden = _shape(op.gate)
        return Matrix(2 * inner, hidden, experts, op.experts_per_token.value.data)
    return None


def _shape(value: SSAValue) -> tuple[int, ...]:
    kind = value.type
    assert isinstance(kind, TensorType)
    return tuple(kind.get_shape())


def _boundaries(number: dict[PlaitOp, int], count: int) -> tuple[int, ...]:
    """Bytes per token that cross each cut 1 .. count - 1: values made before it and read after it."""
    crossing = [0] * (count + 1)
    for op, unit in number.items():
        born = min(max(unit - 1, 0), count - 1)
        for result in op.results:
            readers = [number[use.operation] for use in result.uses if isinstance(use.operation, PlaitOp)]
            last = min(max(readers, default=0) - 1, count - 1)
            for cut in range(born + 1, last + 1):
                crossing[cut] += _bytes(result.type)
    return tuple(crossing[1:count])


def _bytes(kind: Any) -> int:
    """Bytes of a static tensor, or of one row of one whose first dimension is the batch's tokens."""
    assert isinstance(kind, TensorType)
    return tensor_bytes(kind)
