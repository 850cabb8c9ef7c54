"""Tiny random checkpoints, lowered and run by the oracle, against transformers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from plait.backends.base import Batch
from plait.backends.weights import read_weight
from plait.errors import CheckpointError, PlaitError, UnsupportedError
from plait.frontend.checkpoint import open_checkpoint
from plait.frontend.lower import lower, unused_tensors
from plait.ir import kv_classes, weights
from plait.ir.oracle import Oracle
from tests.checkpoints import edit_config, random_ids, reference_logits, save

LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}

CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {}),
    "llama tied": ("llama", {"tie_word_embeddings": True}),
    "llama mha": ("llama", {"num_key_value_heads": 4}),
    "llama gqa 8": ("llama", {"num_attention_heads": 8, "num_key_value_heads": 1}),
    "llama gqa 3": ("llama", {"num_attention_heads": 6, "num_key_value_heads": 2, "head_dim": 16, "hidden_size": 60}),
    "llama wide heads": ("llama", {"head_dim": 32}),
    "llama biases": ("llama", {"attention_bias": True, "mlp_bias": True}),
    "llama theta": ("llama", {"rope_parameters": {"rope_type": "default", "rope_theta": 500.0}}),
    "llama linear": ("llama", {"rope_parameters": {"rope_type": "linear", "rope_theta": 1e4, "factor": 4.0}}),
    "llama llama3": ("llama", {"rope_parameters": LLAMA3}),
    "mistral": ("mistral", {}),
    "mistral window": ("mistral", {"sliding_window": 8}),
    "mistral wide heads": ("mistral", {"sliding_window": 8, "head_dim": 24}),
    "qwen2": ("qwen2", {}),
    "qwen2 tied": ("qwen2", {"tie_word_embeddings": True}),
    "qwen2 window": ("qwen2", {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 1}),
    "qwen2 layers": (
        "qwen2",
        {
            "use_sliding_window": True,
            "sliding_window": 5,
            "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
        },
    ),
}


def oracle_logits(folder: Path, ids: list[int]) -> NDArray[np.float64]:
    """Logits after every token, by the oracle on float64 copies of the stored weights."""
    checkpoint = open_checkpoint(folder)
    module = lower(checkpoint, "float32")
    assert checkpoint.weights is not None
    tensors = {name: read_weight(checkpoint.weights[name], "float32") for name in weights(module)}
    count, page = len(ids), 16
    pages = -(-count // page)
    classes = kv_classes(module)
    table = np.arange(pages, dtype=np.int32)[None, :]
    batch = Batch(
        tokens=np.array(ids, np.int32),
        positions=np.arange(count, dtype=np.int32),
        query_starts=np.array([0, count], np.int32),
        kv_lens=np.array([count], np.int32),
        page_tables=dict.fromkeys(classes, table),
        logit_rows=np.arange(count, dtype=np.int32),
    )
    oracle = Oracle(module, tensors, dict.fromkeys(classes, pages), page)
    return oracle.step(batch)["logits"]


@pytest.mark.parametrize("case", CASES)
def test_logits_equal_transformers(case: str, tmp_path: Path) -> None:
    """40 tokens: beyond the windows (5, 8) and beyond llama3's original 32 positions."""
    family, config = CASES[case]
    folder = save(tmp_path / "m", family, **config)
    ids = random_ids(40)
    expected = reference_logits(folder, ids)
    np.testing.assert_allclose(oracle_logits(folder, ids), expected, atol=1e-5 * np.abs(expected).max())


def test_a_window_of_8_sees_8_keys(tmp_path: Path) -> None:
    """G67: i - j < window. The token 8 places back changes nothing in a one-block model, the one 7 back does."""
    folder = save(tmp_path / "m", "mistral", sliding_window=8, num_hidden_layers=1)
    ids = random_ids(20)
    last = oracle_logits(folder, ids)[-1]
    for back, same in ((8, True), (7, False)):
        changed = list(ids)
        changed[-1 - back] = 2 + (changed[-1 - back] + 1) % 200
        assert np.array_equal(oracle_logits(folder, changed)[-1], last) is same


@pytest.mark.parametrize("family", ["llama", "mistral", "qwen2"])
@pytest.mark.parametrize("theta", [10000.0, 1234.5])
def test_every_spelling_of_rope_gives_the_same_module(family: str, theta: float, tmp_path: Path) -> None:
    """G60: rope_theta beside rope_scaling, rope_parameters, and rope_parameters by layer type."""
    scaling = {key: value for key, value in LLAMA3.items() if key != "rope_theta"}
    legacy = {("type" if key == "rope_type" else key): value for key, value in scaling.items()}
    spellings: list[dict[str, Any]] = [
        {"rope_parameters": {**scaling, "rope_theta": theta}},
        {"rope_parameters": ..., "rope_theta": theta, "rope_scaling": scaling},
        {"rope_parameters": ..., "rope_theta": theta, "rope_scaling": legacy},
        {"rope_parameters": {"full_attention": {**scaling, "rope_theta": theta}}},
        {"rope_parameters": {"full_attention": scaling}, "rope_theta": theta},
    ]
    folder = save(tmp_path / "m", family)
    modules = set()
    for spelling in spellings:
        clean = {"rope_parameters": ..., "rope_theta": ..., "rope_scaling": ...} | spelling
        checkpoint = open_checkpoint(edit_config(folder, **clean))
        assert {layer.attention.rope.theta for layer in checkpoint.config.layers} == {theta}
        modules.add(str(lower(checkpoint)))
    assert len(modules) == 1


