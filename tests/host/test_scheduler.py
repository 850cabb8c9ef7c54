"""Pages and scheduler: nobody shares a page, nobody starves, every batch is sound."""

from __future__ import annotations

import dataclasses
from collections import deque
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from plait.errors import FitError, UserError
from plait.runtime.pages import PageAllocator, PagePool, make_pools
from plait.runtime.sampler import SamplingParams
from plait.runtime.scheduler import Scheduler, Sequence, Step
from plait.spec import kv_class, ring_pages

PAGE = 4


def make(
    pages: int = 40,
    *,
    windows: tuple[int | None, ...] = (None, 6),
    max_sequences: int = 4,
    max_step_tokens: int = 10,
    max_positions: int = 200,
    in_flight: int = 1,
) -> Scheduler:
    pools = make_pools({kv_class(w): w for w in windows}, pages * PAGE, PAGE, max_step_tokens, max_sequences)
    return Scheduler(
        PageAllocator(pools),
        max_sequences=max_sequences,
        max_step_tokens=max_step_tokens,
        max_positions=max_positions,
        in_flight=in_flight,
    )


def request(i: int, prompt: int, new: int, **more: object) -> Sequence:
    return Sequence(i, tuple(range(100 * i, 100 * i + prompt)), new, **more)  # type: ignore[arg-type]


