"""cuda and rocm: what they compile, where a slice is put, and what they say when it can be put nowhere."""

from __future__ import annotations

import importlib.util
import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from plait.backends.base import CompileOptions, LoadOptions
from plait.backends.conformance.models import MODELS, OPS, random_weights, write_slice
from plait.backends.cuda import BACKEND as CUDA
from plait.backends.kernels.gpu import here
from plait.backends.kernels.gpu.assembly import again as again_made
from plait.backends.kernels.gpu.backend import PLAN, GpuBackend
from plait.backends.kernels.gpu.build import arch_named
from plait.backends.kernels.gpu.here import runs
from plait.backends.kernels.gpu.launch import LaunchPlan
from plait.backends.rocm import BACKEND as ROCM
from plait.errors import ArtifactError, MissingDependencyError, PlaitError, UnsupportedError
from plait.ir.ops import OPS as IR_OPS
from plait.registry import load_backend
from plait.runtime.slices import page_allocator, slice_specs
from plait.spec import from_json
from tests.fakes import make_artifact
from tests.host.cupy_double import CUDARuntimeError, Double
from tests.host.gpu_slices import SMALL, module, write

VENDORS = {"cuda": (CUDA, "sm_90a", "sm_90", "h100"), "rocm": (ROCM, "gfx942", "gfx942", "mi300")}


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Puts GPUs into this machine: `machine("sm_90")`; without names, the driver alone."""

    def fit(*archs: str, driver: str = "nvidia", cupy: bool = True) -> Double:
        double = Double(archs)
        monkeypatch.setitem(here._DRIVERS, driver, (sys.executable,))
        monkeypatch.setitem(sys.modules, "cupy", double)
        found, there = importlib.util.find_spec, object() if cupy else None
        monkeypatch.setattr(importlib.util, "find_spec", lambda name: there if name == "cupy" else found(name))
        return double

    monkeypatch.delenv(here.EMULATE, raising=False)
    return fit


def _folder(tmp_path: Path, name: str) -> tuple[Path, LoadOptions]:
    """A slice whose binaries are empty files: enough to be loaded by the double's rules but to run."""
    _, arch, _, _ = VENDORS[name]
    made = write(tmp_path / "slice", target=f"{name}:{arch}")
    return made.folder, made.options


@pytest.mark.parametrize("name", list(VENDORS))
def test_without_a_device_torch_takes_its_place_and_says_so(name: str, tmp_path: Path) -> None:
    backend, arch, _, device = VENDORS[name]
    folder, options = _folder(tmp_path, name)
    executable = backend.load(folder, device, options)
    assert executable.runs_on == f"{device} (emulated on host)"
    executable.close()
    capability = backend.capability(f"{name}:{arch}")
    assert (capability.emulated, capability.runs_on) == (True, f"{arch} (emulated on host)")


