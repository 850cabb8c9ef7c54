"""Gemma 3, the text model: Gemma 2 with q and k normed, one block in six without a window, and a rope of its own for
each kind of block. Scaling belongs to the blocks without a window."""

from __future__ import annotations

from plait.frontend.config import DecoderConfig
from plait.frontend.config_reader import ConfigReader
from plait.frontend.families.base import Family
from plait.frontend.families.gemma2 import FIXED, NEEDED, read_gemma, read_pattern

PATTERN = 6
# transformers reads a cap of scores and does not apply it; no published config has one.
UNCAPPED: dict[str, tuple[object, ...]] = {"attn_logit_softcapping": (None,)}


def _read(reader: ConfigReader) -> DecoderConfig:
    every = read_pattern(reader, PATTERN)
    return read_gemma(reader, "gemma3_text", every=every, qk_normed=True, local_theta_key="rope_local_base_freq")


FAMILY = Family("gemma3_text", ("Gemma3ForCausalLM",), _read, fixed=FIXED | UNCAPPED, needed=NEEDED)
