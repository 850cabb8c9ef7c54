"""Text and tokens: round trips, streaming, chat templates, and the tokenizer of a GGUF file."""

from __future__ import annotations

import json
import warnings
from pathlib import Path
from typing import Any

import pytest

from plait.errors import CheckpointError, PlaitError, UnsupportedError, UserError
from plait.frontend.gguf.tokenizer import tokenizer_config, tokenizer_json
from plait.frontend.tokenizer import DoubleBosWarning, Tokenizer
from tests.checkpoints import CHAT_TEMPLATE, save_tokenizer

BOS, EOS, USER, ASSISTANT = range(4)
CHAT = [{"role": "user", "content": "hello"}, {"role": "assistant", "content": "é"}, {"role": "user", "content": "ü?"}]


def make(tmp_path: Path, template: str | None = CHAT_TEMPLATE) -> Tokenizer:
    folder = save_tokenizer(tmp_path)
    return Tokenizer.open(folder / "tokenizer.json", chat_template=template, bos_token_id=BOS, eos_token_ids=(EOS,))


@pytest.mark.parametrize("text", ["hello", "", "  spaces  ", "ünïcödé 漢字 😀", "a\nb\r\n\tc", "<|user|> hello"])
def test_text_comes_back(text: str, tmp_path: Path) -> None:
    tokenizer = make(tmp_path)
    ids = tokenizer.encode(text)
    assert ids[0] == BOS
    assert max(ids) < tokenizer.vocab_size
    assert tokenizer.decode(ids) == text.replace("<|user|>", "")
    assert tokenizer.decode(ids, skip_special_tokens=False) == "<s>" + text


def test_the_template_writes_the_only_bos(tmp_path: Path) -> None:
    """G73: template output is tokenised without the tokenizer's own special tokens."""
    tokenizer = make(tmp_path)
    ids = tokenizer.encode_chat(CHAT)
    assert ids.count(BOS) == 1
    assert ids[:2] == [BOS, USER]
    assert ids[-1] == ASSISTANT
    assert tokenizer.encode_chat(CHAT, add_generation_prompt=False) == ids[:-1]
    assert tokenizer.render_chat(CHAT[:1]) == "<s><|user|>hello</s><|assistant|>"


