"""The shapes that are compiled. XLA wants static ones, so a step is padded up to the next of a few.

A step becomes grids of (sequences, queries): all sequences with one new token in one grid, and each prefill chunk in a
grid of its own. A sequence's arithmetic so depends on its own length alone, up to the row it has in a grid.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from plait.backends.base import Batch
from plait.spec import kv_class

SEQUENCES = (1, 8, 64)
QUERIES = (16, 128, 512)
KEYS = (256, 1024, 4096)
"""Keys of a sequence; beyond the last one, multiples by 4 go on."""


def bucket(count: int, sizes: Sequence[int]) -> int:
    """The first size that holds `count`; beyond the last, four times as much until it does."""
    for size in sizes:
        if count <= size:
            return size
    size = sizes[-1]
    while size < count:
        size *= 4
    return size


@dataclass(frozen=True)
class Shape:
    """What a program is compiled for: `sequences` of `queries` new tokens that see up to `keys` keys, and whether it
    returns logits of every row or of one."""

    sequences: int
    queries: int
    keys: int
    every_row: bool

    @property
    def tokens(self) -> int:
        return self.sequences * self.queries

    def pages(self, window: int | None, page_tokens: int) -> int:
        """Pages that one sequence reads in a KV class."""
        width = -(-self.keys // page_tokens)
        # A window's keys begin anywhere in their first page.
        return width if window is None else min(width, -(-(window - 1 + self.queries) // page_tokens) + 1)


@dataclass(frozen=True)
class Buckets:
    """The sizes that steps are padded to."""

    sequences: tuple[int, ...] = SEQUENCES
    queries: tuple[int, ...] = QUERIES
    keys: tuple[int, ...] = KEYS


@dataclass(frozen=True)
class Grid:
    """Part of a step, padded: B sequences of Q queries that see up to L keys.

    Attributes:
        shape: B, Q and L.
        rows: the step's tokens in it; with `padded` their places in the flat grid of B * Q.
        tokens, positions: [B * Q]; position -1 where nothing stands.
        kv_lens: [B]; 0 where no sequence stands.
        slots: by KV class, [B * Q] places to write, beyond the last page where nothing is written.
        pages: by KV class, [B, P] pages to read; `first`, [B], is the logical number of the first.
        logit_rows: [R] places in the flat grid.
    """

    shape: Shape
    rows: NDArray[np.int64]
    padded: NDArray[np.int64]
    tokens: NDArray[np.int32]
    positions: NDArray[np.int32]
    kv_lens: NDArray[np.int32]
    slots: dict[str, NDArray[np.int32]]
    pages: dict[str, NDArray[np.int32]]
    first: dict[str, NDArray[np.int32]]
    logit_rows: NDArray[np.int32]


def split(
    batch: Batch, buckets: Buckets, windows: Mapping[str, int | None], pages: Mapping[str, int], page_tokens: int
) -> Iterator[Grid]:
    """The grids of a step.

    Args:
        windows: KV class -> window.
        pages: pages that exist, per KV class.
    """
    lens = np.diff(batch.query_starts)
    decodes = np.flatnonzero(lens == 1)
    parts: list[tuple[NDArray[Any], int]] = []
    if len(decodes):
        # Sequences of like length go together, or one long context would make everybody's keys many.
        wide = np.array([bucket(int(count), buckets.keys) for count in batch.kv_lens[decodes]])
        parts += [(decodes[wide == keys], 1) for keys in np.unique(wide)]
    parts += [(np.array([s]), bucket(int(lens[s]), buckets.queries)) for s in np.flatnonzero(lens > 1)]
    for chosen, queries in parts:
        keys = bucket(int(batch.kv_lens[chosen].max()), buckets.keys)
        sequences = bucket(len(chosen), buckets.sequences) if queries == 1 else 1
        shape = Shape(sequences, queries, keys, every_row=queries == 1)
        yield _grid(batch, chosen, shape, windows, pages, page_tokens)


def _grid(
    batch: Batch,
    chosen: NDArray[Any],
    shape: Shape,
    windows: Mapping[str, int | None],
    pages: Mapping[str, int],
    page_tokens: int,
) -> Grid:
    lens = np.diff(batch.query_starts)[chosen]
    count, queries = shape.sequences, shape.queries
    rows = np.concatenate([np.arange(n) + start for n, start in zip(lens, batch.query_starts[chosen], strict=True)])
    padded = np.concatenate([np.arange(n) + i * queries for i, n in enumerate(lens)])
    owner = np.repeat(chosen, lens)
    tokens = np.zeros(count * queries, np.int32)
    positions = np.full(count * queries, -1, np.int32)
    tokens[padded], positions[padded] = batch.tokens[rows], batch.positions[rows]
    kv_lens = np.zeros(count, np.int32)
    kv_lens[: len(chosen)] = batch.kv_lens[chosen]
    slots, read, first = {}, {}, {}
    for name, window in windows.items():
        assert name == kv_class(window)
        table = batch.page_tables[name]
        slots[name] = np.full(count * queries, pages[name] * page_tokens, np.int32)
        place = batch.positions[rows]
        slots[name][padded] = table[owner, place // page_tokens] * page_tokens + place % page_tokens
        width, start = shape.pages(window, page_tokens), np.zeros(count, np.int32)
        if window is not None:
            oldest = np.maximum(batch.kv_lens[chosen] - lens - window + 1, 0)
            start[: len(chosen)] = oldest // page_tokens
        logical = np.minimum(start[: len(chosen), None] + np.arange(width), table.shape[1] - 1)
        read[name] = np.zeros((count, width), np.int32)
        read[name][: len(chosen)] = np.maximum(table[chosen[:, None], logical], 0)
        first[name] = start
    place_of = np.full(batch.token_count, -1, np.int64)
    place_of[rows] = padded
    wanted = place_of[batch.logit_rows]
    logit_rows = np.sort(wanted[wanted >= 0]).astype(np.int32)
    shape = replace(shape, every_row=shape.every_row or len(logit_rows) > 1)
    return Grid(shape, rows, padded, tokens, positions, kv_lens, slots, read, first, logit_rows)
