"""LoRA adapters: merged as the definition says, and refused by name where plait does not understand them."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

import plait
from plait.backends.weights import read_weight, read_weights_json
from plait.errors import CheckpointError, UnsupportedError, UsageError, UserError
from plait.frontend.lora import Target, read_adapter
from plait.frontend.lora_config import read_lora_config
from plait.spec import Piece, Rows
from tests.adapters import CONFIG, edit_adapter, merged, save_adapter
from tests.checkpoints import dequantised, random_ids, reference_logits, save, save_fp8, save_gguf

Q = "model.layers.0.self_attn.q_proj"
A, B = (f"base_model.model.{Q}.lora_{side}.weight" for side in "AB")


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save(tmp_path_factory.mktemp("lora") / "source", num_hidden_layers=2, tie_word_embeddings=False)


def logits(model: Path, out: Path, ids: list[int], targets: str = "2xcpu", **options: Any) -> Any:
    plait.compile_artifact(model, targets, output=out, layers=(1,) * int(targets[0]), **options)
    with plait.open(out, in_process=True) as pipe:
        return pipe.logits(ids)


CASES: dict[str, tuple[dict[str, Any], Callable[[str], float]]] = {
    "plain": ({}, lambda module: 2.0),
    "rslora": ({"use_rslora": True, "lora_alpha": 3}, lambda module: 1.5),
    "patterns": (
        {
            "rank_pattern": {"q_proj": 2, r"layers\.1\..*down_proj": 6},
            "ranks": {"q_proj": 2, "layers.1.mlp.down_proj": 6},
            "alpha_pattern": {"layers.0.self_attn.v_proj": 1},
        },
        lambda module: 4.0 if "q_proj" in module else 8 / 6 if "1.mlp" in module else 0.25 if "0.self" in module else 2,
    ),
    "saved": (
        {"target_modules": ["embed_tokens", "o_proj", "gate_proj"], "modules_to_save": ["lm_head", "norm"]},
        lambda module: 2.0,
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_logits_are_those_of_the_merged_weights(case: str, source: Path, tmp_path: Path) -> None:
    config, scale = CASES[case]
    adapter = save_adapter(tmp_path / "a", source, **config)
    ids = random_ids(40)
    expected = reference_logits(merged(tmp_path / "wide", source, (adapter, scale)), ids)
    assert np.abs(expected - reference_logits(source, ids)).max() > 0.1
    got = logits(source, tmp_path / "m.plait", ids, lora=adapter)
    assert np.abs(got - expected).max() < 1e-4


def test_adapters_are_merged_in_their_order(source: Path, tmp_path: Path) -> None:
    first = save_adapter(tmp_path / "a", source, modules_to_save=["norm"])
    second = save_adapter(tmp_path / "b", source, seed=1, r=2, target_modules=["q_proj", "up_proj"])
    third = save_adapter(tmp_path / "c", source, seed=2, target_modules=["v_proj"], modules_to_save=["norm", "q_proj"])
    ids = random_ids(24)
    steps = ((first, lambda module: 2.0), (second, lambda module: 4.0), (third, lambda module: 2.0))
    expected = reference_logits(merged(tmp_path / "wide", source, *steps), ids)
    out = tmp_path / "m.plait"
    assert np.abs(logits(source, out, ids, lora=[first, second, third]) - expected).max() < 1e-4
    assert np.abs(logits(source, out, ids, lora=[third, second, first]) - expected).max() > 1e-2


def test_quantised_weights_are_merged_dequantised_and_the_plan_says_so(source: Path, tmp_path: Path) -> None:
    quantised = save_fp8(tmp_path / "fp8", source, "block")
    wide = dequantised(tmp_path / "wide", quantised)
    adapter = save_adapter(tmp_path / "a", source)
    ids = random_ids(24)
    expected = reference_logits(merged(tmp_path / "merged", wide, (adapter, lambda module: 2.0)), ids)
    out = tmp_path / "m.plait"
    assert np.abs(logits(quantised, out, ids, "2xh100", lora=adapter) - expected).max() < 1e-4
    *_, note = plait.open(out, in_process=True).plan.notes or ()
    assert "merged into 6 weights" in note and "6 of them stored quantised until now" in note
    refs = read_weights_json(next(out.glob("slices/0-*")) / "weights.json")
    assert refs[f"{Q}.weight"].encoding == "float32"
    assert refs["model.layers.0.self_attn.k_proj.weight"].encoding == "e4m3fn"


def test_a_merged_weight_is_rounded_once(source: Path, tmp_path: Path) -> None:
    half = save(tmp_path / "half", num_hidden_layers=2, dtype="bfloat16", tie_word_embeddings=False)
    adapter = save_adapter(tmp_path / "a", half)
    wide = load_file(merged(tmp_path / "wide", half, (adapter, lambda module: 2.0)) / "model.safetensors")
    out = tmp_path / "m.plait"
    plait.compile_artifact(half, "2xcpu", output=out, layers=(1, 1), lora=adapter)
    reports = [json.loads(path.read_text()) for path in sorted(out.glob("slices/*/report.json"))]
    names = [name for report in reports for name in report["merged"]]
    assert len(names) == 6 and len(list(out.glob("slices/*/changed.safetensors"))) == 2
    for folder in out.glob("slices/*"):
        refs = read_weights_json(folder / "weights.json")
        for name in refs.keys() & set(names):
            stored = torch.from_numpy(read_weight(refs[name], "float32"))
            off = (stored != wide[name].bfloat16().float()).sum()
            assert refs[name].encoding == "bfloat16" and off <= 2, "a tie or so of float32 sums"
        # What compile wrote is a safetensors file that the library reads.
        assert set(load_file(folder / "changed.safetensors")) == refs.keys() & set(names)


def test_gguf_takes_adapters_by_the_names_of_the_model(source: Path, tmp_path: Path) -> None:
    """Q and K lie there as rope pairs; an adapter's rows do not."""
    gguf = save_gguf(tmp_path / "m.gguf", source, "F32")
    adapter = save_adapter(tmp_path / "a", source, target_modules=["q_proj", "k_proj", "up_proj"])
    ids = random_ids(24)
    expected = reference_logits(merged(tmp_path / "wide", source, (adapter, lambda module: 2.0)), ids)
    assert np.abs(logits(gguf, tmp_path / "m.plait", ids, lora=adapter) - expected).max() < 1e-4
    vectors = save_adapter(tmp_path / "b", source, modules_to_save=["norm"])
    with pytest.raises(UnsupportedError, match="w \\+ 1"):
        plait.plan(gguf, "cpu", lora=vectors)


