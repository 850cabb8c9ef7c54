"""What a step is said to hold is what torch allocates for it on the host."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from xdsl.dialects.builtin import ModuleOp

from plait.assemble.measure.slices import Loader, batch
from plait.backends.base import Batch
from plait.cost_models.activations import HOST, gathered_tokens, peak
from plait.cost_models.memory import MemoryModel
from plait.cost_models.profile import profile
from plait.frontend.families import read_config
from plait.frontend.families.decoder import build_decoder
from plait.ir.passes import SLICE_PIPELINE, run_passes
from plait.registry import load_backend
from plait.spec import Workload
from tests.host.test_every_config_key import written
from tests.ir_models import Shape, build
from tests.planning import device

PAGE = 16


def allocated(module: ModuleOp, step: Batch, folder: Path) -> int:
    """The most bytes that tensors of one step take at once, as torch's own records say."""
    run_passes(module, SLICE_PIPELINE)
    made = Loader(load_backend("cpu"), "cpu:cpu", "cpu", folder, 1)(module, [step])
    made.step(step, {})
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as record:
        made.step(step, {})
    made.close()
    events = [event for event in record.profiler.kineto_results.events() if event.name() == "[memory]"]
    now = most = 0
    for event in sorted(events, key=lambda event: event.start_ns()):
        now += event.nbytes()
        most = max(most, now)
    return most


def family(name: str, dtype: str, **sizes: int) -> ModuleOp:
    config = written(name) | sizes | {"vocab_size": 256}
    return build_decoder(read_config(config, name), dtype)


SIZES = {"hidden_size": 256, "intermediate_size": 640, "head_dim": 64}
MODULES = {
    "ffn": lambda dtype: build(Shape(2, 256, 4, 2, 64, 640, 256, dtype=dtype)),
    "wide heads": lambda dtype: build(Shape(2, 128, 12, 2, 64, 160, 256, dtype=dtype)),
    "narrow ffn": lambda dtype: build(Shape(2, 512, 8, 8, 64, 96, 256, dtype=dtype)),
    "biases": lambda dtype: build(Shape(2, 256, 4, 2, 64, 640, 256, bias=True, tied=False, dtype=dtype)),
    "qwen3": lambda dtype: family("qwen3", dtype, **SIZES),
    "olmo2": lambda dtype: family("olmo2", dtype, **SIZES),
    "cohere-qk-norm": lambda dtype: family("cohere-qk-norm", dtype, **SIZES),
    "stablelm": lambda dtype: family("stablelm", dtype, hidden_size=256, intermediate_size=640),
    "gpt_neox": lambda dtype: family("gpt_neox", dtype, hidden_size=512, intermediate_size=1536),
    "gpt2": lambda dtype: family("gpt2", dtype, n_embd=512, n_inner=1536),
}


PROMPTS = [
    pytest.param(
        name, dtype, marks=[] if (name, dtype) in {("ffn", "float32"), ("ffn", "bfloat16")} else pytest.mark.slow
    )
    for name in MODULES
    for dtype in ("float32", "bfloat16")
]


@pytest.mark.parametrize(("name", "dtype"), PROMPTS)
def test_the_peak_of_a_prompt(name: str, dtype: str, tmp_path: Path) -> None:
    tokens = 384
    module = MODULES[name](dtype)
    model = profile(module)
    said = max(peak(unit.facts.held, HOST, tokens, 0) or 0 for unit in model.units)
    # One row of scores, and the kernels' own scratch of some KiB, are beside it.
    assert allocated(module, batch([tokens], [tokens]), tmp_path) == pytest.approx(said, rel=0.03)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_peak_of_decoding_is_the_kv_of_one_layer(dtype: str, tmp_path: Path) -> None:
    module = build(Shape(2, 64, 8, 2, 64, 64, 256, dtype=dtype))
    requests, tokens = 8, 500
    said = requests * gathered_tokens(tokens, PAGE) * 2 * 2 * 64 * (4 if dtype == "float32" else 2)
    found = allocated(module, batch([1] * requests, [tokens] * requests), tmp_path)
    assert found == pytest.approx(said, rel=0.03)


def test_memory_on_the_host_is_what_the_kernels_hold() -> None:
    module = build(Shape(2, 256, 4, 2, 64, 640, 256))
    model, host = profile(module), device("cpu", 10**9)
    memory = MemoryModel(model, Workload("w", 100, 28, 4), PAGE, 64)
    on_host, elsewhere = (memory.activations_on(device(name, 10**9))[0, 2] for name in ("cpu", "h100"))
    assert host.backend != "cpu" or on_host <= elsewhere
    gathered = 4 * 128 * 2 * 2 * 64 * 4
    block = model.blocks[0].facts.held
    attention = next(op for op in block if op.gathers)
    most = max(op.alive + op.results + HOST[op.name](op) for op in block)
    at_attention = attention.alive + attention.results + HOST[attention.name](attention)
    assert int(memory._host_peaks[0, 2]) == max(64 * most, 64 * at_attention + gathered)  # type: ignore[index]


def test_what_is_not_known_is_bounded_by_all_results() -> None:
    module = family("qwen3_moe", "float32", hidden_size=64, moe_intermediate_size=64, intermediate_size=64)
    memory = MemoryModel(profile(module), Workload("w", 100, 28, 4), PAGE, 64)
    assert memory._host_peaks is None


def test_values_that_pass_a_unit_by_are_counted() -> None:
    """A block's residual stands while its attention runs; every op holds what it makes."""
    for unit in profile(build(Shape(3))).blocks:
        for op, after in pairwise(unit.facts.held):
            assert op.alive >= 0 and after.alive > 0
        attention = next(op for op in unit.facts.held if op.gathers)
        assert attention.alive == (16 + (16 + 8 + 8) + 16 + 8) * 4  # residual; q, k, v in one piece; q and k turned


@pytest.mark.parametrize("backend", ["cpu", "cuda"])
@pytest.mark.parametrize("memory_bytes", [100_000, 400_000, 3_000_000])
def test_the_largest_batch_by_brute_force(backend: str, memory_bytes: int) -> None:
    model = profile(build(Shape(2, 32, 4, 2, 8, 48, 64, windows=(None, 20))))
    x = replace(device("x", memory_bytes), backend=backend)
    work = Workload("w", 40, 24, 3)
    for start, end in ((0, 2), (0, 1), (1, 2)):

        def fits(requests: int, tokens: int, start: int = start, end: int = end) -> bool:
            asked = Workload("w", tokens - 1, 1, requests)
            return bool(MemoryModel(model, asked, 4, 16).needed(x)[start, end] <= memory_bytes)

        found = MemoryModel(model, work, 4, 16).max_requests(start, end, x)
        assert found == max((n for n in range(1, 800) if fits(n, 64)), default=0)
        context = MemoryModel(model, work, 4, 16).max_context_tokens(start, end, x)
        if start == 0:
            assert context == max((4 * n for n in range(1, 2000) if fits(3, 4 * n)), default=0)
        else:
            assert context is None or not fits(3, context + 4)
