"""Tiny random checkpoints of every family on every backend, in one slice and in three, against transformers in float32.

48 tokens: beyond windows (8), beyond the original context of scaled ropes (16), beyond a page (16). Whole, in chunks
of 7, which end inside pages, and in several slices token by token, except where every shape is compiled anew. Limits
are relative to the largest score; another expert chosen, or a key too many, moves scores by a thousandth and more.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

import plait
from plait.frontend.families import FAMILIES as READ
from tests.checkpoints import random_ids, reference_logits, save
from tests.families import FAMILIES, ORIGINAL

COUNT, LIMIT = 48, 1e-5
LIMIT_OF_ILL = {"mixtral": 1e-4}
"""The weights of this one turn the last bit of an embedding into 1e-5 of the logits (position 38): float32 cannot do
better in another order of sums."""

DEVICES = {"cpu": "cpu", "cuda": "h100", "rocm": "mi300", "xla": "v5e"}

CASES = [
    pytest.param(family, backend, marks=[] if backend == "cpu" else [pytest.mark.slow])
    for family in FAMILIES
    for backend in DEVICES
]


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Path, NDArray[np.float32]]]:
    """Checkpoints and their reference logits, by family, as far as they were asked for."""
    return {}


@contextmanager
def compiled(folder: Path, device: str, blocks: int, slices: int) -> Iterator[plait.Pipeline]:
    first = blocks // slices
    layers = (*(first,) * (slices - 1), blocks - first * (slices - 1))
    with plait.compile(folder, f"{slices}x{device}", layers=layers, run={"in_process": True}) as pipe:
        assert len(pipe.plan.slices) == slices
        yield pipe


@pytest.mark.parametrize(("family", "backend"), CASES)
def test_logits_equal_transformers(
    family: str,
    backend: str,
    made: dict[str, tuple[Path, NDArray[np.float32]]],
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    ids = random_ids(COUNT)
    if family not in made:
        folder = save(tmp_path_factory.mktemp("families") / family, family)
        made[family] = folder, reference_logits(folder, ids)
    folder, expected = made[family]
    limit = LIMIT_OF_ILL.get(family, LIMIT) * np.abs(expected).max()
    blocks = _blocks(folder)
    for slices in (1, 3) if blocks >= 3 else (1, 2):
        with compiled(folder, DEVICES[backend], blocks, slices) as pipe:
            for chunk in (None, 7, 1) if slices > 1 and backend != "xla" else (None, 7):
                given = {} if chunk is None else {"chunk": chunk}
                off = np.abs(pipe.logits(ids, **given) - expected).max()
                assert off < limit, f"{slices} slices, chunks of {chunk}: {off / limit:.3g} of the limit"


def _blocks(folder: Path) -> int:
    from plait.frontend.checkpoint import open_checkpoint
    from plait.frontend.config import DecoderConfig

    config = open_checkpoint(folder).config
    assert isinstance(config, DecoderConfig)
    return config.blocks


@pytest.mark.parametrize(("context", "note"), [(32, "within"), (COUNT, "beyond")])
def test_dynamic_rope_is_the_table_of_the_longest_sequence(context: int, note: str, tmp_path: Path) -> None:
    """transformers takes another table at each length beyond the original one; at the longest both are one."""
    rope = {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 4.0}
    folder = save(tmp_path / "m", "llama", max_position_embeddings=32, rope_parameters=rope)
    ids = random_ids(context)
    expected = reference_logits(folder, ids)
    with plait.compile(folder, "cpu", context=context, run={"in_process": True}) as pipe:
        assert np.abs(pipe.logits(ids, chunk=7) - expected).max() < LIMIT * np.abs(expected).max()
        assert pipe.plan.notes is not None
        assert note in pipe.plan.notes[0]
        assert pipe.manifest.max_positions == context
        with pytest.raises(plait.PlaitError, match="positions"):
            pipe.logits(random_ids(context + 1))


def test_longrope_takes_the_short_table_for_short_sequences(tmp_path: Path) -> None:
    """G62: transformers switches the table in mid-sequence, with stale keys; here it is chosen once, and said."""
    folder = save(tmp_path / "m", "phi3-longrope")
    ids = random_ids(ORIGINAL)
    expected = reference_logits(folder, ids)
    with plait.compile(folder, "cpu", context=ORIGINAL, run={"in_process": True}) as pipe:
        assert np.abs(pipe.logits(ids) - expected).max() < LIMIT * np.abs(expected).max()
        assert pipe.plan.notes == (f"the longrope table is the one for sequences within {ORIGINAL} tokens",)


def test_every_family_that_is_read_is_tested() -> None:
    """`kimi_k2` is DeepSeek-V3 under another name; transformers has no class for it."""
    assert {name.partition("-")[0] for name in FAMILIES} == READ.keys() - {"kimi_k2"}
