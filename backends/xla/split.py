"""Which chip of a tensor-parallel group holds what: read off the IR, with two sums over the group per block.

The products before attention and before an activation are split by rows (heads, columns of the gate), what follows is
local, and the product after it is split by columns: its partial sums are added over the group. Of a mixture of experts
each chip holds some whole experts. Everything else is the same on every chip: routers, latent rows and their KV, the
residual stream. Where there are fewer KV heads than chips, neighbours hold the same head. A norm over a whole split
width (OLMo 2's of q and k) is one more sum; norms of heads are local.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from xdsl.dialects.builtin import ModuleOp, TensorType
from xdsl.ir import Operation, SSAValue

from plait.backends.kernels.lowering import op_name, weight_name
from plait.errors import PlaitError, UnsupportedError
from plait.ir.module import ops
from plait.ir.ops import (
    AttentionOp,
    EmbedOp,
    ExpertsOp,
    GeluMulOp,
    GeluOp,
    HeadLinearOp,
    LatentAttentionOp,
    LayerNormOp,
    LinearOp,
    LinearsOp,
    LogitsOp,
    PlaitOp,
    RmsNormOp,
    RopeOp,
    ScaleOp,
    SiluMulOp,
    WeightOp,
)
from plait.ir.ops.base import number, tensor_type

#: The axis of the mesh over a group's chips.
AXIS = "tp"


@dataclass(frozen=True)
class Split:
    """What a chip holds of each weight, by name; all of it where nothing is said.

    Attributes:
        chips: how many there are.
        units: equal runs of rows that stay together: heads, experts, or single rows.
        columns: split by inputs; the product has to be summed.
        vocabulary: split by rows, padded until they divide.
    """

    chips: int = 1
    units: Mapping[str, int] = field(default_factory=dict)
    columns: frozenset[str] = frozenset()
    vocabulary: frozenset[str] = frozenset()

    def by_columns(self, name: str) -> bool:
        return name in self.columns

    def by_vocabulary(self, name: str) -> bool:
        return name in self.vocabulary

    def rows_per_chip(self, name: str, rows: int) -> int:
        """Rows that one chip holds, of `rows`."""
        if name in self.units:
            units = self.units[name]
            return rows // units * max(1, units // self.chips)
        return -(-rows // self.chips) if name in self.vocabulary else rows

    def rows(self, name: str, rows: int, chip: int) -> slice:
        """Which rows they are; of the vocabulary, the last chip's may be fewer."""
        count = self.rows_per_chip(name, rows)
        if name in self.units:
            first = chip * self.units[name] // self.chips * (rows // self.units[name])
            return slice(first, first + count)
        return slice(chip * count, min(rows, (chip + 1) * count)) if name in self.vocabulary else slice(0, rows)

    def axis(self, names: tuple[str, ...]) -> int | None:
        """The axis that is split of weights stacked in one array: 0 for rows, 1 for inputs. Where it is 0 for some,
        each chip has all of the others."""
        if any(name in self.units or name in self.vocabulary for name in names):
            return 0
        return 1 if names[0] in self.columns else None

    def kv_heads(self, heads: int) -> int:
        """KV heads that the group holds together: one a chip where there are fewer."""
        return max(heads, self.chips)


def split_module(module: ModuleOp, chips: int) -> Split:
    """How a slice is split over `chips` chips.

    Raises:
        UnsupportedError: `group-size`: heads or columns that do not divide; an op between split ones that needs whole
            rows.
    """
    if chips == 1:
        return Split()
    found = _Finder(chips)
    for op in ops(module):
        found.visit(op)
    return Split(chips, found.units, frozenset(found.columns), frozenset(found.vocabulary))


