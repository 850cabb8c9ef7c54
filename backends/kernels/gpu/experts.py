"""A mixture of experts: what each kernel takes. The code is in `sources/experts.py`.

A pair is a token with one of its experts: pair token * TOP + j. choices (rows, TOP), i32, has the expert of each pair,
-1 where a token has fewer; shares (rows, TOP), fp32, what the expert counts. `sort_pairs` puts pairs in the order of
their experts, those of one expert in their own: pairs[place] is the pair that stands at a place, places[pair] is where
a pair stands, and counts (EXPERTS,) says how many pairs each expert has; all i32. The products work on tiles of places
of one expert. How the tiles lie depends on the batch, how many there can be does not: those beyond the last do nothing.

Constants:
    EXPERTS, TOP: experts, and experts per token.
    SCORING: softmax or sigmoid. NORMALISE: shares are divided by their sum plus `least`.
    GROUPS, TOP_GROUPS, GROUP_SCORE: groups of neighbouring experts, how many of them can be chosen from, and their
        score: `max` or `top2`; GROUPS 1: all.
    DENSE: `route` writes out, fp32 (rows, EXPERTS), 0 for what is not chosen; else choices and shares.
    ACTIVATION: silu, gelu, gelu_tanh, or clamped_swiglu with ALPHA and LIMIT (0.0 for the others).
    CODES: how matrices are held: none (numbers of x's type), fp8, i8, or u4 and e2m1; PACK codes to a byte, two as in
        `gemm_int4`. value = (code - zero) * scale in float32, rounded to x's type; without HAS_ZEROS zero is 8 for u4
        and 0 for the others. Each matrix has scales (and zeros) of its own, (cdiv(N, SCALE_N), cdiv(K, GROUP)); SCALE_N
        0 and GROUP 0 are one for all rows, and one for a whole row. GROUP is a power of two from 16.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from plait.backends.kernels.gpu import gemm
from plait.backends.kernels.gpu.archs import Arch
from plait.backends.kernels.gpu.kernel import Constant, Kernel, Tile

_SOURCE = "plait.backends.kernels.gpu.sources.experts"

#: scores (rows, EXPERTS), of any type; selection_bias fp32 (EXPERTS,) is added for the choice alone.
ROUTE = Kernel(
    name="route",
    source=f"{_SOURCE}:route",
    pointers=("scores", "selection_bias", "out", "choices", "shares"),
    scalars={"rows": "i32", "scores_stride": "i32", "least": "f32", "scale": "f32"},
    constants=(
        *("EXPERTS", "TOP", "SCORING", "NORMALISE", "HAS_SELECTION"),
        *("GROUPS", "TOP_GROUPS", "GROUP_SCORE", "DENSE"),
    ),
    tile=(),
    grid=("rows", "1", "1"),
    nature="stream",
    written=("out", "choices", "shares"),
    flops="rows * EXPERTS * (5 + 2 * TOP)",
    bytes="rows * (EXPERTS * (scores_bytes + 4 * DENSE) + 8 * TOP * (1 - DENSE))",
)

#: choices and shares of routing, fp32 (rows, EXPERTS): the first TOP that are not 0.
CHOOSE = Kernel(
    name="choose",
    source=f"{_SOURCE}:choose",
    pointers=("routing", "choices", "shares"),
    scalars={"rows": "i32", "routing_stride": "i32"},
    constants=("EXPERTS", "TOP"),
    tile=(),
    grid=("rows", "1", "1"),
    nature="stream",
    written=("choices", "shares"),
    flops="rows * EXPERTS",
    bytes="rows * (4 * EXPERTS + 8 * TOP)",
)

#: counts, pairs and places of `count` choices.
SORT_PAIRS = Kernel(
    name="sort_pairs",
    source=f"{_SOURCE}:sort_pairs",
    pointers=("choices", "counts", "pairs", "places"),
    scalars={"count": "i32"},
    constants=("EXPERTS",),
    tile=("BLOCK_PAIRS", "BLOCK_EXPERTS"),
    grid=("cdiv(EXPERTS, BLOCK_EXPERTS)", "1", "1"),
    nature="stream",
    written=("counts", "pairs", "places"),
    flops="4 * count * EXPERTS",
    bytes="4 * (3 * count + EXPERTS)",
)

_TILES = "(min(EXPERTS, rows * TOP) + (rows * TOP - min(EXPERTS, rows * TOP)) // BLOCK_M)"
_GRID = (f"{_TILES} * cdiv(N, BLOCK_N)", "1", "1")
#: Rows that tiles are filled up with count too: there may be more of them than real ones.
_FLOPS = f"{_TILES} * BLOCK_M * N * K"
_ENDS = "rows * TOP * (K * x_bytes + N * out_bytes)"
_FORMAT = ("CODES", "PACK", "SCALE_N", "GROUP", "HAS_ZEROS")
_TILE = ("BLOCK_M", "BLOCK_N", "BLOCK_K", "GROUP_M", "XCDS")

#: w is (2 * EXPERTS, N, K): every expert's gate, then every expert's up; bias (2 * EXPERTS, N) too.
#: out[place] = act(x[token] gate^T + bias, x[token] up^T + bias).
EXPERTS_GATED = Kernel(
    name="experts_gated",
    source=f"{_SOURCE}:experts_gated",
    pointers=("x", "w", "scales", "zeros", "bias", "pairs", "counts", "out"),
    scalars={"rows": "i32", "N": "i32", "K": "i32", "x_stride": "i32", "out_stride": "i32"},
    constants=("EXPERTS", "TOP", "ACTIVATION", "ALPHA", "LIMIT", "HAS_BIAS", *_FORMAT, "EVEN_K"),
    tile=_TILE,
    grid=_GRID,
    nature="multiply",
    written=("out",),
    flops=f"4 * {_FLOPS}",
    bytes=f"{_ENDS} + min(EXPERTS, rows * TOP) * 2 * N * K * w_bytes // PACK",
)

#: x (places, K), w (EXPERTS, N, K), bias (EXPERTS, N): out[place] = share * (x[place] w^T + bias).
EXPERTS_DOWN = Kernel(
    name="experts_down",
    source=f"{_SOURCE}:experts_down",
    pointers=("x", "w", "scales", "zeros", "bias", "shares", "pairs", "counts", "out"),
    scalars={"rows": "i32", "N": "i32", "K": "i32", "x_stride": "i32", "out_stride": "i32"},
    constants=("EXPERTS", "TOP", "HAS_BIAS", *_FORMAT, "EVEN_K"),
    tile=_TILE,
    grid=_GRID,
    nature="multiply",
    written=("out",),
    flops=f"2 * {_FLOPS}",
    bytes=f"{_ENDS} + min(EXPERTS, rows * TOP) * N * K * w_bytes // PACK",
)

#: out[token] = the sum of parts[places[pair]] over its pairs, those of choice -1 left out.
EXPERTS_SUM = Kernel(
    name="experts_sum",
    source=f"{_SOURCE}:experts_sum",
    pointers=("parts", "choices", "places", "out"),
    scalars={"rows": "i32", "H": "i32", "parts_stride": "i32", "out_stride": "i32"},
    constants=("TOP",),
    tile=("BLOCK",),
    grid=("rows", "cdiv(H, BLOCK)", "1"),
    nature="stream",
    written=("out",),
    flops="rows * TOP * H",
    bytes="rows * (H * (TOP * parts_bytes + out_bytes) + 8 * TOP)",
)

KERNELS = (ROUTE, CHOOSE, SORT_PAIRS, EXPERTS_GATED, EXPERTS_DOWN, EXPERTS_SUM)


def indices(kernel: Kernel, constants: Mapping[str, Constant], rows: int) -> dict[str, NDArray[np.int32]]:
    """What a launch that is timed by itself reads of the steps before it: `rows` tokens, spread evenly over the
    experts. Whatever else lies there would lead it out of its memory."""
    if kernel not in (EXPERTS_GATED, EXPERTS_DOWN, EXPERTS_SUM):
        return {}
    count, experts = rows * int(constants["TOP"]), int(constants.get("EXPERTS", 1))
    choices = np.arange(count, dtype=np.int32) % np.int32(experts)
    pairs = np.argsort(choices, kind="stable").astype(np.int32)
    places = np.argsort(pairs).astype(np.int32)
    counts = np.bincount(choices, minlength=experts).astype(np.int32)
    made = {"choices": choices, "pairs": pairs, "places": places, "counts": counts}
    return {name: array for name, array in made.items() if name in kernel.pointers}


_ONE_WARP = 1024
"""Up to so many experts one warp looks at a row: nothing is shared between warps."""


def candidates(
    kernel: Kernel, types: Mapping[str, str], constants: Mapping[str, Constant], arch: Arch, rows: int | None = None
) -> tuple[Tile, ...]:
    """Tiles worth compiling for launches of at most `rows` tokens (None: any number)."""
    if kernel in (ROUTE, CHOOSE):
        return (Tile({}, num_warps=1 if int(constants["EXPERTS"]) <= _ONE_WARP else 4),)
    if kernel is SORT_PAIRS:
        return (Tile({"BLOCK_PAIRS": 256, "BLOCK_EXPERTS": 8}), Tile({"BLOCK_PAIRS": 512, "BLOCK_EXPERTS": 4}))
    if kernel is EXPERTS_SUM:
        lanes = arch.warp * (4 if types["parts"] == "fp32" else 8)
        return tuple(Tile({"BLOCK": lanes * warps}, num_warps=warps) for warps in (4, 2))
    pairs = None if rows is None else max(1, rows * int(constants["TOP"]) // int(constants["EXPERTS"]))
    gated, codes = kernel is EXPERTS_GATED, str(constants["CODES"])
    if codes == "none":
        return gemm.candidates(gemm.GEMM_GATED if gated else gemm.GEMM, types, constants, arch, pairs)
    like = gemm.GEMM_INT4 if codes in ("u4", "e2m1") else gemm.GEMM_INT8
    found = [_halved(tile) if gated else tile for tile in gemm.candidates(like, types, constants, arch, pairs)]
    return tuple(tile for i, tile in enumerate(found) if tile not in found[:i])


def _halved(tile: Tile) -> Tile:
    """With as many rows of w, of two matrices."""
    return replace(tile, constants={**tile.constants, "BLOCK_N": max(16, tile.constants["BLOCK_N"] // 2)})
