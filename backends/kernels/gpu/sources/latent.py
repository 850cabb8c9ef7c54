"""Attention in a latent space: one row per token is key and value of all heads (DeepSeek-V2, 2024). Arguments:
`plait.backends.kernels.gpu.latent`.

Legend of shapes: M rows, which are heads of one token, or of the tokens of a tile, token by token; K keys.
"""

# ruff: noqa: N803, N806 (compile-time arguments are capitals)

import triton
import triton.language as tl

from plait.backends.kernels.gpu.sources.attention import LOG2E, LOWEST, key_offsets, load_keys, split_keys
from plait.backends.kernels.gpu.sources.fp8 import widen
from plait.backends.kernels.gpu.sources.gemm import finish, load_k, load_x, multiply, origin, within
from plait.backends.kernels.gpu.sources.rope import copy_heads


@triton.jit
def gemm_heads(
    x,
    w,
    out,
    rows,
    N,
    K,
    x_stride,
    out_stride,
    HEADS: tl.constexpr,
    TRANSPOSED: tl.constexpr,
    EVEN_K: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    GROUP_M: tl.constexpr,
    XCDS: tl.constexpr,
):
    """Head by head out = x w^T, or x w where w is TRANSPOSED."""
    row, column = origin(rows, N, BLOCK_M, BLOCK_N, GROUP_M, XCDS)
    head = tl.program_id(1)
    k = tl.arange(0, BLOCK_K)
    x_tile = x + row.to(tl.int64) * x_stride + head * K + within(row, rows, BLOCK_M)[:, None] * x_stride + k[None, :]
    w += head.to(tl.int64) * N * K
    if TRANSPOSED:
        # What lies side by side are columns of out: a place past the last would end the run.
        n = tl.arange(0, BLOCK_N)[None, :]
        w_tile = w + column + n + k[:, None] * N
    else:
        w_tile = w + (column + within(column, N, BLOCK_N)[:, None]) * K + k[None, :]
    acc = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for done in tl.range(0, K, BLOCK_K):
        x_part = load_x(x_tile, rows - row, K - done, BLOCK_M, BLOCK_K, EVEN_K)
        if TRANSPOSED:
            there = n < N - column
            if EVEN_K < BLOCK_K:
                there = there & (k[:, None] < K - done)
            acc = tl.dot(x_part, tl.load(w_tile, mask=there, other=0.0), acc, input_precision="ieee")
            w_tile += BLOCK_K * N
        else:
            acc = multiply(x_part, load_k(w_tile, K - done, BLOCK_K, EVEN_K >= BLOCK_K), acc)
            w_tile += BLOCK_K
        x_tile += BLOCK_K
    out += head * N
    finish(acc, out, out, out, row, column, rows, N, out_stride, out_stride, False, False, BLOCK_M, BLOCK_N)


@triton.jit
def latent_write(
    latent, k_rope, slots, k_pages, rows, latent_stride, rope_stride, LATENT: tl.constexpr, ROPE: tl.constexpr
):
    """One token's row into its page."""
    row = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots + row).to(tl.int64)
    inside = tl.arange(0, 1) <= slot
    place = k_pages + slot * (LATENT + ROPE)
    copy_heads(latent + row * latent_stride, place, 1.0, inside, 0, LATENT, LATENT, 1)
    copy_heads(k_rope + row * rope_stride, place + LATENT, 1.0, inside, 0, ROPE, ROPE, 1)


@triton.jit
def part_width(WIDTH: tl.constexpr):
    """A width as blocks have it: no matrix instruction has less than 16."""
    return max(16, triton.next_power_of_2(WIDTH))


@triton.jit
def load_queries(q, start, stride, token, head, inside, WIDTH: tl.constexpr, BLOCK: tl.constexpr):
    """(M, BLOCK) of the rows' tokens and heads; 0 outside."""
    d = tl.arange(0, BLOCK)[None, :]
    at = token[:, None] * stride + head[:, None] * WIDTH + d
    return tl.load(q + start * stride + at, mask=inside[:, None] & (d < WIDTH), other=0.0)


