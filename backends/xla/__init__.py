"""TPUs, through JAX; on a host without one the same program runs on XLA's CPU backend and says so.

Importing this imports no JAX: loading a slice does.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from plait.backends.base import CompiledSlice, CompileOptions, Executable, LoadOptions
from plait.backends.targets import arch_of, label
from plait.spec import Capability, Support

if TYPE_CHECKING:
    from xdsl.dialects.builtin import ModuleOp
    from xdsl.ir import Operation

ARCHS = ("tpu-v4", "tpu-v5e", "tpu-v5p", "tpu-v6e", "tpu-v7x")
DTYPES = ("float32", "bfloat16", "float16")


class XlaBackend:
    """`plait.backends.base.Backend`."""

    name = "xla"

    def capability(self, target: str, module: ModuleOp | None = None) -> Capability:
        from plait.backends.xla.emit import LOWERING
        from plait.backends.xla.platform import emulated

        arch = arch_of(self.name, target, ARCHS)
        return Capability(
            backend=self.name,
            target=target,
            dtypes=DTYPES,
            runs_on=label(arch, emulated()),
            emulated=emulated(),
            environment="jax",
            refused={} if module is None else LOWERING.refused(module),
        )

    def supports(self, op: Operation, target: str) -> Support:
        from plait.backends.xla.emit import LOWERING

        arch_of(self.name, target, ARCHS)
        return LOWERING.supports(op)

    def compile(self, module: ModuleOp, target: str, options: CompileOptions) -> CompiledSlice:
        """XLA compiles a shape when it first meets it, on the machine that runs it; the buckets bound how many."""
        from plait.backends.xla.buckets import grids
        from plait.backends.xla.emit import LOWERING
        from plait.ir.module import ops

        arch = arch_of(self.name, target, ARCHS)
        for op in ops(module):
            LOWERING.emit(op)
        shapes = [
            f"{sequences}x{queries}" for sequences, queries in grids(options.max_sequences, options.max_step_tokens)
        ]
        return CompiledSlice(report={"lowering": "JAX, one program per shape", "arch": arch, "shapes": shapes})

    def load(self, folder: Path, device: str, options: LoadOptions) -> Executable:
        from plait.backends.xla.executable import XlaSlice
        from plait.backends.xla.platform import emulated, prepare

        prepare(options.threads)
        return XlaSlice(folder, label(device, emulated()), options)


BACKEND = XlaBackend()
