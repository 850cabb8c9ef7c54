"""Every form a checkpoint may lie there in, and every way in which it may not."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from plait.errors import CheckpointError, PlaitError, UnsupportedError, UsageError
from plait.frontend.checkpoint import Checkpoint, open_checkpoint
from plait.frontend.lower import lower
from tests.adapters import save_adapter
from tests.checkpoints import CHAT_TEMPLATE, edit_config, save, save_gguf


def refused(path: Path, kind: type[PlaitError] = CheckpointError, config: Path | None = None) -> PlaitError:
    with pytest.raises(kind) as caught:
        open_checkpoint(path, config)
    return caught.value


def same(a: Checkpoint, b: Checkpoint) -> bool:
    assert a.weights is not None
    assert b.weights is not None
    return a.config == b.config and a.weights.keys() == b.weights.keys()


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return save(tmp_path / "tiny", tokenizer=True)


def test_a_directory_and_its_file_are_one_checkpoint(folder: Path) -> None:
    by_folder, by_file = open_checkpoint(folder), open_checkpoint(folder / "model.safetensors")
    assert by_folder == by_file
    assert by_folder.name == "tiny"
    assert by_folder.family == "llama"
    assert by_folder.max_positions == 512
    assert by_folder.tokenizer == folder / "tokenizer.json"
    assert by_folder.chat_template == CHAT_TEMPLATE
    assert (by_folder.bos_token_id, by_folder.eos_token_ids) == (0, (1,))
    (path, (size, digest)), *rest = by_folder.files.items()
    assert not rest
    assert Path(path).is_absolute()
    assert size == Path(path).stat().st_size
    assert digest.startswith("sha256:")


def test_relative_paths_become_absolute(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(folder.parent)
    assert open_checkpoint("tiny") == open_checkpoint(folder)


def test_an_index_and_its_directory_are_one_checkpoint(tmp_path: Path) -> None:
    folder = save(tmp_path / "m", max_shard_size="150KB")
    checkpoint = open_checkpoint(folder)
    assert checkpoint == open_checkpoint(folder / "model.safetensors.index.json")
    assert len(checkpoint.files) >= 3
    lower(checkpoint)


def test_one_shard_is_no_checkpoint(tmp_path: Path) -> None:
    folder = save(tmp_path / "m", max_shard_size="150KB")
    error = refused(sorted(folder.glob("*.safetensors"))[0])
    assert error.code == "checkpoint-shard"
    assert str(folder) in error.hint


def test_a_hub_cache_folder(folder: Path, tmp_path: Path) -> None:
    """Snapshots are symlinks to blobs without a suffix; refs/main names the one to take."""
    cache = tmp_path / "models--org--tiny"
    (cache / "blobs").mkdir(parents=True)
    for revision in ("aaa", "bbb"):
        (cache / "snapshots" / revision).mkdir(parents=True)
    for index, file in enumerate(sorted(folder.iterdir())):
        shutil.copy(file, cache / "blobs" / str(index))
        (cache / "snapshots" / "bbb" / file.name).symlink_to(cache / "blobs" / str(index))
    assert refused(cache).code == "checkpoint-ambiguous"
    (cache / "refs").mkdir()
    (cache / "refs" / "main").write_text("bbb\n")
    checkpoint = open_checkpoint(cache)
    assert same(checkpoint, open_checkpoint(folder))
    assert checkpoint.name == "org/tiny"
    (cache / "refs" / "main").write_text("ccc")
    assert refused(cache).code == "checkpoint-snapshot"


def test_a_config_alone_has_no_weights(folder: Path) -> None:
    checkpoint = open_checkpoint(folder / "config.json")
    assert checkpoint.weights is None
    assert checkpoint.files == {}
    assert str(lower(checkpoint)) == str(lower(open_checkpoint(folder)))
    (folder / "model.safetensors").unlink()
    assert open_checkpoint(folder) == checkpoint


def test_a_lone_file_needs_a_config(folder: Path, tmp_path: Path) -> None:
    lone = tmp_path / "lone" / "weights.safetensors"
    lone.parent.mkdir()
    shutil.copy(folder / "model.safetensors", lone)
    error = refused(lone)
    assert error.code == "config-missing"
    assert "--config" in error.hint
    checkpoint = open_checkpoint(lone, folder / "config.json")
    assert same(checkpoint, open_checkpoint(folder))
    assert checkpoint.name == "weights"
    assert checkpoint.tokenizer == folder / "tokenizer.json"


def test_a_lone_file_may_carry_its_config(folder: Path, tmp_path: Path) -> None:
    lone = tmp_path / "lone" / "model.safetensors"
    lone.parent.mkdir()
    text = (folder / "config.json").read_text()
    save_file(load_file(folder / "model.safetensors"), lone, metadata={"config": text})
    assert same(open_checkpoint(lone), open_checkpoint(folder))
    save_file(load_file(folder / "model.safetensors"), lone, metadata={"config": text[:-9]})
    assert refused(lone).code == "json-invalid"


def test_the_given_config_wins_over_the_one_beside(folder: Path, tmp_path: Path) -> None:
    other = tmp_path / "other.json"
    config = json.loads((folder / "config.json").read_text())
    other.write_text(json.dumps(config | {"rms_norm_eps": 0.125}))
    assert open_checkpoint(folder, other).config.norm.eps == 0.125


def test_a_config_too_many(folder: Path, tmp_path: Path) -> None:
    config = folder / "config.json"
    assert refused(config, UsageError, config).code == "config-twice"
    assert refused(save_gguf(tmp_path / "m.gguf", folder), UsageError, config).code == "config-twice"
    assert refused(folder, CheckpointError, tmp_path / "none.json").code == "checkpoint-unreadable"


def test_a_gguf_in_a_directory(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "g").mkdir()
    path = save_gguf(tmp_path / "g" / "m-q8.gguf", folder)
    assert open_checkpoint(tmp_path / "g") == open_checkpoint(path)
    assert open_checkpoint(path).name == "m-q8"
    assert open_checkpoint(path).tokenizer is None
    save_gguf(tmp_path / "g" / "m-q4.gguf", folder, "Q4_0")
    error = refused(tmp_path / "g")
    assert error.code == "checkpoint-ambiguous"
    assert "m-q4.gguf" in error.what


def test_shards_without_an_index_are_ambiguous(tmp_path: Path) -> None:
    folder = save(tmp_path / "m", max_shard_size="150KB")
    (folder / "model.safetensors.index.json").unlink()
    error = refused(folder)
    assert error.code == "checkpoint-ambiguous"
    assert "index is missing" in error.why


def test_an_index_and_a_single_file_are_ambiguous(tmp_path: Path, folder: Path) -> None:
    sharded = save(tmp_path / "m", max_shard_size="150KB")
    shutil.copy(folder / "model.safetensors", sharded)
    assert refused(sharded).code == "checkpoint-ambiguous"


@pytest.mark.parametrize("name", ["pytorch_model.bin", "model.pt", "model.pth", "flax_model.msgpack"])
def test_other_formats_are_refused_with_what_to_do(name: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / name).write_bytes(b"x")
    for path in (tmp_path / name, tmp_path):
        error = refused(path, UnsupportedError)
        assert name in error.what
        assert "safetensors" in error.hint


def test_an_adapter_is_no_model(tmp_path: Path, folder: Path) -> None:
    """It is said whose it is, and how it is given; a model with an adapter's config beside it is still one."""
    adapter = save_adapter(tmp_path / "adapter", folder)
    snapshot = tmp_path / "cache" / "snapshots" / "1"
    shutil.copytree(adapter, snapshot)
    for path in (adapter, adapter / "adapter_model.safetensors", adapter / "adapter_config.json", tmp_path / "cache"):
        error = refused(path)
        where = snapshot if path.name == "cache" else adapter
        assert (error.code, error.hint) == (
            "checkpoint-adapter",
            f"give the base model, and the adapter with it: --lora {where}",
        )
        assert "'some/model'" in error.why
    (adapter / "adapter_model.safetensors").rename(adapter / "adapter_model.bin")
    assert refused(adapter).code == refused(adapter / "adapter_model.bin").code == "checkpoint-adapter"
    whole = shutil.copytree(folder, tmp_path / "whole")
    shutil.copy(adapter / "adapter_config.json", whole)
    assert open_checkpoint(whole).weights == open_checkpoint(whole / "model.safetensors").weights


