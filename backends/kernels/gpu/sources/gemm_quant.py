"""Matrix products with quantised weights. Arguments: `plait.backends.kernels.gpu.gemm`."""

import triton
import triton.language as tl

from plait.backends.kernels.gpu.sources.gemm import finish, load_k, multiply, origin, within

# ruff: noqa: N803


@triton.jit
def load_scales(start, done, K, GROUP: tl.constexpr, BLOCK_K: tl.constexpr):
    """The scales (rows, groups in BLOCK_K) of the columns from `done` on; `start` (rows, 1) points to a row's first."""
    if BLOCK_K <= GROUP:
        # Past the end only when loading ahead.
        return tl.load(start + done // GROUP, mask=done < K, other=0.0).to(tl.float32)
    groups = done // GROUP + tl.arange(0, BLOCK_K // GROUP)[None, :]
    return tl.load(start + groups, mask=groups * GROUP < K, other=0.0).to(tl.float32)


@triton.jit
def spread(scales, GROUP: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr):
    """(BLOCK_N, groups) to what broadcasts with (BLOCK_N, BLOCK_K)."""
    if BLOCK_K <= GROUP:
        return scales
    wide = tl.broadcast_to(scales[:, :, None], (BLOCK_N, BLOCK_K // GROUP, GROUP))
    return tl.reshape(wide, (BLOCK_N, BLOCK_K))


@triton.jit
def integers(
    x,
    w,
    scales,
    zeros,
    bias,
    residual,
    out,
    rows,
    N,
    K,
    x_stride,
    residual_stride,
    out_stride,
    GROUP: tl.constexpr,
    HAS_ZEROS: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    HAS_RESIDUAL: tl.constexpr,
    EVEN_K: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    GROUP_M: tl.constexpr,
    XCDS: tl.constexpr,
    PACK: tl.constexpr,
    ZERO: tl.constexpr,
):
    """out = x ((codes - zero) * scale)^T + bias + residual. PACK codes share a byte; ZERO is for want of zeros."""
    row, column = origin(rows, N, BLOCK_M, BLOCK_N, GROUP_M, XCDS)
    n = within(column, N, BLOCK_N)[:, None]
    x_tile = x + row.to(tl.int64) * x_stride + within(row, rows, BLOCK_M)[:, None] * x_stride
    x_tile += tl.arange(0, BLOCK_K)[None, :]
    row_bytes = K // PACK
    w_tile = w + column.to(tl.int64) * row_bytes + n * row_bytes + tl.arange(0, BLOCK_K // PACK)[None, :]
    # One scale per row is one group of a row, whatever K.
    per_row = tl.cdiv(K, GROUP) if GROUP else 1
    span: tl.constexpr = GROUP if GROUP else BLOCK_K
    scale_row = scales + column.to(tl.int64) * per_row + n * per_row
    zero_row = zeros + column.to(tl.int64) * per_row + n * per_row
    # Too narrow for asynchronous copies: a step's scales are loaded a step ahead by hand.
    next_scale = load_scales(scale_row, 0, K, span, BLOCK_K)
    if HAS_ZEROS:
        next_zero = load_scales(zero_row, 0, K, span, BLOCK_K)
    acc = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for done in tl.range(0, K, BLOCK_K):
        x_part = load_k(x_tile, K - done, BLOCK_K, EVEN_K)
        codes = load_k(w_tile, (K - done) // PACK, BLOCK_K // PACK, EVEN_K)
        if PACK == 2:
            codes = tl.interleave(codes & 15, (codes >> 4) & 15)
        scale = spread(next_scale, span, BLOCK_N, BLOCK_K)
        zero = spread(next_zero, span, BLOCK_N, BLOCK_K) if HAS_ZEROS else ZERO
        if GROUP:
            next_scale = load_scales(scale_row, done + BLOCK_K, K, span, BLOCK_K)
            if HAS_ZEROS:
                next_zero = load_scales(zero_row, done + BLOCK_K, K, span, BLOCK_K)
        w_part = ((codes.to(tl.float32) - zero) * scale).to(x.dtype.element_ty)
        acc = multiply(x_part, w_part, acc)
        x_tile += BLOCK_K
        w_tile += BLOCK_K // PACK
    finish(
        acc, bias, residual, out, row, column, rows, N, residual_stride, out_stride,
        HAS_BIAS, HAS_RESIDUAL, BLOCK_M, BLOCK_N,
    )  # fmt: skip


@triton.jit
def gemm_int8(
    x,
    w,
    scales,
    zeros,
    bias,
    residual,
    out,
    rows,
    N,
    K,
    x_stride,
    residual_stride,
    out_stride,
    GROUP: tl.constexpr,
    HAS_ZEROS: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    HAS_RESIDUAL: tl.constexpr,
    EVEN_K: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    GROUP_M: tl.constexpr,
    XCDS: tl.constexpr,
):
    """out = x ((w - zero) * scale)^T + bias + residual."""
    integers(
        x, w, scales, zeros, bias, residual, out, rows, N, K, x_stride, residual_stride, out_stride,
        GROUP, HAS_ZEROS, HAS_BIAS, HAS_RESIDUAL, EVEN_K, BLOCK_M, BLOCK_N, BLOCK_K, GROUP_M, XCDS, 1, 0.0,
    )  # fmt: skip


@triton.jit
def gemm_int4(
    x,
    w,
    scales,
    zeros,
    bias,
    residual,
    out,
    rows,
    N,
    K,
    x_stride,
    residual_stride,
    out_stride,
    GROUP: tl.constexpr,
    HAS_ZEROS: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    HAS_RESIDUAL: tl.constexpr,
    EVEN_K: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    GROUP_M: tl.constexpr,
    XCDS: tl.constexpr,
):
    """out = x ((codes of w - zero) * scale)^T + bias + residual, two codes in a byte of w, the lower first."""
    integers(
        x, w, scales, zeros, bias, residual, out, rows, N, K, x_stride, residual_stride, out_stride,
        GROUP, HAS_ZEROS, HAS_BIAS, HAS_RESIDUAL, EVEN_K, BLOCK_M, BLOCK_N, BLOCK_K, GROUP_M, XCDS, 2, 8.0,
    )  # fmt: skip


@triton.jit
def scale_rows(scale, column, n, K, SCALE_N: tl.constexpr, SCALE_K: tl.constexpr):
    """Where the scales of the rows column + n of a weight begin, of n's shape; SCALE_N is not 0."""
    return scale + (column + n) // SCALE_N * (tl.cdiv(K, SCALE_K) if SCALE_K else 1)


@triton.jit
def gemm_fp8(
    x,
    w,
    scale,
    bias,
    residual,
    out,
    rows,
    N,
    K,
    x_stride,
    residual_stride,
    out_stride,
    SCALE_N: tl.constexpr,
    SCALE_K: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    HAS_RESIDUAL: tl.constexpr,
    EVEN_K: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    GROUP_M: tl.constexpr,
    XCDS: tl.constexpr,
):
    """out = x (w * scale)^T + bias + residual."""
    row, column = origin(rows, N, BLOCK_M, BLOCK_N, GROUP_M, XCDS)
    n = within(column, N, BLOCK_N)
    k = tl.arange(0, BLOCK_K)[None, :]
    x_tile = x + row.to(tl.int64) * x_stride + within(row, rows, BLOCK_M)[:, None] * x_stride + k
    w_tile = w + column.to(tl.int64) * K + n[:, None] * K + k
    if SCALE_K:
        scale_row = scale_rows(scale, column, n[:, None], K, SCALE_N, SCALE_K)
        next_scale = tl.load(scale_row)
    acc = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for done in tl.range(0, K, BLOCK_K):
        x_part = load_k(x_tile, K - done, BLOCK_K, EVEN_K)
        codes = load_k(w_tile, K - done, BLOCK_K, EVEN_K)
        if SCALE_K:
            w_part = (codes.to(tl.float32) * next_scale).to(x.dtype.element_ty)
            ahead = done + BLOCK_K
            next_scale = tl.load(scale_row + ahead // SCALE_K, mask=ahead < K, other=0.0)
        else:
            w_part = codes.to(x.dtype.element_ty)
        acc = multiply(x_part, w_part, acc)
        x_tile += BLOCK_K
        w_tile += BLOCK_K
    if not SCALE_N:
        acc *= tl.load(scale)
    elif not SCALE_K:
        acc *= tl.load(scale_rows(scale, column, n[None, :], K, SCALE_N, SCALE_K))
    finish(
        acc, bias, residual, out, row, column, rows, N, residual_stride, out_stride,
        HAS_BIAS, HAS_RESIDUAL, BLOCK_M, BLOCK_N,
    )  # fmt: skip


@triton.jit
def gemm_fp8_fp8(
    x,
    x_scale,
    w,
    w_scale,
    bias,
    residual,
    out,
    rows,
    N,
    K,
    x_stride,
    residual_stride,
    out_stride,
    X_GROUP: tl.constexpr,
    SCALE_N: tl.constexpr,
    SCALE_K: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    HAS_RESIDUAL: tl.constexpr,
    EVEN_K: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    GROUP_M: tl.constexpr,
    XCDS: tl.constexpr,
):
    """out = (x * x_scale) (w * w_scale)^T + bias + residual, multiplied in fp8: scales multiply sums, never codes."""
    row, column = origin(rows, N, BLOCK_M, BLOCK_N, GROUP_M, XCDS)
    m, n = within(row, rows, BLOCK_M), within(column, N, BLOCK_N)
    k = tl.arange(0, BLOCK_K)[None, :]
    x_tile = x + row.to(tl.int64) * x_stride + m[:, None] * x_stride + k
    w_tile = w + column.to(tl.int64) * K + n[:, None] * K + k
    x_scales = x_scale + (row.to(tl.int64) + m[:, None]) * (tl.cdiv(K, X_GROUP) if X_GROUP else 1)
    acc = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for done in tl.range(0, K, BLOCK_K):
        x_part = load_k(x_tile, K - done, BLOCK_K, EVEN_K)
        w_part = load_k(w_tile, K - done, BLOCK_K, EVEN_K)
        # NVIDIA's sums of fp8 products are short of float32; every BLOCK_K products they are added to a full one.
        part = tl.dot(x_part, tl.trans(w_part), out_dtype=tl.float32, max_num_imprecise_acc=BLOCK_K)
        if X_GROUP:
            part *= tl.load(x_scales + done // X_GROUP)
        if SCALE_K:
            part *= tl.load(scale_rows(w_scale, column, n[None, :], K, SCALE_N, SCALE_K) + done // SCALE_K)
        acc += part
        x_tile += BLOCK_K
        w_tile += BLOCK_K
    if not X_GROUP:
        acc *= tl.load(x_scales)
    if not SCALE_N:
        acc *= tl.load(w_scale)
    elif not SCALE_K:
        acc *= tl.load(scale_rows(w_scale, column, n[None, :], K, SCALE_N, SCALE_K))
    finish(
        acc, bias, residual, out, row, column, rows, N, residual_stride, out_stride,
        HAS_BIAS, HAS_RESIDUAL, BLOCK_M, BLOCK_N,
    )  # fmt: skip


@triton.jit
def scale_of(largest, MAX: tl.constexpr):
    """The scale that brings `largest` to MAX; where that is no normal number, the smallest that is."""
    return tl.maximum(tl.div_rn(largest, MAX), 1.1754943508222875e-38)


@triton.jit
def quantize_rows(
    x,
    out,
    scale,
    rows,
    K,
    x_stride,
    out_stride,
    GROUP: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """out = x / scale, clamped to what fp8 holds; scale = largest magnitude / largest fp8, per GROUP values or row."""
    MAX: tl.constexpr = 240.0 if out.dtype.element_ty == tl.float8e4b8 else 448.0  # noqa: N806
    row = tl.program_id(0).to(tl.int64)
    x += row * x_stride
    out += row * out_stride
    if GROUP:
        k = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
        values = tl.load(x + k, mask=k < K, other=0.0).to(tl.float32)
        grouped = tl.reshape(values, (BLOCK // GROUP, GROUP))
        scales = scale_of(tl.max(tl.abs(grouped), axis=1), MAX)
        codes = tl.clamp(tl.div_rn(grouped, scales[:, None]), -MAX, MAX)
        tl.store(out + k, tl.reshape(codes, (BLOCK,)).to(out.dtype.element_ty), mask=k < K)
        group = tl.program_id(1) * (BLOCK // GROUP) + tl.arange(0, BLOCK // GROUP)
        tl.store(scale + row * tl.cdiv(K, GROUP) + group, scales, mask=group * GROUP < K)
    else:
        largest = tl.zeros((BLOCK,), tl.float32)
        for done in tl.range(0, K, BLOCK):
            k = done + tl.arange(0, BLOCK)
            largest = tl.maximum(largest, tl.abs(tl.load(x + k, mask=k < K, other=0.0).to(tl.float32)))
        row_scale = scale_of(tl.max(largest, axis=0), MAX)
        tl.store(scale + row, row_scale)
        for done in tl.range(0, K, BLOCK):
            k = done + tl.arange(0, BLOCK)
            values = tl.load(x + k, mask=k < K, other=0.0).to(tl.float32)
            tl.store(out + k, tl.clamp(tl.div_rn(values, row_scale), -MAX, MAX).to(out.dtype.element_ty), mask=k < K)
