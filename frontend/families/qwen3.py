"""Qwen3: q and k of each head are normed; windows as in Qwen2."""

from __future__ import annotations

from plait.frontend.config import DecoderConfig, QKNorm
from plait.frontend.config_reader import ConfigReader
from plait.frontend.families.base import Family
from plait.frontend.families.qwen2 import read_windows
from plait.frontend.families.reading import layers, read_attentions, read_blocks, read_mlp, read_model, rms


def _read(reader: ConfigReader) -> DecoderConfig:
    bias, norm, windows = reader.flag("attention_bias"), rms(reader), read_windows(reader, read_blocks(reader))
    attentions = read_attentions(reader, windows, bias=bias, output_bias=bias, qk_norm=QKNorm(norm))
    return read_model(reader, "qwen3", layers(attentions, read_mlp(reader)), norm)


FAMILY = Family("qwen3", ("Qwen3ForCausalLM",), _read, needed=("num_key_value_heads", "head_dim"))
