"""Norms. Arguments: `plait.backends.kernels.gpu.streams`.

A program has BLOCK_GROUPS groups of one row, each normed by itself: heads, or the whole row as its only group.
"""

# ruff: noqa: N803 (compile-time arguments are capitals)

import triton
import triton.language as tl


@triton.jit
def groups(GROUPS: tl.constexpr, BLOCK_GROUPS: tl.constexpr):
    """(BLOCK_GROUPS, 1): this program's groups, some perhaps past the last."""
    return (tl.program_id(1) * BLOCK_GROUPS + tl.arange(0, BLOCK_GROUPS))[:, None]


@triton.jit
def load(x, at, inside):
    """In float32; 0 outside."""
    return tl.load(x + at, mask=inside, other=0.0).to(tl.float32)


@triton.jit
def root_mean_square(value, H, eps):
    """value / sqrt(mean(value^2) + eps) of every group; `value` is 0 outside."""
    return value * tl.rsqrt(tl.sum(value * value, axis=1, keep_dims=True) / H + eps)


@triton.jit
def rms_norm(
    x,
    weight,
    out,
    rows,
    H,
    x_stride,
    out_stride,
    weight_stride,
    eps,
    offset,
    GROUPS: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCK_GROUPS: tl.constexpr,
):
    """out = x / sqrt(mean(x^2) + eps) * (weight + offset)."""
    row = tl.program_id(0).to(tl.int64)
    group = groups(GROUPS, BLOCK_GROUPS)
    feature = tl.arange(0, BLOCK)[None, :]
    inside = (feature < H) & (group < GROUPS)
    value = load(x + row * x_stride, group * H + feature, inside)
    scale = load(weight, group * weight_stride + feature, inside) + offset
    normed = root_mean_square(value, H, eps) * scale
    tl.store(out + row * out_stride + group * H + feature, normed.to(out.dtype.element_ty), mask=inside)


@triton.jit
def add_rms_norm(
    x,
    y,
    weight,
    total,
    out,
    rows,
    H,
    x_stride,
    y_stride,
    total_stride,
    out_stride,
    eps,
    offset,
    BLOCK: tl.constexpr,
):
    """total = x + y, rounded; out = its norm."""
    row = tl.program_id(0).to(tl.int64)
    feature = tl.arange(0, BLOCK)[None, :]
    inside = feature < H
    rounded = (load(x + row * x_stride, feature, inside) + load(y + row * y_stride, feature, inside)).to(
        total.dtype.element_ty
    )
    tl.store(total + row * total_stride + feature, rounded, mask=inside)
    normed = root_mean_square(rounded.to(tl.float32), H, eps) * (load(weight, feature, inside) + offset)
    tl.store(out + row * out_stride + feature, normed.to(out.dtype.element_ty), mask=inside)


@triton.jit
def layer_norm(
    x,
    weight,
    bias,
    out,
    rows,
    H,
    x_stride,
    out_stride,
    weight_stride,
    eps,
    GROUPS: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCK_GROUPS: tl.constexpr,
):
    """out = (x - mean(x)) / sqrt(mean((x - mean(x))^2) + eps) * weight + bias."""
    row = tl.program_id(0).to(tl.int64)
    group = groups(GROUPS, BLOCK_GROUPS)
    feature = tl.arange(0, BLOCK)[None, :]
    inside = (feature < H) & (group < GROUPS)
    value = load(x + row * x_stride, group * H + feature, inside)
    apart = tl.where(inside, value - tl.sum(value, axis=1, keep_dims=True) / H, 0.0)
    normed = root_mean_square(apart, H, eps) * load(weight, group * weight_stride + feature, inside)
    if HAS_BIAS:
        normed += load(bias, group * weight_stride + feature, inside)
    tl.store(out + row * out_stride + group * H + feature, normed.to(out.dtype.element_ty), mask=inside)
