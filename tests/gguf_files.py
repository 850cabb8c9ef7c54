"""GGUF files of tiny checkpoints, laid out as llama.cpp's converter does: keys and order of rows by hand, names of
tensors by the `gguf` package's own table."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from numpy.typing import NDArray

Array = NDArray[Any]
Tensors = dict[str, Array]

ARCHITECTURES = {
    "llama": "llama", "mixtral": "llama", "qwen2": "qwen2", "qwen3": "qwen3", "qwen3_moe": "qwen3moe",
    "gemma2": "gemma2", "gemma3_text": "gemma3", "phi3": "phi3", "gpt2": "gpt2", "gpt_oss": "gpt-oss",
}  # fmt: skip
"""`model_type` -> `general.architecture`."""

UNQUANTISED = ("ffn_gate_inp.weight", "position_embd.weight")
"""What llama.cpp's quantiser leaves as it is, beside vectors and biases."""


def save_gguf(path: Path, folder: Path, quant: str = "Q8_0", metadata: dict[str, Any] | None = None) -> Path:
    """A GGUF file of the checkpoint in `folder`. Returns its path.

    Args:
        quant: type of the matrices; norms, biases and routers are F32.
        metadata: more keys, or other values for the usual ones; None removes a key.
    """
    tensors, keys, architecture = convert(folder)
    return write_gguf(path, architecture, keys | (metadata or {}), {name: (quant, t) for name, t in tensors.items()})


