"""Which tokens run in the next step. Pure: no clock, no threads, no I/O.

Continuous batching in its simple form. Requests wait in one queue, first come first served. Between steps the first in
the queue is admitted while `max_sequences` and the page pools allow; one that does not fit yet holds up those behind
it, so none starves. A step takes the decode token of every running sequence that has one and fills up with prompt
chunks.

Several steps may be in flight, so that the slices of a pipeline work at the same time. A decoding sequence is in one
step at a time (its next token must come back first), a prompt may be in several: slices take steps in order, so each
chunk finds the keys of the chunks before it. With `in_flight` steps the running sequences are dealt out to that many
groups.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field
from typing import Literal

import numpy as np

from plait.backends.base import Batch
from plait.errors import FitError, UserError
from plait.runtime.pages import PageAllocator
from plait.runtime.sampler import SamplingParams

Finish = Literal["eos", "length", "cancelled"]


@dataclass(eq=False)
class Sequence:
    """One request as the scheduler sees it.

    Attributes:
        max_tokens: tokens to generate; 0 only reads the prompt.
        prompt_logits: also return the logits of every prompt token.
        output_logits: also return the logits that every generated token was sampled from.
        chunk: most prompt tokens in one step; None leaves it to `max_step_tokens`.
        generated: token ids so far, the eos token included.
        scheduled: tokens of it that were given to a step.
        in_flight: steps under way that hold tokens of it.
        finish: why it ended; None while it runs.
    """

    id: int
    prompt: tuple[int, ...]
    max_tokens: int
    eos_ids: frozenset[int] = frozenset()
    params: SamplingParams = field(default_factory=SamplingParams)
    prompt_logits: bool = False
    output_logits: bool = False
    chunk: int | None = None
    generated: list[int] = field(default_factory=list)
    scheduled: int = 0
    in_flight: int = 0
    finish: Finish | None = None

    @property
    def total_tokens(self) -> int:
        return len(self.prompt) + self.max_tokens

    @property
    def prefilling(self) -> bool:
        return self.scheduled < len(self.prompt)

    def tokens(self, start: int, stop: int) -> Seq[int]:
        """Token ids at positions `start` to `stop` (exclusive), which lie in the prompt or in what was generated."""
        length = len(self.prompt)
        return self.prompt[start:stop] if start < length else self.generated[start - length : stop - length]


@dataclass(frozen=True)
class Row:
    """One row of a step's logits: whose it is, where to sample from it, whether to return it.

    `position` is that of the token sampled from the row; None samples nothing.
    """

    sequence: Sequence
    position: int | None
    keep: bool

    @property
    def greedy(self) -> bool:
        """Whether nothing but its best token is wanted."""
        return self.position is not None and not self.keep and self.sequence.params.greedy


@dataclass(frozen=True)
class Step:
    """One batch and what becomes of its logits. `sequences` are those with tokens in it."""

    id: int
    batch: Batch
    sequences: tuple[Sequence, ...]
    rows: tuple[Row, ...]


class Scheduler:
    """See the module.

    Args:
        pages: the page pools; the scheduler is their only user.
        max_sequences: sequences that run at once.
        max_step_tokens: tokens of one step.
        max_positions: positions the model was made for.
        in_flight: steps that may be under way at once.
    """

    def __init__(
        self,
        pages: PageAllocator,
        *,
        max_sequences: int,
        max_step_tokens: int,
        max_positions: int,
        in_flight: int = 1,
    ) -> None:
        self.pages, self.max_sequences, self.max_step_tokens = pages, max_sequences, max_step_tokens
        self.max_positions, self.in_flight = max_positions, in_flight
        self._waiting: deque[Sequence] = deque()
        self._running: list[Sequence] = []  # the one scheduled longest ago first
        self._steps = 0

    @property
    def waiting(self) -> int:
        return len(self._waiting)

    @property
    def running(self) -> int:
        return len(self._running)

    def check_fits(self, sequence: Sequence) -> None:
        """Refuse what could never run. Reads only what is fixed at the start, so any thread may call it.

        Raises:
            UserError: `too-many-positions`.
            FitError: `does-not-fit`, with needed and available pages.
        """
        asked = f"{len(sequence.prompt)} prompt + {sequence.max_tokens} new = {sequence.total_tokens} tokens"
        left = self.max_positions - len(sequence.prompt)
        if sequence.total_tokens > self.max_positions:
            raise UserError(
                "too-many-positions",
                f"the request is longer than the model's {self.max_positions} positions",
                why=asked,
                hint="shorten the prompt" + (f", or ask for at most {left} new tokens" if left > 0 else ""),
            )
        for name, pool in self.pages.pools.items():
            needed = pool.needed(sequence.total_tokens)
            if needed > pool.pages:
                raise FitError(
                    f"the request needs {needed} KV pages of {pool.page_tokens} tokens, the pipeline has {pool.pages}",
                    why=f"{asked} (KV class {name})",
                    hint=f"a request may hold {pool.pages * pool.page_tokens} tokens here; "
                    f"compile with --context {sequence.total_tokens} for longer ones",
                )

    def submit(self, sequence: Sequence) -> None:
        """Queue a sequence. Raises what `check_fits` raises."""
        assert sequence.prompt
        self.check_fits(sequence)
        self._waiting.append(sequence)

    def cancel(self, sequence: Sequence) -> None:
        """End a sequence; what is in flight for it is thrown away when it comes back. Ended ones stay as they are."""
        if sequence.finish is not None:
            return
        sequence.finish = "cancelled"
        if sequence in self._waiting:
            self._waiting.remove(sequence)
        self._retire(sequence)

    def next_step(self) -> Step | None:
        """The next step, or None where every running sequence waits for a token (or none is there)."""
        self._admit()
        shares = self._deal()
        if not shares:
            return None
        for sequence, count in shares:
            self.pages.grow(sequence.id, sequence.scheduled + count)
            self._running.remove(sequence)
            self._running.append(sequence)
        step = self._make(shares)
        for sequence, count in shares:
            sequence.scheduled += count
            sequence.in_flight += 1
        return step

    def complete(self, step: Step, tokens: Seq[int]) -> list[tuple[Sequence, int]]:
        """Take the tokens sampled in `step`, one for each row with a position, in order.

        Returns:
            The tokens that count, with their sequences; those of cancelled sequences do not.
        """
        for sequence in step.sequences:
            sequence.in_flight -= 1
        sampled = [row.sequence for row in step.rows if row.position is not None]
        fresh = []
        for sequence, token in zip(sampled, tokens, strict=True):
            if sequence.finish is None:
                sequence.generated.append(token)
                fresh.append((sequence, token))
                sequence.finish = _finish(sequence)
        for sequence in step.sequences:
            if sequence.max_tokens == 0 and not sequence.prefilling and not sequence.in_flight:
                sequence.finish = sequence.finish or "length"
            self._retire(sequence)
        return fresh

    def check_integrity(self) -> None:
        """AssertionError where the books do not add up."""
        self.pages.check_integrity()
        assert len(self._running) <= self.max_sequences
        assert len({sequence.id for sequence in (*self._running, *self._waiting)}) == self.running + self.waiting

    def _admit(self) -> None:
        while self._waiting and self.running < self.max_sequences and self.pages.fits(self._waiting[0].total_tokens):
            sequence = self._waiting.popleft()
            self.pages.reserve(sequence.id, sequence.total_tokens)
            self._running.append(sequence)

    def _deal(self) -> list[tuple[Sequence, int]]:
        """Who gets how many tokens of the next step."""
        ready = [s for s in self._running if s.finish is None and (s.prefilling or (not s.in_flight and s.generated))]
        # Longest wait first, and as many as make equal groups: nobody is passed over for ever.
        chosen = ready[: min(-(-self.running // self.in_flight), self.max_step_tokens)]
        shares = [(sequence, 1) for sequence in chosen if not sequence.prefilling]
        # With steps in flight a prompt goes in smaller chunks, so that the slices overlap on it.
        spare = max(-(-self.max_step_tokens // self.in_flight) - len(shares), 1)
        for sequence in sorted((s for s in chosen if s.prefilling), key=lambda s: s.id):
            left = len(sequence.prompt) - sequence.scheduled
            count = min(left, spare, sequence.chunk or left)
            if count > 0:
                shares.append((sequence, count))
                spare -= count
        return shares

    def _make(self, shares: list[tuple[Sequence, int]]) -> Step:
        tokens: list[int] = []
        positions: list[int] = []
        rows: list[Row] = []
        logit_rows: list[int] = []
        for sequence, count in shares:
            stop = sequence.scheduled + count
            for row in _rows(sequence, stop, count):
                logit_rows.append(len(tokens) + row[0])
                rows.append(row[1])
            tokens.extend(sequence.tokens(sequence.scheduled, stop))
            positions.extend(range(sequence.scheduled, stop))
        lens = [sequence.scheduled + count for sequence, count in shares]
        batch = Batch(
            tokens=np.array(tokens, np.int32),
            positions=np.array(positions, np.int32),
            query_starts=np.concatenate([[0], np.cumsum([count for _, count in shares])]).astype(np.int32),
            kv_lens=np.array(lens, np.int32),
            page_tables=self.pages.tables(
                [(sequence.id, length) for (sequence, _), length in zip(shares, lens, strict=True)]
            ),
            logit_rows=np.array(logit_rows, np.int32),
            greedy=all(row.greedy for row in rows),
        )
        self._steps += 1
        return Step(self._steps, batch, tuple(sequence for sequence, _ in shares), tuple(rows))

    def _retire(self, sequence: Sequence) -> None:
        """Free an ended sequence once no step holds it."""
        if sequence.finish is not None and not sequence.in_flight and sequence in self._running:
            self._running.remove(sequence)
            self.pages.release(sequence.id)


def _rows(sequence: Sequence, stop: int, count: int) -> Iterator[tuple[int, Row]]:
    """The logits wanted of the `count` tokens of `sequence` that end at position `stop`: (token of the chunk, row)."""
    samples = stop >= len(sequence.prompt) and sequence.max_tokens > 0
    for i in range(count):
        last = i == count - 1
        position = stop if last and samples else None
        keep = sequence.prompt_logits and stop - count + i < len(sequence.prompt)
        keep = keep or (sequence.output_logits and position is not None)
        if keep or position is not None:
            yield i, Row(sequence, position, keep)


def _finish(sequence: Sequence) -> Finish | None:
    if sequence.generated[-1] in sequence.eos_ids:
        return "eos"
    return "length" if len(sequence.generated) == sequence.max_tokens else None
