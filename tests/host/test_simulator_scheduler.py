"""The simulator's scheduler makes the steps that the runtime's makes."""

from __future__ import annotations

from collections import deque
from itertools import pairwise

from hypothesis import given, settings
from hypothesis import strategies as st

from plait.cost_models.simulator.scheduler import Scheduler as Simulated
from plait.cost_models.simulator.scheduler import Step
from plait.cost_models.simulator.sequence import Sequence as Asked
from plait.cost_models.simulator.setup import PipelineSpec, Pool, Stage
from plait.cost_models.simulator.traffic import Ask
from plait.runtime.pages import PageAllocator, make_pools
from plait.runtime.scheduler import Scheduler, Sequence
from plait.spec import ring_pages

PAGE = 4

requests = st.lists(
    st.tuples(st.integers(0, 12), st.integers(1, 40), st.integers(1, 20)), min_size=1, max_size=12
)  # the round in which it comes, prompt, output


def shares_of(step: Step) -> list[tuple[int, int]]:
    """(request, tokens) of a step, in order."""
    decodes = [] if step.cohort is None else [(s.id, 1) for s in step.cohort.members]
    return decodes + [(s.id, new) for s, (new, _) in zip(step.chunked, step.batch.chunks, strict=True)]


@settings(max_examples=100, deadline=None)
@given(
    asked=requests,
    in_flight=st.integers(1, 4),
    max_sequences=st.integers(1, 6),
    max_step_tokens=st.integers(1, 24),
    pages=st.integers(15, 40),
    window=st.sampled_from([None, 6]),
)
def test_the_same_requests_make_the_same_steps(asked, in_flight, max_sequences, max_step_tokens, pages, window):
    windows = {"full": None} | ({"window": window} if window else {})
    pools = make_pools(windows, pages * PAGE, PAGE, max_step_tokens, max_sequences)
    real = Scheduler(
        PageAllocator(pools),
        max_sequences=max_sequences,
        max_step_tokens=max_step_tokens,
        max_positions=1000,
        in_flight=in_flight,
    )
    rings = [Pool(pool.pages, PAGE, pool.ring) for name, pool in pools.items() if name != "full"]
    asked = [(when, prompt, output) for when, prompt, output in sorted(asked) if prompt + output <= pages * PAGE]
    if window:
        assert rings[0].ring == ring_pages(window, PAGE, max_step_tokens)
        asked = [ask for ask in asked if rings[0].needed(ask[1] + ask[2]) <= rings[0].pages]
    ours = Simulated(
        PipelineSpec(
            tuple(Stage(str(i), None) for i in range(in_flight)),  # type: ignore[arg-type]
            pools=(Pool(pages, PAGE), *rings),
            max_sequences=max_sequences,
            max_step_tokens=max_step_tokens,
        )
    )
    under_way: deque[tuple[object, Step]] = deque()
    ended: tuple[list[int], list[int]] = ([], [])
    coming, number = deque(enumerate(asked)), 0
    while coming or under_way or real.running or real.waiting:
        while coming and coming[0][1][0] <= number:
            i, (_, prompt, output) = coming.popleft()
            real.submit(Sequence(i, tuple(range(prompt)), output))
            ours.submit(Asked(i, Ask(0.0, prompt, output), 0.0))
        while len(under_way) < in_flight:
            theirs = real.next_step()
            step, _ = ours.next_step(float(number))
            assert (theirs is None) == (step is None)
            if step is None:
                break
            starts = theirs.batch.query_starts
            counts = [int(b - a) for a, b in pairwise(starts)]
            assert shares_of(step) == [(s.id, n) for s, n in zip(theirs.sequences, counts, strict=True)]
            lens = [int(n) for n in theirs.batch.kv_lens]
            decodes = step.batch.decodes
            assert (step.batch.decode_kv, [kv for _, kv in step.batch.chunks]) == (sum(lens[:decodes]), lens[decodes:])
            assert step.batch.logit_rows == len(theirs.batch.logit_rows)
            under_way.append((theirs, step))
        number += 1
        if under_way:
            theirs, step = under_way.popleft()
            before = {s.id for s in theirs.sequences if s.finish is None}
            real.complete(theirs, [0] * sum(row.position is not None for row in theirs.rows))
            ended[0].extend(sorted(s.id for s in theirs.sequences if s.finish is not None and s.id in before))
            ended[1].extend(sorted(s.id for s in ours.complete(step).ended))
        real.check_integrity()
        ours.kv.check_integrity()
        assert (ours.running, len(ours.waiting)) == (real.running, real.waiting)
    assert ended[0] == ended[1] and len(ended[0]) == len(asked)
    assert ours.kv.free == pages
