"""Every architecture and every type of GGUF: files written from transformers' checkpoints, against transformers."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
from numpy.typing import NDArray

import plait
from plait.backends.weights import read_weight
from plait.errors import CheckpointError
from plait.frontend.checkpoint import open_checkpoint
from plait.frontend.config import Attention, DecoderConfig
from plait.frontend.gguf.architectures import ARCHITECTURES
from plait.frontend.gguf.header import ENCODINGS
from plait.frontend.gguf.words import share
from plait.frontend.lower import lower
from plait.ir import weights
from plait.ir.quant import GGUF
from tests.checkpoints import random_ids, reference_logits, save
from tests.families import ORIGINAL
from tests.gguf_files import ARCHITECTURES as WRITTEN
from tests.gguf_files import convert, save_gguf, write_gguf

COUNT, LIMIT = 48, 2e-5
"""48 tokens are beyond the windows (8) and the original context of scaled ropes (16). The limit is relative to the
largest score; transformers' own float32 is a quarter of it away from float64."""

LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": ORIGINAL,
}
YARN = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": ORIGINAL}
HEAD_SCALE = {"query_pre_attn_scalar": 16}
"""The head_dim, as all sizes of Gemma but the largest have it; GGUF has no key for it."""

CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {"tie_word_embeddings": True}),
    "llama biases": ("llama", {"attention_bias": True, "mlp_bias": True}),
    "llama 3": ("llama", {"rope_parameters": LLAMA3}),
    "llama linear": ("llama", {"rope_parameters": {"rope_type": "linear", "rope_theta": 1e4, "factor": 4.0}}),
    "mixtral": ("mixtral", {"sliding_window": None}),
    "qwen2": ("qwen2", {}),
    "qwen2 yarn": ("qwen2", {"rope_parameters": YARN, "max_position_embeddings": 4 * ORIGINAL}),
    "qwen3": ("qwen3", {"head_dim": 24}),
    "qwen3moe": ("qwen3_moe", {"mlp_only_layers": []}),
    "gemma2": ("gemma2", HEAD_SCALE),
    "gemma3": ("gemma3_text", HEAD_SCALE),
    "phi3": ("phi3", {}),
    "phi3 longrope": ("phi3-longrope", {}),
    "gpt2": ("gpt2", {}),
    "gpt-oss": ("gpt_oss", {}),
}
QUANTS = {
    "llama": "Q4_1", "mixtral": "Q5_1", "qwen2": "Q5_0", "qwen3": "Q4_0", "qwen3moe": "Q8_0", "gemma2": "Q8_0",
    "gemma3": "Q4_0", "phi3": "Q8_0", "phi3 longrope": "Q5_0", "gpt2": "Q5_1", "gpt-oss": "MXFP4",
}  # fmt: skip

Made = Callable[[str], tuple[Path, NDArray[np.float32]]]


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Made:
    """Checkpoints and their reference logits, by case, as far as they were asked for."""
    cache: dict[str, tuple[Path, NDArray[np.float32]]] = {}

    def get(case: str) -> tuple[Path, NDArray[np.float32]]:
        if case not in cache:
            family, config = CASES[case]
            folder = save(tmp_path_factory.mktemp("gguf") / "hf", family, **config)
            cache[case] = folder, reference_logits(folder, random_ids(COUNT))
        return cache[case]

    return get


def logits(path: Path, **asked: Any) -> NDArray[np.float32]:
    """On the host's backend, in two chunks and more."""
    with plait.compile(path, "cpu", dtype="float32", run={"in_process": True}, **asked) as pipe:
        return np.asarray(pipe.logits(random_ids(COUNT), chunk=20))


def off(ours: NDArray[Any], theirs: NDArray[Any]) -> float:
    return float(np.abs(ours - theirs).max() / np.abs(theirs).max())


def test_every_architecture_is_tested() -> None:
    assert set(WRITTEN.values()) == ARCHITECTURES.keys()
    assert {WRITTEN[family.partition("-")[0]] for family, _ in CASES.values()} == ARCHITECTURES.keys()


@pytest.mark.parametrize("case", CASES)
def test_logits_equal_transformers(case: str, made: Made, tmp_path: Path) -> None:
    """F55, F56 among them: rows of q and k by the style of rope that the architecture implies."""
    folder, expected = made(case)
    assert off(logits(save_gguf(tmp_path / "m.gguf", folder, "F32")), expected) < LIMIT


