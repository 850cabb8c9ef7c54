"""The simulator against closed forms and cases worked out by hand."""

from __future__ import annotations

import math
import statistics
from dataclasses import replace
from itertools import pairwise
from random import Random

import pytest

from plait.cost_models.simulator import (
    Arrivals,
    Ask,
    Batch,
    ConstantTimes,
    Hop,
    Lengths,
    PipelineSpec,
    PointTimes,
    Pool,
    Setup,
    Slo,
    Stage,
    Traffic,
    Wire,
    draw,
    simulate,
)
from plait.cost_models.simulator.costs import Rate, costs
from plait.cost_models.simulator.result import Result
from plait.errors import FitError, UsageError, UserError
from plait.spec import Estimate, from_dict, to_dict, to_json

ONE = Lengths("fixed", 1)


class TokenTimes:
    """Seconds per new token."""

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds

    def step_s(self, batch: Batch) -> float:
        return self.seconds * batch.tokens


def pipeline(*seconds: float, **options) -> PipelineSpec:
    name = options.pop("name", "")
    stages = tuple(Stage(f"{name}s{i}", ConstantTimes(s)) for i, s in enumerate(seconds))
    return PipelineSpec(stages, **options)


def at_once(count: int, prompt: int = 1, output: int = 1) -> Traffic:
    return Traffic(tuple(Ask(0.0, prompt, output) for _ in range(count)))


# Closed forms


