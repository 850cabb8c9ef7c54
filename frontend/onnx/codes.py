"""Weights of MatMulNBits: codes with scales and zeros, as byte ranges."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from math import prod

from plait.frontend.onnx.file import refuse
from plait.spec import WeightRef
from plait.spec.weight import Encoding

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
    if group < 1 or columns % group or bits not in BITS:
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
