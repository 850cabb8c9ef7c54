"""What GGUF's architectures are: a table for each, from its keys and tensors to a family's words.

Sources: the `gguf` package (`constants.py`: names of keys and tensors), llama.cpp's converters (what they write) and
`src/models/*.cpp` of llama.cpp (what is meant where a file says nothing). What a model's own config says and no key of
GGUF holds (GPT-OSS: the range of YaRN is not rounded) is the model's.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

TENSORS = {"token_embd": "embedding", "output_norm": "norm", "output": "head"}
"""What stands outside of the blocks."""


@dataclass(frozen=True)
class Architecture:
    """One `general.architecture`.

    Attributes:
        model_type, class_name: the family, as config.json says it.
        keys: keys of the architecture -> keys of config.json.
        tensors: outside of the blocks -> fields of `Names`.
        parts: of a block -> fields of `Names`, perhaps with what follows; several for rows that are fused, in their
            order. Like llama.cpp, plait takes q, k and v fused or apart in all of them, and gate and up too.
        words: of config.json that every file of this architecture means.
        yarn: words of its YaRN that no key says.
        defaults: keys of the architecture that are hard-coded in llama.cpp where they are absent.
        fixed: keys that may be there only with these values.
        unused: keys that change no number, with the reason.
        paired: the rows of q and k stand as rope pairs. Nothing in the file says so.
        plain_norms: the weight of a norm is its scale, whatever the family keeps.
        windows: `all` blocks have the window, or all but each `windows`-th; None where the architecture has none.
        flags: words of config.json that say whether there is a tensor of this name, or of one of these.
        partial: a part of a head may turn.
        big: number of blocks of the one size whose scores are scaled by hidden / heads, not by head_dim.
    """

    model_type: str
    class_name: str
    keys: Mapping[str, str]
    parts: Mapping[str, tuple[str, ...]]
    tensors: Mapping[str, str] = field(default_factory=lambda: TENSORS)
    words: Mapping[str, Any] = field(default_factory=dict)
    yarn: Mapping[str, Any] = field(default_factory=dict)
    defaults: Mapping[str, Any] = field(default_factory=dict)
    fixed: Mapping[str, tuple[Any, ...]] = field(default_factory=dict)
    unused: Mapping[str, str] = field(default_factory=dict)
    paired: bool = False
    plain_norms: bool = False
    windows: int | str | None = None
    flags: Mapping[str, str | tuple[str, ...]] = field(default_factory=dict)
    partial: bool = False
    big: int | None = None


_KEYS = {
    "block_count": "num_hidden_layers",
    "context_length": "max_position_embeddings",
    "embedding_length": "hidden_size",
    "feed_forward_length": "intermediate_size",
    "attention.head_count": "num_attention_heads",
    "attention.head_count_kv": "num_key_value_heads",
    "attention.key_length": "head_dim",
    "attention.layer_norm_rms_epsilon": "rms_norm_eps",
    "rope.freq_base": "rope_theta",
}
_GPT2_KEYS = {
    "block_count": "n_layer",
    "context_length": "n_positions",
    "embedding_length": "n_embd",
    "feed_forward_length": "n_inner",
    "attention.head_count": "n_head",
    "attention.layer_norm_epsilon": "layer_norm_epsilon",
}
_EXPERT_KEYS = {"expert_count": "num_local_experts", "expert_used_count": "num_experts_per_tok"}
_SOFTCAPS = {
    "attn_logit_softcapping": "attn_logit_softcapping",
    "final_logit_softcapping": "final_logit_softcapping",
}

_ATTENTION = {
    "attn_norm": ("attention_norm",),
    "attn_q": ("q",),
    "attn_k": ("k",),
    "attn_v": ("v",),
    "attn_qkv": ("q", "k", "v"),
    "attn_output": ("o",),
}
_MLP = {"ffn_norm": ("mlp_norm",), "ffn_gate": ("gate",), "ffn_up": ("up",), "ffn_down": ("down",)}
_QK_NORM = {"attn_q_norm": ("q_norm",), "attn_k_norm": ("k_norm",)}
_EXPERTS = {
    "ffn_norm": ("mlp_norm",),
    "ffn_gate_inp": ("router",),
    "ffn_gate_exps": ("experts.gate_proj",),
    "ffn_up_exps": ("experts.up_proj",),
    "ffn_down_exps": ("experts.down_proj",),
}
_POST_NORMS = {"post_attention_norm": ("after_attention",), "post_ffw_norm": ("after_mlp",)}

_SILU = {"hidden_act": "silu"}
_GELU = {"hidden_activation": "gelu_pytorch_tanh"}
_NO_EXPERTS: dict[str, tuple[Any, ...]] = {"expert_count": (0,), "expert_used_count": (0,)}
_SOFTMAX: dict[str, tuple[Any, ...]] = {
    "expert_gating_func": (1,),
    "expert_weights_norm": (True,),
    "expert_weights_scale": (0.0, 1.0),
    "expert_shared_count": (0,),
}
_BIAS = {"attention_bias": ("attn_q.bias", "attn_qkv.bias")}

ARCHITECTURES: dict[str, Architecture] = {
    # Mistral's files say llama too.
    "llama": Architecture(
        "llama",
        "LlamaForCausalLM",
        _KEYS,
        _ATTENTION | _MLP,
        words=_SILU,
        # What Llama 2's converter left out, and llama.cpp and the family take it for. Mixtral's is another.
        defaults={"rope.freq_base": 10000.0},
        fixed=_NO_EXPERTS,
        paired=True,
        flags=_BIAS | {"mlp_bias": "ffn_up.bias"},
    ),
    "qwen2": Architecture(
        "qwen2",
        "Qwen2ForCausalLM",
        _KEYS,
        _ATTENTION | _MLP,
        words=_SILU | {"use_sliding_window": False},
        fixed=_NO_EXPERTS,
    ),
    "qwen3": Architecture(
        "qwen3",
        "Qwen3ForCausalLM",
        _KEYS,
        _ATTENTION | _QK_NORM | _MLP,
        words=_SILU | {"use_sliding_window": False},
        fixed=_NO_EXPERTS,
        flags=_BIAS,
    ),
    "qwen3moe": Architecture(
        "qwen3_moe",
        "Qwen3MoeForCausalLM",
        _KEYS | _EXPERT_KEYS | {"expert_feed_forward_length": "moe_intermediate_size"},
        _ATTENTION | _QK_NORM | _EXPERTS,
        words=_SILU | {"use_sliding_window": False, "norm_topk_prob": True},
        fixed=_SOFTMAX,
        flags=_BIAS,
    ),
    "gemma2": Architecture(
        "gemma2",
        "Gemma2ForCausalLM",
        _KEYS | _SOFTCAPS,
        _ATTENTION | _MLP | _POST_NORMS,
        words=_GELU,
        defaults={
            "rope.freq_base": 10000.0,
            "attention.sliding_window": 4096,
            "attn_logit_softcapping": 50.0,
            "final_logit_softcapping": 30.0,
        },
        plain_norms=True,
        windows=2,
        big=46,
    ),
    "gemma3": Architecture(
        "gemma3_text",
        "Gemma3ForCausalLM",
        _KEYS | _SOFTCAPS | {"rope.freq_base_swa": "rope_local_base_freq"},
        _ATTENTION | _QK_NORM | _MLP | _POST_NORMS,
        words=_GELU,
        defaults={"rope.freq_base_swa": 10000.0},
        plain_norms=True,
        windows=6,
        big=62,
    ),
    "phi3": Architecture(
        "phi3",
        "Phi3ForCausalLM",
        _KEYS | {"rope.scaling.original_context_length": "original_max_position_embeddings"},
        _ATTENTION | _MLP,
        words=_SILU,
        fixed=_NO_EXPERTS,
        windows="all",
        partial=True,
    ),
    "gpt2": Architecture(
        "gpt2",
        "GPT2LMHeadModel",
        _GPT2_KEYS,
        _ATTENTION | {"ffn_norm": ("mlp_norm",), "ffn_up": ("up",), "ffn_down": ("down",)},
        TENSORS | {"position_embd": "positions"},
        words={"activation_function": "gelu_new"},
    ),
    "gpt-oss": Architecture(
        "gpt_oss",
        "GptOssForCausalLM",
        {key: word for key, word in _KEYS.items() if key != "feed_forward_length"}
        | _EXPERT_KEYS
        | {"expert_feed_forward_length": "intermediate_size"},
        _ATTENTION
        | {key: names for key, names in _EXPERTS.items() if key != "ffn_norm"}
        | {"attn_sinks": ("sinks",), "post_attention_norm": ("mlp_norm",)},
        words=_SILU | {"attention_bias": True},
        yarn={"truncate": False},
        # 3 is a softmax over the chosen experts, which equals one over all, normalised.
        fixed=_SOFTMAX | {"expert_gating_func": (1, 3)},
        unused={"feed_forward_length": "all blocks have experts"},
        windows=2,
    ),
}
"""By `general.architecture`."""

MIXTURES: dict[str, Architecture] = {
    "llama": Architecture(
        "mixtral",
        "MixtralForCausalLM",
        _KEYS | _EXPERT_KEYS,
        _ATTENTION | _EXPERTS,
        words=_SILU | {"sliding_window": None},
        fixed=_SOFTMAX,
        paired=True,
    ),
}
"""What an architecture is where its `expert_count` is not 0."""
