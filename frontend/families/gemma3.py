"""Gemma 3, the text model: Gemma 2 with q and k normed, one block in six without a window, and a rope of its own for
each kind of block. Scaling belongs to the blocks without a window."""

from __future__ import annotations

from plait.frontend.config import DecoderConfig, QKNorm
from plait.frontend.config_reader import ConfigReader
from plait.frontend.families.base import Family
from plait.frontend.families.gemma2 import FIXED, NAMES, NEEDED, OFFSET, read_windows
from plait.frontend.families.reading import layers, read_attentions, read_blocks, read_mlp, read_model, rms

PATTERN = 6


def _read(reader: ConfigReader) -> DecoderConfig:
    bias, norm = reader.flag("attention_bias"), rms(reader, offset=OFFSET)
    # transformers 5 writes the second name.
    every = reader.optional_positive(reader.spelling("sliding_window_pattern", "_sliding_window_pattern")) or PATTERN
    attentions = read_attentions(
        reader,
        read_windows(reader, read_blocks(reader), every),
        scale=reader.positive_number("query_pre_attn_scalar") ** -0.5,
        bias=bias,
        output_bias=bias,
        softcap=reader.optional_positive_number("attn_logit_softcapping"),
        qk_norm=QKNorm(norm),
        local_theta_key="rope_local_base_freq",
    )
    mlp = read_mlp(reader, key=reader.spelling("hidden_activation", "hidden_act"), known=("gelu_tanh",))
    return read_model(
        reader,
        "gemma3_text",
        layers(attentions, mlp),
        norm,
        tied=True,
        names=NAMES,
        embedding_scale=reader.positive("hidden_size") ** 0.5,
        rounded_scale=True,
        logits_softcap=reader.optional_positive_number("final_logit_softcapping"),
    )


FAMILY = Family("gemma3_text", ("Gemma3ForCausalLM",), _read, fixed=FIXED, needed=NEEDED)
