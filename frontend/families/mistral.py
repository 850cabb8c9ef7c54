"""Mistral: one window for all blocks, or none."""

from __future__ import annotations

from plait.frontend.config import DecoderConfig, read_layer_types
from plait.frontend.config_reader import ConfigReader
from plait.frontend.families.base import Family
from plait.frontend.families.decoder import HARMLESS, build_decoder, read_blocks, read_decoder


def _read(reader: ConfigReader) -> DecoderConfig:
    blocks = read_blocks(reader)
    if not reader.has("sliding_window"):
        raise reader.error(
            "config-key-missing",
            "the key 'sliding_window' is missing",
            why="Mistral 7B v0.1 attends through 4096 tokens, later ones to all",
            hint='add "sliding_window": 4096, or null for full attention',
        )
    window = reader.optional_positive("sliding_window")
    kinds = read_layer_types(reader, blocks)
    expected = "full_attention" if window is None else "sliding_attention"
    if kinds is not None and set(kinds) != {expected}:
        # transformers' Mistral applies the window to every block and ignores layer_types, with a warning.
        raise reader.error(
            "config-conflict",
            f"'layer_types' differ from sliding_window {window}",
            why="a Mistral has one window for all",
        )
    return read_decoder(reader, "mistral", (window,) * blocks)


FAMILY = Family("mistral", ("MistralForCausalLM",), _read, build_decoder, HARMLESS)
