"""The kernels of latent attention in the interpreter, against attention written out in float64, and its launch plans.

Legend: S sequences, T tokens, H heads, L latent, R rope.
"""

from __future__ import annotations

from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from plait.backends.conformance import families
from plait.backends.conformance.models import random_weights
from plait.backends.conformance.script import Script, Turn
from plait.backends.kernels.gpu.archs import ARCHS
from plait.backends.kernels.gpu.executor import LaunchSlice
from plait.backends.kernels.gpu.interpret import NUMPY_TYPES
from plait.backends.kernels.gpu.interpret_device import InterpretDevice
from plait.backends.kernels.gpu.kernel import Tile, Variant
from plait.backends.kernels.gpu.launch import Pages
from plait.backends.kernels.gpu.lower import lowering
from plait.backends.kernels.gpu.table import KERNELS
from plait.ir.module import ops
from plait.ir.ops import LatentAttentionOp
from plait.ir.oracle import Oracle
from tests.host.gpu_slices import Slice, module, plan, write
from tests.kernels import run, slack

Array = NDArray[Any]

SPLITS = {"SPLIT_KEYS": 32, "MAX_SPLITS": 4}

#: Largest error of an output whose values are about 1. 16-bit products take weights rounded to 8 (bf16) or 11 bits.
LIMIT = {"fp32": 2e-6, "bf16": 1.5e-2, "fp16": 2e-3}


@dataclass(frozen=True)
class Case:
    """A ragged batch: `lens` are (kv_len, query_len) of each sequence."""

    lens: tuple[tuple[int, int], ...]
    dtype: str = "fp32"
    kv_dtype: str = ""
    heads: int = 3
    latent: int = 16
    rope: int = 8
    page_tokens: int = 4
    scale: float = 0.25

    @property
    def row(self) -> int:
        return self.latent + self.rope


