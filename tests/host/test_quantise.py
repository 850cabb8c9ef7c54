"""Quantising at compile: the numbers, what is written, what runs, what plans say."""

from __future__ import annotations

import json
import re
import tracemalloc
from dataclasses import replace
from math import prod
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import torch
import yaml
from numpy.typing import NDArray
from safetensors.numpy import load_file, save_file
from safetensors.torch import load_file as load_torch

import plait
from plait.assemble.calibrate import calibrate
from plait.assemble.changed import Change, write_changed
from plait.backends.cuda import BACKEND as CUDA
from plait.backends.kernels.gpu.interpreted import Interpreted
from plait.backends.rocm import BACKEND as ROCM
from plait.backends.weights import MAPPED_BYTES
from plait.errors import CheckpointError, FitError, PlanError, UnsupportedError, UsageError, UserError
from plait.frontend.checkpoint import open_checkpoint
from plait.frontend.safetensors import read_file
from plait.ir.numbers import dequantise
from plait.ir.quantise import QUANT_KINDS, RATIOS, QuantError, kind_of, quantise
from plait.spec import to_yaml
from tests.adapters import merged, save_adapter
from tests.checkpoints import edit_config, random_ids, reference_logits, reference_model, save, save_fp8
from tests.host.command_line import plait as command

Array = NDArray[Any]

TEXT = "Hello, this is a text with hello and hell, which says what linears are given. " * 20


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save(tmp_path_factory.mktemp("q") / "source", num_hidden_layers=2, tokenizer=True)


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("t") / "text.txt"
    path.write_text(TEXT)
    return path


def test_graphs_keep_their_weights(source: Path, tmp_path: Path) -> None:
    """For --quantize as for --lora, by name; a program that is made of plait's ops can be quantised."""
    from tests import exported_models, onnx_models

    graph = onnx_models.save(onnx_models.decoder(onnx_models.group_query()), tmp_path / "graph.onnx")
    program = tmp_path / "program.pt2"
    torch.export.save(exported_models.export(exported_models.Plain(exported_models.family("llama"))), program)
    adapter = save_adapter(tmp_path / "adapter", source)
    refused: tuple[tuple[Path, str, dict[str, Any]], ...] = (
        (graph, "quantize-model", {"quantize": "int8"}),
        (graph, "lora-model", {"lora": adapter}),
        (program, "lora-model", {"lora": adapter}),
    )
    for model, code, asked in refused:
        with pytest.raises(UnsupportedError) as caught:
            plait.plan(model, "cpu", **asked)
        assert (caught.value.code, model.stem in caught.value.what) == (code, True)
        assert caught.value.hint.endswith("the checkpoint that it was made from")
    assert plait.plan(program, "cpu", quantize="int8").slices[0].quantize == "int8"


def nearest(group: Array, kind: str) -> Array:
    """One group of numbers with one scale, by the definition."""
    low, high = {"int8": (-128, 127), "int4": (-8, 7), "fp8": (-448, 448)}[kind]
    scale = np.float32(max(group.max() / np.float32(high), group.min() / np.float32(low)))
    if scale == 0:
        return np.zeros_like(group)
    codes = np.clip(group / scale, low, high)
    codes = codes.astype(ml_dtypes.float8_e4m3fn).astype(np.float32) if kind == "fp8" else np.rint(codes)
    return np.asarray(codes * scale, np.float32)