@pytest.mark.parametrize("case", QUANTS)
def test_quantised_models_agree_with_the_dequantised_ones(case: str, made: Made, tmp_path: Path) -> None:
    """The weights stay quantised in the module. Dequantised by the `gguf` package the file gives the same scores."""
    folder, _ = made(case)
    path = save_gguf(tmp_path / "q.gguf", folder, QUANTS[case])
    kinds = {op.result.type.element_type for op in weights(lower(open_checkpoint(path))).values()}
    assert GGUF[QUANTS[case]] in kinds
    reader = gguf.GGUFReader(path)
    keys = {name: field.contents() for name, field in reader.fields.items() if not name.startswith("GGUF.")}
    plain = {tensor.name: ("F32", gguf.dequantize(tensor.data, tensor.tensor_type)) for tensor in reader.tensors}
    architecture = keys.pop("general.architecture")
    wide = write_gguf(tmp_path / "f.gguf", architecture, keys, plain)
    assert off(logits(path), logits(wide)) < LIMIT


FUSED: dict[str, dict[str, int]] = {"phi3": {"attn_qkv": 32, "ffn_up": 96}, "gpt2": {"attn_qkv": 64}}
"""What the converter fuses, and the rows of the last of its parts; q and gate take the rest, k and v are alike."""

PIECES = {"attn_qkv": ("attn_q", "attn_k", "attn_v"), "ffn_up": ("ffn_gate", "ffn_up")}


def other_layout(case: str, tensors: dict[str, NDArray[Any]]) -> dict[str, NDArray[Any]]:
    """What is fused apart, and what stands apart fused."""
    made = dict(tensors)
    for name in tensors:
        stem, _, rest = name.rpartition(".")
        block, _, part = stem.rpartition(".")
        last, parts = FUSED.get(case, {}).get(part), PIECES.get(part, ())
        if last is not None:
            value = made.pop(name)
            ends = [len(value) - last * count for count in range(len(parts) - 1, 0, -1)]
            made |= {f"{block}.{p}.{rest}": v for p, v in zip(parts, np.split(value, ends), strict=True)}
        elif case not in FUSED and part in ("attn_q", "ffn_gate"):
            whole = "attn_qkv" if part == "attn_q" else "ffn_up"
            joined = np.concatenate([made.pop(f"{block}.{own}.{rest}") for own in PIECES[whole]])
            made[f"{block}.{whole}.{rest}"] = joined
    return made


@pytest.mark.parametrize("case", ["llama", "llama biases", "mixtral", "qwen2", "qwen3", "gemma2", "phi3", "gpt2"])
def test_rows_fused_or_apart_are_the_same_weights(case: str, made: Made, tmp_path: Path) -> None:
    """llama.cpp takes either; the rope pairs of llama stand inside the fused tensor."""
    tensors, keys, architecture = convert(made(case)[0])
    other, read = other_layout(case, tensors), []
    assert "blk.0.attn_qkv.weight" in tensors.keys() ^ other.keys()
    for name, stored in (("a", tensors), ("b", other)):
        written = {tensor: ("Q8_0", values) for tensor, values in stored.items()}
        checkpoint = open_checkpoint(write_gguf(tmp_path / f"{name}.gguf", architecture, keys, written))
        lower(checkpoint)
        assert checkpoint.weights is not None
        read.append({name: read_weight(ref, "float32") for name, ref in checkpoint.weights.items()})
    assert read[0].keys() == read[1].keys()
    for name, values in read[0].items():
        np.testing.assert_array_equal(values, read[1][name], err_msg=name)


def test_what_stands_twice_or_does_not_fit_is_refused(made: Made, tmp_path: Path) -> None:
    tensors, keys, architecture = convert(made("llama")[0])
    other = other_layout("llama", tensors)
    qkv = "blk.0.attn_qkv.weight"
    for wrong, words in (
        (tensors | {qkv: other[qkv]}, "model.layers.0.self_attn.q_proj.weight' twice"),
        (other | {qkv: other[qkv][:-16]}, "'blk.0.attn_qkv.weight' has 112 rows"),
        (tensors | {"blk.0.attn_k.weight": tensors["blk.0.attn_k.weight"][:-3]}, "no pairs of 2 heads"),
    ):
        written = {name: ("F32", values) for name, values in wrong.items()}
        with pytest.raises(CheckpointError) as caught:
            open_checkpoint(write_gguf(tmp_path / "m.gguf", architecture, keys, written))
        assert words in caught.value.what
    alone = {name: ("F32", values) for name, values in tensors.items() if "ffn_gate" not in name}
    with pytest.raises(CheckpointError, match=r"'blk.0.ffn_up.weight' has 96 rows"):
        open_checkpoint(write_gguf(tmp_path / "m.gguf", architecture, keys, alone))


