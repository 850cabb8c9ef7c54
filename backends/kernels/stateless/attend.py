"""`plait.rope`, `plait.attention`, `plait.latent_attention`: ops that look at positions and at KV.

Legend: S sequences of T new tokens, C tokens of room, N KV heads, G query heads of one KV head, D features.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from plait.backends.kernels.lowering import ROPE_TABLE, attribute_dtype, operand_dtype, refuse, rope_of, weight_name
from plait.backends.kernels.stateless.table import LOWERING, Emit, Run
from plait.ir.ops import AttentionOp, LatentAttentionOp, RopeOp
from plait.ir.ops.base import number
from plait.ir.rope import frequencies


@LOWERING.emits(RopeOp, "head_dim", "rotary_dim", *ROPE_TABLE)
def _rope(op: RopeOp) -> Emit:
    operand_dtype(op, op.x)
    head_dim, turned, rope = op.head_dim.value.data, op.rotated, rope_of(op)
    per_position = torch.from_numpy(frequencies(rope, turned))
    factor = rope.attention_factor or 1.0

    def emit(run: Run, x: Tensor) -> Tensor:
        angle = run.positions.reshape(-1, 1, 1).float() * per_position
        cos, sin = angle.cos() * factor, angle.sin() * factor
        heads = x.reshape(x.shape[0], -1, head_dim).float()
        a, b = heads[..., :turned].chunk(2, dim=-1)
        parts = [a * cos - b * sin, b * cos + a * sin]
        rest = [heads[..., turned:]] if turned < head_dim else []
        return torch.cat((*parts, *rest), dim=-1).reshape(x.shape).to(x.dtype)

    return emit


@dataclass(frozen=True)
class _Attention:
    """Attributes of an attention; None means off."""

    scale: float
    window: int | None = None
    softcap: float | None = None
    sinks: str | None = None

    def __call__(self, run: Run, queries: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        """Queries [S, T, N, G, D], keys [S, C, N, D] and values [S, C, N, V] to [S, T, N, G, V], all in float32."""
        places, positions = torch.arange(run.shape.context, dtype=torch.int32), run.positions[:, :, None]
        visible = places <= positions  # [S, T, C]
        if self.window is not None:
            visible = visible & (places > positions - self.window)
        # What nobody sees may be infinite, and 0 * inf is not 0.
        alive = (places < run.args["kv_lens"][:, None])[:, :, None, None]
        values = torch.where(alive, values, torch.zeros((), dtype=values.dtype))
        scores = torch.einsum("stngd,scnd->sngtc", queries, keys) * self.scale
        if self.softcap is not None:
            scores = self.softcap * torch.tanh(scores / self.softcap)
        scores = scores.masked_fill(~visible[:, None, None], float("-inf"))
        if self.sinks is not None:  # one more score per head, of a key without a value
            sink = run.args[self.sinks].float().reshape(1, keys.shape[2], -1, 1, 1)
            scores = torch.cat((scores, sink.expand(*scores.shape[:-1], 1)), dim=-1)
        shares = torch.softmax(scores, dim=-1)[..., : run.shape.context]
        return torch.einsum("sngtc,scnd->stngd", shares, values)


@LOWERING.emits(AttentionOp, "heads", "scale", "window", "softcap", "sinks")
def _attention(op: AttentionOp) -> Emit:
    _one_dtype(op, operand_dtype(op, op.q))
    sinks = None if op.sinks is None else weight_name(op, op.sinks)
    attend = _Attention(op.scale.value.data, op.window_tokens, number(op.softcap), sinks)
    kv, kv_heads, head_dim = op.kv, op.kv_heads, op.head_dim

    def emit(run: Run, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        new = (run.shape.sequences, run.shape.tokens, kv_heads, head_dim)
        run.kv[kv] = tuple(
            _written(run, held, fresh.reshape(new)) for held, fresh in zip(run.kv[kv], (k, v), strict=True)
        )
        keys, values = (side.float() for side in run.kv[kv])
        queries = q.reshape(*new[:3], -1, head_dim).float()  # by the KV head they share
        return attend(run, queries, keys, values).reshape(q.shape).to(q.dtype)

    return emit


@LOWERING.emits(LatentAttentionOp, "heads", "scale")
def _latent_attention(op: LatentAttentionOp) -> Emit:
    """All heads share one key, whose first features are its value."""
    _one_dtype(op, operand_dtype(op, op.q_latent))
    attend, heads, kv, (latent_features, _) = _Attention(op.scale.value.data), op.heads.value.data, op.kv, op.widths

    def emit(run: Run, q_latent: Tensor, q_rope: Tensor, latent: Tensor, k_rope: Tensor) -> Tensor:
        new = (run.shape.sequences, run.shape.tokens, 1)
        (held,) = run.kv[kv]
        held = _written(run, held, torch.cat((latent, k_rope), dim=1).reshape(*new, -1))
        run.kv[kv], keys = (held,), held.float()
        queries = torch.cat([q.reshape(*new, heads, -1) for q in (q_latent, q_rope)], dim=-1).float()
        return attend(run, queries, keys, keys[..., :latent_features]).reshape(q_latent.shape).to(q_latent.dtype)

    return emit


def _one_dtype(op: AttentionOp | LatentAttentionOp, dtype: str) -> None:
    if attribute_dtype(op, op.cache.dtype) != dtype:
        raise refuse(op, "KV dtype", op.cache.dtype, f"q is {dtype}, and this form attends in one dtype")


def _written(run: Run, held: Tensor, fresh: Tensor) -> Tensor:
    """`held` [S, C, N, D] with `fresh` [S, T, N, D] in its places."""
    step = torch.arange(run.shape.context, dtype=torch.int32) - run.first  # [S, C]: which new token stands there
    inside = ((step >= 0) & (step < run.shape.tokens))[:, :, None, None]
    index = step.clamp(0, run.shape.tokens - 1).long()[:, :, None, None].expand(held.shape)
    return torch.where(inside, fresh.gather(1, index), held)