class Data:
    """Arrays of a case. Pages hold the rows at places drawn by lot, infinities and NaN elsewhere."""

    def __init__(self, case: Case, seed: int = 0) -> None:
        self.case, rng = case, np.random.default_rng(seed)
        dtype, kv_dtype = NUMPY_TYPES[case.dtype], NUMPY_TYPES[case.kv_dtype or case.dtype]
        self.kv_lens = np.array([kv for kv, _ in case.lens], np.int32)
        self.query_starts = np.concatenate(([0], np.cumsum([count for _, count in case.lens]))).astype(np.int32)
        tokens = int(self.query_starts[-1])
        self.q = rng.standard_normal((tokens, case.heads * case.latent + 16)).astype(dtype)
        self.q_rope = rng.standard_normal((tokens, case.heads * case.rope + 8)).astype(dtype)
        self.out = np.full((tokens, case.heads * case.latent + 16), np.nan, dtype)
        self.rows = [rng.standard_normal((kv, case.row)).astype(kv_dtype) for kv, _ in case.lens]
        counts = [-(-kv // case.page_tokens) for kv, _ in case.lens]
        places = rng.permutation(sum(counts) + 3).astype(np.int32)
        self.table = np.full((len(case.lens), max(counts) + 2), -1, np.int32)
        dirt = np.where(rng.random((len(places), case.page_tokens, 1, case.row)) < 0.5, np.nan, np.inf)
        self.k_pages = dirt.astype(kv_dtype)
        for s, count in enumerate(counts):
            self.table[s, :count], places = places[:count], places[count:]
            for j, row in enumerate(self.rows[s]):
                self.k_pages[self.table[s, j // case.page_tokens], j % case.page_tokens, 0] = row

    def reference(self) -> Array:
        """(T, H, L) in float64, one query and head after the other."""
        case = self.case
        out = np.zeros((len(self.q), case.heads, case.latent))
        for s, (kv_len, count) in enumerate(case.lens):
            keys = self.rows[s].astype(np.float64)
            for i in range(count):
                row, seen = self.query_starts[s] + i, keys[: kv_len - count + i + 1]
                for h in range(case.heads):
                    parts = (
                        self.q[row, h * case.latent :][: case.latent],
                        self.q_rope[row, h * case.rope :][: case.rope],
                    )
                    score = seen @ np.concatenate(parts).astype(np.float64) * case.scale
                    weight = np.exp(score - score.max())
                    out[row, h] = weight @ seen[:, : case.latent] / weight.sum()
        return out

    def result(self) -> Array:
        width = self.case.heads * self.case.latent
        assert np.isnan(self.out[:, width:].astype(np.float64)).all(), "wrote beside the rows"
        return self.out[:, :width].astype(np.float64).reshape(-1, self.case.heads, self.case.latent)


def launch(name: str, data: Data, tile: dict[str, int], grid: tuple[int, int, int], **more: Any) -> None:
    """A kernel with its own pointers, constants and scalars among those of the data."""
    case, kernel = data.case, KERNELS[name]
    constants = {
        **{"HEADS": case.heads, "LATENT": case.latent, "ROPE": case.rope, "PAGE_TOKENS": case.page_tokens},
        **{"GROUP": min(16, 1 << (case.heads - 1).bit_length()), **SPLITS},
    }
    if name == "attention_combine":
        constants |= {"KV_HEADS": 1, "GROUP": case.heads, "HEAD_DIM": case.latent, "WINDOW": 0, "HAS_SINKS": False}
    given = {**vars(data), "sinks": None, "scale": case.scale, "v_scale": 1.0, **more}
    given |= {f"{key}_stride": given[key].shape[1] for key in ("q", "q_rope", "out", "table")}
    names = {dtype: kind for kind, dtype in NUMPY_TYPES.items()}
    types = {key: case.dtype if given[key] is None else names[given[key].dtype] for key in kernel.pointers}
    variant = Variant(
        name, types, {key: constants[key] for key in kernel.constants}, Tile({key: tile[key] for key in kernel.tile})
    )
    pointers, scalars = ({key: given[key] for key in keys} for keys in (kernel.pointers, kernel.scalars))
    run(kernel, variant, pointers, scalars, grid)


def decode(data: Data, decodes: list[tuple[int, int]], tile: tuple[int, int] = (16, 16), spare: int = 0) -> None:
    """Both decode kernels. Partial sums start as NaN: what was not written is not read."""
    case = data.case
    longest = max((int(data.kv_lens[s]) for s, _ in decodes if s >= 0), default=1)
    splits = spare + min(SPLITS["MAX_SPLITS"], max(1, -(-longest // SPLITS["SPLIT_KEYS"])))
    shape = (len(decodes), case.heads, splits)
    more = {
        "decodes": np.array(decodes, np.int32),
        "splits": splits,
        "part": np.full((*shape, case.latent), np.nan, np.float32),
        "part_max": np.full(shape, np.nan, np.float32),
        "part_sum": np.full(shape, np.nan, np.float32),
    }
    heads, keys = tile
    grid = (-(-case.heads // heads), len(decodes), splits)
    launch("latent_decode", data, {"BLOCK_M": heads, "BLOCK_KEYS": keys}, grid, **more)
    if splits > 1:
        launch("attention_combine", data, {}, (case.heads, len(decodes), 1), **more)


def prefill(data: Data, sequences: list[int], tile: tuple[int, int] = (32, 16)) -> None:
    case = data.case
    group = min(16, 1 << (case.heads - 1).bit_length())
    tokens = tile[0] // group
    tiles = [(s, first) for s in sequences for first in range(0, case.lens[s][1], tokens)] + [(-1, 0)]
    launch(
        "latent_prefill",
        data,
        {"BLOCK_M": tile[0], "BLOCK_KEYS": tile[1]},
        (-(-case.heads // group), len(tiles), 1),
        tiles=np.array(tiles, np.int32),
    )


def step(data: Data, keys: int = 16, rows: int = 32) -> Data:
    """As an executor launches it: decode sequences, then the chunks of the others."""
    decodes = [(s, int(data.query_starts[s])) for s, (_, count) in enumerate(data.case.lens) if count == 1]
    chunks = [s for s, (_, count) in enumerate(data.case.lens) if count > 1]
    if decodes:
        decode(data, decodes, (16, keys))
    if chunks:
        prefill(data, chunks, (rows, keys))
    return data


def check(data: Data) -> None:
    error = np.abs(data.result() - data.reference()).max()
    assert error < LIMIT[data.case.dtype] * slack(), error


# Page edges of 4 and 16 tokens, split edges of 32 and 128 keys, one and many tokens, in one ragged batch.
RAGGED = ((1, 1), (16, 1), (17, 1), (32, 1), (33, 1), (128, 1), (129, 1), (150, 1), (3, 3), (40, 9), (18, 2))
SHORT = ((1, 1), (20, 1), (70, 1), (33, 17), (5, 5))


@pytest.mark.parametrize("page_tokens", [4, 16])
@pytest.mark.parametrize("dtype", ["fp32", "bf16", "fp16"])
def test_ragged_batches(dtype: str, page_tokens: int) -> None:
    check(step(Data(Case(RAGGED, dtype, page_tokens=page_tokens))))


@pytest.mark.parametrize("heads", [1, 5, 16, 20])
def test_heads(heads: int) -> None:
    """The last group of them is not whole."""
    check(step(Data(Case(SHORT, heads=heads))))


@pytest.mark.parametrize(("latent", "rope"), [(32, 16), (24, 8), (512, 64)])
def test_widths(latent: int, rope: int) -> None:
    check(step(Data(Case(((70, 1), (33, 4)), "bf16", latent=latent, rope=rope, scale=0.05)), keys=32))


@pytest.mark.parametrize("kv_dtype", ["fp8e4nv", "fp8e4b8", "fp8e5"])
def test_fp8_pages(kv_dtype: str) -> None:
    check(step(Data(Case(SHORT, "bf16", kv_dtype))))


@pytest.mark.parametrize("rows", [16, 64])
@pytest.mark.parametrize("keys", [16, 64])
def test_every_place_of_a_chunk_in_its_blocks(rows: int, keys: int) -> None:
    lens = tuple((old + new, new) for new in (2, 7, 15, 16, 17, 19) for old in (0, 3, 16, 41))
    data = Data(Case(lens, heads=2))
    prefill(data, list(range(len(lens))), (rows, keys))
    check(data)


def test_decode_is_a_prefill_of_one_token() -> None:
    case = Case(tuple((kv, 1) for kv, _ in RAGGED))
    one, other = Data(case), Data(case)
    decode(one, [(s, s) for s in range(len(case.lens))])
    prefill(other, list(range(len(case.lens))))
    np.testing.assert_allclose(one.result(), other.result(), rtol=0, atol=2e-6)


def test_a_sequence_does_not_feel_its_neighbours() -> None:
    """Bit by bit: alone, among longer ones, and with more room for splits than it needs."""
    case = Case(((150, 1), (90, 1), (20, 1)), "bf16")
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
    decode(data, [(0, 0), (1, 1), (-1, 2), (-1, -1)], spare=1)
    result, want = data.result(), data.reference
    assert (result[1] == 0).all() and np.isnan(result[2]).all()
    data.case = Case(((40, 1),))
    assert np.abs(result[0] - want()[0]).max() < LIMIT["fp32"]


@pytest.mark.parametrize("kv_dtype", ["bf16", "fp8e4nv", "u8"])
def test_rows_go_into_their_pages(kv_dtype: str) -> None:
    rng, kind = np.random.default_rng(1), NUMPY_TYPES[kv_dtype]
    latent, k_rope = (300 * rng.standard_normal((5, width + 8)).astype(np.float32) for width in (24, 8))
    latent, k_rope = latent.astype(NUMPY_TYPES["bf16"]), k_rope.astype(NUMPY_TYPES["bf16"])
    pages = np.full((4, 4, 1, 32), 77, np.float32).astype(kind)
    slots = np.array([3, -1, 15, 0, 8], np.int32)
    pointers = {"latent": latent, "k_rope": k_rope, "slots": slots, "k_pages": pages}
    types = {"latent": "bf16", "k_rope": "bf16", "slots": "i32", "k_pages": kv_dtype}
    variant = Variant("latent_write", types, {"LATENT": 24, "ROPE": 8}, Tile({}))
    run(KERNELS["latent_write"], variant, pointers, {"rows": 5, "latent_stride": 32, "rope_stride": 16})
    rows = np.concatenate((latent[:, :24], k_rope[:, :8]), 1).astype(np.float32)
    fp8 = NUMPY_TYPES["fp8e4nv"]
    want = rows.astype(kind) if kv_dtype == "bf16" else np.clip(rows, -448, 448).astype(fp8).view(kind)
    flat = pages.reshape(16, 32)
    np.testing.assert_array_equal(flat[slots[slots >= 0]].view(np.uint8), want[slots >= 0].view(np.uint8))
    rest = np.setdiff1d(np.arange(16), slots)
    assert (flat[rest].astype(np.float32) == 77 if kv_dtype != "fp8e4nv" else flat[rest].astype(np.float32) == 80).all()


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize(("rows", "width", "inner"), [(1, 20, 16), (37, 40, 33), (5, 16, 64)])
def test_products_of_heads(rows: int, width: int, inner: int, transposed: bool) -> None:
    rng, heads = np.random.default_rng(2), 3
    x = rng.standard_normal((rows, heads * inner + 8)).astype(np.float32)
    w = (rng.standard_normal((heads, width, inner)) * inner**-0.5).astype(np.float32)
    out = np.full((rows, heads * width + 8), np.nan, np.float32)
    held = np.ascontiguousarray(w.swapaxes(1, 2)) if transposed else w
    constants = {"HEADS": heads, "TRANSPOSED": transposed, "EVEN_K": int(np.gcd(inner, 256))}
    tile = {"BLOCK_M": 16, "BLOCK_N": 16, "BLOCK_K": 32, "GROUP_M": 2, "XCDS": 1}
    variant = Variant("gemm_heads", dict.fromkeys(("x", "w", "out"), "fp32"), constants, Tile(tile))
    scalars = {"rows": rows, "N": width, "K": inner, "x_stride": x.shape[1], "out_stride": out.shape[1]}
    run(KERNELS["gemm_heads"], variant, {"x": x, "w": held, "out": out}, scalars)
    assert np.isnan(out[:, heads * width :]).all()
    for h in range(heads):
        want = x[:, h * inner : (h + 1) * inner].astype(np.float64) @ w[h].T
        assert np.abs(out[:, h * width : (h + 1) * width] - want).max() < 3e-6 * slack()


# Launch plans.


def test_a_latent_layer_has_no_v_pages() -> None:
    made = plan(module(families.LATENTS["heads6"]))
    assert made.pages == {"k0": Pages(0, "k")}
    assert (made.kv[0].values, made.kv[0].v_head_dim) == (32, 0)


def _load(made: Slice) -> LaunchSlice:
    return LaunchSlice(made.folder, made.plan, InterpretDevice(), "interpreted", made.options)


def test_pages_go_out_and_in_with_v_empty(tmp_path: Path) -> None:
    made = write(tmp_path / "slice", model=families.LATENTS["heads6"])
    with closing(_load(made)) as executable:
        pages = np.array([3, 0], np.int32)
        k = np.random.default_rng(0).standard_normal((2, 4, 1, 48)).astype(np.float32)
        v = np.zeros((2, 4, 1, 0), np.float32)
        executable.import_pages(0, pages, k, v)
        got = executable.export_pages(0, pages)
        assert (got[0] == k).all() and got[1].shape == v.shape and got[1].dtype == v.dtype
        assert (executable.export_pages(0, pages[::-1])[0] == k[::-1]).all()
        assert executable.stats()["kv_bytes"] == 4 * 4 * 48 * made.player().pages["full"]


def test_keys_in_many_parts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Decode splits its keys, and a second launch adds up the parts."""
    monkeypatch.setattr("plait.backends.kernels.gpu.lower_latent.SPLIT_KEYS", 16)
    script = Script((Turn({0: 70, 1: 3}), Turn({0: 1, 1: 1}), Turn({1: 1, 0: 1})), 4)
    made = write(tmp_path / "slice", script, families.LATENTS["heads6"])
    player = made.player()
    oracle = Oracle(made.module, random_weights(made.module), player.plain_pages, 4)
    with closing(_load(made)) as executable:
        for turn in script.turns:
            batch, plain = player.batches(turn)
            want = oracle.step(plain)["y"]  # type: ignore[arg-type]
            np.testing.assert_allclose(executable.step(batch, {})["y"], want, rtol=0, atol=3e-6 * np.abs(want).max())


@pytest.mark.parametrize(("arch", "code", "kept"), [("sm_80", "e4m3fn", True), ("sm_80", "e5m2", False)])
def test_fp8_that_the_chip_has_not(arch: str, code: str, kept: bool) -> None:
    """e4m3fn is converted by the kernels, another is refused by its name."""
    made = module(families.KV_FP8[code])
    answer = next(lowering(ARCHS[arch]).supports(op) for op in ops(made) if isinstance(op, LatentAttentionOp))
    assert answer.ok == kept and (kept or "f8E5M2" in answer.why)