def rounded(weight: Array, kind: str, group: int) -> Array:
    """A weight, group by group."""
    parts = [nearest(part, kind) for row in weight for part in np.split(row, len(row) // (group or len(row)))]
    return np.concatenate(parts).reshape(weight.shape)


def stored(folder: Path) -> dict[str, Array]:
    """The weights that compile wrote into slices, as the safetensors library and NumPy read them."""
    found = {}
    for file in folder.glob("slices/*/changed.safetensors"):
        tensors = load_torch(file)  # NumPy knows no FP8
        for name in (name for name in tensors if f"{name}_scale" in tensors):
            packed = str(tensors[name].dtype) == "torch.uint8"
            codes, scale = tensors[name].float().numpy(), tensors[f"{name}_scale"].numpy()
            if packed:
                codes = np.stack([codes % 16, codes // 16], -1).reshape(*codes.shape[:-1], -1) - 8
            found[name] = codes * scale.repeat(codes.shape[-1] // scale.shape[-1], -1)
    return found


def with_weights(folder: Path, source: Path, changed: dict[str, Array]) -> Path:
    """The checkpoint with some weights put in place."""
    tensors = load_file(source / "model.safetensors")
    assert changed and changed.keys() <= tensors.keys()
    folder.mkdir()
    save_file(tensors | changed, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "config.json").write_text((source / "config.json").read_text())
    return folder


@pytest.mark.parametrize("kind", QUANT_KINDS)
@pytest.mark.parametrize("group", [0, 32])
def test_codes_are_the_nearest(kind: str, group: int) -> None:
    rng = np.random.default_rng(3)
    weight = (rng.standard_normal((24, 96)) * np.exp(rng.standard_normal((24, 1)) * 3)).astype(np.float32)
    weight[5], weight[6], weight[7, 1:], weight[8] = 0, -np.abs(weight[6]), 0, weight[8] * 1e-30
    form = kind_of(kind, group, "w", weight.shape)
    codes, scale = quantise(weight, form)
    np.testing.assert_array_equal(dequantise(form, codes, scale, dtype=np.float32), rounded(weight, kind, group))
    tiny = weight * np.float32(1e-38)
    codes, scale = quantise(tiny, form)
    assert (scale >= np.finfo(np.float32).tiny).all()
    assert np.abs(dequantise(form, codes, scale) - tiny).max() < 1e-36


def test_scales_that_inputs_choose_are_the_best_of_those_tried() -> None:
    rng = np.random.default_rng(4)
    weight = rng.standard_t(3, (8, 64)).astype(np.float32)
    importance = np.exp(rng.standard_normal(64) * 2)
    form = kind_of("int4", 32, "w", weight.shape)
    codes, scale = quantise(weight, form, importance)
    halves = [slice(0, 3), slice(3, 8)]
    error = sum((QuantError.of(weight[at], form, codes[at], scale[at], importance) for at in halves), QuantError())
    plain = quantise(weight, form)[1]
    costs = np.full((8, 2, len(RATIOS)), np.inf)
    for row, part, index in np.ndindex(*costs.shape):
        at = slice(32 * part, 32 * part + 32)
        tried = plain[row, part] * RATIOS[index]
        values = np.clip(np.rint(weight[row, at] / tried), -8, 7) * tried
        costs[row, part, index] = np.sum(importance[at] * (values - weight[row, at]).astype(np.float64) ** 2)
    np.testing.assert_allclose(costs.min(2).sum(), error.weighted, rtol=1e-5)
    np.testing.assert_allclose(costs[..., 0].sum(), error.rounded, rtol=1e-5)
    assert error.weighted < 0.9 * error.rounded
    numbers = error.numbers()
    wide = dequantise(form, codes, scale) - weight
    np.testing.assert_allclose(numbers["rms"], np.sqrt((wide**2).sum() / (weight.astype(np.float64) ** 2).sum()))
    np.testing.assert_allclose(numbers["worst"], np.abs(wide).max() / np.abs(weight).max())


@pytest.mark.parametrize(
    ("kind", "group", "device"),
    [
        ("int8", None, "cpu"),
        ("int4", None, "cpu"),
        ("fp8", None, "cpu"),
        ("int8", None, "h100"),
        ("int4", None, "h100"),
        ("fp8", None, "h100"),
        pytest.param("int4", None, "v5e", marks=pytest.mark.slow),
        pytest.param("int8", 32, "cpu", marks=pytest.mark.slow),
        pytest.param("fp8", 32, "mi300", marks=pytest.mark.slow),
        pytest.param("int4", 0, "mi300", marks=pytest.mark.slow),
    ],
)
def test_an_artifact_computes_with_the_nearest_codes(
    kind: str, group: int | None, device: str, source: Path, tmp_path: Path
) -> None:
    ids, out = random_ids(24), tmp_path / "m.plait"
    plait.compile_artifact(source, f"2x{device}", output=out, layers=(1, 1), quantize=kind, group_size=group)
    found, weights = stored(out), load_file(source / "model.safetensors")
    assert found.keys() == {name for name in weights if "_proj" in name}
    size = group if group is not None else {"int4": 32}.get(kind, 0)  # the rows, of 64 and 96, are whole groups of 32
    for name in ("model.layers.0.mlp.down_proj.weight", "model.layers.1.self_attn.q_proj.weight"):
        own = 64 if kind == "int4" and group is None and weights[name].shape[1] == 64 else size
        np.testing.assert_array_equal(found[name], rounded(weights[name], kind, own))
    expected = reference_logits(with_weights(tmp_path / "wide", source, found), ids)
    limit = 1e-5 * np.abs(expected).max()
    assert np.abs(reference_logits(source, ids) - expected).max() > 100 * limit
    with plait.open(out, in_process=True) as pipe:
        assert np.abs(pipe.logits(ids) - expected).max() < limit
        assert np.abs(pipe.logits(ids, chunk=7) - expected).max() < limit


@pytest.mark.parametrize("kind", QUANT_KINDS)
def test_kernels_of_both_vendors_compute_in_the_codes(
    kind: str, source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("plait.backends.cuda.BACKEND", Interpreted(CUDA))
    monkeypatch.setattr("plait.backends.rocm.BACKEND", Interpreted(ROCM))
    ids, out = random_ids(9), tmp_path / "m.plait"
    plait.compile_artifact(source, "h100,mi300", output=out, layers=(1, 1), quantize=kind)
    held = [json.loads(file.read_text())["weights"] for file in sorted(out.glob("slices/*/launch.json"))]
    codes = [{weight["dtype"] for weight in slice_.values() if weight["part"] == "codes"} for slice_ in held]
    assert codes == {"int8": [{"i8"}] * 2, "int4": [{"u4"}] * 2, "fp8": [{"e4m3fn"}, {"e4m3fnuz"}]}[kind]
    expected = reference_logits(with_weights(tmp_path / "wide", source, stored(out)), ids)
    with plait.open(out, in_process=True) as pipe:
        assert np.abs(pipe.logits(ids) - expected).max() < 1e-5 * np.abs(expected).max()


def test_a_plan_says_what_each_device_quantises_to_and_an_edited_one_is_honoured(source: Path, tmp_path: Path) -> None:
    out = tmp_path / "m.plait"
    asked: dict[str, Any] = {"quantize": {"h100": "fp8", "mi300": "int4"}, "layers": (1, 1)}
    made = plait.compile_artifact(source, "h100,mi300", output=out, **asked)
    assert [(item.quantize, item.group_size) for item in made.plan.slices] == [("fp8", None), ("int4", None)]
    assert made.plan == plait.plan(source, "h100,mi300", **asked)
    text = (out / "slices" / "0-h100" / "slice.mlir").read_text() + (out / "module.mlir").read_text()
    assert "f8E4M3FN, scale f32 per row" in text and "ui4, scale f32 group 64, zero 8" in text
    assert "ui4" not in (out / "slices" / "0-h100" / "slice.mlir").read_text()
    data = yaml.safe_load((out / "plan.yaml").read_text())
    assert [item["quantize"] for item in data["slices"]] == ["fp8", "int4"]
    del data["slices"][0]["quantize"]
    data["slices"][1] |= {"quantize": "int8", "group_size": 32}
    edited = tmp_path / "plan.yaml"
    edited.write_text(yaml.safe_dump(data))
    again = plait.compile_artifact(source, plan=edited, output=out)
    assert [(item.quantize, item.group_size) for item in again.plan.slices] == [(None, None), ("int8", 32)]
    assert [path.parent.name for path in out.glob("slices/*/changed.safetensors")] == ["1-mi300x"]
    weights = load_file(source / "model.safetensors")
    for name, values in stored(out).items():
        assert ".1." in name
        np.testing.assert_array_equal(values, rounded(weights[name], "int8", 32))
    edited.write_text(to_yaml(again.plan).replace("quantize: int8", "quantize: int9"))
    with pytest.raises(UserError, match="int9"):
        plait.compile_artifact(source, plan=edited, output=out)
    edited.write_text(to_yaml(again.plan).replace("quantize: int8", ""))
    with pytest.raises(UserError, match="group_size"):
        plait.compile_artifact(source, plan=edited, output=out)
    with pytest.raises(UsageError, match="quantize and a plan"):
        plait.plan(source, plan=again.plan, quantize="int8")


def test_plans_count_the_bytes_that_devices_hold(source: Path) -> None:
    def weights_bytes(device: str, **options: Any) -> int:
        memory = plait.plan(source, device, **options).slices[0].memory
        assert memory is not None
        return memory.weights_bytes

    weights = load_file(source / "model.safetensors")
    linears = [weight for name, weight in weights.items() if "_proj" in name]
    whole, rest = (sum(w.nbytes for w in some) for some in (weights.values(), linears))
    codes, rows = (sum(count(w) for w in linears) for count in (lambda w: w.size, lambda w: 4 * len(w)))
    groups = sum(w.size // (64 if w.shape[1] == 64 else 32) * 4 for w in linears)
    assert weights_bytes("h100") == whole
    for kind, held in (("int8", codes + rows), ("fp8", codes + rows), ("int4", codes // 2 + groups)):
        assert weights_bytes("h100", quantize=kind) == whole - rest + held
    # What does not compute in codes holds numbers.
    assert weights_bytes("a100-80-sxm", quantize="int8") == weights_bytes("h100", quantize="int8")
    assert weights_bytes("a100-80-sxm", quantize="fp8") == weights_bytes("v5e", quantize="int4") == whole
    # A plan that fits in no other way.
    cluster = plait.plan(source, "h100", context=128).cluster
    full = plait.plan(source, "h100", context=128).slices[0].memory
    assert full is not None
    device = replace(cluster.devices[0], free_bytes=full.needed_bytes - rest // 2)
    cluster = replace(cluster, devices=(device,))
    with pytest.raises(FitError):
        plait.plan(source, cluster=cluster, context=128)
    assert plait.plan(source, cluster=cluster, context=128, quantize="int4").slices[0].quantize == "int4"


def test_calibration_measures_what_linears_are_given(source: Path, text: Path) -> None:
    """Against the inputs that torch hands to transformers' own linears, over several sequences."""
    import torch

    checkpoint = open_checkpoint(source)
    found = calibrate(checkpoint, (), text, lambda done, total: None)
    model, sums = reference_model(source), {}

    def hook(name: str) -> Any:
        def add(module: Any, given: Any) -> None:
            sums[name] = sums.get(name, 0) + given[0].double().square().sum((0, 1)).numpy()

        return add

    for name, module in model.named_modules():
        if isinstance(module, torch.nn.Linear) and name != "lm_head":
            module.register_forward_pre_hook(hook(f"{name}.weight"))
    import tokenizers

    ids = tokenizers.Tokenizer.from_file(str(source / "tokenizer.json")).encode(TEXT).ids
    assert found.tokens == len(ids) > 2 * 512
    with torch.no_grad():
        for start in range(0, len(ids), 512):
            model(torch.tensor([ids[start : start + 512]]))
    assert found.importance.keys() == sums.keys()
    for name, total in sums.items():
        np.testing.assert_allclose(found.importance[name], total / len(ids), rtol=1e-4)


def test_calibration_of_weights_that_share_a_tensor(text: Path, tmp_path: Path) -> None:
    """Of kv_a_proj_with_mqa the latent rows stand in runs, and those that turn alternate."""
    source = save(tmp_path / "m", "deepseek_v3", num_hidden_layers=1, tokenizer=True)
    checkpoint = open_checkpoint(source)
    found = calibrate(checkpoint, (), text, lambda done, total: None)
    model, sums = reference_model(source), []
    inner = model.get_submodule("model.layers.0.self_attn.kv_a_proj_with_mqa")
    inner.register_forward_pre_hook(lambda module, given: sums.append(given[0].double().square().sum((0, 1)).numpy()))
    import tokenizers

    ids = tokenizers.Tokenizer.from_file(str(source / "tokenizer.json")).encode(TEXT).ids
    with torch.no_grad():
        for start in range(0, len(ids), 512):
            model(torch.tensor([ids[start : start + 512]]))
    for part in ("kv_latent", "k_rope", "q_a_proj"):
        mean = found.importance[f"model.layers.0.self_attn.{part}.weight"]
        np.testing.assert_allclose(mean, sum(sums) / len(ids), rtol=1e-4)


@pytest.mark.parametrize("kind", ["int4", *(pytest.param(kind, marks=pytest.mark.slow) for kind in ("int8", "fp8"))])
def test_calibrated_scales_are_written_and_reported(kind: str, source: Path, text: Path, tmp_path: Path) -> None:
    ids, out = random_ids(16), tmp_path / "m.plait"
    plait.compile_artifact(source, "2xcpu", output=out, layers=(1, 1), quantize=kind, calibrate=text)
    found, weights = stored(out), load_file(source / "model.safetensors")
    importance = calibrate(open_checkpoint(source), (), text, lambda done, total: None).importance
    for path in out.glob("slices/*/report.json"):
        report = json.loads(path.read_text())
        assert report["calibration_tokens"] > 1000
        for name, facts in report["quantized"].items():
            error = np.square(found[name].astype(np.float64) - weights[name]) @ importance[name]
            whole = np.square(weights[name].astype(np.float64)) @ importance[name]
            np.testing.assert_allclose(facts["output"], np.sqrt(error.sum() / whole.sum()), rtol=1e-5)
            assert facts["output"] <= facts["output_rounded"]
    expected = reference_logits(with_weights(tmp_path / "wide", source, found), ids)
    with plait.open(out, in_process=True) as pipe:
        assert np.abs(pipe.logits(ids) - expected).max() < 1e-5 * np.abs(expected).max()


def test_stacks_of_experts_are_quantised_too(text: Path, tmp_path: Path) -> None:
    """gate and up are calibrated; what down is given is not known."""
    source = save(tmp_path / "source", "mixtral", num_hidden_layers=2, tokenizer=True)
    ids, out = random_ids(24), tmp_path / "m.plait"
    made = plait.compile_artifact(source, "2xh100", output=out, layers=(1, 1), quantize="int4", calibrate=text)
    weights, report = (
        load_file(source / "model.safetensors"),
        json.loads(next(out.glob("*/0-*/report.json")).read_text()),
    )
    stacks = {name: facts for name, facts in report["quantized"].items() if "experts" in name}
    assert ["output" in facts for facts in stacks.values()] == [False, True, True]  # down, gate, up
    changed = {}
    for name, values in stored(out).items():
        if "experts" not in name:
            changed[name] = values
            continue
        prefix, part, _ = name.rsplit(".", 2)
        for expert, matrix in enumerate(values):
            own = f"{prefix}.{expert}.{ {'gate_proj': 'w1', 'down_proj': 'w2', 'up_proj': 'w3'}[part] }.weight"
            changed[own] = matrix
            if part == "down_proj":
                np.testing.assert_array_equal(matrix, rounded(weights[own], "int4", 32))
    expected = reference_logits(with_weights(tmp_path / "wide", source, changed), ids)
    with plait.open(made, in_process=True) as pipe:
        assert np.abs(pipe.logits(ids) - expected).max() < 1e-4 * np.abs(expected).max()


def test_what_is_merged_and_what_is_quantised_already_is_quantised_from_its_values(
    source: Path, text: Path, tmp_path: Path
) -> None:
    adapter = save_adapter(tmp_path / "a", source)
    wide = load_file(merged(tmp_path / "merged", source, (adapter, lambda module: 2.0)) / "model.safetensors")
    out = tmp_path / "m.plait"
    plait.compile_artifact(source, "cpu", output=out, lora=adapter, quantize="int8", calibrate=text)
    name = "model.layers.0.mlp.down_proj.weight"
    np.testing.assert_allclose(
        np.square(stored(out)[name] - wide[name]).sum() / np.square(wide[name]).sum(), 0, atol=1e-3
    )
    fp8 = save_fp8(tmp_path / "fp8", source, "row")
    plait.compile_artifact(fp8, "cpu", output=out, quantize="int4")
    tensors = load_torch(fp8 / "model.safetensors")
    values = (tensors[name].float() * tensors[f"{name}_scale"]).numpy()
    np.testing.assert_array_equal(stored(out)[name], rounded(values, "int4", 32))


def test_the_same_request_writes_the_same_bytes(source: Path, text: Path, tmp_path: Path) -> None:
    for name in "ab":
        plait.compile_artifact(source, "cpu", output=tmp_path / name, quantize="int4", calibrate=text)
    a, b = (tmp_path / name / "slices/0-cpu/changed.safetensors" for name in "ab")
    assert a.read_bytes() == b.read_bytes()


REFUSED: list[tuple[dict[str, Any], type[UserError], str]] = [
    ({"quantize": "int5"}, UsageError, "int8"),
    ({"quantize": ""}, UsageError, "int8"),
    ({"quantize": {"h200": "int8"}}, UsageError, "no device 'h200'"),
    ({"quantize": "int4", "group_size": 48}, UsageError, "48"),
    ({"group_size": 32}, UsageError, "nothing is quantised"),
    ({"quantize": "int4", "group_size": 128}, UnsupportedError, "--group-size 64"),
]


@pytest.mark.parametrize(("options", "kind", "words"), REFUSED)
def test_a_request_that_cannot_be_met_says_why(
    options: dict[str, Any], kind: type[UserError], words: str, source: Path
) -> None:
    with pytest.raises(kind, match=re.escape(words)):
        plait.plan(source, "h100", **options)


def test_nothing_half_written_is_left(source: Path, text: Path, tmp_path: Path) -> None:
    weights = load_file(source / "model.safetensors")
    name = "model.layers.1.mlp.down_proj.weight"
    broken = weights[name].copy()
    broken[3, 4] = np.nan
    bad = with_weights(tmp_path / "bad", source, {name: broken})
    out = tmp_path / "out" / "m.plait"
    with pytest.raises(CheckpointError, match=re.escape(name)):
        plait.compile_artifact(bad, "2xcpu", output=out, quantize="int8")
    with pytest.raises(CheckpointError, match=r"no tokenizer\.json"):
        plait.compile_artifact(bad, "2xcpu", output=out, quantize="int8", calibrate=text)
    with pytest.raises(UsageError, match="nothing is quantised"):
        plait.compile_artifact(source, "cpu", output=out, calibrate=text)
    empty = tmp_path / "empty.txt"
    empty.touch()
    with pytest.raises(CheckpointError, match="holds no tokens"):
        plait.compile_artifact(source, "cpu", output=out, quantize="int8", calibrate=empty)
    with pytest.raises(CheckpointError, match="cannot read"):
        plait.compile_artifact(source, "cpu", output=out, quantize="int8", calibrate=tmp_path / "none.txt")
    assert not out.parent.exists()
    odd = save(tmp_path / "odd", num_hidden_layers=1, intermediate_size=97)
    with pytest.raises(UnsupportedError, match="not whole bytes"):
        plait.plan(odd, "cpu", quantize="int4")
    assert plait.plan(odd, "cpu", quantize="int8").slices[0].quantize == "int8"


def test_memory_is_that_of_one_weight(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """64 MB in weights of 4 MB: one in float32, its codes, and what parts of it take while they are worked on. Larger
    ones would be mapped, which is not traced."""
    rng, shape = np.random.default_rng(0), (1008, 1024)
    assert 4 * prod(shape) < MAPPED_BYTES
    tensors = {f"w{i}": rng.standard_normal(shape).astype(np.float32) for i in range(16)}
    save_file(tensors, tmp_path / "model.safetensors")
    del tensors
    kind = kind_of("int8", None, "w", shape)
    refs = read_file(tmp_path / "model.safetensors").weights
    changes = {name: Change(ref, kind) for name, ref in refs.items()}
    monkeypatch.setattr("os.cpu_count", lambda: 1)
    tracemalloc.start()
    write_changed(tmp_path, changes, {})
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert 4 * prod(shape) < peak < 16 * 2**20


def test_a_config_alone_plans_what_will_be_quantised(source: Path, tmp_path: Path) -> None:
    alone = tmp_path / "config.json"
    alone.write_text((source / "config.json").read_text())
    edit_config(tmp_path, dtype="float32")
    assert plait.plan(alone, "h100", quantize="int4").slices == plait.plan(source, "h100", quantize="int4").slices


def test_the_command_prints_the_errors(source: Path, text: Path, tmp_path: Path) -> None:
    words = ["--targets", "h100,mi300", "--layers", "1,1", "--quantize", "h100=fp8,mi300=int4", "--calibrate", text]
    result = command("compile", source, "-o", tmp_path / "m.plait", *words)
    assert result.exit_code == 0, result.output
    assert "errors of 14 quantised weights, the 8 largest" in result.stdout
    assert "output uncalibrated" in result.stdout and "changed weights inside" in result.stdout
    assert "<h2>Quantised weights</h2>" in (tmp_path / "m.plait" / "report.html").read_text()
    data = json.loads(command("compile", source, "-o", tmp_path / "m.plait", *words, "--json").stdout)
    assert len(data["quantized"]) == 14
    assert {"format", "rms", "worst", "output", "output_rounded"} == set(next(iter(data["quantized"].values())))
    assert data["plan"]["slices"][1]["quantize"] == "int4"
    for bad in ("h100=fp8,mi300", "h100=fp8,h100=int4", "h100="):
        result = command("plan", source, "--targets", "h100,mi300", "--quantize", bad)
        assert result.exit_code == 64 and "cannot read --quantize" in result.stderr
    shown = command("plan", source, "--targets", "h100", "--quantize", "int4", "--group-size", "32")
    assert "--quantize int4 --group-size 32" in shown.stdout


def test_a_plan_of_another_schema_is_still_refused(source: Path, tmp_path: Path) -> None:
    made = plait.plan(source, "h100", quantize="int4")
    path = tmp_path / "plan.yaml"
    path.write_text(to_yaml(made).replace("schema: 1", "schema: 2"))
    with pytest.raises((PlanError, UserError)):
        plait.plan(source, plan=path)
