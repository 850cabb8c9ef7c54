"""Every format that quantisers write, against transformers on the weights that it means by its definition."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

import plait
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
