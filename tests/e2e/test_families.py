"""Tiny random checkpoints of every family on every backend, against transformers, beyond window and page.

Scores reach 40, where a float32 step is 4e-6: limits are relative to the largest.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from safetensors.numpy import load_file, save_file

import plait
from tests.checkpoints import random_ids, reference_logits, save

#: A device for each backend.
DEVICES = {"cuda": "h100", "rocm": "mi300", "xla": "v5e", "cpu": "cpu"}

GQA = {1: (8, 8), 3: (9, 3), 8: (8, 1)}
"""Ratio -> query heads, KV heads. head_dim is 16 throughout, so that it is not hidden / heads."""

FAMILIES: dict[str, dict[str, Any]] = {"llama": {}, "mistral": {"sliding_window": 8}, "qwen2": {}}

#: Each family, ratio and table once; the other combinations are slow.
FIRST = (("llama", True, 3), ("mistral", False, 8), ("qwen2", True, 1))
CASES = [
    *FIRST,
    *(pytest.param(*c, marks=pytest.mark.slow) for c in product(FAMILIES, (True, False), GQA) if c not in FIRST),
]

#: Emulated as `cuda` is.
ROCM = pytest.param("rocm", marks=pytest.mark.slow)


@pytest.mark.parametrize(("family", "tied", "ratio"), CASES)
def test_logits_equal_transformers_on_every_backend(tmp_path: Path, family: str, tied: bool, ratio: int) -> None:
    heads, kv_heads = GQA[ratio]
    shape = {"num_attention_heads": heads, "num_key_value_heads": kv_heads, "head_dim": 16, "hidden_size": 72}
    folder = save(tmp_path / "m", family, tie_word_embeddings=tied, **shape, **FAMILIES[family])
    ids = random_ids(40)
    expected = reference_logits(folder, ids)
    limit = 1e-5 * np.abs(expected).max()
    for backend, device in DEVICES.items():
        with plait.compile(folder, f"2x{device}", layers=(1, 2), run={"in_process": True}) as pipe:
            assert np.abs(pipe.logits(ids) - expected).max() < limit, backend
            # Chunks of 7 end inside pages, and later ones attend to a window that began chunks before.
            assert np.abs(pipe.logits(ids, chunk=7) - expected).max() < limit, backend


SPLITS = ((3,), (1, 2), (1, 1, 1))
"""One slice, two and three."""


@contextmanager
def split(folder: Path, device: str, layers: tuple[int, ...]) -> Iterator[plait.Pipeline]:
    with plait.compile(folder, f"{len(layers)}x{device}", layers=layers, run={"in_process": True}) as pipe:
        assert [item.blocks[1] - item.blocks[0] for item in pipe.plan.slices] == list(layers)
        yield pipe


def answers(folder: Path, device: str, layers: tuple[int, ...]) -> tuple[list[NDArray[Any]], list[list[int]], str]:
    """Logits in one step and in chunks, tokens of two requests together, and the dtype of the artifact."""
    ids = random_ids(40)
    with split(folder, device, layers) as pipe:
        scores = [pipe.logits(ids), pipe.logits(ids, chunk=7)]
        return scores, pipe.generate_ids([ids[:10], ids[10:24]], 6), pipe.manifest.dtype


@pytest.mark.parametrize("backend", ["cuda", ROCM, "xla", "cpu"])
def test_a_tied_table_in_two_slices(backend: str, tmp_path: Path) -> None:
    """The last slice needs the embedding too, whether or not the file repeats it as `lm_head.weight`."""
    folders = [save(tmp_path / name, tie_word_embeddings=True) for name in ("without", "with")]
    file = folders[1] / "model.safetensors"
    tensors = load_file(file)
    assert "lm_head.weight" not in tensors
    save_file(tensors | {"lm_head.weight": tensors["model.embed_tokens.weight"]}, file, metadata={"format": "pt"})
    expected = reference_logits(folders[0], random_ids(40))
    with split(folders[0], DEVICES[backend], SPLITS[0]) as pipe:
        first = pipe.logits(random_ids(40))
    assert np.abs(first - expected).max() < 1e-5 * np.abs(expected).max()
    for folder in folders:
        with split(folder, DEVICES[backend], SPLITS[1]) as pipe:
            np.testing.assert_array_equal(pipe.logits(random_ids(40)), first, err_msg=f"{folder.name} lm_head")


@pytest.mark.parametrize(
    ("backend", "dtype"),
    [
        ("cuda", "bfloat16"),
        pytest.param("rocm", "bfloat16", marks=pytest.mark.slow),
        ("xla", "bfloat16"),
        ("cpu", "bfloat16"),
        ("cpu", "float16"),
    ],
)
def test_16_bits_are_close_to_float32_and_equal_in_any_number_of_slices(
    backend: str, dtype: str, tmp_path: Path
) -> None:
    """As close as twice transformers' own error in that dtype; and not as close as float32, which would be another."""
    folder = save(tmp_path / "m", "mistral", dtype=dtype, sliding_window=8, tie_word_embeddings=True)
    ids = random_ids(40)
    exact, theirs = reference_logits(folder, ids), reference_logits(folder, ids, dtype)
    allowed = 2 * np.abs(theirs - exact).max()
    first, tokens, stated = answers(folder, DEVICES[backend], SPLITS[0])
    assert stated == dtype
    for scores in first:
        assert scores.dtype == np.float32
        assert allowed / 20 < np.abs(scores - exact).max() < allowed
    for layers in SPLITS[1:2] if backend == "xla" else SPLITS[1:]:  # which compiles long
        scores, again, _ = answers(folder, DEVICES[backend], layers)
        np.testing.assert_array_equal(scores, first, err_msg=f"{layers}")
        assert again == tokens
