"""What stored numbers mean: rounding to an element type, FP8, and the values of quantised weights."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import ml_dtypes
import numpy as np
from numpy.typing import NDArray
from xdsl.ir import Attribute

from plait.ir.types import CODE_MAX, PackedType, QuantType, dtype_name

Array = NDArray[Any]
Float64 = NDArray[np.float64]

#: NumPy's dtype of every compute dtype, scale, code and order. 4-bit codes are 0 .. 15, one in a byte.
NUMPY: dict[str, np.dtype[Any]] = {
    "float32": np.dtype(np.float32),
    "float16": np.dtype(np.float16),
    "bfloat16": np.dtype(ml_dtypes.bfloat16),
    "e4m3fn": np.dtype(ml_dtypes.float8_e4m3fn),
    "e5m2": np.dtype(ml_dtypes.float8_e5m2),
    "e4m3fnuz": np.dtype(ml_dtypes.float8_e4m3fnuz),
    "e8m0": np.dtype(ml_dtypes.float8_e8m0fnu),
    "e2m1": np.dtype(np.uint8),
    "nf4": np.dtype(np.uint8),
    "i8": np.dtype(np.int8),
    "u8": np.dtype(np.uint8),
    "i32": np.dtype(np.int32),
    "i64": np.dtype(np.int64),
    "u4": np.dtype(np.uint8),
}

_E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
_NF4 = (
    *(-1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453),
    *(-0.28444138169288635, -0.18477343022823334, -0.09105003625154495, 0.0),
    *(0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224),
    *(0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0),
)

#: What codes 0 .. 15 stand for: e2m1 of OCP Microscaling Formats 1.0 (table 5), nf4 of QLoRA (appendix E). float32
#: holds each exactly.
BOOKS: dict[str, NDArray[np.float32]] = {
    "e2m1": np.array((*_E2M1, *(-value for value in _E2M1)), np.float32),
    "nf4": np.array(_NF4, np.float32),
}


def code_values(codes: Array, code: str, dtype: type[np.floating[Any]] = np.float64) -> Array:
    """The numbers that codes stand for before they are scaled, in `dtype`."""
    book = BOOKS.get(code)
    return codes.astype(dtype) if book is None else np.asarray(book.astype(dtype)[codes])


def round_to(values: Float64, kind: Attribute) -> Float64:
    """float64 values rounded to nearest even to an element type, kept as float64."""
    return np.asarray(values, np.float64).astype(NUMPY[dtype_name(kind)]).astype(np.float64)


def saturate(values: Float64, kind: Attribute) -> Float64:
    """Values that float32 holds rounded to nearest even to FP8, kept as float64. What is larger than the largest finite
    number, infinity included, becomes that number with its sign; NaN stays NaN."""
    largest = CODE_MAX[dtype_name(kind)]
    return round_to(np.clip(values, -largest, largest), kind)


@dataclass(frozen=True)
class Quantised:
    """A quantised weight (..., rows, columns) as arrays; `plait.ir.types.QuantType` says what they mean.

    Attributes:
        codes: (..., rows, columns): FP8 (ml_dtypes), int8, uint8, or uint8 that hold 0 .. 15.
        scale: as `QuantType.scale_shape` says; so are `zero` and `minimum`, where the type has them as tensors.
        outer: float32 (...), one for each matrix, where the type has it.
        order: int32 (..., columns), the group of each column, where the type has it.
    """

    kind: QuantType
    codes: Array
    scale: Array
    zero: Array | None = None
    minimum: Array | None = None
    outer: Array | None = None
    order: Array | None = None

    def __post_init__(self) -> None:
        kind, shape, matrices = self.kind, self.kind.scale_shape(self.codes.shape), self.codes.shape[:-2]
        assert self.codes.dtype == NUMPY[kind.code_name], f"codes are {self.codes.dtype}, not {kind}"
        for part, dtype, wanted in (
            (self.scale, kind.scale_dtype, shape),
            (self.zero, kind.zero_dtype, shape),
            (self.minimum, kind.minimum_dtype, shape),
            (self.outer, "float32" if kind.has_outer else None, matrices),
            (self.order, "i32" if kind.is_ordered else None, (*matrices, self.codes.shape[-1])),
        ):
            assert (part is None) == (dtype is None), f"{kind}"
            if part is not None and dtype is not None:
                assert (part.shape, part.dtype) == (wanted, NUMPY[dtype]), f"{part.shape} {part.dtype}: {kind}"

    def values(self, dtype: type[np.floating[Any]] = np.float64) -> Array:
        """The weight's values, computed in `dtype`: exact in float64."""
        if self.codes.ndim > 2:
            return np.stack([self.matrix(index).values(dtype) for index in range(len(self.codes))])
        return dequantise(
            self.kind, self.codes, self.scale, self.zero, self.minimum, self.outer, self.order, dtype=dtype
        )

    def matrix(self, index: int) -> Quantised:
        """One of a stack."""
        parts = (self.codes, self.scale, self.zero, self.minimum, self.outer, self.order)
        codes, scale, *rest = (None if part is None else np.asarray(part[index]) for part in parts)
        assert codes is not None and scale is not None, "the type says so"
        return Quantised(self.kind, codes, scale, *rest)


@dataclass(frozen=True)
class Packed:
    """A weight in GGUF's blocks: uint8 (..., rows, bytes of a row); `plait.ir.types.PackedType` says what they mean."""

    kind: PackedType
    raw: NDArray[np.uint8]

    def values(self, dtype: type[np.floating[Any]] = np.float64) -> Array:
        """The weight's values: float32 ones, as the `gguf` package has them, held in `dtype`."""
        from gguf.constants import GGMLQuantizationType
        from gguf.quants import dequantize

        return np.asarray(dequantize(self.raw, GGMLQuantizationType[self.kind.encoding])).astype(dtype)


def dequantise(
    kind: QuantType,
    codes: Array,
    scale: Array,
    zero: Array | None = None,
    minimum: Array | None = None,
    outer: Array | None = None,
    order: Array | None = None,
    *,
    first: int = 0,
    dtype: type[np.floating[Any]] = np.float64,
) -> Array:
    """The values of rows of a matrix from `first` on, computed in `dtype`; `codes` are of these rows alone, the rest is
    whole."""
    count, columns = codes.shape
    down, across = (
        np.arange(at, at + size) // (part or at + size)
        for at, size, part in zip((first, 0), (count, columns), kind.block, strict=True)
    )
    if order is not None:
        across = order

    def spread(part: Array) -> Array:
        return np.asarray(part.astype(dtype)[down][:, across])

    out = code_values(codes, kind.code_name, dtype)
    if kind.zero_point is not None:
        out -= dtype(kind.zero_point)
    if zero is not None:
        out -= spread(zero)
    out *= spread(scale) if outer is None else spread(scale.astype(dtype) * outer.astype(dtype))
    if minimum is not None:
        out += spread(minimum)
    return out
