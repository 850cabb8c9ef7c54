"""Lengths that a graph is looked at for."""

from __future__ import annotations

from collections.abc import Callable
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


def reach(there: Callable[[int], bool], most: int) -> int:
    """The longest sequence, up to `most` tokens, that something is there for. It is there for one token."""
    least = 1
    if there(most):
        return most
    while most - least > 1:
        middle = (least + most) // 2
        least, most = (middle, most) if there(middle) else (least, middle)
    return least