FUSED: dict[str, dict[str, Any]] = {
    "gpt2": {"target_modules": ["c_attn", "mlp.c_proj"], "modules_to_save": ["c_fc", "ln_1"], "fan_in_fan_out": True},
    "gpt_neox": {"target_modules": ["query_key_value", "dense"]},
    "phi3": {"target_modules": ["qkv_proj", "gate_up_proj"], "modules_to_save": ["down_proj"]},
    "deepseek_v2": {"target_modules": ["q_proj", "kv_a_proj_with_mqa", "kv_b_proj"]},
    "deepseek_v3": {"target_modules": ["q_b_proj"], "modules_to_save": ["kv_b_proj"]},
}


@pytest.mark.parametrize("family", FUSED)
def test_tensors_that_hold_several_weights(family: str, tmp_path: Path) -> None:
    """Fused q, k and v side by side and head by head, and matrices stored as (in, out)."""
    source, conv1d = save(tmp_path / "source", family, num_hidden_layers=2), family == "gpt2"
    adapter = save_adapter(tmp_path / "a", source, conv1d=conv1d, **FUSED[family])
    ids = random_ids(24)
    wide = merged(tmp_path / "wide", source, (adapter, lambda module: 2.0), conv1d=conv1d)
    expected = reference_logits(wide, ids)
    got = logits(source, tmp_path / "m.plait", ids, lora=adapter)
    assert np.abs(got - expected).max() < 1e-5 * max(10.0, np.abs(expected).max())


def test_a_fused_tensor_is_cut_as_the_weights_in_it_are(tmp_path: Path) -> None:
    """q is the first 4 rows of each 6, k the last 2; the table of a Conv1D lies transposed."""
    folder = tmp_path / "a"
    folder.mkdir()
    tensors = {
        "base_model.model.h.0.attn.lora_A.weight": torch.randn(4, 8),
        "base_model.model.h.0.attn.lora_B.weight": torch.randn(12, 4),
        "base_model.model.h.0.fc.weight": torch.randn(8, 5),
    }
    save_file(tensors, folder / "adapter_model.safetensors", metadata={"format": "pt"})
    said = CONFIG | {"target_modules": ["attn"], "modules_to_save": ["fc"], "fan_in_fan_out": True}
    (folder / "adapter_config.json").write_text(json.dumps(said))
    cuts = {"q": Rows(2, 6, (Piece(0, 4),)), "k": Rows(2, 6, (Piece(4, 2),))}
    targets = {name: Target((cut.count, 8), "transformer.h.0.attn.weight", cut) for name, cut in cuts.items()}
    adapter = read_adapter(folder, targets | {"h.0.fc.weight": Target((5, 8), "h.0.fc.weight", transposed=True)})
    assert {name: delta.rows for name, delta in adapter.deltas.items()} == cuts
    stored = read_weight(adapter.saved["h.0.fc.weight"], "float32")
    np.testing.assert_array_equal(stored, tensors["base_model.model.h.0.fc.weight"].numpy().T)


