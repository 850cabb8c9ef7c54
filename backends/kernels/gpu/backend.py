"""The backend that cuda and rocm share. Importing it imports neither torch nor Triton nor cupy: asking it does."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from plait.backends.base import CompiledSlice, CompileOptions, Executable, LoadOptions
from plait.backends.kernels.gpu.here import EMULATE, Devices, Vendor, devices, emulation_asked
from plait.backends.kernels.gpu.launch import LaunchPlan
from plait.backends.kernels.lowering import Lowering, dequantised, dtypes_of
from plait.backends.targets import arch_of, check_dtypes, check_group, label
from plait.errors import ArtifactError, MissingDependencyError, PlaitError
from plait.spec import Capability, Support, from_json, to_json

if TYPE_CHECKING:
    from xdsl.dialects.builtin import ModuleOp
    from xdsl.ir import Operation

PLAN = "launch.json"


@dataclass(frozen=True)
class GpuBackend:
    """One vendor's devices: machine code where they are here, the same ops by torch on the host where they are not.

    Attributes:
        archs: architectures code can be made for.
        dtypes: compute dtypes that give right numbers on them.
    """

    name: str
    archs: tuple[str, ...]
    dtypes: tuple[str, ...]
    vendor: Vendor

    def capability(self, target: str, module: ModuleOp | None = None) -> Capability:
        arch = arch_of(self.name, target, self.archs)
        try:
            here = None if emulation_asked("all") else devices(self.vendor)
            if here is not None:
                here.fitting(arch)
            emulated = here is None
            runs_on = label(arch, emulated)
        except PlaitError as problem:  # compiling needs no device; loading says what is wrong with it
            emulated, runs_on = True, f"{arch} (cannot run here: {problem.code})"
        refused: dict[str, str] = {}
        if module is not None:
            for lowering in _lowerings(arch):
                refused = lowering.refused(module) | refused
        return Capability(self.name, target, self.dtypes, runs_on, emulated, "torch", refused)

    def supports(self, op: Operation, target: str) -> Support:
        arch = arch_of(self.name, target, self.archs)
        answers = [lowering.supports(op) for lowering in _lowerings(arch)]
        return next((answer for answer in answers if not answer.ok), Support(True))

    def compile(self, module: ModuleOp, target: str, options: CompileOptions) -> CompiledSlice:
        """launch.json, and a file for each kernel. Without `options.device_code` nothing is written, and the slice runs
        on the host only."""
        from plait.ir.module import ops

        arch = arch_of(self.name, target, self.archs)
        for lowering in _lowerings(arch):
            for op in ops(module):
                lowering.emit(op)
        check_dtypes(self.name, dtypes_of(module), self.dtypes)
        check_group(self.name, options.group_size)
        if not options.device_code:
            how = "no machine code: it runs emulated on the host only"
            return CompiledSlice(report={"arch": arch, "lowering": how, "device_code": False, **dequantised(module)})
        from plait.backends.kernels.gpu.build import arch_named
        from plait.backends.kernels.gpu.held import quantised
        from plait.backends.kernels.gpu.pick import make
        from plait.backends.kernels.gpu.report import report

        try:
            made = make(module, target, arch_named(arch), options)
        except MissingDependencyError as error:
            error.hint += "; or go without machine code: --no-device-code"
            raise
        about = {
            "arch": arch,
            "lowering": "launch plan",
            "device_code": True,
            **report(made, arch_named(arch), options),
            **quantised(made.plan, module),
        }
        return CompiledSlice({PLAN: (to_json(made.plan, indent=1) + "\n").encode(), **made.files}, about)

    def load(self, folder: Path, device: str, options: LoadOptions) -> Executable:
        """On the device where it is here; else emulated on the host.

        Raises:
            MissingDependencyError: `cupy-missing`, `torch-missing`.
            UnsupportedError: `device-arch`: the device here is another.
            ArtifactError: `no-device-code`: there is a device, and no code for it.
        """
        here = None if emulation_asked(device) else devices(self.vendor)
        if here is None:
            return self._emulated(folder, device, options)
        plan = read_plan(folder)
        if plan is None:
            raise ArtifactError(
                "no-device-code",
                f"{folder} has no machine code for {device}",
                why="it was compiled with --no-device-code, and a device is here",
                hint=f"compile it again without, or set {EMULATE}={device} to emulate it on the host",
            )
        return _on_device(folder, plan, here, device, options)

    def _emulated(self, folder: Path, device: str, options: LoadOptions) -> Executable:
        if not _torch_is_here():
            raise MissingDependencyError(
                "torch-missing",
                f"{device} cannot be emulated here",
                why="it is not here, and torch, which would take its place, is not installed",
                hint="pip install 'plait[run]'",
            )
        from plait.backends.kernels.torch_slice import TorchSlice

        return TorchSlice(folder, label(device, True), options)


def _lowerings(arch: str) -> Iterator[Lowering[Any]]:
    """What must take an op: the launch plan, and torch, which emulates, where it is installed."""
    from plait.backends.kernels.gpu.archs import ARCHS
    from plait.backends.kernels.gpu.lower import lowering

    yield lowering(ARCHS[arch])
    if _torch_is_here():
        from plait.backends.kernels import torch_eager

        yield torch_eager.LOWERING


def _torch_is_here() -> bool:
    return importlib.util.find_spec("torch") is not None


def read_plan(folder: Path) -> LaunchPlan | None:
    """The launch plan in a slice's folder; None where there is no machine code. Raises UserError: a wrong field."""
    try:
        return from_json(LaunchPlan, (folder / PLAN).read_text("utf-8"))
    except FileNotFoundError:
        return None


def _on_device(folder: Path, plan: LaunchPlan, here: Devices, device: str, options: LoadOptions) -> Executable:
    from plait.backends.kernels.gpu.cupy_device import CupyDevice
    from plait.backends.kernels.gpu.executor import LaunchSlice

    ordinals = here.fitting(plan.arch)
    return LaunchSlice(folder, plan, CupyDevice(here.cupy, ordinals[options.ordinal % len(ordinals)]), device, options)