def test_a_template_that_writes_two_keeps_them(tmp_path: Path) -> None:
    """GLM-4.5 starts with two on purpose."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        ids = make(tmp_path, "{{ bos_token }}" + CHAT_TEMPLATE).encode_chat(CHAT)
    assert ids[:3] == [BOS, BOS, USER]


def test_a_double_bos_in_plain_text_is_warned_about(tmp_path: Path) -> None:
    tokenizer = make(tmp_path)
    with pytest.warns(DoubleBosWarning):
        assert tokenizer.encode("<s>hello")[:2] == [BOS, BOS]


def test_templates_agree_with_transformers(tmp_path: Path) -> None:
    from transformers import PreTrainedTokenizerFast

    template = (
        "{%- for message in messages %}\n  {%- if message.role == 'system' %}{{ raise_exception('no') }}{% endif %}\n"
        "  {{- bos_token if loop.first }}{{ message | tojson }}\n"
        "  {%- if loop.index == 2 %}{% generation %}[{{ message.content | trim }}]{% endgeneration %}{% endif %}\n"
        "  {% if loop.index == 3 %}{% break %}{% endif %}\n{% endfor %}\n{{ strftime_now('%Y') | length }}"
    )
    ours = make(tmp_path, template)
    theirs = PreTrainedTokenizerFast(tokenizer_file=str(tmp_path / "tokenizer.json"), bos_token="<s>", eos_token="</s>")
    expected = theirs.apply_chat_template(CHAT, chat_template=template, tokenize=False, add_generation_prompt=True)
    assert ours.render_chat(CHAT) == expected


@pytest.mark.parametrize(
    ("template", "code"),
    [
        ("{{ raise_exception('roles must alternate') }}", "chat-template"),
        ("{{ messages[9].content.x }}", "chat-template"),
        ("{{ messages[0].content + 1 }}", "chat-template"),
        ("{{ ().__class__.__bases__[0].__subclasses__() }}", "chat-template"),
        ("{{ 1 / 0 }}", "chat-template"),
        ("{% for i in range(10 ** 9) %}x{% endfor %}", "chat-template"),
        ("{% set _ = messages.append(1) %}", "chat-template"),
        ("{% if %}", "chat-template-invalid"),
        (None, "chat-template-missing"),
    ],
)
def test_templates_that_fail_do_so_by_name(template: str | None, code: str, tmp_path: Path) -> None:
    with pytest.raises(PlaitError) as caught:
        make(tmp_path, template).encode_chat(CHAT)
    assert caught.value.code == code


@pytest.mark.parametrize(
    "message", [{}, {"rol": "user", "content": "a"}, {"role": "user", "content": None}, {"role": 5}]
)
def test_a_message_without_its_parts_is_refused(message: dict[str, Any], tmp_path: Path) -> None:
    with pytest.raises(UserError, match="message of a chat"):
        make(tmp_path).encode_chat([{"role": "user", "content": "a"}, message])


def test_streaming_never_shows_half_a_character(tmp_path: Path) -> None:
    tokenizer = make(tmp_path)
    text = "hé 漢字 😀, hello!"
    decoder = tokenizer.stream()
    pieces = [decoder.push(token) for token in tokenizer.encode(text)]
    assert "".join(pieces) + decoder.finish() == text
    assert all("\ufffd" not in piece for piece in pieces)
    assert "😀" in pieces


def test_a_stream_that_ends_inside_a_character_says_so(tmp_path: Path) -> None:
    tokenizer = make(tmp_path)
    ids = tokenizer.encode("a😀")[:-1]
    decoder = tokenizer.stream()
    text = "".join(decoder.push(token) for token in ids) + decoder.finish()
    assert text == tokenizer.decode(ids)
    assert text.startswith("a\ufffd")


def test_training_settings_neither_cut_nor_pad(tmp_path: Path) -> None:
    path = save_tokenizer(tmp_path) / "tokenizer.json"
    data = json.loads(path.read_text())
    data["truncation"] = {"direction": "Right", "max_length": 4, "strategy": "LongestFirst", "stride": 0}
    data["padding"] = {
        "strategy": {"Fixed": 50}, "direction": "Right", "pad_to_multiple_of": None,
        "pad_id": 1, "pad_type_id": 0, "pad_token": "</s>",
    }  # fmt: skip
    path.write_text(json.dumps(data))
    assert len(Tokenizer.open(path).encode("abcdefghij")) == 11


def test_what_is_no_tokenizer(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError) as missing:
        Tokenizer.open(None)
    assert missing.value.code == "tokenizer-missing"
    with pytest.raises(CheckpointError) as absent:
        Tokenizer.open(tmp_path / "tokenizer.json")
    assert absent.value.code == "tokenizer-missing"
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(CheckpointError) as invalid:
        Tokenizer.open(tmp_path / "tokenizer.json")
    assert invalid.value.code == "tokenizer-invalid"
    with pytest.raises(UserError) as surrogate:
        make(tmp_path).encode("\ud800")
    assert surrogate.value.code == "text-invalid"


# --- GGUF


def metadata(**changes: Any) -> dict[str, Any]:
    """A tokenizer of bytes, a few merges and two special tokens."""
    from tokenizers import pre_tokenizers

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    pairs = ["h e", "l l", "he ll", "hell o", "Ġ Ġ", "Ġ hello", "1 2", "n '", "' t"]
    tokens = ["<|endoftext|>", "<|im_start|>", *alphabet, *(pair.replace(" ", "") for pair in pairs)]
    data: dict[str, Any] = {
        "model": "gpt2",
        "pre": "smollm",
        "tokens": tokens,
        "token_type": [3, 3] + [1] * (len(tokens) - 2),
        "merges": pairs,
        "bos_token_id": 1,
        "eos_token_id": 0,
    } | changes
    return {f"tokenizer.ggml.{key}": value for key, value in data.items() if value is not ...}


def tokens_of(text: str, **changes: Any) -> list[str]:
    data = metadata(**changes)
    names = data["tokenizer.ggml.tokens"]
    return [names[index] for index in Tokenizer(tokenizer_json(data, "m.gguf")).encode(text)]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("hello", ["hello"]),
        ("12", ["1", "2"]),
        ("  hello", ["Ġ", "Ġhello"]),
        ("n't", ["n", "'t"]),
        ("<|im_start|>hello", ["<|im_start|>", "hello"]),
    ],
)
def test_smollm_splits_digits_then_words(text: str, expected: list[str]) -> None:
    """Merges exist for `12`, two spaces and `n'`: the pre-tokeniser keeps each from being used."""
    assert tokens_of(text) == expected


def test_bos_and_eos_are_added_where_the_file_asks() -> None:
    assert tokens_of("hello", add_bos_token=True) == ["<|im_start|>", "hello"]
    assert tokens_of("hello", add_eos_token=True) == ["hello", "<|endoftext|>"]
    assert tokens_of("hello", add_bos_token=True, add_eos_token=True) == ["<|im_start|>", "hello", "<|endoftext|>"]


def test_names_and_template_for_the_config() -> None:
    config = tokenizer_config(metadata() | {"tokenizer.chat_template": "T"})
    assert (config["bos_token"], config["eos_token"], config["chat_template"]) == ("<|im_start|>", "<|endoftext|>", "T")


@pytest.mark.parametrize(
    ("changes", "kind", "word"),
    [
        ({"pre": "kimi-k2"}, UnsupportedError, "'kimi-k2'"),
        ({"pre": ...}, UnsupportedError, "None"),
        ({"model": "t5"}, UnsupportedError, "'t5'"),
        ({"add_space_prefix": True}, UnsupportedError, "add_space_prefix"),
        ({"tokens": ...}, CheckpointError, "tokens"),
        ({"merges": ...}, CheckpointError, "merges"),
        ({"merges": ["h e", "x"]}, CheckpointError, "'x'"),
        ({"merges": ["z z"]}, CheckpointError, "'z z'"),
        ({"merges": [3]}, CheckpointError, "3"),
        ({"tokens": ["a", "a"]}, CheckpointError, "contradicts"),
        ({"token_type": [1]}, CheckpointError, "contradicts"),
        ({"add_bos_token": True, "bos_token_id": 10**6}, CheckpointError, "bos"),
    ],
)
def test_other_tokenizers_are_refused(changes: dict[str, Any], kind: type[PlaitError], word: str) -> None:
    with pytest.raises(kind) as caught:
        tokenizer_json(metadata(**changes), "m.gguf")
    assert word in caught.value.what
