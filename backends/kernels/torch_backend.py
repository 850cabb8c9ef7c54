"""The backend that cuda, rocm and cpu share. Importing it imports no torch: asking it does."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from plait.backends.base import CompiledSlice, CompileOptions, Executable, LoadOptions
from plait.backends.kernels.lowering import dequantised, dtypes_of
from plait.backends.targets import arch_of, label
from plait.errors import UnsupportedError
from plait.spec import Capability, Support

if TYPE_CHECKING:
    import torch
    from xdsl.dialects.builtin import ModuleOp
    from xdsl.ir import Operation

Vendor = Literal["nvidia", "amd", "host"]


@dataclass(frozen=True)
class TorchBackend:
    """One vendor's devices through torch.

    Attributes:
        archs: architectures code can be made for; empty takes any.
        dtypes: compute dtypes that give right numbers on them.
        vendor: whose devices; a build of torch knows one of them beside the host.
    """

    name: str
    archs: tuple[str, ...]
    dtypes: tuple[str, ...]
    vendor: Vendor

    def capability(self, target: str, module: ModuleOp | None = None) -> Capability:
        from plait.backends.kernels.torch_eager import LOWERING

        arch, emulated = arch_of(self.name, target, self.archs), self._emulated()
        return Capability(
            backend=self.name,
            target=target,
            dtypes=self.dtypes,
            runs_on=label(arch, emulated),
            emulated=emulated,
            environment="torch",
            refused={} if module is None else LOWERING.refused(module),
        )

    def supports(self, op: Operation, target: str) -> Support:
        from plait.backends.kernels.torch_eager import LOWERING

        arch_of(self.name, target, self.archs)
        return LOWERING.supports(op)

    def compile(self, module: ModuleOp, target: str, options: CompileOptions) -> CompiledSlice:
        """torch runs the module's ops one by one, so there is nothing to write beside the module."""
        from plait.backends.kernels.torch_eager import LOWERING
        from plait.ir.module import ops

        arch = arch_of(self.name, target, self.archs)
        for op in ops(module):
            LOWERING.emit(op)
        for dtype in dtypes_of(module):
            if dtype not in self.dtypes:
                raise UnsupportedError(
                    "dtype", f"{self.name} does not compute in {dtype}", why="it has " + ", ".join(self.dtypes)
                )
        return CompiledSlice(report={"lowering": "torch, op by op", "arch": arch, **dequantised(module)})

    def load(self, folder: Path, device: str, options: LoadOptions) -> Executable:
        from plait.backends.kernels.torch_slice import TorchSlice

        return TorchSlice(folder, label(device, self._emulated()), self._device(), options)

    def _emulated(self) -> bool:
        return self.vendor != "host" and self._device().type == "cpu"

    def _device(self) -> torch.device:
        """The vendor's device where this build of torch sees one, else the host."""
        import torch

        builds = {"nvidia": torch.version.cuda, "amd": torch.version.hip, "host": None}
        there = builds[self.vendor] is not None and torch.cuda.is_available()
        return torch.device("cuda" if there else "cpu")
