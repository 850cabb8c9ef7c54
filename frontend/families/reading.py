"""What families read alike from a config."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from plait.errors import UnsupportedError
from plait.frontend.config import (
    STACKS,
    AnyRope,
    Attention,
    DecoderConfig,
    Experts,
    Layer,
    Mlp,
    Norm,
    QKNorm,
    read_activation,
    read_dtype,
    read_eps,
    read_heads,
    read_rotary_dim,
)
from plait.frontend.config_reader import ConfigReader
from plait.frontend.files import MAX_DIM
from plait.frontend.rope import FULL, SLIDING, DynamicRope, RopeFacts, partial_factor, read_ropes
from plait.frontend.views import View
from plait.words import counted

MAX_BLOCKS = 512
"""Far beyond any model (the deepest have 126): a damaged config must not build ops for minutes."""

MAX_EXPERTS = 4096
"""Far beyond any model (the largest have 512): each of them is a tensor that is looked for by name."""

_OWN = {part: part for part in STACKS}


def read_blocks(reader: ConfigReader, key: str = "num_hidden_layers") -> int:
    """The number of blocks."""
    blocks = reader.positive(key)
    if blocks > MAX_BLOCKS:
        raise reader.error("config-value", f"{key!r} is {blocks}, more than {MAX_BLOCKS}")
    return blocks


def read_experts(reader: ConfigReader, *keys: str) -> int:
    """The number of experts, in any of these spellings."""
    key = reader.spelling(*keys)
    experts = reader.positive(key)
    if experts > MAX_EXPERTS:
        raise reader.error("config-value", f"{key!r} is {experts}, more than {MAX_EXPERTS}")
    return experts


def read_attentions(
    reader: ConfigReader,
    windows: Sequence[int | None],
    *,
    scale: float | None = None,
    partial: float | None = None,
    bias: bool = False,
    output_bias: bool = False,
    qk_norm: QKNorm | None = None,
    softcap: float | None = None,
    sinks: bool = False,
    original_positions: int | None = None,
    theta_key: str = "rope_theta",
    local_theta_key: str | None = None,
    unscaled_windows: bool = False,
) -> tuple[Attention, ...]:
    """The attention of each block.

    Args:
        windows: of each block; None for full attention.
        scale: None for 1 / sqrt(head_dim).
        partial: the share of a head that turns where the config may say another than 1, and what an absent key means.
        original_positions: the context of the pretraining, where it stands outside the rope parameters.
        theta_key, local_theta_key, unscaled_windows: as in `read_ropes`.
    """
    hidden_size = reader.positive("hidden_size")
    heads, kv_heads, head_dim = read_heads(reader, hidden_size)
    share = partial_factor(reader, 1.0 if partial is None else partial)
    if share != 1 and partial is None:
        raise UnsupportedError(
            "config-value", f"{reader.source}: 'partial_rotary_factor' is {share}, which is not implemented", why="1 is"
        )
    rotary = read_rotary_dim(reader, head_dim, share)
    kinds = tuple(FULL if window is None else SLIDING for window in windows)
    facts = RopeFacts(rotary or head_dim, reader.positive("max_position_embeddings"), original_positions, share)
    ropes: tuple[AnyRope, ...] = read_ropes(
        reader,
        kinds,
        facts,
        theta_key=theta_key,
        local_theta_key=local_theta_key,
        unscaled_windows=unscaled_windows,
    )
    return tuple(
        Attention(
            heads,
            kv_heads,
            head_dim,
            head_dim**-0.5 if scale is None else scale,
            rope,
            rotary,
            window,
            softcap=softcap,
            sinks=sinks,
            bias=bias,
            output_bias=output_bias,
            qk_norm=qk_norm,
        )
        for rope, window in zip(ropes, windows, strict=True)
    )


def read_mlp(
    reader: ConfigReader, *, bias: bool = False, key: str = "hidden_act", known: tuple[str, ...] = ("silu",)
) -> Mlp:
    """A gated MLP."""
    return Mlp(reader.positive("intermediate_size"), read_activation(reader, key, known), bias=bias)


def read_model(
    reader: ConfigReader,
    family: str,
    layers: Sequence[Layer],
    norm: Norm,
    *,
    tied: bool = False,
    hidden_size: int | None = None,
    max_positions: int | None = None,
    **more: Any,
) -> DecoderConfig:
    """The config from what the family read, and the keys that all have.

    Args:
        tied: what an absent `tie_word_embeddings` means.
        hidden_size, max_positions: where the family has keys of its own for them.
        more: fields of DecoderConfig.
    """
    for mixture in dict.fromkeys(layer.mlp for layer in layers if isinstance(layer.mlp, Experts)):
        _check_choice(reader, mixture)
    said = reader.optional("tie_word_embeddings", bool)
    vocabulary = reader.positive("vocab_size")
    ends = reader.ends(vocabulary)
    return DecoderConfig(
        family=family,
        vocab_size=vocabulary,
        hidden_size=reader.positive("hidden_size") if hidden_size is None else hidden_size,
        layers=tuple(layers),
        norm=norm,
        max_positions=_max_positions(reader, layers) if max_positions is None else max_positions,
        tied=tied if said is None else said,
        dtype=read_dtype(reader),
        bos_token_id=ends.bos,
        eos_token_ids=ends.eos,
        **more,
    )


def _check_choice(reader: ConfigReader, own: Experts) -> None:
    """That the experts of a token can be chosen: what the verifier of `plait.router` says, in the config's words."""
    groups = own.groups or 1
    kept = own.groups_per_token or groups
    if own.count % groups:
        raise reader.error("config-value", f"{counted(own.count, 'expert')} in {counted(groups, 'group')} leave a rest")
    if kept > groups:
        raise reader.error("config-value", f"a token keeps {counted(kept, 'group')} of experts, of {groups}")
    if own.per_token > own.count // groups * kept:
        held = counted(own.count, "expert")
        if kept < groups:
            held = f"{counted(kept, 'group')} of {counted(own.count // groups, 'expert')}"
        raise reader.error("config-value", f"a token goes through {own.per_token} of {held}")


def _max_positions(reader: ConfigReader, layers: Sequence[Layer]) -> int:
    """The longest sequence: dynamic scaling stretches what the config says by its factor."""
    ropes = [layer.attention.rope for layer in layers]
    stretches = [rope.factor for rope in ropes if isinstance(rope, DynamicRope)]
    longest = reader.positive("max_position_embeddings") * max(stretches, default=1.0)
    if longest > MAX_DIM:
        raise reader.error("config-rope", f"scaling stretches the context to {longest:.3g} tokens")
    return int(longest)


def rms(reader: ConfigReader, *, offset: float | None = None) -> Norm:
    """The RMS norm of all blocks."""
    return Norm(read_eps(reader), offset=offset)


def layers(attentions: Sequence[Attention], mlp: Mlp) -> tuple[Layer, ...]:
    """Blocks with one kind of MLP."""
    return tuple(Layer(attention, mlp) for attention in attentions)


def expert_views(config: DecoderConfig, parts: Mapping[str, str] = _OWN) -> dict[str, View]:
    """Stacks of gate, up and down, whose matrices are stored one by one.

    Args:
        parts: what a matrix of each stack is called.
    """
    views = {}
    for index, layer in enumerate(config.layers):
        own = layer.mlp
        if isinstance(own, Experts):
            prefix = config.names.block.format(index) + config.names.experts
            for part, called in parts.items():
                sources = tuple(f"{prefix}{expert}.{called}.weight" for expert in range(own.count))
                views[f"{prefix}{part}.weight"] = View(sources)
    return views
