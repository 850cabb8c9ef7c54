"""Tiny random checkpoints of every family on every backend, against transformers, beyond window and page."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import plait
from tests.checkpoints import random_ids, reference_logits, save

#: A device for each backend.
DEVICES = {"cuda": "h100", "rocm": "mi300", "xla": "v5e", "cpu": "cpu"}

GQA = {1: (8, 8), 3: (9, 3), 8: (8, 1)}
"""Ratio -> query heads, KV heads. head_dim is 16 throughout, so that it is not hidden / heads."""

FAMILIES: dict[str, dict[str, Any]] = {"llama": {}, "mistral": {"sliding_window": 8}, "qwen2": {}}


@pytest.mark.parametrize("ratio", GQA)
@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
@pytest.mark.parametrize("family", FAMILIES)
def test_logits_equal_transformers_on_every_backend(tmp_path: Path, family: str, tied: bool, ratio: int) -> None:
    heads, kv_heads = GQA[ratio]
    shape = {"num_attention_heads": heads, "num_key_value_heads": kv_heads, "head_dim": 16, "hidden_size": 72}
    folder = save(tmp_path / "m", family, tie_word_embeddings=tied, **shape, **FAMILIES[family])
    ids = random_ids(40)
    expected = reference_logits(folder, ids)
    for backend, device in [d for d in DEVICES.items() if d[0] != "xla"]:
        with plait.compile(folder, f"2x{device}", layers=(1, 2), run={"in_process": True}) as pipe:
            # Scores reach 40, where a float32 step is 4e-6: the limit is relative to the largest.
            limit = 1e-5 * np.abs(expected).max()
            assert np.abs(pipe.logits(ids) - expected).max() < limit, backend
            # Chunks of 7 end inside pages, and later ones attend to a window that began chunks before.
            assert np.abs(pipe.logits(ids, chunk=7) - expected).max() < limit, backend