# --- transformers' own loader


SECOND = ("llama", "qwen2", "qwen3", "qwen3moe", "gemma2", "gemma3", "phi3", "gpt2")
"""What transformers reads from GGUF, Mixtral and GPT-OSS not."""

TOKENS: dict[str, Any] = {
    "tokenizer.ggml.model": "gpt2",
    "tokenizer.ggml.tokens": ["a", "b", "ab"],
    "tokenizer.ggml.merges": ["a b"],
    "tokenizer.ggml.bos_token_id": 0,
    "tokenizer.ggml.eos_token_id": 1,
}


@pytest.mark.parametrize("case", SECOND)
def test_weights_equal_those_of_transformers_loader(case: str, made: Made, tmp_path: Path) -> None:
    """Of a quantised file, put together again where transformers fuses what GGUF keeps apart."""
    from transformers import AutoConfig, AutoModelForCausalLM
    from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint

    folder, _ = made(case)
    path = save_gguf(tmp_path / "m.gguf", folder, "Q8_0", TOKENS)
    model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder))
    theirs = load_gguf_checkpoint(path, return_tensors=True, model_to_load=model)["tensors"]
    checkpoint = open_checkpoint(path)
    assert checkpoint.weights is not None
    ours = {name: read_weight(ref, "float32") for name, ref in checkpoint.weights.items()}
    assert theirs
    for name, tensor in theirs.items():
        expected = tensor.float().numpy()
        got = ours.pop(name) if name in ours else _fused(ours, name)
        if case.startswith("gemma") and "norm" in name:
            np.testing.assert_allclose(got, expected + 1, rtol=2e-7, err_msg=name)
        else:
            np.testing.assert_array_equal(got, expected.T if _is_conv(case, name) else expected, err_msg=name)
    assert not ours


PARTS = {
    "qkv_proj": ("q_proj", "k_proj", "v_proj"),
    "c_attn": ("q", "k", "v"),
    "gate_up_proj": ("gate_proj", "up_proj"),
}


def _is_conv(case: str, name: str) -> bool:
    """GPT-2 keeps matrices (in, out)."""
    return case == "gpt2" and name.endswith(".weight") and any(part in name for part in ("c_attn", "c_proj", "c_fc"))


def _fused(ours: dict[str, NDArray[Any]], name: str) -> NDArray[Any]:
    if "experts.down_proj" in name:
        return ours.pop(f"{name}.weight")
    whole, parts = next((key, value) for key, value in PARTS.items() if key in name)
    stack = ".weight" if "experts" in name else ""
    return np.concatenate([ours.pop(name.replace(whole, part) + stack) for part in parts], axis=1 if stack else 0)


# --- what keys say, and what they leave out


def config_of(path: Path) -> DecoderConfig:
    config = open_checkpoint(path).config
    assert isinstance(config, DecoderConfig)
    return config


def attentions(path: Path) -> list[Attention]:
    found = [layer.attention for layer in config_of(path).layers]
    assert all(isinstance(own, Attention) for own in found)
    return [own for own in found if isinstance(own, Attention)]


@pytest.mark.parametrize(
    ("case", "key", "pattern", "slides"),
    [
        ("gemma2", "gemma2", None, [True, False, True]),
        ("gemma2", "gemma2", 3, [True, True, False]),
        ("gemma2", "gemma2", 0, [True, True, True]),
        ("gemma2", "gemma2", 1, [False, False, False]),
        ("gemma2", "gemma2", [False, True, True], [False, True, True]),
        ("gemma3", "gemma3", None, [True, True, True, True, True, False, True]),
        ("gpt-oss", "gpt-oss", None, [True, False]),
    ],
)
def test_which_blocks_have_the_window(
    case: str, key: str, pattern: Any, slides: list[bool], made: Made, tmp_path: Path
) -> None:
    """G66: by the architecture's own alternation, or by the file's."""
    path = save_gguf(tmp_path / "m.gguf", made(case)[0], metadata={f"{key}.attention.sliding_window_pattern": pattern})
    assert [own.window for own in attentions(path)] == [8 if slide else None for slide in slides]


