"""Prices and energy per token by hand, their ranges, and the break-even with an API."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from plait.cost_models.catalogue import cluster_for, lookup
from plait.cost_models.prices import (
    ApiPrice,
    Line,
    Throughput,
    break_even,
    lines,
    rate_of,
    throughput,
    token_cost,
)
from plait.errors import UserError
from plait.spec import Cluster, Estimate, Plan, PlannedSlice, Prediction, Workload, parse_targets


def sure(value: float) -> Estimate:
    return Estimate(value, value, value)


def line(low: float, high: float, *, watts: float | None = 400.0) -> Line:
    usd = Estimate(math.sqrt(low * high), low, high)
    return Line("x", 1, 1, usd, watts and sure(watts), watts and sure(watts / 4), "given")


#: 1,000 tokens a second, three of four of them prompts; prompts take a fifth of the price.
MADE = Throughput(sure(750), sure(250), 0.2)


def test_prices_by_hand() -> None:
    """3.6 dollars an hour are 0.001 a second, for 1,000 tokens: a millionth of a dollar each when all is used."""
    full = token_cost([line(3.6, 3.6)], MADE, 1.0)
    assert full.usd_per_million_tokens == Estimate(*[pytest.approx(1.0)] * 3)
    assert full.usd_per_million_input.value == pytest.approx(0.2 * 1000 / 750)
    assert full.usd_per_million_output.value == pytest.approx(0.8 * 1000 / 250)
    assert full.tokens_per_day.value == pytest.approx(86.4e6)
    assert full.joules_per_token.value == pytest.approx(0.4)
    assert full.joules_per_output_token.value == pytest.approx(1.6)
    tenth = token_cost([line(3.6, 3.6)], MADE, 0.1)
    assert tenth.usd_per_million_tokens.value == pytest.approx(10)
    # a tenth of 400 W and nine tenths of 100 W, for 100 tokens
    assert tenth.joules_per_token.value == pytest.approx((40 + 90) / 100)


def test_prompts_and_answers_make_the_whole() -> None:
    cost = token_cost([line(2, 8)], MADE, 0.3)
    mixed = 0.75 * cost.usd_per_million_input.value + 0.25 * cost.usd_per_million_output.value
    assert mixed == pytest.approx(cost.usd_per_million_tokens.value)


def test_ranges_hold_the_ends_of_price_and_speed() -> None:
    made = Throughput(Estimate(750, 300, 900), Estimate(250, 100, 300), 0.2)
    cost = token_cost([line(3.6, 14.4)], made, 1.0)
    # the cheapest at the fastest: 0.001 / 1200; the dearest at the slowest: 0.004 / 400
    found = cost.usd_per_million_tokens
    assert (found.low, found.value, found.high) == pytest.approx((1 / 1.2, 2.0, 10.0))


def test_more_use_is_cheaper_and_a_higher_price_is_dearer() -> None:
    costs = [token_cost([line(2, 4)], MADE, use) for use in (0.01, 0.1, 0.3, 0.7, 1.0)]
    for field in ("usd_per_million_tokens", "usd_per_million_output", "joules_per_token"):
        values = [getattr(cost, field).value for cost in costs]
        assert values == sorted(values, reverse=True) and len(set(values)) == len(values)
    prices = [token_cost([line(low, high)], MADE, 0.3) for low, high in ((1, 2), (1, 4), (2, 4), (20, 40))]
    values = [cost.usd_per_million_tokens.value for cost in prices]
    assert values == sorted(values)
    for cost in (*costs, *prices):
        for found in (cost.usd_per_million_input, cost.usd_per_million_output, cost.usd_per_million_tokens):
            assert found.low <= found.value <= found.high


def test_break_even_by_hand() -> None:
    """Full, the pipeline costs 1 dollar a million; an API at 4 is dearer from a quarter of that on."""
    even = break_even([line(3.6, 3.6)], MADE, ApiPrice(4, 4))
    assert even.utilisation.value == pytest.approx(0.25)
    assert even.tokens_per_day.value == pytest.approx(86.4e6 / 4)
    assert even.capacity_tokens_per_day.value == pytest.approx(86.4e6)
    assert even.verdict == "cheaper"
    # of prompts and answers: three parts of 2, one of 10
    assert break_even([line(3.6, 3.6)], MADE, ApiPrice(2, 10)).utilisation.value == pytest.approx(1 / 4)


@pytest.mark.parametrize(
    ("low", "high", "api", "verdict"),
    [(3.6, 7.2, 3, "cheaper"), (3.6, 14.4, 3, "depends"), (3.6, 14.4, 0.9, "never"), (3.6, 3.6, 1.0, "cheaper")],
)
def test_verdicts(low: float, high: float, api: float, verdict: str) -> None:
    even = break_even([line(low, high)], MADE, ApiPrice(api, api))
    assert even.verdict == verdict
    assert even.utilisation.low <= even.utilisation.value <= even.utilisation.high


def test_at_the_break_even_both_cost_the_same() -> None:
    known = [line(1, 4), line(2, 2)]
    api = ApiPrice(3, 15)
    even = break_even(known, MADE, api)
    cost = token_cost(known, MADE, even.utilisation.value)
    assert cost.usd_per_million_tokens.value == pytest.approx(even.api_usd_per_million_tokens)
    assert cost.tokens_per_day.value == pytest.approx(even.tokens_per_day.value)


def plan(targets: str, used: int | None = None) -> Plan:
    """Each device a slice of 10 ms prompts and 1 ms steps; the first `used` of them."""
    cluster: Cluster = cluster_for(parse_targets(targets))
    chosen = cluster.devices[:used]
    slices = tuple(
        PlannedSlice((device.id,), (i, i + 1), prefill_s=sure(0.010), decode_s=sure(0.001))
        for i, device in enumerate(chosen)
    )
    predicted = Prediction(sure(0.01), sure(0.001), Estimate(100, 50, 200), 4096, 4096)
    work = Workload("w", prompt_tokens=300, output_tokens=100, concurrency=10)
    return Plan(
        "m", len(slices), "bfloat16", 16, "throughput", work, slices, cluster, prediction=predicted
    )  # fmt: skip


def test_what_is_paid_for() -> None:
    paid = {found.name: found for found in lines(plan("2xh100,mi300,v5e"))}
    h100 = lookup("h100").price_usd_per_hour
    assert h100 is not None
    assert paid["h100"].usd_per_hour.low == pytest.approx(2 * h100.low)
    assert paid["h100"].usd_per_hour.value == pytest.approx(2 * math.sqrt(h100.low * h100.high))
    assert paid["h100"].busy_w == Estimate(1050, 700, 1400, "assumed")
    assert paid["tpu-v5e"].busy_w is None
    assert paid["h100"].note.startswith("2026: P_MERC")
    # idle devices are not
    assert [found.name for found in lines(plan("2xh100,mi300", used=2))] == ["h100"]


def test_half_a_chip_is_paid_for_whole() -> None:
    (whole,) = lines(plan("v7x"))
    (half,) = lines(plan("v7x", used=1))
    assert (whole.devices, half.devices, whole.accelerators, half.accelerators) == (2, 1, 1, 1)
    assert whole.usd_per_hour == half.usd_per_hour
    price = lookup("v7x").price_usd_per_hour
    assert price is not None and whole.usd_per_hour.high == pytest.approx(price.high)
    assert rate_of(cluster_for(parse_targets("v7x")).devices[0]).usd_per_hour.high == pytest.approx(price.high / 2)
    (given,) = lines(plan("mi250x", used=1), {"mi250": (2.0, 2.0)})
    assert given.usd_per_hour.value == pytest.approx(2.0)
    assert given.busy_w is not None and given.busy_w.high == pytest.approx(560)


def test_halves_of_two_chips_are_two_chips_and_parts_of_a_host_are_one() -> None:
    (one,), (two,) = lines(plan("2xv7x", used=2)), lines(plan("2xv7x", used=3))
    assert (one.accelerators, two.accelerators) == (1, 2)
    assert two.usd_per_hour.high == pytest.approx(2 * one.usd_per_hour.high)
    (host,) = lines(plan("3xcpu"), {"cpu": (0.1, 0.1)})
    assert (host.devices, host.accelerators, host.usd_per_hour.value) == (3, 1, pytest.approx(0.1))
    own = plan("h100")
    own = replace(own, cluster=replace(own.cluster, devices=(replace(own.cluster.devices[0], name="npu"),)))
    (given,) = lines(own, {"npu": (2.0, 2.0)})
    assert (given.usd_per_hour.value, given.busy_w) == (2.0, None)


def test_prices_given_by_any_name_of_a_chip() -> None:
    for name in ("h100", "H100", "sm_90", "h100-sxm"):
        (found,) = lines(plan("h100"), {name: (1.0, 4.0)}, {name: (300.0, 300.0)})
        assert found.usd_per_hour == Estimate(2.0, 1.0, 4.0, "assumed")
        assert (found.note, found.busy_w.value, found.idle_w.value) == ("given", 300, pytest.approx(60))


@pytest.mark.parametrize("targets", ["gaudi3", "cpu", "h100-nvl"])
def test_a_device_without_a_price_is_named_with_the_flag(targets: str) -> None:
    with pytest.raises(UserError, match=targets) as caught:
        lines(plan(targets))
    assert caught.value.code == "price-unknown"
    assert f"--price {targets}=" in caught.value.hint
    (given,) = lines(plan(targets), {targets: (1.0, 1.0)})
    assert given.usd_per_hour.value == 1.0


def test_a_price_for_a_device_that_is_not_used() -> None:
    with pytest.raises(UserError, match="--price b200: the plan uses no such device") as caught:
        lines(plan("h100"), {"b200": (3.0, 3.0)})
    assert caught.value.code == "price-device" and "it uses h100" in caught.value.why
    with pytest.raises(UserError, match="--power h10: the plan uses no such device") as caught:
        lines(plan("h100"), None, {"h10": (3.0, 3.0)})
    assert "h100" in caught.value.hint


def test_the_share_of_prompts_is_that_of_the_devices_time() -> None:
    """Ten requests at once: 100 tokens are 10 of a batch's steps for each, 10 ms, as long as its prompt."""
    made = throughput(plan("2xh100"), lines(plan("2xh100")))
    assert made.input_share == pytest.approx(0.5)
    assert made.input_per_s == Estimate(300, 150, 600)
    assert made.total_per_s.value == 400 and made.output_fraction == pytest.approx(0.25)
    # a device that only waits for prompts weighs as much as it costs
    unequal = plan("h100,h200")
    first, second = unequal.slices
    unequal = replace(unequal, slices=(replace(first, prefill_s=sure(0.0)), replace(second, decode_s=sure(0.0))))
    paid = lines(unequal, {"h100": (1.0, 1.0), "h200": (3.0, 3.0)})
    assert throughput(unequal, paid).input_share == pytest.approx(0.75)


def test_a_plan_without_predictions() -> None:
    with pytest.raises(UserError) as caught:
        throughput(replace(plan("h100"), prediction=None), lines(plan("h100")))
    assert caught.value.code == "plan-unpredicted"
