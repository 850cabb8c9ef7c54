"""Rope tables of graphs, read back: what was rounded is not rounded once more."""

from __future__ import annotations

import numpy as np
import pytest
from ml_dtypes import bfloat16

from plait.errors import UnsupportedError
from plait.frontend.graph.rope import recover
from plait.ir import Rope
from plait.ir.rope import tables

POSITIONS = np.arange(300)


@pytest.mark.parametrize(("dtype", "kind"), [("float32", np.float32), ("float16", np.float16), ("bfloat16", bfloat16)])
@pytest.mark.parametrize("growth", [1.0, 1.0078125])
def test_a_table_gives_its_rope(dtype: str, kind: type, growth: float) -> None:
    """The growth of a YaRN that stretches by 8 %: one step of bfloat16."""
    theirs = Rope(500.0, "longrope", factors=(1.0,) * 8, attention_factor=growth)
    cos, sin = (table.astype(kind).astype(np.float32) for table in tables(theirs, 16, POSITIONS))
    found = recover(cos, sin, POSITIONS, dtype, "a table")
    assert (found.attention_factor or 1.0) == growth
    assert (found.kind, found.theta) == ("default", 500.0) or growth != 1.0


def test_a_sine_of_other_positions_is_no_rope() -> None:
    cos, sin = tables(Rope(500.0), 16, POSITIONS)
    with pytest.raises(UnsupportedError, match="graph-rope"):
        recover(cos, np.roll(sin, 1, axis=0), POSITIONS, "float32", "a table")
