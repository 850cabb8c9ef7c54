"""Weights, and rows of tables: `plait.weight`, `plait.embed`, `plait.embed_positions`."""

from __future__ import annotations

from plait.backends.kernels.lowering import operand_dtype, weight_kind, weight_name
from plait.backends.kernels.torch_eager.table import LOWERING, Bind, Kernel, Slice
from plait.ir.ops import EmbedOp, EmbedPositionsOp, WeightOp


@LOWERING.emits(WeightOp, "symbol")
def _weight(op: WeightOp) -> Bind:
    """Its users read it by name, in the dtype they compute in."""
    weight_kind(op)
    return lambda where: lambda step: ()


@LOWERING.emits(EmbedOp)
def _embed(op: EmbedOp) -> Bind:
    name, dtype = weight_name(op, op.table), operand_dtype(op, op.result)

    def bind(where: Slice) -> Kernel:
        table = where.weight(name, dtype)
        return lambda step: table.index_select(0, step.tokens)

    return bind


@LOWERING.emits(EmbedPositionsOp)
def _embed_positions(op: EmbedPositionsOp) -> Bind:
    name, dtype = weight_name(op, op.table), operand_dtype(op, op.result)

    def bind(where: Slice) -> Kernel:
        table = where.weight(name, dtype)
        return lambda step: table.index_select(0, step.positions)

    return bind
