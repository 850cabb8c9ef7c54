"""Scripted sequences and their pages: the batches that a backend and the oracle are given.

Both get the same tokens. The backend gets pages in a shuffled order, and a ring of them in a window class, as plait's
runtime hands them out; the oracle gets plain pages that are never used twice.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from plait.backends.base import Batch
from plait.spec import kv_class, ring_pages

Rows = Literal["last", "all", "some", "none"]


@dataclass(frozen=True)
class Turn:
    """One step: how many new tokens each sequence brings, in the order of the batch, and whose logits are wanted."""

    tokens: Mapping[int, int]
    rows: Rows = "last"


@dataclass(frozen=True)
class Script:
    """Turns over numbered sequences, each of at most `longest` tokens."""

    turns: tuple[Turn, ...]
    page_tokens: int = 16
    seed: int = 7
    longest: int = field(init=False, default=0)

    def __post_init__(self) -> None:
        totals: dict[int, int] = {}
        for turn in self.turns:
            for sequence, count in turn.tokens.items():
                totals[sequence] = totals.get(sequence, 0) + count
        object.__setattr__(self, "longest", max(totals.values()))

    @property
    def sequences(self) -> int:
        return 1 + max(sequence for turn in self.turns for sequence in turn.tokens)

    @property
    def step_tokens(self) -> int:
        """Most tokens of one step."""
        return max(sum(turn.tokens.values()) for turn in self.turns)


class Player:
    """Plays a script: the same batches for the backend and for the oracle, on pages of their own.

    Args:
        windows: KV class -> window, as `plait.ir.kv_classes` gives them.
    """

    def __init__(self, script: Script, windows: Mapping[str, int | None], vocabulary: int) -> None:
        self.script = script
        size, count = script.page_tokens, script.sequences
        self._logical = -(-script.longest // size)
        rng = np.random.default_rng(script.seed)
        self._ids = rng.integers(0, vocabulary, (count, script.longest), np.int32)
        self._done = [0] * count
        self._tables: dict[str, NDArray[np.int32]] = {}
        self.pages: dict[str, int] = {}
        for name, window in windows.items():
            assert name == kv_class(window)
            ring = self._logical if window is None else ring_pages(window, size, script.step_tokens)
            own = min(ring, self._logical)
            self.pages[name] = own * count + 3
            shuffled = rng.permutation(self.pages[name]).astype(np.int32)[: own * count].reshape(count, own)
            self._tables[name] = shuffled[:, np.arange(self._logical) % own]
        plain = np.arange(count * self._logical, dtype=np.int32).reshape(count, self._logical)
        self._plain = dict.fromkeys(windows, plain)
        self.plain_pages = dict.fromkeys(windows, plain.size)

    def batches(self, turn: Turn) -> tuple[Batch, Batch]:
        """The turn for the backend, and for the oracle."""
        sequences = list(turn.tokens)
        lens = [turn.tokens[s] for s in sequences]
        starts = np.concatenate([[0], np.cumsum(lens)]).astype(np.int32)
        spans = [np.arange(self._done[s], self._done[s] + n, dtype=np.int32) for s, n in turn.tokens.items()]
        tokens = np.concatenate([self._ids[s, span] for s, span in zip(sequences, spans, strict=True)])
        for s, n in turn.tokens.items():
            self._done[s] += n
        kv_lens = np.array([self._done[s] for s in sequences], np.int32)
        rows = _rows(turn.rows, starts)
        made = [
            Batch(tokens, np.concatenate(spans), starts, kv_lens, self._cut(tables, sequences, kv_lens), rows)
            for tables in (self._tables, self._plain)
        ]
        made[0].check()
        return made[0], made[1]

    def physical(self, name: str, sequence: int) -> NDArray[np.int32]:
        """The backend's pages of a sequence in a KV class, in logical order."""
        return self._tables[name][sequence, : -(-self._done[sequence] // self.script.page_tokens)]

    def move(self, sequence: int, table: Mapping[str, NDArray[np.int32]]) -> None:
        """From now on the backend finds the sequence on other pages."""
        for name, pages in table.items():
            self._tables[name][sequence] = pages

    def _cut(
        self, tables: Mapping[str, NDArray[np.int32]], sequences: Sequence[int], kv_lens: NDArray[Any]
    ) -> dict[str, NDArray[np.int32]]:
        """Tables of the sequences of one batch: as wide as the longest, -1 beyond the end of each."""
        used = -(-kv_lens // self.script.page_tokens)
        columns = np.arange(used.max())
        return {
            name: np.where(columns < used[:, None], table[sequences][:, : used.max()], np.int32(-1))
            for name, table in tables.items()
        }


def _rows(wanted: Rows, starts: NDArray[np.int32]) -> NDArray[np.int32]:
    every = np.arange(starts[-1], dtype=np.int32)
    chosen: dict[Rows, NDArray[np.int32]] = {
        "last": starts[1:] - 1,
        "all": every,
        "some": every[::3],
        "none": every[:0],
    }
    return chosen[wanted]


def _turn(rows: Rows = "last", **tokens: int) -> Turn:
    """`_turn(a=5, b=1)`: sequence 0 brings five tokens, sequence 1 one."""
    return Turn({ord(name) - ord("a"): count for name, count in tokens.items()}, rows)


#: Prefill chunks and decode tokens mixed, sequences that join late and out of order, page edges and windows crossed.
MIXED = (
    _turn(a=5, b=1),
    _turn("all", b=1, a=1, c=14),
    _turn("some", c=1, a=1, b=16),
    _turn("none", a=12),
    *(_turn(c=1, b=1, a=1) for _ in range(3)),
    _turn("all", d=33, c=1, a=14),
    _turn(a=1, d=1, b=1, c=1),
)
SCRIPTS: dict[str, Script] = {
    "pages16": Script(MIXED, 16),
    "pages4": Script(MIXED, 4),
    "short": Script((_turn(a=13), _turn(a=1, b=5), _turn(a=1, b=1), _turn("all", b=1, a=1)), 4),
    "one": Script((_turn(a=1), _turn(a=1)), 16),
    "long": Script((_turn(a=257), _turn("all", a=1), _turn(a=2)), 16),
}