def drop(name: str) -> Callable[[dict[str, Any]], None]:
    return lambda tensors: tensors.pop(name)


def put(name: str, *shape: int, value: float = 0.5) -> Callable[[dict[str, Any]], None]:
    return lambda tensors: tensors.update({name: torch.full(shape, value)})


BROKEN: dict[str, tuple[dict[str, Any], Callable[[dict[str, Any]], None] | None, str, str]] = {
    "unknown key": ({"lora_gamma": 2}, None, "config-key-unknown", "lora_gamma"),
    "dora": ({"use_dora": True}, None, "config-value", "use_dora"),
    "bias": ({"bias": "all"}, None, "config-value", "'bias' is 'all'"),
    "base changed": ({"init_lora_weights": "pissa_niter_4"}, None, "config-value", "pissa_niter_4"),
    "other method": ({"peft_type": "IA3"}, None, "config-value", "peft_type"),
    "no method": ({"peft_type": ...}, None, "config-key-missing", "peft_type"),
    "no rank": ({"r": ...}, None, "config-key-missing", "'r'"),
    "rank 0": ({"r": 0}, None, "config-value", "'r' is 0"),
    "rank text": ({"rank_pattern": {"q_proj": "2"}}, None, "config-type", "q_proj"),
    "bad pattern": ({"alpha_pattern": {"(q_proj": 2}}, None, "config-value", "(q_proj"),
    "alpha": ({"lora_alpha": True}, None, "config-type", "lora_alpha"),
    "other rank": ({"r": 3}, None, "lora-shape", "rank 3"),
    "target missing": ({"target_modules": ["q_proj", "c_attn"]}, None, "lora-incomplete", "'c_attn'"),
    "layer missing": ({}, lambda t: [t.pop(name) for name in (A, B)], "lora-incomplete", Q),
    "not saved": ({"modules_to_save": ["lm_head"]}, None, "lora-incomplete", "'lm_head'"),
    "alone": ({}, drop(B), "lora-pair", A),
    "no such weight": ({}, put("base_model.model.model.layers.9.mlp.up_proj.lora_A.weight", 4, 64), "lora-pair", "9"),
    "no such module": (
        {},
        lambda t: [put(A.replace("layers.0", "layers.9"), 4, 64)(t), put(B.replace("layers.0", "layers.9"), 64, 4)(t)],
        "lora-target",
        "layers.9",
    ),
    "other tower": (
        {},
        lambda t: [t.update({k.replace("model.model.", "model.vision.model."): t[k].clone()}) for k in (A, B)],
        "lora-target",
        "vision.model",
    ),
    "magnitude": ({}, put(A.replace("lora_A", "lora_magnitude_vector"), 64), "lora-tensor", "magnitude"),
    "not listed": ({}, put("base_model.model.model.norm.weight", 64), "lora-tensor", "norm"),
    "other shape": ({}, put(A, 4, 63), "lora-shape", "[64, 63]"),
    "saved shape": (
        {"modules_to_save": ["model.norm"]},
        put("base_model.model.model.norm.weight", 63),
        "lora-shape",
        "[63]",
    ),
}


@pytest.mark.parametrize("case", BROKEN)
def test_what_is_wrong_with_an_adapter_is_named(case: str, source: Path, tmp_path: Path) -> None:
    config, change, code, text = BROKEN[case]
    adapter = edit_adapter(save_adapter(tmp_path / "a", source), change, **config)
    with pytest.raises(UserError) as caught:
        plait.plan(source, "cpu", lora=adapter)
    assert caught.value.code == code and text in str(caught.value)


def test_a_module_may_be_left_out_on_purpose(source: Path, tmp_path: Path) -> None:
    """PEFT writes out what `all-linear` means, with the modules that `exclude_modules` takes from it."""
    adapter = save_adapter(tmp_path / "a", source, target_modules=["q_proj", "v_proj"])
    edit_adapter(adapter, target_modules=["q_proj", "v_proj", "o_proj"])
    with pytest.raises(CheckpointError, match="no tensors for"):
        plait.plan(source, "cpu", lora=adapter)
    plait.plan(source, "cpu", lora=edit_adapter(adapter, exclude_modules=["o_proj"]))
    with pytest.raises(CheckpointError, match="no tensors for 'o_project'"):
        plait.plan(
            source, "cpu", lora=edit_adapter(adapter, exclude_modules=["o_project"], target_modules=["o_project"])
        )


