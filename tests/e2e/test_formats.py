"""Every format that quantisers write, against transformers on the weights that it means by its definition."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

import plait
from plait.backends.cuda import BACKEND as CUDA
from plait.backends.kernels.gpu.interpreted import Interpreted
from plait.backends.weights import read_weight
from plait.frontend.checkpoint import open_checkpoint
from plait.frontend.lower import lower
from plait.ir import weights
from tests.checkpoints import random_ids, reference_logits, save
from tests.quantised_checkpoints import FORMATS, save_quantised

#: All formats on one device, and some on the others, which read weights through the same code.
CASES = [
    *((form, "cpu") for form in FORMATS),
    *((form, "h100") for form in ("gptq-order", "nvfp4")),
    *((form, "v5e") for form in ("awq", "mxfp4")),
    *(
        pytest.param(form, device, marks=pytest.mark.slow)
        for device in ("h100", "mi300", "v5e")
        for form in FORMATS
        if (form, device) not in (("gptq-order", "h100"), ("nvfp4", "h100"), ("awq", "v5e"), ("mxfp4", "v5e"))
    ),
]


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save(
        tmp_path_factory.mktemp("formats") / "m",
        num_hidden_layers=2,
        head_dim=16,
        intermediate_size=128,
        dtype="float32",
    )


@pytest.mark.parametrize(("form", "device"), CASES)
def test_logits_are_those_of_the_dequantised_weights(form: str, device: str, source: Path, tmp_path: Path) -> None:
    """In two slices, in one step and in chunks."""
    ids = random_ids(24)
    folder = save_quantised(tmp_path / "q", tmp_path / "wide", source, form)
    expected = reference_logits(tmp_path / "wide", ids)
    limit = 1e-5 * np.abs(expected).max()
    # What the quantisation itself changes is far beyond that limit.
    assert np.abs(reference_logits(source, ids) - expected).max() > 100 * limit
    out = tmp_path / "m.plait"
    plait.compile_artifact(folder, f"2x{device}", output=out, layers=(1, 1))
    report = json.loads(next(out.glob("slices/0-*/report.json")).read_text())
    assert "dequantised" in report["weights"] or "kept as they are stored" in report["weights"]
    with plait.open(out, in_process=True) as pipe:
        assert np.abs(pipe.logits(ids) - expected).max() < limit
        assert np.abs(pipe.logits(ids, chunk=7) - expected).max() < limit


#: Form -> what an H100's kernels are given: codes as they are stored, or numbers where there is no kernel.
HELD = {
    "gptq": {"u4"},
    "awq": {"u4"},
    "pack-4": {"u4"},
    "int8-channel": {"i8"},
    "gptq-order": set(),
    "modelopt-fp8": {"e4m3fn"},
    "nvfp4": set(),
}


@pytest.mark.parametrize(
    "form", [form if form == "gptq" else pytest.param(form, marks=pytest.mark.slow) for form in HELD]
)
def test_kernels_compute_in_the_formats_they_know(
    form: str, source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And of the others are given the numbers that they mean."""
    monkeypatch.setattr("plait.backends.cuda.BACKEND", Interpreted(CUDA))
    ids, out = random_ids(9), tmp_path / "m.plait"
    folder = save_quantised(tmp_path / "q", tmp_path / "wide", source, form)
    expected = reference_logits(tmp_path / "wide", ids)
    plait.compile_artifact(folder, "h100", output=out)
    (slice_,) = out.glob("slices/*")
    weights = json.loads((slice_ / "launch.json").read_text())["weights"].values()
    assert {weight["dtype"] for weight in weights if weight["part"] == "codes"} == HELD[form]
    with plait.open(out, in_process=True) as pipe:
        assert np.abs(pipe.logits(ids) - expected).max() < 1e-5 * np.abs(expected).max()


@pytest.mark.parametrize("form", FORMATS)
def test_heads_that_are_rows_of_one_matrix(form: str, tmp_path: Path) -> None:
    """Latent attention cuts `kv_b_proj` into a stack of the heads' matrices. Formats that store a matrix as (in, out)
    have no head by itself."""
    sizes = {"kv_lora_rank": 64, "q_lora_rank": 64, "v_head_dim": 16, "intermediate_size": 128}
    source = save(tmp_path / "m", "deepseek_v3", num_hidden_layers=1, **sizes)
    folder = save_quantised(tmp_path / "q", tmp_path / "wide", source, form)
    quantised, wide = open_checkpoint(folder), open_checkpoint(tmp_path / "wide")
    held = weights(lower(wide, "float32"))
    assert held.keys() == weights(lower(quantised, "float32")).keys()
    assert quantised.weights is not None and wide.weights is not None
    for name in held:
        got, expected = (read_weight(one[name], "float32") for one in (quantised.weights, wide.weights))
        np.testing.assert_allclose(got, expected, atol=1e-6, err_msg=name)
