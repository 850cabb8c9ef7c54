"""What one step of a slice holds, and the protocol through which the simulator learns how long it takes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol


class Batch(NamedTuple):
    """One step's lengths, in sums: a step of 256 requests is priced without looking at each.

    Attributes:
        chunks: of every prompt in the step, its new tokens and its KV tokens after the step.
        decodes: requests that decode one token.
        decode_kv: KV tokens of all of them after the step.
        logit_rows: rows of logits: every decode, and every prompt that ends.
    """

    chunks: tuple[tuple[int, int], ...]
    decodes: int
    decode_kv: int
    logit_rows: int

    @property
    def prompt_tokens(self) -> int:
        return sum(new for new, _ in self.chunks)

    @property
    def tokens(self) -> int:
        """New tokens of the step; what crosses a boundary."""
        return self.prompt_tokens + self.decodes

    @property
    def kv_tokens(self) -> int:
        """KV tokens that the step's attention reads, in a layer that keeps all."""
        return sum(kv for _, kv in self.chunks) + self.decode_kv


class StageTimes(Protocol):
    """Time of one slice on its group; what is inside (collectives, launch, engine) is the model's own matter."""

    def step_s(self, batch: Batch) -> float:
        """Seconds that the slice is busy with a step."""


class ConstantTimes:
    """The same for every step."""

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds

    def step_s(self, batch: Batch) -> float:
        return self.seconds


class PointTimes:
    """Interpolated between measured steps: what benchmarks and users who measured their own slices have.

    seconds = prompt(new tokens) + decode(requests) - idle, each read from its own points, with idle = their common
    cost of a step (the smaller of the two at nothing), plus `kv_s` for each KV token that attention reads.

    Args:
        prompt: (tokens of a chunk, seconds) with its KV taken off, ascending.
        decode: (requests, seconds) with their KV taken off, ascending.
        kv_s: seconds per KV token read.
    """

    def __init__(self, prompt: Sequence[tuple[float, float]], decode: Sequence[tuple[float, float]], kv_s: float):
        self._prompt, self._decode, self._kv_s = tuple(prompt), tuple(decode), kv_s
        self._idle = max(0.0, min(_at(self._prompt, 0.0), _at(self._decode, 0.0)))

    def step_s(self, batch: Batch) -> float:
        new, seconds = batch.prompt_tokens, self._kv_s * batch.kv_tokens
        if new:
            seconds += _at(self._prompt, new)
        if batch.decodes:
            seconds += _at(self._decode, batch.decodes)
        return seconds - (self._idle if new and batch.decodes else 0.0)


def _at(points: Sequence[tuple[float, float]], x: float) -> float:
    """Between the points on a straight line, beyond them on the line of the nearest two."""
    if len(points) == 1:
        return points[0][1]
    right = next((i for i, (known, _) in enumerate(points) if known >= x), len(points) - 1)
    (x0, y0), (x1, y1) = points[max(right, 1) - 1 : max(right, 1) + 1]
    return y0 + (y1 - y0) * (x - x0) / (x1 - x0)
