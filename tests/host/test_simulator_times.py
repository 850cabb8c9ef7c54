"""Stage times of the simulator against the cost model's own, and plans as simulations."""

from __future__ import annotations

import random
from typing import Any

import pytest

from plait.cost_models.network import hop_s, link_between
from plait.cost_models.roofline import rates, unit_s
from plait.cost_models.simulator import Arrivals, Batch, Lengths, draw, simulate
from plait.cost_models.simulator.batch import rounded
from plait.cost_models.simulator.op_times import OpTimes, UnitPrices, slice_times
from plait.cost_models.simulator.planned import Limits, at_end, device_of, setup_of
from plait.ir.facts import Step
from plait.partitioner import Problem, solve
from plait.spec import Workload
from tests.planning import cluster, device, llama

#: Wide enough that linears, attention and logits all matter.
SHAPE: dict[str, Any] = {
    "hidden": 512, "heads": 8, "kv_heads": 2, "head_dim": 64, "ffn": 1536, "vocabulary": 2048, "dtype": "bfloat16",
}  # fmt: skip


def batch_of(chunks: list[tuple[int, int]], lens: list[int]) -> Batch:
    return Batch(tuple(chunks), len(lens), sum(lens), len(lens) + 1)


def test_a_step_without_logits_costs_what_the_model_says_of_it():
    """A chunk in the middle of a prompt: ops that make rows are asked all the same."""
    model = llama(**SHAPE)
    asked = []

    def price(facts, step):
        asked.extend((op.name, step.logit_rows) for op in facts.ops)
        return 1.0

    times = OpTimes([model.head.facts], UnitPrices(price, lambda step: 10.0 * len(step.query_lens)))
    assert times.step_s(Batch(((8, 8),), 0, 0, 0)) == 12.0  # the norm, the logits, one sequence
    assert ("plait.logits", 0) in asked
    assert times.step_s(Batch(((8, 8),), 2, 8, 3)) == 32.0


def exact_s(model, dev, start: int, end: int, chunks: list[tuple[int, int]], lens: list[int]) -> float:
    """The cost model on every request's own length."""
    step = Step((*(new for new, _ in chunks), *(1 for _ in lens)), (*(kv for _, kv in chunks), *lens), len(lens) + 1)
    units = model.units[0 if start == 0 else start + 1 : end + 1 + (end == len(model.blocks))]
    return dev.step_overhead_s + sum(unit_s(unit.facts, (step,), rates(dev, model.dtype)) for unit in units)


@pytest.mark.parametrize("windows", [False, True])
def test_within_one_percent_of_the_cost_model_at_every_request_s_own_length(windows):
    """Steps of every mix on a slow device (arithmetic-bound) and a thin one (memory-bound)."""
    model = llama(**SHAPE, blocks=4, windows=(256, None) if windows else (None,))
    rng = random.Random(1)
    worst = 0.0
    for peak, bandwidth in ((1e12, 1e12), (1e14, 2e10), (3e12, 1e11)):
        dev = device("d", 1 << 40, peak=peak, bandwidth=bandwidth, overhead_s=1e-6)
        for start, end in ((0, 4), (0, 2), (2, 4), (1, 3)):
            times = slice_times(model, dev, start, end)
            for _ in range(25):
                # Windows cut the mean, not each: their lengths all lie beyond or all within.
                low, high = (300, 4000) if windows else (1, 4000)
                lens = [rng.randint(low, high) for _ in range(rng.choice([0, 1, 7, 64, 65, 200]))]
                chunks = [
                    (new, new + rng.choice([0, 512, 3000]))
                    for new in rng.sample(range(1, 512), rng.choice([0, 1, 1, 3]) if lens else 1)
                ]
                wanted = exact_s(model, dev, start, end, chunks, lens)
                got = times.step_s(batch_of(chunks, lens))
                assert got == times.step_s(batch_of(chunks, lens))
                worst = max(worst, abs(got / wanted - 1))
    assert 0 < worst < 0.01, worst


