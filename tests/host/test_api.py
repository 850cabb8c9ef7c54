"""The public face: names, artifacts, plans edited by hand."""

from __future__ import annotations

import gc
import json
import re
import shutil
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

import plait
from plait import text
from plait.artifact import read_artifact
from plait.errors import ArtifactError, CheckpointError, FitError, PlanError, UsageError, UserError
from plait.present import Found
from plait.spec import Plan, from_yaml, to_yaml
from tests.checkpoints import random_ids, reference_logits, save

LOCAL = {"in_process": True}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save(tmp_path_factory.mktemp("models") / "tiny", tokenizer=True)


def test_public_names_are_frozen() -> None:
    assert plait.__all__ == [
        "Cluster", "Device", "Pipeline", "PlaitError", "Plan", "SamplingParams", "Target", "Workload", "__version__",
        "compile", "compile_artifact", "open", "plan",
    ]  # fmt: skip
    for name in plait.__all__:
        assert getattr(plait, name) is not None


def test_version_is_the_packages() -> None:
    pyproject = (Path(__file__).parents[2] / "pyproject.toml").read_text()
    assert f'version = "{plait.__version__}"' in pyproject


def test_string_in_string_out_list_in_list_out_and_ids(model: Path) -> None:
    with plait.compile(model, ["h100", "mi300"], run=LOCAL) as pipe:
        one = pipe.generate("abc", max_tokens=5)
        assert isinstance(one, str)
        assert pipe.generate(["abc", "xyz"], max_tokens=5)[0] == one
        assert pipe.generate(pipe.encode("abc"), max_tokens=5) == one
        assert pipe.generate([pipe.encode("abc")], max_tokens=5) == [one]
        assert "".join(pipe.stream("abc", max_tokens=5)) == one
        with pytest.raises(UserError, match="temprature"):
            pipe.generate("abc", temprature=1.0)
        assert pipe.generate(np.array(pipe.encode("abc")), max_tokens=5) == one
        with pytest.raises(UsageError, match="264"):
            pipe.generate([264])
        messages = [{"role": "user", "content": "abc"}]
        assert pipe.generate(messages, max_tokens=5) == pipe.generate("abc", max_tokens=5, chat=True)
        for strange in (b"abc", None, 5, {"role": "user", "content": "abc"}):
            with pytest.raises(UsageError, match="a prompt of type"):
                pipe.generate(strange)
            with pytest.raises(UsageError, match="a prompt of type"):
                pipe.stream(strange)
        for strange in ([5, 6.5], [5, "abc"], [5, {"role": "user", "content": "abc"}]):
            with pytest.raises(UsageError, match="is no token id"):
                pipe.generate(strange)
        assert pipe.plan.slices


def test_an_artifact_without_output_vanishes_with_its_pipeline(model: Path) -> None:
    pipe = plait.compile(model, "cpu", run=LOCAL)
    folder = pipe._artifact.folder
    assert folder.is_dir()
    pipe.close()
    pipe.close()
    assert not folder.exists()


def test_an_artifact_without_output_vanishes_when_its_pipeline_is_forgotten(model: Path) -> None:
    pipe = plait.compile(model, "cpu", run=LOCAL)
    folder = pipe._artifact.folder
    del pipe
    gc.collect()
    assert not folder.exists()


def test_a_stream_that_nobody_begins_is_cancelled(model: Path) -> None:
    with plait.compile(model, "cpu", run={"threads": 1}) as pipe:
        pieces = pipe.stream("abc", max_tokens=500)
        began = next(pipe.stream("abc", max_tokens=500))
        assert isinstance(began, str)
        del pieces
        gc.collect()
        deadline = time.monotonic() + 5
        while pipe.stats()["running"] and time.monotonic() < deadline:
            time.sleep(0.01)
        stats = pipe.stats()
        assert (stats["running"], stats["waiting"]) == (0, 0)
        assert stats["tokens"] < 1000


