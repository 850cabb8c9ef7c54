"""The facts of one step as tensors, made once for all layers: rows, rope tables, pages and masks.

Legend: T tokens, S sequences, H query heads, N KV heads, G = H / N heads of one KV head, D head_dim, P pages, L keys.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from plait.backends.base import Batch
from plait.backends.kernels.arrays import to_torch
from plait.ir.rope import Rope, tables
from plait.spec import kv_class


@dataclass(frozen=True)
class Part:
    """Tokens that attend together: one token each of S sequences, or Q tokens of one sequence.

    Attributes:
        rows: the tokens, as an index or a slice; None for all of the step.
        pages: [S * P] pages that hold the keys, in order; None where the keys are the part's own new tokens.
        mask: [S, 1, 1, L] or [1, 1, Q, L], 0 or -inf; None for a plain causal mask.
    """

    sequences: int
    rows: Tensor | slice | None
    pages: Tensor | None
    mask: Tensor | None


@dataclass(frozen=True)
class Paging:
    """How one KV class is written and read in this step.

    Attributes:
        slots: [T] places of the new tokens, page * page_tokens + slot.
        fresh: pages that get their first token of this sequence: what an earlier owner left there is wiped, since a
            masked key may still be infinite and 0 * inf is not 0. None where there is none.
    """

    slots: Tensor
    fresh: Tensor | None
    parts: tuple[Part, ...]


class Step:
    """One batch. Tables are made when a layer first asks for them."""

    def __init__(self, batch: Batch, page_tokens: int) -> None:
        self._batch, self._page_tokens = batch, page_tokens
        self._tables: dict[tuple[Rope, int], tuple[Tensor, Tensor]] = {}
        self._pagings: dict[tuple[int | None, torch.dtype], Paging] = {}
        self.tokens = self._long(batch.tokens)
        count = len(batch.logit_rows)
        self.logit_rows = None if count == batch.token_count else self._long(batch.logit_rows)

    @cached_property
    def positions(self) -> Tensor:
        """[T]."""
        return self._long(self._batch.positions)

    def rope(self, rope: Rope, rotary_dim: int) -> tuple[Tensor, Tensor]:
        """[T, 1, rotary_dim] float32: cos of both halves, and sin with the first half negated."""
        key = rope, rotary_dim
        if key not in self._tables:
            cos, sin = tables(rope, rotary_dim, self._batch.positions)
            whole = (np.concatenate(pair, axis=-1)[:, None] for pair in ((cos, cos), (-sin, sin)))
            first, second = (to_torch(table.astype(np.float32)) for table in whole)
            self._tables[key] = first, second
        return self._tables[key]

    def paging(self, window: int | None, dtype: torch.dtype) -> Paging:
        """Pages and masks of the KV class of `window`; masks in `dtype`."""
        key = window, dtype
        if key not in self._pagings:
            self._pagings[key] = self._paging(window, dtype)
        return self._pagings[key]

    def _paging(self, window: int | None, dtype: torch.dtype) -> Paging:
        batch, page_tokens = self._batch, self._page_tokens
        table = batch.page_tables[kv_class(window)]
        lens = np.diff(batch.query_starts)
        owner = np.repeat(np.arange(batch.sequence_count), lens)
        page, slot = table[owner, batch.positions // page_tokens], batch.positions % page_tokens
        assert (page >= 0).all(), "a token has no page"
        starts = np.flatnonzero(slot == 0)
        if window is not None:  # in a ring a page comes back to its sequence, with keys that are still in the window
            earlier = (table[owner[i], : batch.positions[i] // page_tokens] for i in starts)
            starts = starts[[page[i] not in before for i, before in zip(starts, earlier, strict=True)]]
        fresh = page[starts]
        return Paging(
            slots=self._long(page * page_tokens + slot),
            fresh=self._long(fresh) if len(fresh) else None,
            parts=(*self._decodes(table, lens, window, dtype), *self._chunks(table, lens, window, dtype)),
        )

    def _decodes(self, table: NDArray[Any], lens: NDArray[Any], window: int | None, dtype: torch.dtype) -> list[Part]:
        """Sequences with one new token. Those with equally many pages, rounded up by their own length only, go
        together: a sequence's arithmetic does not depend on its neighbours."""
        batch, size = self._batch, self._page_tokens
        chosen = np.flatnonzero(lens == 1)
        rows = batch.query_starts[:-1][chosen]
        last = batch.kv_lens[chosen] - 1
        oldest = np.zeros_like(last) if window is None else np.maximum(last - window + 1, 0)
        first = oldest // size
        wide = np.array([_bucket(count) for count in (last // size - first + 1).tolist()], np.int64)
        parts = []
        for count in np.unique(wide):
            here = wide == count
            # Beyond the end the own last page repeats: never another sequence's.
            logical = np.minimum(first[here, None] + np.arange(count), last[here, None] // size)
            pages = table[chosen[here, None], logical]
            keys = first[here, None] * size + np.arange(count * size)
            visible = (keys <= last[here, None]) & (keys >= oldest[here, None])
            whole = len(lens) == here.sum()
            parts.append(
                Part(
                    sequences=len(pages),
                    rows=None if whole else self._long(rows[here]),
                    pages=self._long(pages.reshape(-1)),
                    mask=self._mask(visible[:, None, None, :], dtype),
                )
            )
        return parts

    def _chunks(self, table: NDArray[Any], lens: NDArray[Any], window: int | None, dtype: torch.dtype) -> list[Part]:
        """Sequences with several new tokens, each for itself."""
        batch, size = self._batch, self._page_tokens
        parts = []
        for s in np.flatnonzero(lens > 1):
            rows = slice(int(batch.query_starts[s]), int(batch.query_starts[s + 1]))
            last, queries = int(batch.kv_lens[s]) - 1, batch.positions[rows][:, None]
            if queries[0] == 0 and (window is None or last < window):
                parts.append(Part(1, rows, None, None))
                continue
            oldest = 0 if window is None else max(0, int(queries[0, 0]) - window + 1)
            first = oldest // size
            pages = table[s, first : last // size + 1]
            keys = np.arange(first * size, first * size + len(pages) * size)[None]
            visible = (keys <= queries) & (True if window is None else keys > queries - window)
            parts.append(Part(1, rows, self._long(pages), self._mask(visible[None, None], dtype)))
        return parts

    def _mask(self, visible: NDArray[np.bool_], dtype: torch.dtype) -> Tensor:
        return to_torch(np.where(visible, np.float32(0), np.float32(-np.inf))).to(dtype)

    def _long(self, values: NDArray[Any]) -> Tensor:
        return to_torch(values.astype(np.int64))


def _bucket(pages: int) -> int:
    """The next of 1, 2, 3, 4, 6, 8, 12, 16, 24 ...: at most half as much again."""
    power = 1 << (pages - 1).bit_length()
    return power * 3 // 4 if pages <= power * 3 // 4 and power >= 4 else power
