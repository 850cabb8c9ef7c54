"""How the features of a value stand in a tensor: views, transpositions, slices and repetitions, without any numbers.

A value is (tokens, features). In a graph it is seen through axes: [1, heads, tokens, head_dim], say. Each axis is a
product of atoms, the slowest first; an atom of features knows its stride among the features of the value.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import Literal


@dataclass(frozen=True)
class Atom:
    """`total` are the tokens of the KV cache with the new ones behind; `repeat` says the same again."""

    kind: Literal["tokens", "total", "repeat", "features"]
    size: int
    stride: int = 0


Axis = tuple[Atom, ...]
Axes = tuple[Axis, ...]


def features(size: int, stride: int = 1) -> Axis:
    return (Atom("features", size, stride),) if size > 1 else ()


def merged(atoms: Sequence[Atom]) -> Axis:
    """The same atoms, with neighbours that count on as one."""
    made: list[Atom] = []
    for atom in atoms:
        last = made[-1] if made else None
        if last and last.kind == atom.kind == "features" and last.stride == atom.size * atom.stride:
            made[-1] = Atom("features", last.size * atom.size, atom.stride)
        else:
            made.append(atom)
    return tuple(made)


def flat(axes: Axes) -> Axis:
    return tuple(atom for axis in axes for atom in axis)


def size(axis: Axis) -> int:
    return prod(atom.size for atom in axis)


def feature_atoms(axes: Axes) -> Axis:
    return merged([atom for atom in flat(axes) if atom.kind == "features"])


def reshape(axes: Axes, sizes: Sequence[int]) -> Axes | None:
    """Row-major; None where an axis of the result would be a part of the tokens, or of a repetition."""
    left, made = list(flat(axes)), []
    for due in sizes:
        axis: list[Atom] = []
        while due > 1:
            if not left:
                return None
            atom = left.pop(0)
            if due % atom.size == 0:
                axis.append(atom)
                due //= atom.size
            elif atom.kind == "features" and atom.size % due == 0:
                rest = atom.size // due
                axis.append(replace(atom, size=due, stride=atom.stride * rest))
                left.insert(0, replace(atom, size=rest))
                due = 1
            else:
                return None
        made.append(merged(axis))
    return None if left else tuple(made)


def expand(axes: Axes, sizes: Sequence[int]) -> Axes | None:
    """Axes of one become repetitions; new ones stand in front."""
    padded = ((),) * (len(sizes) - len(axes)) + axes
    made = []
    for axis, due in zip(padded, sizes, strict=True):
        if size(axis) != due and axis:
            return None
        made.append(axis if size(axis) == due else (Atom("repeat", due),))
    return tuple(made)


def part(axes: Axes, dim: int, start: int, count: int) -> tuple[int, Axes] | None:
    """`count` of one axis from `start` on: how many features they begin later, and the axes."""
    axis = axes[dim]
    if (start, count) == (0, size(axis)):
        return 0, axes
    if len(axis) != 1 or axis[0].kind != "features" or count < 1:
        return None
    (atom,) = axis
    kept = (replace(atom, size=count),) if count > 1 else ()
    return start * atom.stride, (*axes[:dim], kept, *axes[dim + 1 :])


def compact(axes: Axes) -> Axes:
    """The same axes, of a value that has these features alone, in this order."""
    stride = prod(atom.size for atom in flat(axes) if atom.kind == "features")
    made = []
    for axis in axes:
        atoms = []
        for atom in axis:
            if atom.kind == "features":
                stride //= atom.size
                atom = replace(atom, stride=stride)
            atoms.append(atom)
        made.append(merged(atoms))
    return tuple(made)
