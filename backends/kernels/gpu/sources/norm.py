"""Root-mean-square norms, one program per row. Arguments: `plait.backends.kernels.gpu.streams`."""

# ruff: noqa: N803 (compile-time arguments are capitals)

import triton
import triton.language as tl


@triton.jit
def store_normed(value, weight, out, at, inside, H, eps):
    """value / sqrt(mean(value^2) + eps) * weight of one row; `value` is float32, 0 outside."""
    scale = tl.rsqrt(tl.sum(value * value, axis=0) / H + eps)
    normed = value * scale * tl.load(weight + at, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + at, normed.to(out.dtype.element_ty), mask=inside)


@triton.jit
def rms_norm(x, weight, out, rows, H, x_stride, out_stride, eps, BLOCK: tl.constexpr):
    """out = x / sqrt(mean(x^2) + eps) * weight."""
    row = tl.program_id(0).to(tl.int64)
    at = tl.arange(0, BLOCK)
    inside = at < H
    value = tl.load(x + row * x_stride + at, mask=inside, other=0.0).to(tl.float32)
    store_normed(value, weight, out + row * out_stride, at, inside, H, eps)


@triton.jit
def add_rms_norm(
    x, y, weight, total, out, rows, H, x_stride, y_stride, total_stride, out_stride, eps, BLOCK: tl.constexpr
):
    """total = x + y, rounded; out = its norm."""
    row = tl.program_id(0).to(tl.int64)
    at = tl.arange(0, BLOCK)
    inside = at < H
    value = tl.load(x + row * x_stride + at, mask=inside, other=0.0).to(tl.float32)
    value += tl.load(y + row * y_stride + at, mask=inside, other=0.0).to(tl.float32)
    rounded = value.to(total.dtype.element_ty)
    tl.store(total + row * total_stride + at, rounded, mask=inside)
    store_normed(rounded.to(tl.float32), weight, out + row * out_stride, at, inside, H, eps)
