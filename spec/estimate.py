"""Predicted numbers that know where they come from."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Source = Literal["measured", "interpolated", "roofline", "assumed"]


@dataclass(frozen=True)
class Estimate:
    """A number with its range and source. The unit stands in the name of the field that holds it."""

    value: float
    low: float
    high: float
    source: Source = "roofline"


@dataclass(frozen=True)
class Cause:
    """Why a decision came out as it did: the dominating number, its source, and the runner-up."""

    why: str
    number: str = ""
    source: str = ""
    runner_up: str = ""


@dataclass(frozen=True)
class MemoryEstimate:
    """Bytes of one slice on its device. `capacity` is what the device has free; the rest must sum to no more."""

    weights_bytes: int
    kv_bytes: int
    activations_bytes: int
    logits_bytes: int
    reserve_bytes: int
    capacity_bytes: int

    @property
    def needed_bytes(self) -> int:
        return self.weights_bytes + self.kv_bytes + self.activations_bytes + self.logits_bytes + self.reserve_bytes

    @property
    def free_bytes(self) -> int:
        """What is left; negative means short by that much."""
        return self.capacity_bytes - self.needed_bytes
