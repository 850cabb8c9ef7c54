"""Fusions: fewer, larger ops with the same meaning."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass

from xdsl.context import Context
from xdsl.dialects.builtin import ModuleOp
from xdsl.ir import SSAValue
from xdsl.passes import ModulePass
from xdsl.rewriter import InsertPoint, Rewriter

from plait.ir.module import main, ops
from plait.ir.ops import AddOp, AddRmsNormOp, LinearOp, LinearsOp, RmsNormOp, WeightOp


@dataclass(frozen=True)
class FuseLinearPass(ModulePass):
    """Linears that share their input, all with or all without a bias, become one `plait.linears`: q, k, v; gate, up."""

    name = "fuse-linear"

    def apply(self, ctx: Context, op: ModuleOp) -> None:
        siblings: dict[tuple[SSAValue, bool], list[LinearOp]] = defaultdict(list)
        for linear in ops(op):
            if isinstance(linear, LinearOp):
                siblings[linear.x, linear.bias is not None].append(linear)
        for group in siblings.values():
            if len(group) > 1:
                self._fuse(group)

    @staticmethod
    def _fuse(group: list[LinearOp]) -> None:
        first = group[0]
        for linear in group:  # weights may stand between the linears: bring them in front
            for value in (linear.weight, linear.bias):
                owner = value.owner if value is not None else None
                if isinstance(owner, WeightOp) and not owner.is_before_in_block(first):
                    owner.detach()  # type: ignore[no-untyped-call]
                    Rewriter.insert_op(owner, InsertPoint.before(first))
        biases = [linear.bias for linear in group if linear.bias is not None]
        fused = LinearsOp(first.x, [linear.weight for linear in group], biases, first.block_index)
        Rewriter.insert_op(fused, InsertPoint.before(first))
        for linear, product in zip(group, fused.products, strict=True):
            Rewriter.replace_op(linear, [], [product])


@dataclass(frozen=True)
class FuseAddNormPass(ModulePass):
    """A residual add and the norm that reads it become one `plait.add_rms_norm`; the sum stays a result of its own."""

    name = "fuse-add-norm"

    def apply(self, ctx: Context, op: ModuleOp) -> None:
        for norm in list(ops(op)):
            if not isinstance(norm, RmsNormOp):
                continue
            add = norm.x.owner
            if not isinstance(add, AddOp) or add.parent is not main(op).body.block:
                continue
            between = [use.operation for use in add.result.uses if use.operation is not norm]
            if any(user.is_before_in_block(norm) for user in between):
                continue  # somebody needs the sum before the norm's place
            fused = AddRmsNormOp(add.x, add.y, norm.weight, norm.eps.value.data, norm.block_index)
            Rewriter.insert_op(fused, InsertPoint.before(norm))
            Rewriter.replace_op(norm, [], [fused.normed])
            Rewriter.replace_op(add, [], [fused.sum])
