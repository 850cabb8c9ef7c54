"""The emitters of JAX: each op becomes functions that trace it.

`LOWERING.emit(op)` checks the op; what it returns is called while a program is traced: `trace.run(run, *values)`, where
the values are activations, and `run` holds weights, KV and the step's facts as traced arrays. It keeps to `jax.numpy`
on arrays, so neither a device nor weights are needed to check.

On a chip of a tensor-parallel group every array is the chip's own part (`split`), so the emitters read sizes off arrays
and not off ops; only a product over a split input, and the embedding, speak to the other chips.

Legend: B sequences, Q queries, T = B * Q tokens, L keys, N KV heads, G heads of each, D head_dim.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import TYPE_CHECKING, Any

from xdsl.ir import SSAValue

from plait.backends.kernels.lowering import (
    ROPE_TABLE,
    Lowering,
    attribute_dtype,
    operand_dtype,
    refuse,
    rope_of,
    weight_kind,
    weight_name,
)
from plait.backends.xla.attend import Facts, Heads
from plait.backends.xla.split import AXIS, Split
from plait.ir.ops import (
    AddOp,
    AddRmsNormOp,
    AttentionOp,
    EmbedOp,
    GeluMulOp,
    LinearOp,
    LinearsOp,
    LogitsOp,
    OpaqueOp,
    RmsNormOp,
    RopeOp,
    SiluMulOp,
    WeightOp,
)
from plait.ir.rope import Rope
from plait.ir.types import dtype_name

if TYPE_CHECKING:
    from jax import Array

Key = tuple[str, ...]
"""Weights by the names that are stacked in one array: rows of q, k and v behind one another."""


@dataclass(frozen=True)
class RopeTable:
    """A table that the step brings: [T, D / 2] cos and sin."""

    rope: Rope
    head_dim: int


@dataclass(frozen=True)
class Trace:
    """How one op is traced, and what it needs of the slice: stacked weights by name and rotary tables."""

    run: Callable[..., Any]
    weights: tuple[Key, ...] = ()
    table: RopeTable | None = None


@dataclass
class Run:
    """One program while it is traced.

    Attributes:
        weights: by the names that are stacked in it.
        attend: `attend.append_and_attend` or its like.
        pools: the KV of equal layers in one array, (layers * pages * page_tokens, ...); replaced when written.
        pool_of: the number of the pool by KV argument.
        layer: which of a pool's layers is traced; a traced number inside a scan.
        facts: the step's, see `buckets.Grid`.
        tables: cos and sin.
        logit_rows: [R] rows wanted, None for all.
        split: what a chip of a group holds of each weight.
    """

    weights: dict[Key, Array]
    attend: Callable[..., tuple[Array, Array]]
    pools: list[Array]
    pool_of: dict[SSAValue, int]
    layer: Array | int
    facts: Facts
    tables: dict[RopeTable, tuple[Array, Array]]
    logit_rows: Array | None
    split: Split


LOWERING: Lowering[tuple[Trace, ...]] = Lowering("jax")
"""An op is one trace, or two in a row: the second takes what the first made, and their results are the op's."""


def _rounded(y: Array, x: Array, dtype: str) -> Array:
    """A result y in the module's dtype, held as the operand x is: in that dtype, or in float32 on a CPU host.

    The bits so do not depend on where the model is cut; see `program.COMPILER_OPTIONS`.
    """
    return y.astype(dtype).astype(x.dtype)


def _dot(x: Array, weight: Array) -> Array:
    """x (T, in) times weight (out, in) transposed, in full float32 where the operands are."""
    import jax

    return jax.lax.dot_general(
        x, weight, (((1,), (1,)), ((), ())), precision="highest", preferred_element_type="float32"
    )


def _sum_over_group(y: Array) -> Array:
    import jax

    total: Array = jax.lax.psum(y, AXIS)  # type: ignore[no-untyped-call]
    return total


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
        return _sum_over_group(jnp.where(own[:, None], table[jnp.where(own, rows, 0)], 0))

    return (Trace(trace, ((name,),)),)


def _norm(x: Array, weight: Array, eps: float, dtype: str) -> Array:
    import jax
    import jax.numpy as jnp

    wide = x.astype(jnp.float32)
    scale = jax.lax.rsqrt(jnp.mean(jnp.square(wide), axis=-1, keepdims=True) + eps)
    return _rounded(wide * scale * weight.astype(jnp.float32), x, dtype)


@LOWERING.emits(RmsNormOp, "eps")
def _rms_norm(op: RmsNormOp) -> tuple[Trace, ...]:
    return _normed(op)


def _normed(op: RmsNormOp | AddRmsNormOp) -> tuple[Trace, ...]:
    key, eps, dtype = (weight_name(op, op.weight),), op.eps.value.data, operand_dtype(op, op.x)
    return (Trace(lambda run, x: _norm(x, run.weights[key], eps, dtype), (key,)),)


