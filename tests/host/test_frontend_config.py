"""config.json is read strictly: nothing is ignored without a reason, nothing is defaulted that changes numbers."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from plait.errors import CheckpointError, PlaitError, UnsupportedError
from plait.frontend.config_reader import ENDS, NO_EFFECT, PADDING
from plait.frontend.families import read_config
from plait.frontend.families.decoder import build_decoder
from plait.ir import kv_layouts
from plait.ir.passes.slice import slice_modules
from tests.families import FAMILIES, config_of

LLAMA: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 100,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-5,
    "hidden_act": "silu",
    "rope_theta": 10000.0,
    "torch_dtype": "bfloat16",
}
MISTRAL = LLAMA | {"architectures": ["MistralForCausalLM"], "model_type": "mistral", "sliding_window": 8}
QWEN2 = LLAMA | {"architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2"}


def read(base: dict[str, Any], **changes: Any) -> Any:
    """`read_config` of a base with changes; a value of `...` removes the key."""
    return read_config({key: value for key, value in (base | changes).items() if value is not ...}, "config.json")


def refused(base: dict[str, Any], **changes: Any) -> PlaitError:
    with pytest.raises(PlaitError) as caught:
        read(base, **changes)
    assert "config.json" in caught.value.what or caught.value.code == "family-unsupported"
    return caught.value


def windows(base: dict[str, Any], **changes: Any) -> tuple[int | None, ...]:
    return tuple(layer.attention.window for layer in read(base, **changes).layers)


def test_normal_form() -> None:
    config = read(LLAMA, eos_token_id=[1, 2], bos_token_id=0)
    own = config.layers[0].attention
    assert (own.heads, own.kv_heads, own.head_dim, config.blocks) == (4, 2, 16, 4)
    assert own.scale == 0.25
    assert windows(LLAMA) == (None,) * 4
    assert (config.eos_token_ids, config.bos_token_id, config.dtype) == ((1, 2), 0, "bfloat16")
    assert not (config.tied or own.bias or own.output_bias or config.layers[0].mlp.bias)


@pytest.mark.parametrize("key", [key for key in LLAMA if key not in ("architectures", "torch_dtype")])
def test_a_missing_key_is_named_never_defaulted(key: str) -> None:
    if key == "num_key_value_heads":
        # The format's own meaning: one per head.
        assert read(LLAMA, num_key_value_heads=...).layers[0].attention.kv_heads == 4
        return
    error = refused(LLAMA, **{key: ...})
    assert isinstance(error, CheckpointError)
    assert error.code == "config-key-missing"
    assert key in error.what


@pytest.mark.parametrize("key", ENDS)
def test_a_token_beyond_the_vocabulary_is_refused(key: str) -> None:
    read(LLAMA, **{key: 99})
    for ids in (100, [0, 100]):
        error = refused(LLAMA, **{key: ids})
        assert (error.code, repr(key) in error.what, error.why) == ("config-value", True, "its tokens are 0 to 99")
    assert refused(LLAMA, **{key: -2}).code == "config-type"
    assert read(LLAMA, pad_token_id=-1) == read(LLAMA)  # as the first configs of Llama say that there is none


def test_a_value_of_the_wrong_kind_is_said_in_whole_words() -> None:
    kinds = {"rope_theta": "a finite number", "vocab_size": "a whole number", "model_type": "a string"}
    for key, kind in (kinds | {"tie_word_embeddings": "true or false"}).items():
        assert refused(LLAMA, **{key: ["x"]}).what == f"config.json: {key!r} is ['x'], expected {kind}"


def test_a_number_too_large_is_not_called_negative() -> None:
    assert "at most 1099511627776" in refused(LLAMA, max_position_embeddings=10**15).what
    assert "expected a positive number" in refused(LLAMA, max_position_embeddings=0).what


def test_a_missing_theta_is_an_error_in_the_new_spelling_too() -> None:
    assert "rope_theta" in refused(LLAMA, rope_theta=..., rope_parameters={"rope_type": "default"}).what


@pytest.mark.parametrize(
    ("base", "changes", "word"),
    [
        (LLAMA, {"attn_logit_softcapping": 50.0}, "attn_logit_softcapping"),
        (LLAMA, {"query_pre_attn_scalar": 256}, "query_pre_attn_scalar"),
        (LLAMA, {"sliding_window": 4096}, "sliding_window"),
        (LLAMA, {"rope_thetas": 1}, "rope_thetas"),
        (LLAMA, {"qkv_bias": True}, "qkv_bias"),
        (QWEN2, {"attention_bias": True}, "attention_bias"),
        (MISTRAL, {"attention_bias": True}, "attention_bias"),
    ],
)
def test_an_unknown_key_is_named(base: dict[str, Any], changes: dict[str, Any], word: str) -> None:
    error = refused(base, **changes)
    assert isinstance(error, UnsupportedError)
    assert error.code == "config-key-unknown"
    assert word in error.what


def test_an_unknown_key_gets_a_suggestion() -> None:
    assert "attention_bias" in refused(LLAMA, attention_biass=True).hint


def test_keys_without_effect_are_passed_over() -> None:
    assert read(LLAMA, **dict.fromkeys(NO_EFFECT, "whatever") | {PADDING: 5}) == read(LLAMA)
    assert all(reason for reason in NO_EFFECT.values())


@pytest.mark.parametrize(
    ("changes", "word"),
    [
        ({"hidden_act": "gelu"}, "hidden_act"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor"),
        ({"is_encoder_decoder": True}, "is_encoder_decoder"),
        ({"rope_interleaved": True}, "rope_interleaved"),
        ({"quantization_config": {"quant_method": "aqlm"}}, "aqlm"),
        ({"torch_dtype": "float8_e4m3fn"}, "float8_e4m3fn"),
        ({"torch_dtype": "float64"}, "float64"),
    ],
)
def test_values_that_are_not_implemented_are_refused_by_name(changes: dict[str, Any], word: str) -> None:
    error = refused(LLAMA, **changes)
    assert isinstance(error, UnsupportedError)
    assert word in error.what


@pytest.mark.parametrize(
    ("changes", "word"),
    [
        ({"num_attention_heads": 6}, "hidden_size"),
        ({"num_key_value_heads": 3}, "KV heads"),
        ({"head_dim": 15}, "odd"),
        ({"hidden_size": 0}, "hidden_size"),
        ({"hidden_size": -64}, "hidden_size"),
        ({"num_hidden_layers": 10**9}, "num_hidden_layers"),
        ({"vocab_size": 100.0}, "vocab_size"),
        ({"vocab_size": True}, "vocab_size"),
        ({"vocab_size": "100"}, "vocab_size"),
        ({"num_attention_heads": [4, 4, 4, 4]}, "num_attention_heads"),
        ({"rms_norm_eps": 0}, "rms_norm_eps"),
        ({"rms_norm_eps": float("nan")}, "rms_norm_eps"),
        ({"tie_word_embeddings": 1}, "tie_word_embeddings"),
        ({"eos_token_id": "</s>"}, "eos_token_id"),
        ({"rope_theta": 10**400}, "rope_theta"),
        ({"rope_theta": -1.0}, "theta"),
        ({"architectures": "LlamaForCausalLM"}, "architectures"),
    ],
)
def test_values_are_checked(changes: dict[str, Any], word: str) -> None:
    error = refused(LLAMA, **changes)
    assert isinstance(error, CheckpointError)
    assert word in error.what


@pytest.mark.parametrize(
    ("rope", "word"),
    [
        ({"rope_scaling": {"rope_type": "yarn"}}, "factor"),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 4.0, "low_freq_factor": 1.0}}, "low_freq_factor"),
        ({"rope_scaling": {"type": "dynamic"}}, "factor"),
        ({"rope_scaling": {"type": "mrope", "factor": 4.0}}, "mrope"),
        ({"rope_scaling": {"rope_type": "longrope"}}, "short_factor"),
        (
            {"rope_scaling": {"rope_type": "longrope", "short_factor": [1.0] * 8, "long_factor": [1.0] * 7}},
            "long_factor",
        ),
        ({"rope_scaling": {"rope_type": "linear"}}, "factor"),
        ({"rope_scaling": {"rope_type": "linear", "factor": 2.0, "beta_fast": 32}}, "beta_fast"),
        ({"rope_scaling": {"rope_type": "default", "factor": 2.0}}, "factor"),
        ({"rope_scaling": {"rope_type": "linear", "type": "llama3", "factor": 2.0}}, "two types"),
        ({"rope_scaling": {"factor": 2.0}}, "factor"),
        ({"rope_scaling": {"rope_type": "llama3", "factor": 8.0}}, "original_max_position_embeddings"),
        ({"rope_scaling": [1]}, "object"),
        ({"rope_scaling": {"rope_type": "default"}, "rope_parameters": {"rope_type": "default"}}, "both"),
        ({"rope_parameters": {"rope_type": "default", "rope_theta": 5.0}}, "rope_theta"),
        ({"rope_parameters": {"sliding_attention": {"rope_type": "default"}}}, "full_attention"),
        ({"rope_parameters": {"full_attention": {"rope_type": "default"}, "odd": {}}}, "odd"),
        ({"rope_parameters": {"rope_type": "default", "partial_rotary_factor": 0.25}}, "partial_rotary_factor"),
    ],
)
def test_rope_parameters_are_checked(rope: dict[str, Any], word: str) -> None:
    assert word in str(refused(LLAMA, **rope))


def test_both_spellings_of_the_dtype() -> None:
    assert read(LLAMA, torch_dtype=..., dtype="float16").dtype == "float16"
    assert read(LLAMA, torch_dtype=...).dtype is None
    assert refused(LLAMA, dtype="float16").code == "config-conflict"


def test_head_dim_comes_from_the_config() -> None:
    assert read(LLAMA, head_dim=32).layers[0].attention.head_dim == 32
    assert read(LLAMA, head_dim=None).layers[0].attention.head_dim == 16


def test_mistral_says_its_window() -> None:
    assert windows(MISTRAL) == (8,) * 4
    assert windows(MISTRAL, sliding_window=None) == (None,) * 4
    assert "sliding_window" in refused(MISTRAL, sliding_window=...).what
    assert windows(MISTRAL, layer_types=["sliding_attention"] * 4) == (8,) * 4
    assert refused(MISTRAL, layer_types=["full_attention"] * 4).code == "config-conflict"


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, (None,) * 4),
        ({"use_sliding_window": False, "sliding_window": 8, "max_window_layers": 0}, (None,) * 4),
        ({"use_sliding_window": True, "sliding_window": None}, (None,) * 4),
        ({"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 1}, (None, 8, 8, 8)),
        ({"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 28}, (None,) * 4),
        (
            {
                "use_sliding_window": True,
                "sliding_window": 8,
                "layer_types": ["sliding_attention", "full_attention"] * 2,
            },
            (8, None, 8, None),
        ),
    ],
)
def test_qwen2_windows(changes: dict[str, Any], expected: tuple[int | None, ...]) -> None:
    assert windows(QWEN2, **changes) == expected


@pytest.mark.parametrize(
    "changes",
    [
        {"layer_types": ["sliding_attention"] * 4},
        {"layer_types": ["full_attention"] * 3},
        {"layer_types": ["chunked_attention"] * 4},
        {"layer_types": [["full_attention"]] * 4},
        {"use_sliding_window": True, "sliding_window": 8},
        {"use_sliding_window": True, "sliding_window": 0, "max_window_layers": 0},
    ],
)
def test_qwen2_contradictions(changes: dict[str, Any]) -> None:
    refused(QWEN2, **changes)


@pytest.mark.parametrize("family", ["bert", "mamba", "qwen3_vl", "lama"])
def test_an_unknown_model_type_is_refused_with_the_list(family: str) -> None:
    error = refused(LLAMA, model_type=family)
    assert repr(family) in error.what
    assert "llama, ministral, mistral" in error.why


def test_transformers_agrees_on_every_window() -> None:
    """The windows of both families are what transformers' own configs make of the same keys."""
    from transformers import Qwen2Config

    for first in range(6):
        keys = {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": first, "num_hidden_layers": 4}
        theirs = Qwen2Config(**keys)
        expected = tuple(8 if kind == "sliding_attention" else None for kind in theirs.layer_types)
        assert windows(QWEN2, **keys) == expected


@pytest.mark.parametrize("key", ["attn_logit_softcapping", "final_logit_softcapping"])
def test_a_softcap_of_zero_is_no_way_to_say_off(key: str) -> None:
    """In one library it means none, in another all logits are zero."""
    config = config_of("gemma2", {}).to_dict() | {"architectures": ["Gemma2ForCausalLM"]}
    assert read_config(config | {key: None}, "config.json")
    with pytest.raises(CheckpointError, match=f"'{key}' is 0.0"):
        read_config(config | {key: 0.0}, "config.json")


def test_gemma_3_has_no_cap_of_scores() -> None:
    """transformers' Gemma 3 reads the key and computes as if it were not there."""
    config = config_of("gemma3_text", {}).to_dict() | {"architectures": ["Gemma3ForCausalLM"]}
    assert read_config(config | {"final_logit_softcapping": 3.0}, "config.json").logits_softcap == 3.0
    with pytest.raises(UnsupportedError, match="attn_logit_softcapping"):
        read_config(config | {"attn_logit_softcapping": 5.0}, "config.json")


def test_heads_may_have_another_size_in_every_block() -> None:
    """KV, rotary tables and slices are those of each block."""
    read = read_config(config_of("gemma2", {}).to_dict() | {"architectures": ["Gemma2ForCausalLM"]}, "config.json")
    sizes = (16, 32, 8)
    layers = [
        replace(layer, attention=replace(layer.attention, head_dim=size))
        for layer, size in zip(read.layers, sizes, strict=True)
    ]
    module = build_decoder(replace(read, layers=tuple(layers)), "float32")
    assert tuple(item.head_dim for item in kv_layouts(module, 16)) == sizes
    parts = slice_modules(module, [(0, 1), (1, 3)])
    assert [tuple(item.head_dim for item in kv_layouts(part, 16)) for part in parts] == [(16,), (32, 8)]


def _rope(**parameters: Any) -> dict[str, Any]:
    return {"rope_theta": ..., "rope_parameters": {"rope_theta": 10000.0, **parameters}}


PHI3 = LLAMA | {"architectures": ["Phi3ForCausalLM"], "model_type": "phi3"}
LONGROPE = {"rope_type": "longrope", "short_factor": [1.0] * 8, "long_factor": [2.0] * 8}


@pytest.mark.parametrize(
    ("base", "changes", "word"),
    [
        (PHI3, {"original_max_position_embeddings": 1, **_rope(**LONGROPE)}, "1 token"),
        (PHI3, _rope(**LONGROPE | {"short_factor": [10**400] * 8}), "short_factor"),
        (LLAMA, _rope(rope_type="dynamic", factor=1e308), "stretches"),
        (LLAMA, _rope(rope_type="yarn", factor=4.0, beta_fast=1e308), "beta_fast"),
        (LLAMA, _rope(rope_type="yarn", factor=4.0, rope_theta=1.0), "theta 1"),
        (LLAMA, _rope(rope_type="default", partial_rotary_factor=1e999), "partial_rotary_factor"),
        (LLAMA, _rope(rope_type="default", partial_rotary_factor=10**400), "partial_rotary_factor"),
        (LLAMA, {"dtype": "float16"}, "dtype"),
    ],
)
def test_numbers_that_mean_nothing_are_named_errors(base: dict[str, Any], changes: dict[str, Any], word: str) -> None:
    assert word in str(refused(base, **changes))


def test_a_share_of_the_head_by_layer_type_is_refused() -> None:
    kinds = {"full_attention": {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5}}
    assert refused(LLAMA, rope_theta=..., rope_parameters=kinds).code == "config-conflict"


@pytest.mark.parametrize("window", [0, False, None, 8])
def test_a_window_that_is_switched_off_means_nothing(window: Any) -> None:
    changes = {"use_sliding_window": False, "sliding_window": window, "max_window_layers": 1}
    assert windows(QWEN2, **changes) == (None,) * 4


def test_the_growth_of_scores_by_layer_type() -> None:
    base = LLAMA | {
        "architectures": ["DeepseekV3ForCausalLM"], "model_type": "deepseek_v3", "head_dim": ..., "rope_theta": ...,
        "q_lora_rank": None, "kv_lora_rank": 16, "qk_nope_head_dim": 8, "qk_rope_head_dim": 8, "v_head_dim": 8,
        "n_shared_experts": 1, "n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32,
        "routed_scaling_factor": 1.0, "n_group": 1, "topk_group": 1, "norm_topk_prob": True, "first_k_dense_replace": 1,
    }  # fmt: skip
    yarn = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "mscale": 1.0, "mscale_all_dim": 1.0}
    scales = {read(base, rope_parameters=given).layers[0].attention.scale for given in (yarn, {"full_attention": yarn})}
    assert len(scales) == 1 and scales.pop() > 16**-0.5
    assert "more than 4096" in refused(base, rope_parameters=yarn, n_routed_experts=10**9).what


