"""out = x w^T, with what may follow it in the same pass over out. Arguments: `plait.backends.kernels.gpu.gemm`."""

import triton
import triton.language as tl

# ruff: noqa: N803
# Offsets inside a tile are 32-bit, added to a 64-bit start of the tile: a tensor may pass 2^31 elements, a tile may
# not, and AMD's buffer loads want it so.


@triton.jit
def origin(rows, N, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, GROUP_M: tl.constexpr, XCDS: tl.constexpr):
    """First row and first column of this program's tile of out.

    Programs that run at the same time share what they read: GROUP_M tiles of rows go over the columns together. AMD
    hands consecutive programs to its XCDS chiplets in turn, each with an L2 of its own, so each gets a run of tiles.
    """
    program = tl.program_id(0)
    across = tl.cdiv(N, BLOCK_N)
    down = tl.cdiv(rows, BLOCK_M)
    if XCDS > 1:
        total = across * down
        chiplet = program % XCDS
        program = chiplet * (total // XCDS) + tl.minimum(chiplet, total % XCDS) + program // XCDS
    strip = program // (GROUP_M * across)
    inside = program % (GROUP_M * across)
    height = tl.minimum(down - strip * GROUP_M, GROUP_M)
    return (strip * GROUP_M + inside % height) * BLOCK_M, (inside // height) * BLOCK_N


@triton.jit
def within(first, count, BLOCK: tl.constexpr):
    """0 to BLOCK - 1, none past the last of `count`: what is outside is computed from the last one, and not stored."""
    return tl.minimum(tl.arange(0, BLOCK), count - 1 - first)


@triton.jit
def load_x(pointers, rows, left, BLOCK_M: tl.constexpr, BLOCK_K: tl.constexpr, EVEN_K: tl.constexpr):
    """A tile (BLOCK_M, BLOCK_K) of x of which `rows` rows and `left` columns exist; other columns are 0."""
    # A tile of few rows is mostly rows that do not exist: with a mask they cost no traffic.
    if BLOCK_M <= 32:
        there = tl.arange(0, BLOCK_M)[:, None] < rows
        if EVEN_K >= BLOCK_K:
            part = tl.load(pointers, mask=there, other=0.0)
        else:
            part = tl.load(pointers, mask=there & (tl.arange(0, BLOCK_K)[None, :] < left), other=0.0)
    else:
        part = load_k(pointers, left, BLOCK_K, EVEN_K >= BLOCK_K)
    return part


@triton.jit
def load_k(pointers, left, BLOCK_K: tl.constexpr, WHOLE: tl.constexpr):
    """A tile (any, BLOCK_K) of which `left` columns exist, or all if WHOLE; others are 0."""
    there = tl.arange(0, BLOCK_K)[None, :] < left
    return tl.load(pointers) if WHOLE else tl.load(pointers, mask=there, other=0.0)


@triton.jit
def multiply(x, w, acc):
    """acc + x w^T in float32."""
    return tl.dot(x, tl.trans(w), acc, input_precision="ieee")


@triton.jit
def halves(acc, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr):
    """The first BLOCK_N columns, and the other BLOCK_N."""
    return tl.split(tl.permute(tl.reshape(acc, (BLOCK_M, 2, BLOCK_N)), (0, 2, 1)))


@triton.jit
def activate(x, ACTIVATION: tl.constexpr):
    """silu, gelu (exact) or gelu_tanh of float32 values."""
    tl.static_assert(ACTIVATION == "silu" or ACTIVATION == "gelu" or ACTIVATION == "gelu_tanh", ACTIVATION)
    if ACTIVATION == "gelu":
        share = 0.5 + 0.5 * tl.erf(x * 0.7071067811865476)
    elif ACTIVATION == "gelu_tanh":
        # 0.5 (1 + tanh z) = sigmoid(2 z), with z = sqrt(2 / pi) (x + 0.044715 x^3).
        share = tl.sigmoid(1.5957691216057308 * (x + 0.044715 * x * x * x))
    else:
        share = tl.sigmoid(x)
    return x * share


@triton.jit
def finish(
    acc,
    bias,
    residual,
    out,
    row,
    column,
    rows,
    N,
    residual_stride,
    out_stride,
    HAS_BIAS: tl.constexpr,
    HAS_RESIDUAL: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    factor=1.0,
    ACTIVATION: tl.constexpr = "none",
):
    """Store act(acc + bias) + residual at (row, column) of out, rounded once."""
    if BLOCK_N >= 256:
        # In two halves: all of it, in the layout of the stores and with the residual, would not fit the registers.
        left, right = halves(acc, BLOCK_M, BLOCK_N // 2)
        finish(
            left, bias, residual, out, row, column, rows, N, residual_stride, out_stride,
            HAS_BIAS, HAS_RESIDUAL, BLOCK_M, BLOCK_N // 2, factor, ACTIVATION,
        )  # fmt: skip
        finish(
            right, bias, residual, out, row, column + BLOCK_N // 2, rows, N, residual_stride, out_stride,
            HAS_BIAS, HAS_RESIDUAL, BLOCK_M, BLOCK_N // 2, factor, ACTIVATION,
        )  # fmt: skip
    else:
        m = tl.arange(0, BLOCK_M)[:, None]
        n = tl.arange(0, BLOCK_N)[None, :]
        inside = (m < rows - row) & (n < N - column)
        if HAS_BIAS:
            acc += tl.load(bias + column + n, mask=n < N - column, other=0.0).to(tl.float32)
        if ACTIVATION == "scale":
            acc *= factor
        elif ACTIVATION != "none":
            acc = activate(acc, ACTIVATION)
        if HAS_RESIDUAL:
            residual += row.to(tl.int64) * residual_stride + column
            acc += tl.load(residual + m * residual_stride + n, mask=inside, other=0.0).to(tl.float32)
        out += row.to(tl.int64) * out_stride + column
        tl.store(out + m * out_stride + n, acc.to(out.dtype.element_ty), mask=inside)


@triton.jit
def gemm(
    x,
    w,
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
    """out = act(x w^T + bias) + residual."""
    row, column = origin(rows, N, BLOCK_M, BLOCK_N, GROUP_M, XCDS)
    k = tl.arange(0, BLOCK_K)[None, :]
    x_tile = x + row.to(tl.int64) * x_stride + within(row, rows, BLOCK_M)[:, None] * x_stride + k
    w_tile = w + column.to(tl.int64) * K + within(column, N, BLOCK_N)[:, None] * K + k
    acc = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for done in tl.range(0, K, BLOCK_K):
        x_part = load_x(x_tile, rows - row, K - done, BLOCK_M, BLOCK_K, EVEN_K)
        w_part = load_k(w_tile, K - done, BLOCK_K, EVEN_K >= BLOCK_K)
        acc = multiply(x_part, w_part, acc)
        x_tile += BLOCK_K
        w_tile += BLOCK_K
    finish(
        acc, bias, residual, out, row, column, rows, N, residual_stride, out_stride,
        HAS_BIAS, HAS_RESIDUAL, BLOCK_M, BLOCK_N, factor, ACTIVATION,
    )  # fmt: skip


@triton.jit
def gemm_gated(
    x,
    w,
    bias,
    out,
    rows,
    N,
    K,
    x_stride,
    out_stride,
    ACTIVATION: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    EVEN_K: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    GROUP_M: tl.constexpr,
    XCDS: tl.constexpr,
):
    """out = act(x gate^T) * (x up^T), where w is gate (N, K) and then up (N, K)."""
    row, column = origin(rows, N, BLOCK_M, BLOCK_N, GROUP_M, XCDS)
    k = tl.arange(0, BLOCK_K)[None, :]
    x_tile = x + row.to(tl.int64) * x_stride + within(row, rows, BLOCK_M)[:, None] * x_stride + k
    # The tile of w is BLOCK_N rows of gate over BLOCK_N rows of up: one product makes both.
    half = tl.arange(0, 2)[:, None].to(tl.int64) * N + within(column, N, BLOCK_N)[None, :]
    w_tile = w + column.to(tl.int64) * K + tl.reshape(half, (2 * BLOCK_N,))[:, None] * K + k
    acc = tl.zeros((BLOCK_M, 2 * BLOCK_N), tl.float32)
    for done in tl.range(0, K, BLOCK_K):
        x_part = load_x(x_tile, rows - row, K - done, BLOCK_M, BLOCK_K, EVEN_K)
        w_part = load_k(w_tile, K - done, BLOCK_K, EVEN_K >= BLOCK_K)
        acc = multiply(x_part, w_part, acc)
        x_tile += BLOCK_K
        w_tile += BLOCK_K
    gate, up = halves(acc, BLOCK_M, BLOCK_N)
    if HAS_BIAS:
        n = column + tl.arange(0, BLOCK_N)[None, :]
        gate += tl.load(bias + n, mask=n < N, other=0.0).to(tl.float32)
        up += tl.load(bias + N + n, mask=n < N, other=0.0).to(tl.float32)
    finish(
        activate(gate, ACTIVATION) * up, out, out, out, row, column, rows, N, out_stride, out_stride,
        False, False, BLOCK_M, BLOCK_N,
    )  # fmt: skip
