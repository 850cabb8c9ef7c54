"""GGUF: byte ranges, names, row order and config against the `gguf` package and transformers' own loader."""

from __future__ import annotations

import struct
from dataclasses import replace
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest

from plait.backends.weights import read_weight
from plait.errors import CheckpointError, PlaitError, UnsupportedError
from plait.frontend.checkpoint import open_checkpoint
from plait.frontend.config import DecoderConfig
from plait.frontend.gguf import read_gguf
from plait.frontend.lower import lower
from tests.checkpoints import pairs, save
from tests.gguf_files import convert, save_gguf, write_gguf

SIZES: dict[str, Any] = {"hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4, "num_key_value_heads": 2}
QUANTS = ("F32", "F16", "BF16", "Q4_0", "Q4_1", "Q8_0")


def make(tmp_path: Path, family: str = "llama", quant: str = "Q8_0", metadata: Any = None, **config: Any) -> Path:
    folder = save(tmp_path / "hf", family, **(SIZES | config))
    return save_gguf(tmp_path / "m.gguf", folder, quant, metadata)


def tensors(path: Path) -> dict[str, Any]:
    weights = open_checkpoint(path).weights
    assert weights is not None
    return {name: read_weight(ref, "float32") for name, ref in weights.items()}


@pytest.mark.parametrize("quant", QUANTS)
@pytest.mark.parametrize("family", ["llama", "qwen2"])
def test_tensors_equal_the_checkpoint_the_file_was_made_from(family: str, quant: str, tmp_path: Path) -> None:
    """F55, F56: names and row order come back, for each family by its own table; values up to the quantisation."""
    path = make(tmp_path, family, quant, attention_bias=True) if family == "llama" else make(tmp_path, family, quant)
    ours, original = tensors(path), tensors(tmp_path / "hf")
    lower(open_checkpoint(path))
    assert ours.keys() == original.keys()
    for name, tensor in ours.items():
        if quant == "F32" or tensor.ndim == 1:
            np.testing.assert_array_equal(tensor, original[name])
        else:
            step = {"F16": 2e-3, "BF16": 1e-2, "Q8_0": 2e-2, "Q4_0": 0.3, "Q4_1": 0.3}[quant]
            assert np.abs(tensor - original[name]).max() < step * np.abs(original[name]).max(), name


def test_k_rows_use_the_kv_heads(tmp_path: Path) -> None:
    """F55 as measured: undoing K with the query heads has the same shape and other rows."""
    path = make(tmp_path, quant="F32")
    weights = open_checkpoint(path).weights
    assert weights is not None
    ref = weights["model.layers.0.self_attn.k_proj.weight"]
    assert ref.rows == pairs(SIZES["num_key_value_heads"], ref.shape[0])
    right = read_weight(ref, "float32")
    wrong = read_weight(replace(ref, rows=pairs(SIZES["num_attention_heads"], ref.shape[0])), "float32")
    assert (right != wrong).any(axis=1).mean() >= 0.5


def test_qwen2_is_not_interleaved(tmp_path: Path) -> None:
    """F56: the style of rope is implied by the architecture."""
    weights = open_checkpoint(make(tmp_path, "qwen2")).weights
    assert weights is not None
    assert {ref.rows for ref in weights.values()} == {None}


@pytest.mark.parametrize("quant", ["Q4_1", "Q8_0", "F16"])
@pytest.mark.parametrize("family", ["llama", "qwen2"])
def test_tensors_are_bit_identical_to_transformers(family: str, quant: str, tmp_path: Path) -> None:
    """All tensors, as transformers' own GGUF loader converts them."""
    from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint

    path = make(tmp_path, family, quant, metadata=TOKENIZER)
    model = _transformers_model(family, tmp_path / "hf")
    theirs = load_gguf_checkpoint(path, return_tensors=True, model_to_load=model)["tensors"]
    ours = tensors(path)
    assert ours.keys() == theirs.keys()
    for name, tensor in ours.items():
        np.testing.assert_array_equal(tensor, theirs[name].float().numpy(), err_msg=name)


def _transformers_model(family: str, folder: Path) -> Any:
    from transformers import AutoConfig, AutoModelForCausalLM

    return AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder))


