"""GGUF files to byte ranges, a config in Hugging Face's words, and Hugging Face's tensor names.

The header is walked by plait with every length held against the size of the file: the `gguf` package's reader trusts
lengths (an array that claims 2**60 items runs until memory ends) and takes seconds over a vocabulary. What the types
mean (names, block sizes, dequantisation) comes from the package. The format: 4 bytes `GGUF`, version, tensor count,
count of metadata pairs, the pairs, the tensor records, padding, data.
"""

from __future__ import annotations

import mmap
import re
import struct
from dataclasses import dataclass, field
from functools import partial
from math import prod
from pathlib import Path
from typing import Any

from gguf.constants import GGML_QUANT_SIZES, GGUF_DEFAULT_ALIGNMENT, GGUF_MAGIC, GGMLQuantizationType, GGUFValueType

from plait.errors import CheckpointError, UnsupportedError
from plait.frontend.files import MAX_DIM, TensorFiles, header_digest, some, unreadable
from plait.spec import WeightRef
from plait.spec.weight import Encoding

VERSIONS = (2, 3)
MAX_DIMS = 4
"""GGML_MAX_DIMS: more is a damaged record."""

ENCODINGS: dict[str, Encoding] = {
    "F32": "float32",
    "F16": "float16",
    "BF16": "bfloat16",
    "Q4_0": "Q4_0",
    "Q4_1": "Q4_1",
    "Q8_0": "Q8_0",
}
"""GGML type -> encoding. Every other type is refused by name."""

_SCALARS = {
    GGUFValueType.UINT8: "B",
    GGUFValueType.INT8: "b",
    GGUFValueType.UINT16: "H",
    GGUFValueType.INT16: "h",
    GGUFValueType.UINT32: "I",
    GGUFValueType.INT32: "i",
    GGUFValueType.FLOAT32: "f",
    GGUFValueType.BOOL: "?",
    GGUFValueType.UINT64: "Q",
    GGUFValueType.INT64: "q",
    GGUFValueType.FLOAT64: "d",
}


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
    metadata, raw, digest, size = _walk(path)
    architecture = _architecture(path, metadata)
    config = _config(path, architecture, metadata, raw)
    weights = {ref.name: ref for ref in (_rename(path, ref, architecture, config) for ref in raw.values())}
    tensors = TensorFiles(weights, {str(path): (size, digest)}, {})
    return GGUFFile(tensors, config, metadata)


class _Cursor:
    """Reads little-endian values one after the other and never past the end."""

    def __init__(self, path: Path, data: mmap.mmap) -> None:
        self.path, self.data, self.at = path, data, 0

    def fail(self, what: str, **kw: str) -> CheckpointError:
        return CheckpointError("gguf-header", f"{self.path}: {what}", **kw)

    def take(self, nbytes: int) -> bytes:
        if nbytes > len(self.data) - self.at:
            raise self.fail(
                f"cut short: {nbytes} bytes are due at byte {self.at}, the file ends at {len(self.data)}",
                hint="fetch the file again",
            )
        self.at += nbytes
        return self.data[self.at - nbytes : self.at]

    def numbers(self, code: str, count: int = 1) -> tuple[Any, ...]:
        # The size is checked before struct sees the count, so a wild count allocates nothing.
        raw = self.take(count * struct.calcsize(f"<{code}"))
        return struct.unpack(f"<{count}{code}", raw)

    def number(self, code: str) -> Any:
        return self.numbers(code)[0]

    def string(self) -> str:
        raw = self.take(self.number("Q"))
        try:
            return raw.decode("utf-8")
        except UnicodeDecodeError as err:
            raise self.fail(f"the string before byte {self.at} is not UTF-8") from err

    def kind(self) -> GGUFValueType:
        code = self.number("I")
        try:
            return GGUFValueType(code)
        except ValueError as err:
            raise self.fail(f"unknown metadata type {code} before byte {self.at}") from err

    def value(self) -> Any:
        kind = self.kind()
        if kind != GGUFValueType.ARRAY:
            return self.string() if kind == GGUFValueType.STRING else self.number(_SCALARS[kind])
        item, count = self.kind(), self.number("Q")
        if item == GGUFValueType.ARRAY:
            raise self.fail(f"an array of arrays before byte {self.at}")
        if item != GGUFValueType.STRING:
            return list(self.numbers(_SCALARS[item], count))
        return [self.string() for _ in range(self.bounded(count, 8))]

    def bounded(self, count: int, item_bytes: int) -> int:
        """`count`, if that many items of at least `item_bytes` can still follow."""
        if count * item_bytes > len(self.data) - self.at:
            raise self.fail(f"{count} items are due at byte {self.at}, the file ends at {len(self.data)}")
        return count


