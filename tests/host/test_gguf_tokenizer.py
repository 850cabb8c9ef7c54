"""Tokenizers of GGUF files: against transformers' own loader, and against the rules as they are written down."""

from __future__ import annotations

import json
import unicodedata
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import regex
from tokenizers import Tokenizer as Library
from tokenizers import decoders, models, normalizers, pre_tokenizers, trainers

from plait.errors import CheckpointError, PlaitError, UnsupportedError
from plait.frontend.gguf.ends import end_tokens
from plait.frontend.gguf.pre_tokenizers import PRE_TOKENIZERS
from plait.frontend.gguf.sentencepiece import SPACE
from plait.frontend.gguf.tokenizer import tokenizer_json
from plait.frontend.tokenizer import DoubleBosWarning, Tokenizer
from tests.gguf_files import write_gguf

TEXTS = [
    "Hello world! It's 2024, isn't it? WE'LL see 1234567 things; don't worry.",
    "  two  spaces\n\n\nand lines\r\n\ttabs \t end   ",
    "def f(x):\n    return x**2 + [1, 2, 3][0]  # a/b//c",
    "naïve café Ünïcödé ŁÓDŹ ǅungla e\u0301",
    "漢字とかな 中文，标点。 한국어 ไทย हिन्दी العربية",
    "😀👍🏽 \u200b\u00a0 ½ ² Ⅷ ٣٤٥ 12345",
    "camelCaseWords HTTPServer snake_case U.S.A. $5.00 <b>x</b> ~|^`",
    "",
    " ",
    "a",
]


def trained(cut: pre_tokenizers.PreTokenizer, size: int = 700) -> tuple[list[str], list[str]]:
    """Tokens and merges of a byte-level BPE trained on the texts."""
    library = Library(models.BPE())
    library.pre_tokenizer = cut
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=size, initial_alphabet=alphabet, special_tokens=["<|end|>", "<|begin|>"], show_progress=False
    )
    library.train_from_iterator(TEXTS * 3, trainer)
    found = json.loads(library.to_str())["model"]
    tokens = sorted(found["vocab"], key=found["vocab"].get)
    return tokens, [" ".join(pair) for pair in found["merges"]]


