"""OLMo 2: q and k normed over their whole width, and norms only after attention and MLP."""

from __future__ import annotations

from plait.frontend.config import DecoderConfig, Names, QKNorm
from plait.frontend.config_reader import ConfigReader
from plait.frontend.families.base import Family
from plait.frontend.families.reading import layers, read_attentions, read_blocks, read_mlp, read_model, rms

NAMES = Names(
    attention_norm=None,
    after_attention="post_attention_layernorm",
    mlp_norm=None,
    after_mlp="post_feedforward_layernorm",
)


def _read(reader: ConfigReader) -> DecoderConfig:
    bias, norm, full = reader.flag("attention_bias"), rms(reader), (None,) * read_blocks(reader)
    attentions = read_attentions(reader, full, bias=bias, output_bias=bias, qk_norm=QKNorm(norm, "whole"))
    return read_model(reader, "olmo2", layers(attentions, read_mlp(reader)), norm, names=NAMES)


FAMILY = Family("olmo2", ("Olmo2ForCausalLM",), _read)
