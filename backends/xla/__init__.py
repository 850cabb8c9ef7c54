"""TPUs, through JAX; on a host without one the same program runs on XLA's CPU backend and says so.

Importing this imports no JAX: loading a slice does.
"""

from __future__ import annotations

import importlib.util
import os
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar, Literal, cast, get_args

from plait.backends.base import CompiledSlice, CompileOptions, Executable, LoadOptions
from plait.backends.targets import arch_of, label
from plait.errors import MissingDependencyError, UsageError
from plait.spec import Capability, Support

Attention = Literal["gather", "pallas"]

if TYPE_CHECKING:
    from xdsl.dialects.builtin import ModuleOp
    from xdsl.ir import Operation

    from plait.ir.ops import OpaqueOp

ARCHS = ("tpu-v4", "tpu-v5e", "tpu-v5p", "tpu-v6e", "tpu-v7x")
DTYPES = ("float32", "bfloat16", "float16")
#: Which attention programs for TPUs have, where nobody says.
ATTENTION = "PLAIT_XLA_ATTENTION"


@dataclass(frozen=True)
class XlaBackend:
    """`plait.backends.base.Backend`.

    Attributes:
        attention: `gather`, plain JAX; or `pallas`, JAX's ragged paged attention, which takes heads of 128 and no
            sinks. None asks the environment (`PLAIT_XLA_ATTENTION`), and is `gather` where that says nothing.
    """

    attention: Attention | None = None
    name: ClassVar[str] = "xla"

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
        """Programs for the chip, made by libtpu here (`aot`), of few shapes (`record`). Without device code a slice has
        none: XLA compiles a shape when it first meets it, on the machine that runs it."""
        from plait.backends.kernels.lowering import dequantised
        from plait.backends.xla.emit import LOWERING
        from plait.ir.module import ops
        from plait.ir.ops import OpaqueOp

        arch = arch_of(self.name, target, ARCHS)
        for op in ops(module):
            LOWERING.emit(op)
        if (opaque := next((op for op in ops(module) if isinstance(op, OpaqueOp)), None)) is not None:
            return opaque_slice(opaque, arch)
        if not options.device_code:
            how = {"lowering": "JAX, a shape is compiled where it first runs", "arch": arch, "device_code": False}
            return CompiledSlice(report={**how, **dequantised(module)})
        from plait.backends.xla.aot import compile_slice

        attention = self.attention or wanted_attention()
        built = compile_slice(module, arch, options, attention)
        about = {
            "lowering": "JAX, programs for the chip by libtpu",
            "arch": arch,
            "device_code": True,
            "group_size": options.group_size,
            "attention": attention,
        }
        return CompiledSlice(files=built.files, report={**about, **built.report, **dequantised(module)})

    def load(self, folder: Path, device: str, options: LoadOptions) -> Executable:
        """On a TPU where one is here; else on XLA's CPU backend.

        Raises:
            MissingDependencyError: `jax-missing`.
        """
        if importlib.util.find_spec("jax") is None:
            why = "its slice is a JAX program, and JAX is not installed"
            raise MissingDependencyError(
                "jax-missing", f"{device} cannot run here", why=why, hint="pip install 'plait[xla]'"
            )
        from plait.backends.xla.platform import emulated, prepare
        from plait.ir.ops import OpaqueOp

        prepare(options.threads)
        runs_on = label(device, emulated())
        if f" = {OpaqueOp.name} " in (folder / "slice.mlir").read_text("utf-8"):
            from plait.backends.xla.opaque import OpaqueSlice

            return OpaqueSlice(folder, runs_on, options)
        from plait.backends.xla.executable import XlaSlice

        return XlaSlice(folder, runs_on, options)


def opaque_slice(op: OpaqueOp, arch: str) -> CompiledSlice:
    """A slice that is one opaque op: its programs stand in the op, and XLA compiles them where they run."""
    from plait.backends.xla.platform import prepare

    prepare(None)
    from plait.backends.xla.opaque import portable

    for text in op.texts:
        portable(text)  # refused now, not where it runs
    return CompiledSlice(
        report={
            "lowering": "StableHLO by torch-mlir, one program per length",
            "arch": arch,
            "lengths": list(op.token_lengths),
        },
    )


def wanted_attention() -> Attention:
    """What `PLAIT_XLA_ATTENTION` says. Raises UsageError `xla-attention`."""
    said = os.environ.get(ATTENTION, "gather")
    if said not in get_args(Attention):
        raise UsageError("xla-attention", f"{ATTENTION} is {said!r}", why="it is " + " or ".join(get_args(Attention)))
    return cast(Attention, said)


BACKEND = XlaBackend()
