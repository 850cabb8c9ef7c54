"""Weights of a checkpoint as arrays: the one place where stored weights become numbers.

A tensor of the wanted dtype is read right into its place; any other is converted in chunks. So reading one takes its
own size in the wanted dtype plus a chunk, whatever the encoding. Nothing is clipped or repaired: a number that does not
survive is an error naming the tensor.
"""

from __future__ import annotations

import mmap
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cache, partial
from itertools import groupby
from math import prod
from pathlib import Path
from typing import Any, Literal

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from plait.backends.codes import BLOCKS, check_finite, finite, unpack
from plait.backends.ranges import Chunk, Layout, chunks, in_runs, layout, members, put, read_bytes, taken
from plait.backends.scales import read_scales
from plait.errors import CheckpointError, UserError, did_you_mean
from plait.ir.numbers import NUMPY
from plait.ir.types import DTYPES as COMPUTE_DTYPES
from plait.spec import WeightRef, from_json, map_parts, to_json

Array = NDArray[Any]

DTYPES: dict[str, np.dtype[Any]] = {name: NUMPY[name] for name in COMPUTE_DTYPES}


def read_weight(ref: WeightRef, dtype: str, root: Path | None = None, out: Array | None = None) -> Array:
    """The tensor of `ref` as an array of `ref.shape` in `dtype` (float32, float16, bfloat16), rounded to nearest even.

    Quantised tensors are dequantised in float32, and then rounded once: GGUF's blocks exactly as the `gguf` package
    does it, codes with a scale of their own as `plait.ir.types.QuantType` says. Values too small for `dtype` become
    zero, as rounding says.

    Args:
        root: folder that a relative `ref.file` is relative to.
        out: the array to fill, contiguous; a new one where not given.

    Raises:
        CheckpointError: `weight-file` (absent, shorter than the range), `weight-range` (the range does not fit the
            shape), `weight-not-finite` (NaN or infinity is stored), `weight-scale` (codes without a scale, or with one
            that is none), `weight-overflow` (a value too large for `dtype`).
    """
    out = _place(ref.shape, dtype, out)
    _fill([out], [ref], dtype, root)
    return out


def read_stacked(refs: Sequence[WeightRef], dtype: str, root: Path | None = None, out: Array | None = None) -> Array:
    """Weights one behind the other along their first dimension, as `read_weight` reads each. Neighbours that are rows
    of one stored tensor (fused q, k and v) are read together, each byte once."""
    out = _place((sum(ref.shape[0] for ref in refs), *refs[0].shape[1:]), dtype, out)
    ends = np.cumsum([ref.shape[0] for ref in refs])
    places = [out[end - ref.shape[0] : end] for ref, end in zip(refs, ends, strict=True)]
    start = 0
    for _, group in groupby(range(len(refs)), lambda index: stored_of(refs[index]) or index):
        end = start + len(list(group))
        _fill(places[start:end], refs[start:end], dtype, root)
        start = end
    return out


def read_together(refs: Sequence[WeightRef], dtype: str, root: Path | None = None) -> list[Array]:
    """Weights of one `stored_of`, as `read_weight` reads each, with each byte read once."""
    places = [_place(ref.shape, dtype, None) for ref in refs]
    _fill(places, refs, dtype, root)
    return places


def stored_of(ref: WeightRef) -> WeightRef | None:
    """The stored tensor that a weight takes some rows of, the same for all weights that do; None of other weights."""
    return None if ref.rows is None or ref.stack else replace(ref, name="", shape=(), rows=None)


def is_interleaved(ref: WeightRef) -> bool:
    """Whether reading a weight that is rows of a tensor takes more bytes than its own: gate and up in turn."""
    return stored_of(ref) is not None and not in_runs(layout(ref), taken(ref))


def _place(shape: tuple[int, ...], dtype: str, out: Array | None) -> Array:
    if dtype not in DTYPES:
        raise UserError("dtype", f"{dtype!r} is not a compute dtype", hint=did_you_mean(dtype, DTYPES))
    if out is None:
        return fresh(shape, DTYPES[dtype])
    assert (out.shape, out.dtype) == (shape, DTYPES[dtype]) and out.flags.c_contiguous, f"{out.shape} for {shape}"
    return out


MAPPED_BYTES = 1 << 22
"""From here on an array is memory of its own."""


