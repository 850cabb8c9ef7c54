"""A mixture of experts: which experts a token takes, and products with the matrices of each. Arguments:
`plait.backends.kernels.gpu.experts`.

A pair is a token with one of its experts, number token * TOP + place among the token's experts. Pairs are put in the
order of their experts, and every tile of a product has pairs of one expert. Nothing is added up by atomics: what a
token gets does not depend on who else is in the batch.
"""

# ruff: noqa: N803, N806 (compile-time arguments are capitals)

import triton
import triton.language as tl

from plait.backends.kernels.gpu.sources.gemm import activate, finish, halves, load_k, load_x, multiply, origin, within
from plait.backends.kernels.gpu.sources.gemm_quant import load_scales, spread
from plait.backends.kernels.gpu.sources.head import order

#: Below every key that `order` makes.
TAKEN = tl.constexpr(-0x80000000)
NOWHERE = tl.constexpr(0x7FFFFFFF)


@triton.jit
def first_largest(key, index):
    """The smallest index among the largest keys."""
    return tl.min(tl.where(key == tl.max(key), index, NOWHERE))


@triton.jit
def group_scores(ranked, inside, SCORE: tl.constexpr):
    """(groups,) the largest score of each group (groups, members), or the sum of its two largest."""
    tl.static_assert(SCORE == "max" or SCORE == "top2", SCORE)
    value = tl.where(inside, ranked, float("-inf"))
    best = tl.max(value, axis=1)
    if SCORE == "top2":
        member = tl.arange(0, value.shape[1])[None, :]
        place = tl.min(tl.where(value == best[:, None], member, NOWHERE), axis=1)
        best += tl.max(tl.where(member == place[:, None], float("-inf"), value), axis=1)
    return best


@triton.jit
def route(
    scores,
    selection_bias,
    out,
    choices,
    shares,
    rows,
    scores_stride,
    least,
    scale,
    EXPERTS: tl.constexpr,
    TOP: tl.constexpr,
    SCORING: tl.constexpr,
    NORMALISE: tl.constexpr,
    HAS_SELECTION: tl.constexpr,
    GROUPS: tl.constexpr,
    TOP_GROUPS: tl.constexpr,
    GROUP_SCORE: tl.constexpr,
    DENSE: tl.constexpr,
):
    """The experts of one token and what each counts."""
    MEMBERS: tl.constexpr = EXPERTS // GROUPS
    SLOTS: tl.constexpr = triton.next_power_of_2(TOP)
    tl.static_assert(SCORING == "softmax" or SCORING == "sigmoid", SCORING)
    row = tl.program_id(0).to(tl.int64)
    group = tl.arange(0, triton.next_power_of_2(GROUPS))
    member = tl.arange(0, triton.next_power_of_2(MEMBERS))[None, :]
    inside = (group[:, None] < GROUPS) & (member < MEMBERS)
    index = group[:, None] * MEMBERS + member
    raw = tl.load(scores + row * scores_stride + index, mask=inside, other=float("-inf")).to(tl.float32)
    if SCORING == "softmax":
        score = tl.exp(raw - tl.max(raw))
        score = score / tl.sum(score)
    else:
        score = 1.0 / (1.0 + tl.exp(-raw))
    ranked = score
    if HAS_SELECTION:
        ranked += tl.load(selection_bias + index, mask=inside, other=0.0).to(tl.float32)
    free = inside
    if GROUPS > 1:
        group_key = tl.where(group < GROUPS, order(group_scores(ranked, inside, GROUP_SCORE)), TAKEN)
        kept = group < 0
        for _ in tl.range(0, TOP_GROUPS):
            place = first_largest(group_key, group)
            kept = kept | (group == place)
            group_key = tl.where(group == place, TAKEN, group_key)
        free = free & kept[:, None]
    key = tl.where(free, order(ranked), TAKEN)
    slot = tl.arange(0, SLOTS)
    chosen = tl.zeros((SLOTS,), tl.int32)
    share = tl.zeros((SLOTS,), tl.float32)
    for j in tl.range(0, TOP):
        place = first_largest(key, index)
        chosen = tl.where(slot == j, place, chosen)
        share = tl.where(slot == j, tl.sum(tl.where(index == place, score, 0.0)), share)
        key = tl.where(index == place, TAKEN, key)
    factor = scale / (tl.sum(share) + least) if NORMALISE else scale
    if DENSE:
        taken = inside & (key == TAKEN) & free
        tl.store(out + row * EXPERTS + index, tl.where(taken, score * factor, 0.0), mask=inside)
    else:
        tl.store(choices + row * TOP + slot, chosen, mask=slot < TOP)
        tl.store(shares + row * TOP + slot, share * factor, mask=slot < TOP)