TOKENIZER: dict[str, Any] = {
    "tokenizer.ggml.model": "gpt2",
    "tokenizer.ggml.pre": "smollm",
    "tokenizer.ggml.tokens": ["a", "b", "ab"],
    "tokenizer.ggml.token_type": [1, 1, 1],
    "tokenizer.ggml.merges": ["a b"],
    "tokenizer.ggml.bos_token_id": 0,
    "tokenizer.ggml.eos_token_id": 1,
}


def test_header_equals_the_gguf_package(tmp_path: Path) -> None:
    path = make(
        tmp_path, metadata={"general.languages": ["en", "de"], "general.sizes": [1, 2, 3], "general.flag": True}
    )
    ours, theirs = read_gguf(path), gguf.GGUFReader(path)
    for key, field in theirs.fields.items():
        if not key.startswith("GGUF."):
            assert ours.metadata[key] == field.contents(), key
    by_offset = {ref.offset: ref for ref in ours.tensors.weights.values()}
    assert len(by_offset) == len(theirs.tensors)
    for tensor in theirs.tensors:
        ref = by_offset[tensor.data_offset]
        assert (ref.nbytes, ref.shape) == (tensor.n_bytes, tuple(reversed(tensor.shape.tolist())))


def test_config_equals_the_one_the_file_was_made_from(tmp_path: Path) -> None:
    for family in ("llama", "qwen2"):
        path = make(tmp_path / family, family, tie_word_embeddings=True, metadata=TOKENIZER)
        ours, original = open_checkpoint(path), open_checkpoint(tmp_path / family / "hf")
        assert isinstance(ours.config, DecoderConfig)
        assert isinstance(original.config, DecoderConfig)
        eps = ours.config.norm.eps
        same = {"dtype": None, "norm": original.config.norm}
        assert replace(ours.config, **same) == replace(original.config, **same)
        assert np.float32(eps) == np.float32(original.config.norm.eps)
        assert ours.tokenizer == path


@pytest.mark.parametrize(
    ("quant", "dtype"),
    [("F16", "float16"), ("BF16", "bfloat16"), ("F32", "float32"), ("Q4_0", "float32"), ("Q8_0", "float32")],
)
def test_dtype_of_the_file(quant: str, dtype: str, tmp_path: Path) -> None:
    assert open_checkpoint(make(tmp_path, quant=quant)).dtype == dtype


def refused(path: Path, kind: type[PlaitError]) -> PlaitError:
    with pytest.raises(kind) as caught:
        lower(open_checkpoint(path))
    return caught.value


@pytest.mark.parametrize("kind", ["IQ2_XXS", "TQ1_0", "I32", "F64"])
def test_other_types_are_refused_with_the_tensor(kind: str, tmp_path: Path) -> None:
    code = gguf.GGMLQuantizationType[kind]
    (tmp_path / "m.gguf").write_bytes(file([ARCH], [record("blk.0.attn_k.weight", [256, 2], int(code), 0)]))
    error = refused(tmp_path / "m.gguf", UnsupportedError)
    assert error.code == "gguf-tensor-type"
    assert f"blk.0.attn_k.weight ({kind})" in error.what
    assert "Q4_K" in error.why


