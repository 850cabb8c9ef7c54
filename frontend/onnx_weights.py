"""Weights of a graph as byte ranges: parts of fused ones, rope pairs, 4-bit codes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from math import prod

from plait.frontend.onnx_file import refuse
from plait.spec import Piece, Rows, WeightRef
from plait.spec.weight import Encoding


def transposed(ref: WeightRef) -> WeightRef:
    """A matrix that is stored as (in, out), as the weight (out, in)."""
    assert ref.rows is None
    return replace(ref, shape=ref.shape[::-1], transposed=not ref.transposed)


def take_rows(ref: WeightRef, start: int, count: int) -> WeightRef:
    """Rows [start, start + count) of a weight or of a bias, under a name of its own: q of a fused q, k and v."""
    if (start, count) == (0, ref.shape[0]):
        return ref
    assert start >= 0 and count > 0 and start + count <= ref.shape[0] and ref.rows is None
    name, shape = f"{ref.name}[{start}:{start + count}]", (count, *ref.shape[1:])
    if ref.transposed:
        return replace(ref, name=name, shape=shape, rows=Rows(1, ref.shape[0], (Piece(start, count),)))
    assert ref.block is None or ref.block[0] == 1, "each row has scales of its own"
    scale, zero = (part if part is None or isinstance(part, int) else take_rows(part, start, count)
                   for part in (ref.scale, ref.zero))  # fmt: skip
    assert not isinstance(scale, int)
    each = ref.nbytes // ref.shape[0]
    return replace(
        ref, name=name, shape=shape, offset=ref.offset + start * each, nbytes=count * each, scale=scale, zero=zero
    )


def take_pairs(ref: WeightRef, head_dim: int, rotary_dim: int) -> WeightRef:
    """The rows of q or k, or their bias, whose rope turns neighbours, so that it turns halves."""
    pieces = (Piece(0, rotary_dim, pairs=True), Piece(rotary_dim, head_dim - rotary_dim))[: 1 + (rotary_dim < head_dim)]
    if ref.rows is None:
        return replace(ref, rows=Rows(ref.shape[0] // head_dim, head_dim, pieces))
    ((whole,), stride) = ref.rows.pieces, ref.rows.stride
    heads = range(whole.start, whole.start + whole.count, head_dim)
    moved = tuple(replace(piece, start=head + piece.start) for head in heads for piece in pieces)
    return replace(ref, rows=Rows(1, stride, moved))


BITS: dict[int, Encoding] = {4: "u4", 8: "u8"}


def codes(
    weight: WeightRef,
    scale: WeightRef,
    zero: WeightRef | None,
    shape: tuple[int, int],
    bits: int,
    group: int,
    what: str,
) -> WeightRef:
    """What `MatMulNBits` multiplies by: (code - zero) * scale, with a scale and a zero for each `group` of a row. Where
    there are no zeros it is the middle of the codes. 4-bit codes, and zeros that are codes, stand low half first.

    Raises UnsupportedError `onnx-tensor`, naming the node `what`, where rows are padded or tensors have other sizes.
    """
    rows, columns = shape
    if columns % group or bits not in BITS:
        refuse("tensor", f"{what}: {columns} columns of {bits} bits in groups of {group} are not read",
               "whole groups of 4 or 8 bits are")  # fmt: skip
    groups, encoding = columns // group, BITS[bits]
    packed = zero is not None and zero.encoding == "u8"
    each = scale.nbytes // max(1, prod(scale.shape))
    sizes: Sequence[tuple[WeightRef | None, int]] = (
        (weight, rows * columns * bits // 8),
        (scale, rows * groups * each),
        (zero, rows * (-(-groups * bits // 8) if packed else groups * each)),
    )
    for part, nbytes in sizes:
        if part is not None and part.nbytes != nbytes:
            refuse("tensor", f"{what}: {part.name!r} has {part.nbytes} bytes, and {nbytes} are due")
    if zero is not None:
        zero = replace(zero, encoding=encoding if packed else zero.encoding, shape=(rows, groups))
    return replace(
        weight,
        encoding=encoding,
        shape=shape,
        scale=replace(scale, shape=(rows, groups)),
        block=(1, group),
        zero=1 << bits - 1 if zero is None else zero,
    )
