"""The metadata of a GGUF file in the words of a config.json."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from plait.errors import CheckpointError, UnsupportedError
from plait.frontend.families.reading import MAX_BLOCKS
from plait.frontend.files import some
from plait.frontend.gguf import rope
from plait.frontend.gguf.architectures import Architecture
from plait.frontend.gguf.ends import end_tokens
from plait.frontend.rope import FULL, SLIDING
from plait.spec import WeightRef

CHECKED = {
    "vocab_size",
    "attention.head_count_kv",
    "attention.value_length",
    "rope.dimension_count",
    "rope.freq_base_swa",
}
"""Keys that must agree with what the shapes and the other keys say, where no config key takes them."""

OVERRIDES = {"attention.scale"}
"""Keys that `plait.frontend.gguf` applies to the config in normal form."""

WINDOW, PATTERN = "attention.sliding_window", "attention.sliding_window_pattern"

FIXED: dict[str, tuple[Any, ...]] = {
    "attention.causal": (True,),
    "tensor_data_layout": ("Meta AI original pth",),
    **rope.FIXED,
}
"""Keys that may be there only with these values; anything else changes numbers in a way plait does not implement."""

NAMESPACES = ("general.", "tokenizer.", "quantize.", "GGUF.", "split.")
"""Keys beside the architecture's own that say nothing about the numbers."""


def own_keys(metadata: Mapping[str, Any], name: str) -> dict[str, Any]:
    """The keys of the architecture, without its name in front."""
    return {key.removeprefix(f"{name}."): value for key, value in metadata.items() if key.startswith(f"{name}.")}


def config_words(
    metadata: Mapping[str, Any],
    name: str,
    architecture: Architecture,
    tensors: Mapping[str, WeightRef],
    factors: Mapping[str, tuple[float, ...]],
    source: str,
) -> dict[str, Any]:
    """The config. Values are typed and checked by the family's own reader later.

    Args:
        name: of the architecture, as keys begin with it.
        factors: of ropes, out of the file's tensors.

    Raises:
        UnsupportedError: a key, or its value, that plait does not understand, by name.
        CheckpointError: keys that contradict each other or the shapes.
    """
    said = own_keys(metadata, name)
    _refuse_unknown(metadata, said, name, architecture, source)
    if "token_embd.weight" not in tensors:
        raise CheckpointError("gguf-tensor-missing", f"{source} has no token_embd.weight")
    own = {**architecture.defaults, **said}
    config = {word: own[key] for key, word in architecture.keys.items() if key in own}
    config |= {
        "architectures": [architecture.class_name],
        "model_type": architecture.model_type,
        "vocab_size": tensors["token_embd.weight"].shape[0],
        "tie_word_embeddings": "output.weight" not in tensors,
        "torch_dtype": _dtype(tensors),
        "bos_token_id": metadata.get("tokenizer.ggml.bos_token_id"),
        "eos_token_id": end_tokens(metadata),
        "pad_token_id": metadata.get("tokenizer.ggml.padding_token_id"),
        **{word: any(has.endswith(part) for has in tensors) for word, part in architecture.flags.items()},
        **architecture.words,
        **_windows(own, architecture, f"{source}: {name}."),
    }
    if "attention.head_count_kv" in architecture.keys:
        # The format defines an absent KV head count as "as many as heads".
        config.setdefault("num_key_value_heads", config.get("num_attention_heads"))
    tables = {key: factors[key] for key in factors if key != rope.FREQS}
    if scaling := rope.scaling(own, tables, architecture.yarn, source):
        config["rope_scaling"] = {key: value for key, value in scaling.items() if value is not None}
    _head_words(own, config, architecture)
    _cross_check(said, config, name, architecture, source)
    return config


def _refuse_unknown(
    metadata: Mapping[str, Any], own: Mapping[str, Any], name: str, architecture: Architecture, source: str
) -> None:
    fixed = {**FIXED, **architecture.fixed}
    known = {*architecture.keys, *architecture.unused, *CHECKED, *OVERRIDES, *rope.KEYS, *fixed}
    known |= {WINDOW, PATTERN} if architecture.windows is not None else set()
    unknown = [f"{name}.{key}" for key in own if key not in known]
    unknown += [key for key in metadata if not key.startswith((f"{name}.", *NAMESPACES))]
    if unknown:
        raise UnsupportedError("gguf-key-unknown", f"{source} has keys that plait does not understand: {some(unknown)}")
    for key, allowed in fixed.items():
        if key in own and own[key] not in allowed:
            raise UnsupportedError(
                "gguf-key-value",
                f"{source}: {name}.{key} is {own[key]!r:.100}",
                why=f"only {' or '.join(map(repr, allowed))} is implemented",
            )


