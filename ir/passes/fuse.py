"""Fusions: fewer, larger ops with the same meaning."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass

from xdsl.context import Context
from xdsl.dialects.builtin import ModuleOp
from xdsl.ir import Operation, SSAValue
from xdsl.passes import ModulePass
from xdsl.rewriter import InsertPoint, Rewriter

from plait.ir.module import main, ops
from plait.ir.ops import AddOp, AddRmsNormOp, LinearOp, LinearsOp, RmsNormOp, WeightOp
from plait.ir.ops.base import number


@dataclass(frozen=True)
class FuseLinearPass(ModulePass):
    """Linears of one block that share their input, all with or all without a bias, become one `plait.linears`: q, k, v;
    gate, up."""

    name = "fuse-linear"

    def apply(self, ctx: Context, op: ModuleOp) -> None:
        siblings: dict[tuple[SSAValue, int | None, bool], list[LinearOp]] = defaultdict(list)
        places = _places(op)
        for linear in ops(op):
            if isinstance(linear, LinearOp):
                siblings[linear.x, linear.block_index, linear.bias is not None].append(linear)
        for group in siblings.values():
            if len(group) > 1:
                self._fuse(group, places)

    @staticmethod
    def _fuse(group: list[LinearOp], places: dict[Operation, int]) -> None:
        first = group[0]
        biases = [linear.bias for linear in group if linear.bias is not None]
        for value in (*(linear.weight for linear in group), *biases):
            reference = value.owner
            assert isinstance(reference, WeightOp), "the verifier holds weights to plait.weight"
            if places[reference] > places[first]:  # it stands between the linears: bring it in front
                reference.detach()  # type: ignore[no-untyped-call]
                Rewriter.insert_op(reference, InsertPoint.before(first))
                places[reference] = places[first]
        fused = LinearsOp(first.x, [linear.weight for linear in group], biases, first.block_index)
        Rewriter.insert_op(fused, InsertPoint.before(first))
        for linear, product in zip(group, fused.products, strict=True):
            Rewriter.replace_op(linear, [], [product])


@dataclass(frozen=True)
class FuseAddNormPass(ModulePass):
    """A residual add and the norm that reads it become one `plait.add_rms_norm`; the sum stays a result of its own."""

    name = "fuse-add-norm"

    def apply(self, ctx: Context, op: ModuleOp) -> None:
        places = _places(op)
        for norm in list(ops(op)):
            add = norm.x.owner if isinstance(norm, RmsNormOp) else None
            if not isinstance(norm, RmsNormOp) or norm.group is not None or not isinstance(add, AddOp):
                continue
            if any(places[use.operation] < places[norm] for use in add.result.uses):
                continue  # somebody needs the sum before the norm's place
            offset = number(norm.offset)
            fused = AddRmsNormOp(add.x, add.y, norm.weight, norm.eps.value.data, norm.block_index, offset=offset)
            Rewriter.insert_op(fused, InsertPoint.before(norm))
            places[fused] = places[norm]
            Rewriter.replace_op(norm, [], [fused.normed])
            Rewriter.replace_op(add, [], [fused.sum])


def _places(module: ModuleOp) -> dict[Operation, int]:
    """Where each op stands: asking xDSL which of two ops comes first walks the block."""
    return {op: place for place, op in enumerate(main(module).body.block.ops)}
