"""The families that tests build with transformers' own classes: tiny, random, and with everything that a family has."""

from __future__ import annotations

from copy import deepcopy
from dataclasses import dataclass, field
from typing import Any

VOCABULARY = 264
"""256 bytes and the special tokens of `tests.checkpoints.save_tokenizer`."""

ROPE: dict[str, Any] = {"rope_type": "default", "rope_theta": 10000.0}
YARN: dict[str, Any] = {"rope_type": "yarn", "factor": 4.0, "beta_fast": 32.0, "beta_slow": 1.0}
ORIGINAL = 16
"""Positions of a scaled rope's pretraining; tests go beyond."""

BASE: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "rope_parameters": ROPE,
    "bos_token_id": 0,
    "eos_token_id": 1,
}


@dataclass(frozen=True)
class Tiny:
    """A family, or a variant of one.

    Attributes:
        classes: what transformers' config and model are called, without `Config` and `ForCausalLM`.
        config: beside BASE.
        without: keys of BASE that it does not have.
        centre: of the weights of norms.
    """

    classes: tuple[str, str]
    config: dict[str, Any] = field(default_factory=dict)
    without: tuple[str, ...] = ()
    centre: float = 1.0


def _one(name: str, centre: float = 1.0, **config: Any) -> Tiny:
    return Tiny((name, name), config, centre=centre)


_LATENT: dict[str, Any] = {
    "num_key_value_heads": 4,
    "kv_lora_rank": 16,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 16,
    "v_head_dim": 12,
    "n_routed_experts": 8,
    "num_experts_per_tok": 3,
    "n_group": 4,
    "topk_group": 2,
    "moe_intermediate_size": 32,
    "first_k_dense_replace": 1,
    "routed_scaling_factor": 1.5,
}
_GEMMA: dict[str, Any] = {"head_dim": 16, "sliding_window": 8, "query_pre_attn_scalar": 12, "pad_token_id": 2}
_FALCON = ("intermediate_size", "num_key_value_heads")
_LOCAL: dict[str, Any] = {"sliding_attention": ROPE}

