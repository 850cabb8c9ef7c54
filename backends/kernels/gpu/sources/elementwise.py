"""One tensor or two in, one out. Arguments: `plait.backends.kernels.gpu.streams`."""

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
def gelu_of(x, APPROXIMATE: tl.constexpr):
    """x times the normal distribution up to x, or its tanh form (Hendrycks and Gimpel 2016)."""
    if APPROXIMATE:
        # 0.5 (1 + tanh z) = 1 / (1 + exp(-2 z)), with z = sqrt(2 / pi) (x + 0.044715 x^3).
        return x / (1.0 + tl.exp(-1.5957691216057308 * (x + 0.044715 * x * x * x)))
    return 0.5 * x * (1.0 + tl.erf(x * 0.7071067811865476))


@triton.jit
def gelu_mul(x, y, out, rows, N, x_stride, y_stride, out_stride, APPROXIMATE: tl.constexpr, BLOCK: tl.constexpr):
    """gelu(x) * y."""
    at = columns(BLOCK)
    gate = gelu_of(load_row(x, at, N, x_stride), APPROXIMATE)
    store_row(out, gate * load_row(y, at, N, y_stride), at, N, out_stride)


@triton.jit
def gelu(x, out, rows, N, x_stride, out_stride, APPROXIMATE: tl.constexpr, BLOCK: tl.constexpr):
    """gelu(x)."""
    at = columns(BLOCK)
    store_row(out, gelu_of(load_row(x, at, N, x_stride), APPROXIMATE), at, N, out_stride)


@triton.jit
def scale(x, out, rows, N, x_stride, out_stride, factor, BLOCK: tl.constexpr):
    """factor x."""
    at = columns(BLOCK)
    store_row(out, load_row(x, at, N, x_stride) * factor, at, N, out_stride)


@triton.jit
def tanh(z):
    """Of float32, all digits kept about 0."""
    square = z * z
    # The series' terms up to z^11: what is left out at 0.25 is less than half a unit in the last place.
    series = -1382.0 / 155925.0
    series = series * square + 62.0 / 2835.0
    series = series * square - 17.0 / 315.0
    series = series * square + 2.0 / 15.0
    series = series * square - 1.0 / 3.0
    near = z + z * square * series
    falling = tl.exp(-2.0 * tl.abs(z))
    far = (1.0 - falling) / (1.0 + falling)
    return tl.where(tl.abs(z) < 0.25, near, tl.where(z < 0.0, -far, far))


@triton.jit
def softcap(x, out, rows, N, x_stride, out_stride, factor, limit, BLOCK: tl.constexpr):
    """limit tanh(factor x / limit)."""
    at = columns(BLOCK)
    store_row(out, limit * tanh(load_row(x, at, N, x_stride) * factor / limit), at, N, out_stride)
