"""Byte ranges of a checkpoint: how a tensor lies in its range, and its bytes, read in chunks.

What is read whole is a *line*: a row of the stored matrix, or the int32 words of several rows of it (GPTQ). Lines that
a weight takes no row of are skipped where that saves anything.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass
from itertools import pairwise
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from plait.errors import CheckpointError
from plait.spec import Rows, WeightRef

Bytes = NDArray[np.uint8]
Index = NDArray[np.intp]

CHUNK_ELEMENTS = 1 << 16
"""Of what is converted: with its float32 values it stays in cache."""

CHUNK_BYTES = 1 << 19
"""Of what is read into its place: larger ones leave the cache before they are checked."""

GAP_BYTES = 1 << 14
"""What lies between two wanted runs is read too where it is shorter: skipping it costs as much."""

TRANSPOSED_ROWS = 64
"""At least so many stored rows at once, where each becomes a column: what is written then are runs, not elements."""

BITS = {
    "float32": 32, "float16": 16, "bfloat16": 16, "i32": 32, "i64": 64,
    "e4m3fn": 8, "e5m2": 8, "e4m3fnuz": 8, "e8m0": 8, "i8": 8, "u8": 8, "e2m1": 4, "nf4": 4, "u4": 4,
}  # fmt: skip
"""Of one element; the other encodings are GGUF's blocks."""


@dataclass(frozen=True)
class Layout:
    """A tensor as it is stored: `matrices`, one behind the other, of `lines`.

    Attributes:
        line_rows: rows of the stored matrix that a line holds.
        columns: elements of such a row.
        transposed: rows of the stored matrix are columns of the weight.
        is_plain: lines are rows of the weight, and whole elements.
    """

    matrices: int
    lines: int
    line_bytes: int
    line_rows: int
    columns: int
    transposed: bool
    is_plain: bool

    @property
    def rows(self) -> int:
        """Of one matrix of the weight, before `WeightRef.rows` chooses among them."""
        return self.columns if self.transposed else self.lines * self.line_rows

    @property
    def width(self) -> int:
        """Columns of the weight."""
        return self.lines * self.line_rows if self.transposed else self.columns


@dataclass(frozen=True)
class Chunk:
    """Lines of one matrix: `raw` (lines, line_bytes), and the stored row that the first begins with."""

    matrix: int
    first: int
    raw: Bytes


def layout(ref: WeightRef) -> Layout:
    """How a tensor lies in its range.

    Raises CheckpointError `weight-range` where the range, the shape, the rows and the packing contradict each other.
    """
    lead, rows, columns = _dimensions(ref)
    if ref.rows is not None:
        if ref.rows.count != rows or any(piece.start + piece.count > ref.rows.stride for piece in ref.rows.pieces):
            raise CheckpointError("weight-range", f"{ref.name!r}: {rows} rows are not {ref.rows}")
        rows = ref.rows.groups * ref.rows.stride
    transposed = ref.transposed or ref.packing in ("gptq", "awq")
    stored = (columns, rows) if transposed else (rows, columns)
    found = _packed(ref, lead, *stored, transposed) if ref.packing in WORDS else _plain(ref, lead, *stored, transposed)
    size = found.matrices * found.lines * found.line_bytes
    if size != ref.nbytes or ref.nbytes < 0 or ref.offset < 0:
        raise CheckpointError(
            "weight-range",
            f"{ref.name!r} spans {ref.nbytes} bytes",
            why=f"{ref.encoding} x {list(ref.shape)} {'' if ref.rows is None else f'of {rows} rows '}is {size} bytes",
        )
    return found


WORDS = ("gptq", "down", "awq")
"""Packings of codes in int32 words."""


def members(ref: WeightRef) -> tuple[WeightRef, ...]:
    """The matrices of a stack. Raises CheckpointError `weight-range` where they do not make up its shape."""
    if len(ref.stack) != ref.shape[0] or any(member.shape != ref.shape[1:] for member in ref.stack):
        shapes = sorted({member.shape for member in ref.stack})
        raise CheckpointError(
            "weight-range", f"{ref.name!r} of {list(ref.shape)} is a stack of {len(ref.stack)} matrices of {shapes}"
        )
    return ref.stack


