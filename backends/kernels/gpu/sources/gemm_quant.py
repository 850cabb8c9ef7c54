"""Matrix products with quantised weights. Arguments: `plait.backends.kernels.gpu.gemm`."""

import triton
import triton.language as tl

from plait.backends.kernels.gpu.sources.gemm import finish, load_k, load_x, multiply, origin, within

# ruff: noqa: N803, N806


# A column of scales is a vector until it is used: loaded as (BLOCK_N, 1) it would take the layout of what it
# multiplies, in which a thread holds, and loads, one number as often as it uses it. And scales are too narrow for
# asynchronous copies: those of a step are loaded a step ahead by hand.


@triton.jit
def load_scales(start, done, K, GROUP: tl.constexpr, BLOCK_K: tl.constexpr):
    """The scales of BLOCK_K columns from `done` on, 0 past K: (rows,) or (rows, groups). start: (rows,), the first."""
    if BLOCK_K > GROUP:
        groups = done // GROUP + tl.arange(0, BLOCK_K // GROUP)[None, :]
        scales = tl.load(start[:, None] + groups, mask=groups * GROUP < K, other=0.0)
    else:
        scales = tl.load(start + done // GROUP, mask=done < K, other=0.0)
    return scales.to(tl.float32)


@triton.jit
def spread(scales, GROUP: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr):
    """What `load_scales` gave to what broadcasts with (BLOCK_N, BLOCK_K)."""
    if BLOCK_K > GROUP:
        wide = tl.broadcast_to(scales[:, :, None], (BLOCK_N, BLOCK_K // GROUP, GROUP))
        spread = tl.reshape(wide, (BLOCK_N, BLOCK_K))
    else:
        spread = scales[:, None]
    return spread


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
    factor,
    GROUP: tl.constexpr,
    HAS_ZEROS: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    HAS_RESIDUAL: tl.constexpr,
    ACTIVATION: tl.constexpr,
    EVEN_K: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    GROUP_M: tl.constexpr,
    XCDS: tl.constexpr,
    PACK: tl.constexpr,
    ZERO: tl.constexpr,
):
    """out = act(x ((codes - zero) * scale)^T + bias) + residual. PACK codes share a byte; ZERO is for want of zeros."""
    row, column = origin(rows, N, BLOCK_M, BLOCK_N, GROUP_M, XCDS)
    n = within(column, N, BLOCK_N)
    x_tile = x + row.to(tl.int64) * x_stride + within(row, rows, BLOCK_M)[:, None] * x_stride
    x_tile += tl.arange(0, BLOCK_K)[None, :]
    row_bytes = K // PACK
    if EVEN_K >= 32:
        row_bytes = tl.multiple_of(row_bytes, 16)
    w_tile = w + column.to(tl.int64) * row_bytes + n[:, None] * row_bytes + tl.arange(0, BLOCK_K // PACK)[None, :]
    # One scale per row is one group of a row, whatever K.
    per_row = tl.cdiv(K, GROUP) if GROUP else 1
    span: tl.constexpr = GROUP if GROUP else BLOCK_K
    tl.static_assert(span % BLOCK_K == 0 or BLOCK_K % span == 0, "a step is whole groups, or a part of one")
    scale_row = scales + column.to(tl.int64) * per_row + n * per_row
    zero_row = zeros + column.to(tl.int64) * per_row + n * per_row
    next_scale = load_scales(scale_row, 0, K, span, BLOCK_K)
    if HAS_ZEROS:
        next_zero = load_scales(zero_row, 0, K, span, BLOCK_K)
    acc = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for done in tl.range(0, K, BLOCK_K):
        x_part = load_x(x_tile, rows - row, K - done, BLOCK_M, BLOCK_K, EVEN_K)
        codes = load_k(w_tile, (K - done) // PACK, BLOCK_K // PACK, EVEN_K >= BLOCK_K)
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
        HAS_BIAS, HAS_RESIDUAL, BLOCK_M, BLOCK_N, factor, ACTIVATION,
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
    factor,
    GROUP: tl.constexpr,
    HAS_ZEROS: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    HAS_RESIDUAL: tl.constexpr,
    ACTIVATION: tl.constexpr,
    EVEN_K: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    GROUP_M: tl.constexpr,
    XCDS: tl.constexpr,
):
    """out = act(x ((w - zero) * scale)^T + bias) + residual."""
    integers(
        x, w, scales, zeros, bias, residual, out, rows, N, K, x_stride, residual_stride, out_stride, factor,
        GROUP, HAS_ZEROS, HAS_BIAS, HAS_RESIDUAL, ACTIVATION, EVEN_K, BLOCK_M, BLOCK_N, BLOCK_K, GROUP_M, XCDS,
        1, 0.0,
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
    factor,
    GROUP: tl.constexpr,
    HAS_ZEROS: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    HAS_RESIDUAL: tl.constexpr,
    ACTIVATION: tl.constexpr,
    EVEN_K: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    GROUP_M: tl.constexpr,
    XCDS: tl.constexpr,
):
    """out = act(x ((codes of w - zero) * scale)^T + bias) + residual, two codes in a byte of w, the lower first."""
    integers(
        x, w, scales, zeros, bias, residual, out, rows, N, K, x_stride, residual_stride, out_stride, factor,
        GROUP, HAS_ZEROS, HAS_BIAS, HAS_RESIDUAL, ACTIVATION, EVEN_K, BLOCK_M, BLOCK_N, BLOCK_K, GROUP_M, XCDS,
        2, 8.0,
    )  # fmt: skip


@triton.jit
def weight_scales(scale, column, n, K, SCALE_N: tl.constexpr, SCALE_K: tl.constexpr, BLOCK_N: tl.constexpr):
    """Where the scales of the rows column + n begin: one pointer where the rows of a tile share them, or one each."""
    per_row = tl.cdiv(K, SCALE_K) if SCALE_K else 1
    if SCALE_N == 0:
        start = scale
    elif SCALE_N % BLOCK_N == 0:
        start = scale + column // SCALE_N * per_row
    else:
        start = scale + (column + n) // SCALE_N * per_row
    return start


@triton.jit
def load_next(start, done, K, SPAN: tl.constexpr):
    """The scales of the columns from `done` on, 0 past K."""
    return tl.load(start + done // SPAN, mask=done < K, other=0.0)


@triton.jit
def over_rows(scales, ALIKE: tl.constexpr):
    """Scales of the rows of w, to multiply a tile of w with."""
    return scales if ALIKE else scales[:, None]


@triton.jit
def over_columns(scales, ALIKE: tl.constexpr):
    """Scales of the rows of w, to multiply a tile of out with."""
    return scales if ALIKE else scales[None, :]


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
    factor,
    SCALE_N: tl.constexpr,
    SCALE_K: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    HAS_RESIDUAL: tl.constexpr,
    ACTIVATION: tl.constexpr,
    EVEN_K: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    GROUP_M: tl.constexpr,
    XCDS: tl.constexpr,
):
    """out = act(x (w * scale)^T + bias) + residual."""
    row, column = origin(rows, N, BLOCK_M, BLOCK_N, GROUP_M, XCDS)
    n = within(column, N, BLOCK_N)
    k = tl.arange(0, BLOCK_K)[None, :]
    x_tile = x + row.to(tl.int64) * x_stride + within(row, rows, BLOCK_M)[:, None] * x_stride + k
    w_tile = w + column.to(tl.int64) * K + n[:, None] * K + k
    tl.static_assert(SCALE_K % BLOCK_K == 0, "a step has one scale along K")
    ALIKE: tl.constexpr = SCALE_N % BLOCK_N == 0  # the rows of a tile share their scales
    scales = weight_scales(scale, column, n, K, SCALE_N, SCALE_K, BLOCK_N)
    next_scale = tl.load(scales)
    acc = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for done in tl.range(0, K, BLOCK_K):
        x_part = load_x(x_tile, rows - row, K - done, BLOCK_M, BLOCK_K, EVEN_K)
        codes = load_k(w_tile, K - done, BLOCK_K, EVEN_K >= BLOCK_K)
        if SCALE_K:
            w_part = (codes.to(tl.float32) * over_rows(next_scale, ALIKE)).to(x.dtype.element_ty)
            next_scale = load_next(scales, done + BLOCK_K, K, SCALE_K)
        else:
            w_part = codes.to(x.dtype.element_ty)
        acc = multiply(x_part, w_part, acc)
        x_tile += BLOCK_K
        w_tile += BLOCK_K
    if not SCALE_K:
        acc *= over_columns(tl.load(scales), ALIKE)
    finish(
        acc, bias, residual, out, row, column, rows, N, residual_stride, out_stride,
        HAS_BIAS, HAS_RESIDUAL, BLOCK_M, BLOCK_N, factor, ACTIVATION,
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
    factor,
    X_GROUP: tl.constexpr,
    SCALE_N: tl.constexpr,
    SCALE_K: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    HAS_RESIDUAL: tl.constexpr,
    ACTIVATION: tl.constexpr,
    EVEN_K: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    GROUP_M: tl.constexpr,
    XCDS: tl.constexpr,
):
    """out = act((x * x_scale) (w * w_scale)^T + bias) + residual, multiplied in fp8: scales are not for codes."""
    row, column = origin(rows, N, BLOCK_M, BLOCK_N, GROUP_M, XCDS)
    m, n = within(row, rows, BLOCK_M), within(column, N, BLOCK_N)
    k = tl.arange(0, BLOCK_K)[None, :]
    x_tile = x + row.to(tl.int64) * x_stride + m[:, None] * x_stride + k
    w_tile = w + column.to(tl.int64) * K + n[:, None] * K + k
    tl.static_assert(SCALE_K % BLOCK_K == 0 and X_GROUP % BLOCK_K == 0, "a step has one scale along K")
    ALIKE: tl.constexpr = SCALE_N % BLOCK_N == 0  # the rows of a tile share their scales
    x_scales = x_scale + row.to(tl.int64) * (tl.cdiv(K, X_GROUP) if X_GROUP else 1)
    x_scales += m * (tl.cdiv(K, X_GROUP) if X_GROUP else 1)
    w_scales = weight_scales(w_scale, column, n, K, SCALE_N, SCALE_K, BLOCK_N)
    next_x, next_w = tl.load(x_scales), tl.load(w_scales)
    acc = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for done in tl.range(0, K, BLOCK_K):
        x_part = load_x(x_tile, rows - row, K - done, BLOCK_M, BLOCK_K, EVEN_K)
        w_part = load_k(w_tile, K - done, BLOCK_K, EVEN_K >= BLOCK_K)
        if X_GROUP or SCALE_K:
            part = tl.dot(x_part, tl.trans(w_part), out_dtype=tl.float32)
            if X_GROUP:
                part *= next_x[:, None]
                next_x = load_next(x_scales, done + BLOCK_K, K, X_GROUP)
            if SCALE_K:
                part *= over_columns(next_w, ALIKE)
                next_w = load_next(w_scales, done + BLOCK_K, K, SCALE_K)
            acc += part
        else:
            # NVIDIA's own sums of fp8 products are short of float32: they go into a full one every BLOCK_K products.
            acc = tl.dot(x_part, tl.trans(w_part), acc, max_num_imprecise_acc=BLOCK_K)
        x_tile += BLOCK_K
        w_tile += BLOCK_K
    if not X_GROUP:
        acc *= tl.load(x_scales)[:, None]
    if not SCALE_K:
        acc *= over_columns(tl.load(w_scales), ALIKE)
    finish(
        acc, bias, residual, out, row, column, rows, N, residual_stride, out_stride,
        HAS_BIAS, HAS_RESIDUAL, BLOCK_M, BLOCK_N, factor, ACTIVATION,
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
    MAX: tl.constexpr = 240.0 if out.dtype.element_ty == tl.float8e4b8 else 448.0
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
