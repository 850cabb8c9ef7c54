"""Byte ranges of a checkpoint, read in chunks of whole rows."""

from __future__ import annotations

import os
from collections.abc import Iterator
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from plait.errors import CheckpointError
from plait.ir.numbers import NUMPY
from plait.spec import Rows, WeightRef

CHUNK_ELEMENTS = 1 << 16


def chunks(ref: WeightRef, root: Path | None) -> Iterator[tuple[int, NDArray[np.uint8]]]:
    """The first row of each chunk, and its bytes. Rows are the first dimension; see `matrix`.

    Raises:
        CheckpointError: `weight-file` (absent, shorter than the range), `weight-range` (the range does not fit the
            shape).
    """
    rows, columns = matrix(ref)
    row_bytes = _row_bytes(ref, columns)
    if rows * row_bytes != ref.nbytes:
        raise CheckpointError(
            "weight-range",
            f"{ref.name!r} spans {ref.nbytes} bytes",
            why=f"{ref.encoding} x {list(ref.shape)} is {rows * row_bytes} bytes",
        )
    step = max(1, CHUNK_ELEMENTS // max(1, columns))
    with _open(ref, root) as file:
        for first in range(0, rows, step):
            count = min(step, rows - first)
            yield first, _read(file.fileno(), ref, ref.offset + first * row_bytes, count * row_bytes)


def matrix(ref: WeightRef) -> tuple[int, int]:
    """(rows, columns) to read in chunks: rows are the first dimension; a vector of GGUF's blocks is one row."""
    if len(ref.shape) > 1:
        return ref.shape[0], prod(ref.shape[1:])
    return (prod(ref.shape), 1) if ref.encoding in NUMPY else (1, prod(ref.shape))


def row_order(ref: WeightRef) -> NDArray[np.intp] | None:
    """Where each stored row belongs. None where it stays.

    Raises CheckpointError `weight-range` where the rows are not what `ref.rows` says.
    """
    rows, (count, _) = ref.rows, matrix(ref)
    if rows is None:
        return None
    taken = taken_rows(rows)
    if len(taken) != count or rows.groups * rows.stride != count:
        raise CheckpointError("weight-range", f"{ref.name!r}: {count} rows are not {rows}")
    return np.argsort(taken)


def taken_rows(rows: Rows) -> NDArray[np.intp]:
    """The stored rows that make a weight, in its order."""
    run = [np.arange(piece.start, piece.start + piece.count) for piece in rows.pieces]
    halves = [
        np.concatenate((at[::2], at[1::2])) if piece.pairs else at for piece, at in zip(rows.pieces, run, strict=True)
    ]
    none = np.empty(0, np.intp)
    return np.asarray(np.arange(rows.groups)[:, None] * rows.stride + np.concatenate((none, *halves))).reshape(-1)


def _row_bytes(ref: WeightRef, columns: int) -> int:
    if ref.encoding == "u4":
        return -(-columns // 2)
    if ref.encoding in NUMPY:
        return columns * NUMPY[ref.encoding].itemsize
    from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType

    block, block_bytes = GGML_QUANT_SIZES[GGMLQuantizationType[ref.encoding]]
    if columns % block:
        raise CheckpointError("weight-range", f"{ref.name!r}: rows of {columns} are not whole blocks of {block}")
    return columns // block * block_bytes


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