KEYS: dict[str, tuple[dict[str, Any], type[PlaitError], str]] = {
    "no heads": ({"llama.attention.head_count": None}, CheckpointError, "num_attention_heads"),
    "no eps": ({"llama.attention.layer_norm_rms_epsilon": None}, CheckpointError, "rms_norm_eps"),
    "theta as text": ({"llama.rope.freq_base": "10000"}, CheckpointError, "rope_theta"),
    "heads by layer": ({"llama.attention.head_count": [4, 4, 4]}, CheckpointError, "num_attention_heads"),
    "wrong heads": ({"llama.attention.head_count_kv": 4}, CheckpointError, "k_proj"),
    "no heads at all": ({"llama.attention.head_count": 0}, CheckpointError, "num_attention_heads"),
    "vocabulary": ({"llama.vocab_size": 5}, CheckpointError, "vocab_size"),
    "rope dimensions": ({"llama.rope.dimension_count": 8}, CheckpointError, "rope.dimension_count"),
    "rope scaling": ({"llama.rope.scaling.type": "dynamic"}, UnsupportedError, "dynamic"),
    "yarn without a factor": ({"llama.rope.scaling.type": "yarn"}, CheckpointError, "factor"),
    "yarn of DeepSeek": ({"llama.rope.scaling.yarn_log_multiplier": 0.1}, UnsupportedError, "yarn_log_multiplier"),
    "yarn by half": ({"llama.rope.scaling.yarn_ext_factor": 0.5}, UnsupportedError, "yarn_ext_factor"),
    "scores grow": ({"llama.rope.scaling.attn_factor": 1.5}, UnsupportedError, "attn_factor"),
    "scale as text": ({"llama.attention.scale": "1"}, CheckpointError, "attention.scale"),
    "experts used": ({"llama.expert_used_count": 2}, UnsupportedError, "expert_used_count"),
    "experts": ({"llama.expert_count": 8, "llama.expert_used_count": 2}, UnsupportedError, "ffn_down"),
    "experts by sigmoid": (
        {"llama.expert_count": 8, "llama.expert_gating_func": 2},
        UnsupportedError,
        "expert_gating_func",
    ),
    "theta of windows": ({"llama.rope.freq_base_swa": 5.0}, CheckpointError, "freq_base_swa"),
    "softcap": ({"llama.attn_logit_softcapping": 50.0}, UnsupportedError, "attn_logit_softcapping"),
    "unknown key": ({"llama.attention.temperature": 1.0}, UnsupportedError, "llama.attention.temperature"),
    "unknown space": ({"xllama.block_count": 3}, UnsupportedError, "xllama.block_count"),
    "window": ({"llama.attention.sliding_window": 8}, UnsupportedError, "sliding_window"),
    "adapter": ({"general.type": "adapter"}, UnsupportedError, "adapter"),
    "split": ({"split.count": 2}, UnsupportedError, "one part of 2"),
    "type of type": ({"general.type": 3}, CheckpointError, "general.type"),
}


@pytest.mark.parametrize("case", KEYS)
def test_metadata_is_read_strictly(case: str, tmp_path: Path) -> None:
    change, kind, word = KEYS[case]
    assert word in refused(make(tmp_path, metadata=change), kind).what


def test_other_architectures_are_refused(tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "m.gguf", "bert", {}, {"token_embd.weight": ("F32", np.zeros((4, 32), np.float32))})
    error = refused(path, UnsupportedError)
    assert "'bert'" in error.what
    assert "llama, phi3, qwen2" in error.why


# --- F58: damaged headers


def string(text: str) -> bytes:
    return struct.pack("<Q", len(text)) + text.encode()


def pair(key: str, kind: int, value: bytes) -> bytes:
    return string(key) + struct.pack("<I", kind) + value


def record(name: str, dims: list[int], kind: int, offset: int) -> bytes:
    return string(name) + struct.pack(f"<I{len(dims)}QIQ", len(dims), *dims, kind, offset)


ARCH = pair("general.architecture", 8, string("llama"))


def file(
    pairs: list[bytes], records: list[bytes], data: bytes = bytes(256), version: int = 3, counts: Any = None
) -> bytes:
    head = struct.pack("<4sIQQ", b"GGUF", version, *(counts or (len(records), len(pairs))))
    head += b"".join(pairs) + b"".join(records)
    return head + bytes(-len(head) % 32) + data


GOOD = record("token_embd.weight", [32, 2], 0, 0)

