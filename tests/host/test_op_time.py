"""Times of ops, of collectives, and of serving in closed form."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from plait.cost_models import serving
from plait.cost_models.catalogue import device_of, lookup
from plait.cost_models.collectives import all_gather_s, all_reduce_s, all_to_all_s, staged_hop_s
from plait.cost_models.op_time import KINDS, MATMUL, Speeds, Work, seconds, smooth_max, wave_factor
from plait.cost_models.profile import OpFacts
from plait.cost_models.roofline import op_time, rates, unit_s
from plait.cost_models.speeds import MOST_BANDWIDTH, device_speeds, fitted, quantities, spread
from plait.ir import Step
from plait.spec import Device
from tests.planning import llama

CHIPS = ("h100", "b200", "a100", "rtxpro6000", "l4", "mi300x", "mi250x", "tpu-v6e", "tpu-v5e")
MODEL = llama(blocks=2)


def chip(name: str) -> Device:
    return replace(device_of(lookup(name)), id=name)


def ops() -> list[OpFacts]:
    return [op for unit in {unit.facts for unit in MODEL.units} for op in unit.ops]


@pytest.mark.parametrize("name", CHIPS)
@pytest.mark.parametrize("step", [Step.prefill(700), Step.decode(9, 300), Step.decode(1, 4000)], ids=str)
def test_nothing_beats_the_nominal_peaks(name: str, step: Step) -> None:
    at = chip(name)
    peak, bandwidth = at.peak_flops_per_s["bfloat16"], at.bandwidth_bytes_per_s
    for op in ops():
        cost, time = op.cost(step), op_time(op, step, at, "bfloat16")
        floor = max(cost.flops / peak, cost.bytes / bandwidth)
        assert time.seconds >= time.low >= floor * (1 - 1e-9)
        assert time.seconds <= time.high
        assert time.efficiency <= 1 + 1e-9
        assert (time.flops, time.bytes) == (cost.flops, cost.bytes)
        assert time.bound == max(time.terms, key=lambda term: time.terms[term])


@pytest.mark.parametrize("name", CHIPS)
def test_more_tokens_and_longer_contexts_are_never_faster(name: str) -> None:
    at = rates(chip(name), "bfloat16")
    for facts in {unit.facts for unit in MODEL.units}:
        by_tokens = [unit_s(facts, (Step.prefill(n),), at) for n in (1, 2, 17, 128, 129, 1000, 4097)]
        by_batch = [unit_s(facts, (Step.decode(n, 512),), at) for n in (1, 2, 17, 128, 129, 1000)]
        by_context = [unit_s(facts, (Step.decode(4, n),), at) for n in (1, 16, 100, 10_000)]
        for times in (by_tokens, by_batch, by_context):
            assert times == sorted(times)


@pytest.mark.parametrize("name", CHIPS)
def test_a_better_device_is_never_slower(name: str) -> None:
    own = chip(name)
    wide = replace(own, bandwidth_bytes_per_s=2 * own.bandwidth_bytes_per_s)
    fast = replace(own, peak_flops_per_s={k: 2 * v for k, v in own.peak_flops_per_s.items()})
    for step in (Step.prefill(500), Step.decode(8, 600)):
        for op in ops():
            times = [op_time(op, step, at, "bfloat16").seconds for at in (own, wide, fast)]
            assert max(times[1:]) <= times[0]


def test_a_device_is_timed_by_its_own_numbers_then_by_its_neighbours() -> None:
    known = fitted().devices
    assert quantities(chip("h100")) == known["cuda/sm_90a/h100"]
    assert quantities(chip("gh200")) == known["cuda/sm_90a"]  # not measured: its architecture's
    assert quantities(chip("l4")) == known["cuda"]  # nor that: its backend's
    assert {number.source for number in known["cuda"].values()} <= {"interpolated", "assumed"}
    assert quantities(chip("gaudi3")) is None
    for numbers in (*known.values(), *fitted().engines.values()):
        for number in numbers.values():
            assert 0 < number.low <= number.value <= number.high


def test_a_backend_without_measurements_reaches_what_it_states() -> None:
    own = Device("x", "x", "null", "x", "h", 10**9, 1e9, {"bfloat16": 1e12}, {"bfloat16": 0.5}, bandwidth_achieved=0.25)
    at = device_speeds(own, "bfloat16")
    assert set(at.flops.values()) == {0.5e12} and set(at.bytes.values()) == {0.25e9} and at.launch_s == 0
    assert set(at.sources.values()) == {"assumed"}
    assert spread(own, "decode") is None


def test_shares_stay_below_what_a_chip_can_do() -> None:
    for name in CHIPS:
        own = chip(name)
        for dtype in own.peak_flops_per_s:
            at = device_speeds(own, dtype)
            assert max(at.flops.values()) <= own.achieved[dtype] * own.peak_flops_per_s[dtype] * (1 + 1e-9)
            assert max(*at.bytes.values(), at.kv_bytes) <= MOST_BANDWIDTH * own.bandwidth_bytes_per_s * (1 + 1e-9)


@pytest.mark.parametrize(
    ("tiles", "factor"), [(0, 1), (1, 1), (100, 1), (101, 200 / 101), (200, 1), (201, 300 / 201), (10_000, 1)]
)
def test_waves(tiles: int, factor: float) -> None:
    """The last wave takes as long as a full one; below one wave the inner dimension is split."""
    assert wave_factor(tiles, 100) == pytest.approx(factor)
    assert wave_factor(tiles, 0) == 1


def test_a_product_jumps_at_a_wave() -> None:
    """132 compute units: 132 tiles of 128 x 128 take one wave, one column of tiles more takes two."""

    def product(tiles: int) -> float:
        work = Work.of([(KINDS.index(MATMUL), 1, 1e9 * tiles, 0.0, 0.0, 0.0, 0.0, tiles, 1)])
        return float(seconds(work, Speeds(1e12, 0.0, 1e12, 1e12, 0.0, 0.0, 132, 64.0))[0])

    assert product(133) == pytest.approx(2 * product(132))
    assert product(264) == pytest.approx(product(133))


@given(st.floats(1e-9, 1.0), st.floats(1e-9, 1.0), st.floats(1.0, 64.0))
def test_the_norm_lies_between_maximum_and_sum(a: float, b: float, p: float) -> None:
    assert max(a, b) * (1 - 1e-9) <= float(smooth_max(a, b, p)) <= (a + b) * (1 + 1e-9)


def test_collectives_against_their_closed_forms() -> None:
    rate, latency = 1e9, 1e-6
    assert all_reduce_s(1e6, 1, rate, latency) == 0
    # Large: a ring sends 2 (n - 1) / n times the bytes; small: one round.
    assert all_reduce_s(1e9, 8, rate, latency) == pytest.approx(2 * 1.0 * 7 / 8 + 2e-6)
    assert all_reduce_s(8.0, 8, rate, latency) == pytest.approx(1e-6, rel=0.1)
    assert all_gather_s(1e9, 4, rate, latency) == pytest.approx(0.75 + 1e-6)
    assert all_to_all_s(1e9, 4, rate, latency) == all_gather_s(1e9, 4, rate, latency)
    # A ring reduce is a reduce-scatter and an all-gather.
    assert all_reduce_s(1e9, 4, rate, 0.0) == pytest.approx(2 * float(all_gather_s(1e9, 4, rate, 0.0)))


def test_a_staged_hop() -> None:
    stages = ((4e9, 1e-5), (1e9, 2e-5), (2e9, 1e-5))  # device to host, wire, host to device
    whole = staged_hop_s(1e9, stages)
    assert whole == pytest.approx(0.25 + 1.0 + 0.5 + 4e-5)
    assert staged_hop_s(1e9, stages, 1e6) == pytest.approx(1.0, rel=0.01)  # chunks overlap: the wire alone counts
    assert staged_hop_s(1e9, stages, 1e12) == whole
    assert staged_hop_s(0, stages) == pytest.approx(4e-5)


def test_serving_alone_is_the_sum_of_its_parts() -> None:
    one = serving.steady(0.01, 0.5, serving.Load(1, 1, 100), first_s=0.02)
    assert one.tpot_s == pytest.approx(0.01) and one.ttft_s == pytest.approx(0.53)
    both = serving.burst(0.01, 0.5, serving.Load(1, 1, 100), first_s=0.02)
    assert both.tpot_s == pytest.approx(0.01) and both.ttft_s == pytest.approx(0.53)


def test_serving_keeps_little_s_law() -> None:
    """C requests in flight, each of T seconds: the engine prefills C / T prompts a second, and has the rest for tokens.
    In a token's time the others' prompts take their share of it."""
    decode, prefill, out = 0.02, 0.3, 200.0
    for n in (2, 8, 32):
        served = serving.steady(decode, prefill, serving.Load(n, n, out))
        total = float(served.ttft_s + out * served.tpot_s)
        assert served.tpot_s == pytest.approx(decode / (1 - (n - 1) * prefill / total), rel=0.02)


def test_serving_waits_outside_where_kv_is_full() -> None:
    """Twice as many requests as fit: each waits as long as one takes."""
    inside = serving.steady(0.02, 0.1, serving.Load(10, 10, 100))
    outside = serving.steady(0.02, 0.1, serving.Load(20, 10, 100))
    total = float(inside.ttft_s + 100 * inside.tpot_s)
    assert outside.tpot_s == pytest.approx(inside.tpot_s)
    assert outside.ttft_s - inside.ttft_s == pytest.approx(total, rel=0.01)


@given(st.integers(1, 500), st.floats(1e-3, 0.1), st.floats(0.0, 2.0), st.integers(2, 4000))
def test_serving_is_never_faster_than_its_steps(n: int, decode: float, prefill: float, out: int) -> None:
    load = serving.Load(n, n, out)
    for served in (serving.steady(decode, prefill, load), serving.burst(decode, prefill, load)):
        assert np.isfinite([served.tpot_s, served.ttft_s]).all()
        assert served.tpot_s >= decode and served.ttft_s >= decode + prefill - 1e-12


def test_offline_throughput() -> None:
    """Prompts for free: a token of every request each step. Otherwise each request takes its prompt's time once."""
    assert serving.offline_tokens_per_s(0.1, 0.0, 50, 100) == pytest.approx(500)
    assert serving.offline_tokens_per_s(0.1, 0.2, 50, 100) == pytest.approx(50 * 100 / (10 + 10))
    assert serving.static_batch_s(0.1, 2.0, 11) == pytest.approx(3.0)