@triton.jit
def attend(
    acc,
    top,
    total,
    q,
    q_rope,
    pages,
    table,
    start,
    stop,
    end,
    position,
    scale,
    LATENT: tl.constexpr,
    ROPE: tl.constexpr,
    PAGE_TOKENS: tl.constexpr,
    MASKED: tl.constexpr,
    BLOCK_KEYS: tl.constexpr,
):
    """As `sources.attention.attend`, where the first LATENT values of a key are its value: they are read once."""
    BLOCK_LATENT: tl.constexpr = q.shape[1]
    BLOCK_ROPE: tl.constexpr = q_rope.shape[1]
    factor = scale * LOG2E
    for first in tl.range(start, stop, BLOCK_KEYS):
        keys = first + tl.arange(0, BLOCK_KEYS)
        offsets = key_offsets(keys, end, table, PAGE_TOKENS, LATENT + ROPE, MASKED)
        latent = widen(load_keys(pages, offsets, keys, end, LATENT, BLOCK_LATENT, MASKED), q.dtype)
        rope = widen(load_keys(pages + LATENT, offsets, keys, end, ROPE, BLOCK_ROPE, MASKED), q.dtype)
        score = tl.dot(q, tl.trans(latent), input_precision="ieee")
        score = tl.dot(q_rope, tl.trans(rope), score, input_precision="ieee")
        if MASKED:
            score = tl.where(keys[None, :] <= position[:, None], score, float("-inf"))
        higher = tl.maximum(top, tl.max(score, axis=1) * factor)
        weight = tl.exp2(score * factor - higher[:, None])
        keep = tl.exp2(top - higher)
        total = total * keep + tl.sum(weight, axis=1)
        acc = tl.dot(weight.to(q.dtype), latent, acc * keep[:, None], input_precision="ieee")
        top = higher
    return acc, top, total


@triton.jit
def latent_decode(
    q,
    q_rope,
    k_pages,
    table,
    decodes,
    kv_lens,
    part,
    part_max,
    part_sum,
    out,
    splits,
    q_stride,
    q_rope_stride,
    out_stride,
    table_stride,
    scale,
    HEADS: tl.constexpr,
    LATENT: tl.constexpr,
    ROPE: tl.constexpr,
    PAGE_TOKENS: tl.constexpr,
    SPLIT_KEYS: tl.constexpr,
    MAX_SPLITS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_KEYS: tl.constexpr,
):
    """One split of the keys of one sequence, for BLOCK_M heads."""
    BLOCK_LATENT: tl.constexpr = part_width(LATENT)
    BLOCK_ROPE: tl.constexpr = part_width(ROPE)
    decode = tl.program_id(1)
    split = tl.program_id(2)
    sequence = tl.load(decodes + decode * 2).to(tl.int64)
    if sequence < 0:
        return
    kv_len = tl.load(kv_lens + sequence)
    _, split_size = split_keys(kv_len, 0, SPLIT_KEYS, MAX_SPLITS)
    start = split * split_size
    if (split > 0) & (start >= kv_len):
        return
    end = tl.minimum(start + split_size, kv_len)

    row = tl.load(decodes + decode * 2 + 1).to(tl.int64)
    head = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    there = head < HEADS
    token = tl.zeros((BLOCK_M,), tl.int32)
    acc, top, total = attend(
        tl.zeros((BLOCK_M, BLOCK_LATENT), tl.float32),
        tl.full((BLOCK_M,), LOWEST, tl.float32),
        tl.zeros((BLOCK_M,), tl.float32),
        load_queries(q, row, q_stride, token, head, there, LATENT, BLOCK_LATENT),
        load_queries(q_rope, row, q_rope_stride, token, head, there, ROPE, BLOCK_ROPE),
        k_pages,
        table + sequence * table_stride,
        start,
        end,
        end,
        end - 1 + token,
        scale,
        LATENT,
        ROPE,
        PAGE_TOKENS,
        True,
        BLOCK_KEYS,
    )
    d = tl.arange(0, BLOCK_LATENT)[None, :]
    inside = there[:, None] & (d < LATENT)
    if kv_len <= split_size:
        # Nothing is visible to a sequence without keys: zeros, where total is 0 too.
        value = tl.where(kv_len > 0, acc / total[:, None], 0.0)
        at = out + row * out_stride + head[:, None] * LATENT + d
        tl.store(at, value.to(out.dtype.element_ty), mask=inside)
    else:
        place = (decode.to(tl.int64) * HEADS + head) * splits + split
        tl.store(part + place[:, None] * LATENT + d, acc, mask=inside)
        tl.store(part_max + place, top, mask=there)
        tl.store(part_sum + place, total, mask=there)


