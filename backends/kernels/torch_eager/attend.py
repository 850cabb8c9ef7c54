"""`plait.rope`, `plait.attention`, `plait.latent_attention`."""

from __future__ import annotations

import torch
from torch import Tensor
from xdsl.ir import SSAValue

from plait.backends.kernels.attention import Attention
from plait.backends.kernels.lowering import ROPE_TABLE, attribute_dtype, operand_dtype, refuse, rope_of, weight_name
from plait.backends.kernels.step import Step
from plait.backends.kernels.torch_eager.table import LOWERING, Bind, Kernel, Slice
from plait.ir.ops import AttentionOp, LatentAttentionOp, RopeOp


@LOWERING.emits(RopeOp, "head_dim", "rotary_dim", *ROPE_TABLE)
def _rope(op: RopeOp) -> Bind:
    operand_dtype(op, op.x)
    rope, head_dim, turned = rope_of(op), op.head_dim.value.data, op.rotated

    def turn(step: Step, heads: Tensor) -> Tensor:
        cos, sin = step.rope(rope, turned)
        # Rolled by half of its width, b stands where a was and a where b was.
        return torch.addcmul(heads * cos, heads.roll(turned // 2, -1), sin)

    def run(step: Step, x: Tensor) -> Tensor:
        heads = x.reshape(len(x), -1, head_dim).float()
        return turn(step, heads).to(x.dtype).view(x.shape)

    def run_part(step: Step, x: Tensor) -> Tensor:
        heads = x.reshape(len(x), -1, head_dim)
        made = turn(step, heads[..., :turned].float()).to(x.dtype)
        return torch.cat((made, heads[..., turned:]), -1).view(x.shape)

    return lambda where: run if turned == head_dim else run_part


@LOWERING.emits(AttentionOp, "heads", "scale", "window", "softcap", "sinks")
def _attention(op: AttentionOp) -> Bind:
    dtype = _kept_dtype(op, op.q)
    attend = Attention(
        heads=op.heads.value.data,
        kv_heads=op.kv_heads,
        scale=op.scale.value.data,
        window=op.window_tokens,
        softcap=None if op.softcap is None else op.softcap.value.data,
    )
    kv = op.kv
    sinks = None if op.sinks is None else weight_name(op, op.sinks)

    def bind(where: Slice) -> Kernel:
        cache, sink = where.cache(kv), None if sinks is None else where.weight(sinks, dtype)
        return lambda step, q, k, v: attend(step, cache, q, k, v, sink)

    return bind


@LOWERING.emits(LatentAttentionOp, "heads", "scale")
def _latent_attention(op: LatentAttentionOp) -> Bind:
    """Attention of all heads on one KV head, whose values are the first features of its keys."""
    _kept_dtype(op, op.q_latent)
    heads, kv = op.heads.value.data, op.kv
    attend = Attention(heads=heads, kv_heads=1, scale=op.scale.value.data, window=None, softcap=None)

    def bind(where: Slice) -> Kernel:
        cache = where.cache(kv)

        def run(step: Step, q_latent: Tensor, q_rope: Tensor, latent: Tensor, k_rope: Tensor) -> Tensor:
            q = torch.cat([q.reshape(len(q), heads, -1) for q in (q_latent, q_rope)], -1)
            return attend(step, cache, q.view(len(q), -1), torch.cat((latent, k_rope), 1), None)

        return run

    return bind


def _kept_dtype(op: AttentionOp | LatentAttentionOp, q: SSAValue) -> str:
    """The dtype that is computed in. Raises UnsupportedError where KV is kept in another that is no FP8."""
    dtype = operand_dtype(op, q)
    if not op.cache.is_fp8 and attribute_dtype(op, op.cache.dtype) != dtype:
        raise refuse(op, "KV dtype", op.cache.dtype, f"q is {dtype}; KV is stored in the same dtype or in FP8")
    return dtype
