"""Where a tensor of a checkpoint lies: a byte range, and how its bytes become numbers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Encoding = Literal["float32", "float16", "bfloat16", "Q4_0", "Q4_1", "Q8_0"]


@dataclass(frozen=True)
class WeightRef:
    """`[offset, offset + nbytes)` of `file` hold a tensor of `shape` in `encoding`, row-major ((out, in) a matrix).

    `interleaved_heads` undoes GGUF's llama row order: rows of each head stand as rope pairs (0, 1), (2, 3) ... in the
    file and are read as halves, with that many heads (query heads for q, KV heads for k).
    """

    name: str
    file: str
    offset: int
    nbytes: int
    encoding: Encoding
    shape: tuple[int, ...]
    interleaved_heads: int | None = None