def test_an_adapter_that_is_none_is_named(source: Path, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"there is no .*adapter_config\.json"):
        plait.plan(source, "cpu", lora=tmp_path)
    adapter = save_adapter(tmp_path / "a", source)
    (adapter / "adapter_model.safetensors").rename(adapter / "adapter_model.bin")
    with pytest.raises(UnsupportedError, match="is a pickle"):
        plait.plan(source, "cpu", lora=adapter)


def test_a_tied_table_is_not_changed(tmp_path: Path) -> None:
    tied = save(tmp_path / "tied", num_hidden_layers=2, tie_word_embeddings=True)
    whole = save(tmp_path / "untied", num_hidden_layers=2, tie_word_embeddings=False)
    for target in ("embed_tokens", "lm_head"):
        adapter = save_adapter(tmp_path / target, whole, target_modules=[target])
        with pytest.raises(UnsupportedError, match="it is tied"):
            plait.plan(tied, "cpu", lora=adapter)


@pytest.mark.parametrize("value", [float("nan"), 1e38])
def test_numbers_that_do_not_survive_leave_no_artifact(value: float, source: Path, tmp_path: Path) -> None:
    adapter = edit_adapter(save_adapter(tmp_path / "a", source), put(B, 64, 4, value=value))
    out = tmp_path / "out"
    with pytest.raises(CheckpointError) as caught:
        plait.compile_artifact(source, "cpu", output=out / "m.plait", lora=adapter, dtype="float16")
    assert Q in str(caught.value) and caught.value.code in ("weight-not-finite", "weight-overflow")
    assert not out.exists()


def test_the_artifact_needs_the_adapter_no_more(source: Path, tmp_path: Path) -> None:
    adapter, out, ids = save_adapter(tmp_path / "a", source), tmp_path / "m.plait", random_ids(8)
    first = logits(source, out, ids, lora=adapter, embed_weights=True)
    shutil.rmtree(adapter)
    moved = tmp_path / "elsewhere" / "m.plait"
    moved.parent.mkdir()
    out.rename(moved)
    with plait.open(moved, in_process=True) as pipe:
        np.testing.assert_array_equal(pipe.logits(ids), first)
    changed = next(moved.glob("slices/0-*/changed.safetensors"))
    changed.write_bytes(changed.read_bytes()[:-1] + b"\1")
    with pytest.raises(UserError, match=r"changed\.safetensors has changed"):
        plait.open(moved, in_process=True)


def test_patterns_match_as_peft_matches_them() -> None:
    said = CONFIG | {"rank_pattern": {"q_proj": 2, r"model\.layers\.\d\.mlp\.up": 3}, "alpha_pattern": {"0.q_proj": 5}}
    config = read_lora_config(said, "adapter_config.json")
    assert [config.rank(name) for name in ("a.q_proj", "a.xq_proj", "q_proj", "model.layers.1.mlp.up")] == [2, 4, 2, 3]
    assert config.scale("a.0.q_proj") == 2.5 and config.scale("a.10.q_proj") == 4.0
    whole = read_lora_config(CONFIG | {"target_modules": "all-linear", "exclude_modules": ["up"]}, "c")
    assert whole.wants("a.q", linear=True) and not whole.wants("lm_head", linear=False)
    assert not whole.wants("a.up", linear=True)
    some = read_lora_config(CONFIG | {"target_modules": ["q"], "layers_to_transform": 2}, "c")
    assert [some.wants(f"a.{layer}.q", linear=True) for layer in (1, 2, 22)] == [False, True, False]
    regular = read_lora_config(CONFIG | {"target_modules": r".*\.[12]\.q"}, "c")
    assert [regular.wants(f"a.{layer}.q", linear=True) for layer in (1, 2, 22)] == [True, True, False]


def test_several_adapters_on_the_command_line(source: Path, tmp_path: Path) -> None:
    from tests.host.command_line import plait as command

    adapters = [save_adapter(tmp_path / name, source, seed=seed) for seed, name in enumerate("ab")]
    words = [word for adapter in adapters for word in ("--lora", adapter)]
    result = command("compile", source, "--targets", "cpu", "-o", tmp_path / "m.plait", *words)
    assert result.exit_code == 0, result.output
    assert "the adapter a is merged" in result.stdout and "the adapter b is merged" in result.stdout
    with pytest.raises(UsageError):
        plait.plan(source, "cpu", lora=adapters, group_size=32)
