"""Latent attention: what each kernel takes. The code is in `sources/latent.py`.

A page holds one row of LATENT + ROPE values for a token, [latent, k_rope], which all heads share: k_pages is (page,
token, 1, LATENT + ROPE). q is (tokens, HEADS * LATENT), q_rope (tokens, HEADS * ROPE), out as q. What else is here is
as in `plait.backends.kernels.gpu.attend`; splits of a decode sequence are added up by its `attention_combine`, with
one KV head of HEADS query heads.

Constants:
    HEADS, LATENT, ROPE: query heads, and the widths of the two parts of a row.
    GROUP: of `latent_prefill`, the heads of one program, a power of two; the last group may be cut short.
    TRANSPOSED: of `gemm_heads`, w is (HEADS, K, N) instead of (HEADS, N, K).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from plait.backends.kernels.gpu import gemm
from plait.backends.kernels.gpu.archs import Arch
from plait.backends.kernels.gpu.kernel import Constant, Kernel, Tile

_SOURCE = "plait.backends.kernels.gpu.sources.latent"
_SHAPE = ("HEADS", "LATENT", "ROPE")
_PAIR_FLOPS = "HEADS * (4 * LATENT + 2 * ROPE) * L"

#: out[:, h] = x[:, h] w[h]^T for each head: x (rows, HEADS * K), out (rows, HEADS * N).
GEMM_HEADS = Kernel(
    name="gemm_heads",
    source=f"{_SOURCE}:gemm_heads",
    pointers=("x", "w", "out"),
    scalars={"rows": "i32", "N": "i32", "K": "i32", "x_stride": "i32", "out_stride": "i32"},
    constants=("HEADS", "TRANSPOSED", "EVEN_K"),
    tile=("BLOCK_M", "BLOCK_N", "BLOCK_K", "GROUP_M", "XCDS"),
    grid=("cdiv(rows, BLOCK_M) * cdiv(N, BLOCK_N)", "HEADS", "1"),
    nature="multiply",
    written=("out",),
    flops="2 * HEADS * rows * N * K",
    bytes="HEADS * (rows * (K * x_bytes + N * out_bytes) + min(rows, 1) * N * K * w_bytes)",
)

#: latent (rows, LATENT) and k_rope (rows, ROPE) into k_pages at slots[r], as `rope_write` does.
LATENT_WRITE = Kernel(
    name="latent_write",
    source=f"{_SOURCE}:latent_write",
    pointers=("latent", "k_rope", "slots", "k_pages"),
    scalars={"rows": "i32", "latent_stride": "i32", "rope_stride": "i32"},
    constants=("LATENT", "ROPE"),
    tile=(),
    grid=("rows", "1", "1"),
    nature="stream",
    written=("k_pages",),
    bytes="rows * (LATENT + ROPE) * (latent_bytes + k_pages_bytes)",
)

#: As `attention_decode`, for BLOCK_M heads of one sequence.
LATENT_DECODE = Kernel(
    name="latent_decode",
    source=f"{_SOURCE}:latent_decode",
    pointers=(
        *("q", "q_rope", "k_pages", "table", "decodes", "kv_lens"),
        *("part", "part_max", "part_sum", "out"),
    ),
    scalars={
        **dict.fromkeys(("splits", "q_stride", "q_rope_stride", "out_stride", "table_stride"), "i32"),
        "scale": "f32",
    },
    constants=(*_SHAPE, "PAGE_TOKENS", "SPLIT_KEYS", "MAX_SPLITS"),
    tile=("BLOCK_M", "BLOCK_KEYS"),
    grid=("cdiv(HEADS, BLOCK_M)", "D", "splits"),
    nature="attend",
    written=("part", "part_max", "part_sum", "out"),
    flops=f"D * {_PAIR_FLOPS}",
    bytes="D * ((LATENT + ROPE) * (cdiv(HEADS, BLOCK_M) * L * k_pages_bytes + HEADS * q_bytes)"
    " + HEADS * LATENT * out_bytes)",
)

#: As `attention_prefill`, for GROUP heads.
LATENT_PREFILL = Kernel(
    name="latent_prefill",
    source=f"{_SOURCE}:latent_prefill",
    pointers=("q", "q_rope", "k_pages", "table", "tiles", "query_starts", "kv_lens", "out"),
    scalars={
        **dict.fromkeys(("q_stride", "q_rope_stride", "out_stride", "table_stride"), "i32"),
        "scale": "f32",
    },
    constants=(*_SHAPE, "GROUP", "PAGE_TOKENS"),
    tile=("BLOCK_M", "BLOCK_KEYS"),
    grid=("cdiv(HEADS, GROUP)", "P", "1"),
    nature="attend",
    written=("out",),
    flops=f"T * {_PAIR_FLOPS}",
    bytes="(LATENT + ROPE) * (cdiv(HEADS, GROUP) * P * L * k_pages_bytes + T * HEADS * q_bytes)"
    " + T * HEADS * LATENT * out_bytes",
)

KERNELS = (GEMM_HEADS, LATENT_WRITE, LATENT_DECODE, LATENT_PREFILL)


@dataclass(frozen=True)
class _Shapes:
    """Shapes worth trying, (BLOCK_M, BLOCK_KEYS, warps, stages), for a latent part of 512 values: the sums of a row
    take as many registers as those of four common heads."""

    decode: tuple[tuple[int, int, int, int], ...]
    prefill: tuple[tuple[int, int, int, int], ...]


_WARP_GROUPS = _Shapes(
    decode=((16, 32, 4, 2), (64, 32, 8, 2), (32, 32, 8, 2)),
    prefill=((64, 16, 8, 2), (64, 32, 8, 2), (32, 32, 8, 2)),
)
_WARPS = _Shapes(decode=((16, 32, 4, 2), (32, 32, 8, 2)), prefill=((32, 32, 8, 2), (16, 32, 4, 2)))
_WAVES = _Shapes(
    decode=((16, 32, 4, 1), (16, 16, 4, 1), (32, 32, 4, 1), (64, 16, 4, 1)),
    prefill=((64, 16, 4, 1), (32, 32, 4, 1), (32, 16, 4, 1)),
)
_HALF_WAVES = _Shapes(decode=((16, 16, 4, 1), (16, 16, 8, 1)), prefill=((16, 16, 4, 1), (16, 16, 8, 1)))
#: By how an architecture's best matrix instruction starts.
_SHAPES = {
    "tcgen05.mma": _WARP_GROUPS,
    "wgmma.mma_async": _WARP_GROUPS,
    "mma.sync": _WARPS,
    "v_mfma_": _WAVES,
    "v_wmma_": _HALF_WAVES,
}
#: float32: the operands stay in registers.
_FLOAT32 = _Shapes(decode=((16, 16, 4, 1), (16, 16, 8, 1)), prefill=((16, 16, 4, 1), (16, 16, 8, 1)))


def candidates(
    kernel: Kernel, types: Mapping[str, str], constants: Mapping[str, Constant], arch: Arch, rows: int | None = None
) -> tuple[Tile, ...]:
    """Tiles worth compiling for launches of at most `rows` rows (None: any number)."""
    if kernel is LATENT_WRITE:
        return (Tile({}, num_warps=1), Tile({}, num_warps=2))
    if kernel is GEMM_HEADS:
        products = gemm.candidates(gemm.GEMM, types, constants, arch, rows)
        # Transposed, a row of a tile is what lies side by side in memory.
        wide = tuple(tile for tile in products if not constants["TRANSPOSED"] or tile.constants["BLOCK_N"] >= 32)
        return wide or products
    shapes = _FLOAT32 if types["q"] == "fp32" else _SHAPES[arch.matrix[0]]
    # Converting FP8 takes registers.
    most = 16 if types["k_pages"] in ("u8", "fp8e4nv", "fp8e4b8", "fp8e5") else 32
    found = [
        Tile({"BLOCK_M": m, "BLOCK_KEYS": min(keys, most)}, num_warps=warps, num_stages=stages)
        for m, keys, warps, stages in (shapes.decode if kernel is LATENT_DECODE else shapes.prefill)
    ]
    return tuple(tile for i, tile in enumerate(found) if tile not in found[:i])
