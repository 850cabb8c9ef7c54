"""ONNX graphs whose numbers are the same in all short sequences."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from plait.errors import UnsupportedError
from plait.frontend.checkpoint import open_checkpoint
from tests.onnx_models import Graph, decoder, group_query, save


@pytest.mark.parametrize("least", [1.0, None])
def test_a_number_that_grows_in_long_sequences_alone_is_none(least: float | None, tmp_path: Path) -> None:
    """Scores that grow with the logarithm of the length, beyond 20 tokens; the same graph with 1 is read."""

    def attention(g: Graph, x: str, block: int) -> str:
        mixed = group_query()(g, x, block)
        total = g("Gather", g("Shape", "attention_mask"), g.tensor("one", 1, np.int64))
        grown = g("Div", g("Log", g("Cast", total, to=1)), g.tensor("log", np.log(20)))
        factor = g("Max", grown, g.tensor("least", least)) if least else g("Sub", grown, grown)
        return str(g("Mul", mixed, factor if least else g("Add", factor, g.tensor("unit", 1.0))))

    path = save(decoder(attention), tmp_path / "m.onnx")
    if least is None:
        open_checkpoint(path)
    else:
        with pytest.raises(UnsupportedError, match="changes with the length"):
            open_checkpoint(path)
