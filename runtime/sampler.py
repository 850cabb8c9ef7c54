"""From logits to a token: greedy, temperature, top-k, top-p.

The random number of a sample is a function of the request's seed and the position of the token alone, so a request gets
the same tokens whichever batch its steps ran in, and again when it is asked a second time.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from numbers import Integral, Real
from typing import Any

import numpy as np
from numpy.typing import NDArray

from plait.errors import UsageError, WorkerError

Logits = NDArray[Any]

_HEAD = 1024
"""Top-p looks at this many of the likeliest tokens before it sorts the whole vocabulary."""


@dataclass(frozen=True)
class SamplingParams:
    """How the next token is chosen. The default is greedy.

    The filters apply in this order: temperature, top-k, top-p; what is left is renormalised and sampled.

    Attributes:
        temperature: logits are divided by it; 0 is greedy (the lowest id among equals).
        top_k: keep the k likeliest tokens (lower ids first among equals); None keeps all.
        top_p: of those, keep the shortest run of the likeliest whose probabilities sum to at least p.
        seed: 0 to 2**63 - 1. Same seed, same prompt: same tokens.

    Raises:
        UsageError: `sampling-params`, naming the field, its value and what is allowed.
    """

    temperature: float = 0.0
    top_k: int | None = None
    top_p: float = 1.0
    seed: int = 0

    @property
    def greedy(self) -> bool:
        """Whether the likeliest token is taken, whatever the seed."""
        return self.temperature == 0 or self.top_k == 1

    def __post_init__(self) -> None:
        rules = {
            "temperature": (_is(self.temperature, Real) and 0 <= self.temperature < math.inf, "a finite number >= 0"),
            "top_k": (self.top_k is None or (_is(self.top_k, Integral) and self.top_k >= 1), "a whole number >= 1"),
            "top_p": (_is(self.top_p, Real) and 0 < self.top_p <= 1, "a number above 0 and at most 1"),
            "seed": (_is(self.seed, Integral) and 0 <= self.seed < 2**63, "a whole number from 0 to 2**63 - 1"),
        }
        for name, (ok, allowed) in rules.items():
            if not ok:
                raise UsageError("sampling-params", f"{name} is {getattr(self, name)!r}", why=f"it must be {allowed}")


def _is(value: object, kind: type) -> bool:
    """Callers without types get a UsageError too, and no seed is cut to a whole number in silence."""
    return isinstance(value, kind)


def sample(logits: Logits, params: SamplingParams, position: int) -> int:
    """The token at absolute `position` of its sequence, from the logits [vocabulary] of the token before it.

    Raises:
        WorkerError: `logits-not-finite`: a slice computed a NaN or an infinity, so every further token would be noise.
    """
    best = int(np.argmax(logits))
    if not np.isfinite(logits[best]):
        raise _not_finite(position, f"{float(logits[best])}")
    if params.greedy:
        return best
    ids, probabilities = candidates(logits, params)
    generator = np.random.Generator(np.random.Philox(key=np.array([params.seed, position], np.uint64)))
    cumulative = np.cumsum(probabilities)
    chosen = np.searchsorted(cumulative, generator.random() * cumulative[-1], side="right")
    return int(ids[min(chosen, len(ids) - 1)])


def sampled(token: int, position: int) -> int:
    """The same where a slice chose already, greedily: its token (`plait.backends.base.best_tokens`).

    Raises:
        WorkerError: `logits-not-finite`.
    """
    if token < 0:
        raise _not_finite(position, "a NaN or an infinity")
    return token


def _not_finite(position: int, found: str) -> WorkerError:
    return WorkerError(
        "logits-not-finite",
        f"the logits for position {position} hold {found}",
        hint="compute in a wider dtype, or check the checkpoint",
    )


def candidates(logits: Logits, params: SamplingParams) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
    """The token ids that the filters leave and their probabilities (sum 1). Needs a temperature above 0.

    Likeliest first where a filter is on, by id where none is.
    """
    scores = logits.astype(np.float64)
    with np.errstate(over="ignore"):  # a tiny temperature makes all but the best -inf, which is what it means
        weights = np.exp((scores - scores.max()) / params.temperature)
    ids = np.arange(len(weights))
    if params.top_k is not None:
        ids = _likeliest(weights, params.top_k)
    if params.top_p < 1:
        ids = _nucleus(weights, ids, params)
    kept = weights[ids]
    return ids, kept / kept.sum()


def _likeliest(weights: NDArray[np.float64], count: int) -> NDArray[np.int64]:
    """Ids of the `count` largest weights, largest first, lower ids first among equals."""
    if count >= len(weights):
        return np.argsort(-weights, kind="stable")
    threshold = np.partition(weights, -count)[-count]
    ids = np.flatnonzero(weights >= threshold)
    return ids[np.argsort(-weights[ids], kind="stable")][:count]


def _nucleus(weights: NDArray[np.float64], ids: NDArray[np.int64], params: SamplingParams) -> NDArray[np.int64]:
    """The shortest run of the likeliest among `ids` that holds `top_p` of their weight."""
    goal = params.top_p * weights[ids].sum()
    if params.top_k is None:
        head = _likeliest(weights, _HEAD)
        ids = head if weights[head].sum() >= goal else _likeliest(weights, len(weights))
    enough = int(np.searchsorted(np.cumsum(weights[ids]), goal, side="left"))
    return ids[: enough + 1]
