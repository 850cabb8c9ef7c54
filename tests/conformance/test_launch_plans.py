"""The launch plans of cuda and rocm on every conformance case: what a GPU is sent, run by Triton's interpreter.

It runs a thousand times slower than a GPU, so a plain run takes a few cases of every kind, and CI a share of the rest.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from plait.backends.conformance import Case, cases, run_case
from plait.backends.cuda import BACKEND as CUDA
from plait.backends.kernels.gpu.interpreted import Interpreted
from plait.backends.rocm import BACKEND as ROCM

SUBJECTS = {"cuda": (Interpreted(CUDA), "cuda:sm_90a"), "rocm": (Interpreted(ROCM), "rocm:gfx942")}

#: Always run: what the other cases are made of, and a whole model on each.
ALWAYS = {
    "float32": (
        "op-rms_norm",
        "op-linear-bias",
        "op-logits",
        "op-rms_norm-heads-apart",
        "op-rope-longrope-part-long",
        "greedy-ties",
        "attention-gqa3-pages16",
        "attention-window8-pages4",
        "op-router-groups-top2-ties",
        "attention-latent-heads6-pages4",
    ),
    "bfloat16": (
        "op-add_rms_norm",
        "op-linears",
        "op-layer_norm-bias",
        "op-embed_positions",
        "attention-softcap-sinks-pages4",
        "quantised-linear-u4-zeros",
        "model-window-and-full",
    ),
    "float16": (
        "op-rope-llama3",
        "op-logits-softcap",
        "quantised-linear-e4m3fn-tensor",
        "kv-e4m3fn",
        "kv-latent-e4m3fn-codes",
    ),
}

#: Whole models are made of what has cases of its own on both: of these each dtype runs on one.
WHOLE = re.compile("(quantised-|kv-)?(model|slices|chunks|pages-|greedy|unfused)")
ONE = {"float32": "cuda", "bfloat16": "rocm", "float16": "cuda"}


def _every() -> Iterator[object]:
    for name, (backend, target) in SUBJECTS.items():
        for case in cases(backend.capability(target).dtypes):
            if WHOLE.match(case.name) and ONE[case.dtype] != name:
                continue
            marks = () if case.name in ALWAYS[case.dtype] else (pytest.mark.slow,)
            yield pytest.param(name, case, id=f"{name}-{case}", marks=marks)


def test_what_always_runs_is_there() -> None:
    known = {(case.dtype, case.name) for case in cases(tuple(ALWAYS))}
    assert {(dtype, name) for dtype, names in ALWAYS.items() for name in names} <= known


@pytest.mark.timeout(1200)
@pytest.mark.parametrize(("name", "case"), list(_every()))
def test_launch_plan(name: str, case: Case, tmp_path: Path) -> None:
    backend, target = SUBJECTS[name]
    run_case(case, backend, target, tmp_path)