DAMAGED: dict[str, tuple[bytes, str]] = {
    "dims 2^42+1": (file([ARCH], [record("w", [2**42 + 1, 2**22], 0, 0)]), "dimensions"),
    "product": (file([ARCH], [record("w", [2**40, 2**40, 2**40, 2**40], 0, 0)]), "cut short"),
    "zero dim": (file([ARCH], [record("w", [32, 0], 0, 0)]), "dimensions"),
    "no dims": (file([ARCH], [record("w", [], 0, 0)]), "0 dimensions"),
    "5 dims": (file([ARCH], [record("w", [1] * 5, 0, 0)]), "5 dimensions"),
    "type": (file([ARCH], [record("w", [64], 99, 0)]), "tensor type 99"),
    "row": (file([ARCH], [record("w", [40], 8, 0)]), "blocks of 32"),
    "offset": (file([ARCH], [record("w", [64], 0, 32)]), "begins at byte 32"),
    "second at 0": (file([ARCH], [GOOD, record("v", [32], 0, 0)]), "begins at byte 0"),
    "beyond": (file([ARCH], [record("w", [65], 0, 0)]), "4 bytes beyond"),
    "trailing": (file([ARCH], [GOOD], bytes(300)), "44 bytes more"),
    "twice": (file([ARCH], [GOOD, record("token_embd.weight", [32], 0, 256)]), "stands twice"),
    "key twice": (file([ARCH, ARCH], [GOOD]), "stands twice"),
    "alignment 0": (file([ARCH, pair("general.alignment", 4, struct.pack("<I", 0))], [GOOD]), "power of two"),
    "alignment text": (file([ARCH, pair("general.alignment", 8, string("32"))], [GOOD]), "power of two"),
    "metadata type": (file([pair("a", 77, b"")], [GOOD]), "metadata type 77"),
    "endless array": (file([pair("a", 9, struct.pack("<IQ", 0, 2**60))], [GOOD]), "cut short"),
    "endless strings": (file([pair("a", 9, struct.pack("<IQ", 8, 2**60))], [GOOD]), "items due"),
    "nested array": (file([pair("a", 9, struct.pack("<IQ", 9, 1))], [GOOD]), "array of arrays"),
    "long string": (file([pair("a", 8, struct.pack("<Q", 2**62))], [GOOD]), "cut short"),
    "not UTF-8": (file([pair("a", 8, struct.pack("<Q", 1) + b"\xff")], [GOOD]), "UTF-8"),
    "many tensors": (file([ARCH], [GOOD], counts=(2**61, 1)), "items due"),
    "many pairs": (file([ARCH], [GOOD], counts=(1, 2**61)), "items due"),
    "version 1": (file([ARCH], [GOOD], version=1), "version 1"),
    "big endian": (file([ARCH], [GOOD], version=3 << 24), "version"),
    "magic": (b"GGUG" + bytes(60), "not a GGUF file"),
    "empty": (b"", "empty"),
    "short": (b"GGUF", "cut short"),
    "no architecture": (file([], [GOOD]), "general.architecture"),
    "architecture number": (file([pair("general.architecture", 4, bytes(4))], [GOOD]), "general.architecture"),
    "no embedding": (file([ARCH], [record("output.weight", [32, 2], 0, 0)]), "token_embd"),
}


@pytest.mark.parametrize("case", DAMAGED)
def test_damaged_headers_are_refused(case: str, tmp_path: Path) -> None:
    content, word = DAMAGED[case]
    path = tmp_path / "m.gguf"
    path.write_bytes(content)
    error = refused(path, CheckpointError)
    assert word in error.what
    assert str(path) in error.what


@pytest.mark.parametrize(
    "name",
    [
        "blk.0.ffn_gate_inp.weight",
        "blk.0.ffn_gate_up_exps.weight",
        "attn_q.weight",
        "blk.0.output.weight",
        "blk.0.attn_q.scale",
    ],
)
def test_unknown_tensors_are_refused_by_name(name: str, tmp_path: Path) -> None:
    assert repr(name) in refused(with_tensor(tmp_path, name, np.ones(32, np.float32)), UnsupportedError).what


def test_a_block_too_many_is_refused_by_name(tmp_path: Path) -> None:
    name = "blk.3.attn_norm.weight"
    assert repr(name) in refused(with_tensor(tmp_path, name, np.ones(64, np.float32)), CheckpointError).what


@pytest.mark.parametrize(
    ("factors", "word"),
    [(np.ones(7), "7 factors"), (np.ones((2, 4)), "[2, 4]"), (np.array([1.0] * 7 + [0.0]), "not positive")],
)
def test_rope_factors_that_do_not_fit(factors: Any, word: str, tmp_path: Path) -> None:
    path = with_tensor(tmp_path, "rope_freqs.weight", factors.astype(np.float32))
    assert word in refused(path, CheckpointError).what


def with_tensor(tmp_path: Path, name: str, values: Any) -> Path:
    """A Llama with one more tensor."""
    tensors, keys, architecture = convert(save(tmp_path / "hf", "llama", **SIZES))
    every = {key: ("F32", value) for key, value in (tensors | {name: values}).items()}
    return write_gguf(tmp_path / "m.gguf", architecture, keys, every)


def test_offset_zero_is_no_missing_offset(tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    path.write_bytes(file([ARCH], [GOOD]))
    ref = read_gguf(path).tensors.weights["token_embd.weight"]
    assert (ref.offset % 32, ref.offset + 256) == (0, path.stat().st_size)
