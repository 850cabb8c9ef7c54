"""SentencePiece's BPE: a text with its spaces as U+2581, merged wherever that makes the token with the highest score;
what no token is for, byte by byte."""

from __future__ import annotations

from collections.abc import Mapping
from math import isfinite
from typing import Any

from tokenizers import Tokenizer, decoders, models, normalizers

from plait.errors import UnsupportedError
from plait.frontend.gguf.vocabulary import (
    BYTE,
    CONTROL,
    NORMAL,
    UNKNOWN,
    UNUSED,
    USER_DEFINED,
    Vocabulary,
    read_vocabulary,
)
from plait.words import counted

SPACE = "\u2581"


def sentencepiece(metadata: Mapping[str, Any], source: str) -> Tokenizer:
    """The tokenizer.

    Raises:
        CheckpointError: `gguf-tokenizer`: keys are missing or contradict each other.
        UnsupportedError: a token, or a way of changing texts, that is not implemented.
    """
    vocabulary = read_vocabulary(metadata, source, (NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE))
    if vocabulary.get("remove_extra_whitespaces", bool, False):
        raise UnsupportedError("gguf-tokenizer", f"{source}: remove_extra_whitespaces in a SentencePiece tokenizer")
    unknown, prefix = vocabulary.of(UNKNOWN), vocabulary.get("add_space_prefix", bool, True)
    if len(unknown) > 1:
        raise vocabulary.error(f"{counted(len(unknown), 'token')} for what is unknown")
    tokenizer = Tokenizer(
        models.BPE(
            vocab=vocabulary.ids,
            merges=_merges(vocabulary),
            unk_token=unknown[0] if unknown else None,
            fuse_unk=True,
            byte_fallback=True,
        )
    )
    # Not Metaspace, which leaves out the prefix before a space: each run of text between special tokens gets one.
    first = [normalizers.Prepend(SPACE)] if prefix else []
    tokenizer.normalizer = normalizers.Sequence([*first, normalizers.Replace(" ", SPACE)])
    strip = [decoders.Strip(" ", 1, 0)] if prefix else []
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse(), *strip]
    )
    vocabulary.add_to(tokenizer)
    vocabulary.add_ends(tokenizer, add_bos=True)
    return tokenizer


def _merges(vocabulary: Vocabulary) -> list[tuple[str, str]]:
    """Every pair of tokens that makes a token, that with the highest score first."""
    scores = vocabulary.get("scores", list)
    if len(scores) != len(vocabulary.tokens) or not all(
        isinstance(score, float) and isfinite(score) for score in scores
    ):
        raise vocabulary.error(f"{counted(len(scores), 'score')} for {counted(len(vocabulary.tokens), 'token')}")
    pieces = {
        token: index
        for index, (token, kind) in enumerate(zip(vocabulary.tokens, vocabulary.kinds, strict=True))
        if kind in (NORMAL, USER_DEFINED)
    }
    found = [
        (-scores[index], index, pieces[token[:at]], pieces[token[at:]], token, at)
        for token, index in pieces.items()
        for at in range(1, len(token))
        if token[:at] in pieces and token[at:] in pieces
    ]
    return [(token[:at], token[at:]) for *_, token, at in sorted(found)]
