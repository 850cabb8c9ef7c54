"""The backend that computes nothing."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from plait.backends.conformance.script import Script, Turn
from plait.backends.null import BACKEND
from tests.host.backend_bench import load


def test_it_returns_zeros_and_counts(tmp_path: Path) -> None:
    script = Script((Turn({0: 5, 1: 2}, "all"), Turn({0: 1})), 4)
    executable, player = load(BACKEND, "null:h100", tmp_path, script)
    shapes = [executable.step(player.batches(turn)[0], {})["logits"].shape for turn in script.turns]
    assert shapes == [(7, 61), (1, 61)]
    assert executable.stats() == {"steps": 2, "tokens": 8, "weight_bytes": 0, "kv_bytes": 0}
    assert executable.runs_on == "h100 (null: computes nothing)"
    k, v = executable.export_pages(1, np.array([3, 1], np.int32))
    assert k.shape == v.shape == (2, 4, 2, 16) and not k.any()


def test_it_refuses_a_batch_that_contradicts_itself(tmp_path: Path) -> None:
    script = Script((Turn({0: 5}),), 4)
    executable, player = load(BACKEND, "null:h100", tmp_path, script)
    batch = player.batches(script.turns[0])[0]
    batch.positions[0] = 3
    with pytest.raises(AssertionError, match="new tokens are the last ones"):
        executable.step(batch, {})