FAMILIES: dict[str, Tiny] = {
    "llama": _one("Llama"),
    "mistral": _one("Mistral", sliding_window=None),
    "qwen2": _one("Qwen2"),
    "qwen3": _one("Qwen3", head_dim=16),
    "qwen3_moe": _one(
        "Qwen3Moe",
        head_dim=16,
        num_experts=8,
        num_experts_per_tok=3,
        moe_intermediate_size=32,
        mlp_only_layers=[1],
        norm_topk_prob=True,
    ),
    "qwen3_moe-window": _one(
        "Qwen3Moe",
        head_dim=16,
        num_experts=4,
        num_experts_per_tok=2,
        moe_intermediate_size=32,
        use_sliding_window=True,
        sliding_window=8,
    ),
    "ministral": _one(
        "Ministral",
        head_dim=16,
        sliding_window=8,
        layer_types=["sliding_attention", "full_attention", "sliding_attention"],
    ),
    "mixtral": _one("Mixtral", num_local_experts=4, num_experts_per_tok=2, sliding_window=8),
    "gemma2": _one("Gemma2", 0.0, **_GEMMA, attn_logit_softcapping=5.0, final_logit_softcapping=10.0),
    "gemma3_text": Tiny(
        ("Gemma3Text", "Gemma3"),
        {
            **_GEMMA,
            "num_hidden_layers": 7,
            "rope_parameters": _LOCAL
            | {"full_attention": {"rope_type": "linear", "factor": 4.0, "rope_theta": 1000000.0}},
        },
        centre=0.0,
    ),
    "phi3": _one("Phi3", sliding_window=8, original_max_position_embeddings=512, pad_token_id=2),
    "phi3-longrope": _one(
        "Phi3",
        pad_token_id=2,
        original_max_position_embeddings=ORIGINAL,
        rope_parameters=ROPE
        | {
            "rope_type": "longrope",
            "partial_rotary_factor": 0.75,
            "short_factor": [1.0, 1.1, 1.2, 1.3, 1.4, 1.5],
            "long_factor": [2.0, 3.0, 4.0, 5.0, 6.0, 7.0],
            "original_max_position_embeddings": ORIGINAL,
        },
    ),
    "olmo2": _one("Olmo2"),
    "olmo3": _one(
        "Olmo3",
        num_hidden_layers=4,
        sliding_window=8,
        rope_parameters=_LOCAL
        | {"full_attention": ROPE | YARN | {"original_max_position_embeddings": ORIGINAL, "attention_factor": 1.2}},
    ),
    "smollm3": _one("SmolLM3", num_hidden_layers=4, use_sliding_window=True, sliding_window=8, pad_token_id=2),
    "granite": _one(
        "Granite", embedding_multiplier=3.0, residual_multiplier=0.3, attention_multiplier=0.2, logits_scaling=4.0
    ),
    "stablelm": _one("StableLm", use_qkv_bias=True),
    "stablelm-parallel": _one("StableLm", use_parallel_residual=True),
    "cohere": _one("Cohere"),
    "cohere-qk-norm": _one("Cohere", use_qk_norm=True, attention_bias=True),
    "cohere2": _one("Cohere2", num_hidden_layers=4, sliding_window=8),
    "gpt_oss": _one(
        "GptOss",
        num_hidden_layers=2,
        head_dim=16,
        num_local_experts=4,
        num_experts_per_tok=2,
        sliding_window=8,
        rope_parameters=ROPE
        | YARN
        | {"rope_theta": 150000.0, "truncate": False, "original_max_position_embeddings": ORIGINAL},
    ),
    "deepseek_v2": _one("DeepseekV2", **_LATENT, q_lora_rank=None, topk_method="group_limited_greedy"),
    "deepseek_v3": _one(
        "DeepseekV3",
        **_LATENT,
        q_lora_rank=24,
        rope_parameters=ROPE
        | YARN
        | {"mscale": 1.0, "mscale_all_dim": 1.0, "original_max_position_embeddings": ORIGINAL},
    ),
    "gpt2": Tiny(
        ("GPT2", "GPT2LMHeadModel"),
        {"n_embd": 64, "n_layer": 3, "n_head": 4, "n_positions": 512},
        without=tuple(key for key in BASE if key not in ("vocab_size", "bos_token_id", "eos_token_id")),
    ),
    "gpt_neox": Tiny(("GPTNeoX", "GPTNeoX"), without=("num_key_value_heads",)),
    "gpt_neox-serial": Tiny(("GPTNeoX", "GPTNeoX"), {"use_parallel_residual": False}, ("num_key_value_heads",)),
    "falcon": Tiny(("Falcon", "Falcon"), {"new_decoder_architecture": True, "num_kv_heads": 2}, _FALCON),
    "falcon-multi-query": Tiny(("Falcon", "Falcon"), {"multi_query": True, "parallel_attn": True}, _FALCON),
}


def config_of(name: str, overrides: dict[str, Any]) -> Any:
    """transformers' config of a family with `overrides` in transformers' words."""
    import transformers

    tiny = FAMILIES[name]
    base = {key: value for key, value in BASE.items() if key not in tiny.without}
    # Copies: transformers writes into the dictionaries it is given, and families share them.
    return getattr(transformers, f"{tiny.classes[0]}Config")(**deepcopy(base | tiny.config | overrides))


def model_class(name: str) -> Any:
    import transformers

    model = FAMILIES[name].classes[1]
    return getattr(transformers, model if model.endswith("Model") else f"{model}ForCausalLM")


def draw(model: Any, name: str, seed: int) -> None:
    """Random weights, drawn wide: with transformers' own initialisation attention is nearly uniform, and a wrong
    window, rope or bias moves the logits by less than a tolerance."""
    import torch

    centre = FAMILIES[name].centre
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for key, parameter in model.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            if parameter.dim() == 1 or "norm" in key or "bias" in key:
                parameter.copy_(noise * 0.3 + (0.0 if "bias" in key or "sinks" in key else centre))
            else:
                embeds = "embed" in key or "wte" in key or "wpe" in key
                parameter.copy_(noise * (1.0 if embeds else 1.5 * min(parameter.shape[-2:]) ** -0.5))
        for key, buffer in model.named_buffers():
            if key.endswith("e_score_correction_bias"):
                buffer.copy_(torch.randn(buffer.shape, generator=generator) * 0.3)
