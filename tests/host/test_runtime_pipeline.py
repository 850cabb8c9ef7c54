"""Pipelines of the fake model: whatever the batches, slices, workers and chunks, the tokens stay the reference's."""

from __future__ import annotations

import dataclasses
import random
import re
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from plait.errors import ArtifactError, FitError, UsageError, UserError, WorkerError
from plait.runtime.pipeline import Pipeline
from plait.runtime.sampler import SamplingParams
from plait.spec import Boundary, Manifest
from tests.fakes import FIRST_FAULT, VOCAB, make_artifact, reference, reference_logits

WINDOWS = (None, 8, None)
PROMPT = [5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15, 16, 17, 18, 19, 20]


def ragged(count: int, seed: int) -> list[tuple[list[int], int]]:
    rng = random.Random(seed)
    return [([rng.randrange(FIRST_FAULT) for _ in range(rng.randint(1, 30))], rng.randint(1, 20)) for _ in range(count)]


def open_fake(folder: Path, artifact: dict[str, Any] | None = None, **options: Any) -> Pipeline:
    return Pipeline.open(make_artifact(folder, WINDOWS, **artifact or {}), folder, **options)


@pytest.fixture(scope="module")
def workers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pipeline]:
    with open_fake(tmp_path_factory.mktemp("workers"), in_flight=2) as pipe:
        yield pipe


@pytest.fixture
def local(tmp_path: Path) -> Iterator[Pipeline]:
    with open_fake(tmp_path, in_process=True) as pipe:
        yield pipe


@pytest.mark.parametrize(
    "options",
    [
        {"in_process": True},
        {"in_process": True, "in_flight": 3},
        {},
        {"in_flight": 2},
        {"in_flight": 3, "debug": True},
        {"share_workers": True, "max_sequences": 3},
    ],
    ids=str,
)
def test_64_ragged_requests_give_the_tokens_of_one_by_one(tmp_path: Path, options: dict[str, Any]) -> None:
    asked = ragged(64, seed=len(str(options)))
    # Few pages, so that they are used again and again; the middle layer's are a ring.
    with open_fake(tmp_path, {"max_kv_tokens": 240, "environments": ("a", "a", "b")}, **options) as pipe:
        requests = [pipe.submit(ids, max_tokens=new) for ids, new in asked]
        for (ids, new), request in zip(asked, requests, strict=True):
            assert list(request.result(60).token_ids) == reference(ids, new, WINDOWS)
        stats = pipe.stats()
    assert all(pool["used"] == 0 for pool in stats["kv_pages"].values())
    assert stats["tokens"] == sum(new for _, new in asked)
    assert stats["prompt_tokens"] == sum(len(ids) for ids, _ in asked)
    pids = [part["executable"]["pid"] for part in stats["slices"]]
    assert len(set(pids)) == (1 if "in_process" in options else 2 if "share_workers" in options else 3)


@pytest.mark.parametrize("cuts", [(), (1,), (1, 2), (1, 2, 3, 4, 5, 6)])
def test_the_number_of_slices_changes_nothing(tmp_path: Path, cuts: tuple[int, ...]) -> None:
    windows = (None, 8, 3, None, 8, None, 5)
    names = tuple(f"d{i}" for i in range(7))
    manifest = make_artifact(tmp_path, windows, cuts, devices=names, environments=names)
    with Pipeline.open(manifest, tmp_path, in_process=True) as pipe:
        assert len(pipe.stats()["slices"]) == len(cuts) + 1
        assert pipe.generate_ids([PROMPT], max_tokens=30) == [reference(PROMPT, 30, windows)]


def with_skip(manifest: Manifest) -> Manifest:
    """The last slice also reads `skip`, which the first one writes."""
    first, middle, last = manifest.slices
    skip = dataclasses.replace(first.outputs[0], name="skip")
    first = dataclasses.replace(first, outputs=(*first.outputs, skip))
    last = dataclasses.replace(last, inputs=(*last.inputs, skip))
    return dataclasses.replace(manifest, slices=(first, middle, last))


