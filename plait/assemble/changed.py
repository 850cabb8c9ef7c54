"""Weights that compile makes: adapters merged into them, numbers quantised. They go into the slice's own folder.

One is read, changed and written after the other, so the memory taken is that of the largest one in float32.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
from numpy.typing import NDArray
from xdsl.dialects.builtin import ModuleOp, TensorType
from xdsl.ir import Attribute

from plait.backends.quantised import pack_u4
from plait.backends.ranges import taken_rows
from plait.backends.weights import BESIDE, read_weight
from plait.errors import CheckpointError
from plait.frontend.lora import Adapter, Delta
from plait.frontend.safetensors import ENCODINGS
from plait.ir import weights
from plait.ir.numbers import NUMPY
from plait.ir.quantise import QuantError, quantise
from plait.ir.types import QuantType, dtype_name
from plait.spec import WeightRef

Array = NDArray[Any]

FILE = "changed.safetensors"
"""Beside the slice's weights.json."""

_STORED = {encoding: (name, size) for name, (encoding, size) in ENCODINGS.items()} | {"i8": ("I8", 1), "u4": ("U8", 1)}
"""Encoding -> safetensors dtype and bytes of one element. 4-bit codes stand two in a byte."""

_MOST_THREADS = 16
_PART_ELEMENTS = 1 << 17
"""Rows that are worked on at a time have so many elements, or one row more."""


@dataclass(frozen=True)
class Change:
    """A weight that is not as the checkpoint stores it.

    Attributes:
        base: the checkpoint's tensor, or the one that an adapter brought in its place.
        kind: the element type that it becomes.
        deltas: what adapters add, in their order, before it is quantised.
        adapted: whether an adapter changes it.
    """

    base: WeightRef
    kind: Attribute
    deltas: tuple[Delta, ...] = ()
    adapted: bool = False


def find_changes(
    module: ModuleOp, refs: Mapping[str, WeightRef], adapters: Sequence[Adapter], quantised: Mapping[str, object]
) -> dict[str, Change]:
    """Of the weights of a slice's module those that adapters change or that are `quantised`, sorted by name."""
    found = {}
    for name, op in sorted(weights(module).items()):
        adapted = any(name in adapter.changed for adapter in adapters)
        if adapted or name in quantised:
            base = next((a.saved[name] for a in reversed(adapters) if name in a.saved), refs[name])
            kind = op.result.type
            assert isinstance(kind, TensorType)
            found[name] = Change(base, kind.element_type, _deltas(adapters, name), adapted)
    return found


def _deltas(adapters: Sequence[Adapter], name: str) -> tuple[Delta, ...]:
    """What is added to a weight: of the last adapter that brings the tensor itself, and of those after it."""
    found: list[Delta] = []
    for adapter in adapters:
        if name in adapter.saved:
            found.clear()
        if name in adapter.deltas:
            found.append(adapter.deltas[name])
    return tuple(found)


def write_changed(
    folder: Path,
    changes: Mapping[str, Change],
    importance: Mapping[str, Array],
    progress: Callable[[int], None] = lambda done: None,
) -> tuple[dict[str, WeightRef], dict[str, dict[str, Any]]]:
    """Write `FILE` into `folder`.

    Args:
        importance: by weight, the mean square of each input of its linear; see `plait.ir.quantise.quantise`.
        progress: called with how many weights are written.

    Returns:
        references as they stand in weights.json, and for each weight that is quantised its `format` and the numbers of
        `QuantError`.

    Raises:
        CheckpointError: as `read_weight` says of the checkpoint and of the adapters; `weight-overflow` where a merged
            number is too large for what it is stored in.
    """
    refs, size = _laid_out(changes)
    errors: dict[str, dict[str, Any]] = {}
    with (folder / FILE).open("wb") as out:
        out.write(_header(refs, size))
        for done, (name, change) in enumerate(changes.items()):
            progress(done)
            values = _merged(name, change)
            if isinstance(change.kind, QuantType):
                error = _write_codes(out, values, change.kind, importance.get(name))
                errors[name] = {"format": str(change.kind), **error.numbers()}
            else:
                _write_values(out, values, name, dtype_name(change.kind))
        assert out.tell() == size + sum(part.nbytes for ref in refs.values() for part in _parts(ref))
    return refs, errors


def _parts(ref: WeightRef) -> tuple[WeightRef, ...]:
    return (ref,) if ref.scale is None else (ref, ref.scale)