@dataclass
class _Finder:
    """The split so far, and which values are split, as ops come in order."""

    chips: int
    units: dict[str, int] = field(default_factory=dict)
    columns: set[str] = field(default_factory=set)
    vocabulary: set[str] = field(default_factory=set)
    parts: set[SSAValue] = field(default_factory=set)

    def visit(self, op: PlaitOp) -> None:
        activations = [x for x in op.operands if isinstance(x.type, TensorType) and not isinstance(x.owner, WeightOp)]
        split = tuple(value in self.parts for value in activations)
        if isinstance(op, EmbedOp | LogitsOp):
            self.vocabulary.add(weight_name(op, op.table if isinstance(op, EmbedOp) else op.weight))
        if isinstance(op, LinearOp | LinearsOp) and not any(split):
            self._rows(op)
        elif isinstance(op, LinearOp) and all(split):
            self.columns.add(weight_name(op, op.weight))
        elif isinstance(op, ExpertsOp) and not any(split):
            self._experts(op)
        elif split and split == _LOCAL.get(type(op), lambda op: None)(op):
            self.parts.update(op.results)
            self._local(op)
        elif any(split):
            raise _refuse(op, self.chips, "it needs whole rows, and its input is split")

    def _rows(self, op: LinearOp | LinearsOp) -> None:
        """Split the products that everybody who reads them can take apart."""
        for matrix, biases, product in _products(op):
            count = _units_wanted(product)
            if count is not None:
                self._check(op, product, count)
                self._hold(op, count, matrix, *biases)
                self.parts.add(product)

    def _experts(self, op: ExpertsOp) -> None:
        count = tensor_type(op.gate, "gate", 3).get_shape()[0]
        if count % self.chips:
            raise _refuse(op, self.chips, f"{count} experts do not divide over {self.chips} chips")
        self._hold(op, count, *op.stacks, *op.biases)

    def _local(self, op: PlaitOp) -> None:
        """The weights of an op whose inputs are split."""
        if isinstance(op, AttentionOp) and op.sinks is not None:
            self._hold(op, op.heads.value.data, op.sinks)
        if isinstance(op, HeadLinearOp):
            self._hold(op, op.sizes[0], op.weight)
        if isinstance(op, RmsNormOp | LayerNormOp):
            width, scales = tensor_type(op.x, "x", 2).get_shape()[1], tensor_type(op.weight, "it", 1).get_shape()[0]
            if width == scales:  # else it is a head's, the same for all
                wanted = _units_wanted(op.result)
                assert wanted is not None, "the product it norms was split by this"
                self._hold(op, wanted, *(value for value in op.operands if isinstance(value.owner, WeightOp)))

    def _hold(self, op: PlaitOp, units: int, *weights: SSAValue) -> None:
        self.units |= {weight_name(op, value): units for value in weights}

    def _check(self, op: PlaitOp, product: SSAValue, units: int) -> None:
        """Units divide over chips, or chips over KV heads."""
        if units % self.chips and not (_feeds_kv(product) and self.chips % units == 0):
            raise _refuse(op, self.chips, f"{units} heads or columns do not divide over {self.chips} chips")


#: What is done to each part of a width alike, so that its result is split as its input is.
_ALIKE = (RopeOp, ScaleOp, RmsNormOp, LayerNormOp)

#: Which inputs are split where an op's result is.
_LOCAL: dict[type[PlaitOp], Callable[[Any], tuple[bool, ...]]] = {
    **dict.fromkeys((*_ALIKE, GeluOp, HeadLinearOp), lambda op: (True,)),
    **dict.fromkeys((SiluMulOp, GeluMulOp), lambda op: (True, True)),
    AttentionOp: lambda op: (True, True, True),
    LatentAttentionOp: lambda op: (True, True, False, False),
}


def _products(op: LinearOp | LinearsOp) -> list[tuple[SSAValue, list[SSAValue], SSAValue]]:
    """Matrix, its bias if it has one, and product."""
    if isinstance(op, LinearsOp):
        return [
            (w, list(op.biases[i : i + 1]), y) for i, (w, y) in enumerate(zip(op.weights, op.products, strict=True))
        ]
    return [(op.weight, [] if op.bias is None else [op.bias], op.result)]


def _units_wanted(product: SSAValue) -> int | None:
    """The units that everybody who reads a product can take it apart by: heads of an attention (behind a norm or a
    rotation), columns of an activation; None where somebody needs it whole."""
    found = {_units_of(use.operation, use.index) for use in product.uses}
    return found.pop() if len(found) == 1 else None


def _units_of(reader: Operation, index: int) -> int | None:
    """The units by which an op can take an input apart."""
    if isinstance(reader, AttentionOp):
        return reader.heads.value.data if index == 0 else reader.kv_heads
    if isinstance(reader, LatentAttentionOp):
        return reader.heads.value.data if index < 2 else None
    if isinstance(reader, HeadLinearOp):
        return reader.sizes[0]
    if isinstance(reader, SiluMulOp | GeluMulOp | GeluOp):
        return tensor_type(reader.x, "x", 2).get_shape()[1]
    if isinstance(reader, _ALIKE):
        units = _units_wanted(reader.result)
        group = number(reader.group) if isinstance(reader, RmsNormOp | LayerNormOp) else None
        width = tensor_type(reader.x, "x", 2).get_shape()[1]
        return units if units is None or group is None or width // units % group == 0 else None
    return None


def _feeds_kv(product: SSAValue) -> bool:
    return any(
        (isinstance(use.operation, AttentionOp) and use.index > 0)
        or (isinstance(use.operation, _ALIKE) and _feeds_kv(use.operation.result))
        for use in product.uses
    )


def _refuse(op: Operation, chips: int, why: str) -> PlaitError:
    return UnsupportedError(
        "group-size", f"{op_name(op)} cannot be split over {chips} chips", why=why, hint="choose a smaller group"
    )
