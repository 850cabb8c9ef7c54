"""SmolLM3: Llama with blocks that have no positions (NoPE)."""

from __future__ import annotations

from dataclasses import replace

from plait.frontend.config import DecoderConfig
from plait.frontend.config_reader import ConfigReader
from plait.frontend.families.base import Family
from plait.frontend.families.qwen2 import read_windows
from plait.frontend.families.reading import layers, read_attentions, read_blocks, read_mlp, read_model, rms


def _read(reader: ConfigReader) -> DecoderConfig:
    bias, blocks = reader.flag("attention_bias"), read_blocks(reader)
    rotates = _rotates(reader, blocks)
    attentions = read_attentions(reader, _windows(reader, rotates), bias=bias, output_bias=bias)
    turned = [own if turns else replace(own, rope=None) for own, turns in zip(attentions, rotates, strict=True)]
    mlp = read_mlp(reader, bias=reader.flag("mlp_bias"))
    return read_model(reader, "smollm3", layers(turned, mlp), rms(reader), tied=True)


def _windows(reader: ConfigReader, rotates: tuple[bool, ...]) -> tuple[int | None, ...]:
    """The window of each block; where `layer_types` do not say, those without positions have one."""
    if reader.peek("layer_types") is not None or not reader.flag("use_sliding_window"):
        return read_windows(reader, len(rotates))
    reader.raw("max_window_layers")
    window = reader.optional_positive("sliding_window")
    return tuple(None if turns else window for turns in rotates)


def _rotates(reader: ConfigReader, blocks: int) -> tuple[bool, ...]:
    """Which blocks have positions: 1 in `no_rope_layers`, in spite of its name; else all but each n-th."""
    listed, every = reader.raw("no_rope_layers"), reader.optional_positive("no_rope_layer_interval")
    if listed is None:
        if every is None:
            raise reader.error("config-key-missing", "no_rope_layers and no_rope_layer_interval are missing")
        return tuple((index + 1) % every != 0 for index in range(blocks))
    if not isinstance(listed, list) or len(listed) != blocks or not all(item in (0, 1) for item in listed):
        raise reader.error(
            "config-value", f"'no_rope_layers' must list 0 or 1 for {blocks} blocks, got {listed!r:.100}"
        )
    return tuple(map(bool, listed))


FAMILY = Family("smollm3", ("SmolLM3ForCausalLM",), _read, needed=("num_key_value_heads",))
