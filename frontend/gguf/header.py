"""The header of a GGUF file: metadata and tensor records, held against the size of the file.

The header is walked by plait itself: the `gguf` package's reader trusts lengths (an array that claims 2**60 items runs
until memory ends) and takes seconds over a vocabulary. What the types mean (names, block sizes, dequantisation) comes
from the package. The format: 4 bytes `GGUF`, version, tensor count, count of metadata pairs, the pairs, the tensor
records, padding, data.
"""

from __future__ import annotations

import mmap
import struct
from math import prod
from pathlib import Path
from typing import Any

from gguf.constants import GGML_QUANT_SIZES, GGUF_DEFAULT_ALIGNMENT, GGUF_MAGIC, GGMLQuantizationType, GGUFValueType

from plait.errors import CheckpointError, UnsupportedError
from plait.frontend.files import MAX_DIM, header_digest, some, unreadable
from plait.spec import WeightRef
from plait.spec.weight import Encoding
from plait.words import counted

Record = tuple[str, tuple[int, ...], str, int, int]
"""One tensor: name, shape (outermost first), type name, bytes, offset in the data."""

VERSIONS = (2, 3)
MAX_DIMS = 4
"""GGML_MAX_DIMS: more is a damaged record."""

ENCODINGS: dict[str, Encoding] = {
    "F32": "float32",
    "F16": "float16",
    "BF16": "bfloat16",
    "Q4_0": "Q4_0",
    "Q4_1": "Q4_1",
    "Q5_0": "Q5_0",
    "Q5_1": "Q5_1",
    "Q8_0": "Q8_0",
    "Q2_K": "Q2_K",
    "Q3_K": "Q3_K",
    "Q4_K": "Q4_K",
    "Q5_K": "Q5_K",
    "Q6_K": "Q6_K",
    "IQ4_NL": "IQ4_NL",
    "IQ4_XS": "IQ4_XS",
    "MXFP4": "MXFP4",
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


def read_header(path: Path) -> tuple[dict[str, Any], dict[str, WeightRef], str, int]:
    """Metadata, tensors by their GGUF names, digest of the header, size of the file in bytes.

    Raises:
        CheckpointError: `gguf-*`: the header contradicts itself or the size of the file.
        UnsupportedError: `gguf-tensor-type`: a tensor of a type that plait does not dequantise, by name.
    """
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
            raise self.fail(f"{counted(count, 'item')} due at byte {self.at}, and the file ends at {len(self.data)}")
        return count


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


def _record(cursor: _Cursor) -> Record:
    name, rank = cursor.string(), cursor.number("I")
    if not 1 <= rank <= MAX_DIMS:
        raise cursor.fail(f"{name!r} has {counted(rank, 'dimension')}, 1 to {MAX_DIMS} are possible")
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


def _place(cursor: _Cursor, records: list[Record], alignment: int) -> dict[str, WeightRef]:
    """Tensors follow each other, each padded to the alignment, up to the end of the file."""
    refused = [f"{name} ({kind})" for name, _, kind, _, _ in records if kind not in ENCODINGS]
    if refused:
        raise UnsupportedError(
            "gguf-tensor-type",
            f"{cursor.path}: {counted(len(refused), 'tensor')} of types plait does not dequantise: {some(refused)}",
            why=f"read are {', '.join(ENCODINGS)}",
            hint="quantise the model to one of these",
        )
    start, due = _round_up(cursor.at, alignment), 0
    tensors: dict[str, WeightRef] = {}
    for name, shape, kind, nbytes, offset in records:
        if name in tensors:
            raise cursor.fail(f"the tensor {name!r} stands twice")
        if offset != due:
            raise cursor.fail(f"{name!r} begins at byte {offset} of the data, the tensors before it end at {due}")
        tensors[name] = WeightRef(name, str(cursor.path), start + offset, nbytes, ENCODINGS[kind], shape)
        due, end = _round_up(offset + nbytes, alignment), start + offset + nbytes
        if end > len(cursor.data):
            raise CheckpointError(
                "gguf-truncated",
                f"{cursor.path} is cut short: {name!r} ends {counted(end - len(cursor.data), 'byte')} beyond it",
                why=f"it takes bytes {start + offset} to {end}, the file has {len(cursor.data)}",
                hint="fetch the file again",
            )
    if len(cursor.data) > start + due:
        raise CheckpointError(
            "gguf-trailing",
            f"{cursor.path} has {counted(len(cursor.data) - start - due, 'byte')} more than its header describes",
            why=f"the header describes {start + due} bytes, the file has {len(cursor.data)}",
            hint="fetch the file again",
        )
    return tensors


def _round_up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple
