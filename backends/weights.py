"""Weights of a checkpoint as arrays: the one place where stored weights become numbers.

A tensor is read and converted in chunks of rows, so reading one takes its own size in the compute dtype plus a chunk,
whatever the encoding. Nothing is clipped or repaired: a number that does not survive is an error naming the tensor.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from plait.backends.quantised import read_scales, to_codes
from plait.backends.ranges import chunks, matrix, row_order
from plait.errors import CheckpointError, UserError, did_you_mean
from plait.ir.numbers import NUMPY, dequantise
from plait.ir.types import CODES
from plait.ir.types import DTYPES as COMPUTE_DTYPES
from plait.spec import WeightRef, from_json, map_parts, to_json

Array = NDArray[Any]

DTYPES: dict[str, np.dtype[Any]] = {name: NUMPY[name] for name in COMPUTE_DTYPES}


def read_weight(ref: WeightRef, dtype: str, root: Path | None = None) -> Array:
    """The tensor of `ref` as an array of `ref.shape` in `dtype` (float32, float16, bfloat16), rounded to nearest even.

    Quantised tensors are dequantised in float32, and then rounded once: Q4_0, Q4_1 and Q8_0 exactly as the `gguf`
    package does it, codes with a scale of their own as `plait.ir.types.QuantType` says. Rows stored as rope pairs
    (`ref.rows`) come back as halves. Values too small for `dtype` become zero, as rounding says.

    Args:
        root: folder that a relative `ref.file` is relative to.

    Raises:
        CheckpointError: `weight-file` (absent, shorter than the range), `weight-range` (the range does not fit the
            shape), `weight-not-finite` (NaN or infinity is stored), `weight-scale` (codes without a scale, or with one
            that is not positive and finite), `weight-overflow` (a value too large for `dtype`).
    """
    if dtype not in DTYPES:
        raise UserError("dtype", f"{dtype!r} is not a compute dtype", hint=did_you_mean(dtype, DTYPES))
    order, decode = row_order(ref), _decoder(ref, root)
    rows, columns = matrix(ref)
    out = np.empty((rows, columns), DTYPES[dtype])
    for first, raw in chunks(ref, root):
        values = _cast(decode(first, raw).reshape(-1, columns), DTYPES[dtype], ref)
        last = first + len(values)
        out[slice(first, last) if order is None else order[first:last]] = values
    return out.reshape(ref.shape)


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


def _decoder(ref: WeightRef, root: Path | None) -> Callable[[int, NDArray[np.uint8]], Array]:
    """From the first row of a chunk and its bytes to numbers: in the stored dtype, or in float32 where quantised."""
    if ref.encoding in DTYPES:
        return lambda first, raw: raw.view(DTYPES[ref.encoding])
    if ref.encoding in CODES:
        kind, scale, zero = read_scales(ref, root)

        def scaled(first: int, raw: NDArray[np.uint8]) -> Array:
            with np.errstate(over="ignore"):
                return dequantise(kind, to_codes(raw, ref), scale, zero, first=first, dtype=np.float32)

        return scaled
    from gguf.constants import GGMLQuantizationType
    from gguf.quants import dequantize

    # A block is 32 values; the package wants rows, and blocks do not depend on each other.
    return lambda first, raw: np.asarray(dequantize(raw[None, :], GGMLQuantizationType[ref.encoding])).reshape(-1)


def _cast(stored: Array, dtype: np.dtype[Any], ref: WeightRef) -> Array:
    # Of codes and scales it is known that they are finite: only their product may be too large.
    if ref.encoding not in CODES and not np.isfinite(stored).all():
        raise CheckpointError(
            "weight-not-finite", f"{ref.name!r} in {ref.file} holds NaN or infinity", hint="the checkpoint is damaged"
        )
    if stored.dtype == dtype and ref.encoding not in CODES:
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
