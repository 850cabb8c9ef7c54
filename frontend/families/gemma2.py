"""Gemma 2: norms before and after attention and MLP whose weights are distances from one, every other block with a
window, soft caps on scores and logits, and embedded tokens times sqrt(hidden)."""

from __future__ import annotations

from plait.frontend.config import DecoderConfig, Names, QKNorm, read_layer_types
from plait.frontend.config_reader import ConfigReader
from plait.frontend.families.base import Family
from plait.frontend.families.reading import (
    layers,
    read_attentions,
    read_blocks,
    read_mlp,
    read_model,
    rms,
)
from plait.frontend.rope import FULL, SLIDING

NAMES = Names(
    after_attention="post_attention_layernorm",
    mlp_norm="pre_feedforward_layernorm",
    after_mlp="post_feedforward_layernorm",
)
FIXED: dict[str, tuple[object, ...]] = {"use_bidirectional_attention": (False, None)}
NEEDED = ("num_key_value_heads", "head_dim", "sliding_window")
OFFSET = 1.0
"""The weight of a norm is its scale minus this."""


def read_windows(reader: ConfigReader, blocks: int, every: int) -> tuple[int | None, ...]:
    """The window of each block: where `layer_types` says, else of all but each `every`-th."""
    window, kinds = reader.optional_positive("sliding_window"), read_layer_types(reader, blocks)
    if kinds is None:
        kinds = tuple(SLIDING if (index + 1) % every else FULL for index in range(blocks))
    if window is None and SLIDING in kinds:
        raise reader.error("config-conflict", "there are blocks with a window, and none is given")
    return tuple(window if kind == SLIDING else None for kind in kinds)


def read_pattern(reader: ConfigReader, absent: int) -> int:
    """Each how manieth block has no window. transformers 5 writes the second name."""
    return reader.optional_positive(reader.spelling("sliding_window_pattern", "_sliding_window_pattern")) or absent


def _read(reader: ConfigReader) -> DecoderConfig:
    twice, window = reader.optional("sliding_window_size", int), reader.peek("sliding_window")
    if twice is not None and twice != window:
        raise reader.error("config-conflict", f"sliding_window is {window!r:.50} and sliding_window_size {twice}")
    softcap = reader.optional_positive_number("attn_logit_softcapping")
    return read_gemma(reader, "gemma2", every=2, softcap=softcap)


def read_gemma(
    reader: ConfigReader,
    family: str,
    *,
    every: int,
    softcap: float | None = None,
    qk_normed: bool = False,
    local_theta_key: str | None = None,
) -> DecoderConfig:
    """What both generations read. `every`: as in `read_windows`; `local_theta_key`: as in `read_ropes`."""
    bias, norm = reader.flag("attention_bias"), rms(reader, offset=OFFSET)
    attentions = read_attentions(
        reader,
        read_windows(reader, read_blocks(reader), every),
        scale=reader.positive_number("query_pre_attn_scalar") ** -0.5,
        bias=bias,
        output_bias=bias,
        softcap=softcap,
        qk_norm=QKNorm(norm) if qk_normed else None,
        local_theta_key=local_theta_key,
    )
    mlp = read_mlp(reader, key=reader.spelling("hidden_activation", "hidden_act"), known=("gelu_tanh",))
    return read_model(
        reader,
        family,
        layers(attentions, mlp),
        norm,
        tied=True,
        names=NAMES,
        embedding_scale=reader.positive("hidden_size") ** 0.5,
        rounded_scale=True,
        logits_softcap=reader.optional_positive_number("final_logit_softcapping"),
    )


FAMILY = Family(
    "gemma2",
    ("Gemma2ForCausalLM",),
    _read,
    fixed=FIXED,
    needed=(*NEEDED, "attn_logit_softcapping", "final_logit_softcapping"),
)