@triton.jit
def choose(routing, choices, shares, rows, routing_stride, EXPERTS: tl.constexpr, TOP: tl.constexpr):
    """The experts of one token from a row that is 0 for all others; -1 where it has less than TOP."""
    row = tl.program_id(0).to(tl.int64)
    index = tl.arange(0, triton.next_power_of_2(EXPERTS))
    share = tl.load(routing + row * routing_stride + index, mask=index < EXPERTS, other=0.0)
    there = share != 0.0
    slot = tl.cumsum(there.to(tl.int32), axis=0) - 1
    there = there & (slot < TOP)
    tl.store(choices + row * TOP + slot, index, mask=there)
    tl.store(shares + row * TOP + slot, share, mask=there)
    slot = tl.arange(0, triton.next_power_of_2(TOP))
    left = (slot >= tl.sum(there.to(tl.int32))) & (slot < TOP)
    tl.store(choices + row * TOP + slot, -1, mask=left)


@triton.jit
def sort_pairs(
    choices, counts, pairs, places, count, EXPERTS: tl.constexpr, BLOCK_PAIRS: tl.constexpr, BLOCK_EXPERTS: tl.constexpr
):
    """For BLOCK_EXPERTS experts: how many pairs have them, and where these stand among the sorted ones."""
    expert = tl.program_id(0) * BLOCK_EXPERTS + tl.arange(0, BLOCK_EXPERTS)[None, :]
    before = tl.zeros((BLOCK_EXPERTS,), tl.int32)
    own = tl.zeros((BLOCK_EXPERTS,), tl.int32)
    for first in tl.range(0, count, BLOCK_PAIRS):
        pair = first + tl.arange(0, BLOCK_PAIRS)
        chosen = tl.load(choices + pair, mask=pair < count, other=-1)[:, None]
        before += tl.sum(((chosen >= 0) & (chosen < expert)).to(tl.int32), axis=0)
        own += tl.sum((chosen == expert).to(tl.int32), axis=0)
    at = tl.program_id(0) * BLOCK_EXPERTS + tl.arange(0, BLOCK_EXPERTS)
    tl.store(counts + at, own, mask=at < EXPERTS)
    for first in tl.range(0, count, BLOCK_PAIRS):
        pair = first + tl.arange(0, BLOCK_PAIRS)
        there = tl.load(choices + pair, mask=pair < count, other=-1)[:, None] == expert
        place = before[None, :] + tl.cumsum(there.to(tl.int32), axis=0) - 1
        tl.store(pairs + place, pair[:, None] + tl.zeros_like(place), mask=there)
        tl.store(places + pair[:, None] + tl.zeros_like(place), place, mask=there)
        before += tl.sum(there.to(tl.int32), axis=0)


@triton.jit
def most_tiles(rows, EXPERTS: tl.constexpr, TOP: tl.constexpr, BLOCK_M: tl.constexpr):
    """How many tiles the pairs of so many tokens can have: each expert's last one may have a single row."""
    count = rows * TOP
    spread = tl.minimum(count, EXPERTS)
    return spread + (count - spread) // BLOCK_M


@triton.jit
def tile_of(counts, tile, EXPERTS: tl.constexpr, BLOCK_M: tl.constexpr):
    """The expert of a tile, its first place among the sorted pairs, and how many are left of that expert from there;
    not more than 0 where there are no so many tiles."""
    index = tl.arange(0, triton.next_power_of_2(EXPERTS))
    count = tl.load(counts + index, mask=index < EXPERTS, other=0)
    tiles = (count + (BLOCK_M - 1)) // BLOCK_M
    expert = tl.sum((tl.cumsum(tiles, axis=0) <= tile).to(tl.int32))
    skipped = (tile - tl.sum(tl.where(index < expert, tiles, 0))) * BLOCK_M
    first = tl.sum(tl.where(index < expert, count, 0)) + skipped
    return expert, first, tl.sum(tl.where(index == expert, count, 0)) - skipped


@triton.jit
def e2m1(code):
    """float32 of 4-bit codes (OCP Microscaling Formats 1.0: 2 bits of exponent, bias 1, one of mantissa)."""
    size = code.to(tl.int32) & 7
    normal = ((size << 22) + (126 << 23)).to(tl.float32, bitcast=True)
    value = tl.where(size < 2, size.to(tl.float32) * 0.5, normal)
    return tl.where((code & 8) != 0, -value, value)


