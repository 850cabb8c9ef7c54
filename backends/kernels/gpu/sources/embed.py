"""Rows of a table. Arguments: `plait.backends.kernels.gpu.streams`."""

# ruff: noqa: N803 (compile-time arguments are capitals)

import triton
import triton.language as tl


@triton.jit
def copy_row(source, out, H, BLOCK: tl.constexpr):
    """This program's BLOCK columns of one row."""
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    value = tl.load(source + at, mask=at < H, other=0.0)
    tl.store(out + at, value.to(out.dtype.element_ty), mask=at < H)


@triton.jit
def embed(tokens, table, out, rows, H, out_stride, BLOCK: tl.constexpr):
    """out[r] = table[tokens[r]]."""
    row = tl.program_id(0)
    token = tl.load(tokens + row).to(tl.int64)
    copy_row(table + token * H, out + row.to(tl.int64) * out_stride, H, BLOCK)


@triton.jit
def gather_rows(x, index, out, rows, H, x_stride, out_stride, BLOCK: tl.constexpr):
    """out[r] = x[index[r]]."""
    row = tl.program_id(0)
    chosen = tl.load(index + row).to(tl.int64)
    copy_row(x + chosen * x_stride, out + row.to(tl.int64) * out_stride, H, BLOCK)
