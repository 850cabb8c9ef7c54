"""Byte ranges of a checkpoint to arrays: the one place where stored weights become numbers.

A tensor is read and converted in chunks of rows, so reading one takes its own size in the compute dtype plus a chunk,
whatever the encoding. Nothing is clipped or repaired: a number that does not survive is an error naming the tensor.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any, Literal

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from plait.errors import CheckpointError, UserError, did_you_mean
from plait.spec import WeightRef, from_json, to_json

Array = NDArray[Any]

DTYPES: dict[str, np.dtype[Any]] = {
    "float32": np.dtype(np.float32),
    "float16": np.dtype(np.float16),
    "bfloat16": np.dtype(ml_dtypes.bfloat16),
}

CHUNK_ELEMENTS = 1 << 16


def read_weight(ref: WeightRef, dtype: str, root: Path | None = None) -> Array:
    """The tensor of `ref` as an array of `ref.shape` in `dtype` (float32, float16, bfloat16), rounded to nearest even.

    Q4_0, Q4_1 and Q8_0 are dequantised exactly as the `gguf` package does, in float32. Rows stored as rope pairs
    (`ref.interleaved_heads`) come back as halves. Values too small for `dtype` become zero, as rounding says.

    Args:
        root: folder that a relative `ref.file` is relative to.

    Raises:
        CheckpointError: `weight-file` (absent, shorter than the range), `weight-range` (the range does not fit the
            shape), `weight-not-finite` (NaN or infinity is stored), `weight-overflow` (a value too large for `dtype`).
    """
    if dtype not in DTYPES:
        raise UserError("dtype", f"{dtype!r} is not a compute dtype", hint=did_you_mean(dtype, DTYPES))
    rows, columns = _matrix(ref)
    row_bytes = _row_bytes(ref, columns)
    if rows * row_bytes != ref.nbytes:
        raise CheckpointError(
            "weight-range",
            f"{ref.name!r} spans {ref.nbytes} bytes",
            why=f"{ref.encoding} x {list(ref.shape)} is {rows * row_bytes} bytes",
        )
    order = _row_order(ref, rows)
    out = np.empty((rows, columns), DTYPES[dtype])
    step = max(1, CHUNK_ELEMENTS // max(1, columns))
    with _open(ref, root) as file:
        for first in range(0, rows, step):
            count = min(step, rows - first)
            raw = _read(file.fileno(), ref, ref.offset + first * row_bytes, count * row_bytes)
            stored = _decode(raw, ref).reshape(count, columns)
            values = _cast(stored, DTYPES[dtype], ref)
            if order is None:
                out[first : first + count] = values
            else:
                out[order[first : first + count]] = values
    return out.reshape(ref.shape)


@dataclass(frozen=True)
class _WeightList:
    weights: tuple[WeightRef, ...]
    schema: Literal[1] = 1


def weights_json(refs: Iterable[WeightRef]) -> str:
    """The text of a slice's `weights.json`, sorted by name so that equal slices have equal bytes."""
    return to_json(_WeightList(tuple(sorted(refs, key=lambda ref: ref.name)))) + "\n"


def read_weights_json(path: Path) -> dict[str, WeightRef]:
    """The inverse of `weights_json`: by tensor name. Raises UserError where a field is wrong."""
    return {ref.name: ref for ref in from_json(_WeightList, path.read_text()).weights}


def _matrix(ref: WeightRef) -> tuple[int, int]:
    """(rows, columns) to read in chunks: rows are the first dimension; a quantised vector is one row of blocks."""
    if len(ref.shape) > 1:
        return ref.shape[0], prod(ref.shape[1:])
    return (prod(ref.shape), 1) if ref.encoding in DTYPES else (1, prod(ref.shape))


def _row_bytes(ref: WeightRef, columns: int) -> int:
    if ref.encoding in DTYPES:
        return columns * DTYPES[ref.encoding].itemsize
    from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType

    block, block_bytes = GGML_QUANT_SIZES[GGMLQuantizationType[ref.encoding]]
    if columns % block:
        raise CheckpointError("weight-range", f"{ref.name!r}: rows of {columns} are not whole blocks of {block}")
    return columns // block * block_bytes


def _row_order(ref: WeightRef, rows: int) -> NDArray[np.intp] | None:
    """Where each stored row belongs: stored (head, pair, half) goes to (head, half, pair)."""
    heads = ref.interleaved_heads
    if heads is None:
        return None
    if heads < 1 or rows % (2 * heads):
        raise CheckpointError("weight-range", f"{ref.name!r}: {rows} rows are not {heads} heads of rope pairs")
    return np.arange(rows).reshape(heads, 2, -1).swapaxes(1, 2).reshape(-1)


def _open(ref: WeightRef, root: Path | None) -> Any:
    path = Path(ref.file) if root is None else root / ref.file
    try:
        return path.open("rb", buffering=0)
    except OSError as err:
        raise CheckpointError("weight-file", f"cannot read {ref.name!r} from {path}", why=err.strerror or "") from err


def _read(descriptor: int, ref: WeightRef, offset: int, nbytes: int) -> NDArray[np.uint8]:
    raw = np.empty(nbytes, np.uint8)
    view, done = raw.data, 0
    while done < nbytes:
        got = os.preadv(descriptor, [view[done:]], offset + done)
        if got == 0:
            raise CheckpointError(
                "weight-file",
                f"{ref.file} ends at byte {offset + done}, inside {ref.name!r}",
                why=f"the tensor takes bytes {ref.offset} to {ref.offset + ref.nbytes}",
                hint="the file changed since it was compiled; fetch it again",
            )
        done += got
    return raw


def _decode(raw: NDArray[np.uint8], ref: WeightRef) -> Array:
    """Stored bytes to numbers: the stored dtype, or float32 for a quantised encoding."""
    if ref.encoding in DTYPES:
        return raw.view(DTYPES[ref.encoding])
    from gguf.constants import GGMLQuantizationType
    from gguf.quants import dequantize

    # A block is 32 values; the package wants rows, and blocks do not depend on each other.
    values: Array = dequantize(raw[None, :], GGMLQuantizationType[ref.encoding])
    return values.reshape(-1)


def _cast(stored: Array, dtype: np.dtype[Any], ref: WeightRef) -> Array:
    if not np.isfinite(stored).all():
        raise CheckpointError(
            "weight-not-finite", f"{ref.name!r} in {ref.file} holds NaN or infinity", hint="the checkpoint is damaged"
        )
    if stored.dtype == dtype:
        return stored
    # Through float32, which holds every stored value exactly: one rounding only.
    wide = stored.astype(np.float32, copy=False)
    with np.errstate(over="ignore"):
        values: Array = wide.astype(dtype)
    if not np.isfinite(values).all():
        raise CheckpointError(
            "weight-overflow",
            f"{ref.name!r} holds {np.abs(wide).max():g}, too large for {dtype.name}",
            why=f"the largest {dtype.name} is {_largest(dtype):g}",
            hint="compile with --dtype bfloat16 or float32",
        )
    return values


def _largest(dtype: np.dtype[Any]) -> float:
    return float(ml_dtypes.finfo(dtype).max)  # type: ignore[no-untyped-call]
