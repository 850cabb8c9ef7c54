"""Qwen2 and Qwen2.5: biases on q, k and v; a window from block `max_window_layers` on, or where `layer_types` says."""

from __future__ import annotations

from plait.frontend.config import DecoderConfig, read_layer_types
from plait.frontend.config_reader import ConfigReader
from plait.frontend.families.base import Family
from plait.frontend.families.reading import layers, read_attentions, read_blocks, read_mlp, read_model, rms
from plait.frontend.rope import SLIDING


def _read(reader: ConfigReader) -> DecoderConfig:
    attentions = read_attentions(reader, read_windows(reader, read_blocks(reader)), bias=True)
    return read_model(reader, "qwen2", layers(attentions, read_mlp(reader)), rms(reader))


def switched_window(reader: ConfigReader) -> int | None:
    """The window, where it is switched on. Files keep the key where it is off; it means nothing then."""
    if not reader.flag("use_sliding_window"):
        reader.raw("sliding_window")
        return None
    reader.need(("sliding_window",))
    return reader.optional_positive("sliding_window")


def read_windows(reader: ConfigReader, blocks: int) -> tuple[int | None, ...]:
    """The window of each block."""
    window = switched_window(reader)
    kinds = read_layer_types(reader, blocks)
    if kinds is not None:
        reader.raw("max_window_layers")
        if window is None and SLIDING in kinds:
            raise reader.error("config-conflict", "'layer_types' ask for a window, and none is given or switched on")
        return tuple(window if kind == SLIDING else None for kind in kinds)
    if window is None:
        reader.raw("max_window_layers")
        return (None,) * blocks
    first = reader.get("max_window_layers", int)
    return tuple(window if index >= first else None for index in range(blocks))


FAMILY = Family("qwen2", ("Qwen2ForCausalLM",), _read, needed=("num_key_value_heads",))
