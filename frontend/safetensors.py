"""safetensors headers to byte ranges.

A file is 8 bytes (little-endian length of the header), the header (JSON: tensor name -> dtype, shape, data_offsets; and
`__metadata__`), then the data. The header is read by plait itself, and held against the size of the file before
anything is mapped: a file that was cut short must not become zeros in a weight.
"""

from __future__ import annotations

import os
from math import prod
from pathlib import Path
from typing import Any

from plait.errors import CheckpointError, UnsupportedError, did_you_mean
from plait.frontend.files import MAX_DIM, MAX_RANK, TensorFiles, header_digest, parse_json, read_json, some, unreadable
from plait.spec import WeightRef
from plait.spec.weight import Encoding
from plait.words import counted

MAX_HEADER_BYTES = 100_000_000
"""The bound of the safetensors library itself."""

ENCODINGS: dict[str, tuple[Encoding, int]] = {
    "F32": ("float32", 4),
    "F16": ("float16", 2),
    "BF16": ("bfloat16", 2),
    "F8_E4M3": ("e4m3fn", 1),
    "F8_E5M2": ("e5m2", 1),
    "F8_E4M3FNUZ": ("e4m3fnuz", 1),
    "F8_E8M0": ("e8m0", 1),
    "I8": ("i8", 1),
    "U8": ("u8", 1),
    "I32": ("i32", 4),
    "I64": ("i64", 8),
}
"""safetensors dtype -> encoding and bytes of one element. Codes mean nothing without scales: see `quantisation`."""

_NOT_A_WEIGHT = "no op of a supported family takes weights of this dtype"
REFUSED = {
    "F8_E5M2FNUZ": "no format that plait reads is made of it",
    **dict.fromkeys(("F4", "F6_E2M3", "F6_E3M2"), "packed formats below 8 bits are read from bytes (U8) only"),
    **dict.fromkeys(("BOOL", "U16", "I16", "U32", "U64", "F64", "C64"), _NOT_A_WEIGHT),
}
"""Known dtypes that are refused, with the reason."""

FORMATS = ("pt", "mlx")
"""Values of the header's `format` that lay a matrix out as (out, in). Flax and TF transpose."""


def read_file(path: Path) -> TensorFiles:
    """The tensors of one file.

    Raises:
        CheckpointError: `safetensors-*`: the header and the file contradict each other or themselves.
        UnsupportedError: `dtype-unsupported`, naming the tensors.
    """
    header, size = _header(path)
    entries = parse_json(header, f"the header of {path}")
    metadata = _metadata(path, entries.pop("__metadata__", {}))
    start = 8 + len(header)
    weights = {name: _tensor(path, name, entry, start) for name, entry in entries.items()}
    _check_layout(path, weights, start, size)
    return TensorFiles(weights, {str(path): (size, header_digest(header))}, metadata)


def read_index(path: Path) -> TensorFiles:
    """The tensors of all shards that an index (`*.safetensors.index.json`) lists. Both must agree, both ways.

    Raises:
        CheckpointError: `index-*`, naming up to five shards or tensors.
    """
    weight_map = _weight_map(path)
    shards = sorted(set(weight_map.values()))
    absent = [shard for shard in shards if not (path.parent / shard).is_file()]
    if absent:
        raise CheckpointError(
            "index-shard-missing",
            f"{path} lists {counted(len(shards), 'shard')}, and not all are there: {some(absent)}",
            why="the download was interrupted or the files were moved",
            hint="fetch the missing files into the same folder",
        )
    files = {shard: read_file(path.parent / shard) for shard in shards}
    weights: dict[str, WeightRef] = {}
    for shard, content in files.items():
        listed = {name for name, file in weight_map.items() if file == shard}
        _agree(path, shard, listed, set(content.weights))
        weights |= content.weights
    return TensorFiles(
        weights,
        {file: info for content in files.values() for file, info in content.files.items()},
        {key: value for content in files.values() for key, value in content.metadata.items()},
    )


def _header(path: Path) -> tuple[bytes, int]:
    try:
        with path.open("rb") as file:
            size = os.fstat(file.fileno()).st_size
            length = int.from_bytes(file.read(8), "little")
            bound = min(size - 8, MAX_HEADER_BYTES)
            if size < 8 or not 2 <= length <= bound:
                raise CheckpointError(
                    "safetensors-header-length",
                    f"{path} is not a whole safetensors file",
                    why="it is empty"
                    if not size
                    else f"the file has {size} bytes and its header claims {length}; allowed are 2 to {max(bound, 0)}",
                    hint="fetch the file again; if it is a Git LFS pointer, `git lfs pull`",
                )
            return file.read(length), size
    except OSError as err:
        raise unreadable(path, err) from err


