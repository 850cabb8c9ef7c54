"""The attention kernels in the interpreter against attention written out in float64, and against the op's oracle.

Legend: S sequences, T tokens, H query heads, N KV heads, G = H / N, D head_dim, P pages.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from xdsl.utils.test_value import create_ssa_value

from plait.backends.kernels.gpu.interpret import NUMPY_TYPES
from plait.backends.kernels.gpu.kernel import Tile, Variant
from plait.backends.kernels.gpu.table import KERNELS
from plait.ir.ops import AttentionOp, OracleKV
from plait.ir.types import FP8, BatchType, KVType, element, tensor, tokens_by
from plait.spec import kv_class
from tests.kernels import run

SPLITS = {"SPLIT_KEYS": 32, "MAX_SPLITS": 4}

#: Largest error of an output whose values are about 1. 16-bit products take weights rounded to 8 (bf16) or 11 bits.
LIMIT = {"fp32": 2e-6, "bf16": 1.5e-2, "fp16": 2e-3}


@dataclass(frozen=True)
class Case:
    """A ragged batch: `lens` are (kv_len, query_len) of each sequence."""

    lens: tuple[tuple[int, int], ...]
    dtype: str = "fp32"
    kv_dtype: str = ""
    heads: int = 4
    kv_heads: int = 2
    head_dim: int = 64
    page_tokens: int = 4
    window: int = 0
    softcap: float = 0.0
    sinks: bool = False
    k_scale: float = 1.0
    v_scale: float = 1.0

    @property
    def group(self) -> int:
        return self.heads // self.kv_heads

    @property
    def pages_dtype(self) -> str:
        return self.kv_dtype or self.dtype

    @property
    def scale(self) -> float:
        return 1 / math.sqrt(self.head_dim)


class Data:
    """Arrays of a case. Pages hold the keys at places drawn by lot, infinities and NaN elsewhere."""

    def __init__(self, case: Case, seed: int = 0) -> None:
        self.case, rng = case, np.random.default_rng(seed)
        dtype, kv_dtype = NUMPY_TYPES[case.dtype], NUMPY_TYPES[case.pages_dtype]
        self.kv_lens = np.array([kv for kv, _ in case.lens], np.int32)
        self.query_starts = np.concatenate(([0], np.cumsum([count for _, count in case.lens]))).astype(np.int32)
        width = case.heads * case.head_dim
        # Rows are further apart than they are wide: q is part of a product of q, k and v.
        self.q = rng.standard_normal((self.query_starts[-1], width + 32)).astype(dtype)
        self.out = np.full((self.query_starts[-1], width + 16), np.nan, dtype)
        self.sinks = rng.standard_normal(case.heads).astype(dtype)
        shape = (case.kv_heads, case.head_dim)
        self.k = [rng.standard_normal((kv, *shape)).astype(kv_dtype) for kv, _ in case.lens]
        self.v = [rng.standard_normal((kv, *shape)).astype(kv_dtype) for kv, _ in case.lens]
        logical = [-(-kv // case.page_tokens) for kv, _ in case.lens]
        physical = [min(count, self._ring(new)) for count, (_, new) in zip(logical, case.lens, strict=True)]
        places = rng.permutation(sum(physical) + 3).astype(np.int32)
        self.table = np.full((len(case.lens), max(logical) + 2), -1, np.int32)
        dirt = np.where(rng.random((len(places), case.page_tokens, *shape)) < 0.5, np.nan, np.inf)
        self.k_pages, self.v_pages = dirt.astype(kv_dtype), (-dirt).astype(kv_dtype)
        for s, (count, ring) in enumerate(zip(logical, physical, strict=True)):
            mine, places = places[:ring], places[ring:]
            self.table[s, :count] = mine[np.arange(count) % max(ring, 1)]
            for j in range(len(self.k[s])):
                at = self.table[s, j // case.page_tokens], j % case.page_tokens
                self.k_pages[at], self.v_pages[at] = self.k[s][j], self.v[s][j]

    def _ring(self, new: int) -> int:
        """Pages that hold the keys some new query sees."""
        if not self.case.window:
            return 1 << 30
        return -(-(self.case.window + new - 1) // self.case.page_tokens) + 1

    def reference(self) -> np.ndarray[Any, Any]:
        """(T, H, D) in float64, one query and head after the other."""
        case = self.case
        out = np.zeros((len(self.q), case.heads, case.head_dim))
        q = self.q[:, : case.heads * case.head_dim].astype(np.float64).reshape(out.shape)
        for s, (kv_len, count) in enumerate(case.lens):
            k = self.k[s].astype(np.float64) * case.k_scale
            v = self.v[s].astype(np.float64) * case.v_scale
            for i in range(count):
                position = kv_len - count + i
                seen = [j for j in range(position + 1) if not case.window or position - j < case.window]
                for h in range(case.heads):
                    row = self.query_starts[s] + i
                    score = k[seen, h // case.group] @ q[row, h] * case.scale
                    if case.softcap:
                        score = case.softcap * np.tanh(score / case.softcap)
                    top = score.max()
                    weight = np.exp(score - top)
                    sink = np.exp(np.float64(self.sinks[h]) - top) if case.sinks else 0.0
                    out[row, h] = weight @ v[seen, h // case.group] / (weight.sum() + sink)
        return out

    def result(self) -> np.ndarray[Any, Any]:
        case = self.case
        assert np.isnan(self.out[:, case.heads * case.head_dim :].astype(np.float64)).all(), "wrote beside the rows"
        return self.out[:, : case.heads * case.head_dim].astype(np.float64).reshape(-1, case.heads, case.head_dim)

    def pointers(self, **more: Any) -> dict[str, Any]:
        names = ("q", "k_pages", "v_pages", "table", "kv_lens", "sinks", "out")
        return {name: getattr(self, name) for name in names} | more | ({} if self.case.sinks else {"sinks": None})


def launch(
    name: str, case: Case, pointers: dict[str, Any], tile: dict[str, int], grid: tuple[int, ...], **scalars: Any
) -> None:
    """Run a kernel on its own pointers, constants and scalars among those that are given."""
    kernel = KERNELS[name]
    constants = {
        **{"KV_HEADS": case.kv_heads, "GROUP": case.group, "HEAD_DIM": case.head_dim},
        **{"PAGE_TOKENS": case.page_tokens, "WINDOW": case.window, "SOFTCAP": case.softcap},
        **{"HAS_SINKS": case.sinks, **SPLITS},
    }
    scalars |= {"scale": case.scale, "k_scale": case.k_scale, "v_scale": case.v_scale}
    types = {"sinks": case.dtype, **{n: _type(a) for n, a in pointers.items() if a is not None}}
    variant = Variant(
        name,
        types={n: types[n] for n in kernel.pointers},
        constants={n: constants[n] for n in kernel.constants},
        tile=Tile({n: tile[n] for n in kernel.tile}),
    )
    run(
        kernel,
        variant,
        {n: pointers[n] for n in kernel.pointers},
        {n: scalars[n] for n in kernel.scalars},
        (grid[0], grid[1], grid[2]),
    )


def _type(array: np.ndarray[Any, Any]) -> str:
    return next(name for name, dtype in NUMPY_TYPES.items() if dtype == array.dtype)


def strides(data: Data) -> dict[str, int]:
    return {"q_stride": data.q.shape[1], "out_stride": data.out.shape[1], "table_stride": data.table.shape[1]}


def split_count(case: Case, kv_len: int) -> int:
    """How many splits a sequence has, by the rule in `attend`."""
    seen = min(kv_len, case.window or kv_len)
    size = SPLITS["SPLIT_KEYS"] * max(1, math.ceil(seen / (SPLITS["SPLIT_KEYS"] * SPLITS["MAX_SPLITS"])))
    return max(1, math.ceil(seen / size))


def decode(data: Data, decodes: list[tuple[int, int]], block_keys: int = 16, spare: int = 0) -> None:
    """Both decode kernels. Partial sums start as NaN: what was not written is not read."""
    case = data.case
    splits = spare + max((split_count(case, int(data.kv_lens[s])) for s, _ in decodes if s >= 0), default=1)
    heads = (len(decodes), case.heads, splits)
    parts = {
        "part": np.full((*heads, case.head_dim), np.nan, np.float32),
        "part_max": np.full(heads, np.nan, np.float32),
        "part_sum": np.full(heads, np.nan, np.float32),
    }
    pointers = data.pointers(decodes=np.array(decodes, np.int32), **parts)
    scalars = {"splits": splits, **strides(data)}
    launch(
        "attention_decode", case, pointers, {"BLOCK_KEYS": block_keys}, (case.kv_heads, len(decodes), splits), **scalars
    )
    if splits > 1:
        launch("attention_combine", case, pointers, {}, (case.heads, len(decodes), 1), **scalars)


def prefill(data: Data, sequences: list[int], block_m: int = 32, block_keys: int = 16) -> None:
    case = data.case
    tokens = block_m // case.group
    tiles = [(s, first) for s in sequences for first in range(0, case.lens[s][1], tokens)] + [(-1, 0)]
    launch(
        "attention_prefill",
        case,
        data.pointers(tiles=np.array(tiles, np.int32), query_starts=data.query_starts),
        {"BLOCK_M": block_m, "BLOCK_KEYS": block_keys},
        (case.kv_heads, len(tiles), 1),
        **strides(data),
    )


def attend(case: Case, block_keys: int = 16, block_m: int = 32) -> Data:
    return step(Data(case), block_keys, block_m)


def step(data: Data, block_keys: int = 16, block_m: int = 32) -> Data:
    """As an executor launches it: decode sequences, then the chunks of the others."""
    case = data.case
    decodes = [(s, int(data.query_starts[s])) for s, (_, count) in enumerate(case.lens) if count == 1]
    chunks = [s for s, (_, count) in enumerate(case.lens) if count > 1]
    if decodes:
        decode(data, decodes, block_keys)
    if chunks:
        prefill(data, chunks, block_m, block_keys)
    return data


def check(data: Data) -> None:
    error = np.abs(data.result() - data.reference()).max()
    assert error < LIMIT[data.case.dtype] * data.case.v_scale, error


# Page edges of 4 and 16 tokens, split edges of 32 and 128 keys, one and many tokens, in one ragged batch.
RAGGED = ((1, 1), (16, 1), (17, 1), (32, 1), (33, 1), (127, 1), (128, 1), (129, 1), (150, 1), (3, 3), (40, 9), (18, 2))
SHORT = ((1, 1), (20, 1), (70, 1), (33, 17), (5, 5))


@pytest.mark.parametrize("page_tokens", [4, 16])
@pytest.mark.parametrize("dtype", ["fp32", "bf16", "fp16"])
def test_ragged_batches(dtype: str, page_tokens: int) -> None:
    check(attend(Case(RAGGED, dtype, page_tokens=page_tokens)))


@pytest.mark.parametrize("dtype", ["fp32", "bf16", "fp16"])
@pytest.mark.parametrize(
    "attributes",
    [
        {"window": 7},
        {"window": 32, "page_tokens": 16},
        {"softcap": 1.5},
        {"sinks": True},
        {"window": 20, "softcap": 2.0, "sinks": True},
    ],
    ids=lambda attributes: "+".join(attributes),
)
def test_attributes(dtype: str, attributes: dict[str, Any]) -> None:
    case = Case(((1, 1), (8, 1), (40, 1), (70, 1), (33, 17), (5, 5), (64, 11)), dtype, **attributes)
    check(attend(case))
    off = Data(replace(case, window=0, softcap=0.0, sinks=False))
    assert np.abs(Data(case).reference() - off.reference()).max() > 0.1, "the attribute must matter"


@pytest.mark.parametrize(("heads", "kv_heads"), [(2, 2), (3, 1), (9, 3), (8, 2), (8, 1)])
def test_groups(heads: int, kv_heads: int) -> None:
    check(attend(Case(SHORT, heads=heads, kv_heads=kv_heads, sinks=True)))


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize("head_dim", [16, 80, 96, 128])
def test_head_dims(head_dim: int, dtype: str) -> None:
    check(attend(Case(SHORT, dtype, head_dim=head_dim, window=40)))


@pytest.mark.parametrize("kv_dtype", ["fp8e4nv", "fp8e4b8", "fp8e5"])
@pytest.mark.parametrize("dtype", ["fp32", "bf16", "fp16"])
def test_fp8_pages(dtype: str, kv_dtype: str) -> None:
    check(attend(Case(SHORT, dtype, kv_dtype, window=60, k_scale=0.75, v_scale=2.5)))


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["fp32", "bf16", "fp16"])
@pytest.mark.parametrize("kv_dtype", ["", "fp8e4nv", "fp8e4b8", "fp8e5"])
@pytest.mark.parametrize("head_dim", [64, 80, 128])
@pytest.mark.parametrize("group", [1, 3, 4, 8])
@pytest.mark.parametrize("attributes", [{}, {"window": 13}, {"softcap": 3.0}, {"sinks": True}], ids=str)
def test_everything(dtype: str, kv_dtype: str, head_dim: int, group: int, attributes: dict[str, Any]) -> None:
    check(attend(Case(SHORT, dtype, kv_dtype, 2 * group, 2, head_dim, **attributes)))


@pytest.mark.parametrize("block_keys", [16, 32, 64])
@pytest.mark.parametrize("page_tokens", [1, 8, 24, 64])
def test_blocks_of_keys_and_pages_in_any_relation(page_tokens: int, block_keys: int) -> None:
    check(attend(Case(((70, 1), (100, 7)), page_tokens=page_tokens, window=50), block_keys))


@pytest.mark.parametrize("window", [0, 20])
@pytest.mark.parametrize("block_m", [16, 64])
def test_every_place_of_a_chunk_in_its_blocks(window: int, block_m: int) -> None:
    """Chunks of all lengths up to a block of 16 keys and some more, behind as many keys."""
    lens = tuple((old + new, new) for new in range(1, 20) for old in (40 + new, 23 - new))
    data = Data(Case(lens, heads=2, kv_heads=1, head_dim=16, window=window))
    prefill(data, list(range(len(lens))), block_m=block_m)
    check(data)


@pytest.mark.parametrize("window", [0, 16, 100])
def test_a_prompt_of_257_tokens_in_one_chunk_and_in_three(window: int) -> None:
    whole = Data(Case(((257, 257),), window=window))
    prefill(whole, [0], block_m=64, block_keys=32)
    check(whole)
    for until, count in ((100, 100), (101, 1), (257, 156)):
        part = Data(replace(whole.case, lens=((until, count),)))
        part.q = whole.q[until - count : until]
        part.k_pages, part.v_pages, part.table = whole.k_pages, whole.v_pages, whole.table
        if window:  # the ring has moved on since
            part.k_pages, part.v_pages, part.table = _pages_of(whole, until)
        if count == 1:
            decode(part, [(0, 0)])
        else:
            prefill(part, [0], block_m=32)
        np.testing.assert_allclose(part.result(), whole.result()[until - count : until], rtol=0, atol=2e-6)


def _pages_of(data: Data, until: int) -> tuple[Any, Any, Any]:
    """K and V of one sequence as they were at `until` tokens, pages in order."""
    size = data.case.page_tokens
    count = -(-until // size)
    pages = []
    for side in (data.k, data.v):
        page = np.full((count * size, *side[0].shape[1:]), np.nan, side[0].dtype)
        page[:until] = side[0][:until]
        pages.append(page.reshape(count, size, *side[0].shape[1:]))
    return *pages, np.arange(count, dtype=np.int32)[None]


def test_decode_is_a_prefill_of_one_token() -> None:
    case = Case(tuple((kv, 1) for kv, _ in RAGGED), window=60, sinks=True)
    one, other = Data(case), Data(case)
    decode(one, [(s, s) for s in range(len(case.lens))])
    prefill(other, list(range(len(case.lens))))
    np.testing.assert_allclose(one.result(), other.result(), rtol=0, atol=2e-6)


def test_a_sequence_does_not_feel_its_neighbours() -> None:
    """Bit by bit: alone, among longer ones, in another place, and with more room for splits than it needs."""
    case = Case(((150, 1), (90, 1), (40, 1)), "bf16")
    together, spare = Data(case), Data(case)
    decode(together, [(0, 0), (1, 1), (2, 2)])
    decode(spare, [(2, 2), (0, 0), (1, 1)], spare=3)
    assert (together.result() == spare.result()).all()
    for s in range(3):
        alone = Data(case)
        decode(alone, [(s, s)])
        assert (alone.result()[s] == together.result()[s]).all()


def test_padding_of_a_captured_graph() -> None:
    """A decode of sequence -1 leaves everything as it is, one of a sequence without keys gets zeros."""
    data = Data(Case(((40, 1), (0, 1), (40, 1))))
    alone = attend(Case(((40, 1),)))
    data.q[0], data.table[0], data.k_pages, data.v_pages = alone.q[0], [*alone.table[0]], alone.k_pages, alone.v_pages
    decode(data, [(0, 0), (1, 1), (-1, 2), (-1, -1)], spare=1)
    result = data.result()
    assert (result[1] == 0).all()
    assert np.isnan(result[2]).all()
    check(alone)
    assert (result[0] == alone.result()[0]).all()
    with_sinks = Data(Case(((0, 1),), sinks=True))
    decode(with_sinks, [(0, 0)])
    assert (with_sinks.result() == 0).all()


def test_large_scores() -> None:
    """Scores up to a few thousand: exp of them would overflow, and most weights are 0."""
    data = Data(Case(((70, 1), (50, 20)), sinks=True))
    data.q *= np.float32(300.0)
    decode(data, [(0, 0)])
    prefill(data, [1])
    # Such scores have 2^-12 as their last float32 bit.
    assert np.abs(data.result() - data.reference()).max() < 5e-3


@pytest.mark.parametrize("kv_dtype", ["", "fp8e4nv"])
@pytest.mark.parametrize(("window", "softcap", "sinks"), [(None, None, False), (9, None, True), (None, 2.0, False)])
def test_the_ops_oracle(window: int | None, softcap: float | None, sinks: bool, kv_dtype: str) -> None:
    """The oracle of `plait.attention` appends what is new and attends to it."""
    lens = ((30, 1), (41, 1), (26, 10), (6, 6))
    case = Case(lens, "bf16", kv_dtype, window=window or 0, softcap=softcap or 0.0, sinks=sinks)
    data = attend(case)
    expected = _oracle(data, window, softcap)
    error = np.abs(data.result().reshape(expected.shape) - expected).max()
    assert error < LIMIT[case.dtype], error


def _oracle(data: Data, window: int | None, softcap: float | None) -> np.ndarray[Any, Any]:
    case, bf16 = data.case, element("bfloat16")
    kind = KVType.get(case.kv_heads, case.head_dim, FP8["e4m3fn"] if case.kv_dtype else bf16, window)
    wide, narrow = (tokens_by(heads * case.head_dim, bf16) for heads in (case.heads, case.kv_heads))
    kinds = (wide, narrow, narrow, kind, BatchType(), *([tensor((case.heads,), bf16)] if case.sinks else []))
    operands = [create_ssa_value(kind) for kind in kinds]
    op = AttentionOp(*operands, heads=case.heads, scale=case.scale, window=window, softcap=softcap)
    cache = OracleKV(len(data.k_pages), case.page_tokens, case.kv_heads, case.head_dim)
    cache.k[:], cache.v[:] = data.k_pages.astype(np.float64), data.v_pages.astype(np.float64)
    positions = [np.arange(kv - count, kv) for kv, count in case.lens]
    new = [(s, j) for s, at in enumerate(positions) for j in at]
    k, v = (np.array([side[s][j] for s, j in new], np.float64) for side in (data.k, data.v))
    batch = SimpleNamespace(
        kv_lens=data.kv_lens,
        query_starts=data.query_starts,
        positions=np.concatenate(positions),
        page_tables={kv_class(window): data.table},
    )
    q = data.q[:, : case.heads * case.head_dim].astype(np.float64)
    sinks = [data.sinks.astype(np.float64)] if case.sinks else []
    return op.oracle(q, k, v, cache, batch, *sinks)[0]
