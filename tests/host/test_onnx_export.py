"""Slices as ONNX models: onnxruntime's logits are transformers', whole and in slices, beyond window and page."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import torch
from xdsl.dialects.builtin import ModuleOp

import plait as plait_package
from plait.backends.conformance.models import random_weights
from plait.backends.conformance.script import Player as Steps
from plait.backends.conformance.script import Script, Turn
from plait.backends.kernels.onnx_export import to_onnx
from plait.errors import UnsupportedError
from plait.frontend.checkpoint import open_checkpoint
from plait.frontend.lower import lower
from plait.ir import Builder, Rope, kv_classes
from plait.ir.module import weights
from plait.ir.ops import EmbedOp
from plait.ir.oracle import Oracle
from plait.ir.passes import SLICE_PIPELINE, run_passes, slice_modules
from plait.spec import WeightRef
from tests.checkpoints import edit_config, random_ids, reference_logits, save, save_fp8
from tests.host.command_line import config_file, plait
from tests.onnx_models import Player, logits, session

CHUNKS = [19, 11]

FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {"tie_word_embeddings": True},
    "mistral": {"sliding_window": 8, "head_dim": 32},
    "qwen2": {},
}


@pytest.fixture(autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)


def written(module: ModuleOp, refs: dict[str, WeightRef], path: Path) -> Path:
    run_passes(module, SLICE_PIPELINE)
    to_onnx(module, refs).save(path)
    onnx.checker.check_model(path, full_check=True)
    return path


@pytest.mark.parametrize("family", FAMILIES)
def test_logits_equal_transformers(family: str, tmp_path: Path) -> None:
    folder = save(tmp_path / "m", family, num_hidden_layers=3, **FAMILIES[family])
    checkpoint, ids = open_checkpoint(folder), random_ids(40)
    assert checkpoint.weights is not None
    want = reference_logits(folder, ids)
    whole = lower(checkpoint)
    parts = slice_modules(whole, [(0, 1), (1, 3)])
    paths = [written(part, checkpoint.weights, tmp_path / f"{n}.onnx") for n, part in enumerate(parts)]
    for models in ([written(whole, checkpoint.weights, tmp_path / "whole.onnx")], paths):
        got = logits(models, ids, CHUNKS)
        assert np.abs(got - want).max() < 1e-5 * np.abs(want).max()
        # All at once, too: then no query looks at a cache.
        assert np.abs(logits(models, ids, [40]) - want).max() < 1e-5 * np.abs(want).max()


def test_several_sequences_at_once(tmp_path: Path) -> None:
    folder = save(tmp_path / "m", "mistral", num_hidden_layers=1, sliding_window=8)
    checkpoint = open_checkpoint(folder)
    assert checkpoint.weights is not None
    path = written(lower(checkpoint), checkpoint.weights, tmp_path / "m.onnx")
    both = [random_ids(20, seed) for seed in (1, 2)]
    player = Player(session(path))
    player.kv = {name: np.zeros((2, *value.shape[1:]), np.float32) for name, value in player.kv.items()}
    got = [player.step(input_ids=np.array(both)[:, part])["logits"] for part in (slice(0, 13), slice(13, 20))]
    for index, ids in enumerate(both):
        want = reference_logits(folder, ids)
        assert np.abs(np.concatenate(got, axis=1)[index] - want).max() < 1e-5 * np.abs(want).max()


def test_half_precision_is_as_close_as_transformers(tmp_path: Path) -> None:
    folder = save(tmp_path / "m", "mistral", dtype="float16", sliding_window=8, num_hidden_layers=2)
    checkpoint, ids = open_checkpoint(folder), random_ids(40)
    assert checkpoint.weights is not None
    exact, theirs = reference_logits(folder, ids), reference_logits(folder, ids, "float16")
    allowed = 2 * np.abs(theirs - exact).max()
    path = written(lower(checkpoint), checkpoint.weights, tmp_path / "m.onnx")
    assert {item.type for item in session(path).get_inputs()[1:]} == {"tensor(float16)"}
    assert allowed / 50 < np.abs(logits(path, ids, CHUNKS, head_dim=16) - exact).max() < allowed


def stored(module: ModuleOp, tensors: dict[str, Any], folder: Path) -> dict[str, WeightRef]:
    """The tensors as files."""
    refs = {}
    for name in weights(module):
        values = np.ascontiguousarray(tensors[name], np.float32)
        file = folder / f"{name}.bin"
        file.write_bytes(values.tobytes())
        refs[name] = WeightRef(name, str(file), 0, values.nbytes, "float32", values.shape)
    return refs


LONGROPE = Rope(10000.0, "longrope", factors=(1.0, 2.0, 4.0, 8.0), attention_factor=1.25)


def _parts(b: Builder) -> Any:
    """What the families above lack: sinks, soft-caps, norms of groups, partial rope, multipliers, GELU."""
    x = b.scale(b.embed("table", 61, 48), 3.0)
    x = b.add(x, b.embed_positions("places", 64, 48))
    b.block = 0
    q, k, v = (b.linear(x, name, width) for name, width in (("q", 64), ("k", 32), ("v", 32)))
    q = b.rope(b.rms_norm(q, "q.norm", 1e-6, group=16, offset=1.0), 16, LONGROPE, 8)
    k = b.rope(b.rms_norm(k, "k.norm", 1e-6, group=16, per_group=True), 16, LONGROPE, 8)
    y = b.attention(q, k, v, heads=4, kv_heads=2, head_dim=16, scale=0.5, window=3, softcap=2.0, sinks="sinks")
    y = b.layer_norm(b.linear(y, "o", 48, "o.bias"), "norm", "norm.bias", 1e-5)
    x = b.add(x, b.gelu_mul(y, b.gelu(y), "tanh"))
    b.block = None
    return b.logits(b.layer_norm(x, "last", None, 1e-5, group=12), "head", 61, scale=0.5, softcap=4.0)


def test_every_attribute_is_what_the_oracle_says(tmp_path: Path) -> None:
    b = Builder("m", "float32")
    module = b.finish({"logits": _parts(b)})
    tensors = random_weights(module)
    steps = Steps(Script((Turn({0: 7}), Turn({0: 5})), 4), kv_classes(module), 61)
    oracle = Oracle(module, tensors, steps.plain_pages, 4)
    player = Player(session(written(module, stored(module, tensors, tmp_path), tmp_path / "m.onnx")), 16)
    for turn in steps.script.turns:
        _, plain = steps.batches(turn)
        want = oracle.step(plain)["logits"]
        got = player.step(input_ids=plain.tokens[None].astype(np.int64))["logits"][0]
        np.testing.assert_allclose(got[plain.logit_rows], want, rtol=2e-5, atol=2e-5)


def _fp8_kv(b: Builder, q: Any) -> Any:
    return b.attention(q, q, q, heads=2, kv_heads=2, head_dim=16, scale=0.25, kv_dtype="e4m3fn")


@pytest.mark.parametrize(("dtype", "word"), [("bfloat16", "bfloat16"), ("float32", "e4m3fn")])
def test_what_cannot_be_written_is_refused_by_name(dtype: str, word: str, tmp_path: Path) -> None:
    b = Builder("m", dtype)
    x = b.embed("e", 10, 32)
    b.block = 0
    q = b.linear(x, "q", 32)
    y = _fp8_kv(b, q) if dtype == "float32" else b.add(q, q)
    module = b.finish({"y": y})
    with pytest.raises(UnsupportedError) as caught:
        to_onnx(module, {})
    assert word in str(caught.value).lower() and caught.value.code == "op-unsupported"


def test_the_hint_of_what_is_refused_fits_an_export(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No device refuses anything here."""
    from plait.backends.kernels import lowering
    from plait.backends.kernels.onnx_lowering import LOWERING

    folder = save(tmp_path / "m", num_hidden_layers=1, dtype="bfloat16")

    def refused(model: Path, form: str = "onnx") -> dict[str, str]:
        result = plait("export", model, "--to", form, "-o", tmp_path / "x.out", "--json")
        assert result.exit_code == 2 and not (tmp_path / "x.out").exists()
        error: dict[str, str] = json.loads(result.stdout)["error"]
        assert error["what"].endswith(f"is not supported in {form}")
        return error

    assert refused(folder)["try"] == "--dtype float32"
    made = plait_package.compile_artifact(folder, "cpu", output=tmp_path / "a.plait")
    assert refused(made.folder)["try"] == "compile it with --dtype float32"
    made = plait_package.compile_artifact(folder, "cpu", output=tmp_path / "b.plait", dtype="float32", kv_dtype="fp8")
    assert {refused(made.folder, form)["try"] for form in ("onnx", "stablehlo")} == {"compile it without --kv-dtype"}
    assert plait("export", folder, "--to", "onnx", "--dtype", "float32", "-o", tmp_path / "y.onnx").exit_code == 0
    edit_config(folder, dtype="float32")

    def no(op: Any) -> Any:
        raise lowering.refuse(op, why="there is no such op")

    known, _ = LOWERING._emitters[EmbedOp]
    monkeypatch.setitem(LOWERING._emitters, EmbedOp, (known, no))
    assert refused(folder)["try"] == "--to stablehlo writes MLIR instead"


