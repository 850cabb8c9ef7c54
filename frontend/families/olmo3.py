"""OLMo 3: OLMo 2 with a window in three blocks of four, whose rope is never scaled."""

from __future__ import annotations

from plait.frontend.config import DecoderConfig, QKNorm
from plait.frontend.config_reader import ConfigReader
from plait.frontend.families.base import Family
from plait.frontend.families.gemma2 import read_windows
from plait.frontend.families.olmo2 import NAMES
from plait.frontend.families.reading import layers, read_attentions, read_blocks, read_mlp, read_model, rms

PATTERN = 4


def _read(reader: ConfigReader) -> DecoderConfig:
    bias, norm = reader.flag("attention_bias"), rms(reader)
    windows = read_windows(reader, read_blocks(reader), PATTERN)
    attentions = read_attentions(
        reader, windows, bias=bias, output_bias=bias, qk_norm=QKNorm(norm, "whole"), unscaled_windows=True
    )
    return read_model(reader, "olmo3", layers(attentions, read_mlp(reader)), norm, names=NAMES)


FAMILY = Family("olmo3", ("Olmo3ForCausalLM",), _read, needed=("sliding_window",))
