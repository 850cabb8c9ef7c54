"""The main job, on a real model, against transformers."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import plait
from tests.e2e.conftest import NEW_TOKENS, PROMPTS, Reference

TARGETS = (
    "h100,mi300",
    "h100,mi300,v5e",
    "cpu",
    *(pytest.param(one, marks=pytest.mark.slow) for one in ("mi300", "2xh100")),
)


@pytest.mark.parametrize("targets", TARGETS)
def test_greedy_tokens_and_logits_equal_transformers(smollm2: Path, reference: Reference, targets: str) -> None:
    with plait.compile(smollm2, targets, dtype="float32") as pipe:
        assert pipe.generate_ids(reference.prompts, NEW_TOKENS) == reference.greedy
        # In one step, and in chunks of 50 that end inside pages.
        answers = [pipe.logits(reference.text, chunk) for chunk in (None, 50)]
        ours = pipe.stats()
    scale = np.abs(reference.logits).max()
    for logits in answers:
        assert np.abs(logits - reference.logits).max() / scale < 1e-3
    for row in ours["slices"]:
        assert row["runs_on"] == "cpu" or "emulated on host" in row["runs_on"]


def test_every_asked_device_of_two_vendors_works(smollm2: Path, reference: Reference) -> None:
    """Three vendors in one run, with blocks on each: the planner may leave a slow device idle, so say it by hand."""
    with plait.compile(smollm2, "h100,mi300,v5e", dtype="float32", layers=(12, 12, 6)) as pipe:
        assert [item.blocks for item in pipe.plan.slices] == [(0, 12), (12, 24), (24, 30)]
        assert pipe.generate_ids(reference.prompts, NEW_TOKENS) == reference.greedy


def test_one_backend_split_any_way_gives_the_same_bits(smollm2: Path, reference: Reference) -> None:
    splits = [(30,), (11, 19), (10, 13, 7), (3, 5, 4, 6, 2, 8, 2)]
    answers = []
    for layers in splits:
        targets = f"{len(layers)}xh100"
        with plait.compile(smollm2, targets, dtype="float32", layers=layers, run={"in_process": True}) as pipe:
            assert len(pipe.plan.slices) == len(layers)
            answers.append(pipe.logits(reference.text))
    for other in answers[1:]:
        np.testing.assert_array_equal(other, answers[0])


def test_text_in_text_out(smollm2: Path, tmp_path: Path) -> None:
    with plait.compile(smollm2, ["h100", "mi300"], output=tmp_path / "m.plait", dtype="float32") as pipe:
        one = pipe.generate(PROMPTS[0], max_tokens=8)
        assert "Paris" in one
        assert pipe.generate([PROMPTS[0], PROMPTS[3]], max_tokens=8)[0] == one
        assert pipe.generate(pipe.encode(PROMPTS[0]), max_tokens=8) == one
        assert "".join(pipe.stream(PROMPTS[0], max_tokens=8)) == one
    with plait.open(tmp_path / "m.plait", share_workers=True) as pipe:
        assert pipe.generate(PROMPTS[0], max_tokens=8) == one
        assert "Paris" in pipe.generate("What is the capital of France?", max_tokens=16, chat=True)


def test_many_requests_at_once_equal_one_by_one(smollm2: Path) -> None:
    """64 ragged requests: lengths 1 to 64, 4 to 11 new tokens, more than fit at once."""
    rng = np.random.default_rng(7)
    with plait.compile(smollm2, "h100,mi300", dtype="float32") as pipe:
        prompts = [rng.integers(0, 49152, size).tolist() for size in range(1, 65)]
        requests = [pipe._pipeline.submit(ids, max_tokens=4 + i % 8) for i, ids in enumerate(prompts)]
        together = [list(request.result().token_ids) for request in requests]
        alone = [pipe.generate_ids([ids], 4 + i % 8)[0] for i, ids in enumerate(prompts)]
    assert together == alone


def test_driver_imports_no_vendor_wheel(smollm2: Path, tmp_path: Path) -> None:
    code = f"""
import sys, plait
with plait.open({str(tmp_path / "m.plait")!r}) as pipe:
    pipe.generate("Hello", max_tokens=2)
assert not {{"torch", "jax", "triton"}} & sys.modules.keys()
"""
    plait.compile_artifact(smollm2, "h100,mi300", output=tmp_path / "m.plait", dtype="float32")
    done = subprocess.run([sys.executable, "-W", "error", "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert not list(Path("/dev/shm").glob("*plait*"))
