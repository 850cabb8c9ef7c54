"""Mistral, and Nemo, whose head_dim is not hidden / heads: one window for all blocks, or none."""

from __future__ import annotations

from plait.frontend.config import DecoderConfig, read_layer_types
from plait.frontend.config_reader import ConfigReader
from plait.frontend.families.base import Family
from plait.frontend.families.reading import (
    layers,
    read_attentions,
    read_blocks,
    read_mlp,
    read_model,
    rms,
)
from plait.frontend.rope import FULL, SLIDING


def read_window(reader: ConfigReader, blocks: int, name: str) -> int | None:
    """The window of all blocks; None for full attention."""
    if not reader.has("sliding_window"):
        raise reader.error(
            "config-key-missing",
            "the key 'sliding_window' is missing",
            why=f"{name} v0.1 attends through 4096 tokens, later ones to all",
            hint='add "sliding_window": 4096, or null for full attention',
        )
    window = reader.optional_positive("sliding_window")
    kinds = read_layer_types(reader, blocks)
    expected = FULL if window is None else SLIDING
    if kinds is not None and set(kinds) != {expected}:
        # transformers applies the window to every block here and ignores layer_types, with a warning.
        raise reader.error(
            "config-conflict",
            f"'layer_types' differ from sliding_window {window}",
            why=f"a {name} has one window for all",
        )
    return window


def _read(reader: ConfigReader) -> DecoderConfig:
    blocks = read_blocks(reader)
    attentions = read_attentions(reader, (read_window(reader, blocks, "Mistral 7B"),) * blocks)
    return read_model(reader, "mistral", layers(attentions, read_mlp(reader)), rms(reader))


FAMILY = Family("mistral", ("MistralForCausalLM",), _read, needed=("num_key_value_heads",))
