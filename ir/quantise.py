"""Numbers to codes: weights quantised to the nearest code, with a scale for each row or each group of a row.

A weight becomes `(code - zero) * scale`, as `plait.ir.types.QuantType` says. The scale is the smallest that all numbers
of its group fit, so nothing is cut off. Where it is known how large the inputs of a linear are, smaller scales are
tried too: they cut off the largest numbers and round all others more finely.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from typing import Any, get_args

import numpy as np
from numpy.typing import NDArray
from xdsl.dialects.builtin import ModuleOp, TensorType

from plait.errors import UnsupportedError
from plait.ir.module import ops
from plait.ir.numbers import NUMPY
from plait.ir.ops import ExpertsOp, LinearOp, WeightOp
from plait.ir.quant import quantise_types
from plait.ir.types import CODE_MAX, QuantType
from plait.spec import QuantKind

Array = NDArray[Any]

QUANT_KINDS: tuple[QuantKind, ...] = get_args(QuantKind)

GROUP_SIZES = (128, 64, 32)
"""What a group may be. Of themselves 4-bit codes take the first that divides a row, and 8-bit codes the whole row."""

RATIOS = np.linspace(1.0, 0.5, 21, dtype=np.float32)
"""Parts of the scale that are tried where it is known how large the inputs are."""

_CODES: Mapping[QuantKind, tuple[str, int | None]] = {
    "int8": ("i8", None),
    "int4": ("u4", 8),
    "fp8": ("e4m3fn", None),
}
"""Codes, and the one zero of all of them."""

_LEAST = {"i8": -128, "u4": 0, "e4m3fn": -CODE_MAX["e4m3fn"]}

_SMALLEST = np.finfo(np.float32).tiny


def kind_of(choice: QuantKind, group_size: int | None, name: str, shape: tuple[int, ...]) -> QuantType:
    """The element type of a weight (..., rows, columns) that is quantised so.

    Args:
        group_size: neighbours of a row that share a scale, 0 for a whole row; None as `GROUP_SIZES` says.
        name: what the error calls the weight.

    Raises:
        UnsupportedError: `quantize-shape`: rows are not whole groups, or not whole bytes.
    """
    code, zero = _CODES[choice]
    if group_size is None:
        fitting = [size for size in GROUP_SIZES if shape[-1] % size == 0] if choice == "int4" else []
        group_size = fitting[0] if fitting else 0
    kind = QuantType.get(code, "float32", (1, group_size), zero=zero)
    problem = kind.problem(shape)
    if problem is not None:
        sizes = [str(size) for size in GROUP_SIZES if shape[-1] % size == 0]
        raise UnsupportedError(
            "quantize-shape",
            f"{name!r} of {list(shape)} cannot be quantised to {choice}",
            why=problem,
            hint=f"--group-size {' or '.join(sizes)}" if sizes else "--quantize int8 or fp8, without --group-size",
        )
    return kind


def matrices(module: ModuleOp, start: int, end: int) -> dict[str, tuple[int, ...]]:
    """What is quantised of blocks [start, end): the matrices of linears, and stacks of those of experts, by name, with
    their shapes (..., out, in). Embedding, logits, norms and routers are none of them."""
    found = {}
    for op in ops(module):
        if op.block_index is None or not start <= op.block_index < end:
            continue
        for value in (op.weight,) if isinstance(op, LinearOp) else op.stacks if isinstance(op, ExpertsOp) else ():
            owner, kind = value.owner, value.type
            assert isinstance(owner, WeightOp) and isinstance(kind, TensorType)
            found[owner.symbol.data] = tuple(kind.get_shape())
    return found


def quantise_blocks(module: ModuleOp, start: int, end: int, choice: QuantKind, group_size: int | None) -> None:
    """Give the matrices of blocks [start, end) the element types that `kind_of` says."""
    shapes = matrices(module, start, end)
    quantise_types(module, {name: kind_of(choice, group_size, name, shape) for name, shape in shapes.items()})


def quantise(values: Array, kind: QuantType, importance: Array | None = None) -> tuple[Array, Array]:
    """Codes (rows, columns) and scales (rows, groups) of finite float32 values.

    The scale of a group is max(v / c, 0) over its values v, where c is the largest code for positive and the least one
    for negative values, counted from the zero; 1 where all are 0. Each code is the nearest to `v / scale + zero`.

    Args:
        importance: (columns,), how much the squared error of a column counts: the mean square of that input. Each
            group then takes of `RATIOS * scale` the one with the least `sum(importance * error^2)`, the first if equal.
    """
    rows, columns = values.shape
    size = kind.block[1] or columns
    groups = values.reshape(rows, columns // size, size)
    code, zero = kind.code_name, kind.zero_point or 0
    most, least = np.float32(CODE_MAX[code] - zero), np.float32(_LEAST[code] - zero)
    full = np.maximum(groups.max(axis=2) / most, groups.min(axis=2) / least)
    scale = np.where(full > 0, np.maximum(full, _SMALLEST), np.float32(1))
    if importance is not None:
        # As parts of the largest one: what is compared stays far from the ends of float32.
        parts = (importance / (importance.max() or 1.0)).astype(np.float32)
        scale = _searched(groups, scale, (least, most), code, parts.reshape(-1, size))
    rounded = _rounded(groups / scale[..., None], (least, most), code)
    codes = (rounded + np.float32(zero)).astype(NUMPY[code])
    return codes.reshape(rows, columns), scale


def _rounded(ratio: Array, limits: tuple[Any, Any], code: str) -> Array:
    """The nearest codes, counted from the zero, in the place of `ratio` (float32)."""
    np.clip(ratio, *limits, out=ratio)
    return np.rint(ratio, out=ratio) if code in ("i8", "u4") else _nearest_e4m3(ratio)


def _nearest_e4m3(x: Array) -> Array:
    """float32 within +-448 to the nearest e4m3fn, of two the even one: 3 bits of the mantissa are kept, and below 2^-6
    multiples of 2^-9. As a cast by ml_dtypes, in a tenth of its time."""
    bits = x.view(np.uint32)
    normal = ((bits + 0x7FFFF + ((bits >> 20) & 1)) & 0xFFF00000).view(np.float32)
    return np.where(np.abs(x) < 2.0**-6, np.rint(x * np.float32(512)) / np.float32(512), normal)


def _searched(groups: Array, scale: Array, limits: tuple[Any, Any], code: str, importance: Array) -> Array:
    best, least = scale.copy(), np.full(scale.shape, np.inf, np.float32)
    for ratio in RATIOS:
        tried = np.maximum(scale * ratio, _SMALLEST)
        error = _rounded(groups / tried[..., None], limits, code)
        error *= tried[..., None]
        error -= groups
        with np.errstate(over="ignore"):
            np.square(error, out=error)
        cost = np.einsum("rgk,gk->rg", error, importance)
        better = cost < least
        np.copyto(best, tried, where=better)
        np.copyto(least, cost, where=better)
    return best


@dataclass(frozen=True)
class QuantError:
    """How far a weight is from what it was.

    Attributes:
        squared, total: sums of squares of the error and of the weight.
        worst, largest: the largest error of one value, and the largest value.
        weighted, weighted_total: the sums with each column weighted by the mean square of that input; 0 without one.
        rounded: `weighted` of the plain nearest codes, without a search for scales.
    """

    squared: float = 0.0
    total: float = 0.0
    worst: float = 0.0
    largest: float = 0.0
    weighted: float = 0.0
    weighted_total: float = 0.0
    rounded: float = 0.0

    @staticmethod
    def of(values: Array, kind: QuantType, codes: Array, scale: Array, importance: Array | None = None) -> QuantError:
        """Of rows (float32) that became these codes and scales."""
        error = np.square(_values(kind, codes, scale) - values, dtype=np.float64)
        wide = np.square(values, dtype=np.float64)
        found = QuantError(
            squared=float(error.sum()),
            total=float(wide.sum()),
            worst=float(np.sqrt(error.max())),
            largest=float(np.abs(values).max()),
        )
        if importance is None:
            return found
        plain = np.square(_values(kind, *quantise(values, kind)) - values, dtype=np.float64)
        weighted, rounded, total = (float(part.sum(axis=0) @ importance) for part in (error, plain, wide))
        return replace(found, weighted=weighted, rounded=rounded, weighted_total=total)

    def __add__(self, other: QuantError) -> QuantError:
        """Of both parts together."""
        most = {name: max(getattr(self, name), getattr(other, name)) for name in ("worst", "largest")}
        sums = {item.name: getattr(self, item.name) + getattr(other, item.name) for item in fields(self)}
        return QuantError(**(sums | most))

    def numbers(self) -> dict[str, float]:
        """`rms`: of the error relative to that of the weight; `worst`: the largest error relative to the largest value;
        with inputs `output` and `output_rounded`: rms of what the error adds to the product, relative to the product,
        were the inputs uncorrelated, with the scales that were searched and without."""
        found = {"rms": _root(self.squared, self.total), "worst": self.worst / self.largest if self.largest else 0.0}
        if self.weighted_total:
            found["output"] = _root(self.weighted, self.weighted_total)
            found["output_rounded"] = _root(self.rounded, self.weighted_total)
        return found


def _values(kind: QuantType, codes: Array, scale: Array) -> Array:
    """What codes mean, in float32."""
    groups = codes.astype(np.float32).reshape(*scale.shape, -1)
    groups -= np.float32(kind.zero_point or 0)
    groups *= scale[..., None]
    return groups.reshape(codes.shape)


def _root(part: float, whole: float) -> float:
    return float(np.sqrt(part / whole)) if whole else 0.0
