"""Scales joined to the weights they scale."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from plait.errors import CheckpointError, UnsupportedError
from plait.frontend.quantisation.base import Parts, Quantisation
from plait.ir.types import FP8
from plait.spec import WeightRef
from plait.spec import parts as parts_of


def join_scales(
    weights: Mapping[str, WeightRef], quantisation: Quantisation | None, source: Path
) -> dict[str, WeightRef]:
    """The tensors with each scale inside the weight it scales, and no longer a tensor of its own.

    Raises:
        UnsupportedError: `dtype-unsupported`: FP8 that no config explains, codes that no weight is made of.
        CheckpointError: `scale-missing`, `scale-shape`, `quantisation-conflict`, naming the tensor.
    """
    joined: dict[str, WeightRef] = {}
    used: set[str] = set()
    if quantisation is not None:
        suffix = quantisation.codes
        coded = [ref for name, ref in weights.items() if name.endswith(suffix) and ref.encoding in quantisation.stored]
        for ref in coded:
            module = ref.name.removesuffix(suffix)
            parts = Parts(module, ref, weights, source)
            if quantisation.skips(module):
                raise parts.conflict(ref, f"holds {ref.encoding} codes", f"the config lists {module} as not quantised")
            name = f"{module}{quantisation.WEIGHT}"
            if name != ref.name and name in weights:
                raise parts.conflict(ref, f"stands beside {name!r}", "they would be one weight twice")
            made = quantisation.join(parts)
            joined[name] = replace(made, name=name)
            used |= {part.name for part in parts_of(made)}
    rest = {name: ref for name, ref in weights.items() if name not in used}
    for ref in rest.values():
        if ref.encoding in FP8:
            raise UnsupportedError(
                "dtype-unsupported",
                f"{source}: {ref.name!r} is stored as FP8 ({ref.encoding}) of {list(ref.shape)}",
                why="FP8 weights mean nothing without their scales, and "
                + (
                    "no quantization_config says where those are"
                    if quantisation is None
                    else f"those of {quantisation.METHOD} are called *{quantisation.codes}"
                ),
            )
    if quantisation is not None and not joined:
        raise CheckpointError(
            "quantisation-conflict",
            f"the config of {source} says its weights are quantised ({quantisation.METHOD}), and none is",
            why=f"no tensor *{quantisation.codes} is stored as {' or '.join(quantisation.stored)}",
            hint="does the config belong to these weights?",
        )
    return {**joined, **rest}
