"""Scales are read before anything is compiled: they are few, and a bad one makes all numbers of its block wrong."""

from __future__ import annotations

from collections.abc import Iterable

from plait.backends.scales import read_scales
from plait.spec import WeightRef, parts
from plait.words import bytes_text, counted

MOST_BYTES = 1 << 30
"""Read at compile, which takes seconds. Scales of 4-bit groups are a thirtieth of their codes: few models have more."""


def check_scales(refs: Iterable[WeightRef]) -> str | None:
    """Read what stands beside the codes of quantised weights: scales, zeros, outer scales, the order of groups. The
    smallest are read first, and no more than `MOST_BYTES`; codes, and blocks of GGUF with their scales, are not read.

    Returns:
        a note of what was too much to read, and is checked when it is loaded.

    Raises:
        CheckpointError: `weight-scale`, as `read_scales` says, naming the tensor and the number.
    """
    found: dict[tuple[str, int], WeightRef] = {}  # weights that are rows of one tensor share its scales
    for ref in refs:
        for member in ref.stack or (ref,):
            if member.scale is not None:
                found.setdefault((member.scale.file, member.scale.offset), member)
    ordered, left = sorted(found.values(), key=_beside), MOST_BYTES
    for done, ref in enumerate(ordered):
        left -= _beside(ref)
        if left < 0:
            rest = ordered[done:]
            size = bytes_text(sum(map(_beside, rest)))
            tensors = counted(len(rest), "tensor")
            return f"the scales of {tensors} ({size}) are checked when they are loaded; the others were read"
        read_scales(ref, None)
    return None


def _beside(ref: WeightRef) -> int:
    """Bytes of all parts but the codes."""
    return sum(part.nbytes for part in parts(ref)[1:])