def test_a_window_of_0_is_none(made: Made, tmp_path: Path) -> None:
    path = save_gguf(tmp_path / "m.gguf", made("phi3")[0], metadata={"phi3.attention.sliding_window": 0})
    assert {own.window for own in attentions(path)} == {None}


@pytest.mark.parametrize("case", ["gemma3", "phi3", "gpt-oss"])
def test_a_window_that_no_key_says_is_not_none(case: str, made: Made, tmp_path: Path) -> None:
    """Phi-3's first files leave it out, and the model has one of 2047 tokens. Gemma 2's is the format's default."""
    path = save_gguf(tmp_path / "m.gguf", made(case)[0], metadata={f"{case}.attention.sliding_window": None})
    with pytest.raises(CheckpointError, match=f"{case}.attention.sliding_window is missing"):
        open_checkpoint(path)


def test_factors_do_not_belong_to_blocks_with_a_window(made: Made, tmp_path: Path) -> None:
    tensors, keys, architecture = convert(made("gemma2")[0])
    tensors["rope_freqs.weight"] = np.full(8, 4, np.float32)
    path = write_gguf(tmp_path / "m.gguf", architecture, keys, {name: ("F32", each) for name, each in tensors.items()})
    with pytest.raises(CheckpointError, match="rope_freqs"):
        open_checkpoint(path)


def test_scaling_belongs_to_blocks_without_a_window(made: Made, tmp_path: Path) -> None:
    """G61, Gemma 3: theta 10000 where there is a window, which no key says."""
    ropes = [own.rope for own in attentions(save_gguf(tmp_path / "m.gguf", made("gemma3")[0]))]
    assert {getattr(rope, "theta", None) for rope in ropes} == {10000.0, 1000000.0}
    assert [getattr(rope, "factor", None) for rope in ropes] == [None] * 5 + [4.0, None]


@pytest.mark.parametrize(("case", "theta"), [("llama", 10000.0), ("mixtral", None), ("qwen3", None)])
def test_theta_where_no_key_says_it(case: str, theta: float | None, made: Made, tmp_path: Path) -> None:
    """Llama 2's first files leave it out. Mixtral's own default is a million and llama.cpp's is not: an error."""
    key = f"{WRITTEN.get(case, case)}.rope.freq_base"
    path = save_gguf(tmp_path / "m.gguf", made(case)[0], metadata={key: None})
    if theta is None:
        with pytest.raises(CheckpointError, match="rope_theta is missing"):
            open_checkpoint(path)
    else:
        assert {getattr(own.rope, "theta", None) for own in attentions(path)} == {theta}


def test_what_gemma_2_means_without_keys(made: Made, tmp_path: Path) -> None:
    caps = {"gemma2.attn_logit_softcapping": None, "gemma2.final_logit_softcapping": None}
    path = save_gguf(tmp_path / "m.gguf", made("gemma2")[0], metadata=caps)
    assert {own.softcap for own in attentions(path)} == {50.0}
    assert config_of(path).logits_softcap == 30.0
    without = save_gguf(tmp_path / "n.gguf", made("gemma2")[0], metadata={"gemma2.attention.sliding_window": None})
    assert attentions(without)[0].window == 4096


@pytest.mark.parametrize(("family", "blocks"), [("gemma2", 46), ("gemma3_text", 62)])
def test_the_largest_gemma_divides_by_another_number(family: str, blocks: int, tmp_path: Path) -> None:
    """hidden / heads is 32 here and head_dim 16."""
    sizes = {"hidden_size": 64, "num_attention_heads": 2, "num_hidden_layers": blocks, "query_pre_attn_scalar": 32}
    folder = save(tmp_path / "hf", family, **sizes, intermediate_size=32, head_dim=16)
    expected = {own.scale for own in attentions(folder)}
    assert {own.scale for own in attentions(save_gguf(tmp_path / "m.gguf", folder, "F32"))} == expected == {32**-0.5}


def test_a_scale_that_the_file_gives(made: Made, tmp_path: Path) -> None:
    path = save_gguf(tmp_path / "m.gguf", made("qwen2")[0], metadata={"qwen2.attention.scale": 0.5})
    assert {own.scale for own in attentions(path)} == {0.5}