@pytest.fixture(scope="module")
def words() -> tuple[list[str], list[str]]:
    """Trained on whole words with what surrounds them, so that every way of cutting keeps some merges from use."""
    loose = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split("\n", "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    return trained(loose)


def bpe(words: tuple[list[str], list[str]], pre: str, **changes: Any) -> dict[str, Any]:
    tokens, merges = words
    data = {
        "model": "gpt2",
        "pre": pre,
        "tokens": tokens,
        "token_type": [3, 3] + [1] * (len(tokens) - 2),
        "merges": merges,
        "eos_token_id": 0,
        "bos_token_id": 1,
        "add_bos_token": False,
    } | changes
    return {f"tokenizer.ggml.{key}": value for key, value in data.items() if value is not ...}


def ids(metadata: dict[str, Any], text: str) -> list[int]:
    return Tokenizer(tokenizer_json(metadata, "m.gguf")).encode(text)


@pytest.mark.parametrize("pre", PRE_TOKENIZERS)
def test_cuts_are_those_that_are_written_down(pre: str) -> None:
    """The same expressions by another engine: matches and what lies between them, one expression after the other."""
    for text in TEXTS:
        normal = unicodedata.normalize("NFC", text) if PRE_TOKENIZERS[pre].nfc else text
        pieces = [normal]
        for cut in PRE_TOKENIZERS[pre].cuts:
            pieces = [part for piece in pieces for part in _cut(piece, cut)]
        ours = PRE_TOKENIZERS[pre].build().pre_tokenize_str(normal)
        decoder = decoders.ByteLevel()
        assert [decoder.decode([token]) for token, _ in ours] == pieces


def _cut(text: str, expression: str) -> list[str]:
    parts, at = [], 0
    for match in regex.finditer(expression, text):
        parts += [text[at : match.start()], match.group()]
        at = match.end()
    return [part for part in (*parts, text[at:]) if part]


SHARED = ("llama-bpe", "smaug-bpe", "qwen2", "deepseek-r1-qwen", "tekken", "gpt-4o", "gpt-2")
"""What transformers has expressions for, or takes GPT-2's."""


@pytest.mark.parametrize("pre", SHARED)
def test_tokens_equal_those_of_transformers_loader(
    pre: str, words: tuple[list[str], list[str]], tmp_path: Path
) -> None:
    from transformers import AutoTokenizer

    metadata = bpe(words, pre)
    tensors = {"token_embd.weight": ("F32", np.zeros((2, 32), np.float32))}
    write_gguf(tmp_path / "m.gguf", "llama", metadata, tensors)
    theirs = AutoTokenizer.from_pretrained(tmp_path, gguf_file="m.gguf")
    differ = [text for text in TEXTS if ids(metadata, text) != theirs.encode(text, add_special_tokens=False)]
    # Qwen's own tokenizer composes characters first, which transformers leaves out here.
    assert differ == ([TEXTS[3]] if pre == "qwen2" else [])


def test_ways_of_cutting_differ(words: tuple[list[str], list[str]]) -> None:
    """So that none of the tests above holds for every table."""
    different = {pre.cuts for pre in PRE_TOKENIZERS.values()}
    answers = {tuple(tuple(ids(bpe(words, name), text)) for text in TEXTS) for name in PRE_TOKENIZERS}
    assert len(answers) >= len(different)


def test_a_piece_that_is_a_token_is_taken_whole() -> None:
    """Llama 3 has tokens that no merge makes."""
    words = (["<|end|>", "<|begin|>", "a", "b", "c", "abc", "ab"], ["a b"])
    assert ids(bpe(words, "smaug-bpe"), "abc") == [6, 4]
    assert ids(bpe(words, "llama-bpe"), "abc") == [5]


@pytest.mark.parametrize("pre", PRE_TOKENIZERS)
def test_bos_where_the_file_does_not_say(pre: str, words: tuple[list[str], list[str]]) -> None:
    begins = ids(bpe(words, pre, add_bos_token=...), "a")[0] == 1
    assert begins is (pre in ("llama-bpe", "llama3", "llama-v3", "falcon3", "pixtral", "tekken"))


def test_a_double_bos_is_warned_about(words: tuple[list[str], list[str]]) -> None:
    """G73: the tokenizer's BOS, and one in the text. A chat template writes the only one."""
    text = tokenizer_json(bpe(words, "llama-bpe", add_bos_token=True), "m.gguf")
    tokenizer = Tokenizer(text, chat_template="{{ bos_token }}{{ messages[0].content }}", bos_token_id=1)
    with pytest.warns(DoubleBosWarning):
        assert tokenizer.encode("<|begin|>a")[:2] == [1, 1]
    assert tokenizer.encode_chat([{"role": "user", "content": "a"}]).count(1) == 1


# --- SentencePiece


@pytest.fixture(scope="module")
def pieces() -> dict[str, Any]:
    """A vocabulary as SentencePiece trains one: pieces with scores by rank, bytes, and what is special."""
    library = Library(models.BPE(unk_token="<unk>"))
    library.normalizer = normalizers.Sequence([normalizers.Prepend(SPACE), normalizers.Replace(" ", SPACE)])
    library.pre_tokenizer = pre_tokenizers.Split(SPACE, "merged_with_next")
    trainer = trainers.BpeTrainer(vocab_size=400, limit_alphabet=60, show_progress=False)
    library.train_from_iterator(TEXTS * 3, trainer)
    vocab = library.get_vocab()
    learned = sorted(vocab, key=lambda token: (len(token) == 1, vocab[token]))
    special = {"<unk>": 2, "<s>": 3, "</s>": 3, "<|user|>": 3, "    ": 4}
    tokens = [*special, *(f"<0x{byte:02X}>" for byte in range(256)), *learned]
    kinds = [*special.values(), *[6] * 256, *[1] * len(learned)]
    scores = [0.0] * (len(special) + 256) + [-float(rank) for rank in range(len(learned))]
    return {
        "model": "llama", "pre": "default", "tokens": tokens, "token_type": kinds, "scores": scores,
        "bos_token_id": 1, "eos_token_id": 2, "unknown_token_id": 0,
    }  # fmt: skip


def spm(pieces: dict[str, Any], **changes: Any) -> dict[str, Any]:
    return {f"tokenizer.ggml.{key}": value for key, value in (pieces | changes).items() if value is not ...}


def greedy(text: str, pieces: dict[str, Any], *, prefix: bool) -> list[int]:
    """SentencePiece's BPE (Kudo and Richardson 2018) as llama.cpp has it: of all neighbours the two that make the
    token with the highest score, the left ones first; what is left is bytes."""
    tokens, scores = pieces["tokens"], pieces["scores"]
    index = {token: at for at, token in enumerate(tokens) if pieces["token_type"][at] in (1, 6)}
    found = []
    for run in regex.split(r"(<unk>|</?s>|<\|user\|>| {4})", text):
        if run in pieces["tokens"][:5]:
            found.append(tokens.index(run))
            continue
        symbols = list((SPACE if prefix and run else "") + run.replace(" ", SPACE))
        while True:
            neighbours = enumerate(pairwise(symbols))
            made = [(-scores[index[a + b]], at) for at, (a, b) in neighbours if a + b in index]
            if not made:
                break
            _, at = min(made)
            symbols[at : at + 2] = ["".join(symbols[at : at + 2])]
        for symbol in symbols:
            found += [index[symbol]] if symbol in index else [index[f"<0x{byte:02X}>"] for byte in symbol.encode()]
    return found


@pytest.mark.parametrize("prefix", [True, False])
def test_sentencepiece_merges_by_score(prefix: bool, pieces: dict[str, Any]) -> None:
    metadata = spm(pieces, add_space_prefix=prefix, add_bos_token=False)
    for text in [*TEXTS, "<|user|>Hello world!</s> next", "a    b     c"]:
        assert ids(metadata, text) == greedy(text, pieces, prefix=prefix), text


def test_sentencepiece_equals_transformers_loader(pieces: dict[str, Any], tmp_path: Path) -> None:
    """By the rules of Phi-3, which put the prefix before a space too."""
    from transformers import AutoTokenizer

    metadata = spm(pieces, add_bos_token=True)
    tensors = {"token_embd.weight": ("F32", np.zeros((2, 32), np.float32))}
    write_gguf(tmp_path / "m.gguf", "phi3", metadata, tensors)
    theirs = AutoTokenizer.from_pretrained(tmp_path, gguf_file="m.gguf")
    for text in TEXTS:
        assert ids(metadata, text)[1:] == theirs.encode(text, add_special_tokens=False), text


@pytest.mark.parametrize("prefix", [True, False])
def test_text_comes_back(prefix: bool, pieces: dict[str, Any]) -> None:
    tokenizer = Tokenizer(tokenizer_json(spm(pieces, add_space_prefix=prefix), "m.gguf"))
    # Behind a token that is cut out of the text first, SentencePiece puts a prefix that was not there.
    for text in [text for text in TEXTS if not prefix or "    " not in text]:
        assert tokenizer.decode(tokenizer.encode(text)) == text
        stream = tokenizer.stream()
        assert "".join([stream.push(token) for token in tokenizer.encode(text)]) + stream.finish() == text


def test_sentencepiece_begins_with_bos_where_the_file_does_not_say(pieces: dict[str, Any]) -> None:
    assert ids(spm(pieces), "a")[0] == 1
    assert ids(spm(pieces, add_eos_token=True), "a")[-1] == 2


def test_phi_3_drops_spaces_behind_its_tokens(pieces: dict[str, Any]) -> None:
    """llama.cpp goes by the model's name, for want of a key."""
    metadata = spm(pieces, add_bos_token=False)
    plain, phi = ids(metadata, "<|user|>\n a"), ids(metadata | {"general.name": "Phi-3 Mini"}, "<|user|>\n a")
    assert phi == ids(metadata, "<|user|>a") != plain
    assert ids(metadata | {"general.name": "Phi-3"}, "<s> a") == ids(metadata, "<s> a")


@pytest.mark.parametrize(
    ("changes", "kind", "word"),
    [
        ({"scores": ...}, CheckpointError, "scores"),
        ({"scores": [0.0]}, CheckpointError, "1 score for"),
        ({"remove_extra_whitespaces": True}, UnsupportedError, "remove_extra_whitespaces"),
        ({"add_space_prefix": "yes"}, CheckpointError, "add_space_prefix"),
        ({"bos_token_id": ...}, CheckpointError, "bos_token_id"),
    ],
)
def test_other_vocabularies_are_refused(
    changes: dict[str, Any], kind: type[PlaitError], word: str, pieces: dict[str, Any]
) -> None:
    with pytest.raises(kind) as caught:
        tokenizer_json(spm(pieces, **changes), "m.gguf")
    assert word in caught.value.what


def test_scores_that_are_no_numbers(pieces: dict[str, Any]) -> None:
    with pytest.raises(CheckpointError):
        tokenizer_json(spm(pieces, scores=[float("nan"), *pieces["scores"][1:]]), "m.gguf")


# --- where an answer ends


@pytest.mark.parametrize(
    ("tokens", "keys", "ends"),
    [
        (["a", "<end_of_turn>"], {"eos": 0}, [0, 1]),
        (["a", "<|im_end|>"], {"eos": 1}, [1]),
        (["a", "<|im_end|>"], {"eos": 0, "eot": 0}, [0, 0]),
        (["<|return|>", "<|call|>", "<|end|>"], {"eos": 0}, [0, 1]),
        (["<|end|>", "a"], {}, [0]),
    ],
)
def test_tokens_that_end_a_turn(tokens: list[str], keys: dict[str, int], ends: list[int]) -> None:
    metadata: dict[str, Any] = {f"tokenizer.ggml.{name}_token_id": value for name, value in keys.items()}
    assert end_tokens(metadata | {"tokenizer.ggml.tokens": tokens}) == ends
