"""What one step of a slice holds, and the protocol through which the simulator learns how long it takes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol, TypeAlias

#: Chunks, decodes, and the KV tokens of each decode.
Lengths: TypeAlias = tuple[tuple[tuple[int, int], ...], int, int]

_KV_BITS, _TOKEN_BITS = 8, 7


class Batch:
    """One step's lengths, in sums: a step of 256 requests is priced without looking at each. Not to be changed.

    Attributes:
        chunks: of every prompt in the step, its new tokens and its KV tokens after the step.
        decodes: requests that decode one token.
        decode_kv: KV tokens of all of them after the step.
        logit_rows: rows of logits: every decode, and every prompt that ends.
        prompt_tokens, tokens: new ones, of prompts and of all; `tokens` rows cross a boundary.
    """

    __slots__ = ("_lengths", "chunks", "decode_kv", "decodes", "logit_rows", "prompt_tokens", "tokens")

    def __init__(self, chunks: tuple[tuple[int, int], ...], decodes: int, decode_kv: int, logit_rows: int) -> None:
        self.chunks, self.decodes, self.decode_kv, self.logit_rows = chunks, decodes, decode_kv, logit_rows
        self.prompt_tokens = sum([new for new, _ in chunks]) if chunks else 0
        self.tokens = self.prompt_tokens + decodes
        self._lengths: Lengths | None = None

    @property
    def kv_tokens(self) -> int:
        """KV tokens that the step's attention reads, in a layer that keeps all."""
        return sum(kv for _, kv in self.chunks) + self.decode_kv

    @property
    def lengths(self) -> Lengths:
        """What attention is priced for: chunks, decodes and their mean KV, rounded to 7 and 8 binary digits. Made once
        for all stages."""
        if self._lengths is None:
            mean = rounded(self.decode_kv // self.decodes, _KV_BITS) if self.decodes else 0
            chunks = self.chunks
            if chunks:
                chunks = tuple([(rounded(new, _TOKEN_BITS), rounded(kv, _KV_BITS)) for new, kv in chunks])
            self._lengths = (chunks, rounded(self.decodes, _TOKEN_BITS), mean)
        return self._lengths


def rounded(number: int, bits: int) -> int:
    """To the nearest whole number with so many significant binary digits."""
    shift = number.bit_length() - bits
    return number if shift <= 0 else (number + (1 << shift >> 1)) >> shift << shift


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


class ScaledTimes:
    """Other times by a factor: the ends of their range."""

    def __init__(self, times: StageTimes, factor: float) -> None:
        self._times, self._factor = times, factor

    def step_s(self, batch: Batch) -> float:
        return self._factor * self._times.step_s(batch)


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