def _dtype(tensors: Mapping[str, WeightRef]) -> str:
    """float16 or bfloat16 where all matrices are; otherwise float32, which holds every dequantised value exactly."""
    encodings = {ref.encoding for ref in tensors.values() if len(ref.shape) > 1}
    return encodings.pop() if len(encodings) == 1 and encodings <= {"float16", "bfloat16"} else "float32"


def _windows(own: Mapping[str, Any], architecture: Architecture, source: str) -> dict[str, Any]:
    """The window, and which blocks have it. `source`: what comes before a key in errors."""
    if architecture.windows is None:
        return {}
    if WINDOW not in own:
        raise CheckpointError(
            "gguf-key-missing",
            f"{source}{WINDOW} is missing",
            why="old files leave it out although the model has a window; today's converters write 0 where it has none",
            hint="convert the model again",
        )
    window = own.get(WINDOW) or None  # 0 means none
    if architecture.windows == "all":
        if PATTERN in own:
            raise UnsupportedError("gguf-key-unknown", f"{source}{PATTERN} where all blocks have the window")
        return {"sliding_window": window}
    pattern, blocks = own.get(PATTERN, architecture.windows), own.get("block_count")
    if type(blocks) is not int or not 0 < blocks <= MAX_BLOCKS:
        return {"sliding_window": window}  # the family's reader names the block count
    if isinstance(pattern, list):
        slides = [bool(item) for item in pattern]
    elif type(pattern) is int and pattern >= 0:
        slides = [pattern == 0 or index % pattern < pattern - 1 for index in range(blocks)]
    else:
        slides = []
    if len(slides) != blocks:
        raise CheckpointError("gguf-key-value", f"{source}{PATTERN} is {pattern!r:.100}, and there are {blocks} blocks")
    kinds = [SLIDING if slide and window is not None else FULL for slide in slides]
    return {"sliding_window": window, "layer_types": kinds}


def _head_sizes(own: Mapping[str, Any]) -> tuple[int | None, int | None]:
    """hidden / heads, and head_dim; None where the keys do not say, which the family's reader names."""
    hidden, heads, head_dim = own.get("embedding_length"), own.get("attention.head_count"), own.get(_KEY_LENGTH)
    each = None
    if isinstance(hidden, int) and isinstance(heads, int) and hidden > 0 and heads > 0:
        each = hidden // heads
    return each, head_dim if type(head_dim) is int and head_dim > 0 else each


def _head_words(own: Mapping[str, Any], config: dict[str, Any], architecture: Architecture) -> None:
    """Words that are computed from the size of a head."""
    each, head_dim = _head_sizes(own)
    rotary = own.get(_ROTARY, head_dim)
    if architecture.partial and type(rotary) is int and head_dim is not None and rotary != head_dim:
        config["partial_rotary_factor"] = share(rotary, head_dim)
    if architecture.big is not None:
        # gemma_pytorch's config.py: the largest model of either generation divides by hidden / heads.
        config["query_pre_attn_scalar"] = each if own.get("block_count") == architecture.big else head_dim


def share(part: int, whole: int) -> float:
    """The share of `whole` that, multiplied by it and cut to a whole number, is `part` again."""
    found = part / whole
    return found if int(whole * found) == part else math.nextafter(found, 2)


_KEY_LENGTH, _ROTARY = "attention.key_length", "rope.dimension_count"


def _cross_check(
    said: Mapping[str, Any], config: Mapping[str, Any], name: str, architecture: Architecture, source: str
) -> None:
    _, head_dim = _head_sizes(said)
    expected = {
        "vocab_size": config["vocab_size"],
        "attention.head_count_kv": said.get("attention.head_count"),
        "attention.value_length": head_dim,
        "rope.freq_base_swa": config.get("rope_theta"),
    }
    if not architecture.partial:
        expected[_ROTARY] = head_dim
    for key, value in expected.items():
        if key in said and key not in architecture.keys and said[key] != value:
            raise CheckpointError(
                "gguf-key-value",
                f"{source}: {name}.{key} is {said[key]!r:.100}",
                why=f"the shapes and the other keys say {value}",
            )