def fresh(shape: tuple[int, ...], dtype: np.dtype[Any]) -> Array:
    """An array of anything. A large one is mapped for itself: what is let go then goes back to the system at once, and
    huge pages, where they are allowed, make it three times as fast to fill."""
    size = prod(shape) * dtype.itemsize
    if size < MAPPED_BYTES:
        return np.empty(shape, dtype)
    memory = mmap.mmap(-1, size, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with suppress(OSError):  # a kernel without them says so
        memory.madvise(mmap.MADV_HUGEPAGE)
    return np.frombuffer(memory, dtype).reshape(shape)


def _fill(outs: Sequence[Array], refs: Sequence[WeightRef], dtype: str, root: Path | None) -> None:
    """Read weights that are rows of one stored tensor; a single one need not be."""
    ref = refs[0]
    if ref.stack:
        for member, part in zip(members(ref), outs[0], strict=True):
            read_weight(member, dtype, root, part)
        return
    form, *_ = [layout(one) for one in refs]
    every = [taken(one) for one in refs]
    places = [
        out.reshape(form.matrices, form.rows if rows is None else len(rows), form.width)
        for out, rows in zip(outs, every, strict=True)
    ]
    if ref.encoding == dtype and all(in_runs(form, rows) for rows in every):
        for place, rows in zip(places, every, strict=True):
            read_bytes(ref, root, rows, partial(check_finite, ref=ref), place.view(np.uint8))
        return
    some = [rows for rows in every if rows is not None]
    multiple, decode = _decoder(ref, form, root)
    for chunk in chunks(ref, root, np.concatenate(some) if some else None, multiple):
        values = _cast(decode(chunk), dtype, ref)
        for place, rows in zip(places, every, strict=True):
            put(place[chunk.matrix], values, chunk.first, form, rows)


BESIDE = "./"
"""How the name of a file begins that lies beside weights.json, wherever the checkpoint is."""


@dataclass(frozen=True)
class _WeightList:
    weights: tuple[WeightRef, ...]
    schema: Literal[1] = 1


def weights_json(refs: Iterable[WeightRef]) -> str:
    """The text of a slice's `weights.json`, sorted by name so that equal slices have equal bytes."""
    return to_json(_WeightList(tuple(sorted(refs, key=lambda ref: ref.name)))) + "\n"


def read_weights_json(path: Path) -> dict[str, WeightRef]:
    """The inverse of `weights_json`: by tensor name. Files that lie `BESIDE` it come back with absolute paths.

    Raises UserError where a field is wrong.
    """
    folder = path.parent.absolute()

    def found(part: WeightRef) -> WeightRef:
        beside = part.file.startswith(BESIDE)
        return replace(part, file=str(folder / part.file.removeprefix(BESIDE))) if beside else part

    return {ref.name: map_parts(ref, found) for ref in from_json(_WeightList, path.read_text()).weights}


def _decoder(ref: WeightRef, form: Layout, root: Path | None) -> tuple[int, Callable[[Chunk], Array]]:
    """What turns a chunk into numbers (rows, columns) of the weight, in the stored dtype or in float32 where quantised;
    and of how many columns a chunk must be a multiple, where it is one of columns.

    Raises CheckpointError; so does what it returns."""
    if ref.encoding in BLOCKS:
        return 1, lambda chunk: _blocks(chunk, ref)
    if ref.encoding in DTYPES:
        return 1, lambda chunk: _checked(unpack(chunk.raw, ref, form), ref)
    scales = read_scales(ref, root)

    def scaled(chunk: Chunk) -> Array:
        codes = _checked(unpack(chunk.raw, ref, form), ref)
        row, column = (0, chunk.first) if form.transposed else (chunk.first, 0)
        return scales.values(codes, chunk.matrix, row, column)

    return scales.kind.block[1] or form.lines * form.line_rows, scaled


def _checked(elements: Array, ref: WeightRef) -> Array:
    check_finite(elements, ref)
    return elements


def _blocks(chunk: Chunk, ref: WeightRef) -> Array:
    from gguf.constants import GGMLQuantizationType
    from gguf.quants import dequantize

    check_finite(chunk.raw, ref)
    # As one row: the package takes few rows at once, and blocks do not depend on each other.
    values = dequantize(chunk.raw.reshape(1, -1), GGMLQuantizationType[ref.encoding])
    return np.asarray(values).reshape(len(chunk.raw), -1)


def _cast(stored: Array, dtype: str, ref: WeightRef) -> Array:
    """Finite numbers in another dtype. Codes and scales are finite, their product may be too large even for float32."""
    if stored.dtype == DTYPES[dtype] and ref.encoding in DTYPES:
        return stored
    # Through float32, which holds every stored value exactly: one rounding only.
    wide = (
        _half_values()[stored.view(np.uint16)] if stored.dtype == np.float16 else stored.astype(np.float32, copy=False)
    )
    with np.errstate(over="ignore"):
        values: Array = wide.astype(DTYPES[dtype], copy=False)
    if not finite(values, dtype):
        raise CheckpointError(
            "weight-overflow",
            f"{ref.name!r} holds {np.abs(wide).max():g}, too large for {dtype}",
            why=f"the largest {dtype} is {_largest(DTYPES[dtype]):g}",
            hint="compile with --dtype bfloat16 or float32",
        )
    return values


@cache
def _half_values() -> NDArray[np.float32]:
    """float32 of each float16, by its bits: looking them up is four times as fast as NumPy's conversion."""
    return np.arange(1 << 16, dtype=np.uint16).view(np.float16).astype(np.float32)


def _largest(dtype: np.dtype[Any]) -> float:
    return float(ml_dtypes.finfo(dtype).max)  # type: ignore[no-untyped-call]