@pytest.mark.parametrize("in_process", [True, False])
def test_tensors_that_skip_a_slice_arrive(tmp_path: Path, in_process: bool) -> None:
    manifest = with_skip(make_artifact(tmp_path, WINDOWS, skip=True))
    with Pipeline.open(manifest, tmp_path, in_process=in_process) as pipe:
        assert pipe.generate_ids([PROMPT], max_tokens=5) == [reference(PROMPT, 5, WINDOWS)]


def test_tensors_that_are_missing_are_named(tmp_path: Path) -> None:
    manifest = with_skip(make_artifact(tmp_path, WINDOWS))
    with (
        Pipeline.open(manifest, tmp_path, in_process=True) as pipe,
        pytest.raises(WorkerError, match=r"h100 \(slice 0\) did not return 'skip'"),
    ):
        pipe.generate_ids([PROMPT])
    plain = make_artifact(tmp_path, WINDOWS).slices[0]
    unwritten = dataclasses.replace(manifest, slices=(plain, *manifest.slices[1:]))
    with pytest.raises(ArtifactError, match=r"v5e \(slice 2\) reads 'skip' as float32 \['tokens', 4\]"):
        Pipeline.open(unwritten, tmp_path)


@pytest.mark.parametrize("dtype", ["bfloat16", "float64"])
def test_boundaries_of_any_dtype_cross_unchanged(tmp_path: Path, dtype: str) -> None:
    with open_fake(tmp_path, {"dtype": dtype}, in_process=True) as pipe:
        expected = pipe.logits(PROMPT)
    with open_fake(tmp_path, {"dtype": dtype}, debug=True) as pipe:
        np.testing.assert_array_equal(pipe.logits(PROMPT), expected)


@pytest.mark.parametrize("chunk", [None, 1, 5])
def test_logits_of_every_position(workers: Pipeline, local: Pipeline, chunk: int | None) -> None:
    ids = [*PROMPT, *PROMPT]
    for pipe in (workers, local):
        logits = pipe.logits(ids, chunk)
        assert logits.dtype == np.float32
        np.testing.assert_array_equal(logits, np.array(reference_logits(ids, WINDOWS), np.float32))


def test_large_boundaries_and_logits_go_through_shared_memory(tmp_path: Path) -> None:
    ids = [i % FIRST_FAULT for i in range(300)]
    with open_fake(tmp_path, {"max_step_tokens": 300, "dtype": "float64"}) as pipe:
        logits = pipe.logits(ids)
    assert logits.nbytes > 1 << 16
    np.testing.assert_array_equal(logits, np.array(reference_logits(ids, WINDOWS), np.float32))


def test_the_logits_behind_generated_tokens(workers: Pipeline) -> None:
    result = workers.submit(PROMPT, max_tokens=5, want_logits=True).result(30)
    assert result.logits is not None
    expected = reference_logits([*PROMPT, *result.token_ids[:-1]], WINDOWS)[len(PROMPT) - 1 :]
    np.testing.assert_array_equal(result.logits, np.array(expected, np.float32))
    assert result.ttft_s is not None
    assert 0 < result.ttft_s <= result.total_s


@pytest.mark.parametrize("other", [SamplingParams(), SamplingParams(9000.0, seed=1)])
def test_greedy_tokens_do_not_depend_on_what_else_is_asked(workers: Pipeline, other: SamplingParams) -> None:
    """Slices return tokens where every row is greedy, else logits."""
    requests = [workers.submit(PROMPT, params, max_tokens=12) for params in (SamplingParams(), other)]
    assert list(requests[0].result(30).token_ids) == reference(PROMPT, 12, WINDOWS)
    requests[1].result(30)


