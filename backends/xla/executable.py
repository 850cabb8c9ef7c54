"""A loaded slice in JAX."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from numpy.typing import NDArray
from xdsl.dialects.builtin import ModuleOp, TensorType
from xdsl.ir import SSAValue

from plait.backends.base import Array, Batch, Int32, LoadOptions
from plait.backends.kernels.lowering import check_weights
from plait.backends.weights import DTYPES, read_weight, read_weights_json
from plait.backends.xla.buckets import Grid, split
from plait.backends.xla.emit import LOWERING, RopeTable, Run, Trace
from plait.ir import kv_classes, kv_layouts, read_module, signature, weights
from plait.ir.module import boundary, ops
from plait.ir.ops import LogitsOp, WeightOp
from plait.ir.rope import angles
from plait.ir.types import dtype_name
from plait.spec import Boundary, KVLayout, kv_class

Pages = list[tuple[jax.Array, jax.Array]]

#: Otherwise XLA may leave out a rounding to 16 bits between two ops, and the bits depend on where the model is cut.
COMPILER_OPTIONS = {"xla_allow_excess_precision": False}


class XlaSlice:
    """`plait.backends.base.Executable` in JAX. Each grid (see `buckets`) is one call of one jitted program.

    On a CPU host arrays are float32 whatever the dtype of the module, since XLA emulates 16-bit products there, several
    times slower; what an op returns is rounded to the module's dtype all the same (`emit._rounded`).
    """

    def __init__(self, folder: Path, runs_on: str, options: LoadOptions) -> None:
        module = read_module(folder / "slice.mlir")
        self.runs_on = runs_on
        self.kv_layouts: tuple[KVLayout, ...] = kv_layouts(module, options.page_tokens)
        self._page_tokens, self._pages = options.page_tokens, dict(options.pages)
        self._windows = kv_classes(module)
        self._sig = signature(module)
        self._outputs = [
            (boundary(name, value), isinstance(value.owner, LogitsOp)) for name, value in self._sig.outputs.items()
        ]
        self._has_logits = any(is_logits for _, is_logits in self._outputs)
        self._program = [
            (LOWERING.emit(op), op.operands, op.results) for op in ops(module) if not isinstance(op, WeightOp)
        ]
        traces = [trace for trace, _, _ in self._program]
        self._tables = list(dict.fromkeys(trace.table for trace in traces if trace.table is not None))
        self._wide = jax.default_backend() == "cpu"
        self._weights = self._load(module, traces, folder, options.weight_root)
        self._kv: Pages = [self._zeros(layout) for layout in self.kv_layouts]
        self._steps = self._compiles = 0
        # Static: whether logits are wanted of every row. KV is donated: it is written in place.
        self._run = jax.jit(
            self._trace,
            static_argnames=("every_row",),
            donate_argnames=("kv",),
            compiler_options=COMPILER_OPTIONS,
        )

    def step(self, batch: Batch, inputs: Mapping[str, Array]) -> dict[str, Array]:
        rows = {True: len(batch.logit_rows), False: batch.token_count}
        out = {kind.name: _empty(kind, rows[is_logits]) for kind, is_logits in self._outputs}
        for grid in split(batch, self._windows, self._pages, self._page_tokens):
            self._step(grid, batch, inputs, out)
        self._steps += 1
        return out

    def export_pages(self, layer: int, pages: Int32) -> tuple[Array, Array]:
        layout = self.kv_layouts[layer]
        k, v = (
            np.asarray(side.reshape(-1, layout.page_tokens, *side.shape[1:])[pages]).astype(DTYPES[layout.dtype])
            for side in self._kv[layer]
        )
        return k, v

    def import_pages(self, layer: int, pages: Int32, k: Array, v: Array) -> None:
        slots = (pages[:, None] * self._page_tokens + np.arange(self._page_tokens)).reshape(-1)
        self._kv[layer] = tuple(  # type: ignore[assignment]
            side.at[slots].set(jnp.asarray(new, side.dtype).reshape(-1, *side.shape[1:]))
            for side, new in zip(self._kv[layer], (k, v), strict=True)
        )

    def stats(self) -> dict[str, int | float | str]:
        """`compiled_shapes` counts programs: a shape met again compiles nothing."""
        return {
            "steps": self._steps,
            "compiled_shapes": self._compiles,
            "weight_bytes": sum(weight.nbytes for weight in self._weights.values()),
            "kv_bytes": sum(side.nbytes for pair in self._kv for side in pair),
        }

    def close(self) -> None:
        self._weights, self._kv = {}, []

    def _step(self, grid: Grid, batch: Batch, inputs: Mapping[str, Array], out: dict[str, Array]) -> None:
        """Run one grid and put its rows where they belong."""
        count = len(grid.tokens)
        given = {}
        for name in self._sig.inputs:
            values = np.zeros((count, inputs[name].shape[1]), np.float32 if self._wide else inputs[name].dtype)
            values[grid.padded] = inputs[name][grid.rows]
            given[name] = values
        decode = len(grid.kv_lens) == count
        every_row = decode or len(grid.logit_rows) > 1
        wanted = None if every_row else (grid.logit_rows if len(grid.logit_rows) else np.zeros(1, np.int32))
        facts = {
            "tokens": grid.tokens,
            "positions": grid.positions,
            "kv_lens": grid.kv_lens,
            "slots": grid.slots,
            "pages": grid.pages,
            "first": grid.first,
        }
        tables = [_table(table, grid.positions) for table in self._tables]
        results, self._kv = self._run(
            self._weights,
            given,
            facts,
            tables,
            wanted if self._has_logits else None,
            kv=self._kv,
            every_row=every_row and self._has_logits,
        )
        chosen = np.searchsorted(batch.logit_rows, grid.rows[np.isin(grid.padded, grid.logit_rows)])
        for kind, is_logits in self._outputs:
            values = np.asarray(results[kind.name]).astype(DTYPES[kind.dtype], copy=False)
            if not is_logits:
                out[kind.name][grid.rows] = values[grid.padded]
            elif len(chosen):
                order = np.sort(grid.logit_rows)
                out[kind.name][chosen] = values[order] if every_row else values

    def _trace(
        self,
        weights: dict[tuple[str, ...], jax.Array],
        inputs: dict[str, jax.Array],
        facts: dict[str, Any],
        tables: list[tuple[jax.Array, jax.Array]],
        logit_rows: jax.Array | None,
        *,
        kv: Pages,
        every_row: bool,
    ) -> tuple[dict[str, jax.Array], Pages]:
        """The program. JAX runs this only to compile a new shape, which is how compiles are counted."""
        self._compiles += 1
        run = Run(
            weights=weights,
            kv=dict(zip(self._sig.kv.values(), kv, strict=True)),
            tables=dict(zip(self._tables, tables, strict=True)),
            logit_rows=None if every_row else logit_rows,
            page_tokens=self._page_tokens,
            **facts,
        )
        env: dict[SSAValue, Any] = {arg: inputs[name] for name, arg in self._sig.inputs.items()}
        for trace, operands, results in self._program:
            made = trace.run(run, *[env[value] for value in operands if value in env])
            env.update(zip(results, made if len(results) > 1 else (made,), strict=True))
        outputs = {name: env[value] for name, value in self._sig.outputs.items()}
        return outputs, [run.kv[value] for value in self._sig.kv.values()]

    def _load(
        self, module: ModuleOp, traces: list[Trace], folder: Path, root: Path | None
    ) -> dict[tuple[str, ...], jax.Array]:
        refs = read_weights_json(folder / "weights.json")
        check_weights(module, refs)
        kinds = {}
        for name, op in weights(module).items():
            assert isinstance(op.result.type, TensorType)
            kinds[name] = dtype_name(op.result.type.element_type)
        loaded: dict[tuple[str, ...], jax.Array] = {}
        for names in dict.fromkeys(key for trace in traces for key in trace.weights):
            rows = [refs[name].shape[0] for name in names]
            dtype = np.dtype(np.float32) if self._wide else DTYPES[kinds[names[0]]]
            stacked = np.empty((sum(rows), *refs[names[0]].shape[1:]), dtype)
            for part, name in zip(np.split(stacked, np.cumsum(rows)[:-1]), names, strict=True):
                part[:] = read_weight(refs[name], kinds[name], root)
            loaded[names] = jax.device_put(stacked)
        return loaded

    def _zeros(self, layout: KVLayout) -> tuple[jax.Array, jax.Array]:
        slots = self._pages[kv_class(layout.window)] * layout.page_tokens
        dtype = np.float32 if self._wide else DTYPES[layout.dtype]
        k, v = (jnp.zeros((slots, layout.kv_heads, layout.head_dim), dtype) for _ in range(2))
        return k, v


def _empty(kind: Boundary, rows: int) -> Array:
    width = kind.shape[1]
    assert width is not None
    return np.empty((rows, width), DTYPES[kind.dtype])


def _table(table: RopeTable, positions: NDArray[np.int32]) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
    """cos and sin, [T, D / 2], of float32 angles."""
    angle = angles(table.rope, table.head_dim, positions).astype(np.float64)
    return np.cos(angle).astype(np.float32), np.sin(angle).astype(np.float32)