@LOWERING.emits(AddRmsNormOp, "eps")
def _add_rms_norm(op: AddRmsNormOp) -> tuple[Trace, ...]:
    """The sum ends a block and the norm begins the next one, so that blocks are alike: XLA fuses as it likes."""
    return (*_sum(op), *_normed(op))


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
        y = _dot(x, run.weights[matrix])
        if run.split.by_columns(matrix[0]):
            y = _sum_over_group(y)
        return _rounded(y + run.weights[offset] if offset else y, x, dtype)

    return trace, (matrix, offset) if offset else (matrix,)


@LOWERING.emits(RopeOp, "head_dim", *ROPE_TABLE)
def _rope(op: RopeOp) -> tuple[Trace, ...]:
    dtype = operand_dtype(op, op.x)
    head_dim = op.head_dim.value.data
    table = RopeTable(rope_of(op), head_dim)

    def trace(run: Run, x: Array) -> Array:
        import jax.numpy as jnp

        cos, sin = (side[:, None, :] for side in run.tables[table])
        a, b = jnp.split(x.reshape(x.shape[0], -1, head_dim).astype(jnp.float32), 2, axis=-1)
        turned = jnp.concatenate((a * cos - b * sin, b * cos + a * sin), axis=-1)
        return _rounded(turned.reshape(x.shape), x, dtype)

    return (Trace(trace, table=table),)


@LOWERING.emits(AttentionOp, "heads", "scale", "window", "softcap", "sinks")
def _attention(op: AttentionOp) -> tuple[Trace, ...]:
    dtype = operand_dtype(op, op.q)
    if not op.cache.is_fp8 and attribute_dtype(op, op.cache.dtype) != dtype:
        raise refuse(op, "KV dtype", op.cache.dtype, f"q is {dtype}; KV is stored in the same dtype or in FP8")
    sinks = () if op.sinks is None else (weight_name(op, op.sinks),)
    heads = Heads(
        head_dim=op.head_dim,
        scale=op.scale.value.data,
        window=op.window_tokens,
        softcap=None if op.softcap is None else op.softcap.value.data,
        code=dtype_name(op.cache.dtype) if op.cache.is_fp8 else None,
    )
    kv = op.kv

    def trace(run: Run, q: Array, k: Array, v: Array) -> Array:
        pool = run.pool_of[kv]
        sink = run.weights[sinks] if sinks else None
        run.pools[pool], out = run.attend(run.facts, heads, run.pools[pool], run.layer, q, k, v, sink, dtype)
        return _rounded(out, q, dtype)

    return (Trace(trace, (sinks,) if sinks else ()),)


@LOWERING.emits(SiluMulOp)
def _silu_mul(op: SiluMulOp) -> tuple[Trace, ...]:
    return (Trace(_gated(operand_dtype(op, op.x), "silu")),)


@LOWERING.emits(GeluMulOp, "approximate")
def _gelu_mul(op: GeluMulOp) -> tuple[Trace, ...]:
    return (Trace(_gated(operand_dtype(op, op.x), f"gelu-{op.approximate.data}")),)


def _gated(dtype: str, name: str) -> Callable[[Run, Array, Array], Array]:
    def trace(run: Run, gate: Array, up: Array) -> Array:
        import jax
        import jax.numpy as jnp

        gates: dict[str, Callable[[Array], Array]] = {
            "silu": lambda z: z * jax.nn.sigmoid(z),
            "gelu-none": lambda z: jax.nn.gelu(z, approximate=False),
            "gelu-tanh": lambda z: jax.nn.gelu(z, approximate=True),
        }
        return _rounded(gates[name](gate.astype(jnp.float32)) * up.astype(jnp.float32), gate, dtype)

    return trace


@LOWERING.emits(AddOp)
def _add(op: AddOp) -> tuple[Trace, ...]:
    return _sum(op)


def _sum(op: AddOp | AddRmsNormOp) -> tuple[Trace, ...]:
    dtype = operand_dtype(op, op.x)
    return (Trace(lambda run, x, y: _rounded(x + y, x, dtype)),)


@LOWERING.emits(LogitsOp)
def _logits(op: LogitsOp) -> tuple[Trace, ...]:
    key = (weight_name(op, op.weight),)
    operand_dtype(op, op.x)

    def trace(run: Run, x: Array) -> Array:
        import jax
        import jax.numpy as jnp

        rows = x if run.logit_rows is None else x[run.logit_rows]
        # One row alone would be no matrix product on a TPU, and 2.7 times as long as eight.
        padded = jnp.pad(rows, ((0, -len(rows) % 8), (0, 0)))
        scores: Array = jax.lax.optimization_barrier(_dot(padded, run.weights[key]))  # type: ignore[no-untyped-call]
        return scores[: len(rows)]

    return (Trace(trace, (key,)),)


@LOWERING.emits(OpaqueOp, "programs", "lengths", "flops", "vocabulary")
def _opaque(op: OpaqueOp) -> tuple[Trace, ...]:
    """A slice with this op is this op alone: `opaque.OpaqueSlice` runs it."""
    for weight in op.weights:
        weight_name(op, weight)
        operand_dtype(op, weight)
    return ()
