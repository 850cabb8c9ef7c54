"""Ropes that published models have and no tiny family: logits beyond the original context are transformers'."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import plait
from tests.checkpoints import random_ids, reference_logits, save
from tests.families import ORIGINAL, ROPE, YARN

LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}

#: The model that has it, our tiny family, and the rope with a shorter original context.
ROPES: dict[str, tuple[str, dict[str, Any]]] = {
    "Llama-3.1": ("llama", LLAMA3),
    "Qwen2.5-yarn": ("qwen2", YARN),
    "DeepSeek-V2": ("deepseek_v2", YARN | {"mscale": 0.707, "mscale_all_dim": 0.707}),
    "DeepSeek-V2-unequal": ("deepseek_v2", YARN | {"mscale": 1.0, "mscale_all_dim": 0.8}),
    "Kimi-K2": ("deepseek_v3", YARN | {"beta_fast": 1.0, "mscale": 1.0, "mscale_all_dim": 1.0}),
}


@pytest.mark.parametrize("name", ROPES)
def test_logits_equal_transformers(name: str, tmp_path: Path) -> None:
    family, rope = ROPES[name]
    parameters = ROPE | rope | {"original_max_position_embeddings": ORIGINAL}
    folder, ids = save(tmp_path / "m", family, rope_parameters=parameters), random_ids(3 * ORIGINAL)
    expected = reference_logits(folder, ids)
    with plait.compile(folder, "cpu", run={"in_process": True}) as pipe:
        assert np.abs(pipe.logits(ids, chunk=7) - expected).max() < 1e-5 * np.abs(expected).max()
