"""Two tensors in, one out. Arguments: `plait.backends.kernels.gpu.streams`."""

# ruff: noqa: N803 (compile-time arguments are capitals)

import triton
import triton.language as tl


@triton.jit
def load_row(x, at, N, stride):
    """This program's columns of its row, in float32."""
    return tl.load(x + tl.program_id(0).to(tl.int64) * stride + at, mask=at < N, other=0.0).to(tl.float32)


@triton.jit
def store_row(out, value, at, N, stride):
    """Rounded once to out's type."""
    tl.store(out + tl.program_id(0).to(tl.int64) * stride + at, value.to(out.dtype.element_ty), mask=at < N)


@triton.jit
def columns(BLOCK: tl.constexpr):
    """The columns of this program."""
    return tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)


@triton.jit
def add(x, y, out, rows, N, x_stride, y_stride, out_stride, BLOCK: tl.constexpr):
    """x + y."""
    at = columns(BLOCK)
    store_row(out, load_row(x, at, N, x_stride) + load_row(y, at, N, y_stride), at, N, out_stride)


@triton.jit
def silu_mul(x, y, out, rows, N, x_stride, y_stride, out_stride, BLOCK: tl.constexpr):
    """x / (1 + exp(-x)) * y."""
    at = columns(BLOCK)
    gate = load_row(x, at, N, x_stride)
    # Far to the left exp overflows to infinity, and the quotient is the 0 it should be.
    store_row(out, gate / (1.0 + tl.exp(-gate)) * load_row(y, at, N, y_stride), at, N, out_stride)


@triton.jit
def gelu_mul(x, y, out, rows, N, x_stride, y_stride, out_stride, APPROXIMATE: tl.constexpr, BLOCK: tl.constexpr):
    """gelu(x) * y (Hendrycks and Gimpel 2016): x times the normal distribution up to x, or its tanh form."""
    at = columns(BLOCK)
    gate = load_row(x, at, N, x_stride)
    if APPROXIMATE:
        # 0.5 (1 + tanh z) = 1 / (1 + exp(-2 z)), with z = sqrt(2 / pi) (x + 0.044715 x^3).
        gelu = gate / (1.0 + tl.exp(-1.5957691216057308 * (gate + 0.044715 * gate * gate * gate)))
    else:
        gelu = 0.5 * gate * (1.0 + tl.erf(gate * 0.7071067811865476))
    store_row(out, gelu * load_row(y, at, N, y_stride), at, N, out_stride)
