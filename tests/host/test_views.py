"""Weights that are parts of stored tensors: what no part can be taken of is refused by name."""

from __future__ import annotations

import pytest

from plait.errors import CheckpointError
from plait.frontend.views import View, apply
from plait.spec import Piece, Rows, WeightRef


def stored(*shape: int) -> dict[str, WeightRef]:
    size = 4
    for dim in shape:
        size *= dim
    return {"fused": WeightRef("fused", "file", 0, size, "float32", shape)}


@pytest.mark.parametrize(
    ("shape", "view", "why"),
    [
        ((48,), View(("fused",), transposed=True), "no matrix"),
        ((), View(("fused",), transposed=True), "no matrix"),
        ((48,), View(("fused",), Rows(1, 48, (Piece(0, 16),)), transposed=True), "no matrix"),
        ((0, 64), View(("fused",), Rows(32, 2, (Piece(0, 1),)), vectors=True), "no plain matrix"),
        ((0, 4, 8), View(("fused",), Rows(4, 2, (Piece(0, 1),))), "8 rows are due"),
        ((48, 8), View(("fused",), Rows(1, 40, (Piece(0, 16),))), "40 rows are due"),
    ],
)
def test_shapes_that_a_view_does_not_fit(shape: tuple[int, ...], view: View, why: str) -> None:
    with pytest.raises(CheckpointError, match=why) as caught:
        apply(stored(*shape), {"part": view}, "model")
    assert caught.value.code == "tensor-shape" and "'fused'" in caught.value.what
