"""Who owns which KV page.

Every KV class (`plait.spec.kv_class`) has a pool of its own; all layers of the class use the same page numbers. A
sequence reserves at admission what it can ever need, so nothing is evicted half-way, and takes pages one at a time as
it grows. In a window class the reservation is a ring: the table goes on repeating its pages.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from plait.spec import ring_pages

Int32 = NDArray[np.int32]


@dataclass
class _Owned:
    reserved: int
    pages: list[int] = field(default_factory=list)


class PagePool:
    """The pages of one KV class.

    Args:
        pages: pages in the pool; they are numbered from 0.
        page_tokens: tokens of one page.
        ring: most pages one sequence needs in a window class (`plait.spec.ring_pages`); None in the full class.
    """

    def __init__(self, pages: int, page_tokens: int, ring: int | None = None) -> None:
        assert pages > 0
        self.pages, self.page_tokens, self.ring = pages, page_tokens, ring
        self._free = list(range(pages - 1, -1, -1))
        self._owned: dict[int, _Owned] = {}
        self._reserved = 0

    @property
    def used(self) -> int:
        """Pages that hold tokens."""
        return self.pages - len(self._free)

    def needed(self, tokens: int) -> int:
        """Pages that a sequence of `tokens` tokens needs."""
        pages = -(-tokens // self.page_tokens)
        return pages if self.ring is None else min(pages, self.ring)

    def fits(self, tokens: int) -> bool:
        """Whether a sequence of `tokens` tokens can be admitted now."""
        return self._reserved + self.needed(tokens) <= self.pages

    def reserve(self, owner: int, tokens: int) -> None:
        """Set aside what `owner` can need until it has `tokens` tokens."""
        assert owner not in self._owned and self.fits(tokens)
        self._owned[owner] = _Owned(self.needed(tokens))
        self._reserved += self.needed(tokens)

    def grow(self, owner: int, tokens: int) -> None:
        """Take pages until `owner` has room for `tokens` tokens."""
        owned = self._owned[owner]
        needed = self.needed(tokens)
        assert needed <= owned.reserved, "a sequence never outgrows its reservation"
        while len(owned.pages) < needed:
            owned.pages.append(self._free.pop())

    def table(self, owner: int, tokens: int, width: int) -> Int32:
        """[width] physical page of each logical page of the first `tokens` tokens, then -1.

        Logical page l of a window class lies in physical page l modulo the ring: the tokens it overwrites are older
        than the window, because the ring holds the window and one whole step.
        """
        owned = self._owned[owner]
        row = np.full(width, -1, np.int32)
        logical = -(-tokens // self.page_tokens)
        row[:logical] = np.resize(np.array(owned.pages[: owned.reserved], np.int32), logical)
        return row

    def release(self, owner: int) -> None:
        """Give every page of `owner` back."""
        owned = self._owned.pop(owner)
        self._free.extend(reversed(owned.pages))
        self._reserved -= owned.reserved

    def check_integrity(self) -> None:
        """Every page is free or has one owner; reservations are honoured. AssertionError otherwise."""
        pages = [*self._free, *(page for owned in self._owned.values() for page in owned.pages)]
        assert sorted(pages) == list(range(self.pages)), "every page is free or has one owner"
        assert all(len(owned.pages) <= owned.reserved for owned in self._owned.values())
        assert self._reserved == sum(owned.reserved for owned in self._owned.values()) <= self.pages


class PageAllocator:
    """The pools of all KV classes of a pipeline, by class name."""

    def __init__(self, pools: Mapping[str, PagePool]) -> None:
        self.pools = dict(pools)

    def fits(self, tokens: int) -> bool:
        return all(pool.fits(tokens) for pool in self.pools.values())

    def reserve(self, owner: int, tokens: int) -> None:
        for pool in self.pools.values():
            pool.reserve(owner, tokens)

    def grow(self, owner: int, tokens: int) -> None:
        for pool in self.pools.values():
            pool.grow(owner, tokens)

    def tables(self, owners: list[tuple[int, int]]) -> dict[str, Int32]:
        """By KV class, [S, P] page tables of (owner, tokens) pairs; P is what the longest of them needs."""
        tables = {}
        for name, pool in self.pools.items():
            width = max(-(-tokens // pool.page_tokens) for _, tokens in owners)
            tables[name] = np.stack([pool.table(owner, tokens, width) for owner, tokens in owners])
        return tables

    def release(self, owner: int) -> None:
        for pool in self.pools.values():
            pool.release(owner)

    def check_integrity(self) -> None:
        for pool in self.pools.values():
            pool.check_integrity()


def make_pools(
    windows: Mapping[str, int | None], max_kv_tokens: int, page_tokens: int, max_step_tokens: int, max_sequences: int
) -> dict[str, PagePool]:
    """A pool for each KV class in `windows` (class -> window): the pages of `max_kv_tokens` tokens.

    A window class gets fewer where `max_sequences` full rings need fewer.
    """
    pages, pools = max_kv_tokens // page_tokens, {}
    for name, window in windows.items():
        ring = None if window is None else ring_pages(window, page_tokens, max_step_tokens)
        pools[name] = PagePool(pages if ring is None else min(pages, max_sequences * ring), page_tokens, ring)
    return pools
