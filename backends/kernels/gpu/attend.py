"""Attention over paged KV: what each kernel takes. The code is in `sources/attention.py`.

q and out are (tokens, KV_HEADS * GROUP * HEAD_DIM) with a row stride in elements, of one type; query head h reads KV
head h // GROUP. k_pages and v_pages are (page, token, kv_head, head_dim), of q's type, fp8 or u8; value = code *
scale (`k_scale`, `v_scale`; 1 for q's type). table is i32 (S, table_stride), kv_lens i32 (S,): tokens of the sequence
with the new ones, which `rope_write` has put into the pages. Only visible keys are read: what else lies in a page, or
behind an entry of the table, may be anything. `sinks` (HEADS,), of q's type or fp32, are logits that take part in the
softmax and bring no value.

Words in the expressions: batch symbols D decode sequences, P prefill tiles, T tokens, L keys of the longest sequence of
the launch; `<pointer>_bytes` is the size of one element of that pointer.

Constants:
    WINDOW: key j is visible to query i when i - j < WINDOW; 0: no window.
    SOFTCAP: scores become SOFTCAP * tanh(score / SOFTCAP); 0.0: none.
    SPLIT_KEYS, MAX_SPLITS: a decode sequence of n visible keys is split into parts of
        SPLIT_KEYS * cdiv(n, SPLIT_KEYS * MAX_SPLITS) keys: what is added to what depends on its own length only, and
        there are at most MAX_SPLITS parts. The same for every row bucket, or sums would depend on the neighbours.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from plait.backends.kernels.gpu.archs import Arch
from plait.backends.kernels.gpu.kernel import Constant, Kernel, Tile

_SOURCE = "plait.backends.kernels.gpu.sources.attention"
_VISIBLE = "(min(L, WINDOW) if WINDOW else L)"
_SHAPE = ("KV_HEADS", "GROUP", "HEAD_DIM")
_MEANING = ("PAGE_TOKENS", "WINDOW", "SOFTCAP", "HAS_SINKS")
_SPLITS = ("SPLIT_KEYS", "MAX_SPLITS")
_FLOPS = f"4 * KV_HEADS * GROUP * HEAD_DIM * {_VISIBLE}"
_SCALES: dict[str, Literal["i32", "f32"]] = {"scale": "f32", "k_scale": "f32", "v_scale": "f32"}

#: One new token of each of D sequences. decodes i32 (D, 2): the sequence (its row in table and kv_lens; -1: do
#: nothing), and the token's row in q and out. A sequence with kv_len 0 gets zeros; one whose keys are one split is done
#: here. The others leave in part fp32 (D, HEADS, splits, HEAD_DIM) sums of exp2(score - max) * v, in part_max and
#: part_sum fp32 (D, HEADS, splits) that max, in units of log 2, and the sum of weights, for `attention_combine`; where
#: no sequence has more than one split, `attention_combine` need not run. `splits` is the most splits of a sequence, or
#: more.
ATTENTION_DECODE = Kernel(
    name="attention_decode",
    source=f"{_SOURCE}:attention_decode",
    pointers=(
        *("q", "k_pages", "v_pages", "table", "decodes", "kv_lens", "sinks"),
        *("part", "part_max", "part_sum", "out"),
    ),
    scalars={"splits": "i32", "q_stride": "i32", "out_stride": "i32", "table_stride": "i32", **_SCALES},
    constants=(*_SHAPE, *_MEANING, *_SPLITS),
    tile=("BLOCK_KEYS",),
    grid=("KV_HEADS", "D", "splits"),
    nature="attend",
    written=("part", "part_max", "part_sum", "out"),
    flops=f"D * {_FLOPS}",
    bytes=f"D * KV_HEADS * HEAD_DIM * (2 * {_VISIBLE} * k_pages_bytes + 2 * GROUP * q_bytes)",
)

#: Adds up the splits that `attention_decode` left, with the same decodes, kv_lens and splits.
ATTENTION_COMBINE = Kernel(
    name="attention_combine",
    source=f"{_SOURCE}:attention_combine",
    pointers=("part", "part_max", "part_sum", "decodes", "kv_lens", "sinks", "out"),
    scalars={"splits": "i32", "out_stride": "i32", "v_scale": "f32"},
    constants=(*_SHAPE, "WINDOW", "HAS_SINKS", *_SPLITS),
    tile=(),
    grid=("KV_HEADS * GROUP", "D", "1"),
    nature="stream",
    written=("out",),
    flops="3 * D * KV_HEADS * GROUP * HEAD_DIM * splits",
    bytes="D * KV_HEADS * GROUP * (HEAD_DIM * (4 * splits + out_bytes) + 8 * splits)",
)

#: Several new tokens of a sequence, causally. tiles i32 (P, 2): the sequence (-1: do nothing), and the first query of
#: the tile, counted from the sequence's first new token. A tile is BLOCK_M // GROUP tokens, of which those beyond the
#: sequence's end are left out. query_starts i32 (S + 1,). Tiles that come first start first: put the longest ahead.
ATTENTION_PREFILL = Kernel(
    name="attention_prefill",
    source=f"{_SOURCE}:attention_prefill",
    pointers=("q", "k_pages", "v_pages", "table", "tiles", "query_starts", "kv_lens", "sinks", "out"),
    scalars={"q_stride": "i32", "out_stride": "i32", "table_stride": "i32", **_SCALES},
    constants=(*_SHAPE, *_MEANING),
    tile=("BLOCK_M", "BLOCK_KEYS"),
    grid=("KV_HEADS", "P", "1"),
    nature="attend",
    written=("out",),
    flops=f"T * {_FLOPS}",
    bytes=f"KV_HEADS * HEAD_DIM * (2 * P * {_VISIBLE} * k_pages_bytes + 2 * T * GROUP * q_bytes)",
)

KERNELS = (ATTENTION_DECODE, ATTENTION_COMBINE, ATTENTION_PREFILL)


@dataclass(frozen=True)
class _Shapes:
    """Shapes worth trying: of decode (BLOCK_KEYS, warps, stages), of prefill (BLOCK_M, BLOCK_KEYS, warps, stages), for
    heads of up to 128 values."""

    decode: tuple[tuple[int, int, int], ...]
    prefill: tuple[tuple[int, int, int, int], ...]


_WARP_GROUPS = _Shapes(
    decode=((64, 4, 3), (64, 4, 2), (32, 4, 3), (128, 8, 2)),
    prefill=((128, 64, 8, 3), (128, 64, 8, 2), (64, 64, 4, 2)),
)
_WARPS = _Shapes(
    decode=((64, 4, 2), (32, 4, 3), (32, 4, 2)),
    prefill=((64, 64, 4, 2), (64, 32, 4, 2), (128, 64, 8, 2)),
)
_WAVES = _Shapes(
    decode=((64, 4, 1), (32, 4, 1), (32, 4, 2), (64, 4, 2)),
    prefill=((128, 64, 4, 1), (128, 32, 4, 2), (64, 32, 4, 1), (128, 64, 8, 1)),
)
_HALF_WAVES = _Shapes(decode=((32, 4, 1), (16, 4, 1)), prefill=((64, 32, 8, 1), (64, 16, 4, 1)))
#: By how an architecture's best matrix instruction starts.
_SHAPES = {
    "tcgen05.mma": _WARP_GROUPS,
    "wgmma.mma_async": _WARP_GROUPS,
    "mma.sync": _WARPS,
    "v_mfma_": _WAVES,
    "v_wmma_": _HALF_WAVES,
}
#: float32 is multiplied by v_mfma alone. Elsewhere the operands stay in registers: small tiles, many threads.
_FLOAT32 = {
    True: _Shapes(decode=((32, 4, 1),), prefill=((64, 32, 4, 1), (32, 32, 4, 1))),
    False: _Shapes(
        decode=((32, 8, 2), (32, 8, 1), (16, 4, 2)), prefill=((32, 16, 8, 2), (32, 16, 8, 1), (16, 16, 4, 2))
    ),
}
#: Heads wider than that have half as many keys in a block for every doubling.
_HEAD_DIM = 128


def candidates(
    kernel: Kernel, types: Mapping[str, str], constants: Mapping[str, Constant], arch: Arch, rows: int | None = None
) -> tuple[Tile, ...]:
    """Tiles worth compiling. They are the same for any number of rows: see SPLIT_KEYS."""
    if kernel is ATTENTION_COMBINE:
        return (Tile({}, num_warps=4), Tile({}, num_warps=2))
    shapes = _FLOAT32[arch.matrix[0] == "v_mfma_"] if types["q"] == "fp32" else _SHAPES[arch.matrix[0]]
    wide = -(-int(constants["HEAD_DIM"]) // _HEAD_DIM)
    wide *= 2 if types["k_pages"] == "u8" else 1  # converting them takes registers
    if kernel is ATTENTION_DECODE:
        found = [
            Tile({"BLOCK_KEYS": max(16, keys // wide)}, num_warps=warps, num_stages=stages)
            for keys, warps, stages in shapes.decode
        ]
    else:
        least = 1 << (int(constants["GROUP"]) - 1).bit_length()  # a tile has one token at least
        found = [
            Tile({"BLOCK_M": max(m, least), "BLOCK_KEYS": max(16, keys // wide)}, num_warps=warps, num_stages=stages)
            for m, keys, warps, stages in shapes.prefill
        ]
    return tuple(tile for i, tile in enumerate(found) if tile not in found[:i])
