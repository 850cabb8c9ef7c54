"""Lengths that a graph is looked at for."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True)
class Sample:
    """One sequence with `past` tokens in its KV cache, and `new` ones."""

    past: int
    new: int

    @property
    def total(self) -> int:
        return self.past + self.new

    @property
    def positions(self) -> NDArray[np.int64]:
        return np.arange(self.past, self.total)