@triton.jit
def latent_prefill(
    q,
    q_rope,
    k_pages,
    table,
    tiles,
    query_starts,
    kv_lens,
    out,
    q_stride,
    q_rope_stride,
    out_stride,
    table_stride,
    scale,
    HEADS: tl.constexpr,
    LATENT: tl.constexpr,
    ROPE: tl.constexpr,
    GROUP: tl.constexpr,
    PAGE_TOKENS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_KEYS: tl.constexpr,
):
    """BLOCK_M // GROUP tokens of one sequence for GROUP heads."""
    TOKENS: tl.constexpr = BLOCK_M // GROUP
    BLOCK_LATENT: tl.constexpr = part_width(LATENT)
    BLOCK_ROPE: tl.constexpr = part_width(ROPE)
    tl.static_assert(TOKENS > 0)
    tile = tl.program_id(1)
    sequence = tl.load(tiles + tile * 2).to(tl.int64)
    if sequence < 0:
        return
    first = tl.load(tiles + tile * 2 + 1)
    query_start = tl.load(query_starts + sequence)
    query_len = tl.load(query_starts + sequence + 1) - query_start
    base = tl.load(kv_lens + sequence) - query_len + first  # position of the first query
    count = tl.minimum(query_len - first, TOKENS)

    m = tl.arange(0, BLOCK_M)
    token = m // GROUP
    head = tl.program_id(0) * GROUP + m % GROUP
    there = (token < count) & (head < HEADS)
    row = (query_start + first).to(tl.int64)
    queries = load_queries(q, row, q_stride, token, head, there, LATENT, BLOCK_LATENT)
    turned = load_queries(q_rope, row, q_rope_stride, token, head, there, ROPE, BLOCK_ROPE)
    acc = tl.zeros((BLOCK_M, BLOCK_LATENT), tl.float32)
    top = tl.full((BLOCK_M,), LOWEST, tl.float32)
    total = tl.zeros((BLOCK_M,), tl.float32)
    position = base + tl.minimum(token, count - 1)
    table += sequence * table_stride
    # Keys before `outer` are visible to every query, and nothing is compared.
    end = base + count
    outer = (base + 1) // BLOCK_KEYS * BLOCK_KEYS
    acc, top, total = attend(
        acc, top, total, queries, turned, k_pages, table, 0, outer, end, position, scale,
        LATENT, ROPE, PAGE_TOKENS, False, BLOCK_KEYS,
    )  # fmt: skip
    acc, top, total = attend(
        acc, top, total, queries, turned, k_pages, table, outer, end, end, position, scale,
        LATENT, ROPE, PAGE_TOKENS, True, BLOCK_KEYS,
    )  # fmt: skip
    d = tl.arange(0, BLOCK_LATENT)[None, :]
    at = out + row * out_stride + token[:, None] * out_stride + head[:, None] * LATENT + d
    tl.store(at, (acc / total[:, None]).to(out.dtype.element_ty), mask=there[:, None] & (d < LATENT))
