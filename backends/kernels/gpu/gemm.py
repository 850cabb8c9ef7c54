"""The matrix products: what each kernel takes. The code is in `sources/gemm.py` and `sources/gemm_quant.py`.

All compute out = act(x w^T (+ bias)) (+ residual), summed in float32 and rounded once at the store. x is (rows, K) with
row stride `x_stride`, w is (N, K) row-major without padding, out is (rows, N) with row stride `out_stride`; strides are
in elements. Bias has N values in x's type. out may be wider than x (logits).

Words in the expressions: `<pointer>_bytes` is the size of one element of that pointer in bytes.

Constants:
    ACTIVATION: what is done to the sum: none; scale: it is multiplied by `factor`; gelu or gelu_tanh. Of `gemm_gated`
        what is done to the gate: silu, gelu or gelu_tanh.
    EVEN_K: the largest power of two that divides K, at most 256 (`even_k`): where BLOCK_K is no more, the loop over K
        needs no mask. Any smaller power of two is right too, and slower.
    GROUP: how many values along K share a scale; a power of two from 16, or 0: one scale per row of w.
    SCALE_N, SCALE_K: rows and columns of w that share a scale; SCALE_N 0: one scale for all of w (SCALE_K is 0 too);
        SCALE_K 0: one scale for a whole row.
    X_GROUP: how many values along K of x share a scale, or 0: one scale per row of x.

BLOCK_K divides SCALE_K and X_GROUP (so these are multiples of 32); it divides or is a multiple of GROUP. BLOCK_N counts
columns of out. XCDS is the number of chiplets that share a launch.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import gcd
from typing import Literal

from plait.backends.kernels.gpu.archs import Arch
from plait.backends.kernels.gpu.kernel import Constant, Kernel, Tile

_SOURCES = "plait.backends.kernels.gpu.sources"
_PLAIN = f"{_SOURCES}.gemm"
_QUANT = f"{_SOURCES}.gemm_quant"

_TILE = ("BLOCK_M", "BLOCK_N", "BLOCK_K", "GROUP_M", "XCDS")
_SCALARS: dict[str, Literal["i32", "f32"]] = {
    "rows": "i32",
    "N": "i32",
    "K": "i32",
    "x_stride": "i32",
    "residual_stride": "i32",
    "out_stride": "i32",
    "factor": "f32",
}
_GATED_SCALARS = {name: kind for name, kind in _SCALARS.items() if name not in ("residual_stride", "factor")}
_GRID = ("cdiv(rows, BLOCK_M) * cdiv(N, BLOCK_N)", "1", "1")
_FLOPS = "2 * rows * N * K"
_ENDS = "rows * K * x_bytes + rows * N * out_bytes * (1 + HAS_RESIDUAL)"


def _product(
    name: str, module: str, pointers: tuple[str, ...], constants: tuple[str, ...], weight_bytes: str
) -> Kernel:
    return Kernel(
        name=name,
        source=f"{module}:{name}",
        pointers=(*pointers, "bias", "residual", "out"),
        scalars=_SCALARS,
        constants=(*constants, "HAS_BIAS", "HAS_RESIDUAL", "ACTIVATION", "EVEN_K"),
        tile=_TILE,
        grid=_GRID,
        nature="multiply",
        written=("out",),
        flops=_FLOPS,
        bytes=f"{_ENDS} + {weight_bytes}",
    )


GEMM = _product("gemm", _PLAIN, ("x", "w"), (), "N * K * w_bytes")

#: w is (2N, K): gate rows, then up rows; bias too. out = act(x gate^T) * (x up^T).
GEMM_GATED = Kernel(
    name="gemm_gated",
    source=f"{_PLAIN}:gemm_gated",
    pointers=("x", "w", "bias", "out"),
    scalars=_GATED_SCALARS,
    constants=("ACTIVATION", "HAS_BIAS", "EVEN_K"),
    tile=_TILE,
    grid=_GRID,
    nature="multiply",
    written=("out",),
    flops="4 * rows * N * K",
    bytes="rows * K * x_bytes + rows * N * out_bytes + 2 * N * K * w_bytes",
)


def _parts(size: str) -> str:
    """How many scales cover K where each covers `size` values; 1 where size is 0."""
    return f"max(1, min(1, {size}) * cdiv(K, max(1, {size})))"


_GROUPS = f"N * {_parts('GROUP')} * scales_bytes * (1 + HAS_ZEROS)"

#: Weight only: value = (code - zero) * scale in float32, rounded to x's type. w is i8 (N, K). scales and zeros are
#: (N, cdiv(K, GROUP)) of one type (x's, fp16 or fp32); without HAS_ZEROS zero is 0.
GEMM_INT8 = _product("gemm_int8", _QUANT, ("x", "w", "scales", "zeros"), ("GROUP", "HAS_ZEROS"), f"N * K + {_GROUPS}")

#: As gemm_int8, with w i8 (N, K / 2): byte j of a row holds code 2j in its low 4 bits, code 2j + 1 in its high 4 bits.
#: Codes are 0 to 15; without HAS_ZEROS zero is 8. K is even.
GEMM_INT4 = _product(
    "gemm_int4", _QUANT, ("x", "w", "scales", "zeros"), ("GROUP", "HAS_ZEROS"), f"N * K // 2 + {_GROUPS}"
)

#: Weight only: w is fp8e4nv or fp8e4b8 (N, K), scale is fp32 (cdiv(N, SCALE_N), cdiv(K, SCALE_K)). value = code * scale
#: in float32, rounded to x's type; where SCALE_K is 0 the sum is scaled instead, without that rounding.
GEMM_FP8 = _product("gemm_fp8", _QUANT, ("x", "w", "scale"), ("SCALE_N", "SCALE_K"), "N * K")

#: x and w are fp8 of one flavour, the device's own. x_scale is fp32 (rows, cdiv(K, X_GROUP)), w_scale as gemm_fp8's
#: scale. bias and residual are of out's type.
GEMM_FP8_FP8 = _product(
    "gemm_fp8_fp8", _QUANT, ("x", "x_scale", "w", "w_scale"), ("X_GROUP", "SCALE_N", "SCALE_K"), "N * K"
)

#: x (rows, K) to fp8 of out's type with one fp32 scale per row, (rows,), or per GROUP values of a row,
#: (rows, cdiv(K, GROUP)): scale = largest magnitude / largest fp8, at least the smallest normal; out = x / scale.
QUANTIZE_ROWS = Kernel(
    name="quantize_rows",
    source=f"{_QUANT}:quantize_rows",
    pointers=("x", "out", "scale"),
    scalars={"rows": "i32", "K": "i32", "x_stride": "i32", "out_stride": "i32"},
    constants=("GROUP",),
    tile=("BLOCK",),
    grid=("rows", "max(1, min(1, GROUP) * cdiv(K, BLOCK))", "1"),
    nature="stream",
    written=("out", "scale"),
    flops="3 * rows * K",
    bytes=f"rows * K * (x_bytes + 1) + rows * {_parts('GROUP')} * 4",
)

KERNELS = (GEMM, GEMM_GATED, GEMM_INT8, GEMM_INT4, GEMM_FP8, GEMM_FP8_FP8, QUANTIZE_ROWS)


def even_k(k: int) -> int:
    """The constant EVEN_K for this K."""
    return gcd(k, 256)


@dataclass(frozen=True)
class _Shape:
    """A tile for 16-bit x, and how many warps and stages it has."""

    m: int
    n: int
    k: int
    warps: int
    stages: int


@dataclass(frozen=True)
class _Family:
    """Tiles worth trying by how many rows there are: at most 16, at most 64, more."""

    few: tuple[_Shape, ...]
    some: tuple[_Shape, ...]
    many: tuple[_Shape, ...]


#: With few rows the time is that of reading w: narrow tiles, so that every unit has one, and deep pipelines. With many
#: it is that of the matrix units: the largest tiles that registers hold, and smaller ones for launches of few tiles.
_AMPERE = _Family(
    few=(_Shape(16, 16, 256, 2, 4), _Shape(16, 32, 128, 4, 4), _Shape(16, 64, 128, 4, 4)),
    some=(_Shape(32, 64, 128, 4, 3), _Shape(64, 64, 64, 4, 3)),
    many=(
        _Shape(64, 128, 32, 4, 4),
        _Shape(128, 128, 32, 4, 4),
        _Shape(128, 128, 64, 8, 3),
        _Shape(128, 256, 32, 8, 3),
    ),
)
_HOPPER = _Family(
    few=(
        _Shape(16, 16, 256, 2, 5),
        _Shape(16, 32, 128, 4, 6),
        _Shape(16, 32, 256, 4, 4),
        _Shape(16, 64, 128, 4, 4),
    ),
    some=(_Shape(32, 32, 128, 4, 5), _Shape(64, 32, 128, 4, 4), _Shape(64, 64, 128, 4, 4)),
    many=(_Shape(64, 128, 64, 4, 4), _Shape(128, 128, 64, 8, 3), _Shape(128, 256, 64, 8, 4)),
)
_CDNA = _Family(
    few=(_Shape(16, 16, 256, 1, 2), _Shape(16, 32, 256, 2, 2), _Shape(16, 64, 128, 4, 2)),
    some=(_Shape(32, 32, 128, 2, 2), _Shape(32, 64, 128, 4, 2), _Shape(64, 64, 64, 4, 2)),
    many=(
        _Shape(64, 128, 64, 4, 2), _Shape(128, 128, 64, 4, 2), _Shape(128, 128, 64, 8, 2), _Shape(256, 128, 64, 8, 2),
        _Shape(256, 256, 64, 8, 2),
    ),
)  # fmt: skip
_RDNA = _Family(
    few=(_Shape(16, 16, 128, 1, 2), _Shape(16, 32, 128, 2, 2), _Shape(16, 64, 64, 4, 2)),
    some=(_Shape(32, 64, 64, 4, 2), _Shape(64, 64, 32, 4, 2)),
    many=(_Shape(64, 128, 32, 4, 2), _Shape(128, 64, 32, 4, 2), _Shape(128, 128, 32, 8, 2)),
)
#: By what instructions that use the matrix units start with.
_FAMILIES = {
    "mma.sync": _AMPERE,
    "wgmma.mma_async": _HOPPER,
    "tcgen05.mma": _HOPPER,
    "v_mfma_": _CDNA,
    "v_wmma_": _RDNA,
}

#: Products of float32 are exact, outside of NVIDIA's matrix units: tiles that registers hold.
_FLOAT32 = _Family(
    few=(_Shape(16, 32, 128, 4, 3), _Shape(16, 64, 64, 4, 3)),
    some=(_Shape(32, 64, 64, 4, 3), _Shape(64, 64, 64, 4, 3)),
    many=(_Shape(64, 64, 64, 8, 3), _Shape(128, 64, 64, 8, 3)),
)

_TYPE_BITS = {"fp32": 32, "fp16": 16, "bf16": 16, "i8": 8, "fp8e4nv": 8, "fp8e4b8": 8, "fp8e5": 8}


def candidates(
    kernel: Kernel, types: Mapping[str, str], constants: Mapping[str, Constant], arch: Arch, rows: int | None = None
) -> tuple[Tile, ...]:
    """Tiles worth compiling for launches of at most `rows` rows (None: any number).

    Their shared memory is what the loops need by arithmetic; what the compiler says in the end may be more.
    """
    if kernel is QUANTIZE_ROWS:
        # A thread loads 16 bytes at once where x is of 16 bits.
        return tuple(Tile({"BLOCK": 8 * arch.warp * warps}, num_warps=warps) for warps in (4, 8))
    family = _FLOAT32 if types["x"] == "fp32" else _FAMILIES[arch.matrix[0]]
    shapes = (
        *(family.few if rows is None or rows <= 16 else ()),
        *(family.some if rows is None or 16 < rows <= 64 else ()),
        *(family.many if rows is None or rows > 64 else ()),
    )
    # What is done to weights or to partial sums needs the registers that the largest tiles have none left of.
    most_sums = 128 if kernel in (GEMM, GEMM_GATED) else 64
    return tuple(
        _tile(kernel, shape, types, constants, arch)
        for shape in shapes
        if shape.m * shape.n <= most_sums * shape.warps * arch.warp
    )


def _tile(
    kernel: Kernel, shape: _Shape, types: Mapping[str, str], constants: Mapping[str, Constant], arch: Arch
) -> Tile:
    x_bits, w_bits = _TYPE_BITS[types["x"]], _TYPE_BITS[types["w"]] // (2 if kernel is GEMM_INT4 else 1)
    # As many bytes of x in a step, whatever its type; no mask where steps need not be short for that.
    k = min(256, shape.k * 16 // x_bits)
    k = gcd(k, int(constants.get("SCALE_K", 0)), int(constants.get("X_GROUP", 0)))
    even = int(constants["EVEN_K"])
    k = min(k, even) if even >= 64 else k
    n = max(16, shape.n // 2) if kernel is GEMM_GATED else shape.n
    w_rows = 2 * n if kernel is GEMM_GATED else n
    step_bits = k * (shape.m * x_bits + w_rows * w_bits)
    # Weights of another type than x are widened through shared memory.
    widened_bits = 0 if types["w"] == types["x"] else k * w_rows * x_bits
    fitting = (8 * arch.shared_block_bytes - widened_bits) // step_bits
    return Tile(
        {"BLOCK_M": shape.m, "BLOCK_N": n, "BLOCK_K": k, "GROUP_M": 8, "XCDS": arch.chiplets},
        num_warps=shape.warps,
        num_stages=max(2, min(shape.stages, fitting)),
    )