def test_a_fork_leaves_the_artifact_to_its_owner(model: Path) -> None:
    """In a process of its own: other tests load JAX, which does not like to be forked."""
    code = (
        "import os, sys, plait\n"
        "with plait.compile(sys.argv[1], 'cpu', run={'threads': 1}) as pipe:\n"
        "    child = os.fork()\n"
        "    if not child:\n"
        "        pipe.close()\n"
        "        os._exit(0)\n"
        "    assert os.waitpid(child, 0)[1] == 0\n"
        "    assert pipe.plan.model == 'tiny' and pipe.generate('abc', max_tokens=3)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, str(model)], capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr


def test_only_what_compile_wrote_is_replaced(model: Path, tmp_path: Path) -> None:
    made = plait.compile_artifact(model, "cpu", output=tmp_path / "m.plait").folder
    assert plait.compile_artifact(model, "cpu", output=made).folder == made
    (made / "notes.txt").write_text("mine")
    with pytest.raises(UserError, match=r"holds notes\.txt"):
        plait.compile_artifact(model, "cpu", output=made)
    assert (made / "notes.txt").read_text() == "mine"
    site = tmp_path / "site"
    for content in (
        "{}",
        '{"name": "a web site"}',
        '{"files": ["index.html"], "format_version": 1}',
        "[]",
        "",
        "[" * 9999,
    ):
        site.mkdir(exist_ok=True)
        (site / "manifest.json").write_text(content)
        (site / "index.html").write_text("mine")
        with pytest.raises(UserError, match="is not an artifact"):
            plait.compile_artifact(model, "cpu", output=site)
        assert (site / "index.html").read_text() == "mine"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["m.plait", "site"]


@pytest.mark.parametrize("when", ["first", "second"])
def test_an_artifact_that_cannot_be_replaced_stays(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, when: str
) -> None:
    made = plait.compile_artifact(model, "cpu", output=tmp_path / "m.plait").folder
    before = (made / "manifest.json").read_bytes()
    real = Path.rename

    def interrupted(path: Path, target: Path) -> Path:
        if (path == made) == (when == "first") and (path == made or (target == made and ".old" not in path.name)):
            raise KeyboardInterrupt
        return real(path, target)

    monkeypatch.setattr(Path, "rename", interrupted)
    with pytest.raises(KeyboardInterrupt):
        plait.compile_artifact(model, "h100,mi300", layers=(1, 2), output=made)
    assert (made / "manifest.json").read_bytes() == before
    assert [path.name for path in tmp_path.iterdir()] == ["m.plait"]


def test_more_than_this_host_can_emulate_is_refused_before_it_is_tried(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = plait.compile_artifact(model, "h100,cpu", layers=(1, 2), output=tmp_path / "m.plait")
    needed = sum(part.memory.weights_bytes + part.memory.kv_bytes for part in made.plan.slices if part.memory)
    monkeypatch.setattr(text, "memory_bytes", lambda: (needed, needed))
    plait.open(made.folder, **LOCAL).close()
    monkeypatch.setattr(text, "memory_bytes", lambda: (needed, needed - 1))
    with pytest.raises(FitError, match="does not fit this host") as caught:
        plait.open(made.folder, **LOCAL)
    assert [row["device"] for row in caught.value.rows] == ["h100.0", "cpu.0", "this host"]
    assert (caught.value.rows[-1]["needed"], caught.value.rows[-1]["short_by"]) == (needed, 1)
    monkeypatch.setattr(text, "accelerators", lambda: (Found("cuda", "H100"),))
    plait.open(made.folder, **LOCAL).close()
    monkeypatch.setattr(text, "accelerators", lambda: ())
    null = plait.compile_artifact(model, "null:h100", output=tmp_path / "null.plait")
    plait.open(null.folder, **LOCAL).close()  # it computes nothing and holds nothing


def test_links_lead_to_the_artifact_and_to_the_weights(model: Path, tmp_path: Path) -> None:
    """A link shortens the way up: `..` of the folder behind it is another folder than `..` of the link."""
    deep = tmp_path / "a" / "b" / "c"
    deep.mkdir(parents=True)
    (tmp_path / "link").symlink_to(deep)
    (tmp_path / "weights").symlink_to(model)
    plait.compile_artifact(tmp_path / "weights", "cpu", output=tmp_path / "link" / "m.plait")
    (tmp_path / "m.plait").symlink_to(deep / "m.plait")
    for path in (deep / "m.plait", tmp_path / "link" / "m.plait", tmp_path / "m.plait"):
        for weights in (None, tmp_path / "weights"):
            plait.open(path, weights=weights, **LOCAL).close()
    plait.compile_artifact(model, "h100", output=tmp_path / "m.plait")
    assert (tmp_path / "m.plait").is_symlink()
    assert read_artifact(deep / "m.plait").manifest.slices[0].device == "h100"


def test_two_compiles_give_the_same_bytes(model: Path, tmp_path: Path) -> None:
    folders = [plait.compile_artifact(model, "h100,mi300", output=tmp_path / name / "m.plait").folder for name in "ab"]
    files = [{p.relative_to(f): p.read_bytes() for p in f.rglob("*") if p.is_file()} for f in folders]
    assert files[0] == files[1]


def test_embedded_weights_need_no_checkpoint(model: Path, tmp_path: Path) -> None:
    copy = shutil.copytree(model, tmp_path / "copy")
    plait.compile_artifact(copy, "h100,mi300", output=tmp_path / "a.plait", embed_weights=True)
    shutil.rmtree(copy)
    ids = random_ids(20)
    with plait.open(tmp_path / "a.plait", in_process=True) as pipe:
        expected = reference_logits(model, ids)
        assert np.abs(pipe.logits(ids) - expected).max() < 1e-5 * np.abs(expected).max()


def test_moved_and_changed_weights_are_named(model: Path, tmp_path: Path) -> None:
    copy = shutil.copytree(model, tmp_path / "copy")
    plait.compile_artifact(copy, "cpu", output=tmp_path / "a.plait")
    moved = copy.rename(tmp_path / "moved")
    with pytest.raises(ArtifactError, match=r"model.safetensors are not there"):
        plait.open(tmp_path / "a.plait")
    with plait.open(tmp_path / "a.plait", weights=moved, in_process=True) as pipe:
        assert pipe.generate_ids([[5, 6]], 2)
    save(moved, seed=1, hidden_size=32)
    with pytest.raises(ArtifactError, match="changed since it was compiled"):
        plait.open(tmp_path / "a.plait", weights=moved)


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda f: (f / "plan.yaml").write_text((f / "plan.yaml").read_text() + "\n"), "plan.yaml has changed"),
        (lambda f: (f / "module.mlir").unlink(), "module.mlir is missing"),
        (lambda f: (f / "slices" / "x").write_text(""), "slices/x is not part of it"),
        (lambda f: (f / "manifest.json").write_text("{"), "not valid JSON"),
        (lambda f: (f / "manifest.json").unlink(), "not an artifact"),
        (lambda f: _edit_manifest(f, format_version=99), "format version 99"),
        (lambda f: _edit_manifest(f, colour="red"), "unknown field 'colour'"),
    ],
)  # fmt: skip
def test_a_damaged_artifact_says_what_differs(model: Path, tmp_path: Path, damage: object, message: str) -> None:
    folder = plait.compile_artifact(model, "cpu", output=tmp_path / "a.plait").folder
    assert callable(damage)
    damage(folder)
    with pytest.raises(UserError, match=message):
        read_artifact(folder)


