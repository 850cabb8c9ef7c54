"""The tests of `tests/device`, as far as they go without a GPU: that they skip, and a few of them on a stand-in."""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from plait.backends.base import CompileOptions
from plait.backends.conformance.models import OPS
from plait.backends.kernels.gpu import build, loader
from plait.backends.kernels.gpu.archs import ARCHS
from plait.backends.kernels.gpu.cache import Cache, default_folder
from plait.backends.kernels.gpu.kernel import Tile, Variant
from plait.backends.kernels.gpu.pick import Asked, asked
from plait.backends.kernels.gpu.table import KERNELS
from plait.cost_models.catalogue import device_of, lookup
from tests import kernels
from tests.device import machine, prepared
from tests.device.machine import GUARD, OnDevice, blocks
from tests.host.gpu_slices import module

ROOT = Path(__file__).parents[2]

#: Every way to a device: kernels alone (all three areas), launch plans; captured steps test_gpu_cupy.py has too.
ON_A_STAND_IN = (
    "test_gemm.py and test_gemm and True-True-bf16 or test_rows_of_a_few",
    "test_streams.py and (test_argmax and 100-bf16 or test_rms_norm and bf16-1-64)",
    "test_attention.py and test_decode_is_a_prefill",
    "test_conformance.py and op-add_rms_norm-bfloat16",
)
CAPTURED = ("test_graphs.py and short and float32",)


