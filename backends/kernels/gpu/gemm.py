"""The matrix products: what each kernel takes. The code is in `sources/gemm.py` and `sources/gemm_quant.py`.

All compute out = x w^T (+ bias) (+ residual), summed in float32 and rounded once at the store. x is (rows, K) with row
stride `x_stride`, w is (N, K) row-major without padding, out is (rows, N) with row stride `out_stride`; strides are in
elements. Bias has N values in x's type. out may be wider than x (logits).

Words in the expressions: `<pointer>_bytes` is the size of one element of that pointer in bytes.

Constants:
    EVEN_K: K is a multiple of 128, the largest BLOCK_K there is: the loop over K then needs no mask. False is right for
        every K, and slower. Set it from K, whatever the tile.
    GROUP: how many values along K share a scale; a power of two from 16, or 0: one scale per row of w.
    SCALE_N, SCALE_K: rows and columns of w that share a scale; SCALE_N 0: one scale for all of w (SCALE_K is 0 too);
        SCALE_K 0: one scale for a whole row. SCALE_K is a multiple of 128.
    X_GROUP: how many values along K of x share a scale (a multiple of 128), or 0: one scale per row of x.
"""

from __future__ import annotations

from typing import Literal

from plait.backends.kernels.gpu.kernel import Kernel

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
}
_GATED_SCALARS = {name: kind for name, kind in _SCALARS.items() if name != "residual_stride"}
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
        constants=(*constants, "HAS_BIAS", "HAS_RESIDUAL", "EVEN_K"),
        tile=_TILE,
        grid=_GRID,
        nature="multiply",
        written=("out",),
        flops=_FLOPS,
        bytes=f"{_ENDS} + {weight_bytes}",
    )


GEMM = _product("gemm", _PLAIN, ("x", "w"), (), "N * K * w_bytes")

#: w is (2N, K): gate rows, then up rows; bias too. out = act(x gate^T) * (x up^T); ACTIVATION: silu, gelu or gelu_tanh.
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