def test_samples_do_not_depend_on_the_batch(workers: Pipeline, local: Pipeline) -> None:
    params = [SamplingParams(9000.0, top_p=0.9, seed=seed) for seed in range(6)]
    alone = [local.generate_ids([PROMPT], one, max_tokens=12)[0] for one in params]
    together = [workers.submit(PROMPT, one, max_tokens=12) for one in params]
    assert [list(request.result(30).token_ids) for request in together] == alone
    assert len({tuple(ids) for ids in alone}) == len(params)


def test_tokens_come_one_by_one_and_an_eos_ends(workers: Pipeline) -> None:
    expected = reference(PROMPT, 12, WINDOWS)
    stop = expected[6]
    request = workers.submit(PROMPT, max_tokens=12, eos_ids=[stop])
    assert list(request) == reference(PROMPT, 12, WINDOWS, [stop])
    assert list(request) == list(request.result().token_ids), "a second reader sees the same"
    assert request.result().finish == "eos"
    assert request.done


def test_the_model_s_own_eos_tokens_are_the_default(tmp_path: Path) -> None:
    stop = reference(PROMPT, 4, WINDOWS)[3]
    with open_fake(tmp_path, {"eos_token_ids": (stop,)}, in_process=True) as pipe:
        assert pipe.generate_ids([PROMPT], max_tokens=9) == [reference(PROMPT, 9, WINDOWS, [stop])]
        assert pipe.generate_ids([PROMPT], max_tokens=9, eos_ids=[]) == [reference(PROMPT, 9, WINDOWS)]


def test_a_cancelled_request_ends_and_the_others_go_on(tmp_path: Path) -> None:
    with open_fake(tmp_path, {"sleep_s": 0.01}, in_flight=2) as pipe:
        request, other = pipe.submit(PROMPT, max_tokens=400), pipe.submit(PROMPT, max_tokens=20)
        got = []
        for token in request:
            got.append(token)
            if len(got) == 3:
                request.cancel()
        result = request.result(5)
        assert result.finish == "cancelled"
        assert list(result.token_ids) == got == reference(PROMPT, len(got), WINDOWS)
        assert len(got) < 20
        request.cancel()
        assert list(other.result(30).token_ids) == reference(PROMPT, 20, WINDOWS)
        assert pipe.stats()["kv_pages"]["full"]["used"] == 0


