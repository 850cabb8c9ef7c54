"""Families of models: one small file each, registered here by `model_type`."""

from __future__ import annotations

from dataclasses import replace
from importlib import import_module
from typing import Any

from plait.errors import CheckpointError, UnsupportedError, did_you_mean
from plait.frontend.config import DecoderConfig
from plait.frontend.config_reader import ConfigReader
from plait.frontend.families.base import Family
from plait.frontend.quantisation import read_quantisation

FAMILIES = {
    "cohere": "plait.frontend.families.cohere",
    "cohere2": "plait.frontend.families.cohere2",
    "deepseek_v2": "plait.frontend.families.deepseek_v2",
    "deepseek_v3": "plait.frontend.families.deepseek_v3",
    "falcon": "plait.frontend.families.falcon",
    "gemma2": "plait.frontend.families.gemma2",
    "gemma3_text": "plait.frontend.families.gemma3",
    "gpt2": "plait.frontend.families.gpt2",
    "gpt_neox": "plait.frontend.families.gpt_neox",
    "gpt_oss": "plait.frontend.families.gpt_oss",
    "granite": "plait.frontend.families.granite",
    "kimi_k2": "plait.frontend.families.deepseek_v3",
    "llama": "plait.frontend.families.llama",
    "ministral": "plait.frontend.families.ministral",
    "mistral": "plait.frontend.families.mistral",
    "mixtral": "plait.frontend.families.mixtral",
    "olmo2": "plait.frontend.families.olmo2",
    "olmo3": "plait.frontend.families.olmo3",
    "phi3": "plait.frontend.families.phi3",
    "qwen2": "plait.frontend.families.qwen2",
    "qwen3": "plait.frontend.families.qwen3",
    "qwen3_moe": "plait.frontend.families.qwen3_moe",
    "smollm3": "plait.frontend.families.smollm3",
    "stablelm": "plait.frontend.families.stablelm",
}
"""`model_type` -> module with a `FAMILY`."""


def family(name: str) -> Family:
    """The family of a `model_type`. Raises UnsupportedError with the list of supported ones."""
    if name not in FAMILIES:
        raise UnsupportedError(
            "family-unsupported",
            f"the model type {name!r} is not supported",
            why=f"supported are {', '.join(FAMILIES)}",
            hint=did_you_mean(name, FAMILIES),
        )
    found = import_module(FAMILIES[name]).FAMILY
    assert isinstance(found, Family)
    return found


def read_config(data: dict[str, Any], source: str) -> DecoderConfig:
    """A config.json in normal form.

    Raises:
        CheckpointError: a key is missing, of the wrong type, or contradicts another.
        UnsupportedError: the model type, the architecture, a key or a value is not implemented, by name.
    """
    reader = ConfigReader(data, source)
    model_type = reader.optional("model_type", str)
    architectures = reader.raw("architectures")
    if architectures is not None and not (
        isinstance(architectures, list) and all(isinstance(name, str) for name in architectures)
    ):
        raise reader.error("config-type", f"'architectures' is {architectures!r:.100}, expected a list of strings")
    if model_type is None:
        raise CheckpointError(
            "config-key-missing",
            f"{source}: the key 'model_type' is missing",
            why=f"supported are {', '.join(FAMILIES)}",
            hint="is this the config.json of a transformers model?",
        )
    kind = family(model_type)
    if architectures and (len(architectures) > 1 or architectures[0] not in kind.architectures):
        raise UnsupportedError(
            "architecture-unsupported",
            f"{source}: the architecture {', '.join(architectures)} is not supported",
            why=f"of the model type {model_type}, supported is {', '.join(kind.architectures)}",
        )
    reader.allow(kind.no_effect, kind.fixed)
    reader.need(kind.needed)
    config = replace(kind.read(reader), quantisation=read_quantisation(reader))
    reader.finish()
    return config
