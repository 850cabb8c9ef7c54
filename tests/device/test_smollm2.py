"""A whole real model on the GPU, against transformers on the host.

The model is in PLAIT_SMOLLM2, in models/smollm2 (`make demo` puts it there), or is pulled.
"""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

import plait
from plait.errors import PlaitError
from plait.pull import pull
from tests.device.machine import Machine
from tests.device.prepared import RecordedError
from tests.e2e.conftest import NEW_TOKENS, Reference
from tests.e2e.conftest import reference as reference  # a fixture

pytestmark = pytest.mark.device


@pytest.fixture(scope="session")
def smollm2(gpu: Machine, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = _folder(tmp_path_factory)
    if gpu.cupy is None:
        for dtype in ("float32", "bfloat16"):
            with contextlib.suppress(RecordedError):
                _compiled(gpu, folder, dtype)
        pytest.skip("what is to be compiled is known")
    for module in ("torch", "transformers"):
        pytest.importorskip(module)
    return folder


def _folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    fetched = Path(os.environ.get("PLAIT_SMOLLM2", Path(__file__).parents[2] / "models" / "smollm2"))
    if (fetched / "config.json").is_file():
        return fetched
    try:
        return pull("smollm2", tmp_path_factory.mktemp("m") / "smollm2")
    except PlaitError as error:
        pytest.skip(f"the model is not here and cannot be pulled (PLAIT_SMOLLM2 says where it is): {error.why}")


def _compiled(gpu: Machine, model: Path, dtype: str) -> plait.Pipeline:
    pipe = plait.compile(model, gpu.arch.chip, dtype=dtype, device_code=True)
    emulated = [row["runs_on"] for row in pipe.stats()["slices"] if "emulated" in row["runs_on"]]
    assert not emulated, emulated
    return pipe


def test_greedy_tokens_equal_transformers(gpu: Machine, smollm2: Path, reference: Reference) -> None:
    """In float32, prompts together in one batch, decode steps captured."""
    with _compiled(gpu, smollm2, "float32") as pipe:
        assert pipe.generate_ids(reference.prompts, NEW_TOKENS) == reference.greedy
        for chunk in (None, 50):
            off = np.abs(pipe.logits(reference.text, chunk) - reference.logits).max()
            assert off < 1e-3 * np.abs(reference.logits).max()


def test_logits_are_as_good_as_transformers_own_in_bfloat16(gpu: Machine, smollm2: Path, reference: Reference) -> None:
    """Against float32; what transformers loses itself by rounding to bfloat16 is the yardstick."""
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(smollm2, dtype=torch.bfloat16).eval()
    with torch.inference_mode():
        theirs = model(torch.tensor([reference.text])).logits[0].float().numpy()
    with _compiled(gpu, smollm2, "bfloat16") as pipe:
        ours = pipe.logits(reference.text)
    assert _off(ours, reference.logits) < 1.5 * _off(theirs, reference.logits)


def _off(logits: NDArray[np.float32], want: NDArray[np.float32]) -> float:
    """Root mean square of the error, as a part of the largest value."""
    return float(np.sqrt(np.square(logits.astype(np.float64) - want).mean()) / np.abs(want).max())
