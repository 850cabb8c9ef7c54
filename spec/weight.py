"""Where a tensor of a checkpoint lies: a byte range, and how its bytes become numbers."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Literal

Encoding = Literal[
    "float32", "float16", "bfloat16",
    "e4m3fn", "e5m2", "e4m3fnuz", "e8m0", "e2m1", "nf4", "i8", "u8", "i32", "i64", "u4",
    "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K", "IQ4_NL", "IQ4_XS", "MXFP4",
]  # fmt: skip

Packing = Literal["plain", "high", "gptq", "down", "awq"]


@dataclass(frozen=True)
class Piece:
    """`count` rows from `start` of a run on. Where `pairs`, they stand as rope pairs (0, 1), (2, 3) ... and are read as
    halves: first the even ones, then the odd ones."""

    start: int
    count: int
    pairs: bool = False


@dataclass(frozen=True)
class Rows:
    """Which stored rows make a weight, in which order: of each of `groups` runs of `stride` rows the pieces, one after
    the other. Stored are `groups * stride` rows.

    GGUF's llama keeps q as `Rows(heads, head_dim, (Piece(0, head_dim, pairs=True),))`; GPT-NeoX's fused q, k and v hold
    k as `Rows(heads, 3 * head_dim, (Piece(head_dim, head_dim),))`.
    """

    groups: int
    stride: int
    pieces: tuple[Piece, ...]

    @property
    def count(self) -> int:
        """Rows of the weight."""
        return self.groups * sum(piece.count for piece in self.pieces)


@dataclass(frozen=True)
class WeightRef:
    """`[offset, offset + nbytes)` of `file` hold a tensor of `shape` in `encoding`, row-major ((out, in) a matrix).

    The names in capitals are GGUF's blocks, with their scales inside. The codes of e4m3fn, e5m2, e4m3fnuz, e2m1, nf4,
    i8, u8 and u4 (of those with four bits two stand in a byte, the low one first) mean nothing alone: their scales are
    tensors too, and part of the weight.

    Attributes:
        shape: of the weight as it is used, with `rows` and `transposed` undone.
        rows: which rows of the stored tensor it is; None for all of them as they stand. They are taken after the
            transposition. Of a stack (experts, rows, columns) each matrix is stored so.
        transposed: the matrix (each, of a stack) is stored as (in, out).
        packing: how codes stand in the file; `plain` is row-major, and the only one of encodings that no other names.
            `high` (4 bits) is row-major with the high half of a byte first. `gptq` (u4 and u8) has the 8 or 4 codes of
            one column of a stored (in, out) matrix in an int32 word, the lowest first; `awq` (u4) 8 codes of one row of
            it, in the order 0, 2, 4, 6, 1, 3, 5, 7. Both mean the weight (out, in) that the codes stand for. `down` is
            `gptq` of a matrix that is stored as it is.
        scale: the tensor of scales: one for each `block`, row-major, whatever its own shape.
        block: rows and columns of the matrix that share a scale; 0 means all of them.
        zero: what is subtracted from a code before it is scaled: a number, or a tensor laid out as the scale is, of
            floats or of whole numbers in any encoding and packing.
        outer: a tensor of one number that every scale is multiplied by.
        group_of: an i32 tensor that says for each column which group of columns it belongs to (0 is the first column
            of the scales), where groups are not neighbours: GPTQ in the order of activations.
        book: a float32 tensor of the numbers that codes stand for, for u8 codes that are no numbers themselves: scales
            of bitsandbytes. Such a scale has a `scale` and a `block` of its own: of the one row of all its codes.
        reciprocal, factor, shift: what the numbers of a scale, a zero or an outer scale mean, in float32: x is the one
            stored (its own scale applied), or 1 / x; the number is `factor * x + shift`. A stored scale is finite
            and positive, of codes that are whole numbers not zero; with a shift it may come out otherwise.
        stack: the matrices of a weight (len(stack), out, in) that are stored one by one. The stack's own offset and
            nbytes are 0 then, and its file and encoding are those of the first.
    """

    name: str
    file: str
    offset: int
    nbytes: int
    encoding: Encoding
    shape: tuple[int, ...]
    rows: Rows | None = None
    transposed: bool = False
    packing: Packing = "plain"
    scale: WeightRef | None = None
    block: tuple[int, int] | None = None
    zero: WeightRef | int | None = None
    outer: WeightRef | None = None
    group_of: WeightRef | None = None
    book: WeightRef | None = None
    reciprocal: bool = False
    factor: float = 1.0
    shift: float = 0.0
    stack: tuple[WeightRef, ...] = ()


def parts(ref: WeightRef) -> tuple[WeightRef, ...]:
    """The byte ranges of a weight: its own, then those of its scale, zeros and so on; of a stack those of each."""
    if ref.stack:
        return tuple(part for member in ref.stack for part in parts(member))
    inner = (ref.scale, ref.zero, ref.outer, ref.group_of, ref.book)
    return (ref, *(part for item in inner if isinstance(item, WeightRef) for part in parts(item)))


def map_parts(ref: WeightRef, change: Callable[[WeightRef], WeightRef]) -> WeightRef:
    """The weight with `change` made to each of its `parts`, and to a stack itself."""
    if ref.stack:
        return replace(change(ref), stack=tuple(map_parts(member, change) for member in ref.stack))

    def within(part: WeightRef | None) -> WeightRef | None:
        return None if part is None else map_parts(part, change)

    return replace(
        change(ref),
        scale=within(ref.scale),
        zero=within(ref.zero) if isinstance(ref.zero, WeightRef) else ref.zero,
        outer=within(ref.outer),
        group_of=within(ref.group_of),
        book=within(ref.book),
    )
