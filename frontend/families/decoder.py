"""The decoder that all families are: a config in normal form and a family's names to a module.

A block is attention and an MLP, or experts, each between norms that a family has or has not, added to the stream one
after the other or together. What differs between families is data: `DecoderConfig` and `Names`.
"""

from __future__ import annotations

from xdsl.dialects.builtin import ModuleOp
from xdsl.ir import SSAValue

from plait.frontend.config import STACKS, Attention, DecoderConfig, Experts, LatentAttention, Layer, Mlp, Names
from plait.frontend.families.latent import latent_attention
from plait.frontend.families.parts import linear, normed, rounded
from plait.ir import Builder, Rope


def build_decoder(config: DecoderConfig, dtype: str) -> ModuleOp:
    """The module of the whole model in `dtype`."""
    config, names = config.at(config.max_positions), config.names
    b = Builder(config.family, dtype)
    x = b.embed(f"{names.embedding}.weight", config.vocab_size, config.hidden_size)
    if config.positions is not None:
        x = b.add(x, b.embed_positions(f"{names.positions}.weight", config.positions, config.hidden_size))
    if config.embedding_scale is not None:
        factor = config.embedding_scale
        x = b.scale(x, rounded(factor, dtype) if config.rounded_scale else factor)
    for index, layer in enumerate(config.layers):
        b.block = index
        x = _block(b, config, names, layer, names.block.format(index), x)
    b.block = None
    x = normed(b, config.norm, x, names.norm)
    table = names.embedding if config.tied else names.head
    scores = b.logits(x, f"{table}.weight", config.vocab_size, scale=config.logits_scale, softcap=config.logits_softcap)
    return b.finish({"logits": scores})


def _block(b: Builder, config: DecoderConfig, names: Names, layer: Layer, prefix: str, x: SSAValue) -> SSAValue:
    def norm(value: SSAValue, name: str | None) -> SSAValue:
        return value if name is None else normed(b, config.norm, value, prefix + name)

    def grown(value: SSAValue, name: str | None) -> SSAValue:
        value = norm(value, name)
        return value if config.residual_scale is None else b.scale(value, config.residual_scale)

    h = norm(x, names.attention_norm)
    mixed = grown(_attention(b, layer.attention, names, prefix, h, config.hidden_size), names.after_attention)
    if not config.parallel:
        x = b.add(x, mixed)
        return b.add(x, grown(_mlp(b, layer.mlp, names, prefix, norm(x, names.mlp_norm), config), names.after_mlp))
    h = h if names.mlp_norm is None else norm(x, names.mlp_norm)
    made = grown(_mlp(b, layer.mlp, names, prefix, h, config), names.after_mlp)
    return b.add(b.add(x, mixed), made)


def _attention(
    b: Builder, own: Attention | LatentAttention, names: Names, prefix: str, x: SSAValue, hidden: int
) -> SSAValue:
    if isinstance(own, LatentAttention):
        return latent_attention(b, own, prefix, x, hidden)
    q = linear(b, x, prefix + names.q, own.heads * own.head_dim, own.bias)
    k = linear(b, x, prefix + names.k, own.kv_heads * own.head_dim, own.bias)
    v = linear(b, x, prefix + names.v, own.kv_heads * own.head_dim, own.bias)
    q, k = (_placed(b, own, value, prefix + name) for value, name in ((q, names.q_norm), (k, names.k_norm)))
    mixed = b.attention(
        q,
        k,
        v,
        heads=own.heads,
        kv_heads=own.kv_heads,
        head_dim=own.head_dim,
        scale=own.scale,
        window=own.window,
        softcap=own.softcap,
        sinks=prefix + names.sinks if own.sinks else None,
    )
    return linear(b, mixed, prefix + names.o, hidden, own.output_bias)


def _placed(b: Builder, own: Attention, x: SSAValue, norm: str) -> SSAValue:
    """q or k with its norm, turned to its position."""
    if own.qk_norm is not None:
        group = None if own.qk_norm.over == "whole" else own.head_dim
        x = normed(b, own.qk_norm.norm, x, norm, group=group, per_group=own.qk_norm.over == "own")
    if own.rope is None:
        return x
    assert isinstance(own.rope, Rope), "the config is resolved"
    return b.rope(x, own.head_dim, own.rope, own.rotary_dim)


def _mlp(b: Builder, own: Mlp | Experts, names: Names, prefix: str, x: SSAValue, config: DecoderConfig) -> SSAValue:
    if isinstance(own, Experts):
        return _experts(b, own, names, prefix, x, config)
    return _dense(b, own, (prefix + names.gate, prefix + names.up, prefix + names.down), x, config.hidden_size)


def _dense(b: Builder, own: Mlp, names: tuple[str, str, str], x: SSAValue, hidden: int) -> SSAValue:
    gate, up, down = names
    if own.gated:
        left = linear(b, x, gate, own.intermediate_size, own.bias)
        right = linear(b, x, up, own.intermediate_size, own.bias)
        x = b.silu_mul(left, right) if own.activation == "silu" else b.gelu_mul(left, right, _GELU[own.activation])
    else:
        x = b.gelu(linear(b, x, up, own.intermediate_size, own.bias), _GELU[own.activation])
    return linear(b, x, down, hidden, own.bias)


_GELU = {"gelu": "none", "gelu_tanh": "tanh"}
"""What configs call gelu -> `approximate`."""


def _experts(b: Builder, own: Experts, names: Names, prefix: str, x: SSAValue, config: DecoderConfig) -> SSAValue:
    routing = b.router(
        x,
        f"{prefix}{names.router}.weight",
        own.count,
        bias=f"{prefix}{names.router}.bias" if own.router_bias else None,
        selection_bias=prefix + names.selection_bias if own.selection_bias else None,
        experts_per_token=own.per_token,
        scoring=own.scoring,
        normalise=own.normalise,
        scale=own.scale,
        groups=own.groups,
        groups_per_token=own.groups_per_token,
        group_score=own.group_score,
    )
    gate, up, down = (f"{prefix}{names.experts}{part}" for part in STACKS)
    made = b.experts(
        x,
        routing,
        (f"{gate}.weight", f"{up}.weight", f"{down}.weight"),
        own.intermediate_size,
        biases=(f"{gate}.bias", f"{up}.bias", f"{down}.bias") if own.bias else None,
        experts_per_token=own.per_token,
        activation=own.activation,
        alpha=own.alpha,
        limit=own.limit,
    )
    if own.shared is None:
        return made
    gate, up, down = (f"{prefix}{names.shared}{part}" for part in STACKS)
    return b.add(made, _dense(b, own.shared, (gate, up, down), x, config.hidden_size))
