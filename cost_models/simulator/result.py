"""What a simulation yields, as frozen records that go into JSON (`plait.spec.to_json`)."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from plait.cost_models.simulator.timeline import Interval, QueuePoint


@dataclass(frozen=True)
class Slo:
    """Limits that a request must keep to count as good; None does not limit."""

    ttft_s: float | None = None
    tpot_s: float | None = None
    e2e_s: float | None = None

    def kept(self, request: RequestResult) -> bool:
        pairs = ((self.ttft_s, request.ttft_s), (self.tpot_s, request.tpot_s), (self.e2e_s, request.e2e_s))
        return all(limit is None or value is None or value <= limit for limit, value in pairs)


@dataclass(frozen=True)
class RequestResult:
    """One request that ended.

    Attributes:
        cached_tokens: prompt tokens found in a prefix cache.
        recomputed_tokens: KV tokens that pre-emptions threw away.
        pipeline: that ended it.
    """

    id: int
    arrival_s: float
    admitted_s: float
    first_token_s: float
    end_s: float
    prompt_tokens: int
    output_tokens: int
    cached_tokens: int
    preemptions: int
    recomputed_tokens: int
    pipeline: int

    @property
    def ttft_s(self) -> float:
        return self.first_token_s - self.arrival_s

    @property
    def e2e_s(self) -> float:
        return self.end_s - self.arrival_s

    @property
    def tpot_s(self) -> float | None:
        """Mean time of a token after the first; None where there is one only."""
        more = self.output_tokens - 1
        return (self.end_s - self.first_token_s) / more if more else None


@dataclass(frozen=True)
class Spread:
    """Of a time over requests, in seconds; linear between order statistics."""

    mean: float
    p50: float
    p90: float
    p99: float
    most: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Spread | None:
        if not values:
            return None
        p50, p90, p99 = (float(x) for x in np.percentile(np.asarray(values), (50, 90, 99)))
        return cls(float(np.mean(values)), p50, p90, p99, max(values))


@dataclass(frozen=True)
class StageUse:
    """What a stage did: `utilisation` is its busy share of the whole time."""

    name: str
    pipeline: int
    busy_s: float
    utilisation: float
    steps: int
    timeline: tuple[Interval, ...]


@dataclass(frozen=True)
class WireUse:
    """What a link did. `waited_s` is what messages waited for those before them, together."""

    name: str
    busy_s: float
    utilisation: float
    messages: int
    nbytes: float
    waited_s: float


@dataclass(frozen=True)
class PipelineUse:
    """A pipeline's scheduler. Pages are those of the KV class that keeps every token."""

    requests: int
    steps: int
    preemptions: int
    kv_pages: int
    most_kv_pages: int
    most_waiting: int
    queue: tuple[QueuePoint, ...]


@dataclass(frozen=True)
class Summary:
    """The whole run. Rates are over `makespan_s`, from the first arrival to the last end.

    Attributes:
        goodput_per_s, good_fraction: of requests within the limits; all of them where there is none.
        mean_in_system: requests that wait or run, averaged over time: Little's L, counted at arrivals and ends.
        stage_steps: steps of all stages together.
    """

    requests: int
    makespan_s: float
    ttft_s: Spread
    tpot_s: Spread | None
    e2e_s: Spread
    requests_per_s: float
    output_tokens_per_s: float
    total_tokens_per_s: float
    goodput_per_s: float
    good_fraction: float
    mean_in_system: float
    preemptions: int
    cached_tokens: int
    stage_steps: int


@dataclass(frozen=True)
class Result:
    """`requests` are in the order in which they were asked."""

    summary: Summary
    slo: Slo
    stages: tuple[StageUse, ...]
    wires: tuple[WireUse, ...]
    pipelines: tuple[PipelineUse, ...]
    requests: tuple[RequestResult, ...]


def summary(
    requests: Sequence[RequestResult], slo: Slo, *, mean_in_system: float, stage_steps: int, preemptions: int
) -> Summary:
    """Of requests that all ended."""
    makespan = max(r.end_s for r in requests) - min(r.arrival_s for r in requests)
    good = sum(map(slo.kept, requests))
    ttft, e2e = (_spread(getattr(r, name) for r in requests) for name in ("ttft_s", "e2e_s"))
    output, prompt = (sum(getattr(r, name) for r in requests) for name in ("output_tokens", "prompt_tokens"))

    def rate(count: float) -> float:
        return count / makespan if makespan else 0.0

    return Summary(
        requests=len(requests),
        makespan_s=makespan,
        ttft_s=ttft,
        tpot_s=Spread.of([tpot for r in requests if (tpot := r.tpot_s) is not None]),
        e2e_s=e2e,
        requests_per_s=rate(len(requests)),
        output_tokens_per_s=rate(output),
        total_tokens_per_s=rate(output + prompt),
        goodput_per_s=rate(good),
        good_fraction=good / len(requests),
        mean_in_system=mean_in_system,
        preemptions=preemptions,
        cached_tokens=sum(r.cached_tokens for r in requests),
        stage_steps=stage_steps,
    )


def _spread(values: Iterable[float]) -> Spread:
    found = Spread.of(list(values))
    assert found is not None
    return found