def test_export_of_a_model(tmp_path: Path) -> None:
    """Quantised weights are dequantised, and that is said."""
    folder = save_fp8(tmp_path / "fp8", save(tmp_path / "m", num_hidden_layers=1))
    out = tmp_path / "model.onnx"
    result = plait("export", folder, "--to", "onnx", "-o", out, "--dtype", "float32", "--json")
    assert result.exit_code == 0, result.stderr
    told = json.loads(result.stdout)
    assert told["notes"] == {"weights": "dequantised to float32"} and told["form"] == "onnx"
    assert told["bytes"] == out.stat().st_size + Path(told["data"]).stat().st_size
    names = [item["name"] for item in told["arguments"]]
    assert names == ["input_ids", "past_key_values.0.key", "past_key_values.0.value"]
    assert told["results"][0] == {"name": "logits", "shape": ["batch", "sequence", 264], "dtype": "float32"}
    ids = random_ids(20)
    with plait_package.compile(folder, "cpu", dtype="float32", run={"in_process": True}) as pipe:
        want = pipe.logits(ids)
    assert np.abs(logits(out, ids, [13], head_dim=16) - want).max() < 1e-5 * np.abs(want).max()


def test_export_of_an_artifact(tmp_path: Path) -> None:
    folder = save(tmp_path / "m", num_hidden_layers=2)
    ids, paths = random_ids(20), []
    for embed in (False, True):
        made = plait_package.compile_artifact(
            folder, "cpu,cpu", layers=[1, 1], output=tmp_path / f"{embed}.plait", embed_weights=embed
        )
        paths = [tmp_path / f"{embed}.{part}.onnx" for part in (0, 1)]
        for part, path in enumerate(paths):
            result = plait("export", made.folder, "--to", "onnx", "--slice", str(part), "-o", path, "--json")
            assert result.exit_code == 0, result.stderr
        want = reference_logits(folder, ids)
        assert np.abs(logits(paths, ids, [13], head_dim=16) - want).max() < 1e-5 * np.abs(want).max()
    assert session(paths[1]).get_inputs()[0].name == "x0"
    (folder / "model.safetensors").write_bytes(b"")
    refused = plait("export", tmp_path / "False.plait", "--to", "onnx", "-o", tmp_path / "no.onnx", "--json")
    assert refused.exit_code == 2 and not list(tmp_path.glob("*no.onnx*"))


