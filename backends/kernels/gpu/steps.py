"""What whole steps of a slice would take: the launches of a plan for one batch, each predicted."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import prod
from typing import Any

import numpy as np

from plait.backends.base import Batch, CompileOptions
from plait.backends.kernels.gpu import launch
from plait.backends.kernels.gpu.batch import Facts
from plait.backends.kernels.gpu.build import Binary
from plait.backends.kernels.gpu.choose import Request, predict
from plait.backends.kernels.gpu.expression import evaluate
from plait.backends.kernels.gpu.launch import LaunchPlan, Step
from plait.backends.kernels.gpu.table import KERNELS


def steps(plan: LaunchPlan, code: Mapping[str, Binary], options: CompileOptions) -> list[dict[str, Any]]:
    """The predicted time of the largest decode step, every sequence at its longest, and of the largest prefill, one
    prompt: their launches one after the other. `bound_by` is what most of the time is lost to."""
    sequences, tokens = min(plan.bounds.sequences, plan.bounds.tokens), plan.bounds.tokens
    prompt = min(tokens, options.max_context_tokens)
    return [
        {"phase": "decode", **_step(plan, code, batch([1] * sequences, [options.max_context_tokens] * sequences))},
        {"phase": "prefill", **_step(plan, code, batch([prompt], [prompt]))},
    ]


def batch(new: Sequence[int], keys: Sequence[int]) -> Batch:
    """Sequences with so many new tokens and so many keys, the best next token wanted of each. Without page tables."""
    starts = np.cumsum([0, *new]).astype(np.int32)
    return Batch(
        tokens=np.zeros(starts[-1], np.int32),
        positions=np.concatenate([np.arange(k - n, k, dtype=np.int32) for n, k in zip(new, keys, strict=True)]),
        query_starts=starts,
        kv_lens=np.array(keys, np.int32),
        page_tables={},
        logit_rows=starts[1:] - np.int32(1),
        greedy=True,
    )


def _step(plan: LaunchPlan, code: Mapping[str, Binary], asked: Batch) -> dict[str, Any]:
    facts = Facts(asked, plan.bounds.page_tokens)
    facts.tiles(sorted({fact.queries for fact in plan.facts.values() if fact.queries is not None}))
    symbols = facts.symbols | {"R": facts.symbols["A"]}
    times, flops, nbytes, launches = dict[str, float](), 0, 0, 0
    for step in plan.steps:
        chosen = next(choice for choice in step.choices if choice.most is None or symbols[step.rows] <= choice.most)
        binary = plan.binaries[chosen.binary]
        names = symbols | _names(step, symbols)
        if not evaluate(step.when, symbols) or not _blocks(binary, names):
            continue
        request = Request(KERNELS[binary.kernel], binary.types, binary.constants, plan.arch, None, names)
        p = predict(request, binary.variant, code[binary.file].facts)
        launches, flops, nbytes = launches + 1, flops + p.flops, nbytes + p.nbytes
        times[p.bound_by] = times.get(p.bound_by, 0.0) + p.total_us
    return {
        "tokens": asked.token_count,
        "sequences": asked.sequence_count,
        "keys": int(asked.kv_lens.max()),
        "launches": launches,
        "flops": flops,
        "bytes": nbytes,
        "predicted_us": round(sum(times.values()), 1),
        "bound_by": max(times, key=lambda name: times[name]),
    }


def _names(step: Step, symbols: Mapping[str, int]) -> dict[str, int]:
    """What a launch's grid and costs depend on beside the batch: its whole numbers."""
    words = {**step.names, **step.scalars}
    return {name: value if isinstance(value, int) else evaluate(value, symbols)
            for name, value in words.items() if not isinstance(value, float)}  # fmt: skip


def _blocks(binary: launch.Binary, names: Mapping[str, int]) -> int:
    """How many blocks are launched."""
    settled = {name: int(value) for name, value in (binary.constants | binary.tile).items() if isinstance(value, int)}
    return prod(evaluate(axis, {**settled, **names}) for axis in binary.grid)
