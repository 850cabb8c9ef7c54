"""Stored elements: from bytes to codes and numbers, and the bits that are no numbers."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from plait.backends.ranges import BITS, Bytes, Layout, chunks, layout, put, read_bytes, taken
from plait.errors import CheckpointError
from plait.ir.numbers import NUMPY
from plait.spec import WeightRef

Array = NDArray[Any]

_HALF = np.dtype("<f2")


def _block(*fields: Any) -> np.dtype[Any]:
    return np.dtype(list(fields))


#: The fields of GGUF's blocks (ggml-common.h); `scale` and `minimum` are those of the whole block. In blocks of 32
#: 4-bit codes byte j holds code j low and code j + 16 high.
BLOCKS: dict[str, np.dtype[Any]] = {
    "Q8_0": _block(("scale", _HALF), ("codes", "i1", 32)),
    "Q4_0": _block(("scale", _HALF), ("codes", "u1", 16)),
    "Q4_1": _block(("scale", _HALF), ("minimum", _HALF), ("codes", "u1", 16)),
    "Q5_0": _block(("scale", _HALF), ("high", "u1", 4), ("codes", "u1", 16)),
    "Q5_1": _block(("scale", _HALF), ("minimum", _HALF), ("high", "u1", 4), ("codes", "u1", 16)),
    "Q2_K": _block(("scales", "u1", 16), ("codes", "u1", 64), ("scale", _HALF), ("minimum", _HALF)),
    "Q3_K": _block(("high", "u1", 32), ("codes", "u1", 64), ("scales", "u1", 12), ("scale", _HALF)),
    "Q4_K": _block(("scale", _HALF), ("minimum", _HALF), ("scales", "u1", 12), ("codes", "u1", 128)),
    "Q5_K": _block(
        ("scale", _HALF), ("minimum", _HALF), ("scales", "u1", 12), ("high", "u1", 32), ("codes", "u1", 128)
    ),
    "Q6_K": _block(("codes", "u1", 128), ("high", "u1", 64), ("scales", "i1", 16), ("scale", _HALF)),
    "IQ4_NL": _block(("scale", _HALF), ("codes", "u1", 16)),
    "IQ4_XS": _block(("scale", _HALF), ("high", "u1", 2), ("scales", "u1", 4), ("codes", "u1", 128)),
    "MXFP4": _block(("scale", NUMPY["e8m0"]), ("codes", "u1", 16)),
}

_INFINITY = {"float32": 0x7F800000, "float16": 0x7C00, "bfloat16": 0x7F80, "e4m3fn": 0x7F, "e5m2": 0x7C}
"""Bits from which on numbers are infinite or NaN, their sign left out (of e4m3fn NaN alone)."""

_NAN = {"e4m3fnuz": 0x80, "e8m0": 0xFF}
"""The bits of NaN where there is one, and no infinity."""

_AWQ = np.array([0, 2, 4, 6, 1, 3, 5, 7])
"""Which of 8 columns each 4-bit code of a word is, the lowest first."""


def finite(stored: Array, encoding: str) -> bool:
    """Whether all elements are numbers. Told from the largest bits, several times faster than asking each number."""
    if not stored.size:
        return True
    bits = stored.view(f"u{stored.itemsize}")
    if encoding in _NAN:
        return not (bits == _NAN[encoding]).any()
    if encoding not in _INFINITY:
        return True
    least, sign = _INFINITY[encoding], 1 << (8 * stored.itemsize - 1)
    return int(bits.max()) < sign | least and int(bits.view(f"i{stored.itemsize}").max()) < least


def check_finite(stored: Array, ref: WeightRef) -> None:
    """Of elements, or of the scales and minima of GGUF's blocks. Raises CheckpointError `weight-not-finite`."""
    if ref.encoding in BLOCKS:
        blocks = stored.reshape(-1).view(BLOCKS[ref.encoding])
        kinds = {"scale": "e8m0" if ref.encoding == "MXFP4" else "float16", "minimum": "float16"}
        good = all(finite(blocks[name], kinds[name]) for name in kinds if name in (blocks.dtype.names or ()))
    else:
        good = finite(stored if ref.encoding not in NUMPY else stored.view(NUMPY[ref.encoding]), ref.encoding)
    if not good:
        raise CheckpointError(
            "weight-not-finite",
            f"{ref.name!r} in {ref.file} holds NaN or infinity",
            why="" if BITS.get(ref.encoding) != 8 else "a cast without a clamp writes such codes",
            hint="the checkpoint is damaged",
        )


def read_elements(ref: WeightRef, root: Path | None, checked: bool = True) -> Array:
    """The elements of a tensor as they are stored, one in each: (matrices, rows, columns), in the order that they
    have in the weight.

    Raises:
        CheckpointError: as `plait.backends.ranges.chunks` says; `weight-not-finite` where they are `checked`.
    """
    form, rows, dtype = layout(ref), taken(ref), NUMPY[ref.encoding]
    if form.is_plain:
        return read_bytes(ref, root, rows, partial(check_finite, ref=ref) if checked else None).view(dtype)
    count = form.rows if rows is None else len(rows)
    out = np.empty((form.matrices, count, form.width), dtype)
    for chunk in chunks(ref, root, rows):
        elements = unpack(chunk.raw, ref, form)
        if checked:
            check_finite(elements, ref)
        put(out[chunk.matrix], elements, chunk.first, form, rows)
    return out


def unpack(raw: Bytes, ref: WeightRef, form: Layout) -> Array:
    """Lines to elements (rows, columns) of the weight, one in each; of a transposed matrix they are its columns."""
    columns = form.columns
    if ref.packing in ("gptq", "down"):
        words = raw.reshape(len(raw), columns, 4)
        codes = _nibbles(words) if BITS[ref.encoding] == 4 else words  # (lines, columns, codes of a word)
        stored = codes.transpose(0, 2, 1).reshape(-1, columns).view(NUMPY[ref.encoding])
    elif ref.packing == "awq":
        stored = np.empty((len(raw), columns // 8, 8), np.uint8)
        stored[..., _AWQ] = _nibbles(raw).reshape(stored.shape)
        stored = stored.reshape(-1, columns)
    elif BITS[ref.encoding] == 4:
        stored = _nibbles(raw, high_first=ref.packing == "high")[:, :columns]
    else:
        stored = raw.view(NUMPY[ref.encoding])
    return stored.T if form.transposed else stored


def _nibbles(raw: Bytes, high_first: bool = False) -> Bytes:
    """The two halves of each byte, one behind the other: (..., bytes) to (..., 2 bytes)."""
    out = np.empty((*raw.shape, 2), np.uint8)
    low, high = (1, 0) if high_first else (0, 1)
    np.bitwise_and(raw, 15, out=out[..., low])
    np.right_shift(raw, 4, out=out[..., high])
    return out.reshape(*raw.shape[:-1], -1)
