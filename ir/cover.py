"""The proof that slices hold every weight: each tensor in exactly one slice, or in several because several use it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from xdsl.dialects.builtin import ModuleOp

from plait.errors import VerifyError
from plait.ir.module import weights


def cover(slices: Sequence[ModuleOp], names: Iterable[str]) -> dict[str, tuple[int, ...]]:
    """Which slices hold each weight; several where it is replicated (a tied embedding).

    Args:
        slices: the slices of a module, in order.
        names: the tensors that must be placed.

    Raises:
        VerifyError: `cover`: a tensor is in no slice, or a slice asks for one that is not among `names`.
    """
    holders: dict[str, list[int]] = {name: [] for name in names}
    for index, module in enumerate(slices):
        for name in weights(module):
            if name not in holders:
                raise VerifyError("cover", f"slice {index} asks for {name!r}, which the model does not have")
            holders[name].append(index)
    lost = [name for name, where in holders.items() if not where]
    if lost:
        raise VerifyError("cover", f"{len(lost)} tensors are in no slice: {', '.join(lost[:5])}")
    return {name: tuple(where) for name, where in holders.items()}