def test_nothing_there(tmp_path: Path, folder: Path) -> None:
    assert refused(tmp_path / "absent").code == "checkpoint-missing"
    assert "tiny" in refused(tmp_path / "tinny").hint
    (tmp_path / "empty").mkdir()
    assert refused(tmp_path / "empty").code == "checkpoint-missing"
    (tmp_path / "empty" / "manifest.json").write_text("{}")
    assert "plait run" in refused(tmp_path / "empty").hint
    (tmp_path / "notes.txt").write_text("x")
    assert refused(tmp_path / "notes.txt", UnsupportedError).code == "checkpoint-format"


def test_a_broken_config(folder: Path) -> None:
    path = folder / "config.json"
    path.write_text(path.read_text()[:-5])
    assert refused(folder).code == "json-invalid"
    path.write_text('{"model_type": "llama", "model_type": "llama"}')
    assert "more than once: 'model_type'" in refused(folder).why
    for text, kind in (("[1]", "a list"), ("null", "null"), ("5", "a number"), ("true", "true or false")):
        path.write_text(text)
        assert (refused(folder).code, refused(folder).why) == ("json-invalid", f"it holds {kind}")


def test_a_config_of_no_supported_model_is_refused_before_the_weights(folder: Path) -> None:
    edit_config(folder, model_type="bert", architectures=["BertModel"])
    save_file({"ids": np.arange(4)}, folder / "model.safetensors")
    error = refused(folder, UnsupportedError)
    assert error.code == "family-unsupported"
    assert "'bert'" in error.what