def _edit_manifest(folder: Path, **changes: object) -> None:
    path = folder / "manifest.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def test_an_edited_plan_is_honoured_exactly(model: Path, tmp_path: Path) -> None:
    first = plait.plan(model, "h100,mi300", objective="capacity")
    text = to_yaml(first)
    assert from_yaml(Plan, text) == first
    blocks = [item.blocks for item in first.slices]
    assert len(blocks) == 2
    cut = 1 if blocks[0][1] == 2 else 2
    edited = text.replace(f"blocks: [0, {blocks[0][1]}]", f"blocks: [0, {cut}]")
    edited = edited.replace(f"blocks: [{blocks[0][1]}, 3]", f"blocks: [{cut}, 3]")
    (tmp_path / "plan.yaml").write_text(edited)
    made = plait.compile_artifact(model, plan=tmp_path / "plan.yaml", output=tmp_path / "a.plait")
    assert [item.blocks for item in made.manifest.slices] == [(0, cut), (cut, 3)]
    assert made.plan.slices[0].memory != first.slices[0].memory  # predicted again


def test_a_plan_that_cannot_be_honoured_is_refused_by_name(model: Path, tmp_path: Path) -> None:
    text = to_yaml(plait.plan(model, "cpu"))
    (tmp_path / "plan.yaml").write_text(text.replace("blocks: [0, 3]", "blocks: [0, 2]"))
    with pytest.raises(PlanError):
        plait.compile_artifact(model, plan=tmp_path / "plan.yaml", output=tmp_path / "a.plait")
    (tmp_path / "plan.yaml").write_text(text.replace("objective: ", "objectve: "))
    with pytest.raises(UserError, match="objectve"):
        plait.plan(model, plan=tmp_path / "plan.yaml")
    (tmp_path / "plan.yaml").write_text(text)
    with pytest.raises(UsageError, match="workload and a plan"):
        plait.plan(model, plan=tmp_path / "plan.yaml", workload="chat")
    with pytest.raises(UsageError, match="forbidden_cuts and a plan"):
        plait.plan(model, plan=tmp_path / "plan.yaml", forbidden_cuts=(1,))
    assert list(tmp_path.iterdir()) == [tmp_path / "plan.yaml"]


def test_nothing_is_written_when_compile_fails(model: Path, tmp_path: Path) -> None:
    copy = shutil.copytree(model, tmp_path / "copy")
    path = copy / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(CheckpointError):
        plait.compile_artifact(copy, "cpu", output=tmp_path / "a.plait")
    with pytest.raises(CheckpointError, match="no weights"):
        plait.compile_artifact(model / "config.json", "cpu", output=tmp_path / "a.plait")
    (tmp_path / "kept").mkdir()
    (tmp_path / "kept" / "thesis.txt").write_text("mine")
    with pytest.raises(UserError, match="not an artifact"):
        plait.compile_artifact(model, "cpu", output=tmp_path / "kept")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["copy", "kept"]
    assert (tmp_path / "kept" / "thesis.txt").read_text() == "mine"


def test_devices_are_said_in_exactly_one_way(model: Path) -> None:
    with pytest.raises(UsageError, match="exactly one way"):
        plait.plan(model)
    with pytest.raises(UsageError, match=re.escape("did you mean 'h100'")):
        plait.plan(model, "h1000")


def test_the_default_workload_shrinks_to_the_model_but_an_asked_one_is_refused(tmp_path: Path) -> None:
    short = save(tmp_path / "short", max_position_embeddings=64)
    assert plait.plan(short, "cpu").workload.context_tokens == 64
    with pytest.raises(UserError, match="64"):
        plait.plan(short, "cpu", context=100)
