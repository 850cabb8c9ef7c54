"""Sampling against its definition, written out the slow way."""

from __future__ import annotations

import math

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from plait.errors import UsageError, WorkerError
from plait.runtime import sampler
from plait.runtime.sampler import SamplingParams, candidates, sample


def by_definition(logits: list[float], params: SamplingParams) -> dict[int, float]:
    """Sort, cut, cut, renormalise: token -> probability."""
    order = sorted(range(len(logits)), key=lambda i: (-logits[i], i))
    top = max(logits)
    weight = {i: math.exp((logits[i] - top) / params.temperature) for i in order}
    order = order[: params.top_k]
    goal, kept, mass = params.top_p * math.fsum(weight[i] for i in order), [], 0.0
    for i in order:
        kept.append(i)
        mass += weight[i]
        if params.top_p < 1 and mass >= goal:
            break
    total = math.fsum(weight[i] for i in kept)
    return {i: weight[i] / total for i in kept}


@given(
    logits=st.lists(st.integers(-8, 8).map(lambda n: n / 2), min_size=1, max_size=40),
    temperature=st.sampled_from([0.5, 1.0, 2.0]),
    top_k=st.one_of(st.none(), st.integers(1, 45)),
    top_p=st.sampled_from([0.001, 0.3, 0.77, 0.95, 1.0]),
    head=st.sampled_from([1, 3, 1024]),
)
def test_the_candidates_are_those_of_the_definition(
    logits: list[float], temperature: float, top_k: int | None, top_p: float, head: int
) -> None:
    params = SamplingParams(temperature, top_k, top_p)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sampler, "_HEAD", head)
        ids, probabilities = candidates(np.array(logits, np.float32), params)
    expected = by_definition(logits, params)
    assert set(ids.tolist()) == set(expected)
    for i, p in zip(ids.tolist(), probabilities.tolist(), strict=True):
        assert p == pytest.approx(expected[i], rel=1e-12)


@pytest.mark.parametrize(
    "params",
    [SamplingParams(1.0), SamplingParams(0.7, top_k=5), SamplingParams(1.3, top_p=0.8), SamplingParams(1.0, 6, 0.9)],
)
def test_frequencies_follow_the_probabilities(params: SamplingParams) -> None:
    logits = np.array([2.0, -1.0, 0.5, 1.9, 0.5, -3.0, 1.0, 0.0], np.float32)
    draws = 20_000
    counts = np.bincount([sample(logits, params, position) for position in range(draws)], minlength=len(logits))
    expected = by_definition(logits.tolist(), params)
    assert counts.sum() == sum(counts[i] for i in expected)
    chi_square = sum((counts[i] - draws * p) ** 2 / (draws * p) for i, p in expected.items())
    degrees = len(expected) - 1
    assert chi_square < degrees + 4 * math.sqrt(2 * degrees)  # mean + 4 standard deviations


def test_seeds_are_independent_and_repeatable() -> None:
    logits = np.zeros(1000, np.float32)

    def draw(seed: int) -> list[int]:
        return [sample(logits, SamplingParams(1.0, seed=seed), position) for position in range(50)]

    assert draw(1) == draw(1)
    assert sum(a == b for a, b in zip(draw(1), draw(2), strict=True)) < 5
    assert len(set(draw(1))) > 40  # positions differ too
    assert draw(2**63 - 1) != draw(1)


def test_greedy_takes_the_lowest_of_equals_and_any_dtype() -> None:
    logits = np.array([0.0, 3.0, 3.0, -math.inf], np.float32)
    assert sample(logits, SamplingParams(), 0) == 1
    assert sample(logits.astype(ml_dtypes.bfloat16), SamplingParams(), 0) == 1
    assert sample(logits, SamplingParams(1.0, top_k=1, seed=3), 0) == 1
    assert {sample(logits.astype(ml_dtypes.bfloat16), SamplingParams(5.0, seed=s), 0) for s in range(99)} == {0, 1, 2}


def test_a_tiny_temperature_is_greedy() -> None:
    logits = np.array([0.0, 3.0, 2.999, -5.0, -math.inf], np.float32)
    assert {sample(logits, SamplingParams(1e-300, seed=s), 0) for s in range(20)} == {1}


def test_top_k_among_equals_keeps_the_lower_ids() -> None:
    ids, _ = candidates(np.array([1.0, 2.0, 1.0, 1.0]), SamplingParams(1.0, top_k=2))
    assert ids.tolist() == [1, 0]


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_logits_that_are_not_finite_are_an_error(bad: float) -> None:
    logits = np.array([0.0, bad, 1.0], np.float32)
    for params in (SamplingParams(), SamplingParams(1.0)):
        with pytest.raises(WorkerError, match="position 12 hold") as caught:
            sample(logits, params, 12)
        assert caught.value.code == "logits-not-finite"


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("temperature", -0.1),
        ("temperature", math.nan),
        ("temperature", math.inf),
        ("top_k", 0),
        ("top_p", 0.0),
        ("top_p", 1.01),
        ("top_p", math.nan),
        ("seed", -1),
        ("seed", 2**63),
        ("temperature", "hot"),
        ("top_k", 2.5),
        ("top_p", "0.9"),
        ("seed", 1.5),
    ],
)
def test_values_out_of_range_are_named(field: str, value: object) -> None:
    with pytest.raises(UsageError, match=rf"{field} is {value!r}") as caught:
        SamplingParams(**{field: value})  # type: ignore[arg-type]
    assert caught.value.why.startswith("it must be")