def _dimensions(ref: WeightRef) -> tuple[int, int, int]:
    """(matrices, rows, columns) of the weight. A vector is a column; one of halves of bytes or of blocks, a row."""
    shape = ref.shape
    if len(shape) < 2:
        return (1, prod(shape), 1) if BITS.get(ref.encoding, 4) >= 8 else (1, 1, prod(shape))
    lead = prod(shape[:-2])
    if ref.rows is None and not ref.transposed and ref.packing not in WORDS and ref.scale is None:
        return 1, lead * shape[-2], shape[-1]  # as it stands a stack is one tall matrix
    return lead, shape[-2], shape[-1]


def _plain(ref: WeightRef, lead: int, lines: int, columns: int, transposed: bool) -> Layout:
    if ref.encoding in BITS:
        bits = BITS[ref.encoding]
        return Layout(lead, lines, -(-columns * bits // 8), 1, columns, transposed, bits >= 8 and not transposed)
    from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType

    block, block_bytes = GGML_QUANT_SIZES[GGMLQuantizationType[ref.encoding]]
    if columns % block or transposed:
        raise CheckpointError("weight-range", f"{ref.name!r}: rows of {columns} are not whole blocks of {block}")
    return Layout(lead, lines, columns // block * block_bytes, 1, columns, False, True)


def _packed(ref: WeightRef, lead: int, rows: int, columns: int, transposed: bool) -> Layout:
    codes = 32 // BITS[ref.encoding]
    down, across = (1, codes) if ref.packing == "awq" else (codes, 1)
    if rows % down or columns % across:
        raise CheckpointError(
            "weight-range", f"{ref.name!r}: {rows} x {columns} codes are not whole words of {codes} ({ref.packing})"
        )
    return Layout(lead, rows // down, columns // across * 4, down, columns, transposed, False)


def taken_rows(rows: Rows) -> Index:
    """The stored rows that make a weight, in its order."""
    run = [np.arange(piece.start, piece.start + piece.count) for piece in rows.pieces]
    halves = [
        np.concatenate((at[::2], at[1::2])) if piece.pairs else at for piece, at in zip(rows.pieces, run, strict=True)
    ]
    none = np.empty(0, np.intp)
    return np.asarray(np.arange(rows.groups)[:, None] * rows.stride + np.concatenate((none, *halves))).reshape(-1)


def taken(ref: WeightRef) -> Index | None:
    """The stored rows that make a weight, in its order; None for all as they stand."""
    return None if ref.rows is None else taken_rows(ref.rows)


def chunks(ref: WeightRef, root: Path | None, rows: Index | None, multiple: int = 1) -> Iterator[Chunk]:
    """The lines that hold the `rows` asked for (None for all), each once, in the order of the file.

    Args:
        multiple: chunks of a transposed matrix begin at a multiple of so many of its rows.

    Raises:
        CheckpointError: `weight-file` (absent, shorter than the range), `weight-range`, as `layout` says.
    """
    form = layout(ref)
    step = max(1, CHUNK_ELEMENTS // max(1, form.columns * form.line_rows))
    if form.transposed:
        lines = -(-multiple // form.line_rows)
        step, rows = -(-max(step, TRANSPOSED_ROWS // form.line_rows) // lines) * lines, None
    spans = _spans(form, rows)
    with opened(ref, root) as file:
        for matrix in range(form.matrices):
            for start, end in spans:
                for line in range(start, end, step):
                    raw = np.empty((min(step, end - line), form.line_bytes), np.uint8)
                    file.read(raw, (matrix * form.lines + line) * form.line_bytes)
                    yield Chunk(matrix, line * form.line_rows, raw)


def read_bytes(
    ref: WeightRef,
    root: Path | None,
    rows: Index | None,
    check: Callable[[Bytes], None] | None = None,
    out: Bytes | None = None,
) -> Bytes:
    """The bytes of `rows` as they stand in the file, in the order asked for: (matrices, rows, line_bytes).

    Runs of rows are read right into their place. The matrix is not transposed.

    Args:
        check: called with the bytes of rows that were just read.
        out: what to fill; it is contiguous.

    Raises:
        CheckpointError: as `chunks` says, and what `check` raises.
    """
    form = layout(ref)
    assert not form.transposed, f"{ref.name!r}: its lines are columns"
    count = form.rows if rows is None else len(rows)
    if out is None:
        out = np.empty((form.matrices, count, form.line_bytes), np.uint8)
    if not in_runs(form, rows):
        for chunk in chunks(ref, root, rows):
            if check is not None:
                check(chunk.raw)
            put(out[chunk.matrix], chunk.raw, chunk.first, form, rows)
        return out
    step = max(1, CHUNK_BYTES // max(1, form.line_bytes)) * max(1, form.line_bytes)
    with opened(ref, root) as file:
        for matrix in range(form.matrices):
            for start, stored, length in _runs(form, rows):
                run = out[matrix, start : start + length].reshape(-1)
                offset = (matrix * form.lines + stored) * form.line_bytes
                for at in range(0, len(run), step):
                    piece = run[at : at + step]
                    file.read(piece, offset + at)
                    if check is not None:
                        check(piece)
    return out


def in_runs(form: Layout, rows: Index | None) -> bool:
    """Whether rows stand in runs that are long enough to be read one by one, with nothing between them. The lines of a
    transposed matrix hold every row."""
    parts = _runs(form, rows)
    return not form.transposed and (
        len(parts) < 2 or sum(part[2] for part in parts) * form.line_bytes >= GAP_BYTES * len(parts)
    )


def put(out: NDArray[Any], values: NDArray[Any], first: int, form: Layout, rows: Index | None) -> None:
    """Values of stored rows (of columns, where the matrix is transposed) from `first` on to their place in a weight
    (rows, columns) that takes `rows`; those it does not take are left out."""
    if form.transposed:
        out[:, first : first + values.shape[1]] = values if rows is None else values[rows]
    elif rows is None:
        out[first : first + len(values)] = values
    else:
        places = np.flatnonzero((rows >= first) & (rows < first + len(values)))
        out[places] = values[rows[places] - first]


def _runs(form: Layout, rows: Index | None) -> list[tuple[int, int, int]]:
    """(where it goes, the stored row, how many) of rows that stand together, and stay together."""
    if rows is None:
        return [(0, 0, form.rows)]
    cuts = [0, *(np.flatnonzero(np.diff(rows) != 1) + 1).tolist(), len(rows)]
    return [(at, int(rows[at]), end - at) for at, end in pairwise(cuts) if end > at]


def _spans(form: Layout, rows: Index | None) -> list[tuple[int, int]]:
    """(first line, line behind the last) of what is read of each matrix."""
    if rows is None:
        return [(0, form.lines)]
    needed = np.unique(rows)
    cuts = np.flatnonzero((np.diff(needed) - 1) * form.line_bytes >= GAP_BYTES) + 1
    return [(int(part[0]), int(part[-1]) + 1) for part in np.split(needed, cuts) if len(part)]


class File:
    """The range of a tensor in an open file."""

    def __init__(self, ref: WeightRef, descriptor: int) -> None:
        self._ref, self._descriptor = ref, descriptor

    def read(self, into: NDArray[Any], offset: int) -> None:
        """Fill a contiguous array with the bytes from `offset` of the range on. Raises CheckpointError."""
        view, done, at = into.reshape(-1).view(np.uint8).data, 0, self._ref.offset + offset
        while done < len(view):
            try:
                got = os.preadv(self._descriptor, [view[done:]], at + done)
            except OSError as err:
                raise self._failed(f"cannot read {self._ref.name!r} from {self._ref.file}", err.strerror or "") from err
            if got == 0:
                start, end = self._ref.offset, self._ref.offset + self._ref.nbytes
                raise self._failed(
                    f"{self._ref.file} ends at byte {at + done}, inside {self._ref.name!r}",
                    f"the tensor takes bytes {start} to {end}",
                )
            done += got

    def _failed(self, what: str, why: str) -> CheckpointError:
        return CheckpointError(
            "weight-file", what, why=why, hint="the file changed since it was compiled; fetch it again"
        )


@contextmanager
def opened(ref: WeightRef, root: Path | None) -> Iterator[File]:
    """The file of a tensor, for reading forwards. Raises CheckpointError `weight-file` where there is none."""
    path = Path(ref.file) if root is None else root / ref.file
    try:
        file = path.open("rb", buffering=0)
    except OSError as err:
        raise CheckpointError("weight-file", f"cannot read {ref.name!r} from {path}", why=err.strerror or "") from err
    with closing(file):
        os.posix_fadvise(file.fileno(), ref.offset, ref.nbytes, os.POSIX_FADV_SEQUENTIAL)
        yield File(ref, file.fileno())
