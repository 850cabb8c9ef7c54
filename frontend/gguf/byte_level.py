"""Byte-level BPE: tokens are spelled in GPT-2's alphabet of bytes, and the file lists the merges."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tokenizers import Tokenizer, decoders, models, normalizers

from plait.errors import UnsupportedError
from plait.frontend.files import some
from plait.frontend.gguf.pre_tokenizers import PRE_TOKENIZERS
from plait.frontend.gguf.vocabulary import CONTROL, NORMAL, UNUSED, USER_DEFINED, read_vocabulary

HINT = "use the safetensors checkpoint, which brings its tokenizer.json"


def byte_level(metadata: Mapping[str, Any], source: str) -> Tokenizer:
    """The tokenizer.

    Raises:
        CheckpointError: `gguf-tokenizer`: keys are missing or contradict each other.
        UnsupportedError: a pre-tokeniser that is not known, by name.
    """
    name = metadata.get("tokenizer.ggml.pre")
    if not isinstance(name, str) or name not in PRE_TOKENIZERS:
        raise UnsupportedError(
            "gguf-tokenizer",
            f"{source}: pre-tokeniser {name!r:.100}",
            why=f"GGUF stores its name only; known are {', '.join(PRE_TOKENIZERS)}",
            hint=HINT,
        )
    if metadata.get("tokenizer.ggml.add_space_prefix", False) is not False:
        raise UnsupportedError("gguf-tokenizer", f"{source}: add_space_prefix in a BPE tokenizer", hint=HINT)
    vocabulary = read_vocabulary(metadata, source, (NORMAL, CONTROL, USER_DEFINED, UNUSED))
    ids, merges = vocabulary.ids, vocabulary.get("merges", list)
    pairs = [_pair(merge) for merge in merges]
    strange = [repr(merge) for merge, pair in zip(merges, pairs, strict=True) if not _known(pair, ids)]
    if strange:
        raise vocabulary.error(f"merges that make no token: {some(strange)}")
    pre = PRE_TOKENIZERS[name]
    tokenizer = Tokenizer(models.BPE(vocab=ids, merges=pairs, ignore_merges=pre.whole))
    if pre.nfc:
        tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = pre.build()
    tokenizer.decoder = decoders.ByteLevel()
    vocabulary.add_to(tokenizer)
    vocabulary.add_ends(tokenizer, pre.add_bos)
    return tokenizer


def _pair(merge: Any) -> tuple[str, str]:
    left, _, right = merge.partition(" ") if isinstance(merge, str) else ("", "", "")
    return left, right


def _known(pair: tuple[str, str], ids: Mapping[str, int]) -> bool:
    return all(token in ids for token in (*pair, "".join(pair)))
