"""The machine code of one whole block of a real model's shape, chip by chip: what the tile choice really picks.

Each kernel alone is held to this in `test_gpu_gemm_code` and `test_gpu_streams_code`; here nobody says which tile.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest

from plait.backends.base import CompileOptions
from plait.ir.passes import SLICE_PIPELINE, run_passes
from plait.registry import load_backend
from plait.report.code import matrix_text
from tests.ir_models import Shape, build

#: A block, embedding and head of Llama-3.1-8B's widths; a smaller vocabulary changes no kernel.
SHAPE = Shape(
    blocks=1, hidden=4096, heads=32, kv_heads=8, head_dim=128, ffn=14336, vocabulary=32000, tied=False, dtype="bfloat16"
)

#: What multiplies matrices of many rows there.
MATRIX = {"cuda:sm_90a": "wgmma", "rocm:gfx942": "mfma", "cuda:sm_100a": "tcgen05", "rocm:gfx950": "mfma"}

#: Kernels that are bound by what they load while there are few rows.
LOADING = ("gemm", "gemm_gated", "attention_decode")


@pytest.mark.parametrize(
    "target",
    ["cuda:sm_90a", *(pytest.param(name, marks=pytest.mark.slow) for name in list(MATRIX)[1:])],
)
def test_the_tiles_chosen_for_a_real_shape_use_the_chip(target: str) -> None:
    module = build(SHAPE)
    run_passes(module, SLICE_PIPELINE)
    compiled = load_backend(target.partition(":")[0]).compile(module, target, CompileOptions(device_code=True))
    rows: list[Mapping[str, Any]] = compiled.report["kernels"]  # type: ignore[assignment]
    assert {row["kernel"] for row in rows} >= {*LOADING, "attention_prefill", "rope_write", "rms_norm", "embed"}
    for row in rows:
        name = f"{row['kernel']} {row['sizes']} {row['rows']}"
        assert row["checks"]["failed"] == {}, name
        assert row["spills"] == 0, name
        if row["kernel"] in LOADING:
            assert row["widest_load_bytes"] == 16, name
            assert row["matrix_instruction"] is not None, name
        if row["kernel"] == "attention_prefill" or (row["kernel"].startswith("gemm") and _many(row)):
            assert matrix_text(row["matrix_instruction"]) == MATRIX[target], name


def _many(row: Mapping[str, Any]) -> bool:
    """Whether the launch has the rows of a prompt: the head only ever has those of the sequences."""
    return row["rows"] == "any" and row["op"] != "plait.logits"
