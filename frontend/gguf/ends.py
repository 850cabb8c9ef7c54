"""Tokens that end what a model says."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

KEYS = ("tokenizer.ggml.eos_token_id", "tokenizer.ggml.eot_token_id", "tokenizer.ggml.eom_token_id")
"""End of text, of turn and of message: generation ends at any."""

TURN_ENDS = ("<|eot_id|>", "<|im_end|>", "<|end|>", "<end_of_turn>", "<|return|>", "<|call|>")
"""Tokens that end a turn by their text, where no key says so (llama.cpp, `llama_vocab::impl::load`)."""

HARMONY = {"<|return|>", "<|call|>"}
"""Where these are, `<|end|>` ends a message within a turn."""


def end_tokens(metadata: Mapping[str, Any]) -> list[Any]:
    """Ids, unchecked."""
    ids = [metadata[key] for key in KEYS if key in metadata]
    tokens = metadata.get("tokenizer.ggml.tokens")
    if "tokenizer.ggml.eot_token_id" in metadata or not isinstance(tokens, list):
        return ids
    by_text = {token: index for index, token in enumerate(tokens) if token in TURN_ENDS}
    if by_text.keys() >= HARMONY:
        by_text.pop("<|end|>", None)
    return list(dict.fromkeys([*ids, *by_text.values()]))
