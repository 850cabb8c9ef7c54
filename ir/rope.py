"""Rotary tables. Their exact meaning is float32, as checkpoints are trained: one float32 frequency per pair, and the
angle is the float32 product of position and frequency."""

from __future__ import annotations

import math
from dataclasses import dataclass, fields
from typing import Literal

import numpy as np
from numpy.typing import NDArray

RopeKind = Literal["default", "linear", "llama3", "yarn", "longrope"]

#: The parameters each kind needs beside theta; none may be missing, none may be left over.
ROPE_PARAMETERS: dict[str, tuple[str, ...]] = {
    "default": (),
    "linear": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor", "original_positions"),
    "yarn": ("factor", "beta_fast", "beta_slow", "original_positions", "truncate", "attention_factor"),
    "longrope": ("factors", "attention_factor"),
}

_FEWEST, _MOST = 1e-6, 1e6
"""Turns in the original context that a beta of yarn may be: what is beyond is damage, and overflows."""


@dataclass(frozen=True)
class Rope:
    """The full parameters of a rotary embedding.

    Attributes:
        theta: base of the frequencies; never defaulted.
        factor, low_freq_factor, high_freq_factor, beta_fast, beta_slow, original_positions: as `ROPE_PARAMETERS` says.
        truncate: of yarn: 1 rounds the range in which frequencies are blended outwards to whole pairs, 0 does not.
        factors: of longrope: what the frequency of each pair is divided by, one for each.
        attention_factor: what cos and sin are multiplied by, so that scores grow by its square.
    """

    theta: float
    kind: RopeKind = "default"
    factor: float | None = None
    low_freq_factor: float | None = None
    high_freq_factor: float | None = None
    original_positions: int | None = None
    beta_fast: float | None = None
    beta_slow: float | None = None
    truncate: int | None = None
    factors: tuple[float, ...] | None = None
    attention_factor: float | None = None

    def problem(self) -> str | None:
        """What is wrong with the parameters, or None."""
        if self.kind not in ROPE_PARAMETERS:
            return f"rope kind {self.kind!r} is not one of {', '.join(ROPE_PARAMETERS)}"
        if not 0 < self.theta < math.inf:
            return f"theta must be positive and finite, not {self.theta}"
        needed = ROPE_PARAMETERS[self.kind]
        for name in PARAMETERS:
            value = getattr(self, name)
            if name in needed and value is None:
                return f"rope kind {self.kind} needs {name}"
            if name not in needed and value is not None:
                return f"rope kind {self.kind} does not use {name}"
            numbers = value if isinstance(value, tuple) else () if value is None or name == "truncate" else (value,)
            if not all(0 < number < math.inf for number in numbers):
                return f"{name} must be positive and finite, not {value}"
        if self.truncate not in (None, 0, 1):
            return f"truncate is 0 or 1, not {self.truncate}"
        low, high = self.low_freq_factor, self.high_freq_factor
        if low is not None and high is not None and not high > low:
            return f"high_freq_factor {high} must be greater than low_freq_factor {low}"
        # Equal ones are in use (Kimi K2): the ramp is then as steep as the rounding leaves it.
        slow, fast = self.beta_slow, self.beta_fast
        if slow is not None and fast is not None and fast < slow:
            return f"beta_fast {fast} must not be less than beta_slow {slow}"
        if slow is not None and fast is not None and not (slow >= _FEWEST and fast <= _MOST):
            return f"beta_slow {slow} and beta_fast {fast} must be from {_FEWEST} to {_MOST}"
        if self.kind == "yarn" and self.theta == 1:
            return "with theta 1 all pairs turn alike"
        return None


PARAMETERS = tuple(field.name for field in fields(Rope) if field.name not in ("theta", "kind"))
"""What some kind needs beside theta."""


def frequencies(rope: Rope, rotary_dim: int) -> NDArray[np.float32]:
    """[rotary_dim / 2] radians per position.

    Sources: RoFormer (Su et al. 2021) for `default`; position interpolation (Chen et al. 2023) for `linear`; for
    `llama3` the piecewise rule of the Llama 3.1 reference: keep short wavelengths, divide long ones by `factor`, blend
    between; YaRN (Peng et al. 2023, section 3.2) for `yarn`; LongRoPE (Ding et al. 2024) for `longrope`.
    """
    problem = rope.problem()
    assert problem is None, problem
    base = 1.0 / np.power(np.float64(rope.theta), np.arange(0, rotary_dim, 2, dtype=np.float64) / rotary_dim)
    if rope.kind == "default":
        return base.astype(np.float32)
    if rope.kind == "longrope":
        assert rope.factors is not None and len(rope.factors) == len(base), "the verifier counts them"
        return np.asarray(base / np.asarray(rope.factors), np.float32)
    assert rope.factor is not None
    if rope.kind == "linear":
        return (base / rope.factor).astype(np.float32)
    kept = _llama3(rope, base) if rope.kind == "llama3" else _yarn(rope, rotary_dim)
    return np.asarray(kept * base + (1 - kept) * base / rope.factor, np.float32)


def _llama3(rope: Rope, base: NDArray[np.float64]) -> NDArray[np.float64]:
    """How much of each frequency is kept: all of the fast, none of the slow."""
    low, high, original = rope.low_freq_factor, rope.high_freq_factor, rope.original_positions
    assert low is not None and high is not None and original is not None
    turns = original * base / (2 * math.pi)
    return np.asarray(np.clip((turns - low) / (high - low), 0.0, 1.0))


def _yarn(rope: Rope, rotary_dim: int) -> NDArray[np.float64]:
    """How much of each frequency is kept: all of those that turn `beta_fast` times in the original context, none of
    those that turn less than `beta_slow` times, and a ramp over the pairs between."""
    fast, slow, original = rope.beta_fast, rope.beta_slow, rope.original_positions
    assert fast is not None and slow is not None and original is not None

    def pair(turns: float) -> float:
        return rotary_dim * math.log(original / (turns * 2 * math.pi)) / (2 * math.log(rope.theta))

    first, last = pair(fast), pair(slow)
    if rope.truncate:
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, rotary_dim - 1)
    width = last - first or 0.001  # the reference's guard
    return np.asarray(1.0 - np.clip((np.arange(rotary_dim // 2) - first) / width, 0.0, 1.0))


def angles(rope: Rope, rotary_dim: int, positions: NDArray[np.integer]) -> NDArray[np.float32]:
    """[T, rotary_dim / 2] float32 angles."""
    return np.outer(positions.astype(np.float32), frequencies(rope, rotary_dim)).astype(np.float32)


def tables(
    rope: Rope, rotary_dim: int, positions: NDArray[np.integer]
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """cos and sin, each [T, rotary_dim / 2], of the float32 angles, times the attention factor."""
    angle = angles(rope, rotary_dim, positions).astype(np.float64)
    factor = 1.0 if rope.attention_factor is None else rope.attention_factor
    return np.cos(angle) * factor, np.sin(angle) * factor
