"""Falcon: fused q, k and v by KV head, attention and MLP together, an MLP without a gate."""

from __future__ import annotations

from dataclasses import replace

from plait.errors import UnsupportedError
from plait.frontend.config import (
    Attention,
    DecoderConfig,
    Mlp,
    Names,
    Norm,
    read_activation,
    read_eps,
)
from plait.frontend.config_reader import ConfigReader
from plait.frontend.families.base import Family
from plait.frontend.families.reading import layers, read_blocks, read_model
from plait.frontend.rope import FULL, RopeFacts, read_ropes
from plait.frontend.views import View
from plait.spec import Piece, Rows

NAMES = Names(
    embedding="transformer.word_embeddings",
    norm="transformer.ln_f",
    block="transformer.h.{}.",
    q="self_attention.q",
    k="self_attention.k",
    v="self_attention.v",
    o="self_attention.dense",
    up="mlp.dense_h_to_4h",
    down="mlp.dense_4h_to_h",
)

POSITIONS = 2048
"""Tokens of the first models, whose configs do not say them."""


def _read(reader: ConfigReader) -> DecoderConfig:
    hidden, heads = reader.positive("hidden_size"), reader.positive("num_attention_heads")
    positions = reader.optional_positive("max_position_embeddings") or POSITIONS
    if hidden % (2 * heads):
        raise reader.error("config-value", f"hidden_size {hidden} does not divide among {heads} heads of rope pairs")
    head_dim, bias, blocks = hidden // heads, reader.flag("bias"), read_blocks(reader)
    new, parallel = reader.flag("new_decoder_architecture"), reader.get("parallel_attn", bool)
    if new and not parallel:
        raise UnsupportedError(
            "config-value", f"{reader.source}: the new architecture without parallel_attn is unknown"
        )
    kv_heads = _kv_heads(reader, heads, new)
    (rope,) = read_ropes(reader, (FULL,), RopeFacts(head_dim, positions))
    attention = Attention(heads, kv_heads, head_dim, head_dim**-0.5, rope, bias=bias, output_bias=bias)
    inner = reader.optional_positive("ffn_hidden_size") or 4 * hidden
    known = ("gelu", "gelu_tanh")
    activation = read_activation(reader, "activation", known) if reader.has("activation") else "gelu"
    mlp = Mlp(inner, activation, gated=False, bias=bias)
    return read_model(
        reader,
        "falcon",
        layers((attention,) * blocks, mlp),
        Norm(read_eps(reader, "layer_norm_epsilon"), "layer", bias=True),
        tied=True,
        max_positions=positions,
        names=_names(reader, new, parallel),
        parallel=parallel,
    )


def _kv_heads(reader: ConfigReader, heads: int, new: bool) -> int:
    """One for each head in the first models, one for all in the next, then what `num_kv_heads` says."""
    given, multi = reader.optional_positive("num_kv_heads"), reader.optional("multi_query", bool) is not False
    kv_heads = (given or heads) if new else 1 if multi else heads
    if heads % kv_heads:
        raise reader.error("config-value", f"{heads} heads do not divide among {kv_heads} KV heads")
    return kv_heads


def _names(reader: ConfigReader, new: bool, parallel: bool) -> Names:
    """Two norms in front of a parallel block, or one, or one before each half."""
    norms = reader.optional_positive("num_ln_in_parallel_attn") or (2 if new else 1)
    if not parallel:
        return NAMES
    if norms == 2 and new:
        return replace(NAMES, attention_norm="ln_attn", mlp_norm="ln_mlp")
    if norms == 1:
        return replace(NAMES, mlp_norm=None)
    raise UnsupportedError("config-value", f"{reader.source}: 'num_ln_in_parallel_attn' is {norms}, which is not known")


def _views(config: DecoderConfig) -> dict[str, View]:
    views = {}
    for index, layer in enumerate(config.layers):
        own, prefix = layer.attention, f"transformer.h.{index}.self_attention."
        assert isinstance(own, Attention)
        share, dim = own.heads // own.kv_heads, own.head_dim
        pieces = {"q": (0, share), "k": (share, 1), "v": (share + 1, 1)}
        for part, (start, count) in pieces.items():
            rows = Rows(own.kv_heads, (share + 2) * dim, (Piece(start * dim, count * dim),))
            for kind in ("weight", "bias") if own.bias else ("weight",):
                views[f"{prefix}{part}.{kind}"] = View((f"{prefix}query_key_value.{kind}",), rows)
    return views


FIXED: dict[str, tuple[object, ...]] = {"alibi": (False,), "apply_residual_connection_post_layernorm": (False,)}

FAMILY = Family("falcon", ("FalconForCausalLM",), _read, views=_views, fixed=FIXED)
