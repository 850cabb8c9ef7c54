"""What the codes of a stored weight mean: scales, zeros, outer scales and the order of groups, read and checked."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from xdsl.dialects.builtin import IntegerType

from plait.backends.codes import read_elements
from plait.backends.ranges import Index
from plait.errors import CheckpointError
from plait.ir.numbers import NUMPY, code_values, dequantise
from plait.ir.quant import quant_type
from plait.ir.types import CODE_MAX, QuantType
from plait.spec import WeightRef

Array = NDArray[Any]


@dataclass(frozen=True)
class Scales:
    """The numbers beside the codes of a weight as it is stored: before rows of it are taken.

    Attributes:
        scale: (matrices, rows, columns) of blocks; so is `zero`, where there are zeros.
        outer: float32 (matrices).
        order: int32 (matrices, columns): the group of each column.
    """

    kind: QuantType
    scale: Array
    zero: Array | None
    outer: Array | None
    order: Array | None

    def of_rows(self, rows: Index | None, down: int) -> Mapping[str, Array | None]:
        """The numbers of the `rows` that a weight takes (None for all), for blocks of `down` of them, by name."""
        scale, zero = self.scale, self.zero
        if rows is not None and down:
            blocks = (rows // self.kind.block[0])[::down]
            scale, zero = scale[:, blocks], None if zero is None else zero[:, blocks]
        return {"scale": scale, "zero": zero, "outer": self.outer, "order": self.order}

    def values(self, codes: Array, matrix: int, row: int = 0, column: int = 0) -> Array:
        """What codes (rows, columns) of a matrix stand for, in float32. They begin with this row and this column, which
        is the first of a block."""
        down, across = self.kind.block
        first, last = (row // down, -(-(row + codes.shape[0]) // down)) if down else (0, 1)
        end = column + codes.shape[1]
        order = None if self.order is None else self.order[matrix, column:end]
        beside = slice(column // across, -(-end // across)) if across and order is None else slice(None)
        zero = None if self.zero is None else self.zero[matrix, first:last, beside]
        outer = None if self.outer is None else self.outer[matrix]
        with np.errstate(over="ignore"):
            return dequantise(
                self.kind,
                codes,
                self.scale[matrix, first:last, beside],
                zero,
                outer=outer,
                order=order,
                first=row - first * down,
                dtype=np.float32,
            )


def read_scales(ref: WeightRef, root: Path | None) -> Scales:
    """The numbers beside the codes of a weight that is no stack.

    Raises:
        CheckpointError: `weight-scale`: there is no scale, it has another shape than the weight asks for, or a scale is
            zero, infinite or NaN, or negative where codes have signs of their own; all of them tell of a scale that was
            lost or cast too narrow. So do zeros and outer scales that are no such numbers, and groups that there are
            not.
    """
    kind = quant_type(replace(ref, rows=None))
    if not isinstance(kind, QuantType) or ref.scale is None:
        raise CheckpointError(
            "weight-scale",
            f"{ref.name!r} holds {ref.encoding} codes without a scale",
            why="codes mean nothing without their scale",
            hint="compile again",
        )
    rows, columns = _stored_shape(ref)
    shape = (prod(ref.shape[:-2]), *kind.scale_shape((rows, columns)))
    # Whole numbers are symmetric as they are: some writers give the largest of a group the code -8, whatever its sign.
    scale = _numbers(ref, ref.scale, shape, root, "a scale", signed=isinstance(kind.code, IntegerType))
    zero = None
    if isinstance(ref.zero, WeightRef) and kind.zero_dtype is not None:
        zero = _numbers(ref, ref.zero, shape, root, "a zero", signed=None).astype(NUMPY[kind.zero_dtype])
        if ref.zero.shift and zero.size and zero.max() > CODE_MAX[kind.code_name]:
            raise CheckpointError(
                "weight-scale",
                f"{ref.zero.name!r}, the zeros of {ref.name!r}, holds {zero.max() - ref.zero.shift:g}",
                why=f"{ref.zero.shift:g} more is {zero.max():g} to some readers and 0 to others",
                hint="quantise again, in the second version of the format (gptq_v2)",
            )
    outer = None if ref.outer is None else _outer(ref, ref.outer, shape[0], root)
    order = None if ref.group_of is None else _order(ref, ref.group_of, (shape[0], columns), shape[2], root)
    return Scales(kind, scale.astype(NUMPY[kind.scale_dtype], copy=False), zero, outer, order)


def _stored_shape(ref: WeightRef) -> tuple[int, int]:
    """(rows, columns) of a matrix before rows are taken."""
    rows, columns = ref.shape[-2:] if len(ref.shape) > 1 else (prod(ref.shape), 1)
    return rows if ref.rows is None else ref.rows.groups * ref.rows.stride, columns


def _outer(ref: WeightRef, part: WeightRef, matrices: int, root: Path | None) -> Array:
    shape = (matrices,) if prod(part.shape) != 1 else (1,)
    outer = _numbers(ref, part, shape, root, "an outer scale", signed=False).astype(np.float32)
    return np.repeat(outer, matrices // len(outer))


def _order(ref: WeightRef, part: WeightRef, shape: tuple[int, int], groups: int, root: Path | None) -> Array:
    order = _numbers(ref, part, shape, root, "a group", signed=None)
    if order.size and not 0 <= order.min() <= order.max() < groups:
        raise CheckpointError(
            "weight-scale",
            f"{part.name!r} puts columns of {ref.name!r} into group {order.max() if order.min() >= 0 else order.min()}",
            why=f"there are {groups} groups",
            hint="the checkpoint is damaged",
        )
    return order.astype(np.int32)


def _numbers(
    ref: WeightRef, part: WeightRef, shape: tuple[int, ...], root: Path | None, what: str, signed: bool | None
) -> Array:
    """The numbers of a part of a weight in `shape`: in their own dtype where they are stored as they are, otherwise in
    float32.

    Args:
        what: what one of them is called.
        signed: whether it may be negative; None where it may be 0 too.
    """
    if prod(part.shape) != prod(shape):
        raise CheckpointError(
            "weight-scale",
            f"{part.name!r} has the shape {list(part.shape)}",
            why=f"{ref.name!r} of {list(ref.shape)} in {quant_type(ref)} takes {list(shape)}",
        )
    stored = read_elements(part, root, checked=False).reshape(-1)
    if part.scale is not None:
        stored = _rescaled(ref, part, stored, root)
    if not part.shift:
        _check(ref, part, stored, what, signed)
    if (part.reciprocal, part.factor, part.shift) != (False, 1.0, 0.0):
        wide: Array = stored.astype(np.float32)
        with np.errstate(over="ignore"):
            wide = np.float32(part.factor) * (1 / wide if part.reciprocal else wide) + np.float32(part.shift)
        _check(ref, part, wide, what, None if part.shift else signed)
        stored = wide
    return stored.reshape(shape)


def _rescaled(ref: WeightRef, part: WeightRef, codes: Array, root: Path | None) -> Array:
    """A scale that is codes itself, in float32: what they stand for, times the scale of their block."""
    if part.scale is None or part.block is None:
        return codes
    size = part.block[1] or max(1, len(codes))
    inner = _numbers(ref, part.scale, (-(-len(codes) // size),), root, "a scale", signed=False).astype(np.float32)
    if part.book is None:
        numbers = code_values(codes, part.encoding, np.float32)
    else:
        book = _numbers(ref, part.book, (256,), root, "a code's number", signed=None)
        numbers = np.asarray(book.astype(np.float32)[codes])
    return np.asarray(numbers * inner[np.arange(len(codes)) // size])


def _check(ref: WeightRef, part: WeightRef, numbers: Array, what: str, signed: bool | None) -> None:
    wide = numbers.astype(np.float32)
    good = np.isfinite(wide)
    if signed is not None:
        good &= (wide != 0) if signed else (wide > 0)
    if not good.all():
        raise CheckpointError(
            "weight-scale",
            f"{part.name!r}, a part of {ref.name!r}, holds {wide[~good][0]:g}",
            why=f"{what} is {'' if signed is None else 'not zero and ' if signed else 'positive and '}finite",
            hint="the checkpoint is damaged",
        )