@pytest.mark.parametrize("name", list(VENDORS))
def test_with_its_device_a_slice_runs_there(
    name: str, tmp_path: Path, machine: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    backend, arch, there, device = VENDORS[name]
    folder, options = _folder(tmp_path, name)
    double = machine("sm_80" if name == "cuda" else "gfx950", there, driver=backend.vendor)
    monkeypatch.setattr("tests.host.cupy_double.RawKernelDouble.compile", lambda self: None)
    executable = backend.load(folder, device, options)
    assert executable.runs_on == device
    assert double.ordinal == 1, "the second device is the one that fits"
    executable.close()
    capability = backend.capability(f"{name}:{arch}")
    assert (capability.emulated, capability.runs_on) == (False, arch)


@pytest.mark.parametrize(("ordinal", "taken"), [(0, 1), (1, 2), (2, 1)])
def test_every_slice_has_a_device_of_its_own(
    ordinal: int, taken: int, tmp_path: Path, machine: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, options = _folder(tmp_path, "cuda")
    double = machine("sm_80", "sm_90", "sm_90")
    monkeypatch.setattr("tests.host.cupy_double.RawKernelDouble.compile", lambda self: None)
    CUDA.load(folder, "h100", replace(options, ordinal=ordinal)).close()
    assert double.ordinal == taken


def test_slices_of_one_target_are_counted(tmp_path: Path) -> None:
    manifest = make_artifact(tmp_path)
    targets = ("cuda:sm_90a", "rocm:gfx942", "cuda:sm_90a")
    parts = tuple(replace(part, target=target) for part, target in zip(manifest.slices, targets, strict=True))
    manifest = replace(manifest, slices=parts)
    specs = slice_specs(manifest, tmp_path, page_allocator(manifest, 4), max_sequences=4, threads=1)
    assert [spec.ordinal for spec in specs] == [0, 0, 1]


@pytest.mark.parametrize("name", ["cpu", *VENDORS])
def test_a_group_of_devices_is_refused(name: str) -> None:
    target = "cpu" if name == "cpu" else f"{name}:{VENDORS[name][1]}"
    backend = load_backend(name)
    with pytest.raises(UnsupportedError, match="on one device"):
        backend.compile(module(SMALL), target, CompileOptions(device_code=False, group_size=2))


def test_a_driver_that_does_not_answer_is_no_reason_to_emulate(
    tmp_path: Path, machine: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def too_old() -> int:
        raise CUDARuntimeError("cudaErrorInsufficientDriver: the driver is older than the runtime", status=35)

    folder, options = _folder(tmp_path, "cuda")
    double = machine("sm_90")
    monkeypatch.setattr(double.cuda.runtime, "getDeviceCount", too_old)
    with pytest.raises(UnsupportedError, match="cannot be asked") as caught:
        CUDA.load(folder, "h100", options)
    assert caught.value.code == "device-driver"
    assert "cudaErrorInsufficientDriver" in caught.value.why


@pytest.mark.parametrize(
    ("setup", "error", "code", "said"),
    [
        ({"cupy": False}, MissingDependencyError, "cupy-missing", "cupy is not installed"),
        ({"archs": ("gfx942",)}, MissingDependencyError, "cupy-missing", "the other vendor's"),
        ({"archs": ("sm_89", "sm_89")}, UnsupportedError, "device-arch", "here are sm_89"),
        ({"archs": ("sm_100",)}, UnsupportedError, "device-arch", "here are sm_100"),
        ({"archs": ("sm_90",), "code": False}, ArtifactError, "no-device-code", "--no-device-code"),
    ],
)
def test_a_device_that_cannot_be_used_is_an_error(
    setup: dict[str, Any], error: type[PlaitError], code: str, said: str, tmp_path: Path, machine: Any
) -> None:
    folder, options = _folder(tmp_path, "cuda")
    if not setup.get("code", True):
        (folder / PLAN).unlink()
    machine(*setup.get("archs", ()), cupy=setup.get("cupy", True))
    with pytest.raises(error) as caught:
        CUDA.load(folder, "h100", options)
    assert caught.value.code == code
    assert said in caught.value.why
    assert "emulate it on the host" in caught.value.hint
    if setup.get("code", True):
        assert CUDA.capability("cuda:sm_90a").runs_on == f"sm_90a (cannot run here: {code})"


@pytest.mark.parametrize("asked", ["h100", "b200,h100", "all"])
def test_emulation_can_be_asked_for(asked: str, tmp_path: Path, machine: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    folder, options = _folder(tmp_path, "cuda")
    machine("sm_89")
    monkeypatch.setenv("PLAIT_EMULATE", asked)
    executable = CUDA.load(folder, "h100", options)
    assert executable.runs_on == "h100 (emulated on host)"
    executable.close()


def test_a_driver_that_hides_its_devices_is_no_device(tmp_path: Path, machine: Any) -> None:
    folder, options = _folder(tmp_path, "cuda")
    machine()
    executable = CUDA.load(folder, "h100", options)
    assert executable.runs_on.endswith("(emulated on host)")
    executable.close()


def test_without_torch_nothing_is_emulated(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder, options = _folder(tmp_path, "cuda")
    found = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "torch" else found(name))
    with pytest.raises(MissingDependencyError, match="h100 cannot be emulated here") as caught:
        CUDA.load(folder, "h100", options)
    assert caught.value.hint == "pip install 'plait[run]'"
    assert CUDA.capability("cuda:sm_90a", module(MODELS["gqa"])).refused == {}


@pytest.mark.parametrize(
    ("arch", "device", "fits"),
    [
        ("sm_90a", "sm_90", True),
        ("sm_90a", "sm_89", False),
        ("sm_90", "sm_90", True),
        ("sm_100a", "sm_103", False),
        ("sm_103a", "sm_103", True),
        ("sm_120a", "sm_120", True),
        ("sm_80", "sm_86", True),
        ("sm_86", "sm_80", False),
        ("sm_89", "sm_90", False),
        ("gfx942", "gfx942", True),
        ("gfx942", "gfx950", False),
        ("gfx942", "sm_90", False),
    ],
)
def test_code_runs_on_its_own_kind_of_chip(arch: str, device: str, fits: bool) -> None:
    assert runs(arch, device) == fits


@pytest.mark.parametrize("name", list(VENDORS))
def test_without_device_code_nothing_is_compiled(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    backend, arch, _, _ = VENDORS[name]
    monkeypatch.setattr("plait.backends.kernels.gpu.pick.choose_many", lambda *_, **__: pytest.fail("compiled"))
    compiled = backend.compile(module(SMALL), f"{name}:{arch}", CompileOptions(device_code=False))
    assert compiled.files == {}
    assert compiled.report["device_code"] is False
    assert "emulated on the host only" in str(compiled.report["lowering"])


@pytest.mark.parametrize("name", list(VENDORS))
def test_archs_are_those_that_code_can_be_made_for(name: str) -> None:
    backend, *_ = VENDORS[name]
    assert all(arch_named(arch).vendor == backend.vendor for arch in backend.archs)


def test_both_ways_to_run_must_take_an_op(monkeypatch: pytest.MonkeyPatch) -> None:
    """What only torch refuses is refused, and what only the kernels refuse."""
    from plait.backends.kernels import torch_eager
    from plait.backends.kernels.gpu.lower import LOWERING
    from plait.ir.module import ops

    made = module(MODELS["gqa"])
    for lowering, kind in ((LOWERING, "RopeOp"), (torch_eager.LOWERING, "LogitsOp")):
        op = next(k for k in IR_OPS if k.__name__ == kind)
        monkeypatch.delitem(lowering._emitters, op)
    refused = CUDA.capability("cuda:sm_90a", made).refused
    assert {name.partition(" ")[0] for name in refused} == {"plait.rope", "plait.logits"}
    for item in ops(made):
        assert CUDA.supports(item, "cuda:sm_90a").ok == (item.name not in ("plait.rope", "plait.logits"))
    with pytest.raises(UnsupportedError):
        CUDA.compile(made, "cuda:sm_90a", CompileOptions(device_code=False))


@pytest.mark.parametrize("name", list(VENDORS))
def test_a_slice_is_a_plan_and_the_files_it_names(name: str, tmp_path: Path) -> None:
    """One op with machine code; compiled again from the cache it is the same, byte for byte."""
    backend, arch, _, _ = VENDORS[name]
    made, seen = module(OPS["add_rms_norm"], "bfloat16"), []
    options = CompileOptions(64, 4, 16, progress=lambda done, total, label: seen.append((done, total)))
    compiled = backend.compile(made, f"{name}:{arch}", options)
    again = backend.compile(made, f"{name}:{arch}", options)
    assert compiled == again
    plan = from_json(LaunchPlan, compiled.files[PLAN].decode())
    assert {binary.file for binary in plan.binaries} | {PLAN} == set(compiled.files)
    assert all(
        compiled.files[b.file][:4] == b"\x7fELF" and b.threads % arch_named(arch).warp == 0 for b in plan.binaries
    )
    rows: Any = compiled.report["kernels"]
    assert [row["kernel"] for row in rows] == ["embed", "add_rms_norm"]
    for row in rows:
        assert row["checks"]["failed"] == {}
        assert {"arch", "registers", "spills", "shared-memory"} <= set(row["checks"]["passed"])
        assert row["registers"] > 0 and row["spills"] == 0 and 0 < row["occupancy"] <= 1
        assert row["bytes"] > 0 and row["predicted_us"] > 0 and row["bound_by"] and row["why"]
    assert rows[0]["launches"] == 2
    json.dumps(compiled.report, allow_nan=False)
    write_slice(tmp_path / "slice", made, random_weights(made), dict(compiled.files))
    assert again_made(tmp_path / "slice", rows[1]["file"], rows[1]).differs == ""


def test_a_missing_compiler_says_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    import importlib.metadata

    def absent(name: str) -> str:
        raise importlib.metadata.PackageNotFoundError(name)

    from plait.backends.kernels.gpu import loader

    monkeypatch.setattr(importlib.metadata, "version", absent)
    getattr(loader.require_triton, "cache_clear", lambda: None)()
    with pytest.raises(MissingDependencyError) as caught:
        CUDA.compile(module(OPS["add"]), "cuda:sm_90a", CompileOptions())
    assert caught.value.code == "triton-missing"
    assert "--no-device-code" in caught.value.hint


def test_a_backend_is_a_row_of_a_table() -> None:
    assert GpuBackend("cuda", CUDA.archs, ("float32", "bfloat16", "float16"), "nvidia") == CUDA
    assert GpuBackend("rocm", ROCM.archs, ("float32", "bfloat16", "float16"), "amd") == ROCM