def test_rope_may_differ_by_layer_type(tmp_path: Path) -> None:
    kinds = ["sliding_attention", "full_attention", "full_attention"]
    folder = edit_config(
        save(tmp_path / "m", "qwen2"),
        use_sliding_window=True,
        sliding_window=5,
        layer_types=kinds,
        rope_parameters={
            "full_attention": {"rope_type": "linear", "rope_theta": 1e6, "factor": 2.0},
            "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
        },
    )
    ropes = [layer.attention.rope for layer in open_checkpoint(folder).config.layers]
    assert [rope.theta for rope in ropes] == [1e4, 1e6, 1e6]
    assert [rope.factor for rope in ropes] == [None, 2.0, 2.0]


def test_dtype_of_the_checkpoint_is_the_default(tmp_path: Path) -> None:
    folder = save(tmp_path / "m", dtype="bfloat16")
    checkpoint = open_checkpoint(folder)
    assert checkpoint.dtype == "bfloat16"
    assert "xbf16>" in str(lower(checkpoint))
    assert "xbf16>" not in str(lower(checkpoint, "float32"))


# --- the cover: every tensor used, or explained, or refused


def rewrite(folder: Path, change: Any) -> Path:
    """Change the tensors of a single-file checkpoint."""
    from safetensors.numpy import load_file, save_file

    path = folder / "model.safetensors"
    tensors = load_file(path)
    change(tensors)
    save_file(tensors, path, metadata={"format": "pt"})
    return folder


def refused(folder: Path, kind: type[PlaitError] = CheckpointError) -> PlaitError:
    with pytest.raises(kind) as caught:
        lower(open_checkpoint(folder))
    return caught.value


def test_a_missing_tensor_is_named(tmp_path: Path) -> None:
    name = "model.layers.1.mlp.up_proj.weight"
    error = refused(rewrite(save(tmp_path / "m"), lambda tensors: tensors.pop(name)))
    assert error.code == "tensor-missing"
    assert name in error.what


def test_an_unused_tensor_is_named(tmp_path: Path) -> None:
    """A8: a loose parameter (here `layer_scalar`) belongs to no op."""
    name = "model.layers.1.layer_scalar"
    error = refused(rewrite(save(tmp_path / "m"), lambda tensors: tensors.update({name: np.ones(1, np.float32)})))
    assert error.code == "tensor-unused"
    assert name in error.what


def test_known_harmless_tensors_are_listed(tmp_path: Path) -> None:
    name = "model.layers.0.self_attn.rotary_emb.inv_freq"
    folder = rewrite(save(tmp_path / "m"), lambda tensors: tensors.update({name: np.ones(8, np.float32)}))
    checkpoint = open_checkpoint(folder)
    module = lower(checkpoint)
    assert list(unused_tensors(checkpoint, module)) == [name]
    assert checkpoint.weights is not None
    assert checkpoint.weights.keys() == weights(module).keys() | {name}


@pytest.mark.parametrize(
    ("changes", "tensor"),
    [
        ({"head_dim": 8}, "k_proj"),
        ({"num_key_value_heads": 4}, "k_proj"),
        ({"intermediate_size": 95}, "down_proj"),
        ({"vocab_size": 265}, "lm_head"),
        ({"hidden_size": 60}, "lm_head"),
    ],
)
def test_shapes_against_config(changes: dict[str, int], tensor: str, tmp_path: Path) -> None:
    """G64 among them: the file's head_dim is 16. Both shapes are shown."""
    error = refused(edit_config(save(tmp_path / "m"), **changes))
    assert error.code == "tensor-shape"
    assert tensor in error.what
    assert error.why.count("[") == 2


def test_a_block_too_few_is_noticed(tmp_path: Path) -> None:
    assert refused(edit_config(save(tmp_path / "m"), num_hidden_layers=2)).code == "tensor-unused"


# --- tied embeddings (E45, E46)


def head(tensors: dict[str, Any]) -> None:
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].copy()


def test_tied_with_and_without_a_head_in_the_file(tmp_path: Path) -> None:
    ids = random_ids(12)
    without = save(tmp_path / "a", tie_word_embeddings=True)
    assert "lm_head.weight" not in (open_checkpoint(without).weights or {})
    expected = reference_logits(without, ids)
    np.testing.assert_allclose(oracle_logits(without, ids), expected, atol=1e-5 * np.abs(expected).max())
    both = rewrite(save(tmp_path / "b", tie_word_embeddings=True), head)
    np.testing.assert_array_equal(oracle_logits(both, ids), oracle_logits(without, ids))
    checkpoint = open_checkpoint(both)
    assert unused_tensors(checkpoint, lower(checkpoint)) == {
        "lm_head.weight": "tied: equal to model.embed_tokens.weight"
    }


def test_tied_with_another_head_is_refused(tmp_path: Path) -> None:
    def other(tensors: dict[str, Any]) -> None:
        head(tensors)
        tensors["lm_head.weight"][-1, -1] += 1

    assert refused(rewrite(save(tmp_path / "m", tie_word_embeddings=True), other)).code == "tied-differ"


def test_untied_without_a_head_is_refused(tmp_path: Path) -> None:
    error = refused(edit_config(save(tmp_path / "m", tie_word_embeddings=True), tie_word_embeddings=False))
    assert error.code == "tensor-missing"
    assert "lm_head.weight" in error.what
    assert "tie_word_embeddings" in error.hint


# --- families


def test_bert_is_refused_by_name(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "bert", "architectures": ["BertModel"]}))
    error = refused(tmp_path, UnsupportedError)
    assert "'bert'" in error.what
    assert all(name in error.why for name in ("llama", "mistral", "qwen2"))


def test_another_head_on_a_known_family_is_refused(tmp_path: Path) -> None:
    folder = edit_config(save(tmp_path / "m"), architectures=["LlamaForSequenceClassification"])
    error = refused(folder, UnsupportedError)
    assert "LlamaForSequenceClassification" in error.what