def _walk(path: Path) -> tuple[dict[str, Any], dict[str, WeightRef], str, int]:
    """Metadata, tensors by their GGUF names, digest of the header, size of the file."""
    try:
        with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
            cursor = _Cursor(path, data)
            metadata, tensors = _header(cursor)
            return metadata, tensors, header_digest(data[: cursor.at]), len(data)
    except OSError as err:
        raise unreadable(path, err) from err
    except ValueError as err:
        if isinstance(err, CheckpointError | UnsupportedError):
            raise
        raise CheckpointError("gguf-header", f"{path} is empty") from err  # mmap refuses an empty file


def _header(cursor: _Cursor) -> tuple[dict[str, Any], dict[str, WeightRef]]:
    magic, version = cursor.numbers("I", 2)
    if magic != GGUF_MAGIC:
        raise cursor.fail("not a GGUF file", why="it does not begin with the bytes GGUF")
    if version not in VERSIONS:
        raise cursor.fail(
            f"GGUF version {version}",
            why=f"versions {VERSIONS} in little-endian order are read",
            hint="convert it again",
        )
    tensor_count, pair_count = cursor.numbers("Q", 2)
    metadata: dict[str, Any] = {}
    for _ in range(cursor.bounded(pair_count, 12)):
        key = cursor.string()
        if key in metadata:
            raise cursor.fail(f"the key {key!r} stands twice")
        metadata[key] = cursor.value()
    records = [_record(cursor) for _ in range(cursor.bounded(tensor_count, 24))]
    alignment = metadata.get("general.alignment", GGUF_DEFAULT_ALIGNMENT)
    if type(alignment) is not int or alignment <= 0 or alignment & (alignment - 1):
        raise cursor.fail(f"general.alignment is {alignment!r}, not a power of two")
    return metadata, _place(cursor, records, alignment)


def _record(cursor: _Cursor) -> tuple[str, tuple[int, ...], str, int, int]:
    """One tensor: name, shape (outermost first), type name, bytes, offset in the data."""
    name, rank = cursor.string(), cursor.number("I")
    if not 1 <= rank <= MAX_DIMS:
        raise cursor.fail(f"{name!r} has {rank} dimensions, 1 to {MAX_DIMS} are possible")
    dims = cursor.numbers("Q", rank)
    if not all(0 < dim <= MAX_DIM for dim in dims):
        raise cursor.fail(f"{name!r} has the dimensions {list(dims)}")
    code, offset = cursor.number("I"), cursor.number("Q")
    try:
        kind = GGMLQuantizationType(code)
    except ValueError as err:
        raise cursor.fail(f"{name!r} has the unknown tensor type {code}") from err
    block, block_bytes = GGML_QUANT_SIZES[kind]
    if dims[0] % block:
        raise cursor.fail(f"{name!r}: rows of {dims[0]} do not divide into {kind.name} blocks of {block}")
    return name, tuple(reversed(dims)), kind.name, prod(dims) // block * block_bytes, offset


def _place(
    cursor: _Cursor, records: list[tuple[str, tuple[int, ...], str, int, int]], alignment: int
) -> dict[str, WeightRef]:
    """Tensors follow each other, each padded to the alignment, up to the end of the file."""
    refused = [f"{name} ({kind})" for name, _, kind, _, _ in records if kind not in ENCODINGS]
    if refused:
        raise UnsupportedError(
            "gguf-tensor-type",
            f"{cursor.path}: {len(refused)} tensors of types plait does not dequantise: {some(refused)}",
            why=f"read are {', '.join(ENCODINGS)}",
            hint="quantise the model to Q4_0, Q4_1 or Q8_0",
        )
    pad = partial(_round_up, alignment)
    start, due = pad(cursor.at), 0
    tensors: dict[str, WeightRef] = {}
    for name, shape, kind, nbytes, offset in records:
        if name in tensors:
            raise cursor.fail(f"the tensor {name!r} stands twice")
        if offset != due:
            raise cursor.fail(f"{name!r} begins at byte {offset} of the data, the tensors before it end at {due}")
        tensors[name] = WeightRef(name, str(cursor.path), start + offset, nbytes, ENCODINGS[kind], shape)
        due, end = pad(offset + nbytes), start + offset + nbytes
        if end > len(cursor.data):
            raise CheckpointError(
                "gguf-truncated",
                f"{cursor.path} is cut short: {name!r} ends {end - len(cursor.data)} bytes beyond it",
                why=f"it takes bytes {start + offset} to {end}, the file has {len(cursor.data)}",
                hint="fetch the file again",
            )
    if len(cursor.data) > start + due:
        raise CheckpointError(
            "gguf-trailing",
            f"{cursor.path} has {len(cursor.data) - start - due} bytes more than its header describes",
            why=f"the header describes {start + due} bytes, the file has {len(cursor.data)}",
            hint="fetch the file again",
        )
    return tensors


def _round_up(multiple: int, value: int) -> int:
    return -(-value // multiple) * multiple


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
        "eos_token_id": metadata.get("tokenizer.ggml.eos_token_id"),
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
    return WeightRef(f"{block}{name}.{match['kind']}", ref.file, ref.offset, ref.nbytes, ref.encoding, ref.shape, heads)