def write_gguf(path: Path, architecture: str, keys: dict[str, Any], tensors: dict[str, tuple[str, Array]]) -> Path:
    """A GGUF file of (type, float32 values), or of (type, bytes of blocks) where the array is uint8."""
    writer = gguf.GGUFWriter(path, architecture)
    for key, value in keys.items():
        _add(writer, key, value)
    for name, (quant, array) in tensors.items():
        plain = array.ndim < 2 or not name.endswith(".weight") or name.endswith(UNQUANTISED)
        kind = gguf.GGMLQuantizationType["F32" if plain else quant]
        data = array if array.dtype == np.uint8 else gguf.quants.quantize(np.ascontiguousarray(array), kind)
        writer.add_tensor(name, data, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def convert(folder: Path) -> tuple[Tensors, dict[str, Any], str]:
    """Tensors by GGUF's names, keys, and the architecture of a checkpoint as transformers saves it."""
    from safetensors.numpy import load_file

    config = json.loads((folder / "config.json").read_text())
    family = config["model_type"]
    architecture = ARCHITECTURES[family]
    stored = {name: tensor.astype(np.float32) for name, tensor in load_file(folder / "model.safetensors").items()}
    table = gguf.get_tensor_name_map(_arch(architecture), config.get("num_hidden_layers") or config["n_layer"])
    made = {}
    for name, tensor in _changed(family, stored, config).items():
        mapped = table.get_name(name, try_suffixes=(".weight", ".bias"))
        assert mapped is not None, name
        made[mapped] = tensor
    keys = {f"{architecture}.{key}": value for key, value in KEYS[family](config).items()}
    return made | _factors(config), keys, architecture


def _arch(name: str) -> Any:
    return next(arch for arch, called in gguf.MODEL_ARCH_NAMES.items() if called == name)


# --- tensors


def _changed(family: str, stored: Tensors, config: dict[str, Any]) -> Tensors:
    stored = _stacked(stored)
    made = {}
    for name, tensor in stored.items():
        if family in ("llama", "mixtral") and re.search(r"[qk]_proj", name):
            heads = config["num_attention_heads" if "q_proj" in name else "num_key_value_heads"]
            tensor = interleave(tensor, heads)
        if family.startswith("gemma") and name.endswith("norm.weight"):
            tensor = tensor + 1
        if family == "gpt2" and re.search(r"(c_attn|c_proj|c_fc)\.weight", name):
            tensor = tensor.T
        if family == "gpt_oss" and "experts" in name:
            made |= _clamped(name, tensor)
            continue
        made[f"{name}.weight" if name.endswith("sinks") else name] = tensor
    return made


def interleave(rows: Array, heads: int) -> Array:
    """Rows of each head from halves to pairs, as llama.cpp's converter permutes q and k of the llama architecture."""
    return rows.reshape(heads, 2, rows.shape[0] // heads // 2, *rows.shape[1:]).swapaxes(1, 2).reshape(rows.shape)


def _stacked(stored: Tensors) -> Tensors:
    """Experts that are stored one by one as stacks; Mixtral's by the names of its first release."""
    made: Tensors = {}
    stacks: dict[str, dict[int, Array]] = {}
    for name, tensor in stored.items():
        match = re.fullmatch(r"(.+)\.experts\.(\d+)\.(.+)", name)
        if match is None:
            made[name] = tensor
        else:
            prefix = match[1].replace("model.", "").replace("block_sparse_moe", "feed_forward")
            prefix = prefix if "feed_forward" in prefix else match[1]
            stacks.setdefault(f"{prefix}.experts.{match[3]}", {})[int(match[2])] = tensor
    return made | {name: np.stack([part[index] for index in range(len(part))]) for name, part in stacks.items()}


def _clamped(name: str, tensor: Array) -> Tensors:
    """GPT-OSS: gate and up apart, matrices (out, in)."""
    name, bias = name.removesuffix("_bias"), name.endswith("_bias")
    kind, tensor = ("bias", tensor) if bias else ("weight", tensor.swapaxes(1, 2))
    if not name.endswith("gate_up_proj"):
        return {f"{name}.{kind}": tensor}
    return {f"{name.replace('gate_up', part)}.{kind}": tensor[:, at::2] for at, part in enumerate(("gate", "up"))}


def _factors(config: dict[str, Any]) -> Tensors:
    rope = config.get("rope_parameters") or {}
    if rope.get("rope_type") == "longrope":
        return {
            f"rope_factors_{kind}.weight": np.array(rope[f"{kind}_factor"], np.float32) for kind in ("long", "short")
        }
    return {"rope_freqs.weight": llama3_factors(config)} if rope.get("rope_type") == "llama3" else {}


def llama3_factors(config: dict[str, Any]) -> NDArray[np.float32]:
    """What Llama 3.1's scaling divides each frequency by, worked out pair by pair."""
    rope, dim = (
        config["rope_parameters"],
        config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"],
    )
    original, low, high = (
        rope[key] for key in ("original_max_position_embeddings", "low_freq_factor", "high_freq_factor")
    )
    factors = []
    for pair in range(dim // 2):
        length = 2 * math.pi * rope["rope_theta"] ** (2 * pair / dim)
        if length < original / high:
            factors.append(1.0)
        elif length > original / low:
            factors.append(rope["factor"])
        else:
            smooth = (original / length - low) / (high - low)
            factors.append(1 / ((1 - smooth) / rope["factor"] + smooth))
    return np.array(factors, np.float32)


# --- keys


def _common(config: dict[str, Any]) -> dict[str, Any]:
    keys = {
        "block_count": config["num_hidden_layers"],
        "context_length": config["max_position_embeddings"],
        "embedding_length": config["hidden_size"],
        "feed_forward_length": config["intermediate_size"],
        "attention.head_count": config["num_attention_heads"],
        "attention.head_count_kv": config["num_key_value_heads"],
        "attention.layer_norm_rms_epsilon": float(config["rms_norm_eps"]),
    }
    if config.get("head_dim"):
        keys |= {"attention.key_length": config["head_dim"], "attention.value_length": config["head_dim"]}
    return keys | _rope(config["rope_parameters"])


def _rope(rope: dict[str, Any]) -> dict[str, Any]:
    rope = rope.get("full_attention", rope)
    keys = {"rope.freq_base": float(rope["rope_theta"])}
    if rope["rope_type"] in ("linear", "yarn"):
        keys |= {"rope.scaling.type": rope["rope_type"], "rope.scaling.factor": float(rope["factor"])}
    if rope["rope_type"] == "yarn":
        keys["rope.scaling.original_context_length"] = rope["original_max_position_embeddings"]
    return keys


def _llama(config: dict[str, Any]) -> dict[str, Any]:
    head_dim = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
    return _common(config) | {"vocab_size": config["vocab_size"], "rope.dimension_count": head_dim}


def _experts(config: dict[str, Any]) -> dict[str, Any]:
    count = config.get("num_local_experts") or config["num_experts"]
    return {"expert_count": count, "expert_used_count": config["num_experts_per_tok"]}


def _mixtral(config: dict[str, Any]) -> dict[str, Any]:
    return _llama(config) | _experts(config)


def _qwen3_moe(config: dict[str, Any]) -> dict[str, Any]:
    return _common(config) | _experts(config) | {"expert_feed_forward_length": config["moe_intermediate_size"]}


def _gemma2(config: dict[str, Any]) -> dict[str, Any]:
    keys = _common(config) | {"attention.sliding_window": config["sliding_window"]}
    caps = {key: float(config[key]) for key in ("attn_logit_softcapping", "final_logit_softcapping") if config[key]}
    del keys["rope.freq_base"]  # the converter writes none
    return keys | caps


def _gemma3(config: dict[str, Any]) -> dict[str, Any]:
    return _common(config) | {"attention.sliding_window": config["sliding_window"]}


def _phi3(config: dict[str, Any]) -> dict[str, Any]:
    rope, longest = config["rope_parameters"], config["max_position_embeddings"]
    original = config.get("original_max_position_embeddings") or longest
    head_dim = config["hidden_size"] // config["num_attention_heads"]
    keys = _common(config) | {
        "rope.dimension_count": int(head_dim * rope.get("partial_rotary_factor", 1.0)),
        "rope.scaling.original_context_length": original,
        "attention.sliding_window": config["sliding_window"] or 0,
    }
    if rope["rope_type"] == "longrope":
        grown = math.sqrt(1 + math.log(longest / original) / math.log(original))
        keys["rope.scaling.attn_factor"] = grown
    return keys


def _gpt2(config: dict[str, Any]) -> dict[str, Any]:
    return {
        "block_count": config["n_layer"],
        "context_length": config["n_positions"],
        "embedding_length": config["n_embd"],
        "feed_forward_length": 4 * config["n_embd"],
        "attention.head_count": config["n_head"],
        "attention.layer_norm_epsilon": float(config["layer_norm_epsilon"]),
    }


def _gpt_oss(config: dict[str, Any]) -> dict[str, Any]:
    more = {
        "attention.sliding_window": config["sliding_window"],
        "expert_feed_forward_length": config["intermediate_size"],
    }
    return _common(config) | _experts(config) | more


KEYS: dict[str, Callable[[dict[str, Any]], dict[str, Any]]] = {
    "llama": _llama,
    "mixtral": _mixtral,
    "qwen2": _common,
    "qwen3": _common,
    "qwen3_moe": _qwen3_moe,
    "gemma2": _gemma2,
    "gemma3_text": _gemma3,
    "phi3": _phi3,
    "gpt2": _gpt2,
    "gpt_oss": _gpt_oss,
}
"""`model_type` -> the keys of the architecture, without its name in front."""


def _add(writer: gguf.GGUFWriter, key: str, value: Any) -> None:
    if isinstance(value, bool):
        writer.add_bool(key, value)
    elif isinstance(value, int):
        writer.add_uint32(key, value)
    elif isinstance(value, float):
        writer.add_float32(key, value)
    elif isinstance(value, str):
        writer.add_string(key, value)
    elif isinstance(value, list):
        writer.add_array(key, value)
