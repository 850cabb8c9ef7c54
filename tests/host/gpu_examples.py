"""Small Triton kernels that the tests compile and interpret."""

import triton
import triton.language as tl


@triton.jit
def _scaled(value, factor):
    return value * factor


@triton.jit
def scale(x, out, rows, factor, BLOCK: tl.constexpr):  # noqa: N803
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    value = tl.load(x + at, mask=at < rows, other=0.0).to(tl.float32)
    tl.store(out + at, _scaled(value, factor).to(out.dtype.element_ty), mask=at < rows)


@triton.jit
def add_narrow(x, y, out, rows, BLOCK: tl.constexpr):  # noqa: N803
    """Adds in the arrays' own type."""
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    total = tl.load(x + at, mask=at < rows) + tl.load(y + at, mask=at < rows)
    tl.store(out + at, total, mask=at < rows)


@triton.jit
def row_softmax(x, out, columns, stride, BLOCK: tl.constexpr):  # noqa: N803
    at = tl.arange(0, BLOCK)
    row = tl.program_id(0).to(tl.int64) * stride
    value = tl.load(x + row + at, mask=at < columns, other=-float("inf")).to(tl.float32)
    value = tl.exp(value - tl.max(value, axis=0))
    tl.store(out + row + at, (value / value.sum(0)).to(out.dtype.element_ty), mask=at < columns)


@triton.jit
def multiply(x, w, out, rows, N, K, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr):  # noqa: N803
    """out = x w^T, x (rows, K), w (N, K)."""
    m = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    n = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    k = tl.arange(0, BLOCK_K)
    total = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for start in range(0, K, BLOCK_K):
        inside = start + k < K
        a = tl.load(x + m[:, None] * K + (start + k)[None, :], mask=(m < rows)[:, None] & inside[None, :], other=0.0)
        b = tl.load(w + n[:, None] * K + (start + k)[None, :], mask=(n < N)[:, None] & inside[None, :], other=0.0)
        total = tl.dot(a, b.T, total)
    at = out + m[:, None] * N + n[None, :]
    tl.store(at, total.to(out.dtype.element_ty), mask=(m < rows)[:, None] & (n < N)[None, :])