def _laid_out(changes: Mapping[str, Change]) -> tuple[dict[str, WeightRef], int]:
    """References to what will be written, one behind the other, and the bytes of the file's header."""

    def placed(start: int) -> dict[str, WeightRef]:
        refs = {}
        for name, change in changes.items():
            refs[name] = ref = _reference(name, change, start)
            start += sum(part.nbytes for part in _parts(ref))
        return refs

    size = len(_header(placed(0), 0))
    return placed(size), size


def _reference(name: str, change: Change, start: int) -> WeightRef:
    kind, shape, file = change.kind, change.base.shape, BESIDE + FILE
    if not isinstance(kind, QuantType):
        encoding = dtype_name(kind)
        nbytes = int(np.prod(shape)) * NUMPY[encoding].itemsize
        return WeightRef(name, file, start, nbytes, encoding, shape)  # type: ignore[arg-type]
    codes = int(np.prod(shape)) // (2 if kind.code_name == "u4" else 1)
    groups = kind.scale_shape(shape)
    scale = WeightRef(f"{name}_scale", file, start + codes, 4 * int(np.prod(groups)), "float32", tuple(groups))
    return WeightRef(
        name, file, start, codes, kind.code_name, shape, scale=scale, block=kind.block, zero=kind.zero_point  # type: ignore[arg-type]
    )  # fmt: skip


def _header(refs: Mapping[str, WeightRef], size: int) -> bytes:
    """The header of a safetensors file whose data starts at `size`, padded to 8 bytes."""
    entries = {}
    for part in (part for ref in refs.values() for part in _parts(ref)):
        dtype, width = _STORED[part.encoding]
        rows = part.shape if part.encoding != "u4" else (*part.shape[:-1], part.shape[-1] // 2)
        assert int(np.prod(rows)) * width == part.nbytes
        entries[part.name] = {
            "dtype": dtype,
            "shape": list(rows),
            "data_offsets": [part.offset - size, part.offset - size + part.nbytes],
        }
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def _merged(name: str, change: Change) -> Array:
    """The weight in float32, with every delta added in float32."""
    values = read_weight(change.base, "float32")
    matrix = values.reshape(-1, values.shape[-1])  # of a stack they stand one below the other
    for delta in change.deltas:
        a, b = read_weight(delta.a, "float32"), read_weight(delta.b, "float32")
        if delta.rows is not None:
            b = b[taken_rows(delta.rows)]
        left, right = (a.T, b.T) if delta.embedding else (b, a)
        with np.errstate(over="ignore", invalid="ignore"):
            for rows in _row_parts(matrix):
                matrix[rows] += np.float32(delta.scale) * (left[rows] @ right)
    if change.deltas and not np.isfinite(values).all():
        raise _overflow(name, "float32")
    return values


def _overflow(name: str, dtype: str) -> CheckpointError:
    return CheckpointError(
        "weight-overflow",
        f"{name!r} with its adapters holds numbers too large for {dtype}",
        hint="compile with --dtype bfloat16 or float32" if dtype == "float16" else "the adapter is damaged",
    )


def _write_values(out: BinaryIO, values: Array, name: str, dtype: str) -> None:
    for rows in _row_parts(values):
        with np.errstate(over="ignore"):
            part = values[rows].astype(NUMPY[dtype])
        if not np.isfinite(part).all():
            raise _overflow(name, dtype)
        out.write(part.tobytes())


def _write_codes(out: BinaryIO, values: Array, kind: QuantType, importance: Array | None) -> QuantError:
    """Codes, then scales. Parts are worked on by some threads side by side, and written in their order."""

    def part(rows: slice) -> tuple[Array, Array, QuantError]:
        codes, scale = quantise(matrix[rows], kind, importance)
        error = QuantError.of(matrix[rows], kind, codes, scale, importance)
        return pack_u4(codes) if kind.code_name == "u4" else codes, scale, error

    matrix = values.reshape(-1, values.shape[-1])  # of a stack they stand one below the other
    total, scales = QuantError(), []
    with ThreadPoolExecutor(min(_MOST_THREADS, os.cpu_count() or 1)) as pool:
        for codes, scale, error in pool.map(part, _row_parts(matrix)):
            out.write(codes.tobytes())
            scales.append(scale)
            total += error
    out.writelines(scale.tobytes() for scale in scales)
    return total


def _row_parts(values: Array) -> Iterator[slice]:
    step = max(1, _PART_ELEMENTS // max(1, int(np.prod(values.shape[1:]))))
    return (slice(first, first + step) for first in range(0, len(values), step))
