"""Launch plans as a backend for conformance: the plans of a GPU backend, their kernels in Triton's interpreter.

It is in no registry: it proves what runs on a GPU, thousands of times slower.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from plait.backends.base import CompiledSlice, CompileOptions, Executable, LoadOptions
from plait.backends.kernels.gpu.archs import ARCHS, Arch
from plait.backends.kernels.gpu.backend import PLAN, GpuBackend, read_plan
from plait.backends.kernels.gpu.executor import LaunchSlice
from plait.backends.kernels.gpu.interpret_device import InterpretDevice
from plait.backends.kernels.gpu.lower import lower, lowering
from plait.backends.kernels.gpu.pick import first
from plait.backends.targets import arch_of
from plait.spec import Capability, Support, to_json

if TYPE_CHECKING:
    from xdsl.dialects.builtin import ModuleOp
    from xdsl.ir import Operation


@dataclass(frozen=True)
class Interpreted:
    """`plait.backends.base.Backend`. Tiles are the first candidates: nothing is compiled."""

    of: GpuBackend

    @property
    def name(self) -> str:
        return self.of.name

    def capability(self, target: str, module: ModuleOp | None = None) -> Capability:
        refused = {} if module is None else lowering(self._arch(target)).refused(module)
        return Capability(self.name, target, self.of.dtypes, _label(target), True, "triton", refused)

    def supports(self, op: Operation, target: str) -> Support:
        return lowering(self._arch(target)).supports(op)

    def compile(self, module: ModuleOp, target: str, options: CompileOptions) -> CompiledSlice:
        arch = self._arch(target)
        plan = lower(module, target, arch, options, first(arch))
        return CompiledSlice({PLAN: to_json(plan).encode()})

    def load(self, folder: Path, device: str, options: LoadOptions) -> Executable:
        plan = read_plan(folder)
        assert plan is not None, "compile wrote it"
        return LaunchSlice(folder, plan, InterpretDevice(), _label(device), options)

    def _arch(self, target: str) -> Arch:
        return ARCHS[arch_of(self.name, target, self.of.archs)]


def _label(device: str) -> str:
    return f"{device} (interpreted: emulated on host)"
