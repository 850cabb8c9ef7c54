"""Llama: full attention everywhere, biases by two switches."""

from __future__ import annotations

from plait.frontend.config import DecoderConfig
from plait.frontend.config_reader import ConfigReader
from plait.frontend.families.base import Family
from plait.frontend.families.decoder import HARMLESS, build_decoder, read_blocks, read_decoder


def _read(reader: ConfigReader) -> DecoderConfig:
    bias = reader.flag("attention_bias")
    return read_decoder(
        reader,
        "llama",
        (None,) * read_blocks(reader),
        qkv_bias=bias,
        output_bias=bias,
        mlp_bias=reader.flag("mlp_bias"),
    )


FAMILY = Family("llama", ("LlamaForCausalLM",), _read, build_decoder, HARMLESS)
