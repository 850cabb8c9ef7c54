"""What the fuzzer found, each with the answer that it has now."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from plait.errors import LONGEST, CheckpointError, PlaitError, UnsupportedError
from plait.frontend.checkpoint import open_checkpoint
from plait.frontend.families import read_config
from plait.frontend.families.reading import MAX_BLOCKS
from plait.frontend.files import parse_json
from plait.frontend.lower import lower
from plait.frontend.tokenizer import Tokenizer
from tests.checkpoints import save_tokenizer
from tests.fuzz.kinds import _pieces
from tests.host.command_line import LLAMA
from tests.quantised_checkpoints import FORMATS


def edited_tokenizer(folder: Path, *keys: Any, value: Any) -> str:
    data = json.loads((save_tokenizer(folder) / "tokenizer.json").read_text())
    at = data
    for key in keys[:-1]:
        at = at[key]
    at[keys[-1]] = value
    return json.dumps(data)


@pytest.mark.parametrize("value", [{}, {"<s": {"id": "<s", "ids": [0], "tokens": ["<s"]}}])
def test_a_template_names_a_special_token_that_is_not_there(tmp_path: Path, value: dict[str, Any]) -> None:
    """The tokenizers library panics, which is no Exception."""
    tokenizer = Tokenizer(edited_tokenizer(tmp_path, "post_processor", "special_tokens", value=value), "t.json")
    with pytest.raises(CheckpointError, match=r"t\.json is not a tokenizer that works") as caught:
        tokenizer.encode("hello")
    assert caught.value.code == "tokenizer-invalid" and "no entry found" in caught.value.why


def test_a_decoder_strips_more_than_there_is() -> None:
    data = json.loads(_pieces())
    assert Tokenizer(json.dumps(data)).decode([262, 259]) == "he", "whole, it works"
    data["decoder"]["decoders"][3]["stop"] = 196
    with pytest.raises(CheckpointError, match="not a tokenizer that works"):
        Tokenizer(json.dumps(data)).decode([])


def test_control_c_inside_the_library_stays_what_it_is() -> None:
    from plait.frontend.tokenizer import library

    with pytest.raises(KeyboardInterrupt), library("t.json"):
        raise KeyboardInterrupt


@pytest.mark.parametrize("template", ["{{ " + "(" * 3000, "{{ " + "[" * 2000 + "]" * 2000 + " }}", "{% for %}"])
def test_a_template_nested_too_deep(tmp_path: Path, template: str) -> None:
    text = (save_tokenizer(tmp_path) / "tokenizer.json").read_text()
    tokenizer = Tokenizer(text, chat_template=template)
    with pytest.raises(CheckpointError) as caught:
        tokenizer.encode_chat([{"role": "user", "content": "hi"}])
    assert caught.value.code == "chat-template-invalid"


@pytest.mark.parametrize("text", [rb'{"a": "\ud800"}', rb'{"\uDFFF": 1}', rb'{"a": ["x", {"b": "\udc00\ud800"}]}'])
def test_halves_of_characters_are_refused(text: bytes) -> None:
    with pytest.raises(CheckpointError, match="not valid JSON"):
        parse_json(text, "x")


def test_whole_characters_are_read() -> None:
    assert parse_json(rb'{"a": "\ud83d\ude00", "b": "\\ud800"}', "x") == {"a": "\N{GRINNING FACE}", "b": r"\ud800"}


def test_an_error_with_an_endless_name_can_be_read() -> None:
    with pytest.raises(UnsupportedError) as caught:
        read_config(LLAMA | {"model_type": "a" * 1_000_000}, "config.json")
    assert len(caught.value.what) < LONGEST + 100 and "characters more" in caught.value.what
    assert caught.value.what.startswith("the model type 'aaa")
    short = PlaitError("x", "y" * LONGEST)
    assert short.what == "y" * LONGEST


def test_a_config_of_more_blocks_than_any_model_has() -> None:
    assert read_config(LLAMA | {"num_hidden_layers": MAX_BLOCKS}, "x").blocks == MAX_BLOCKS
    with pytest.raises(CheckpointError, match="more than"):
        read_config(LLAMA | {"num_hidden_layers": MAX_BLOCKS + 1}, "x")


@pytest.mark.parametrize("order", [{"a": 1}, [1], 0, 1.5, "columns"])
def test_an_order_of_columns_that_is_no_word(order: Any) -> None:
    config = json.loads(json.dumps(FORMATS["pack-4"].config))
    config["config_groups"]["group_0"]["weights"]["actorder"] = order
    with pytest.raises(UnsupportedError, match="'actorder' is"):
        read_config(LLAMA | {"quantization_config": config}, "config.json")


def _graph(folder: Path) -> Path:
    from tests.onnx_models import decoder, group_query, save

    folder.mkdir()
    return save(decoder(group_query()), folder / "model.onnx")


def test_onnx_through_the_links_of_a_hub_cache(tmp_path: Path) -> None:
    """onnx-ir reads no external data through a link, and the hub's cache is made of them."""
    made = _graph(tmp_path / "blobs")
    cache = tmp_path / "snapshot"
    cache.mkdir()
    for file in made.parent.iterdir():
        (cache / file.name).symlink_to(file)
    linked, plain = (lower(open_checkpoint(path)) for path in (cache / "model.onnx", made))
    assert str(linked) == str(plain)


def test_onnx_data_in_a_file_that_no_system_can_name(tmp_path: Path) -> None:
    made = _graph(tmp_path / "m")
    raw = made.read_bytes()
    assert raw.count(b"model.onnx.data")
    made.write_bytes(raw.replace(b"model.onnx.data", b"model\0onnx.data"))
    with pytest.raises(CheckpointError, match="which is no name"):
        open_checkpoint(made)