def test_many_threads_may_ask(workers: Pipeline) -> None:
    answers: dict[int, list[int]] = {}

    def ask(i: int) -> None:
        for _ in range(20):
            assert len(workers.stats()["slices"]) == 3
        answers[i] = workers.generate_ids([[i, *PROMPT[:i]]], max_tokens=6)[0]

    threads = [threading.Thread(target=ask, args=(i,)) for i in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert answers == {i: reference([i, *PROMPT[:i]], 6, WINDOWS) for i in range(8)}


def test_stats_say_where_it_runs_and_how_long_it_took(workers: Pipeline) -> None:
    before = workers.stats()
    workers.generate_ids([PROMPT], max_tokens=4)
    stats = workers.stats()
    assert stats["tokens"] - before["tokens"] == 4
    assert stats["requests"] - before["requests"] == 1
    assert [part["slice"] for part in stats["slices"]] == ["h100 (slice 0)", "mi300 (slice 1)", "v5e (slice 2)"]
    assert [part["runs_on"] for part in stats["slices"]] == ["h100 (fake)", "mi300 (fake)", "v5e (fake)"]
    for part, earlier in zip(stats["slices"], before["slices"], strict=True):
        assert part["steps"] == stats["steps"] == part["executable"]["calls"]
        assert part["busy_s"] > earlier["busy_s"]
        assert part["hop_s"] > earlier["hop_s"]


@pytest.mark.parametrize("module", ["plait.runtime.pipeline", "plait.runtime.worker"])
def test_neither_driver_nor_worker_imports_a_vendor_wheel(module: str) -> None:
    code = f"import {module}, sys; print([m for m in ('torch', 'jax', 'triton', 'xdsl', 'rich') if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


@pytest.mark.parametrize(
    ("ids", "options", "code"),
    [
        ([], {}, "empty-prompt"),
        ([1, VOCAB], {}, "token-range"),
        ([-1], {}, "token-range"),
        ([1], {"max_tokens": 0}, "max-tokens"),
        ([1], {"max_tokens": 2.5}, "max-tokens"),
        ([1], {"max_tokens": True}, "max-tokens"),
        ([1], {"max_tokens": None}, "max-tokens"),
        ([1], {"max_tokens": "5"}, "max-tokens"),
        ([1], {"max_tokens": 512}, "too-many-positions"),
    ],
)
def test_requests_that_make_no_sense_are_refused(
    workers: Pipeline, ids: list[int], options: dict[str, Any], code: str
) -> None:
    with pytest.raises(UserError) as caught:
        workers.submit(ids, **options)
    assert caught.value.code == code
    assert workers.generate_ids([PROMPT], max_tokens=3) == [reference(PROMPT, 3, WINDOWS)], "the others go on"


@pytest.mark.parametrize("chunk", [0, 1.5, "2"])
def test_a_chunk_is_a_whole_number(workers: Pipeline, chunk: Any) -> None:
    with pytest.raises(UsageError, match="chunk is"):
        workers.logits(PROMPT, chunk)


@pytest.mark.parametrize(("prompt", "hint"), [(500, "at most 12 new tokens"), (600, "shorten the prompt$")])
def test_a_request_beyond_the_positions_says_what_is_left(workers: Pipeline, prompt: int, hint: str) -> None:
    with pytest.raises(UserError) as caught:
        workers.submit([1] * prompt, max_tokens=64)
    assert re.search(hint, caught.value.hint)


def test_a_request_that_can_never_fit_is_refused_at_once(tmp_path: Path) -> None:
    with (
        open_fake(tmp_path, {"max_kv_tokens": 40}, in_process=True) as pipe,
        pytest.raises(FitError, match="needs 11 KV pages of 4 tokens, the pipeline has 10") as caught,
    ):
        pipe.generate_ids([[1], PROMPT], max_tokens=25)
    assert "may hold 40 tokens" in caught.value.hint and f"--context {len(PROMPT) + 25} " in caught.value.hint


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"in_flight": 0}, "in_flight is 0"),
        ({"threads": 0}, "threads is 0"),
        ({"threads": 100_000}, "threads is 100000"),
        ({"max_sequences": 17}, "max_sequences is 17"),
        ({"timeout_s": 0}, "timeout_s is 0"),
        ({"start_timeout_s": -1.0}, "start_timeout_s is -1.0"),
        ({"pythons": {"h10": sys.executable}}, "'h10', an interpreter"),
        ({"pythons": {"h100": "/no/such/python"}}, "'/no/such/python' is not a program"),
    ],
)
def test_options_out_of_range_are_named(tmp_path: Path, options: dict[str, Any], said: str) -> None:
    with pytest.raises(UsageError, match=said):
        open_fake(tmp_path, **options)


def test_an_artifact_without_kv_memory_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ArtifactError, match="no KV page"):
        open_fake(tmp_path, {"max_kv_tokens": 3})


def test_a_slice_that_breaks_its_boundary_is_named(tmp_path: Path) -> None:
    manifest = make_artifact(tmp_path, WINDOWS)
    wide = tuple(
        dataclasses.replace(
            part,
            inputs=tuple(Boundary("hidden", (None, 5), "float32") for _ in part.inputs),
            outputs=tuple(Boundary("hidden", (None, 5), "float32") if b.name == "hidden" else b for b in part.outputs),
        )
        for part in manifest.slices
    )
    with Pipeline.open(dataclasses.replace(manifest, slices=wide), tmp_path, in_process=True) as pipe:
        request = pipe.submit([1, 2, 3])
        with pytest.raises(WorkerError, match=r"h100 \(slice 0\) returned 'hidden' as float32 \[3, 4\].* \[3, 5\]"):
            request.result(10)
