"""The emitters of JAX, see `trace`: those of products, tables and positions stand here, the others in files of their
own."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import accumulate
from typing import TYPE_CHECKING

from plait.backends.kernels.lowering import ROPE_TABLE, operand_dtype, rope_of, weight_kind, weight_name
from plait.backends.xla import emit_attention, emit_elementwise, emit_experts, emit_norm
from plait.backends.xla.split import AXIS
from plait.backends.xla.trace import LOWERING, Key, RopeTable, Run, Trace, dot, rounded, sum_over_group
from plait.ir.ops import (
    EmbedOp,
    EmbedPositionsOp,
    LinearOp,
    LinearsOp,
    LogitsOp,
    OpaqueOp,
    RopeOp,
    WeightOp,
)
from plait.ir.ops.base import number, tensor_type

if TYPE_CHECKING:
    from jax import Array

__all__ = ["LOWERING", "emit_attention", "emit_elementwise", "emit_experts", "emit_norm"]


@LOWERING.emits(WeightOp, "symbol")
def _weight(op: WeightOp) -> tuple[Trace, ...]:
    weight_kind(op)
    return ()


@LOWERING.emits(EmbedOp)
def _embed(op: EmbedOp) -> tuple[Trace, ...]:
    name = weight_name(op, op.table)
    operand_dtype(op, op.result)

    def trace(run: Run) -> Array:
        import jax
        import jax.numpy as jnp

        table, tokens = run.weights[name,], run.facts.tokens
        if not run.split.by_vocabulary(name):
            return table[tokens]
        # One chip has the row, the others add zeros.
        rows = tokens - jax.lax.axis_index(AXIS) * table.shape[0]
        own = (rows >= 0) & (rows < table.shape[0])
        return sum_over_group(jnp.where(own[:, None], table[jnp.where(own, rows, 0)], 0))

    return (Trace(trace, ((name,),)),)


@LOWERING.emits(EmbedPositionsOp)
def _embed_positions(op: EmbedPositionsOp) -> tuple[Trace, ...]:
    """A position beyond the table is refused before a step runs: XLA would take the last row."""
    key = (weight_name(op, op.table),)
    operand_dtype(op, op.result)
    rows = tensor_type(op.table, "the table", 2).get_shape()[0]
    return (Trace(lambda run: run.weights[key][run.facts.positions], (key,), positions=rows),)


@LOWERING.emits(LinearOp)
def _linear(op: LinearOp) -> tuple[Trace, ...]:
    names, biases = [weight_name(op, op.weight)], [] if op.bias is None else [weight_name(op, op.bias)]
    product, keys = _product(names, biases, operand_dtype(op, op.x))
    return (Trace(product, keys),)


@LOWERING.emits(LinearsOp)
def _linears(op: LinearsOp) -> tuple[Trace, ...]:
    names, biases = [weight_name(op, w) for w in op.weights], [weight_name(op, b) for b in op.biases]
    product, keys = _product(names, biases, operand_dtype(op, op.x))
    widths = [kind.get_shape()[1] for kind in op.products.types]

    def trace(run: Run, x: Array) -> Sequence[Array]:
        import jax.numpy as jnp

        own = [run.split.rows_per_chip(name, width) for name, width in zip(names, widths, strict=True)]
        return jnp.split(product(run, x), list(accumulate(own))[:-1], axis=1)

    return (Trace(trace, keys),)


def _product(names: list[str], biases: list[str], dtype: str) -> tuple[Callable[[Run, Array], Array], tuple[Key, ...]]:
    matrix, offset = tuple(names), tuple(biases)

    def trace(run: Run, x: Array) -> Array:
        y = dot(x, run.weights[matrix])
        if run.split.by_columns(matrix[0]):
            y = sum_over_group(y)
        return rounded(y + run.weights[offset] if offset else y, x, dtype)

    return trace, (matrix, offset) if offset else (matrix,)


@LOWERING.emits(RopeOp, "head_dim", "rotary_dim", *ROPE_TABLE)
def _rope(op: RopeOp) -> tuple[Trace, ...]:
    dtype = operand_dtype(op, op.x)
    head_dim, rotated = op.head_dim.value.data, op.rotated
    table = RopeTable(rope_of(op), rotated)

    def trace(run: Run, x: Array) -> Array:
        import jax.numpy as jnp

        cos, sin = (side[:, None, :] for side in run.tables[table])
        heads = x.reshape(x.shape[0], -1, head_dim).astype(jnp.float32)
        a, b = jnp.split(heads[..., :rotated], 2, axis=-1)
        turned = jnp.concatenate((a * cos - b * sin, b * cos + a * sin, heads[..., rotated:]), axis=-1)
        return rounded(turned.reshape(x.shape), x, dtype)

    return (Trace(trace, table=table),)


@LOWERING.emits(LogitsOp, "scale", "softcap")
def _logits(op: LogitsOp) -> tuple[Trace, ...]:
    key = (weight_name(op, op.weight),)
    operand_dtype(op, op.x)
    scale, cap = number(op.scale), number(op.softcap)

    def trace(run: Run, x: Array) -> Array:
        import jax
        import jax.numpy as jnp

        rows = x if run.logit_rows is None else x[run.logit_rows]
        # One row alone would be no matrix product on a TPU, and 2.7 times as long as eight.
        padded = jnp.pad(rows, ((0, -len(rows) % 8), (0, 0)))
        scores: Array = jax.lax.optimization_barrier(dot(padded, run.weights[key]))  # type: ignore[no-untyped-call]
        scores = scores[: len(rows)]
        if scale is not None:
            scores = scale * scores
        return scores if cap is None else cap * jnp.tanh(scores / cap)

    return (Trace(trace, (key,)),)


@LOWERING.emits(OpaqueOp, "programs", "lengths", "flops", "vocabulary")
def _opaque(op: OpaqueOp) -> tuple[Trace, ...]:
    """A slice with this op is this op alone: `opaque.OpaqueSlice` runs it."""
    for weight in op.weights:
        weight_name(op, weight)
        operand_dtype(op, weight)
    return ()
