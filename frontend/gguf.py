"""GGUF files to byte ranges, a config in Hugging Face's words, and Hugging Face's tensor names."""

from __future__ import annotations

import re
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from plait.errors import CheckpointError, UnsupportedError
from plait.frontend.files import TensorFiles, some
from plait.frontend.gguf_header import read_header
from plait.spec import Piece, Rows, WeightRef


@dataclass(frozen=True)
class Architecture:
    """How one `general.architecture` maps to a family of `plait.frontend.families`.

    `interleaved` names the tensors whose rows stand as rope pairs, with the config key of their head count. The style
    of rope is implied by the architecture and stored nowhere in the file.
    """

    model_type: str
    class_name: str
    interleaved: dict[str, str] = field(default_factory=dict)


ARCHITECTURES = {
    # Mistral's files say llama too.
    "llama": Architecture(
        "llama", "LlamaForCausalLM", {"attn_q": "num_attention_heads", "attn_k": "num_key_value_heads"}
    ),
    "qwen2": Architecture("qwen2", "Qwen2ForCausalLM"),
}

CONFIG_KEYS = {
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
"""Key of the architecture -> key of config.json."""

CHECKED_KEYS = {"vocab_size", "rope.dimension_count", "attention.value_length"}
"""Keys that must agree with what the shapes and the other keys say."""

FIXED_KEYS: dict[str, tuple[Any, ...]] = {
    "attention.causal": (True,),
    "expert_count": (0,),
    "expert_used_count": (0,),
    "rope.scaling.type": ("none",),
    "tensor_data_layout": ("Meta AI original pth",),
}
"""Keys that may be there only with these values; anything else changes numbers in a way plait does not implement."""

NAMESPACES = ("general.", "tokenizer.", "quantize.", "GGUF.")
"""Keys beside the architecture's own that say nothing about the numbers."""

END_KEYS = ("tokenizer.ggml.eos_token_id", "tokenizer.ggml.eot_token_id")
"""End of text and end of turn: generation ends at either."""

NAMES = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_NAME = re.compile(r"(?:blk\.(?P<block>\d{1,6})\.)?(?P<part>\w+)\.(?P<kind>weight|bias)")


@dataclass(frozen=True)
class GGUFFile:
    """`tensors` under Hugging Face's names, `config` with the keys of a config.json, `metadata` as the file says it."""

    tensors: TensorFiles
    config: dict[str, Any]
    metadata: dict[str, Any]


def read_gguf(path: Path) -> GGUFFile:
    """Read the header of a GGUF file of a supported architecture.

    Raises:
        CheckpointError: `gguf-*`: the file contradicts itself or its size.
        UnsupportedError: an architecture, a tensor type, a tensor or a key that plait does not understand, by name.
    """
    metadata, raw, digest, size = read_header(path)
    architecture = _architecture(path, metadata)
    config = _config(path, architecture, metadata, raw)
    weights = {ref.name: ref for ref in (_rename(path, ref, architecture, config) for ref in raw.values())}
    tensors = TensorFiles(weights, {str(path): (size, digest)}, {})
    return GGUFFile(tensors, config, metadata)


def _architecture(path: Path, metadata: dict[str, Any]) -> Architecture:
    name = _string(path, metadata, "general.architecture")
    if name is None:
        raise CheckpointError("gguf-key-missing", f"{path} does not say its general.architecture")
    if name not in ARCHITECTURES:
        raise UnsupportedError(
            "architecture-unsupported",
            f"{path} holds the architecture {name!r}",
            why=f"GGUF is read for {', '.join(sorted(ARCHITECTURES))}",
        )
    kind = _string(path, metadata, "general.type")
    if kind not in (None, "model"):
        raise UnsupportedError("gguf-kind", f"{path} is a GGUF file of the type {kind!r}", why="only a model is read")
    if "split.count" in metadata and metadata["split.count"] != 1:
        raise UnsupportedError(
            "gguf-split",
            f"{path} is one part of {metadata['split.count']}",
            hint="merge the parts with `llama-gguf-split --merge`",
        )
    return ARCHITECTURES[name]


def _string(path: Path, metadata: dict[str, Any], key: str) -> str | None:
    value = metadata.get(key)
    if value is not None and not isinstance(value, str):
        raise CheckpointError("gguf-key-type", f"{path}: {key} is {value!r:.100}, expected a string")
    return value


def _config(
    path: Path, architecture: Architecture, metadata: dict[str, Any], tensors: dict[str, WeightRef]
) -> dict[str, Any]:
    """The metadata in the words of config.json. Values are typed and checked by the family's own reader later."""
    prefix = metadata["general.architecture"] + "."
    own = {key.removeprefix(prefix): value for key, value in metadata.items() if key.startswith(prefix)}
    others = [key for key in metadata if not key.startswith((prefix, "split.", *NAMESPACES))]
    unknown = [prefix + key for key in own if key not in {*CONFIG_KEYS, *CHECKED_KEYS, *FIXED_KEYS}] + others
    if unknown:
        raise UnsupportedError("gguf-key-unknown", f"{path} has keys that plait does not understand: {some(unknown)}")
    for key, allowed in FIXED_KEYS.items():
        if key in own and own[key] not in allowed:
            raise UnsupportedError(
                "gguf-key-value",
                f"{path}: {prefix}{key} is {own[key]!r:.100}",
                why=f"only {' or '.join(map(repr, allowed))} is implemented",
            )
    if "token_embd.weight" not in tensors:
        raise CheckpointError("gguf-tensor-missing", f"{path} has no token_embd.weight")
    config = {CONFIG_KEYS[key]: value for key, value in own.items() if key in CONFIG_KEYS}
    # The format defines an absent KV head count as "as many as heads".
    config.setdefault("num_key_value_heads", config.get("num_attention_heads"))
    config |= {
        "architectures": [architecture.class_name],
        "model_type": architecture.model_type,
        "hidden_act": "silu",
        "vocab_size": tensors["token_embd.weight"].shape[0],
        "tie_word_embeddings": "output.weight" not in tensors,
        "torch_dtype": _dtype(tensors),
        "bos_token_id": metadata.get("tokenizer.ggml.bos_token_id"),
        "eos_token_id": [metadata[key] for key in END_KEYS if key in metadata],
    }
    if architecture.model_type == "llama":
        config["attention_bias"] = any(name.endswith("attn_q.bias") for name in tensors)
        config["mlp_bias"] = any(name.endswith("ffn_up.bias") for name in tensors)
    else:
        config["use_sliding_window"] = False
    _cross_check(path, prefix, own, config)
    return config


def _dtype(tensors: dict[str, WeightRef]) -> str:
    """float16 or bfloat16 where all matrices are; otherwise float32, which holds every dequantised value exactly."""
    encodings = {ref.encoding for ref in tensors.values() if len(ref.shape) > 1}
    return encodings.pop() if len(encodings) == 1 and encodings <= {"float16", "bfloat16"} else "float32"


def _cross_check(path: Path, prefix: str, own: dict[str, Any], config: dict[str, Any]) -> None:
    hidden, heads = config.get("hidden_size"), config.get("num_attention_heads")
    head_dim = config.get("head_dim") or (hidden // heads if type(hidden) is type(heads) is int and heads else None)
    expected = {
        "vocab_size": config["vocab_size"],
        "rope.dimension_count": head_dim,
        "attention.value_length": head_dim,
    }
    for key, value in expected.items():
        if key in own and own[key] != value:
            raise CheckpointError(
                "gguf-key-value",
                f"{path}: {prefix}{key} is {own[key]!r:.100}",
                why=f"the shapes and the other keys say {value}",
            )


def _rename(path: Path, ref: WeightRef, architecture: Architecture, config: dict[str, Any]) -> WeightRef:
    match = _NAME.fullmatch(ref.name)
    name = NAMES.get(match["part"]) if match else None
    if not match or not name or (match["block"] is None) != name.startswith(("model.", "lm_head")):
        rope = ref.name.startswith("rope_freqs")
        raise UnsupportedError(
            "gguf-tensor-unknown",
            f"{path} holds the tensor {ref.name!r}, which plait does not understand",
            why="rope factors stored as a tensor are not implemented" if rope else "",
            hint="use the safetensors checkpoint, whose config.json states them" if rope else "",
        )
    block = f"model.layers.{int(match['block'])}." if match["block"] else ""
    heads = config.get(architecture.interleaved.get(match["part"], ""))
    # The config's reader refuses any other count of heads.
    rows = _pairs(path, ref, heads) if type(heads) is int and heads > 0 else None
    return replace(ref, name=f"{block}{name}.{match['kind']}", rows=rows)


def _pairs(path: Path, ref: WeightRef, heads: int) -> Rows:
    """Rows of each head that stand as rope pairs."""
    count = ref.shape[0]
    if count % (2 * heads):
        raise CheckpointError("gguf-shape", f"{path}: the {count} rows of {ref.name!r} are not {heads} heads of pairs")
    return Rows(heads, count // heads, (Piece(0, count // heads, pairs=True),))