def _metadata(path: Path, metadata: Any) -> dict[str, str]:
    if not isinstance(metadata, dict) or not all(isinstance(value, str) for value in metadata.values()):
        raise CheckpointError("safetensors-metadata", f"the __metadata__ of {path} is not a map of strings")
    layout = metadata.get("format", "pt")
    if layout not in FORMATS:
        raise UnsupportedError(
            "safetensors-format",
            f"{path} says its format is {layout!r}",
            why=f"only {' and '.join(FORMATS)} lay matrices out as (out, in)",
            hint="save the model again through transformers",
        )
    return dict(metadata)


def _tensor(path: Path, name: str, entry: Any, start: int) -> WeightRef:
    if not isinstance(entry, dict) or set(entry) != {"dtype", "shape", "data_offsets"}:
        raise CheckpointError(
            "safetensors-entry", f"{path}: {name!r} needs exactly dtype, shape and data_offsets, got {entry!r:.200}"
        )
    dtype, shape, offsets = entry["dtype"], entry["shape"], entry["data_offsets"]
    if not isinstance(dtype, str) or dtype not in ENCODINGS:
        raise _refuse_dtype(path, name, dtype)
    if not _whole(shape, MAX_DIM) or len(shape) > MAX_RANK:
        raise CheckpointError("safetensors-shape", f"{path}: {name!r} has the shape {shape!r:.200}")
    if not _whole(offsets, 1 << 62) or len(offsets) != 2 or offsets[0] > offsets[1]:
        raise CheckpointError("safetensors-offsets", f"{path}: {name!r} has the data_offsets {offsets!r:.200}")
    encoding, item_bytes = ENCODINGS[dtype]
    begin, end = offsets
    expected = prod(shape) * item_bytes
    if end - begin != expected:
        raise CheckpointError(
            "safetensors-nbytes",
            f"{path}: {name!r} spans {end - begin} bytes",
            why=f"{dtype} x {shape} is {expected} bytes",
        )
    return WeightRef(name, str(path), start + begin, end - begin, encoding, tuple(shape))


def _refuse_dtype(path: Path, name: str, dtype: Any) -> Exception:
    if isinstance(dtype, str) and dtype in REFUSED:
        return UnsupportedError("dtype-unsupported", f"{path}: {name!r} is stored as {dtype}", why=REFUSED[dtype])
    hint = did_you_mean(str(dtype), [*ENCODINGS, *REFUSED])
    return CheckpointError("dtype-unknown", f"{path}: {name!r} has the unknown dtype {dtype!r:.100}", hint=hint)


def _whole(values: Any, bound: int) -> bool:
    """A list of whole numbers in [0, bound]."""
    return isinstance(values, list) and all(type(value) is int and 0 <= value <= bound for value in values)


def _check_layout(path: Path, weights: dict[str, WeightRef], start: int, size: int) -> None:
    """Tensors follow each other from the end of the header to the end of the file, without gap or overlap."""
    position, before = start, "the header"
    for ref in sorted(weights.values(), key=lambda ref: (ref.offset, ref.nbytes)):
        if ref.offset != position:
            word = "a gap" if ref.offset > position else "an overlap"
            raise CheckpointError(
                "safetensors-layout",
                f"{path}: {word} of {abs(ref.offset - position)} bytes before {ref.name!r}",
                why=f"it begins at byte {ref.offset}, {before} ends at {position}",
            )
        position, before = ref.offset + ref.nbytes, repr(ref.name)
    if size < position:
        raise CheckpointError(
            "safetensors-truncated",
            f"{path} is cut short: {position - size} bytes are missing",
            why=f"the header describes {position} bytes, the file has {size}",
            hint="fetch the file again",
        )
    if size > position:
        raise CheckpointError(
            "safetensors-trailing",
            f"{path} has {size - position} bytes more than its header describes",
            why=f"the header describes {position} bytes, the file has {size}",
            hint="fetch the file again",
        )


def _weight_map(path: Path) -> dict[str, str]:
    weight_map = read_json(path).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise CheckpointError("index-invalid", f"{path} has no weight_map from tensor names to shards")
    for name, shard in weight_map.items():
        if not isinstance(shard, str) or Path(shard).name != shard or not shard.endswith(".safetensors"):
            raise CheckpointError(
                "index-invalid",
                f"{path} puts {name!r} into {shard!r}",
                why="a shard is a .safetensors file beside the index",
            )
    return weight_map


def _agree(index: Path, shard: str, listed: set[str], stored: set[str]) -> None:
    if missing := listed - stored:
        raise CheckpointError(
            "index-tensor-missing",
            f"{shard} lacks {counted(len(missing), 'tensor')} that {index.name} puts there: {some(missing)}",
            hint="fetch the shard again, from the same revision as the index",
        )
    if extra := stored - listed:
        raise CheckpointError(
            "index-tensor-unlisted",
            f"{shard} holds {counted(len(extra), 'tensor')} that {index.name} does not put there: {some(extra)}",
            hint="fetch the index again, from the same revision as the shards",
        )
