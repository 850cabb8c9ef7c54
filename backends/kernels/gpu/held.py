"""Weights of a launch plan as arrays: tensors of the checkpoint as the kernels want them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from xdsl.dialects.builtin import ModuleOp

from plait.backends.kernels.gpu.launch import LaunchPlan, Weight
from plait.backends.quantised import pack_u4, read_quantised, to_fnuz
from plait.backends.weights import read_weight
from plait.errors import CheckpointError
from plait.ir import weights
from plait.ir.numbers import NUMPY, Quantised
from plait.ir.quant import quant_type
from plait.ir.types import Quant
from plait.spec import WeightRef

Array = NDArray[Any]


class Reader:
    """Reads the weights of a slice. The parts of one quantised tensor, asked for in a row, are read once.

    Args:
        refs: the slice's `weights.json`.
        root: what its files are relative to.
    """

    def __init__(self, refs: Mapping[str, WeightRef], root: Path | None) -> None:
        self._refs, self._root = refs, root
        self._last: tuple[str, Quantised] | None = None

    def arrays(self, weight: Weight) -> Iterator[Array]:
        """The arrays that make up a weight, one behind the other.

        Raises:
            CheckpointError: as `plait.backends.weights.read_weight` says; `weight-missing`, `weight-shape` and
                `weight-format` where `weights.json` and the plan disagree.
        """
        for name, shape in zip(weight.names, weight.shapes, strict=True):
            ref = _checked(self._refs, name, shape, weight.format)
            if weight.part == "values":
                yield read_weight(ref, weight.dtype, self._root)
            else:
                yield _PARTS[weight.part](self._quantised(ref), weight, shape)

    def _quantised(self, ref: WeightRef) -> Quantised:
        if self._last is None or self._last[0] != ref.name:
            stored = read_quantised(ref, self._root)
            assert isinstance(stored, Quantised), f"{ref.name!r}: no kernel computes in {stored.kind}"
            self._last = ref.name, stored
        return self._last[1]


def _codes(stored: Quantised, weight: Weight, shape: tuple[int, ...]) -> Array:
    if weight.dtype == "u4":
        return pack_u4(stored.codes)
    return to_fnuz(stored).codes if weight.dtype != stored.kind.code_name else stored.codes


def _scale(stored: Quantised, weight: Weight, shape: tuple[int, ...]) -> Array:
    """Of the codes as they are held: those of e4m3fnuz mean half."""
    own = stored if weight.codes == stored.kind.code_name else to_fnuz(stored)
    return _spread(own.scale, own.kind.block, weight, shape)


def _zero(stored: Quantised, weight: Weight, shape: tuple[int, ...]) -> Array:
    if stored.zero is not None:
        return _spread(stored.zero, stored.kind.block, weight, shape)
    return np.full(weight.held(shape), stored.kind.zero_point or 0, NUMPY[weight.dtype])


def _spread(numbers: Array, block: tuple[int, int], weight: Weight, shape: tuple[int, ...]) -> Array:
    """Numbers of `block` as one for each of the weight's blocks, which have fewer rows."""
    held = weight.held(shape)
    rows = held[-2]
    repeated = numbers if numbers.shape[-2] == rows else numbers.repeat(block[0] or rows, -2)[..., :rows, :]
    assert repeated.shape == held, f"{numbers.shape} of {block} are not {held}"
    return repeated.astype(NUMPY[weight.dtype])


_PARTS: dict[str, Callable[[Quantised, Weight, tuple[int, ...]], Array]] = {
    "codes": _codes,
    "scale": _scale,
    "zero": _zero,
}


def _checked(refs: Mapping[str, WeightRef], name: str, shape: tuple[int, ...], format: str | None) -> WeightRef:
    if name not in refs:
        raise CheckpointError("weight-missing", f"weights.json says nothing of {name!r}", hint="compile again")
    ref = refs[name]
    if ref.shape != shape:
        raise CheckpointError(
            "weight-shape",
            f"{name!r} is {list(ref.shape)} in weights.json",
            why=f"the slice's launch plan wants {list(shape)}",
            hint="compile again",
        )
    if format is not None and str(quant_type(ref)) != format:
        raise CheckpointError(
            "weight-format",
            f"{name!r} is {ref.encoding} of {quant_type(ref)} in weights.json",
            why=f"the slice's launch plan wants {format}",
            hint="compile again",
        )
    return ref


def quantised(plan: LaunchPlan, module: ModuleOp) -> dict[str, str]:
    """What a report says of quantised weights: how many are held as they are stored, and how many as numbers; nothing
    where there are none."""
    kinds = {name: op.result.type.element_type for name, op in weights(module).items()}
    formats = {name: str(kind) for name, kind in kinds.items() if isinstance(kind, Quant)}
    if not formats:
        return {}
    kept = {name for weight in plan.weights.values() if weight.part == "codes" for name in weight.names}
    wide = {name for weight in plan.weights.values() if weight.part == "values" for name in weight.names} & set(formats)
    parts = [f"{len(kept)} kept as they are stored"] if kept else []
    named = " and ".join(sorted({formats[name] for name in wide}))
    parts += [f"{len(wide)} of {named} dequantised when they are loaded"] if wide else []
    return {"weights": ", ".join(parts)}
