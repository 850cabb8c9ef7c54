"""Which slice needs which tensor of the checkpoint: a checked cover."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

from xdsl.dialects.builtin import ModuleOp

from plait.errors import VerifyError, did_you_mean
from plait.ir.module import weights


@dataclass(frozen=True)
class Cover:
    """Every tensor of a checkpoint stands in exactly one slice, or in `replicated`, or in `unused`.

    Attributes:
        slices: tensor -> the slices that use it, by index.
        replicated: tensors that several slices use: the tied embedding.
        unused: tensors of the checkpoint that no slice uses.
    """

    slices: dict[str, tuple[int, ...]]
    replicated: tuple[str, ...]
    unused: tuple[str, ...]


def cover(slices: Sequence[ModuleOp], tensors: Collection[str]) -> Cover:
    """Check the slices of one module against the names of the checkpoint's tensors.

    Raises:
        VerifyError: `ir-cover`, naming a tensor that a slice needs and the checkpoint lacks.
    """
    users: dict[str, tuple[int, ...]] = {}
    for index, module in enumerate(slices):
        for name in weights(module):
            if name not in tensors:
                what = f"slice {index} needs the tensor {name!r}, which the checkpoint lacks"
                raise VerifyError("ir-cover", what, hint=did_you_mean(name, tensors))
            users[name] = (*users.get(name, ()), index)
    return Cover(
        slices=users,
        replicated=tuple(name for name, where in users.items() if len(where) > 1),
        unused=tuple(sorted(set(tensors) - set(users))),
    )
