"""The same FP8 checkpoint for every vendor: as it is stored, or dequantised, and said so. Against transformers on the
weights that torch dequantises."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
from safetensors.torch import load_file

import plait
from plait.backends.cuda import BACKEND as CUDA
from plait.backends.kernels.gpu.interpreted import Interpreted
from plait.backends.rocm import BACKEND as ROCM
from plait.errors import FitError
from tests.checkpoints import FP8_LAYOUTS, dequantised, random_ids, reference_logits, save, save_fp8

#: All of them are emulated, and dequantise as the host does: every layout on one of them, and one layout on all.
CASES = [
    *((layout, "cpu") for layout in FP8_LAYOUTS),
    *(("block", device) for device in ("h100", "mi300", "v5e")),
    *(pytest.param(layout, "h100", marks=pytest.mark.slow) for layout in FP8_LAYOUTS if layout != "block"),
]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The model, and each FP8 form of it."""
    root = tmp_path_factory.mktemp("fp8")
    source = save(root / "source", num_hidden_layers=2, head_dim=16)
    even = save_fp8(root / "even", source, "block", (32, 32))
    return {
        "source": source,
        "even": even,
        **{layout: save_fp8(root / layout, source, layout) for layout in FP8_LAYOUTS},
    }


@pytest.mark.parametrize(("layout", "device"), CASES)
def test_logits_are_those_of_the_dequantised_weights(
    layout: str, device: str, folders: dict[str, Path], tmp_path: Path
) -> None:
    """In blocks whose last ones are cut short, in two slices, in one step and in chunks."""
    ids = random_ids(24)
    expected = reference_logits(dequantised(tmp_path / "wide", folders[layout]), ids)
    limit = 1e-5 * np.abs(expected).max()
    # What the quantisation itself changes is far beyond that limit.
    assert np.abs(reference_logits(folders["source"], ids) - expected).max() > 1000 * limit
    out = tmp_path / "m.plait"
    plait.compile_artifact(folders[layout], f"2x{device}", output=out, layers=(1, 1))
    if device in ("cpu", "v5e"):
        report = json.loads(next(out.glob("slices/0-*/report.json")).read_text())
        assert report["weights"] == "dequantised to float32"
    with plait.open(out, in_process=True) as pipe:
        assert np.abs(pipe.logits(ids) - expected).max() < limit
        assert np.abs(pipe.logits(ids, chunk=7) - expected).max() < limit


@pytest.mark.parametrize("layout", ["tensor", "even", pytest.param("row", marks=pytest.mark.slow)])
def test_launch_plans_compute_in_each_vendors_flavour(
    layout: str, folders: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One checkpoint, its codes as they are for NVIDIA and in the other flavour for AMD's MI300: what both are sent.

    `even` has blocks of 32 x 32. For those of `block`, 48 columns wide, there is no kernel: they are dequantised.
    """
    monkeypatch.setattr("plait.backends.cuda.BACKEND", Interpreted(CUDA))
    monkeypatch.setattr("plait.backends.rocm.BACKEND", Interpreted(ROCM))
    ids, out = random_ids(9), tmp_path / "m.plait"
    expected = reference_logits(dequantised(tmp_path / "wide", folders[layout]), ids)
    plait.compile_artifact(folders[layout], "h100,mi300", output=out, layers=(1, 1))
    held = [json.loads(file.read_text())["weights"] for file in sorted(out.glob("slices/*/launch.json"))]
    codes = [{weight["dtype"] for weight in slice_.values() if weight["part"] == "codes"} for slice_ in held]
    assert codes == [{"e4m3fn"}, {"e4m3fnuz"}]
    with plait.open(out, in_process=True) as pipe:
        assert "interpreted" in pipe.stats()["slices"][1]["runs_on"]
        assert np.abs(pipe.logits(ids) - expected).max() < 1e-5 * np.abs(expected).max()


def test_scales_go_into_the_artifact_with_their_weights(folders: dict[str, Path], tmp_path: Path) -> None:
    ids = random_ids(8)
    out, away = tmp_path / "m.plait", tmp_path / "q"
    shutil.copytree(folders["block"], away)
    plait.compile_artifact(away, "2xcpu", output=out, layers=(1, 1), embed_weights=True)
    expected = plait.open(out, in_process=True)
    with expected as pipe:
        first = pipe.logits(ids)
    shutil.rmtree(away)
    with plait.open(out, in_process=True) as pipe:
        np.testing.assert_array_equal(pipe.logits(ids), first)
    wide = reference_logits(dequantised(tmp_path / "wide", folders["block"]), ids)
    assert np.abs(first - wide).max() < 1e-5 * np.abs(wide).max()


def test_a_device_without_fp8_needs_room_for_the_dequantised_weights(folders: dict[str, Path]) -> None:
    def weights_bytes(device: str) -> int:
        memory = plait.plan(folders["tensor"], device).slices[0].memory
        assert memory is not None
        return memory.weights_bytes

    stored = load_file(folders["tensor"] / "model.safetensors").values()
    matrices, scales = sum(t.numel() for t in stored if t.itemsize == 1), 4 * 14
    assert weights_bytes("h100") == weights_bytes("mi300") == sum(t.nbytes for t in stored)
    assert weights_bytes("a100-80-sxm") == weights_bytes("v5e") == weights_bytes("h100") + 3 * matrices - scales


@pytest.mark.parametrize("device", ["h100", "a100-80-sxm"])
def test_a_host_that_emulates_needs_room_for_the_dequantised_weights(
    device: str, folders: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The plan counts what the device will hold: of an h100 a quarter of that."""
    out = tmp_path / "m.plait"
    plait.compile_artifact(folders["tensor"], device, output=out)
    memory = plait.plan(folders["tensor"], "v5e").slices[0].memory
    assert memory is not None
    needed = memory.weights_bytes + memory.kv_bytes
    for free, fits in ((needed - 1, False), (needed, True)):
        monkeypatch.setattr("plait.text.memory_bytes", lambda free=free: (free, free))
        if fits:
            plait.open(out, in_process=True).close()
        else:
            with pytest.raises(FitError):
                plait.open(out, in_process=True)