def _pytest(*options: str, **environment: str) -> str:
    command = [sys.executable, "-m", "pytest", "-q", "-m", "device", "-p", "no:cacheprovider", "tests/device", *options]
    given = {name: value for name, value in os.environ.items() if not name.startswith("PLAIT_DEVICE")}
    done = subprocess.run(command, cwd=ROOT, env={**given, **environment}, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_without_a_gpu_they_skip_and_say_why() -> None:
    if not isinstance(machine.find(), str):
        pytest.skip("there is a GPU here")
    said = _pytest("-k", "test_argmax or test_captured")
    assert re.search(r"SKIPPED.*there is no GPU here", said)
    assert re.search(r"^\d+ skipped", said.splitlines()[-1])


@pytest.mark.parametrize(("tests", "count"), [(ON_A_STAND_IN, 6), pytest.param(CAPTURED, 1, marks=pytest.mark.slow)])
def test_on_a_stand_in_for_a_gpu(tests: Sequence[str], count: int) -> None:
    said = _pytest("-k", " or ".join(f"({wanted})" for wanted in tests), PLAIT_DEVICE_DOUBLE="1")
    passed = re.match(r"(\d+) passed", said.splitlines()[-1])
    assert passed and int(passed[1]) == count and "skipped" not in said.splitlines()[-1], said


class Memory:
    """A device whose one kernel is `work`, called with the bytes of every allocation."""

    def __init__(self, work: Callable[[list[np.ndarray]], None]) -> None:
        self.work, self.held = work, list[np.ndarray]()
        self.regions: Sequence[Any] = ()

    def allocate(self, nbytes: int) -> np.ndarray:
        self.held.append(np.zeros(nbytes, np.uint8))
        return self.held[-1]

    def write(self, memory: np.ndarray, offset: int, array: np.ndarray) -> None:
        memory[offset : offset + array.nbytes] = array

    def read(self, memory: np.ndarray, offset: int, array: np.ndarray) -> None:
        array[:] = memory[offset : offset + array.nbytes]

    def bind(self, function: Any, grid: Any, regions: Sequence[Any], scalars: Sequence[Any]) -> Callable[[], None]:
        self.regions = regions
        return lambda: self.work(self.held)

    def run(self, calls: Sequence[Callable[[], None]]) -> None:
        for call in calls:
            call()


def _add(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, work: Callable[[list[np.ndarray]], None]) -> Any:
    """`add` of x and y, cut out of one array, to out, on that device."""
    device = Memory(work)
    monkeypatch.setattr(OnDevice, "_function", lambda self, asked: asked)
    both, out = np.arange(64, dtype=np.float32).reshape(2, 32), np.zeros((2, 16), np.float32)
    pointers = {"x": both[:, :16], "y": both[:, 16:], "out": out}
    variant = Variant("add", dict.fromkeys(pointers, "fp32"), {}, Tile({"BLOCK": 16}))
    scalars = {"rows": 2, "N": 16, "x_stride": 32, "y_stride": 32, "out_stride": 16}
    with kernels.on(kernels.Place(OnDevice(device, ARCHS["sm_90a"], tmp_path))):  # type: ignore[arg-type]
        kernels.run(KERNELS["add"], variant, pointers, scalars)
    return device, both, out


def test_what_a_kernel_writes_comes_back(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def work(held: list[np.ndarray]) -> None:
        held[1][GUARD : GUARD + 128].view(np.float32)[:] = 7.0

    device, both, out = _add(monkeypatch, tmp_path, work)
    assert len(device.held) == 2, "x and y are one array"
    assert [region.offset for region in device.regions] == [GUARD, GUARD + 64, GUARD]
    assert (out == 7.0).all() and (both == np.arange(64).reshape(2, 32)).all()


@pytest.mark.parametrize(
    ("block", "at", "said"),
    [(1, GUARD - 1, "beside"), (1, GUARD + 128, "beside"), (0, GUARD + 256, "beside"), (0, GUARD + 3, "only reads")],
)
def test_what_a_kernel_must_not_write_is_looked_at(
    block: int, at: int, said: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def work(held: list[np.ndarray]) -> None:
        held[block][at] ^= 1

    with pytest.raises(AssertionError, match=said):
        _add(monkeypatch, tmp_path, work)


def test_a_block_is_all_that_an_array_is_cut_out_of() -> None:
    whole = np.zeros((4, 8), np.int32)
    found = blocks({"a": whole[1:, 2:4], "b": whole.reshape(-1)[5:6], "c": None, "d": np.zeros(3)})
    assert found["a"].start == found["b"].start and found["a"].nbytes == 128
    assert found["d"].nbytes == 24 and "c" not in found
    found["a"].bytes[:] = 1
    assert (whole == 0x01010101).all()


def test_kernels_that_another_triton_made_are_served(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """And none is made in their place."""
    kernel = KERNELS["add"]
    one, other = (
        Variant("add", dict.fromkeys(kernel.pointers, kind), {}, Tile({"BLOCK": 128})) for kind in ("fp32", "bf16")
    )
    made = build.compile_variant(kernel, one, "sm_90a")
    monkeypatch.setenv("PLAIT_CACHE", str(tmp_path))
    for where, name in ((loader, "require_triton"), (build, "_make")):
        monkeypatch.setattr(where, name, getattr(where, name))  # so that they come back
    prepared.maker().parent.mkdir()
    prepared.maker().write_text("0.0.1")
    prepared.use()
    Cache(default_folder()).put(build.Job(kernel, one, "sm_90a").key, build.pack(made))
    assert build.compile_variant(kernel, one, "sm_90a") == made
    with pytest.raises(AssertionError, match="another Triton made"):
        build.compile_variant(kernel, other, "sm_90a")


# The benchmark.


def _benchmark() -> Any:
    spec = importlib.util.spec_from_file_location("benchmark_of_device", ROOT / "benchmarks" / "device.py")
    assert spec is not None and spec.loader is not None
    loaded = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = loaded  # dataclasses look there
    spec.loader.exec_module(loaded)
    return loaded


@pytest.mark.parametrize(
    ("a", "b", "tau"),
    [
        ([1, 2, 3], [10, 20, 30], 1.0),
        ([1, 2, 3], [3, 2, 1], -1.0),
        ([1, 2, 3, 4], [1, 2, 4, 3], 2 / 3),
        ([1], [1], None),
    ],
)
def test_rank_correlation(a: list[float], b: list[float], tau: float | None) -> None:
    assert _benchmark().kendall(a, b) == (None if tau is None else pytest.approx(tau))


def test_the_benchmark_sets_measured_beside_predicted() -> None:
    """On a stand whose clock says that every candidate is slower than the one before it."""
    benchmark, arch = _benchmark(), ARCHS["sm_90a"]
    options = CompileOptions(max_step_tokens=64, max_sequences=8)
    wanted = [
        item for item in asked(module(OPS["rms_norm"], "bfloat16"), "cuda:sm_90a", arch, options)
        if item.request.kernel.name == "rms_norm"
    ]  # fmt: skip

    class Stand:
        device, turn = "scripted", 0

        def take(self, candidates: Any) -> None:
            self.turn += 1
            assert set(candidates) == {(item.key, item.most) for item in wanted}

        def times_us(self, item: Asked) -> Sequence[float]:
            return [10.0 * self.turn] * 3

    (row,) = benchmark.measure(wanted, arch, device_of(lookup("h100")), Stand())
    assert row.measured_us == row.best_us == 10.0 and row.tile == row.best_tile
    predicted = [us for _, us, _ in row.candidates]
    assert [us for *_, us in row.candidates] == [10.0 * (i + 1) for i in range(len(predicted))]
    assert row.predicted_us == predicted[0]
    assert row.rows == 64 and row.sizes == {"H": 48} and 0 < row.roof_us < 1 and row.torch_us is None
