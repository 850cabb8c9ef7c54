"""A slice of `make fuzz`: some damaged files of every kind, each with the error or the answer that it must have."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.fuzz import sweep
from tests.fuzz.kinds import KINDS

#: Enough for every seed of a kind once; `make fuzz` runs 2,000 of each.
COUNTS = {"config": 60, "quantization-config": 50}
CASES = 25

#: The others run with the slow tests.
FIRST = ("safetensors", "index", "config", "quantization-config", "tokenizer", "gguf")


@pytest.mark.parametrize(
    "name", [name if name in FIRST else pytest.param(name, marks=pytest.mark.slow) for name in KINDS]
)
def test_damaged_files(name: str, tmp_path: Path) -> None:
    count = COUNTS.get(name, CASES)
    found = sweep.sweep(name, sweep.prepare(name, tmp_path), count)
    assert found.faults == []
    assert sum(found.ended.values()) == count
    assert len(found.ended) > 1, "all cases ended alike"
