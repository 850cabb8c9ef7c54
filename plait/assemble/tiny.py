"""A model of a few kilobytes, for checks and measurements that need a whole one."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any


def write_tiny_llama(folder: Path, blocks: int = 2) -> None:
    """A random Llama of a few kilobytes in Hugging Face layout: the same bytes every time."""
    import numpy as np
    from safetensors.numpy import save_file

    hidden, heads, kv_heads, inner, vocabulary = 32, 4, 2, 64, 64
    head = hidden // heads
    random = np.random.default_rng(0)
    shapes: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (vocabulary, hidden),
        "model.norm.weight": (hidden,),
        "lm_head.weight": (vocabulary, hidden),
    }
    for i in range(blocks):
        layer = f"model.layers.{i}"
        shapes |= {
            f"{layer}.input_layernorm.weight": (hidden,),
            f"{layer}.post_attention_layernorm.weight": (hidden,),
            f"{layer}.self_attn.q_proj.weight": (heads * head, hidden),
            f"{layer}.self_attn.k_proj.weight": (kv_heads * head, hidden),
            f"{layer}.self_attn.v_proj.weight": (kv_heads * head, hidden),
            f"{layer}.self_attn.o_proj.weight": (hidden, heads * head),
            f"{layer}.mlp.gate_proj.weight": (inner, hidden),
            f"{layer}.mlp.up_proj.weight": (inner, hidden),
            f"{layer}.mlp.down_proj.weight": (hidden, inner),
        }
    config: dict[str, Any] = {
        "model_type": "llama", "architectures": ["LlamaForCausalLM"], "hidden_act": "silu", "hidden_size": hidden,
        "intermediate_size": inner, "num_hidden_layers": blocks, "num_attention_heads": heads,
        "num_key_value_heads": kv_heads, "head_dim": head, "vocab_size": vocabulary, "max_position_embeddings": 128,
        "rms_norm_eps": 1e-5, "rope_theta": 10000.0, "tie_word_embeddings": False, "torch_dtype": "float32",
        "attention_bias": False, "mlp_bias": False, "bos_token_id": None, "eos_token_id": None,
    }  # fmt: skip
    folder.mkdir(parents=True)
    tensors = {name: random.normal(0, 0.2, shape).astype(np.float32) for name, shape in shapes.items()}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n", "utf-8")
