"""Ministral: Mistral whose blocks have a window where `layer_types` says."""

from __future__ import annotations

from plait.frontend.config import DecoderConfig, read_layer_types
from plait.frontend.config_reader import ConfigReader
from plait.frontend.families.base import Family
from plait.frontend.families.reading import layers, read_attentions, read_blocks, read_mlp, read_model, rms
from plait.frontend.rope import SLIDING


def _read(reader: ConfigReader) -> DecoderConfig:
    blocks, window = read_blocks(reader), reader.optional_positive("sliding_window")
    kinds = read_layer_types(reader, blocks)
    if window is not None and kinds is None:
        raise reader.error("config-key-missing", "'layer_types' is missing: which blocks have the window?")
    if window is None and kinds is not None and SLIDING in kinds:
        raise reader.error("config-conflict", "'layer_types' ask for a window, and none is given")
    windows = tuple(window if kind == SLIDING else None for kind in kinds or ("",) * blocks)
    return read_model(reader, "ministral", layers(read_attentions(reader, windows), read_mlp(reader)), rms(reader))


FAMILY = Family("ministral", ("MinistralForCausalLM",), _read, needed=("num_key_value_heads",))