def test_a_price_is_asked_once():
    """The second of two equal steps, and the tokens of a step seen with other lengths, cost no call."""
    model, calls = llama(**SHAPE), []
    dev = device("d", 1 << 40)

    def price(facts, step):
        calls.append(step)
        return unit_s(facts, (step,), rates(dev, model.dtype))

    times = OpTimes([unit.facts for unit in model.units], UnitPrices(price))
    times.step_s(Batch((), 8, 800, 8))
    asked = len(calls)
    times.step_s(Batch((), 8, 801, 8))
    assert len(calls) == asked
    times.step_s(Batch((), 8, 1600, 8))
    assert asked < len(calls) < 2 * asked


@pytest.mark.parametrize("bits", [7, 8])
def test_rounded_numbers_are_near(bits):
    for number in range(5000):
        assert abs(rounded(number, bits) - number) <= number * 2.0**-bits
        assert number >= 1 << bits or rounded(number, bits) == number


def planned(concurrency: int = 8):
    model = llama(**SHAPE, blocks=6, max_positions=4096)
    devices = [
        device("fast", 1 << 34, host="x", peak=4e12, bandwidth=4e10),
        device("slow", 1 << 34, host="y", peak=2e12, bandwidth=1e10),
    ]
    net = cluster(*devices, rate=1e8, latency_s=1e-4)
    work = Workload("w", 128, 64, concurrency)
    return model, solve(Problem(model, net, work, layers=(4, 2)))


def test_a_plan_alone_on_its_devices_takes_what_the_planner_predicts():
    """One request at a time: TTFT is the planner's; a token costs what its decode step of one costs."""
    model, plan = planned(concurrency=1)
    setup = setup_of(plan, model, Limits(1, 512, 4096))
    traffic = draw(1, Arrivals("at-once"), Lengths("fixed", 128), Lengths("fixed", 64))
    found = simulate(setup, traffic).summary
    assert plan.prediction is not None and found.tpot_s is not None
    assert found.ttft_s.mean == pytest.approx(plan.prediction.ttft_s.value, rel=1e-6)
    assert found.tpot_s.mean == pytest.approx(plan.prediction.tpot_s.value, rel=0.01)


def test_the_ends_of_the_range_are_those_of_the_plan_s_steps():
    """A backend without measurements: half to twice."""
    model, plan = planned(concurrency=1)
    setup = setup_of(plan, model, Limits(1, 512, 4096))
    batch = Batch((), 1, 100, 1)
    for end, factor in (("low", 0.5), ("high", 2.0)):
        for before, after in zip(setup.pipelines[0].stages, at_end(setup, plan, end).pipelines[0].stages, strict=True):
            assert after.times.step_s(batch) == pytest.approx(factor * before.times.step_s(batch))
            assert device_of(after) in {device.id for device in plan.cluster.devices}


def test_hops_are_the_cluster_s():
    model, plan = planned()
    (pipeline,) = setup_of(plan, model, Limits(8, 512, 4096)).pipelines
    a, b = plan.cluster.devices
    link = link_between(plan.cluster, a, b)
    (hop,) = pipeline.hops
    assert hop is not None
    assert hop.bytes_per_token / hop.wire.bytes_per_s + hop.wire.latency_s == pytest.approx(
        hop_s(link, model.boundary_bytes_per_token[3])
    )
    assert hop.wire.name == "x > y"


def test_replicas_share_nothing():
    model, plan = planned()
    setup = setup_of(plan, model, Limits(8, 512, 4096), replicas=2)
    traffic = draw(64, Arrivals("closed", concurrency=16), Lengths("fixed", 128), Lengths("fixed", 64))
    one = draw(32, Arrivals("closed", concurrency=8), Lengths("fixed", 128), Lengths("fixed", 64))
    both = simulate(setup, traffic).summary
    alone = simulate(setup_of(plan, model, Limits(8, 512, 4096)), one).summary
    assert both.output_tokens_per_s == pytest.approx(2 * alone.output_tokens_per_s, rel=0.05)
    assert [len(p.stages) for p in setup.pipelines] == [2, 2]
