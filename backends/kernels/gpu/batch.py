"""The facts of one batch: the symbols of a plan's expressions, and the arrays that its kernels read."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from plait.backends.base import Batch
from plait.backends.kernels.gpu.launch import Fact
from plait.ir.rope import Rope, tables

Array = NDArray[Any]

#: The fewest entries of a row of a page table that a batch has: short contexts share launches.
_LEAST_PAGES = 16


class Facts:
    """One batch, as the kernels see it; perhaps padded to more decode sequences, which do nothing.

    Args:
        padded: sequences to have, all with one new token; None leaves the batch as it is.
    """

    def __init__(self, batch: Batch, page_tokens: int, padded: int | None = None) -> None:
        self._batch, self._page_tokens = batch, page_tokens
        self._lens = np.diff(batch.query_starts)
        self._decoding = np.flatnonzero(self._lens == 1)
        self._turned: dict[tuple[Rope, int], tuple[NDArray[np.float64], NDArray[np.float64]]] = {}
        assert padded is None or self.is_decode, "only decode steps are padded"
        longest = int(batch.kv_lens[self._decoding].max(initial=0))
        self.symbols: dict[str, int] = {
            "T": batch.token_count,
            "S": batch.sequence_count,
            "A": len(batch.logit_rows),
            "G": int(batch.greedy),
            "D": len(self._decoding),
            "W": _pages(int(batch.kv_lens.max(initial=0)), page_tokens),
            "L": _pages(longest, page_tokens) * page_tokens if longest else 0,
        }
        if padded is not None:
            self.symbols |= dict.fromkeys("TSAD", padded)

    @property
    def is_decode(self) -> bool:
        """Whether every sequence brings one token."""
        return len(self._decoding) == len(self._lens)

    def tiles(self, queries: Iterable[int]) -> None:
        """Set the symbols of prefill tiles of so many tokens."""
        for rows in queries:
            self.symbols[f"P{rows}"] = int((-(-self._lens[self._lens > 1] // rows)).sum())

    def array(self, fact: Fact) -> Array:
        """The values of a fact, without padding: [rows] or [rows, columns]."""
        made: Array = _MAKERS[fact.kind](self, fact)
        return made

    def _table(self, fact: Fact) -> Array:
        assert fact.kv_class is not None
        return self._batch.page_tables[fact.kv_class][:, : self.symbols["W"]]

    def _slots(self, fact: Fact) -> Array:
        assert fact.kv_class is not None
        owner = np.repeat(np.arange(self._batch.sequence_count), self._lens)
        logical, slot = np.divmod(self._batch.positions, self._page_tokens)
        page = self._batch.page_tables[fact.kv_class][owner, logical]
        assert (page >= 0).all(), "a token has no page"
        return np.asarray(page * self._page_tokens + slot)

    def _decodes(self, fact: Fact) -> Array:
        return np.stack([self._decoding, self._batch.query_starts[:-1][self._decoding]], 1)

    def _tiles(self, fact: Fact) -> Array:
        """The longest sequences first: a tile late in a long prompt reads the most keys."""
        assert fact.queries is not None
        many = np.flatnonzero(self._lens > 1)
        counts = -(-self._lens[many] // fact.queries)
        first = [np.arange(count)[::-1] * fact.queries for count in counts]
        made = np.stack([np.repeat(many, counts), np.concatenate([*first, np.zeros(0, np.int64)])], 1).astype(np.int64)
        keys = (self._batch.kv_lens - self._lens)[made[:, 0]] + made[:, 1]
        return np.asarray(made[np.argsort(-keys, kind="stable")])

    def _tables(self, fact: Fact) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        rope, head_dim = fact.rope, fact.head_dim
        assert rope is not None and head_dim is not None
        if (rope, head_dim) not in self._turned:
            self._turned[rope, head_dim] = tables(rope, head_dim, self._batch.positions)
        return self._turned[rope, head_dim]


_MAKERS: dict[str, Callable[[Facts, Fact], Any]] = {
    "tokens": lambda facts, fact: facts._batch.tokens,
    "positions": lambda facts, fact: facts._batch.positions,
    "logit_rows": lambda facts, fact: facts._batch.logit_rows,
    "query_starts": lambda facts, fact: facts._batch.query_starts,
    "kv_lens": lambda facts, fact: facts._batch.kv_lens,
    "decodes": Facts._decodes,
    "tiles": Facts._tiles,
    "slots": Facts._slots,
    "table": Facts._table,
    "cos": lambda facts, fact: facts._tables(fact)[0],
    "sin": lambda facts, fact: facts._tables(fact)[1],
}

#: What stands where a padded batch has no row. A slot or sequence of -1 does nothing; the rest is read and thrown away.
_PADDING: Mapping[str, int] = {"slots": -1, "decodes": -1, "table": -1}


def fill(target: Array, fact: Fact, facts: Facts) -> None:
    """Write a fact into its place, [rows] or [rows, columns], padding included."""
    values = facts.array(fact)
    target.fill(_PADDING.get(fact.kind, 0))
    target[tuple(slice(size) for size in values.shape)] = values


def _pages(tokens: int, page_tokens: int) -> int:
    """Entries of a row for so many tokens, rounded up to a power of two so that few launches differ."""
    pages = max(_LEAST_PAGES, -(-tokens // page_tokens))
    return 1 << (pages - 1).bit_length()
