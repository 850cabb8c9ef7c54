"""Sums and maxima over all slices of a model at once: (blocks + 1, blocks + 1) tables indexed by [start, end)."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]


def slice_sums(per_unit: Sequence[float] | Floats) -> Floats:
    """Sum of the units of every slice. `per_unit` is the embedding, the blocks, the head; 0 where start >= end.

    Slice [start, end) holds units start + 1 .. end, the embedding too where start is 0, the head where end is the last.
    """
    prefix = np.concatenate([[0.0], np.cumsum(np.asarray(per_unit, dtype=np.float64))])
    first, last = unit_bounds(len(prefix) - 3)
    return np.triu(prefix[last][None, :] - prefix[first][:, None], k=1)


def slice_maxima(per_unit: Sequence[float] | Floats) -> Floats:
    """The largest unit of every slice; 0 where start >= end."""
    values = np.asarray(per_unit, dtype=np.float64)
    blocks = len(values) - 2
    out = np.zeros((blocks + 1, blocks + 1))
    for start in range(blocks):
        out[start, start + 1 :] = np.maximum.accumulate(values[start + 1 : -1])
    out[0, 1:] = np.maximum(out[0, 1:], values[0])
    out[:-1, -1] = np.maximum(out[:-1, -1], values[-1])
    return out


def unit_bounds(blocks: int) -> tuple[Ints, Ints]:
    """For starts and for ends 0 .. blocks: the first unit of a slice, and one past its last."""
    first = np.arange(blocks + 1) + 1
    first[0] = 0
    last = np.arange(blocks + 1) + 1
    last[-1] = blocks + 2
    return first, last
