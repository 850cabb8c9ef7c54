"""Attention over paged KV with a running softmax (Milakov and Gimelshein 2018; Dao et al. 2022). Arguments:
`plait.backends.kernels.gpu.attend`.

Scores are kept in units of log 2, so that exp2 does what exp would. Legend of shapes: M rows, which are the query heads
of one KV head (of one token, or of the tokens of a tile, token by token), K keys, D head dimension, rounded up to a
power of two.
"""

# ruff: noqa: N803, N806 (compile-time arguments are capitals)

import triton
import triton.language as tl

from plait.backends.kernels.gpu.sources.fp8 import widen

LOG2E = tl.constexpr(1.4426950408889634)
#: Below every score, and finite: two of them have a difference.
LOWEST = tl.constexpr(-3.0e38)


@triton.jit
def key_offsets(keys, end, table, PAGE_TOKENS: tl.constexpr, TOKEN: tl.constexpr, MASKED: tl.constexpr):
    """(K,) int64: where the keys begin in their pages. Keys from `end` on are in page 0."""
    if MASKED:
        page = tl.load(table + keys // PAGE_TOKENS, mask=keys < end, other=0)
    else:
        page = tl.load(table + keys // PAGE_TOKENS)
    return (page.to(tl.int64) * PAGE_TOKENS + keys % PAGE_TOKENS) * TOKEN


@triton.jit
def load_keys(pages, offsets, keys, end, HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, MASKED: tl.constexpr):
    """(K, D) values at the offsets, 0 from key `end` on: whatever an earlier owner left there, 0 * NaN is not 0."""
    d = tl.arange(0, BLOCK_D)[None, :]
    pointers = pages + offsets[:, None] + d
    if MASKED and BLOCK_D > HEAD_DIM:
        return tl.load(pointers, mask=(keys < end)[:, None] & (d < HEAD_DIM), other=0.0)
    if MASKED:
        return tl.load(pointers, mask=(keys < end)[:, None], other=0.0)
    if BLOCK_D > HEAD_DIM:
        return tl.load(pointers, mask=d < HEAD_DIM, other=0.0)
    return tl.load(pointers)


@triton.jit
def attend(
    acc,
    top,
    total,
    q,
    k_pages,
    v_pages,
    table,
    start,
    stop,
    end,
    position,
    score_scale,
    KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    PAGE_TOKENS: tl.constexpr,
    WINDOW: tl.constexpr,
    SOFTCAP: tl.constexpr,
    MASKED: tl.constexpr,
    BLOCK_KEYS: tl.constexpr,
):
    """Add keys start to stop - 1, BLOCK_KEYS at a time, to the running sums.

    Args:
        acc, top, total: (M, D), (M,), (M,) weighted values, largest score and sum of weights so far.
        q: (M, D).
        end: no key from here on is read.
        position: (M,) of the queries, all less than `end`. Without MASKED all keys are visible to all of them.
        score_scale: what makes q k a score.
    """
    BLOCK_D: tl.constexpr = triton.next_power_of_2(HEAD_DIM)
    for first in tl.range(start, stop, BLOCK_KEYS):
        keys = first + tl.arange(0, BLOCK_KEYS)
        offsets = key_offsets(keys, end, table, PAGE_TOKENS, KV_HEADS * HEAD_DIM, MASKED)
        k = widen(load_keys(k_pages, offsets, keys, end, HEAD_DIM, BLOCK_D, MASKED), q.dtype)
        score = tl.dot(q, tl.trans(k), input_precision="ieee")
        if SOFTCAP > 0.0:
            # tanh(z) = 1 - 2 / (exp(2 z) + 1)
            score = tl.exp2(score * (score_scale * (2.0 * LOG2E / SOFTCAP)))
            score = (SOFTCAP * LOG2E) - (2.0 * SOFTCAP * LOG2E) / (score + 1.0)
            factor = 1.0
        else:
            factor = score_scale * LOG2E
        if MASKED:
            distance = position[:, None] - keys[None, :]
            # Unsigned, a key that is still to come is far away.
            visible = distance.to(tl.uint32, bitcast=True) < WINDOW if WINDOW > 0 else distance >= 0
            score = tl.where(visible, score, float("-inf"))
        higher = tl.maximum(top, tl.max(score, axis=1) * factor)
        weight = tl.exp2(score * factor - higher[:, None])
        keep = tl.exp2(top - higher)
        total = total * keep + tl.sum(weight, axis=1)
        v = widen(load_keys(v_pages, offsets, keys, end, HEAD_DIM, BLOCK_D, MASKED), q.dtype)
        acc = tl.dot(weight.to(q.dtype), v, acc * keep[:, None], input_precision="ieee")
        top = higher
    return acc, top, total


@triton.jit
def with_sinks(top, total, sinks, heads, inside, HAS_SINKS: tl.constexpr):
    """The factor of the weighted values once the sinks have joined the softmax (Xiao et al. 2023, one per head)."""
    if HAS_SINKS:
        sink = tl.load(sinks + heads, mask=inside, other=0.0).to(tl.float32) * LOG2E
        higher = tl.maximum(top, sink)
        keep = tl.exp2(top - higher)
        return keep / (total * keep + tl.exp2(sink - higher))
    return 1.0 / total


@triton.jit
def split_keys(kv_len, WINDOW: tl.constexpr, SPLIT_KEYS: tl.constexpr, MAX_SPLITS: tl.constexpr):
    """The first visible key of a decode sequence, and the keys of one of its splits."""
    oldest = tl.maximum(kv_len - WINDOW, 0) if WINDOW > 0 else 0
    return oldest, SPLIT_KEYS * tl.cdiv(tl.maximum(kv_len - oldest, 1), SPLIT_KEYS * MAX_SPLITS)


@triton.jit
def attention_decode(
    q,
    k_pages,
    v_pages,
    table,
    decodes,
    kv_lens,
    sinks,
    part,
    part_max,
    part_sum,
    out,
    splits,
    q_stride,
    out_stride,
    table_stride,
    scale,
    k_scale,
    v_scale,
    KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    PAGE_TOKENS: tl.constexpr,
    WINDOW: tl.constexpr,
    SOFTCAP: tl.constexpr,
    HAS_SINKS: tl.constexpr,
    SPLIT_KEYS: tl.constexpr,
    MAX_SPLITS: tl.constexpr,
    BLOCK_KEYS: tl.constexpr,
):
    """One split of the keys of one sequence, for the query heads of one KV head."""
    BLOCK_D: tl.constexpr = triton.next_power_of_2(HEAD_DIM)
    BLOCK_M: tl.constexpr = max(16, triton.next_power_of_2(GROUP))  # the fewest rows of a matrix instruction
    kv_head = tl.program_id(0)
    decode = tl.program_id(1)
    split = tl.program_id(2)
    sequence = tl.load(decodes + decode * 2).to(tl.int64)
    if sequence < 0:
        return
    kv_len = tl.load(kv_lens + sequence)
    oldest, split_size = split_keys(kv_len, WINDOW, SPLIT_KEYS, MAX_SPLITS)
    start = oldest + split * split_size
    if (split > 0) & (start >= kv_len):
        return
    end = tl.minimum(start + split_size, kv_len)

    row = tl.load(decodes + decode * 2 + 1).to(tl.int64)
    m = tl.arange(0, BLOCK_M)
    d = tl.arange(0, BLOCK_D)
    head = kv_head * GROUP + m
    at = head[:, None] * HEAD_DIM + d[None, :]
    inside = (m < GROUP)[:, None] & (d < HEAD_DIM)[None, :]
    queries = tl.load(q + row * q_stride + at, mask=inside, other=0.0)
    acc, top, total = attend(
        tl.zeros((BLOCK_M, BLOCK_D), tl.float32),
        tl.full((BLOCK_M,), LOWEST, tl.float32),
        tl.zeros((BLOCK_M,), tl.float32),
        queries,
        k_pages + kv_head * HEAD_DIM,
        v_pages + kv_head * HEAD_DIM,
        table + sequence * table_stride,
        start,
        end,
        end,
        end - 1 + tl.zeros((BLOCK_M,), tl.int32),
        scale * k_scale,
        KV_HEADS,
        HEAD_DIM,
        PAGE_TOKENS,
        0,
        SOFTCAP,
        True,
        BLOCK_KEYS,
    )
    if kv_len - oldest <= split_size:
        factor = with_sinks(top, total, sinks, head, m < GROUP, HAS_SINKS) * v_scale
        # Nothing is visible to a sequence without keys: zeros, where total is 0 too.
        value = tl.where(kv_len > 0, acc * factor[:, None], 0.0)
        tl.store(out + row * out_stride + at, value.to(out.dtype.element_ty), mask=inside)
    else:
        place = (decode.to(tl.int64) * KV_HEADS * GROUP + head) * splits + split
        tl.store(part + place[:, None] * HEAD_DIM + d[None, :], acc, mask=inside)
        tl.store(part_max + place, top, mask=m < GROUP)
        tl.store(part_sum + place, total, mask=m < GROUP)


@triton.jit
def attention_combine(
    part,
    part_max,
    part_sum,
    decodes,
    kv_lens,
    sinks,
    out,
    splits,
    out_stride,
    v_scale,
    KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    WINDOW: tl.constexpr,
    HAS_SINKS: tl.constexpr,
    SPLIT_KEYS: tl.constexpr,
    MAX_SPLITS: tl.constexpr,
):
    """One head of one sequence from its splits; sequences of one split are finished already."""
    BLOCK_D: tl.constexpr = triton.next_power_of_2(HEAD_DIM)
    head = tl.program_id(0)
    decode = tl.program_id(1)
    sequence = tl.load(decodes + decode * 2).to(tl.int64)
    if sequence < 0:
        return
    kv_len = tl.load(kv_lens + sequence)
    oldest, split_size = split_keys(kv_len, WINDOW, SPLIT_KEYS, MAX_SPLITS)
    if kv_len - oldest <= split_size:
        return
    split = tl.arange(0, triton.next_power_of_2(MAX_SPLITS))
    d = tl.arange(0, BLOCK_D)
    there = split < tl.cdiv(kv_len - oldest, split_size)
    place = (decode.to(tl.int64) * KV_HEADS * GROUP + head) * splits + split
    tops = tl.load(part_max + place, mask=there, other=LOWEST)
    top = tl.max(tops, axis=0)
    weight = tl.exp2(tops - top)
    total = tl.sum(tl.load(part_sum + place, mask=there, other=0.0) * weight, axis=0)
    mask = there[:, None] & (d < HEAD_DIM)[None, :]
    values = tl.load(part + place[:, None] * HEAD_DIM + d[None, :], mask=mask, other=0.0)
    value = tl.sum(values * weight[:, None], axis=0) * (with_sinks(top, total, sinks, head, True, HAS_SINKS) * v_scale)
    row = tl.load(decodes + decode * 2 + 1).to(tl.int64)
    tl.store(out + row * out_stride + head * HEAD_DIM + d, value.to(out.dtype.element_ty), mask=d < HEAD_DIM)


@triton.jit
def attention_prefill(
    q,
    k_pages,
    v_pages,
    table,
    tiles,
    query_starts,
    kv_lens,
    sinks,
    out,
    q_stride,
    out_stride,
    table_stride,
    scale,
    k_scale,
    v_scale,
    KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    PAGE_TOKENS: tl.constexpr,
    WINDOW: tl.constexpr,
    SOFTCAP: tl.constexpr,
    HAS_SINKS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_KEYS: tl.constexpr,
):
    """BLOCK_M // GROUP tokens of one sequence for all query heads of one KV head: K and V are read once for them."""
    TOKENS: tl.constexpr = BLOCK_M // GROUP
    BLOCK_D: tl.constexpr = triton.next_power_of_2(HEAD_DIM)
    tl.static_assert(TOKENS > 0)
    kv_head = tl.program_id(0)
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
    d = tl.arange(0, BLOCK_D)
    token = m // GROUP
    head = kv_head * GROUP + m % GROUP
    inside = token < count
    row = (query_start + first).to(tl.int64)
    mask = inside[:, None] & (d < HEAD_DIM)[None, :]
    columns = head[:, None] * HEAD_DIM + d[None, :]
    queries = tl.load(q + row * q_stride + token[:, None] * q_stride + columns, mask=mask, other=0.0)

    # Three runs of keys: before `inner` some query no longer sees a key, from `outer` on some query does not see it
    # yet, and between them every query sees every key, and nothing is compared.
    end = base + count
    oldest = tl.maximum(base - WINDOW + 1, 0) if WINDOW > 0 else 0
    outer = oldest + (base + 1 - oldest) // BLOCK_KEYS * BLOCK_KEYS
    acc = tl.zeros((BLOCK_M, BLOCK_D), tl.float32)
    top = tl.full((BLOCK_M,), LOWEST, tl.float32)
    total = tl.zeros((BLOCK_M,), tl.float32)
    position = base + tl.minimum(token, count - 1)
    k_pages += kv_head * HEAD_DIM
    v_pages += kv_head * HEAD_DIM
    table += sequence * table_stride
    inner = oldest
    if WINDOW > 0:
        inner += tl.cdiv(tl.maximum(end - WINDOW - oldest, 0), BLOCK_KEYS) * BLOCK_KEYS
        inner = tl.minimum(inner, outer)
        acc, top, total = attend(
            acc, top, total, queries, k_pages, v_pages, table, oldest, inner, end, position, scale * k_scale,
            KV_HEADS, HEAD_DIM, PAGE_TOKENS, WINDOW, SOFTCAP, True, BLOCK_KEYS,
        )  # fmt: skip
    acc, top, total = attend(
        acc, top, total, queries, k_pages, v_pages, table, inner, outer, end, position, scale * k_scale,
        KV_HEADS, HEAD_DIM, PAGE_TOKENS, WINDOW, SOFTCAP, False, BLOCK_KEYS,
    )  # fmt: skip
    acc, top, total = attend(
        acc, top, total, queries, k_pages, v_pages, table, outer, end, end, position, scale * k_scale,
        KV_HEADS, HEAD_DIM, PAGE_TOKENS, WINDOW, SOFTCAP, True, BLOCK_KEYS,
    )  # fmt: skip
    value = acc * (with_sinks(top, total, sinks, head, inside, HAS_SINKS) * v_scale)[:, None]
    tl.store(out + row * out_stride + token[:, None] * out_stride + columns, value.to(out.dtype.element_ty), mask=mask)
