"""Weights of a graph as byte ranges: parts of fused ones, rope pairs."""

from __future__ import annotations

from dataclasses import replace

from plait.frontend.graph.refusal import refuse
from plait.spec import Piece, Rows, WeightRef


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


def use(refs: dict[str, WeightRef], ref: WeightRef) -> str:
    """The name of a weight that an op uses; `refs` holds those that are used.

    Raises UnsupportedError `graph-tensor` where the name is used for other bytes, or in another shape.
    """
    known = refs.setdefault(ref.name, ref)
    if known != ref:
        shapes = f"as {list(known.shape)} and {list(ref.shape)}"
        refuse("tensor", f"the tensor {ref.name!r} is used in two ways", shapes)
    return ref.name