@triton.jit
def product(
    x,
    w,
    scales,
    zeros,
    acc,
    n,
    scale_n,
    left,
    K,
    CODES: tl.constexpr,
    PACK: tl.constexpr,
    GROUP: tl.constexpr,
    HAS_ZEROS: tl.constexpr,
    EVEN_K: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """acc + x w^T of a tile.

    Args:
        x: (BLOCK_M, BLOCK_K) pointers to the first step, of which `left` rows exist.
        n: rows of w, and scale_n: rows of its scales, counted from the pointers.
    """
    row = K // PACK
    if PACK == 2 and EVEN_K >= 32:
        row = tl.multiple_of(row, 16)
    w += n[:, None] * row + tl.arange(0, BLOCK_K // PACK)[None, :]
    if CODES == "none":
        for done in tl.range(0, K, BLOCK_K):
            x_part = load_x(x, left, K - done, BLOCK_M, BLOCK_K, EVEN_K)
            acc = multiply(x_part, load_k(w, K - done, BLOCK_K, EVEN_K >= BLOCK_K), acc)
            x += BLOCK_K
            w += BLOCK_K
    else:
        # One scale per row is one group of a row, whatever K. Scales are loaded a step ahead: see `gemm_quant`.
        SPAN: tl.constexpr = GROUP if GROUP else BLOCK_K
        BLOCK_N: tl.constexpr = n.shape[0]
        tl.static_assert(SPAN % BLOCK_K == 0 or BLOCK_K % SPAN == 0, "a step is whole groups, or a part of one")
        per_row = tl.cdiv(K, GROUP) if GROUP else 1
        next_scale = load_scales(scales + scale_n * per_row, 0, K, SPAN, BLOCK_K)
        if HAS_ZEROS:
            next_zero = load_scales(zeros + scale_n * per_row, 0, K, SPAN, BLOCK_K)
        for done in tl.range(0, K, BLOCK_K):
            x_part = load_x(x, left, K - done, BLOCK_M, BLOCK_K, EVEN_K)
            codes = load_k(w, (K - done) // PACK, BLOCK_K // PACK, EVEN_K >= BLOCK_K)
            if PACK == 2:
                codes = tl.interleave(codes & 15, (codes >> 4) & 15)
            value = e2m1(codes) if CODES == "e2m1" else codes.to(tl.float32)
            if HAS_ZEROS:
                value -= spread(next_zero, SPAN, BLOCK_N, BLOCK_K)
            elif CODES == "u4":
                value -= 8.0
            value *= spread(next_scale, SPAN, BLOCK_N, BLOCK_K)
            if GROUP:
                next_scale = load_scales(scales + scale_n * per_row, done + BLOCK_K, K, SPAN, BLOCK_K)
                if HAS_ZEROS:
                    next_zero = load_scales(zeros + scale_n * per_row, done + BLOCK_K, K, SPAN, BLOCK_K)
            acc = multiply(x_part, value.to(x.dtype.element_ty), acc)
            x += BLOCK_K
            w += BLOCK_K // PACK
    return acc


@triton.jit
def scale_rows(N, SCALE_N: tl.constexpr):
    """Rows of the scales of one matrix."""
    return tl.cdiv(N, SCALE_N) if SCALE_N else 1


@triton.jit
def scale_row(n, SCALE_N: tl.constexpr):
    """Which of them belongs to a row of the matrix."""
    return n // SCALE_N if SCALE_N else n * 0


@triton.jit
def clamped_swiglu(gate, up, ALPHA: tl.constexpr, LIMIT: tl.constexpr):
    """g sigmoid(alpha g) (u + 1), both clamped first."""
    gate = tl.minimum(gate, LIMIT)
    up = tl.clamp(up, -LIMIT, LIMIT)
    return gate * tl.sigmoid(ALPHA * gate) * (up + 1.0)


@triton.jit
def experts_gated(
    x,
    w,
    scales,
    zeros,
    bias,
    pairs,
    counts,
    out,
    rows,
    N,
    K,
    x_stride,
    out_stride,
    EXPERTS: tl.constexpr,
    TOP: tl.constexpr,
    ACTIVATION: tl.constexpr,
    ALPHA: tl.constexpr,
    LIMIT: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    CODES: tl.constexpr,
    PACK: tl.constexpr,
    SCALE_N: tl.constexpr,
    GROUP: tl.constexpr,
    HAS_ZEROS: tl.constexpr,
    EVEN_K: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    GROUP_M: tl.constexpr,
    XCDS: tl.constexpr,
):
    """out[place] = act(x gate^T, x up^T) of the token and the expert of a sorted pair; w is all gates, then all ups."""
    most = most_tiles(rows, EXPERTS, TOP, BLOCK_M)
    row, column = origin(most * BLOCK_M, N, BLOCK_M, BLOCK_N, GROUP_M, XCDS)
    expert, first, left = tile_of(counts, row // BLOCK_M, EXPERTS, BLOCK_M)
    if left <= 0:
        return
    token = tl.load(pairs + first + within(0, left, BLOCK_M)) // TOP
    x_tile = x + token.to(tl.int64)[:, None] * x_stride + tl.arange(0, BLOCK_K)[None, :]
    # The tile of w is BLOCK_N rows of gate over BLOCK_N rows of up: one product makes both.
    n = column + within(column, N, BLOCK_N)[None, :]
    matrix = (tl.arange(0, 2)[:, None] * EXPERTS + expert).to(tl.int64)
    w_rows = tl.reshape(matrix * N + n, (2 * BLOCK_N,))
    scale_n = tl.reshape(matrix * scale_rows(N, SCALE_N) + scale_row(n, SCALE_N), (2 * BLOCK_N,))
    acc = product(
        x_tile, w, scales, zeros, tl.zeros((BLOCK_M, 2 * BLOCK_N), tl.float32), w_rows, scale_n, left, K,
        CODES, PACK, GROUP, HAS_ZEROS, EVEN_K, BLOCK_M, BLOCK_K,
    )  # fmt: skip
    gate, up = halves(acc, BLOCK_M, BLOCK_N)
    if HAS_BIAS:
        n = column + tl.arange(0, BLOCK_N)[None, :]
        bias += expert * N
        gate += tl.load(bias + n, mask=n < N, other=0.0).to(tl.float32)
        up += tl.load(bias + EXPERTS * N + n, mask=n < N, other=0.0).to(tl.float32)
    if ACTIVATION == "clamped_swiglu":
        inner = clamped_swiglu(gate, up, ALPHA, LIMIT)
    else:
        inner = activate(gate, ACTIVATION) * up
    finish(inner, out, out, out, first, column, first + left, N, out_stride, out_stride, False, False, BLOCK_M, BLOCK_N)


@triton.jit
def experts_down(
    x,
    w,
    scales,
    zeros,
    bias,
    shares,
    pairs,
    counts,
    out,
    rows,
    N,
    K,
    x_stride,
    out_stride,
    EXPERTS: tl.constexpr,
    TOP: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    CODES: tl.constexpr,
    PACK: tl.constexpr,
    SCALE_N: tl.constexpr,
    GROUP: tl.constexpr,
    HAS_ZEROS: tl.constexpr,
    EVEN_K: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    GROUP_M: tl.constexpr,
    XCDS: tl.constexpr,
):
    """out[place] = share * (x[place] w^T + bias) of a sorted pair."""
    most = most_tiles(rows, EXPERTS, TOP, BLOCK_M)
    row, column = origin(most * BLOCK_M, N, BLOCK_M, BLOCK_N, GROUP_M, XCDS)
    expert, first, left = tile_of(counts, row // BLOCK_M, EXPERTS, BLOCK_M)
    if left <= 0:
        return
    m = within(0, left, BLOCK_M)
    x_tile = x + first.to(tl.int64) * x_stride + m[:, None] * x_stride + tl.arange(0, BLOCK_K)[None, :]
    n = within(column, N, BLOCK_N)
    w += (expert.to(tl.int64) * N + column) * (K // PACK)
    scale_n = expert.to(tl.int64) * scale_rows(N, SCALE_N) + scale_row(column + n, SCALE_N)
    acc = product(
        x_tile, w, scales, zeros, tl.zeros((BLOCK_M, BLOCK_N), tl.float32), n, scale_n, left, K,
        CODES, PACK, GROUP, HAS_ZEROS, EVEN_K, BLOCK_M, BLOCK_K,
    )  # fmt: skip
    if HAS_BIAS:
        acc += tl.load(bias + expert * N + column + n).to(tl.float32)[None, :]
    acc *= tl.load(shares + tl.load(pairs + first + m))[:, None]
    finish(acc, out, out, out, first, column, first + left, N, out_stride, out_stride, False, False, BLOCK_M, BLOCK_N)


@triton.jit
def experts_sum(parts, choices, places, out, rows, H, parts_stride, out_stride, TOP: tl.constexpr, BLOCK: tl.constexpr):
    """out[token] = the sum of the parts of its pairs, in their order."""
    row = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    total = tl.zeros((BLOCK,), tl.float32)
    for j in tl.static_range(TOP):
        there = tl.load(choices + row * TOP + j) >= 0
        place = tl.load(places + row * TOP + j, mask=there, other=0).to(tl.int64)
        total += tl.load(parts + place * parts_stride + at, mask=there & (at < H), other=0.0).to(tl.float32)
    tl.store(out + row * out_stride + at, total.to(out.dtype.element_ty), mask=at < H)
