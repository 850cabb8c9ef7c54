"""Multi-head latent attention in the form that keeps one latent row per token.

Queries are taken into the latent space by the keys' half of `kv_b_proj`, and what is attended comes out of it by the
values' half (DeepSeek-V2, 2024, section 2.1.2: the two products are absorbed), so no key or value is ever written out.
"""

from __future__ import annotations

from xdsl.ir import SSAValue

from plait.frontend.config import DecoderConfig, LatentAttention
from plait.frontend.families.parts import linear, normed
from plait.frontend.views import View
from plait.ir import Builder, Rope
from plait.spec import Piece, Rows

Q_NOPE, Q_ROPE = "self_attn.q_nope", "self_attn.q_rope"
LATENT, K_ROPE = "self_attn.kv_latent", "self_attn.k_rope"
K_UP, V_UP = "self_attn.k_up", "self_attn.v_up"
"""Parts of q_b_proj (or q_proj), kv_a_proj_with_mqa and kv_b_proj; the checkpoint's own names are `latent_views`'."""


def latent_attention(b: Builder, own: LatentAttention, prefix: str, x: SSAValue, hidden: int) -> SSAValue:
    """(tokens, hidden) of x (tokens, hidden)."""
    query = x
    if own.q_rank is not None:
        compressed = linear(b, x, f"{prefix}self_attn.q_a_proj", own.q_rank, own.bias)
        query = normed(b, own.norm, compressed, f"{prefix}self_attn.q_a_layernorm")
    q_nope = linear(b, query, prefix + Q_NOPE, own.heads * own.nope_dim, False)
    q_rope = linear(b, query, prefix + Q_ROPE, own.heads * own.rope_dim, False)
    latent = normed(
        b, own.norm, linear(b, x, prefix + LATENT, own.kv_rank, own.bias), f"{prefix}self_attn.kv_a_layernorm"
    )
    k_rope = linear(b, x, prefix + K_ROPE, own.rope_dim, own.bias)
    if own.rope is not None:
        assert isinstance(own.rope, Rope), "the config is resolved"
        q_rope, k_rope = (b.rope(value, own.rope_dim, own.rope) for value in (q_rope, k_rope))
    keys = (own.heads, own.nope_dim, own.kv_rank)
    q_latent = b.head_linear(q_nope, f"{prefix}{K_UP}.weight", keys, transposed=True)
    mixed = b.latent_attention(q_latent, q_rope, latent, k_rope, heads=own.heads, scale=own.scale)
    values = b.head_linear(mixed, f"{prefix}{V_UP}.weight", (own.heads, own.value_dim, own.kv_rank))
    return linear(b, values, f"{prefix}self_attn.o_proj", hidden, own.bias)


def latent_views(config: DecoderConfig) -> dict[str, View]:
    """Where the parts are stored. Rotary features stand in pairs (0, 1), (2, 3) ..."""
    views: dict[str, View] = {}
    for index, layer in enumerate(config.layers):
        own, prefix = layer.attention, config.names.block.format(index)
        assert isinstance(own, LatentAttention)
        heads, nope, rope, rank = own.heads, own.nope_dim, own.rope_dim, own.kv_rank
        query = f"{prefix}self_attn.{'q_proj' if own.q_rank is None else 'q_b_proj'}"
        parts: dict[str, tuple[str, int, int, Piece]] = {
            Q_NOPE: (query, heads, nope + rope, Piece(0, nope)),
            Q_ROPE: (query, heads, nope + rope, Piece(nope, rope, pairs=True)),
            LATENT: (f"{prefix}self_attn.kv_a_proj_with_mqa", 1, rank + rope, Piece(0, rank)),
            K_ROPE: (f"{prefix}self_attn.kv_a_proj_with_mqa", 1, rank + rope, Piece(rank, rope, pairs=True)),
        }
        for name, (source, groups, stride, piece) in parts.items():
            biased = own.bias and name in (LATENT, K_ROPE)
            for kind in ("weight", "bias") if biased else ("weight",):
                views[f"{prefix}{name}.{kind}"] = View((f"{source}.{kind}",), Rows(groups, stride, (piece,)))
        up, stride = f"{prefix}self_attn.kv_b_proj.weight", nope + own.value_dim
        for name, piece in ((K_UP, Piece(0, nope)), (V_UP, Piece(nope, own.value_dim))):
            views[f"{prefix}{name}.weight"] = View((up,), Rows(heads, stride, (piece,)), matrices=heads)
    return views
