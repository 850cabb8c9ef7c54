"""Rotary embedding, and the way of k and v into their pages. Arguments: `plait.backends.kernels.gpu.streams`.

A program has one token and BLOCK_HEADS heads.
"""

# ruff: noqa: N803, N806 (compile-time arguments are capitals)

import triton
import triton.language as tl

from plait.backends.kernels.gpu.sources.fp8 import narrow


@triton.jit
def store_as(pointers, value, divide, mask):
    """Store values of the model's type; fp8 holds the quotient."""
    kind: tl.constexpr = pointers.dtype.element_ty
    if kind.primitive_bitwidth == 8:
        tl.store(pointers, narrow(value.to(tl.float32) / divide, kind), mask=mask)
    else:
        tl.store(pointers, value.to(kind), mask=mask)


@triton.jit
def copy_heads(
    x, out, divide, inside, FIRST: tl.constexpr, LAST: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_HEADS: tl.constexpr
):
    """Values FIRST to LAST - 1 of each head."""
    if FIRST < LAST:
        COUNT: tl.constexpr = triton.next_power_of_2(LAST - FIRST)
        at = FIRST + tl.arange(0, COUNT)[None, :]
        mask = inside[:, None] & (at < LAST)
        at = tl.arange(0, BLOCK_HEADS)[:, None] * HEAD_DIM + at
        store_as(out + at, tl.load(x + at, mask=mask, other=0.0), divide, mask)


@triton.jit
def turn_heads(
    x,
    cos,
    sin,
    out,
    divide,
    inside,
    HEAD_DIM: tl.constexpr,
    ROTARY_DIM: tl.constexpr,
    BLOCK_HEADS: tl.constexpr,
):
    """(a, b) -> (a cos - b sin, b cos + a sin) for pairs (i, i + ROTARY_DIM / 2) of each head; the rest is copied."""
    HALF: tl.constexpr = ROTARY_DIM // 2
    if HALF > 0:
        pair = tl.arange(0, triton.next_power_of_2(HALF))
        c = tl.load(cos + pair, mask=pair < HALF, other=0.0)[None, :]
        s = tl.load(sin + pair, mask=pair < HALF, other=0.0)[None, :]
        mask = inside[:, None] & (pair < HALF)[None, :]
        at = tl.arange(0, BLOCK_HEADS)[:, None] * HEAD_DIM + pair[None, :]
        a = tl.load(x + at, mask=mask, other=0.0).to(tl.float32)
        b = tl.load(x + HALF + at, mask=mask, other=0.0).to(tl.float32)
        # Rounded to the model's type, as a rope's result is, before fp8 pages round again.
        store_as(out + at, (a * c - b * s).to(x.dtype.element_ty), divide, mask)
        store_as(out + HALF + at, (b * c + a * s).to(x.dtype.element_ty), divide, mask)
    copy_heads(x, out, divide, inside, ROTARY_DIM, HEAD_DIM, HEAD_DIM, BLOCK_HEADS)


@triton.jit
def rope(
    x,
    cos,
    sin,
    out,
    rows,
    x_stride,
    out_stride,
    HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    ROTARY_DIM: tl.constexpr,
    BLOCK_HEADS: tl.constexpr,
):
    """x turned into out."""
    row = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * BLOCK_HEADS
    turned = row * (ROTARY_DIM // 2)
    turn_heads(
        x + row * x_stride + head * HEAD_DIM,
        cos + turned,
        sin + turned,
        out + row * out_stride + head * HEAD_DIM,
        1.0,
        head + tl.arange(0, BLOCK_HEADS) < HEADS,
        HEAD_DIM,
        ROTARY_DIM,
        BLOCK_HEADS,
    )


@triton.jit
def rope_write(
    q,
    k,
    v,
    cos,
    sin,
    slots,
    q_out,
    k_pages,
    v_pages,
    rows,
    q_stride,
    k_stride,
    v_stride,
    q_out_stride,
    k_scale,
    v_scale,
    HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    ROTARY_DIM: tl.constexpr,
    BLOCK_HEADS: tl.constexpr,
):
    """q turned into q_out; k turned, and v, into their pages."""
    row = tl.program_id(0).to(tl.int64)
    block = tl.program_id(1)
    turned = row * (ROTARY_DIM // 2)
    Q_BLOCKS: tl.constexpr = (HEADS + BLOCK_HEADS - 1) // BLOCK_HEADS
    if block < Q_BLOCKS:
        head = block * BLOCK_HEADS
        turn_heads(
            q + row * q_stride + head * HEAD_DIM,
            cos + turned,
            sin + turned,
            q_out + row * q_out_stride + head * HEAD_DIM,
            1.0,
            head + tl.arange(0, BLOCK_HEADS) < HEADS,
            HEAD_DIM,
            ROTARY_DIM,
            BLOCK_HEADS,
        )
    else:
        head = (block - Q_BLOCKS) * BLOCK_HEADS
        slot = tl.load(slots + row).to(tl.int64)
        inside = (head + tl.arange(0, BLOCK_HEADS) < KV_HEADS) & (slot >= 0)
        place = slot * (KV_HEADS * HEAD_DIM) + head * HEAD_DIM
        turn_heads(
            k + row * k_stride + head * HEAD_DIM,
            cos + turned,
            sin + turned,
            k_pages + place,
            k_scale,
            inside,
            HEAD_DIM,
            ROTARY_DIM,
            BLOCK_HEADS,
        )
        copy_heads(
            v + row * v_stride + head * HEAD_DIM, v_pages + place, v_scale, inside, 0, HEAD_DIM, HEAD_DIM, BLOCK_HEADS
        )
