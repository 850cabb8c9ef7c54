"""This host, through torch. Importing it imports no torch: asking it does."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from plait.backends.base import CompiledSlice, CompileOptions, Executable, LoadOptions
from plait.backends.kernels.lowering import dequantised, dtypes_of
from plait.backends.targets import arch_of, check_dtypes, check_group
from plait.spec import Capability, Support

if TYPE_CHECKING:
    from xdsl.dialects.builtin import ModuleOp
    from xdsl.ir import Operation

DTYPES = ("float32", "bfloat16", "float16")


class CpuBackend:
    """`plait.backends.base.Backend`."""

    name = "cpu"

    def capability(self, target: str, module: ModuleOp | None = None) -> Capability:
        from plait.backends.kernels.torch_eager import LOWERING

        refused = {} if module is None else LOWERING.refused(module)
        return Capability(self.name, target, DTYPES, arch_of(self.name, target, ()), False, "torch", refused)

    def supports(self, op: Operation, target: str) -> Support:
        from plait.backends.kernels.torch_eager import LOWERING

        return LOWERING.supports(op)

    def compile(self, module: ModuleOp, target: str, options: CompileOptions) -> CompiledSlice:
        """torch runs the module's ops one by one, so there is nothing to write beside the module."""
        from plait.backends.kernels.torch_eager import LOWERING
        from plait.ir.module import ops

        for op in ops(module):
            LOWERING.emit(op)
        check_dtypes(self.name, dtypes_of(module), DTYPES)
        check_group(self.name, options.group_size)
        arch = arch_of(self.name, target, ())
        return CompiledSlice(report={"lowering": "torch, op by op", "arch": arch, **dequantised(module)})

    def load(self, folder: Path, device: str, options: LoadOptions) -> Executable:
        from plait.backends.kernels.torch_slice import TorchSlice

        return TorchSlice(folder, device, options)


BACKEND = CpuBackend()
