"""Emitters of attention, and of the matrices that each head has for itself."""

from __future__ import annotations

from typing import TYPE_CHECKING

from plait.backends.kernels.lowering import attribute_dtype, operand_dtype, refuse, weight_name
from plait.backends.xla.attend import Heads, append_and_attend_latent
from plait.backends.xla.trace import LOWERING, Run, Trace, rounded
from plait.ir.ops import AttentionOp, HeadLinearOp, LatentAttentionOp
from plait.ir.ops.base import number
from plait.ir.types import dtype_name

if TYPE_CHECKING:
    from jax import Array


@LOWERING.emits(AttentionOp, "heads", "scale", "window", "softcap", "sinks")
def _attention(op: AttentionOp) -> tuple[Trace, ...]:
    dtype = _kv_dtype(op, operand_dtype(op, op.q))
    sinks = () if op.sinks is None else (weight_name(op, op.sinks),)
    heads = Heads(
        head_dim=op.head_dim,
        scale=op.scale.value.data,
        window=op.window_tokens,
        softcap=number(op.softcap),
        code=dtype_name(op.cache.dtype) if op.cache.is_fp8 else None,
    )
    kv = op.kv

    def trace(run: Run, q: Array, k: Array, v: Array) -> Array:
        pool = run.pool_of[kv]
        sink = run.weights[sinks] if sinks else None
        run.pools[pool], out = run.attend(run.facts, heads, run.pools[pool], run.layer, q, k, v, sink, dtype)
        return rounded(out, q, dtype)

    return (Trace(trace, (sinks,) if sinks else ()),)


@LOWERING.emits(LatentAttentionOp, "heads", "scale")
def _latent_attention(op: LatentAttentionOp) -> tuple[Trace, ...]:
    dtype = _kv_dtype(op, operand_dtype(op, op.q_latent))
    heads = Heads(
        head_dim=op.cache.head_dim.data,
        scale=op.scale.value.data,
        window=None,
        softcap=None,
        code=dtype_name(op.cache.dtype) if op.cache.is_fp8 else None,
    )
    kv, widths = op.kv, op.widths

    def trace(run: Run, q_latent: Array, q_rope: Array, latent: Array, k_rope: Array) -> Array:
        import jax.numpy as jnp

        pool, count = run.pool_of[kv], len(latent)
        # A query is laid out as the keys are: a head's latent part, and its rotary part behind it.
        parts = [q.reshape(count, -1, width) for q, width in zip((q_latent, q_rope), widths, strict=True)]
        q, k = jnp.concatenate(parts, axis=2).reshape(count, -1), jnp.concatenate((latent, k_rope), axis=1)
        run.pools[pool], out = append_and_attend_latent(
            run.facts, heads, run.pools[pool], run.layer, q, k, widths[0], dtype
        )
        return rounded(out, q_latent, dtype)

    return (Trace(trace),)


def _kv_dtype(op: AttentionOp | LatentAttentionOp, dtype: str) -> str:
    """The dtype of q. Raises UnsupportedError where KV is stored in another one."""
    if not op.cache.is_fp8 and attribute_dtype(op, op.cache.dtype) != dtype:
        raise refuse(op, "KV dtype", op.cache.dtype, f"q is {dtype}; KV is stored in the same dtype or in FP8")
    return dtype


@LOWERING.emits(HeadLinearOp, "transposed")
def _head_linear(op: HeadLinearOp) -> tuple[Trace, ...]:
    key, dtype = (weight_name(op, op.weight),), operand_dtype(op, op.x)
    inner = 1 if op.transposed is not None else 2

    def trace(run: Run, x: Array) -> Array:
        import jax

        weight = run.weights[key]
        heads = x.reshape(len(x), len(weight), -1)
        # (heads, T, out): the axis of both is in front.
        y = jax.lax.dot_general(
            heads, weight, (((2,), (inner,)), ((1,), (0,))), precision="highest", preferred_element_type="float32"
        )
        return rounded(y.swapaxes(0, 1).reshape(len(x), -1), x, dtype)

    return (Trace(trace, (key,)),)