@pytest.mark.parametrize(
    "words", [["--phase", "prefill"], ["--tokens", "3"], ["--context", "9"], ["--concurrency", "2"]]
)
def test_an_onnx_model_has_no_shape(words: list[str], tmp_path: Path) -> None:
    refused = plait("export", config_file(tmp_path), "--to", "onnx", *words, "--json")
    error = json.loads(refused.stdout)["error"]
    assert (refused.exit_code, error["code"]) == (64, "export-shape") and words[0] in error["what"]


def test_a_config_alone_has_no_weights_to_write(tmp_path: Path) -> None:
    refused = plait("export", config_file(tmp_path), "--to", "onnx", "--dtype", "float32", "--json")
    assert (refused.exit_code, json.loads(refused.stdout)["error"]["code"]) == (64, "export-weights")


def test_nothing_is_left_of_a_model_that_cannot_be_written(tmp_path: Path) -> None:
    from safetensors.numpy import load_file, save_file

    folder = save(tmp_path / "m", num_hidden_layers=1)
    tensors = load_file(folder / "model.safetensors")
    tensors["model.layers.0.mlp.up_proj.weight"][3, 4] = np.nan
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    target = tmp_path / "out"
    target.mkdir()
    refused = plait("export", folder, "--to", "onnx", "-o", target / "m.onnx", "--json")
    error = json.loads(refused.stdout)["error"]
    assert (refused.exit_code, error["code"]) == (2, "weight-not-finite") and "up_proj" in error["what"]
    assert list(target.iterdir()) == []
