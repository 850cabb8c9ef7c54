"""Rope tables of a graph, read back into the parameters that make them.

A graph holds cos and sin of position x frequency. What is found is held against the whole table before it is used.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from plait.frontend.graph.refusal import refuse
from plait.ir import Rope
from plait.ir.rope import frequencies, tables

Array = NDArray[Any]

_CHUNK = 1 << 12
_STEP = {"float32": 2.0**-24, "float16": 2.0**-11, "bfloat16": 2.0**-8}
"""Half a step of numbers near 1."""


def recover(cos: Array, sin: Array, positions: NDArray[np.int64], dtype: str, what: str) -> Rope:
    """The rope whose tables these are.

    Frequencies that are powers of a theta are `default`, or `linear` where they are all divided by one factor. Others
    (the blends of llama3 and yarn) are carried as they are, by what each pair is divided by: `longrope`.

    Args:
        cos, sin: [positions, pairs], rows in the order of `positions`, which ascend from 0, 1.
        dtype: what the tables are stored in; they are rounded to it.
        what: the name of the table, for errors.

    Raises:
        UnsupportedError: `graph-rope`: no rope makes this table; names a position.
    """
    if cos.shape != sin.shape or cos.shape[0] != len(positions) or not np.array_equal(positions[:2], [0, 1]):
        refuse("rope", f"{what}: tables of {list(cos.shape)} and {list(sin.shape)} are not cos and sin of positions")
    factor = float(cos[0].astype(np.float64).mean())  # each is exactly 1 where there is none
    if not (np.isfinite(factor) and factor > 0):
        refuse("rope", f"{what}: the first cosines are {cos[0][:3]}, and not one positive number")
    found = _frequencies(cos, sin, positions)
    some = np.unique(np.geomspace(1, len(positions), 512).astype(np.intp)) - 1

    def differs(rope: Rope, rows: NDArray[np.intp]) -> int | None:
        return _differs(rope, cos[rows], sin[rows], positions[rows], dtype)

    rope = _named(found, lambda rope: factor == 1.0 and differs(rope, some) is None) or _any(found, factor)
    if (problem := rope.problem()) is not None:
        refuse("rope", f"{what}: the table is not that of a rope", problem)
    for first in range(0, len(positions), _CHUNK):
        at = differs(rope, np.arange(first, min(first + _CHUNK, len(positions))))
        if at is not None:
            refuse(
                "rope",
                f"{what}: the table is not that of a rope",
                f"its rows at positions 1, 2, 4 ... give frequencies, and the row of position {at} says something else",
            )
    return rope


def _frequencies(cos: Array, sin: Array, positions: NDArray[np.int64]) -> NDArray[np.float64]:
    """Radians per position: rough from position 1, finer from 2, 4, 8 and so on, as far as they are in the table."""
    found = np.zeros(cos.shape[1])
    for power in range(int(positions[-1]).bit_length()):
        row = int(np.searchsorted(positions, 1 << power))
        if positions[row] != 1 << power:
            break
        angle = np.arctan2(sin[row].astype(np.float64), cos[row].astype(np.float64))
        ahead = angle - found * (1 << power)
        found = found + (ahead - 2 * math.pi * np.round(ahead / (2 * math.pi))) / (1 << power)
    return found


def _named(found: NDArray[np.float64], fits: Callable[[Rope], bool]) -> Rope | None:
    """`default` or `linear` with the theta and the factor of the fewest digits that fit."""
    if len(found) < 2 or not (found > 0).all():
        return None
    # log f = -log factor - i / pairs log theta. Frequencies are equally exact, so the logarithms of small ones are not.
    slope, start = np.polyfit(np.arange(len(found)) / len(found), np.log(found), 1, w=found)
    thetas, factors = _short(math.exp(-slope)), _short(math.exp(-start))
    ropes = [Rope(theta) for theta in thetas]
    ropes += [Rope(theta, "linear", factor=factor) for factor in factors for theta in thetas]
    return next((rope for rope in ropes if rope.problem() is None and fits(rope)), None)


def _short(number: float) -> list[float]:
    """The number rounded to one digit, to two and so on."""
    return [float(f"{number:.{digits}g}") for digits in range(1, 10)]


def _any(found: NDArray[np.float64], attention_factor: float) -> Rope:
    """Each pair's own frequency; theta is of no meaning then."""
    theta = 10000.0
    with np.errstate(divide="ignore"):
        factors = np.power(theta, -np.arange(len(found)) / len(found)) / found
    return Rope(theta, "longrope", factors=tuple(factors.tolist()), attention_factor=attention_factor)


def _differs(rope: Rope, cos: Array, sin: Array, positions: NDArray[np.int64], dtype: str) -> int | None:
    """The first position whose row the rope does not make. A float32 frequency is off by half a step at most, and an
    angle by as much for each radian; whoever made the table may have rounded twice."""
    pairs = cos.shape[1]
    radians = np.outer(positions, np.abs(frequencies(rope, 2 * pairs)))
    allowed = 4 * (_STEP[dtype] + _STEP["float32"] * radians) * (rope.attention_factor or 1.0)
    wrong = np.zeros(len(positions), bool)
    for stored, computed in zip((cos, sin), tables(rope, 2 * pairs, positions), strict=True):
        wrong |= ~(np.abs(stored.astype(np.float64) - computed) <= allowed).all(axis=1)  # NaN is wrong too
    return int(positions[np.argmax(wrong)]) if wrong.any() else None
