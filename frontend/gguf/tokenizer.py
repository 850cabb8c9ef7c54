"""The tokenizer of a GGUF file as the text of a tokenizer.json."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from tokenizers import Tokenizer

from plait.errors import CheckpointError, UnsupportedError
from plait.frontend.gguf.byte_level import HINT, byte_level
from plait.frontend.gguf.sentencepiece import sentencepiece

MODELS: dict[str, Callable[[Mapping[str, Any], str], Tokenizer]] = {"gpt2": byte_level, "llama": sentencepiece}
"""By `tokenizer.ggml.model`; Gemma's files say llama too."""


def tokenizer_json(metadata: dict[str, Any], source: str) -> str:
    """The text of a tokenizer.json for the metadata of a GGUF file.

    Args:
        source: what errors call the file.

    Raises:
        UnsupportedError: another kind of tokenizer, by name.
        CheckpointError: `gguf-tokenizer`: keys are missing or contradict each other.
    """
    model = metadata.get("tokenizer.ggml.model")
    if not isinstance(model, str):
        raise CheckpointError("gguf-tokenizer", f"{source}: tokenizer.ggml.model is missing or of the wrong type")
    if model not in MODELS:
        raise UnsupportedError(
            "gguf-tokenizer", f"{source}: tokenizer model {model!r}", why=f"{' and '.join(MODELS)} are read", hint=HINT
        )
    return str(MODELS[model](metadata, source).to_str(pretty=False))


def tokenizer_config(metadata: dict[str, Any]) -> dict[str, Any]:
    """What a tokenizer_config.json would say: the names of special tokens and the chat template."""
    tokens = metadata.get("tokenizer.ggml.tokens")
    config: dict[str, Any] = {"tokenizer_class": "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": False}
    for name in ("bos", "eos", "unknown", "padding"):
        index = metadata.get(f"tokenizer.ggml.{name}_token_id")
        if isinstance(tokens, list) and type(index) is int and 0 <= index < len(tokens):
            config[{"unknown": "unk_token", "padding": "pad_token"}.get(name, f"{name}_token")] = tokens[index]
    template = metadata.get("tokenizer.chat_template")
    if isinstance(template, str):
        config["chat_template"] = template
    return config