class Memory:
    """What a device would remember: which (sequence, position) each slot of each class holds."""

    def __init__(self, scheduler: Scheduler, windows: tuple[int | None, ...]) -> None:
        self.scheduler, self.windows = scheduler, {kv_class(w): w for w in windows}
        self.slots: dict[tuple[str, int, int], tuple[int, int]] = {}

    def run(self, step: Step) -> list[int]:
        """Write the step's keys, then check that every query finds every key it attends to. Returns tokens."""
        batch = step.batch
        batch.check()
        self.scheduler.check_integrity()
        assert 0 < batch.token_count <= self.scheduler.max_step_tokens
        owners = [(s, t) for s in range(batch.sequence_count) for t in range(*batch.query_starts[s : s + 2])]
        for name, window in self.windows.items():
            table = batch.page_tables[name]
            assert (table < self.scheduler.pages.pools[name].pages).all()
            for s, t in owners:
                page, slot = divmod(int(batch.positions[t]), PAGE)
                self.slots[name, int(table[s, page]), slot] = (step.sequences[s].id, int(batch.positions[t]))
            for s, t in owners:
                position = int(batch.positions[t])
                for key in range(0 if window is None else max(position - window + 1, 0), position + 1):
                    where = name, int(table[s, key // PAGE]), key % PAGE
                    assert self.slots[where] == (step.sequences[s].id, key)
        for s, sequence in enumerate(step.sequences):
            text = (*sequence.prompt, *sequence.generated)
            at = slice(*batch.query_starts[s : s + 2])
            assert batch.tokens[at].tolist() == [text[p] for p in batch.positions[at]]
        assert len(step.rows) == len(batch.logit_rows)
        return [row.position for row in step.rows if row.position is not None]


def drive(scheduler: Scheduler, memory: Memory, limit: int = 5000) -> list[Sequence]:
    """Run until nothing is left; the sequences in the order in which they ended. A token is its position."""
    flying: deque[tuple[Step, list[int]]] = deque()
    ended: list[Sequence] = []
    for _ in range(limit):
        while len(flying) < scheduler.in_flight and (step := scheduler.next_step()):
            flying.append((step, memory.run(step)))
        if not flying:
            assert scheduler.running == scheduler.waiting == 0
            return ended
        step, tokens = flying.popleft()
        scheduler.complete(step, tokens)
        scheduler.check_integrity()
        ended += [s for s in step.sequences if s.finish and s not in ended]
    raise AssertionError("not done")


requests = st.lists(st.tuples(st.integers(1, 40), st.integers(1, 20)), min_size=1, max_size=12)


@settings(deadline=None, max_examples=60)
@given(
    sizes=requests,
    pages=st.integers(15, 60),
    max_sequences=st.integers(1, 6),
    max_step_tokens=st.integers(1, 24),
    window=st.one_of(st.none(), st.integers(1, 20)),
    in_flight=st.integers(1, 3),
    chunk=st.one_of(st.none(), st.integers(1, 9)),
)
def test_every_request_finishes_on_pages_of_its_own(
    sizes: list[tuple[int, int]],
    pages: int,
    max_sequences: int,
    max_step_tokens: int,
    window: int | None,
    in_flight: int,
    chunk: int | None,
) -> None:
    windows = (None, window) if window else (None,)
    scheduler = make(
        pages, windows=windows, max_sequences=max_sequences, max_step_tokens=max_step_tokens, in_flight=in_flight
    )
    sequences = [request(i, prompt, new, chunk=chunk) for i, (prompt, new) in enumerate(sizes)]
    for sequence in sequences:
        scheduler.submit(sequence)
    ended = drive(scheduler, Memory(scheduler, windows))
    assert sorted(s.id for s in ended) == [s.id for s in sequences]
    for sequence in sequences:
        start = len(sequence.prompt)
        assert sequence.generated == list(range(start, start + sequence.max_tokens))
        assert sequence.finish == "length"
    assert all(pool.used == 0 for pool in scheduler.pages.pools.values())


@settings(deadline=None, max_examples=40)
@given(sizes=requests, victims=st.lists(st.tuples(st.integers(0, 11), st.integers(0, 30))), in_flight=st.integers(1, 3))
def test_cancelling_at_any_time_frees_everything(
    sizes: list[tuple[int, int]], victims: list[tuple[int, int]], in_flight: int
) -> None:
    scheduler = make(in_flight=in_flight)
    memory, flying = Memory(scheduler, (None, 6)), deque[tuple[Step, list[int]]]()
    sequences = [request(i, *size) for i, size in enumerate(sizes)]
    for sequence in sequences:
        scheduler.submit(sequence)
    for turn in range(31):
        for victim, when in victims:
            if when == turn and victim < len(sequences):
                scheduler.cancel(sequences[victim])
                scheduler.check_integrity()
        if len(flying) < in_flight and (step := scheduler.next_step()):
            flying.append((step, memory.run(step)))
        elif flying:
            step, tokens = flying.popleft()
            done = {s.id: len(s.generated) for s in sequences if s.finish}
            scheduler.complete(step, tokens)
            assert all(len(sequences[i].generated) == count for i, count in done.items())
    while flying:
        scheduler.complete(*flying.popleft())
    drive(scheduler, memory)
    assert all(sequence.finish in ("length", "cancelled") for sequence in sequences)
    assert all(pool.used == 0 for pool in scheduler.pages.pools.values())


def test_a_large_request_is_not_overtaken() -> None:
    scheduler = make(pages=12, max_sequences=8)
    small = [request(i, 4, 8) for i in range(3)]
    large, late = request(3, 30, 10), request(4, 1, 1)
    for sequence in (*small, large, late):
        scheduler.submit(sequence)
    begun: list[int] = []
    while step := scheduler.next_step():
        if 3 not in begun:
            assert scheduler.pages.fits(late.total_tokens), "it would fit, and waits its turn"
        begun += [s.id for s in step.sequences if s.id not in begun]
        scheduler.complete(step, [row.position for row in step.rows if row.position is not None])
    assert begun == [0, 1, 2, 3, 4]


def test_decoding_goes_on_while_a_long_prompt_is_read() -> None:
    scheduler = make(max_step_tokens=6)
    scheduler.submit(request(0, 2, 20))
    step = scheduler.next_step()
    assert step is not None
    scheduler.complete(step, [2])
    scheduler.submit(request(1, 40, 1))
    for _ in range(5):
        step = scheduler.next_step()
        assert step is not None
        assert {s.id: n for s, n in zip(step.sequences, np.diff(step.batch.query_starts), strict=True)} == {0: 1, 1: 5}
        scheduler.complete(step, [row.position for row in step.rows if row.position is not None])


def test_with_steps_in_flight_the_sequences_are_dealt_out_to_groups() -> None:
    scheduler = make(pages=60, in_flight=2, max_sequences=4)
    for i in range(4):
        scheduler.submit(request(i, 1, 50))
    flying: deque[Step] = deque()
    for _ in range(20):
        while len(flying) < 2 and (step := scheduler.next_step()):
            flying.append(step)
        groups = [{s.id for s in step.sequences} for step in flying]
        assert [len(group) for group in groups] == [2, 2]
        assert not groups[0] & groups[1]
        step = flying.popleft()
        scheduler.complete(step, [0] * len(step.rows))


def test_a_prompt_may_be_in_several_steps_at_once() -> None:
    scheduler = make(in_flight=3, max_step_tokens=12)
    scheduler.submit(request(0, 10, 1))
    steps = [scheduler.next_step() for _ in range(4)]
    assert [step and step.batch.positions.tolist() for step in steps] == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9], None]
    assert [step and len(step.rows) for step in steps] == [0, 0, 1, None]


