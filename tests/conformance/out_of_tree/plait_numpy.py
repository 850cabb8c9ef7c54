"""A complete backend outside plait's repository: slices in NumPy, op by op, each result rounded to float32.

It takes what plait offers to every backend: the table of emitters refuses what it does not know, `read_weight` reads
byte ranges, `plait.ir` reads the module.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from xdsl.dialects.builtin import ModuleOp
from xdsl.ir import Operation

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
from plait.backends.kernels.lowering import ROPE_TABLE, Lowering, operand_dtype
from plait.backends.targets import arch_of
from plait.backends.weights import read_weight, read_weights_json
from plait.ir import kv_layouts, read_module, signature
from plait.ir.module import ops
from plait.ir.numbers import NUMPY
from plait.ir.ops import OPS, SCORING, OracleKV, PlaitOp, WeightOp
from plait.spec import Capability, KVLayout, Support, kv_class

ARCHS = ("v1",)
DTYPES = ("float32",)

#: op class -> the properties and optional operands this backend implements. What is not listed is refused: mixtures,
#: and routers that choose by groups.
PROPERTIES: dict[str, tuple[str, ...]] = {
    "plait.weight": ("symbol",),
    "plait.rms_norm": ("eps", "group", "offset"),
    "plait.add_rms_norm": ("eps", "offset"),
    "plait.layer_norm": ("eps", "group"),
    "plait.head_linear": ("transposed",),
    "plait.rope": ("head_dim", "rotary_dim", *ROPE_TABLE),
    "plait.attention": ("heads", "scale", "window", "softcap", "sinks"),
    "plait.latent_attention": ("heads", "scale"),
    "plait.gelu": ("approximate",),
    "plait.gelu_mul": ("approximate",),
    "plait.scale": ("factor",),
    "plait.router": ("experts_per_token", "scoring", "normalise", "scale"),
    "plait.logits": ("scale", "softcap"),
}

LOWERING: Lowering[Callable[..., Any]] = Lowering("numpy")


def _emit(op: PlaitOp) -> Callable[..., Any]:
    """The op's own meaning in NumPy is the code."""
    for value in (*op.operands, *op.results):
        if hasattr(value.type, "element_type"):
            operand_dtype(op, value, DTYPES)
    return op.oracle


for _kind in OPS:
    LOWERING.emits(_kind, *PROPERTIES.get(_kind.name, ()))(_emit)


class NumpyBackend:
    """`plait.backends.base.Backend`."""

    name = "numpy"

    def capability(self, target: str, module: ModuleOp | None = None) -> Capability:
        refused = {} if module is None else LOWERING.refused(module)
        return Capability(self.name, target, DTYPES, arch_of(self.name, target, ARCHS), False, "numpy", refused)

    def supports(self, op: Operation, target: str) -> Support:
        return LOWERING.supports(op)

    def compile(self, module: ModuleOp, target: str, options: CompileOptions) -> CompiledSlice:
        arch_of(self.name, target, ARCHS)
        for op in ops(module):
            LOWERING.emit(op)
        return CompiledSlice(report={"lowering": "NumPy, op by op"})

    def load(self, folder: Path, device: str, options: LoadOptions) -> Executable:
        return NumpySlice(folder, device, options)


class NumpySlice:
    """`plait.backends.base.Executable`."""

    def __init__(self, folder: Path, runs_on: str, options: LoadOptions) -> None:
        module = read_module(folder / "slice.mlir")
        refs = read_weights_json(folder / "weights.json")
        self.runs_on = runs_on
        self.kv_layouts: tuple[KVLayout, ...] = kv_layouts(module, options.page_tokens)
        self._signature = signature(module)
        self._values: dict[Any, Any] = {}
        self._program = []
        for op in ops(module):
            if isinstance(op, WeightOp):
                self._values[op.result] = _wide(read_weight(refs[op.symbol.data], "float32", options.weight_root))
            else:
                self._program.append((LOWERING.emit(op), op.operands, op.results))
        self._kv = [
            OracleKV(
                options.pages[kv_class(kind.window)], kind.page_tokens, kind.kv_heads, kind.head_dim, kind.v_head_dim
            )
            for kind in self.kv_layouts
        ]
        self._values |= dict(zip(self._signature.kv.values(), self._kv, strict=True))
        self._steps = 0

    def step(self, batch: Batch, inputs: Mapping[str, Array]) -> dict[str, Array]:
        values = dict(self._values)
        values[self._signature.batch] = batch
        values |= {arg: _wide(inputs[name]) for name, arg in self._signature.inputs.items()}
        with np.errstate(over="ignore", invalid="ignore"):  # as everywhere, infinities and NaNs come out
            for code, operands, results in self._program:
                made = code(*[values[operand] for operand in operands])
                values |= {result: _wide(x) for result, x in zip(results, made, strict=True)}
        self._steps += 1
        outputs = {}
        for name, value in self._signature.outputs.items():
            made = values[value].astype(np.float32)
            best = batch.greedy and isinstance(value.owner, SCORING)
            outputs |= {TOKENS: best_tokens(made)} if best else {name: made}
        return outputs

    def export_pages(self, layer: int, pages: Int32) -> tuple[Array, Array]:
        dtype = NUMPY[self.kv_layouts[layer].dtype]
        return self._kv[layer].k[pages].astype(dtype), self._kv[layer].v[pages].astype(dtype)

    def import_pages(self, layer: int, pages: Int32, k: Array, v: Array) -> None:
        self._kv[layer].k[pages], self._kv[layer].v[pages] = k.astype(np.float64), v.astype(np.float64)

    def stats(self) -> dict[str, int | float | str]:
        return {"steps": self._steps}

    def close(self) -> None:
        self._values, self._kv = {}, []


def _wide(values: Array) -> Array:
    """Rounded to float32, held in float64: fused ops and single ones then compute alike, to the bit."""
    return values.astype(np.float32).astype(np.float64)


BACKEND = NumpyBackend()
