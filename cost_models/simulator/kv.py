"""Who holds how many KV pages of a pipeline. Counts only: which page it is does not change a time."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass

from plait.cost_models.simulator.sequence import Sequence
from plait.cost_models.simulator.setup import Pool


@dataclass
class _Prefix:
    pages: int
    users: int


class KvPages:
    """The pages of one pipeline.

    The first pool keeps every token and is the only one that grows or shares prefixes; the rings of windows are taken
    whole at admission. A prefix that nobody uses any more stays until its pages are wanted.
    """

    def __init__(self, pools: tuple[Pool, ...], *, grows: bool) -> None:
        self.full, self._rings, self.grows = pools[0], pools[1:], grows
        self.free = self.full.pages
        self.most_used = 0
        self._ring_free = [pool.pages for pool in self._rings]
        self._prefixes: OrderedDict[str, _Prefix] = OrderedDict()  # the one used longest ago first

    @property
    def used(self) -> int:
        return self.full.pages - self.free

    def admit(self, sequence: Sequence) -> bool:
        """Take what the sequence needs to start, or nothing."""
        shared = self._cached(sequence)
        rings = [pool.needed(sequence.total_tokens) for pool in self._rings]
        wanted = self.full.needed(sequence.prompt if self.grows else sequence.total_tokens) - shared
        if any(need > free for need, free in zip(rings, self._ring_free, strict=True)):
            return False
        if not self._make_room(wanted, sequence.group if shared else None):
            return False
        if shared:
            assert sequence.group is not None
            self._prefixes[sequence.group].users += 1
            self._prefixes.move_to_end(sequence.group)
        self._ring_free = [free - need for need, free in zip(rings, self._ring_free, strict=True)]
        self._take(wanted)
        sequence.shared_pages = shared
        sequence.scheduled = max(sequence.scheduled, min(shared * self.full.page_tokens, sequence.prompt - 1))
        return True

    def take(self, pages: int) -> bool:
        """Take pages of sequences that grow, or none."""
        if not self._make_room(pages, None):
            return False
        self._take(pages)
        return True

    def publish(self, sequence: Sequence) -> None:
        """A sequence has read its prompt: the whole pages of its prefix are shared from now on."""
        group = sequence.group
        pages = sequence.prefix_tokens // self.full.page_tokens
        if group is None or group in self._prefixes or not pages or sequence.shared_pages:
            return
        self._prefixes[group] = _Prefix(pages, 1)
        sequence.shared_pages = pages

    def release(self, sequence: Sequence, tokens: int) -> None:
        """Give back what a sequence that holds `tokens` KV tokens (or the place for its prompt) has taken."""
        held = self.full.needed(max(tokens, sequence.prompt) if self.grows else sequence.total_tokens)
        self.free += held - sequence.shared_pages
        for i, pool in enumerate(self._rings):
            self._ring_free[i] += pool.needed(sequence.total_tokens)
        if sequence.shared_pages:
            assert sequence.group is not None
            self._prefixes[sequence.group].users -= 1
            sequence.shared_pages = 0

    def check_integrity(self) -> None:
        """AssertionError where the books do not add up."""
        assert 0 <= self.free <= self.full.pages
        assert all(0 <= free <= pool.pages for free, pool in zip(self._ring_free, self._rings, strict=True))
        assert all(prefix.users >= 0 for prefix in self._prefixes.values())

    def idle_prefix_pages(self) -> int:
        """Pages of prefixes that nobody uses."""
        return sum(prefix.pages for prefix in self._prefixes.values() if not prefix.users)

    def _cached(self, sequence: Sequence) -> int:
        """Pages of the sequence's prefix that are there."""
        prefix = None if sequence.group is None else self._prefixes.get(sequence.group)
        return 0 if prefix is None else min(prefix.pages, sequence.prefix_tokens // self.full.page_tokens)

    def _make_room(self, pages: int, kept: str | None) -> bool:
        """Whether so many pages are free, once prefixes that nobody uses are forgotten, but for `kept`."""
        if pages <= self.free:
            return True
        idle = [name for name, prefix in self._prefixes.items() if not prefix.users and name != kept]
        if self.free + sum(self._prefixes[name].pages for name in idle) < pages:
            return False
        for name in idle:
            self.free += self._prefixes.pop(name).pages
            if pages <= self.free:
                break
        return True

    def _take(self, pages: int) -> None:
        self.free -= pages
        self.most_used = max(self.most_used, self.used)
