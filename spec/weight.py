"""Where a tensor of a checkpoint lies: a byte range, and how its bytes become numbers."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Literal

Encoding = Literal[
    "float32", "float16", "bfloat16", "e4m3fn", "e5m2", "e4m3fnuz", "i8", "u4", "Q4_0", "Q4_1", "Q8_0"
]  # fmt: skip


@dataclass(frozen=True)
class WeightRef:
    """`[offset, offset + nbytes)` of `file` hold a tensor of `shape` in `encoding`, row-major ((out, in) a matrix).

    Q4_0, Q4_1 and Q8_0 are GGUF's blocks, with their scales inside. The codes of e4m3fn, e5m2, e4m3fnuz, i8 and u4 (two
    in a byte, the low one first) mean nothing alone: their scales are tensors too, and part of the weight.

    Attributes:
        interleaved_heads: undoes GGUF's llama row order: rows of each head stand as rope pairs (0, 1), (2, 3) ... in
            the file and are read as halves, with that many heads (query heads for q, KV heads for k).
        scale: the tensor of scales: one for each `block`, row-major, whatever its own shape.
        block: rows and columns of the matrix that share a scale; 0 means all of them.
        zero: what is subtracted from a code before it is scaled: a number, or a tensor laid out as the scale is.
    """

    name: str
    file: str
    offset: int
    nbytes: int
    encoding: Encoding
    shape: tuple[int, ...]
    interleaved_heads: int | None = None
    scale: WeightRef | None = None
    block: tuple[int, int] | None = None
    zero: WeightRef | int | None = None


def parts(ref: WeightRef) -> tuple[WeightRef, ...]:
    """The byte ranges of a weight: its own, its scale's, its zeros'."""
    return tuple(part for part in (ref, ref.scale, ref.zero) if isinstance(part, WeightRef))


def map_parts(ref: WeightRef, change: Callable[[WeightRef], WeightRef]) -> WeightRef:
    """The weight with `change` made to each of its `parts`."""
    scale = None if ref.scale is None else change(ref.scale)
    zero = change(ref.zero) if isinstance(ref.zero, WeightRef) else ref.zero
    return replace(change(ref), scale=scale, zero=zero)
