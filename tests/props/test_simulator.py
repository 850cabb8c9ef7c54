"""What holds in every simulation, whatever is asked of whatever system."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from plait.cost_models.simulator import Arrivals, Ask, Batch, Hop, PipelineSpec, Pool, Setup, Stage, Traffic, Wire
from plait.cost_models.simulator.engine import _Engine
from plait.cost_models.simulator.result import Result, Slo

PAGE = 4


class Counting:
    """Stage times by tokens, and what the stage was given."""

    def __init__(self, seconds: float) -> None:
        self.seconds, self.prompt, self.decode, self.rows, self.most = seconds, 0, 0, 0, 0

    def step_s(self, batch: Batch) -> float:
        self.prompt += batch.prompt_tokens
        self.decode += batch.decodes
        self.rows += batch.logit_rows
        self.most = max(self.most, batch.tokens)
        assert all(0 < new <= kv for new, kv in batch.chunks)
        assert batch.decode_kv >= 2 * batch.decodes
        return self.seconds * (1 + batch.tokens)


asks = st.builds(
    Ask,
    arrival_s=st.floats(0, 3),
    prompt_tokens=st.integers(1, 60),
    output_tokens=st.integers(1, 30),
    prefix_group=st.sampled_from([None, "a", "b"]),
    prefix_tokens=st.integers(0, 60),
)


@st.composite
def systems(draw: st.DrawFn) -> Setup:
    apart = draw(st.booleans())
    wires = [Wire(f"w{i}", draw(st.sampled_from([10.0, 1e3, 1e6])), 0.01) for i in range(2)]
    pipes = []
    for number, role in enumerate(("prefill", "decode", "decode") if apart else ("both",) * draw(st.integers(1, 3))):
        depth = draw(st.integers(1, 3))
        pipes.append(
            PipelineSpec(
                tuple(Stage(f"{number}.{i}", Counting(draw(st.sampled_from([0.001, 0.01])))) for i in range(depth)),
                tuple(draw(st.sampled_from([None, Hop(wires[0], 8.0), Hop(wires[1], 8.0)])) for _ in range(depth - 1)),
                pools=(Pool(draw(st.integers(23, 60)), PAGE), *((Pool(30, PAGE, 5),) if draw(st.booleans()) else ())),
                max_sequences=draw(st.integers(1, 8)),
                max_step_tokens=draw(st.integers(1, 40)),
                in_flight=draw(st.sampled_from([None, 1, 4])),
                kv=draw(st.sampled_from(["reserve", "grow"])),
                driver_s=draw(st.sampled_from([0.0, 0.002])),
                role=role,
            )
        )
    kv = {"kv_wire": wires[0], "kv_bytes_per_token": 3.0} if apart else {}
    return Setup(tuple(pipes), draw(st.sampled_from(["round-robin", "least-loaded"])), **kv)


def run(setup: Setup, traffic: Traffic) -> tuple[_Engine, Result]:
    setup.check()
    engine = _Engine(setup, traffic)
    for pipe in engine._pipes:  # books are checked after every step
        complete, kv = pipe.scheduler.complete, pipe.scheduler.kv

        def checked(step, complete=complete, kv=kv):
            outcome = complete(step)
            kv.check_integrity()
            return outcome

        pipe.scheduler.complete = checked
    return engine, engine.run(Slo())


@settings(max_examples=80, deadline=None)
@given(setup=systems(), wanted=st.lists(asks, min_size=1, max_size=15), closed=st.sampled_from([None, 1, 4]))
def test_tokens_requests_and_pages_add_up(setup: Setup, wanted: list[Ask], closed: int | None) -> None:
    wanted = [
        Ask(a.arrival_s, a.prompt_tokens, a.output_tokens, 0, a.prefix_group, min(a.prefix_tokens, a.prompt_tokens))
        for a in sorted(wanted, key=lambda a: a.arrival_s)
    ]
    engine, result = run(setup, Traffic(tuple(wanted), closed))
    # Every request ends once, in order of its own life.
    assert [r.id for r in result.requests] == list(range(len(wanted)))
    assert all(r.arrival_s <= r.admitted_s < r.first_token_s <= r.end_s for r in result.requests)
    # Every stage of a pipeline sees the same tokens, and all pipelines together those that were asked for.
    for pipe in setup.pipelines:
        seen = {(s.times.prompt, s.times.decode, s.times.rows) for s in pipe.stages}  # type: ignore[attr-defined]
        assert len(seen) == 1
        assert all(s.times.most <= pipe.max_step_tokens for s in pipe.stages)  # type: ignore[attr-defined]
    first = [pipe.stages[0].times for pipe in setup.pipelines]
    outputs = sum(ask.output_tokens for ask in wanted)
    assert sum(t.rows for t in first) == outputs
    again = sum(r.preemptions for r in result.requests)
    assert sum(t.decode for t in first) + len(wanted) <= outputs <= sum(t.decode for t in first) + len(wanted) + again
    prompts = sum(ask.prompt_tokens for ask in wanted)
    if not again:
        assert sum(t.prompt for t in first) == prompts - result.summary.cached_tokens
    assert result.summary.stage_steps == sum(stage.steps for stage in result.stages)
    # KV never exceeds its pages, and comes back.
    for pipe, use in zip(engine._pipes, result.pipelines, strict=True):
        assert 0 < use.most_kv_pages <= use.kv_pages or not use.steps
        assert pipe.scheduler.kv.used == pipe.scheduler.kv.idle_prefix_pages()
        assert pipe.scheduler.running == pipe.load == 0 == len(pipe.scheduler.waiting)
    # Nobody works more than all the time, and Little's law holds to the last digit but rounding.
    assert all(stage.utilisation <= 1 + 1e-9 for stage in result.stages)
    summary = result.summary
    assert summary.mean_in_system == pytest.approx(summary.requests_per_s * summary.e2e_s.mean, rel=1e-9)


@settings(max_examples=50, deadline=None)
@given(kind=st.sampled_from(["poisson", "gamma", "constant"]), seed=st.integers(0, 99), rate=st.floats(0.1, 1e3))
def test_arrivals_ascend_from_zero(kind, seed, rate):
    from random import Random

    times = Arrivals(kind, rate, burstiness=0.5).times(50, Random(seed))
    assert times[0] == 0.0 and times == sorted(times) and len(times) == 50
