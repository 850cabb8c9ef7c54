"""Llama 1 to 3.3, and what is laid out like it: full attention everywhere, biases by two switches."""

from __future__ import annotations

from plait.frontend.config import DecoderConfig
from plait.frontend.config_reader import ConfigReader
from plait.frontend.families.base import Family
from plait.frontend.families.reading import layers, read_attentions, read_blocks, read_mlp, read_model, rms


def _read(reader: ConfigReader) -> DecoderConfig:
    bias, full = reader.flag("attention_bias"), (None,) * read_blocks(reader)
    attentions = read_attentions(reader, full, bias=bias, output_bias=bias)
    mlp = read_mlp(reader, bias=reader.flag("mlp_bias"))
    return read_model(reader, "llama", layers(attentions, mlp), rms(reader))


FAMILY = Family("llama", ("LlamaForCausalLM",), _read)
