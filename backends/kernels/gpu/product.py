"""Products with the checkpoint's matrices: which kernel, and what it is given.

A quantised matrix is multiplied as it is stored where there is a kernel for its format and the architecture has the
type; where not, it is dequantised when it is loaded.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby

from xdsl.ir import SSAValue

from plait.backends.kernels.gpu.archs import Arch
from plait.backends.kernels.gpu.draft import Constants, Draft, Place, Places, Scalars, View, null, tensor_of
from plait.backends.kernels.gpu.gemm import even_k
from plait.backends.kernels.gpu.launch import TYPES, Part, Weight
from plait.backends.kernels.lowering import weight_name
from plait.ir.ops import GeluMulOp, GeluOp, ScaleOp, SiluMulOp
from plait.ir.types import QuantType

#: The compute dtypes by what kernels call them.
_DTYPES = {TYPES[name]: name for name in ("float32", "float16", "bfloat16")}

#: The fewest values along K with one scale: of `gemm_int8` and `gemm_int4`, and of `gemm_fp8`.
_LEAST_GROUP, _LEAST_SCALE_K = 16, 32

#: The zero of 4-bit codes that `gemm_int4` knows without being told.
_MIDDLE = 8


#: By `approximate`.
_GELU = {"none": "gelu", "tanh": "gelu_tanh"}


def values(tensors: Sequence[SSAValue], dtype: str) -> Weight:
    """Tensors of the checkpoint, stacked, as numbers of `dtype`."""
    return Weight(_names(tensors), _shapes(tensors), dtype)


def _names(tensors: Sequence[SSAValue]) -> tuple[str, ...]:
    return tuple(weight_name(value.owner, value) for value in tensors)  # type: ignore[arg-type]


def _shapes(tensors: Sequence[SSAValue]) -> tuple[tuple[int, ...], ...]:
    return tuple(tensor_of(value).get_shape() for value in tensors)


@dataclass(frozen=True)
class Activation:
    """What is done to a product and its bias, as the kernels call it (`plait.backends.kernels.gpu.gemm`)."""

    name: str = "none"
    factor: float = 1.0


def activation(op: SiluMulOp | GeluMulOp | GeluOp | ScaleOp) -> Activation:
    """What an op does to a product that it takes."""
    if isinstance(op, ScaleOp):
        return Activation("scale", op.factor.value.data)
    return Activation("silu" if isinstance(op, SiluMulOp) else _GELU[op.approximate.data])


def product(
    d: Draft,
    x: View,
    weights: Sequence[SSAValue],
    biases: Sequence[SSAValue],
    out: View,
    residual: View | None = None,
    act: Activation = Activation(),
    *,
    rows: str = "T",
) -> None:
    """out = act(x [weights]^T + [biases]) + residual. Weights of one format, side by side, are one launch."""
    start = 0
    for kind, group in groupby(range(len(weights)), key=lambda i: _kind(weights[i])):
        part = list(group)
        for chosen in [part] if _stacks(kind, [weights[i] for i in part]) else [[i] for i in part]:
            width = sum(tensor_of(weights[i]).get_shape()[0] for i in chosen)
            _launch(
                d,
                x,
                [weights[i] for i in chosen],
                [biases[i] for i in chosen] if biases else [],
                out.columns(start, width),
                None if residual is None else residual.columns(start, width),
                act,
                rows,
            )
            start += width


def gated_product(
    d: Draft, x: View, weights: Sequence[SSAValue], biases: Sequence[SSAValue], op: SiluMulOp | GeluMulOp
) -> bool:
    """op(x gate^T, x up^T) in one launch, where there is a kernel; `weights` are gate and up. Else False."""
    if any(_kind(weight) is not None for weight in weights):
        return False
    dtype, out = _DTYPES[x.type], d.make(op.result)
    d.done.add(op)
    places: Places = {
        "x": x,
        "w": d.weight(values(weights, dtype)),
        "bias": d.weight(values(biases, dtype)) if biases else null(x.type),
        "out": out,
    }
    scalars: Scalars = {"rows": "T", "N": out.width, "K": x.width, "x_stride": x.stride, "out_stride": out.stride}
    constants: Constants = {"ACTIVATION": activation(op).name, "HAS_BIAS": bool(biases), "EVEN_K": even_k(x.width)}
    d.launch("gemm_gated", places, scalars, constants)
    return True


@dataclass(frozen=True)
class _Matrix:
    """A kernel with what it is given of the matrix."""

    kernel: str
    places: dict[str, Place]
    constants: dict[str, int]


def _launch(
    d: Draft,
    x: View,
    weights: Sequence[SSAValue],
    biases: Sequence[SSAValue],
    out: View,
    residual: View | None,
    act: Activation,
    rows: str,
) -> None:
    dtype = _DTYPES[x.type]
    matrix = _matrix(d, weights, dtype)
    places: Places = {
        "x": x,
        "bias": d.weight(values(biases, dtype)) if biases else null(x.type),
        "residual": residual or null(out.type),
        "out": out,
        **matrix.places,
    }
    scalars: Scalars = {
        "rows": rows,
        "N": out.width,
        "K": x.width,
        "x_stride": x.stride,
        "residual_stride": residual.stride if residual else 0,
        "out_stride": out.stride,
        "factor": act.factor,
    }
    constants: Constants = {
        "HAS_BIAS": bool(biases),
        "HAS_RESIDUAL": residual is not None,
        "ACTIVATION": act.name,
        "EVEN_K": even_k(x.width),
        **matrix.constants,
    }
    d.launch(matrix.kernel, places, scalars, constants, rows=rows)


def _kind(weight: SSAValue) -> QuantType | None:
    kind = tensor_of(weight).element_type
    return kind if isinstance(kind, QuantType) else None


def _stacks(kind: QuantType | None, weights: Sequence[SSAValue]) -> bool:
    """Whether one matrix can hold them: no block of rows with one scale reaches from one tensor into the next."""
    rows = 1 if kind is None else kind.block[0]
    return rows < 2 or all(shape[0] % rows == 0 for shape in _shapes(weights[:-1]))


def _matrix(d: Draft, weights: Sequence[SSAValue], dtype: str) -> _Matrix:
    kind = _kind(weights[0])
    shapes = _shapes(weights)
    # No kernel knows a scale of scales, or groups of columns that are no neighbours.
    plain = kind is not None and not (kind.has_outer or kind.is_ordered)
    found = None if kind is None or not plain else _fp8(kind, d.arch, len(weights)) or _integer(kind)
    if kind is None or found is None:
        return _Matrix("gemm", {"w": d.weight(values(weights, dtype))}, {})
    names, text = _names(weights), str(kind)

    def part(what: Part, held: str, block: tuple[int, int] | None = None) -> Place:
        return d.weight(Weight(names, shapes, held, what, block, found.code, text))

    codes, numbers = part("codes", found.code), part("scale", found.scale, found.block)
    if found.kernel == "gemm_fp8":
        constants = {"SCALE_N": found.block[0], "SCALE_K": found.block[1]}
        return _Matrix(found.kernel, {"w": codes, "scale": numbers}, constants)
    zeros = part("zero", found.scale, found.block) if found.zeros else null(TYPES[found.scale])
    places = {"w": codes, "scales": numbers, "zeros": zeros}
    return _Matrix(found.kernel, places, {"GROUP": found.block[1], "HAS_ZEROS": found.zeros})


def stack(d: Draft, tensors: Sequence[SSAValue], dtype: str) -> tuple[dict[str, Place], Constants]:
    """What products of experts are given of stacks of matrices, one behind the other: places, and what says how they
    are held. Stacks of one format are held as they are stored, where the kernels know it."""
    kinds = {_kind(tensor) for tensor in tensors}
    kind = kinds.pop() if len(kinds) == 1 else None
    found = None if kind is None or kind.has_outer or kind.is_ordered else _e2m1(kind) or _stacked(kind, d.arch)
    if kind is None or found is None:
        none: Constants = {"CODES": "none", "PACK": 1, "SCALE_N": 0, "GROUP": 0, "HAS_ZEROS": False}
        return {"w": d.weight(values(tensors, dtype)), "scales": null("fp32"), "zeros": null("fp32")}, none
    names, shapes, text = _names(tensors), _shapes(tensors), str(kind)

    def part(what: Part, held: str, block: tuple[int, int] | None = None) -> Place:
        return d.weight(Weight(names, shapes, held, what, block, found.code, text))

    packed = found.code in ("u4", "e2m1")
    places = {
        "w": part("codes", "u4" if packed else found.code),
        "scales": part("scale", found.scale, found.block),
        "zeros": part("zero", found.scale, found.block) if found.zeros else null(TYPES[found.scale]),
    }
    codes = found.code if found.code in ("i8", "u4", "e2m1") else "fp8"
    rows, columns = found.block
    return places, {
        "CODES": codes,
        "PACK": 2 if packed else 1,
        "SCALE_N": rows,
        "GROUP": columns,
        "HAS_ZEROS": found.zeros,
    }


def _e2m1(kind: QuantType) -> _Format | None:
    """Microscaling FP4. Powers of two are exact in bfloat16."""
    alone = kind.zero_dtype is None and not kind.zero_point and kind.minimum_dtype is None
    if kind.code_name != "e2m1" or not alone or not _power(kind.block[1]):
        return None
    return _Format("", "e2m1", "bfloat16" if kind.scale_dtype == "e8m0" else "float32", kind.block)


def _stacked(kind: QuantType, arch: Arch) -> _Format | None:
    """Every matrix has its own scales: those of one format stay as they are."""
    found = _fp8(kind, arch, 1)
    return found if found is not None and _power(found.block[1]) else _integer(kind)


def _power(group: int) -> bool:
    """Whether a group is a whole row, or a power of two that steps along K can be made of."""
    return group == 0 or (group >= _LEAST_GROUP and group & (group - 1) == 0)


@dataclass(frozen=True)
class _Format:
    """How a quantised matrix is handed over: its codes, the dtype of its scales and zeros, and their layout."""

    kernel: str
    code: str
    scale: str
    block: tuple[int, int]
    zeros: bool = False


def _fp8(kind: QuantType, arch: Arch, count: int) -> _Format | None:
    """`gemm_fp8`, where the architecture has this flavour of e4m3, or the other one for e4m3fn."""
    rows, columns = kind.block
    if columns % _LEAST_SCALE_K:
        return None
    flavours = {"e4m3fn": ("e4m3fn", "e4m3fnuz"), "e4m3fnuz": ("e4m3fnuz",)}.get(kind.code_name, ())
    code = next((name for name in flavours if TYPES[name] in arch.fp8), None)
    # Each tensor has a scale of its own: in a stack it becomes that of every row.
    block = (1, 0) if (rows, columns) == (0, 0) and count > 1 else (rows, columns)
    return None if code is None else _Format("gemm_fp8", code, "float32", block)


def _integer(kind: QuantType) -> _Format | None:
    """`gemm_int8` and `gemm_int4`: one scale for every row and group."""
    kernel = {"i8": "gemm_int8", "u4": "gemm_int4"}.get(kind.code_name)
    group = kind.block[1]
    if kernel is None or not _power(group) or kind.minimum_dtype is not None:
        return None
    known = kind.zero_dtype is None and (kind.zero_point or 0) == (_MIDDLE if kind.code_name == "u4" else 0)
    exact = kind.scale_dtype == "float16" and kind.zero_dtype in (None, "float16")
    return _Format(kernel, kind.code_name, "float16" if exact else "float32", (1, group), not known)
