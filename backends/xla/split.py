"""Which chip of a tensor-parallel group holds what: read off the IR, with two sums over the group per block.

The products before attention and before a gated unit are split by rows (heads, columns of the gate), what follows is
local, and the product after it is split by columns: its partial sums are added over the group. Everything else is the
same on every chip. Where there are fewer KV heads than chips, neighbours hold the same head.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from xdsl.dialects.builtin import ModuleOp, TensorType
from xdsl.ir import Operation, SSAValue

from plait.backends.kernels.lowering import op_name, weight_name
from plait.errors import PlaitError, UnsupportedError
from plait.ir.module import ops
from plait.ir.ops import (
    AttentionOp,
    EmbedOp,
    GeluMulOp,
    LinearOp,
    LinearsOp,
    LogitsOp,
    PlaitOp,
    RopeOp,
    SiluMulOp,
    WeightOp,
)

#: The axis of the mesh over a group's chips.
AXIS = "tp"


@dataclass(frozen=True)
class Split:
    """What a chip holds of each weight, by name; all of it where nothing is said.

    Attributes:
        chips: how many there are.
        units: equal runs of rows that stay together: heads, or single rows.
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

    def axis(self, name: str) -> int | None:
        """The axis of the weight that is split: 0 for rows, 1 for inputs."""
        if name in self.units or name in self.vocabulary:
            return 0
        return 1 if name in self.columns else None

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
    units: dict[str, int] = {}
    columns: set[str] = set()
    vocabulary: set[str] = set()
    parts: set[SSAValue] = set()
    for op in ops(module):
        activations = [x for x in op.operands if isinstance(x.type, TensorType) and not isinstance(x.owner, WeightOp)]
        split = [value in parts for value in activations]
        if isinstance(op, EmbedOp | LogitsOp):
            vocabulary.add(weight_name(op, op.table if isinstance(op, EmbedOp) else op.weight))
        if isinstance(op, LinearOp | LinearsOp) and not any(split):
            matrices, biases, products = _products(op)
            wanted = [_units_wanted(product) for product in products]
            for index, count in enumerate(wanted):
                if count is not None and None not in wanted:
                    _check(op, products[index], count, chips)
                    names = [weight_name(op, matrices[index]), *(weight_name(op, b) for b in biases[index : index + 1])]
                    units |= dict.fromkeys(names, count)
                    parts.add(products[index])
        elif isinstance(op, LinearOp) and all(split):
            columns.add(weight_name(op, op.weight))
        elif isinstance(op, RopeOp | AttentionOp | SiluMulOp | GeluMulOp) and all(split):
            parts.update(op.results)
            if isinstance(op, AttentionOp) and op.sinks is not None:
                units[weight_name(op, op.sinks)] = op.heads.value.data
        elif any(split):
            raise _refuse(op, chips, "it needs whole rows, and its input is split")
    return Split(chips, units, frozenset(columns), frozenset(vocabulary))


def _products(op: LinearOp | LinearsOp) -> tuple[list[SSAValue], list[SSAValue], list[SSAValue]]:
    if isinstance(op, LinearsOp):
        return list(op.weights), list(op.biases), list(op.products)
    return [op.weight], [] if op.bias is None else [op.bias], [op.result]


def _units_wanted(product: SSAValue) -> int | None:
    """The units that everybody who reads a product can take it apart by: heads of an attention (behind a rotation),
    columns of a gated unit; None where somebody needs it whole."""
    found = set()
    for use in product.uses:
        reader = use.operation
        if isinstance(reader, RopeOp):
            found.add(_units_wanted(reader.result))
        elif isinstance(reader, AttentionOp):
            found.add(reader.heads.value.data if use.index == 0 else reader.kv_heads)
        elif isinstance(reader, SiluMulOp | GeluMulOp):
            assert isinstance(product.type, TensorType)
            found.add(product.type.get_shape()[1])
        else:
            return None
    return found.pop() if len(found) == 1 else None


def _check(op: PlaitOp, product: SSAValue, units: int, chips: int) -> None:
    """Units divide over chips, or chips over KV heads."""
    if units % chips and not (_feeds_kv(product) and chips % units == 0):
        raise _refuse(op, chips, f"{units} heads or columns do not divide over {chips} chips")


def _feeds_kv(product: SSAValue) -> bool:
    return any(
        (isinstance(use.operation, AttentionOp) and use.index > 0)
        or (isinstance(use.operation, RopeOp) and _feeds_kv(use.operation.result))
        for use in product.uses
    )


def _refuse(op: Operation, chips: int, why: str) -> PlaitError:
    return UnsupportedError(
        "group-size", f"{op_name(op)} cannot be split over {chips} chips", why=why, hint="choose a smaller group"
    )
