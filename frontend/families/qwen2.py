"""Qwen2 and Qwen2.5: biases on q, k and v; a window from block `max_window_layers` on, or where `layer_types` says."""

from __future__ import annotations

from plait.frontend.config import DecoderConfig, read_layer_types
from plait.frontend.config_reader import ConfigReader
from plait.frontend.families.base import Family
from plait.frontend.families.reading import layers, read_attentions, read_blocks, read_mlp, read_model, rms


def _read(reader: ConfigReader) -> DecoderConfig:
    attentions = read_attentions(reader, read_windows(reader, read_blocks(reader)), bias=True)
    return read_model(reader, "qwen2", layers(attentions, read_mlp(reader)), rms(reader))


def read_windows(reader: ConfigReader, blocks: int) -> tuple[int | None, ...]:
    """The window of each block."""
    switched_on = reader.flag("use_sliding_window")
    if switched_on:
        reader.need(("sliding_window",))
    # Files keep both keys when the switch is off; they mean nothing then.
    window = reader.optional_positive("sliding_window") if switched_on else reader.raw("sliding_window") and None
    kinds = read_layer_types(reader, blocks)
    if kinds is not None:
        reader.raw("max_window_layers")
        if window is None and "sliding_attention" in kinds:
            raise reader.error("config-conflict", "'layer_types' ask for a window, and none is given or switched on")
        return tuple(window if kind == "sliding_attention" else None for kind in kinds)
    if window is None:
        reader.raw("max_window_layers")
        return (None,) * blocks
    first = reader.get("max_window_layers", int)
    return tuple(window if index >= first else None for index in range(blocks))


FAMILY = Family("qwen2", ("Qwen2ForCausalLM",), _read, needed=("num_key_value_heads",))
