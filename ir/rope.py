"""Rotary tables. Their exact meaning is float32, as checkpoints are trained: one float32 frequency per pair, and the
angle is the float32 product of position and frequency."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

RopeKind = Literal["default", "linear", "llama3"]

#: The parameters each kind needs beside theta; none may be missing, none may be left over.
ROPE_PARAMETERS: dict[str, tuple[str, ...]] = {
    "default": (),
    "linear": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor", "original_positions"),
}


@dataclass(frozen=True)
class Rope:
    """The full parameters of a rotary embedding.

    Attributes:
        theta: base of the frequencies; never defaulted.
        factor, low_freq_factor, high_freq_factor, original_positions: as `ROPE_PARAMETERS` says for the kind.
    """

    theta: float
    kind: RopeKind = "default"
    factor: float | None = None
    low_freq_factor: float | None = None
    high_freq_factor: float | None = None
    original_positions: int | None = None

    def problem(self) -> str | None:
        """What is wrong with the parameters, or None."""
        if self.kind not in ROPE_PARAMETERS:
            return f"rope kind {self.kind!r} is not one of {', '.join(ROPE_PARAMETERS)}"
        if not 0 < self.theta < math.inf:
            return f"theta must be positive and finite, not {self.theta}"
        needed = ROPE_PARAMETERS[self.kind]
        for name in ROPE_PARAMETERS["llama3"]:
            value = getattr(self, name)
            if name in needed and value is None:
                return f"rope kind {self.kind} needs {name}"
            if name not in needed and value is not None:
                return f"rope kind {self.kind} does not use {name}"
            if value is not None and not 0 < value < math.inf:
                return f"{name} must be positive and finite, not {value}"
        low, high = self.low_freq_factor, self.high_freq_factor
        if low is not None and high is not None and not high > low:
            return f"high_freq_factor {high} must be greater than low_freq_factor {low}"
        return None


def frequencies(rope: Rope, head_dim: int) -> NDArray[np.float32]:
    """[head_dim / 2] radians per position.

    Sources: RoFormer (Su et al. 2021) for `default`; position interpolation (Chen et al. 2023) for `linear`; for
    `llama3` the piecewise rule of the Llama 3.1 reference: keep short wavelengths, divide long ones by `factor`, blend
    between.
    """
    problem = rope.problem()
    assert problem is None, problem
    base = 1.0 / np.power(np.float64(rope.theta), np.arange(0, head_dim, 2, dtype=np.float64) / head_dim)
    if rope.kind == "default":
        return base.astype(np.float32)
    assert rope.factor is not None
    if rope.kind == "linear":
        return (base / rope.factor).astype(np.float32)
    assert rope.low_freq_factor is not None
    assert rope.high_freq_factor is not None
    assert rope.original_positions is not None
    wavelength = 2 * math.pi / base
    blend = (rope.original_positions / wavelength - rope.low_freq_factor) / (
        rope.high_freq_factor - rope.low_freq_factor
    )
    blend = np.clip(blend, 0.0, 1.0)
    return (blend * base + (1 - blend) * base / rope.factor).astype(np.float32)


def angles(rope: Rope, head_dim: int, positions: NDArray[np.integer]) -> NDArray[np.float32]:
    """[T, head_dim / 2] float32 angles."""
    return np.outer(positions.astype(np.float32), frequencies(rope, head_dim)).astype(np.float32)