@pytest.mark.parametrize("key", ["n_shared_experts", "first_k_dense_replace"])
def test_fewer_than_none_is_refused(key: str) -> None:
    from tests.families import config_of

    config = config_of("deepseek_v3", {}).to_dict() | {"architectures": ["DeepseekV3ForCausalLM"]}
    assert key in refused(config, **{key: -1}).what


@pytest.mark.parametrize(
    ("family", "changes", "words"),
    [
        ("mixtral", {"num_experts_per_tok": 5}, "5 of 4 experts"),
        ("gpt_oss", {"num_experts_per_tok": 5}, "5 of 4 experts"),
        ("qwen3_moe", {"num_experts_per_tok": 9}, "9 of 8 experts"),
        ("deepseek_v3", {"topk_group": 5}, "keeps 5 groups of experts, of 4"),
        ("deepseek_v3", {"n_group": 3}, "8 experts in 3 groups leave a rest"),
        ("deepseek_v3", {"n_routed_experts": 4}, "3 of 2 groups of 1 expert"),
        ("deepseek_v2", {"num_experts_per_tok": 5}, "5 of 2 groups of 2 experts"),
    ],
)
def test_experts_that_cannot_be_chosen_are_named_in_the_words_of_the_config(
    family: str, changes: dict[str, Any], words: str
) -> None:
    config = config_of(family, {}).to_dict() | {"architectures": [f"{FAMILIES[family].classes[1]}ForCausalLM"]}
    error = refused(config, **changes)
    assert error.code == "config-value" and words in error.what
    read(config)
