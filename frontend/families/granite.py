"""Granite: Llama with four multipliers."""

from __future__ import annotations

from plait.frontend.config import DecoderConfig
from plait.frontend.config_reader import ConfigReader
from plait.frontend.families.base import Family
from plait.frontend.families.reading import layers, read_attentions, read_blocks, read_mlp, read_model, rms


def _read(reader: ConfigReader) -> DecoderConfig:
    bias, full = reader.flag("attention_bias"), (None,) * read_blocks(reader)
    scale = reader.positive_number("attention_multiplier")
    attentions = read_attentions(reader, full, scale=scale, bias=bias, output_bias=bias)
    return read_model(
        reader,
        "granite",
        layers(attentions, read_mlp(reader, bias=reader.flag("mlp_bias"))),
        rms(reader),
        embedding_scale=reader.positive_number("embedding_multiplier"),
        residual_scale=reader.positive_number("residual_multiplier"),
        logits_scale=1.0 / reader.positive_number("logits_scaling"),
    )


FAMILY = Family("granite", ("GraniteForCausalLM",), _read)