def test_rows_ask_for_the_logits_that_are_wanted() -> None:
    scheduler = make(max_step_tokens=5)
    scheduler.submit(request(0, 7, 0, prompt_logits=True))
    step = scheduler.next_step()
    assert step is not None
    assert [(row.position, row.keep) for row in step.rows] == [(None, True)] * 5
    assert scheduler.complete(step, []) == []
    scheduler.submit(request(1, 2, 2, output_logits=True))
    step = scheduler.next_step()
    assert step is not None
    assert step.batch.logit_rows.tolist() == [0, 1, 3]
    assert [(row.sequence.id, row.position, row.keep) for row in step.rows] == [
        (0, None, True),
        (0, None, True),
        (1, 2, True),
    ]
    scheduler.complete(step, [55])
    assert scheduler.running == 1


@pytest.mark.parametrize(
    ("wanted", "greedy"),
    [
        ({}, True),
        ({"params": SamplingParams(0.8, top_k=1)}, True),
        ({"params": SamplingParams(0.8)}, False),
        ({"output_logits": True}, False),
        ({"prompt_logits": True}, False),
    ],
)
def test_a_step_is_greedy_where_every_row_is(wanted: dict[str, Any], greedy: bool) -> None:
    scheduler = make()
    for sequence in (request(0, 2, 3), request(1, 3, 3, **wanted)):
        scheduler.submit(sequence)
    step = scheduler.next_step()
    assert step is not None and len(step.sequences) == 2
    assert step.batch.greedy == greedy


def test_an_eos_token_ends_a_request_and_counts() -> None:
    scheduler = make()
    sequence = request(0, 3, 9, eos_ids=frozenset({5}))
    scheduler.submit(sequence)
    drive(scheduler, Memory(scheduler, (None, 6)))
    assert (sequence.generated, sequence.finish) == ([3, 4, 5], "eos")


def test_what_can_never_fit_is_refused_with_the_numbers() -> None:
    scheduler = make(pages=10)
    with pytest.raises(FitError, match="needs 11 KV pages of 4 tokens, the pipeline has 10") as caught:
        scheduler.submit(request(0, 30, 11))
    assert "30 prompt + 11 new = 41 tokens" in caught.value.why
    scheduler.submit(request(0, 30, 10))
    with pytest.raises(UserError, match="the model's 200 positions") as refused:
        scheduler.submit(request(1, 190, 11))
    assert "190 prompt + 11 new = 201 tokens" in refused.value.why
    assert "at most 10 new tokens" in refused.value.hint


def test_a_window_class_alone_serves_requests_longer_than_its_pool() -> None:
    scheduler = make(pages=6, windows=(6,), max_sequences=1)
    ring = ring_pages(6, PAGE, 10)
    assert ring < 6
    sequence = request(0, 60, 100)
    scheduler.submit(sequence)
    drive(scheduler, Memory(scheduler, (6,)))
    assert len(sequence.generated) == 100


@given(st.integers(1, 30), st.integers(1, 30), st.integers(1, 6))
def test_a_ring_holds_the_window_and_a_step_and_no_page_more(window: int, step: int, page: int) -> None:
    alive = window - 1 + step
    assert alive <= ring_pages(window, page, step) * page < alive + page


def test_pages_of_a_cancelled_request_wait_for_its_step() -> None:
    scheduler = make()
    sequence = request(0, 8, 5)
    scheduler.submit(sequence)
    step = scheduler.next_step()
    assert step is not None
    scheduler.cancel(sequence)
    assert scheduler.pages.pools["full"].used == 2
    assert scheduler.next_step() is None
    assert scheduler.complete(step, [8]) == []
    assert scheduler.pages.pools["full"].used == scheduler.running == 0


def test_pool_arithmetic_and_its_check() -> None:
    pool = PagePool(5, PAGE)
    pool.reserve(1, 9)
    assert not pool.fits(9)
    assert pool.fits(8)
    pool.grow(1, 5)
    assert pool.used == 2
    assert pool.table(1, 5, 4).tolist() == [0, 1, -1, -1]
    pool.check_integrity()
    pool._owned[1].pages.append(0)
    with pytest.raises(AssertionError, match="one owner"):
        pool.check_integrity()


def test_a_step_is_a_value() -> None:
    scheduler = make()
    scheduler.submit(request(0, 3, 1))
    step = scheduler.next_step()
    assert step is not None
    with pytest.raises(dataclasses.FrozenInstanceError):
        step.id = 2  # type: ignore[misc]