def test_eos_comes_from_the_generation_config_first(folder: Path) -> None:
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [3, 1], "temperature": 0.6}))
    checkpoint = open_checkpoint(folder)
    assert checkpoint.eos_token_ids == (3, 1)
    assert checkpoint.generation["temperature"] == 0.6
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": "</s>"}))
    assert refused(folder).code == "config-type"


def test_eos_and_bos_may_be_named_by_the_tokenizer_only(folder: Path) -> None:
    edit_config(folder, eos_token_id=None, bos_token_id=None)
    (folder / "generation_config.json").unlink(missing_ok=True)
    checkpoint = open_checkpoint(folder)
    assert (checkpoint.bos_token_id, checkpoint.eos_token_ids) == (0, (1,))
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": {"content": "<|user|>"}}))
    checkpoint = open_checkpoint(folder)
    assert (checkpoint.bos_token_id, checkpoint.eos_token_ids) == (None, (2,))


def test_dtype_falls_back_to_what_is_stored(tmp_path: Path) -> None:
    folder = edit_config(save(tmp_path / "m", dtype="float16"), dtype=..., torch_dtype=...)
    assert open_checkpoint(folder).dtype == "float16"
    assert refused(folder / "config.json").code == "config-key-missing"


def test_chat_templates_lie_in_three_places(folder: Path) -> None:
    path = folder / "tokenizer_config.json"
    path.write_text(
        json.dumps({"chat_template": [{"name": "default", "template": "D"}, {"name": "t", "template": "T"}]})
    )
    assert open_checkpoint(folder).chat_template == "D"
    (folder / "chat_template.jinja").write_text("J")
    assert open_checkpoint(folder).chat_template == "J"
    path.unlink()
    (folder / "chat_template.jinja").unlink()
    path.write_text(json.dumps({"chat_template": 5}))
    assert refused(folder).code == "chat-template-invalid"
    path.unlink()
    assert open_checkpoint(folder).chat_template is None


def test_opening_and_lowering_import_no_torch(folder: Path, tmp_path: Path) -> None:
    gguf = save_gguf(tmp_path / "m.gguf", folder)
    code = f"""
import sys
from plait.frontend.checkpoint import open_checkpoint
from plait.frontend.lower import lower
for path in ({str(folder)!r}, {str(gguf)!r}):
    lower(open_checkpoint(path))
print(sorted({{"torch", "jax", "transformers", "triton"}} & sys.modules.keys()))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_a_dtype_that_nobody_says_can_be_given(tmp_path: Path) -> None:
    """GPT-OSS's config says none, and without weights there is none to ask."""
    folder = edit_config(save(tmp_path / "m"), dtype=..., torch_dtype=...)
    assert open_checkpoint(folder).dtype == "float32"
    (folder / "model.safetensors").unlink()
    error = refused(folder / "config.json", CheckpointError)
    assert error.code == "config-key-missing"
    assert "--dtype" in error.hint
    assert open_checkpoint(folder / "config.json", dtype="bfloat16").dtype == "bfloat16"
