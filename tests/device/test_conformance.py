"""The conformance suite on the compiled launch plan, through cupy."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from plait.backends.base import CompiledSlice, CompileOptions, Executable, LoadOptions
from plait.backends.conformance import Case, cases, run_case
from plait.backends.cuda import BACKEND as CUDA
from plait.backends.kernels.gpu.backend import GpuBackend
from plait.backends.rocm import BACKEND as ROCM
from tests.device.machine import Machine

pytestmark = pytest.mark.device

assert CUDA.dtypes == ROCM.dtypes, "one list of cases for both"


@dataclass(frozen=True)
class Really:
    """The backend as it is; where it emulates, that is a failure."""

    of: GpuBackend

    @property
    def name(self) -> str:
        return self.of.name

    def capability(self, target: str, module: Any = None) -> Any:
        return self.of.capability(target, module)

    def supports(self, op: Any, target: str) -> Any:
        return self.of.supports(op, target)

    def compile(self, module: Any, target: str, options: CompileOptions) -> CompiledSlice:
        return self.of.compile(module, target, options)

    def load(self, folder: Path, device: str, options: LoadOptions) -> Executable:
        executable = self.of.load(folder, device, options)
        assert executable.runs_on == device, f"it runs on {executable.runs_on}"
        return executable


@pytest.mark.parametrize("case", cases(CUDA.dtypes), ids=str)
def test_launch_plan(gpu: Machine, case: Case, tmp_path: Path) -> None:
    run_case(case, Really(gpu.backend), gpu.target, tmp_path)