@pytest.mark.parametrize("load", [0.3, 0.6, 0.8])
def test_one_at_a_time_is_an_m_d_1_queue(load):
    """Pollaczek-Khinchine: the mean wait is load * service / (2 (1 - load)). Batch means give the error bar."""
    count, service = 40_000, 0.02
    traffic = draw(count, Arrivals("poisson", load / service), ONE, ONE, seed=3)
    result = simulate(Setup((pipeline(service, max_sequences=1),)), traffic)
    waits = [r.e2e_s - service for r in result.requests]
    means = [statistics.fmean(waits[i : i + count // 20]) for i in range(0, count, count // 20)]
    error = statistics.stdev(means) / math.sqrt(len(means))
    assert statistics.fmean(waits) == pytest.approx(load * service / (2 * (1 - load)), abs=4 * error)
    assert error < 0.1 * statistics.fmean(waits), "the test could tell"
    assert result.stages[0].busy_s == pytest.approx(count * service)
    assert result.stages[0].utilisation == pytest.approx(load, rel=0.03)


@pytest.mark.parametrize("seconds", [(1.0,), (1.0, 1.0, 1.0), (1.0, 3.0, 2.0), (5.0, 1.0, 1.0, 2.0)])
def test_a_pipeline_fills_and_drains(seconds):
    """n steps through stages of one chunk each: the first takes the sum, each further one the slowest stage."""
    count = 7
    spec = pipeline(*seconds, max_sequences=count, max_step_tokens=len(seconds), in_flight=len(seconds))
    result = simulate(Setup((spec,)), at_once(1, prompt=count))
    assert result.summary.makespan_s == pytest.approx(sum(seconds) + (count - 1) * max(seconds))
    equal = simulate(Setup((pipeline(*[2.0] * 4, max_sequences=1, max_step_tokens=4),)), at_once(1, prompt=count))
    assert equal.summary.makespan_s == pytest.approx((count + 4 - 1) * 2.0)


def test_a_closed_loop_saturates_at_the_slowest_stage():
    """Enough requests of decode only keep the bottleneck busy: tokens per second = group / slowest."""
    spec = pipeline(0.01, 0.03, 0.02, max_sequences=30)
    traffic = draw(120, Arrivals("closed", concurrency=30), ONE, Lengths("fixed", 200))
    result = simulate(Setup((spec,)), traffic)
    assert result.stages[1].utilisation > 0.99
    assert result.summary.output_tokens_per_s == pytest.approx(10 / 0.03, rel=0.02)


def test_one_request_alone_never_overlaps():
    """TPOT is the sum of stages, hops and the driver; TTFT the same on an empty pipeline."""
    hops = tuple(Hop(Wire(f"w{i}", 1e6, 0.001), 1000.0) for i in range(2))
    spec = pipeline(0.01, 0.03, 0.02, hops=hops, driver_s=0.002)
    result = simulate(Setup((spec,)), at_once(1, output=11))
    each = 0.06 + 2 * (0.001 + 0.001) + 0.002
    assert result.requests[0].ttft_s == pytest.approx(each)
    assert result.requests[0].tpot_s == pytest.approx(each)
    assert [wire.messages for wire in result.wires] == [11, 11]


@pytest.mark.parametrize("kind", ["poisson", "gamma", "constant", "at-once", "closed"])
def test_littles_law_is_exact(kind):
    arrivals = Arrivals(kind, 40.0, burstiness=3.0, concurrency=6)
    traffic = draw(300, arrivals, Lengths("lognormal", 60), Lengths("uniform", low=1, high=40), seed=5)
    spec = PipelineSpec((Stage("a", TokenTimes(1e-4)), Stage("b", TokenTimes(2e-4))), max_sequences=8)
    s = simulate(Setup((spec,)), traffic).summary
    assert s.mean_in_system == pytest.approx(s.requests_per_s * s.e2e_s.mean, rel=1e-9)


# Links


def test_two_pipelines_wait_for_each_other_on_a_shared_link():
    """Both hand on 1000 bytes at 1 s over 1000 B/s: the second message waits a second, and its second stage too."""
    wire = Wire("nic", 1000.0, 0.25)
    pipes = tuple(pipeline(1.0, 1.0, hops=(Hop(wire, 1000.0),), name=name) for name in ("a", "b"))
    result = simulate(Setup(pipes, "round-robin"), at_once(2))
    assert [r.e2e_s for r in result.requests] == pytest.approx([1 + 1 + 0.25 + 1, 1 + 2 + 0.25 + 1])
    (use,) = result.wires
    assert (use.messages, use.busy_s, use.waited_s, use.nbytes) == (2, 2.0, 1.0, 2000.0)


def test_a_slow_link_is_the_bottleneck_of_a_pipeline():
    """Chunks of one token: the link takes 2 s for each, the stages 1 s."""
    spec = pipeline(1.0, 1.0, hops=(Hop(Wire("w", 1.0), 2.0),), max_step_tokens=2, max_sequences=4, in_flight=2)
    result = simulate(Setup((replace(spec, in_flight=4, max_step_tokens=4),)), at_once(1, prompt=6))
    assert result.summary.makespan_s == pytest.approx(1 + 6 * 2 + 1)
    assert result.wires[0].utilisation == pytest.approx(12 / 14)


def test_links_of_one_name_and_different_rates_are_refused():
    hops = (Hop(Wire("w", 1.0), 1.0), Hop(Wire("w", 2.0), 1.0))
    with pytest.raises(UsageError, match="two links of one name"):
        simulate(Setup((pipeline(1.0, 1.0, 1.0, hops=hops),)), at_once(1))


# Prefill and decode apart


def test_kv_moves_from_prefill_to_decode():
    """A prompt of 100 tokens takes 1 s there, its KV 2 s on the wire, then four tokens of 0.1 s here."""
    prefill = PipelineSpec((Stage("p", TokenTimes(0.01)),), max_step_tokens=100, role="prefill")
    decode = PipelineSpec((Stage("d", ConstantTimes(0.1)),), role="decode")
    setup = Setup((prefill, decode), kv_wire=Wire("kv", 50.0), kv_bytes_per_token=1.0)
    result = simulate(setup, at_once(2, prompt=100, output=5))
    first, second = result.requests
    assert (first.ttft_s, first.e2e_s) == (pytest.approx(1.0), pytest.approx(1 + 2 + 0.4))
    assert (second.ttft_s, second.e2e_s) == (pytest.approx(2.0), pytest.approx(1 + 2 * 2 + 0.4))
    assert [r.pipeline for r in result.requests] == [1, 1]
    assert (result.wires[0].busy_s, result.wires[0].waited_s) == (pytest.approx(4.0), pytest.approx(1.0))
    assert [use.requests for use in result.pipelines] == [2, 2]


def test_prefill_pages_are_held_until_the_kv_has_left():
    """One page each: the second prompt cannot start before the first one's KV is gone, 2 s after its first token."""
    prefill = PipelineSpec((Stage("p", TokenTimes(0.1)),), pools=(Pool(1, 16),), role="prefill")
    decode = PipelineSpec((Stage("d", ConstantTimes(0.1)),), role="decode")
    setup = Setup((prefill, decode), kv_wire=Wire("kv", 5.0), kv_bytes_per_token=1.0)
    result = simulate(setup, at_once(2, prompt=10, output=2))
    assert [r.ttft_s for r in result.requests] == pytest.approx([1.0, 1 + 2 + 1])


# KV


def test_a_request_waits_for_pages():
    """Two pages; each request reserves both, so they run one after the other."""
    spec = pipeline(1.0, pools=(Pool(2, 4),))
    result = simulate(Setup((spec,)), at_once(2, prompt=4, output=4))
    assert [r.e2e_s for r in result.requests] == pytest.approx([4.0, 8.0])
    assert result.pipelines[0].most_kv_pages == 2 and result.pipelines[0].most_waiting == 1


def test_the_youngest_is_preempted_and_computed_again():
    """Pages of one token, five of them. Two prompts of one token grow together to two pages each; the third token of
    the older one takes the younger one's pages. That one then reads its 1 + 2 tokens again and goes on."""
    spec = pipeline(1.0, pools=(Pool(5, 1),), kv="grow")
    result = simulate(Setup((spec,)), at_once(2, prompt=1, output=4))
    old, young = result.requests
    assert (old.preemptions, young.preemptions, young.recomputed_tokens) == (0, 1, 2)
    assert old.e2e_s == pytest.approx(4.0)
    # Steps: both 1, 2; the older 3, 4; then the younger reads 3 tokens in one step (its third) and decodes its fourth.
    assert young.e2e_s == pytest.approx(6.0)
    assert result.summary.preemptions == 1
    assert sum(interval.prompt_tokens for interval in result.stages[0].timeline) == 1 + 1 + 3


def test_a_prefix_is_read_once():
    asks = tuple(Ask(10.0 * i, 100, 1, prefix_group="system", prefix_tokens=80) for i in range(3))
    spec = PipelineSpec((Stage("s", TokenTimes(0.01)),), pools=(Pool(20, 16),))
    result = simulate(Setup((spec,)), Traffic(asks))
    assert [r.cached_tokens for r in result.requests] == [0, 80, 80]
    assert [r.ttft_s for r in result.requests] == pytest.approx([1.0, 0.2, 0.2])
    assert result.summary.cached_tokens == 160


def test_an_idle_prefix_makes_room():
    """7 pages a request; an idle prefix keeps 5 of 8, so that the other group's pushes it out: it is read again."""
    asks = tuple(Ask(10.0 * i, 100, 1, prefix_group=g, prefix_tokens=80) for i, g in enumerate("aba"))
    spec = PipelineSpec((Stage("s", TokenTimes(0.01)),), pools=(Pool(8, 16),))
    assert [r.cached_tokens for r in simulate(Setup((spec,)), Traffic(asks)).requests] == [0, 0, 0]
    assert [r.cached_tokens for r in simulate(Setup((replace(spec, pools=(Pool(16, 16),)),)), Traffic(asks)).requests] \
        == [0, 0, 80]  # fmt: skip


def test_a_known_fraction_of_hits_is_not_computed():
    traffic = draw(1, Arrivals("at-once"), Lengths("fixed", 100), ONE, prefix_hit=0.75)
    spec = PipelineSpec((Stage("s", TokenTimes(0.01)),))
    assert simulate(Setup((spec,)), traffic).requests[0].ttft_s == pytest.approx(0.25)


# Routing, seeds, limits, results


def test_routers():
    slow, fast = (PipelineSpec((Stage(n, TokenTimes(s)),), max_sequences=1) for n, s in (("slow", 1.0), ("fast", 0.1)))
    turns = simulate(Setup((slow, fast), "round-robin"), at_once(10, output=4))
    assert [use.requests for use in turns.pipelines] == [5, 5]
    least = simulate(Setup((slow, fast), "least-loaded"), draw(40, Arrivals("closed", concurrency=4), ONE, ONE))
    assert least.pipelines[1].requests > 4 * least.pipelines[0].requests


def test_the_same_seed_gives_the_same_result_bit_for_bit():
    def run(seed: int) -> str:
        traffic = draw(80, Arrivals("gamma", 30.0, burstiness=2.0), Lengths("lognormal", 50), Lengths("lognormal", 20),
                       seed=seed)  # fmt: skip
        return to_json(simulate(Setup((pipeline(0.003, 0.002),)), traffic))

    assert run(7) == run(7) != run(8)


def test_gamma_arrivals_have_the_burstiness_asked_for():
    times = Arrivals("gamma", 10.0, burstiness=2.0).times(20_000, Random(0))
    gaps = [b - a for a, b in pairwise(times)]
    assert statistics.fmean(gaps) == pytest.approx(0.1, rel=0.05)
    assert statistics.stdev(gaps) / statistics.fmean(gaps) == pytest.approx(2.0, rel=0.05)


@pytest.mark.parametrize("kind", ["fixed", "lognormal", "uniform", "empirical"])
def test_lengths_have_the_mean_asked_for(kind):
    lengths = Lengths(kind, 200, cv=0.5, low=1, high=399 if kind == "uniform" else 10_000, values=(100, 300))
    drawn = [ask.prompt_tokens for ask in draw(20_000, Arrivals("at-once"), lengths, ONE).asks]
    assert statistics.fmean(drawn) == pytest.approx(200, rel=0.02)
    assert (min(drawn) < max(drawn)) == (kind != "fixed")


def test_goodput_counts_what_keeps_every_limit():
    """TTFT is 1, 2, 3, 4 s: two of four are within 2 s."""
    result = simulate(Setup((pipeline(1.0, max_sequences=1),)), at_once(4), Slo(ttft_s=2.0))
    assert (result.summary.good_fraction, result.summary.goodput_per_s) == (0.5, pytest.approx(0.5))
    assert result.summary.ttft_s.p50 == pytest.approx(2.5) and result.summary.tpot_s is None


def test_results_go_into_json_and_back():
    result = simulate(Setup((pipeline(1.0, 2.0),)), at_once(3, output=3))
    assert from_dict(Result, to_dict(result)) == result


def test_timelines_are_thinned_and_stay_exact():
    result = simulate(Setup((pipeline(0.5, 0.5, max_sequences=1),)), at_once(1, output=5000))
    for stage in result.stages:
        assert len(stage.timeline) <= 1000
        assert sum(i.busy_s for i in stage.timeline) == pytest.approx(stage.busy_s)
        assert sum(i.steps for i in stage.timeline) == stage.steps == 5000
        assert all(a.end_s <= b.start_s + 1e-9 for a, b in pairwise(stage.timeline))
    assert len(result.pipelines[0].queue) <= 1000


def test_what_can_never_run_is_refused_by_number():
    spec = pipeline(1.0, pools=(Pool(2, 16),))
    with pytest.raises(FitError, match="request 1 needs more KV pages"):
        simulate(Setup((spec,)), Traffic((Ask(0, 8, 8), Ask(0, 30, 3))))
    with pytest.raises(UserError, match="request 0 is longer than the model's 10 positions"):
        simulate(Setup((spec,), max_positions=10), at_once(1, 8, 8))


@pytest.mark.parametrize(
    ("setup", "what"),
    [
        (Setup(()), "needs a pipeline"),
        (Setup((pipeline(1.0), pipeline(1.0))), "two stages are called s0"),
        (Setup((pipeline(1.0, role="decode"),)), "either all do both"),
        (Setup((pipeline(1.0, role="prefill"), pipeline(1.0, role="decode", name="d"))), "need a link"),
        (Setup((pipeline(1.0, 1.0, hops=(None, None)),)), "2 stages and 2 hops"),
        (Setup((pipeline(1.0, max_sequences=0),)), "must be 1 or more"),
        (Setup((pipeline(1.0, pools=(Pool(4, 4, ring=2),)),)), "first KV class"),
    ],
)  # fmt: skip
def test_setups_that_are_no_system(setup, what):
    with pytest.raises(UsageError, match=what):
        simulate(setup, at_once(1))


def test_joules_and_dollars_by_hand():
    """Two stages, 10 s: 4 s and 6 s at work of 100 W (50 to 200), else 10 W; 3.6 dollars an hour each."""
    result = simulate(Setup((pipeline(0.4, 0.6, max_sequences=1),)), at_once(1, output=10))
    power = Rate(Estimate(100, 50, 200), Estimate(10, 10, 10), Estimate(3.6, 1.8, 3.6))
    found = costs(result, {"s0": power, "s1": power})
    assert found.energy_j == Estimate(pytest.approx(1000 + 100), pytest.approx(600), pytest.approx(2100))
    assert found.joules_per_output_token.value == pytest.approx(110)
    assert found.usd == Estimate(pytest.approx(0.02), pytest.approx(0.01), pytest.approx(0.02))
    assert found.usd_per_million_output_tokens.value == pytest.approx(2000)
    assert found.usd_per_million_tokens.value == pytest.approx(0.02 / 11 * 1e6)
    assert found.utilisation == pytest.approx(0.5)
    missing = costs(result, {"s0": power})
    assert (missing.energy_j, missing.usd) == (None, None)
    assert missing.unknown == ("power of s1", "price of s1")


def test_interpolated_points_are_hit():
    times = PointTimes([(16, 0.02), (64, 0.05)], [(1, 0.011), (8, 0.025)], kv_s=1e-6)
    assert times.step_s(Batch(((16, 16),), 0, 0, 1)) == pytest.approx(0.02 + 16e-6)
    assert times.step_s(Batch((), 8, 800, 8)) == pytest.approx(0.025 + 800e-6)
    assert times.step_s(Batch(((40, 40),), 0, 0, 0)) == pytest.approx(0.035 + 40e-6)
    # Both at once pay what a step costs at nothing once: the smaller of 10 and 9 ms.
    assert times.step_s(Batch(((16, 16),), 1, 4, 2)) == pytest.approx(0.02 + 0.011 - 0.009 + 20e-6)
