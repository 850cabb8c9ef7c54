"""Attention over long contexts, by every shipped tile, through whole launch plans: decode splits, windows, FP8 pages.

KV of an earlier time is put into the pages; one batch of decode steps and a chunk of a prompt goes on from there.
"""

from __future__ import annotations

import functools
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from plait.backends.base import Batch, CompileOptions, LoadOptions
from plait.backends.conformance.models import VOCABULARY, Attention, attention, random_weights, write_slice
from plait.backends.conformance.suite import OP_TOLERANCE
from plait.backends.kernels.gpu import table
from plait.backends.kernels.gpu.backend import PLAN
from plait.backends.kernels.gpu.executor import LaunchSlice
from plait.backends.kernels.gpu.pick import make
from plait.ir.numbers import NUMPY
from plait.ir.oracle import Oracle
from plait.ir.passes import SLICE_PIPELINE, run_passes
from plait.spec import kv_class, to_json
from tests.device.machine import Machine

pytestmark = pytest.mark.device

PAGE_TOKENS = 16

#: Tokens of each sequence before, and new ones: decode on both sides of a split's edge, and three tiles of a prompt.
SEQUENCES = ((8191, 1), (8192, 1), (5000, 1), (256, 1), (0, 1), (6900, 70))


@dataclass(frozen=True)
class Case:
    attributes: Attention
    dtype: str


_SHAPE: dict[str, Any] = {"heads": 8, "kv_heads": 2, "head_dim": 128}
CASES = {
    "full": Case(Attention(**_SHAPE), "bfloat16"),
    "window1024": Case(Attention(**_SHAPE, window=1024), "bfloat16"),
    "window4096-sinks": Case(Attention(**_SHAPE, window=4096, sinks=True), "float16"),
    "softcap": Case(Attention(**_SHAPE, softcap=30.0), "bfloat16"),
    "fp8-pages": Case(Attention(**_SHAPE, kv_dtype="e4m3fn"), "bfloat16"),
    "group8-head64": Case(Attention(heads=8, kv_heads=1, head_dim=64), "bfloat16"),
    "float32": Case(Attention(**_SHAPE, window=4096), "float32"),
}


def _module(case: Case) -> Any:
    made = attention(case.attributes)(case.dtype)
    run_passes(made, SLICE_PIPELINE)
    return made


def _batch(name: str, first_page: int = 0) -> tuple[Batch, int]:
    """The batch, and how many pages it uses."""
    before, new = (np.array(column, np.int32) for column in zip(*SEQUENCES, strict=True))
    lens = before + new
    counts = -(-lens // PAGE_TOKENS)
    places = first_page + np.random.default_rng(3).permutation(int(counts.sum())).astype(np.int32)
    tables = np.full((len(lens), counts.max()), -1, np.int32)
    for row, own in zip(tables, np.split(places, np.cumsum(counts)[:-1]), strict=True):
        row[: len(own)] = own
    positions = np.concatenate([np.arange(a, b, dtype=np.int32) for a, b in zip(before, lens, strict=True)])
    tokens = np.random.default_rng(4).integers(0, VOCABULARY, len(positions)).astype(np.int32)
    starts = np.concatenate([[0], np.cumsum(new)]).astype(np.int32)
    return Batch(tokens, positions, starts, lens, {name: tables}, np.zeros(0, np.int32)), int(counts.sum())


def _pages(case: Case, count: int) -> tuple[NDArray[Any], NDArray[Any]]:
    """K and V of every page."""
    a, rng = case.attributes, np.random.default_rng(5)
    dtype = NUMPY[a.kv_dtype or case.dtype]
    k, v = (rng.standard_normal((count, PAGE_TOKENS, a.kv_heads, a.head_dim)).astype(dtype) for _ in "kv")
    return k, v


@functools.cache
def _expected(case: Case) -> NDArray[np.float64]:
    module, name = _module(case), kv_class(case.attributes.window)
    batch, count = _batch(name)
    oracle = Oracle(module, random_weights(module), {name: count}, PAGE_TOKENS)
    (cache,) = oracle.kv.values()
    cache.k[:], cache.v[:] = _pages(case, count)
    return oracle.step(batch)["y"]  # type: ignore[arg-type]


def _run(gpu: Machine, case: Case, folder: Path, index: int, first_page: int = 0) -> NDArray[Any]:
    """The same by the launch plan, of the candidates at `index` of every kernel."""

    def candidates(*asked: Any) -> Any:
        tiles = table.candidates(*asked)
        return (tiles[index % len(tiles)],)

    module, name = _module(case), kv_class(case.attributes.window)
    batch, count = _batch(name, first_page)
    tokens, sequences = batch.token_count, batch.sequence_count
    made = make(module, gpu.target, gpu.arch, CompileOptions(tokens, sequences, PAGE_TOKENS), candidates)
    write_slice(folder, module, random_weights(module), {**made.files, PLAN: to_json(made.plan).encode()})
    options = LoadOptions({name: first_page + count}, PAGE_TOKENS, tokens, sequences, 1, folder)
    with closing(LaunchSlice(folder, made.plan, gpu.device(), "gpu", options)) as executable:
        executable.import_pages(0, np.arange(first_page, first_page + count, dtype=np.int32), *_pages(case, count))
        return executable.step(batch, {})["y"]


def _close(got: NDArray[Any], want: NDArray[np.float64], dtype: str) -> None:
    off = np.abs(got.astype(np.float64) - want).max() / np.abs(want).max()
    assert off <= OP_TOLERANCE[dtype], f"off by {off:.3g} of the largest value"


@pytest.mark.parametrize("index", range(4))
@pytest.mark.parametrize("name", list(CASES))
def test_long_contexts(gpu: Machine, name: str, index: int, tmp_path: Path) -> None:
    _close(_run(gpu, CASES[name], tmp_path / "slice", index), _expected(CASES[name]), CASES[name].dtype)


def test_pages_beyond_two_to_the_31_elements(gpu: Machine, tmp_path: Path) -> None:
    """K and V have 4 GiB each; what is used lies at their end."""
    case = CASES["full"]
    first = 2**31 // (PAGE_TOKENS * case.attributes.kv_heads * case.attributes.head_dim)
    _close(_run(gpu, case, tmp_path / "slice", 0, first), _expected(case), case.dtype)
