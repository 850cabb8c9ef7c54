"""Rows of a table. Arguments: `plait.backends.kernels.gpu.streams`."""

# ruff: noqa: N803 (compile-time arguments are capitals)

import triton
import triton.language as tl


@triton.jit
def embed(tokens, table, out, rows, H, out_stride, factor, BLOCK: tl.constexpr):
    """out[r] = factor table[tokens[r]]."""
    row = tl.program_id(0)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    token = tl.load(tokens + row).to(tl.int64)
    value = tl.load(table + token * H + at, mask=at < H, other=0.0).to(tl.float32) * factor
    tl.store(out + row.to(tl.int64) * out_stride + at, value.to(out.dtype.element_ty), mask=at < H)


@triton.jit
def gather_rows(x, index, out, rows, H, x_stride, out_stride, BLOCK: tl.constexpr):
    """out[r] = x[index[r]]."""
    row = tl.program_id(0)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    chosen = tl.load(index + row).to(tl.int64)
    value = tl.load(x + chosen * x_stride + at, mask=at < H, other=0.0)
    tl.store(out + row.to(tl.int64) * out_stride + at, value.to(out.dtype.element_ty), mask=at < H)
