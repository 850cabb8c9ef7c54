"""A backend that plans and schedules but computes nothing: zeros of the right shape and dtype, and no memory held.

On it planning, scheduling and multi-device pipelines are tried without weights and without time spent.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from plait.backends.base import (
    TOKENS,
    Array,
    Batch,
    CompiledSlice,
    CompileOptions,
    Executable,
    Int32,
    LoadOptions,
    best_tokens,
)
from plait.backends.kernels.lowering import Lowering
from plait.backends.targets import arch_of
from plait.backends.weights import DTYPES
from plait.ir import kv_layouts, read_module, signature
from plait.ir.module import boundary, ops
from plait.ir.numbers import NUMPY
from plait.ir.ops import OPS, SCORING
from plait.spec import Boundary, Capability, KVLayout, Support

if TYPE_CHECKING:
    from xdsl.dialects.builtin import ModuleOp
    from xdsl.ir import Operation

LOWERING: Lowering[Callable[[], None]] = Lowering("null")

for _kind in OPS:  # nothing is computed, so everything the dialect defines is honoured
    _definition = _kind.get_irdl_definition()
    LOWERING.emits(_kind, *_definition.properties, *dict(_definition.operands))(lambda op: lambda: None)


class NullBackend:
    """`plait.backends.base.Backend`."""

    name = "null"

    def capability(self, target: str, module: ModuleOp | None = None) -> Capability:
        refused = {} if module is None else LOWERING.refused(module)
        runs_on = _label(arch_of(self.name, target, ()))
        return Capability(self.name, target, tuple(DTYPES), runs_on, True, "null", refused)

    def supports(self, op: Operation, target: str) -> Support:
        return LOWERING.supports(op)

    def compile(self, module: ModuleOp, target: str, options: CompileOptions) -> CompiledSlice:
        for op in ops(module):
            LOWERING.emit(op)
        return CompiledSlice(report={"lowering": "none: nothing is computed"})

    def load(self, folder: Path, device: str, options: LoadOptions) -> Executable:
        return NullSlice(read_module(folder / "slice.mlir"), _label(device), options.page_tokens)


class NullSlice:
    """`plait.backends.base.Executable`."""

    def __init__(self, module: ModuleOp, runs_on: str, page_tokens: int) -> None:
        self.runs_on = runs_on
        self.kv_layouts: tuple[KVLayout, ...] = kv_layouts(module, page_tokens)
        sig = signature(module)
        self._inputs = [boundary(name, value) for name, value in sig.inputs.items()]
        self._outputs = [
            (boundary(name, value), isinstance(value.owner, SCORING)) for name, value in sig.outputs.items()
        ]
        self._steps = self._tokens = 0

    def step(self, batch: Batch, inputs: Mapping[str, Array]) -> dict[str, Array]:
        batch.check()
        for expected in self._inputs:
            assert inputs[expected.name].shape == (batch.token_count, *expected.shape[1:]), expected
        self._steps, self._tokens = self._steps + 1, self._tokens + batch.token_count
        made: dict[str, Array] = {}
        for kind, is_logits in self._outputs:
            values = _zeros(kind, len(batch.logit_rows) if is_logits else batch.token_count)
            made |= {TOKENS: best_tokens(values)} if is_logits and batch.greedy else {kind.name: values}
        return made

    def export_pages(self, layer: int, pages: Int32) -> tuple[Array, Array]:
        layout = self.kv_layouts[layer]
        shape, dtype = (len(pages), layout.page_tokens, layout.kv_heads), NUMPY[layout.dtype]
        return np.zeros((*shape, layout.head_dim), dtype), np.zeros((*shape, layout.v_head_dim), dtype)

    def import_pages(self, layer: int, pages: Int32, k: Array, v: Array) -> None:
        assert (k.shape, v.shape) == tuple(side.shape for side in self.export_pages(layer, pages))

    def stats(self) -> dict[str, int | float | str]:
        return {"steps": self._steps, "tokens": self._tokens, "weight_bytes": 0, "kv_bytes": 0}

    def close(self) -> None:
        pass


def _zeros(kind: Boundary, rows: int) -> Array:
    width = kind.shape[1]
    assert width is not None
    return np.zeros((rows, width), DTYPES[kind.dtype])


def _label(name: str) -> str:
    return f"{name} (null: computes nothing)"


BACKEND = NullBackend()
