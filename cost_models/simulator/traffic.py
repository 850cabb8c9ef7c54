"""What is asked: requests, and where they come from: an arrival process and distributions of lengths.

Everything random comes from two streams of one seed, so that changing the lengths leaves the arrivals as they are.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from random import Random
from typing import Literal

from plait.errors import UsageError

#: Requests that one simulation takes: more does not fit the memory of a small machine.
MOST_REQUESTS = 10_000_000


@dataclass(frozen=True)
class Ask:
    """One request. It generates `output_tokens` tokens, one or more.

    Attributes:
        arrival_s: after the start; of no meaning in a closed loop.
        cached_tokens: of the prompt, that are known to be in a prefix cache: not computed, but held.
        prefix_group: requests of one group begin with the same `prefix_tokens` tokens; pages are shared by those that
            come after the first has read them.
    """

    arrival_s: float
    prompt_tokens: int
    output_tokens: int
    cached_tokens: int = 0
    prefix_group: str | None = None
    prefix_tokens: int = 0


@dataclass(frozen=True)
class Traffic:
    """Requests in the order of their arrival. `concurrency`: a closed loop, in which the next request comes when one
    ends; None: they come when they come."""

    asks: tuple[Ask, ...]
    concurrency: int | None = None


@dataclass(frozen=True)
class Lengths:
    """A distribution of token counts, one or more.

    | kind | meaning |
    | --- | --- |
    | fixed | always `mean` |
    | uniform | whole numbers, `low` to `high` (from `mean` by default: half to one and a half) |
    | lognormal | with this mean and this coefficient of variation `cv` |
    | empirical | one of `values`, each equally likely |

    What lies outside `low` .. `high` is cut off there.
    """

    kind: Literal["fixed", "uniform", "lognormal", "empirical"] = "fixed"
    mean: float = 1.0
    cv: float = 1.0
    low: int = 1
    high: int = 1_000_000
    values: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        rules = {
            "mean": self.kind == "empirical" or 1 <= self.mean <= 1e9,
            "cv": 0 <= self.cv <= 100,
            "low": 1 <= self.low <= self.high,
            "values": self.kind != "empirical" or (bool(self.values) and min(self.values) >= 1),
        }
        for name, ok in rules.items():
            if not ok:
                raise UsageError("lengths", f"{name} of a length distribution is {getattr(self, name)!r:.100}")

    def draw(self, random: Random) -> int:
        if self.kind == "fixed":
            value = self.mean
        elif self.kind == "uniform":
            value = random.randint(self.low, self.high)
        elif self.kind == "lognormal":
            variance = math.log1p(self.cv**2)
            value = random.lognormvariate(math.log(self.mean) - variance / 2, math.sqrt(variance))
        else:
            value = random.choice(self.values)
        return min(max(round(value), self.low), self.high)


@dataclass(frozen=True)
class Arrivals:
    """When requests come.

    | kind | meaning |
    | --- | --- |
    | poisson | independent of each other, `rate_per_s` on average |
    | gamma | gaps of coefficient of variation `burstiness`: 1 is poisson, above it come bursts |
    | constant | one every 1 / `rate_per_s` seconds |
    | closed | `concurrency` at once, and the next when one ends |
    | at-once | all at the start |
    """

    kind: Literal["poisson", "gamma", "constant", "closed", "at-once"] = "poisson"
    rate_per_s: float = 1.0
    burstiness: float = 1.0
    concurrency: int = 1

    def __post_init__(self) -> None:
        rules = {
            "rate_per_s": 0 < self.rate_per_s < math.inf,
            "burstiness": 0 < self.burstiness <= 100,
            "concurrency": self.concurrency >= 1,
        }
        for name, ok in rules.items():
            if not ok:
                raise UsageError("arrivals", f"{name} is {getattr(self, name)!r}", why="it must be above 0")

    def times(self, count: int, random: Random) -> list[float]:
        """[count] seconds after the start, ascending; the first request comes at 0."""
        out, now = list[float](), 0.0
        for _ in range(count):
            out.append(now)
            now += self._gap(random)
        return out

    def _gap(self, random: Random) -> float:
        if self.kind in ("closed", "at-once"):
            return 0.0
        if self.kind == "constant":
            return 1 / self.rate_per_s
        if self.kind == "poisson":
            return random.expovariate(self.rate_per_s)
        shape = 1 / self.burstiness**2
        return random.gammavariate(shape, 1 / (self.rate_per_s * shape))


def draw(
    count: int, arrivals: Arrivals, prompts: Lengths, outputs: Lengths, *, seed: int = 0, prefix_hit: float = 0.0
) -> Traffic:
    """`count` requests. The same seed gives the same requests.

    Args:
        prefix_hit: fraction of every prompt that a prefix cache holds.

    Raises:
        UsageError: a number that is out of range.
    """
    if not 1 <= count <= MOST_REQUESTS:
        raise UsageError("requests", f"cannot simulate {count} requests", why=f"it must be 1 to {MOST_REQUESTS:,}")
    if not 0 <= prefix_hit < 1:
        raise UsageError("prefix-hit", f"the prefix hits are {prefix_hit}", why="it is a fraction, 0 to below 1")
    times = arrivals.times(count, Random(f"{seed} arrivals"))
    lengths = Random(f"{seed} lengths")
    asks = []
    for time in times:
        prompt, output = prompts.draw(lengths), outputs.draw(lengths)
        asks.append(Ask(time, prompt, output, cached_tokens=int(prefix_hit * prompt)))
    return Traffic(tuple(asks), arrivals.concurrency if arrivals.kind == "closed" else None)


def replayed(asks: Sequence[Ask], *, speed: float = 1.0) -> Traffic:
    """A trace, `speed` times as fast as it was recorded."""
    if not 0 < speed < math.inf:
        raise UsageError("trace-speed", f"the speed of a trace is {speed}", why="it must be above 0")
    start = min((ask.arrival_s for ask in asks), default=0.0)
    moved = (
        Ask((ask.arrival_s - start) / speed, ask.prompt_tokens, ask.output_tokens, ask.cached_tokens,
            ask.prefix_group, ask.prefix_tokens)
        for ask in asks
    )  # fmt: skip
    return Traffic(tuple(sorted(moved, key=lambda ask: ask.arrival_s)))