def test_yarn_grows_by_both_factors(made: Made, tmp_path: Path) -> None:
    path = save_gguf(tmp_path / "m.gguf", made("qwen2 yarn")[0], metadata={"qwen2.rope.scaling.attn_factor": 1.5})
    grown = [getattr(own.rope, "attention_factor", None) for own in attentions(path)]
    assert grown == pytest.approx([1.5 * (0.1 * np.log(4.0) + 1)] * 3)


def test_a_factor_without_a_type_is_linear(made: Made, tmp_path: Path) -> None:
    path = save_gguf(tmp_path / "m.gguf", made("qwen2")[0], metadata={"qwen2.rope.scaling.factor": 4.0})
    assert {getattr(own.rope, "kind", None) for own in attentions(path)} == {"linear"}


def test_a_part_of_a_head_is_whole_again() -> None:
    """The share that stands for `rope.dimension_count` gives the same number of features back."""
    sizes = [(part, head_dim) for head_dim in range(2, 257) for part in range(2, head_dim + 1, 2)]
    assert any(int(head_dim * (part / head_dim)) != part for part, head_dim in sizes)
    assert all(int(head_dim * share(part, head_dim)) == part for part, head_dim in sizes)


# --- types


HALVES = {
    "Q4_0": (0,), "Q4_1": (0, 2), "Q5_0": (0,), "Q5_1": (0, 2), "Q8_0": (0,), "Q2_K": (80, 82), "Q3_K": (108,),
    "Q4_K": (0, 2), "Q5_K": (0, 2), "Q6_K": (208,), "IQ4_NL": (0,), "IQ4_XS": (0,), "MXFP4": (),
}  # fmt: skip
"""Where a block holds float16 scales (ggml-common.h)."""


def blocks(encoding: str, shape: tuple[int, ...], rng: np.random.Generator) -> NDArray[np.uint8]:
    """Random bytes with finite, small scales."""
    size, block_bytes = gguf.constants.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[encoding]]
    raw = rng.integers(0, 256, (*shape[:-1], shape[-1] // size, block_bytes), np.uint8)
    for at in HALVES[encoding]:
        numbers = (rng.normal(size=raw.shape[:-1]) * 0.01).astype(np.float16)
        raw[..., at : at + 2] = numbers[..., None].view(np.uint8)
    if encoding == "MXFP4":
        raw[..., 0] = rng.integers(110, 126, raw.shape[:-1])
    return raw.reshape(*shape[:-1], -1)


def test_every_type_is_tested() -> None:
    assert HALVES.keys() | {"F32", "F16", "BF16"} == ENCODINGS.keys()


@pytest.fixture(scope="module")
def wide(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Rows of 256, which the blocks of all types divide, and three heads' worth of rows."""
    sizes = {"hidden_size": 256, "intermediate_size": 256, "num_attention_heads": 4, "num_key_value_heads": 2}
    return save(tmp_path_factory.mktemp("wide") / "hf", "llama", **sizes, num_hidden_layers=1, vocab_size=64)


@pytest.mark.parametrize("encoding", HALVES)
def test_every_type_is_bit_equal_to_the_package(encoding: str, wide: Path, tmp_path: Path) -> None:
    """Through a file of a model; q and k with their rows put back."""
    tensors, keys, architecture = convert(wide)
    rng = np.random.default_rng(0)
    stored = {
        name: (encoding, blocks(encoding, tensor.shape, rng) if tensor.ndim > 1 else tensor)
        for name, tensor in tensors.items()
    }
    path = write_gguf(tmp_path / "m.gguf", architecture, keys, stored)
    checkpoint = open_checkpoint(path)
    lower(checkpoint)
    assert checkpoint.weights is not None
    reader = {tensor.data_offset: tensor for tensor in gguf.GGUFReader(path).tensors}
    assert len(reader) == len(checkpoint.weights)
    for name, ref in checkpoint.weights.items():
        tensor = reader[ref.offset]
        expected = gguf.dequantize(tensor.data, tensor.tensor_type)
        heads = {"q_proj": 4, "k_proj": 2}.get(name.split(".")[-2])
        if heads:
            expected = expected.reshape(heads, -1, 2, 256).swapaxes(1, 2).reshape(expected.shape)
        got = read_weight(ref, "float32")
        np.testing.assert_array_equal(got.view(np.uint32), expected.view(np.uint32), err_msg=name)
