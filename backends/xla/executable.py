"""A loaded slice in JAX."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import numpy as np
from numpy.typing import NDArray

from plait.backends.base import TOKENS, Array, Batch, Int32, LoadOptions
from plait.backends.kernels.lowering import check_weights, dequantised
from plait.backends.weights import DTYPES, read_weights_json
from plait.backends.xla.arrays import (
    devices_of,
    function,
    held_dtype,
    mesh_of,
    pool_rows,
    pool_shape,
    pool_sides,
    read,
    sharding,
    specs,
)
from plait.backends.xla.best import best_tokens
from plait.backends.xla.buckets import Grid, Shape, split
from plait.backends.xla.loaded import find
from plait.backends.xla.program import COMPILER_OPTIONS, Program
from plait.backends.xla.split import split_module
from plait.backends.xla.trace import RopeTable
from plait.errors import UserError
from plait.ir import kv_layouts, read_module
from plait.ir.numbers import NUMPY
from plait.ir.rope import tables
from plait.spec import Boundary, KVLayout


class XlaSlice:
    """`plait.backends.base.Executable` in JAX. Each grid (see `buckets`) is one call of one program: one that compile
    made, where it made one for this platform and shape, or else one that XLA compiles now.

    On a CPU host arrays are float32 whatever the dtype of the module (`arrays.held_dtype`); what an op returns is
    rounded to the module's dtype all the same (`emit._rounded`).
    """

    def __init__(self, folder: Path, runs_on: str, options: LoadOptions) -> None:
        module = read_module(folder / "slice.mlir")
        self.runs_on = runs_on
        self.kv_layouts: tuple[KVLayout, ...] = kv_layouts(module, options.page_tokens)
        self._wide = jax.default_backend() == "cpu"
        found = find(folder, options)
        self._program = program = Program(
            module, options.page_tokens, split_module(module, found.chips), attention=found.attention
        )
        self._mesh = mesh_of(devices_of(found.chips, options.ordinal))
        self._buckets, self._pages, self._stale = found.buckets, found.pages(options.pages), found.stale
        refs = read_weights_json(folder / "weights.json")
        check_weights(module, refs)
        self._dequantised = dequantised(module)
        self._weights = [
            jax.device_put(read(weight, program, refs, options.weight_root, self._wide), place)
            for weight, place in zip(program.weights, found.formats(program, self._mesh), strict=True)
        ]
        self._programs = found.load(folder, program, self._mesh, self._wide)
        self._kv = [self._zeros(index) for index in range(len(program.pools))]
        self._place = {kv: (i, layer) for i, pool in enumerate(program.pools) for layer, kv in enumerate(pool.kv)}
        self._steps = 0
        self._compiled: set[Shape] = set()
        # KV is donated: it is written in place.
        self._jitted = jax.jit(function(program, self._mesh), donate_argnums=1, compiler_options=COMPILER_OPTIONS)

    def step(self, batch: Batch, inputs: Mapping[str, Array]) -> dict[str, Array]:
        self._check_positions(batch)
        out: dict[str, Array] = {}
        for name, (kind, is_logits) in self._program.outputs.items():
            if is_logits and batch.greedy:
                out[TOKENS] = np.empty(len(batch.logit_rows), np.int32)
            else:
                out[name] = _empty(kind, len(batch.logit_rows) if is_logits else batch.token_count)
        for grid in split(batch, self._buckets, self._program.windows, self._pages, self._program.page_tokens):
            self._step(grid, batch, inputs, out)
        self._steps += 1
        return out

    def export_pages(self, layer: int, pages: Int32) -> tuple[Array, Array]:
        layout, pool = self.kv_layouts[layer], self._place[layer][0]
        rows = np.asarray(self._kv[pool][self._rows(layer, pages)]).astype(NUMPY[layout.dtype])
        shape = (len(pages), layout.page_tokens, layout.kv_heads)
        sides = pool_sides(self._program, rows, layout.kv_heads, self._program.pools[pool].sides)
        k, *v = (np.ascontiguousarray(side.reshape(*shape, layout.head_dim)) for side in sides)
        return k, v[0] if v else np.empty((*shape, layout.v_head_dim), k.dtype)

    def import_pages(self, layer: int, pages: Int32, k: Array, v: Array) -> None:
        pool = self._place[layer][0]
        sides = (k, v)[: self._program.pools[pool].sides]
        rows = pool_rows(self._program, *(side.reshape(-1, *side.shape[2:]) for side in sides))
        held = self._kv[pool]
        self._kv[pool] = held.at[self._rows(layer, pages)].set(rows.astype(held.dtype))

    def stats(self) -> dict[str, int | float | str]:
        """`compiled_shapes` counts the programs that XLA compiled here, a shape met again compiles nothing;
        `loaded_programs` those that compile made."""
        return {
            "steps": self._steps,
            "compiled_shapes": len(self._compiled),
            "loaded_programs": len(self._programs),
            "weight_bytes": sum(weight.nbytes for weight in self._weights),
            "kv_bytes": sum(pool.nbytes for pool in self._kv),
            **({"programs_unused": self._stale} if self._stale else {}),
            **self._dequantised,
        }

    def close(self) -> None:
        self._weights, self._kv, self._programs = [], [], {}

    def _check_positions(self, batch: Batch) -> None:
        """XLA takes the last row of a table for whatever lies beyond it."""
        count, last = self._program.positions, int(batch.positions.max(initial=0))
        if count is not None and last >= count:
            raise UserError(
                "positions",
                f"a token stands at position {last}, and the model has {count}",
                why="its positions are learned, one row of a table each",
                hint=f"keep prompt and answer together within {count} tokens",
            )

    def _step(self, grid: Grid, batch: Batch, inputs: Mapping[str, Array], out: dict[str, Array]) -> None:
        """Run one grid and put its rows where they belong."""
        program, every_row = self._program, grid.shape.every_row
        given = {}
        for name, kind in program.inputs.items():
            values = np.zeros((grid.shape.tokens, inputs[name].shape[1]), held_dtype(kind.dtype, self._wide))
            values[grid.padded] = inputs[name][grid.rows]
            given[name] = values
        wanted = grid.logit_rows if len(grid.logit_rows) else np.zeros(1, np.int32)
        rows = wanted if program.has_logits and not every_row else None
        results, self._kv = self._run(grid.shape, given, facts_of(grid), tables_of(program, grid), rows)
        chosen = np.searchsorted(batch.logit_rows, grid.rows[np.isin(grid.padded, grid.logit_rows)])
        for name, (kind, is_logits) in program.outputs.items():
            width, made = _width(kind), results[name]
            if not is_logits:
                values = np.asarray(made).astype(DTYPES[kind.dtype], copy=False)[:, :width]
                out[name][grid.rows] = values[grid.padded]
            elif len(chosen):
                values = np.asarray(best_tokens(made, width) if batch.greedy else made)
                into = out[TOKENS] if batch.greedy else out[name]
                into[chosen] = (values if batch.greedy else values[:, :width])[grid.logit_rows if every_row else ...]

    def _run(self, shape: Shape, *arguments: Any) -> tuple[dict[str, jax.Array], list[jax.Array]]:
        shape = replace(shape, every_row=shape.every_row and self._program.has_logits)
        run = self._programs.get(shape)
        if run is None:
            self._compiled.add(shape)
        results: tuple[dict[str, jax.Array], list[jax.Array]]
        results = (run or self._jitted)(self._weights, self._kv, *arguments)
        return results

    def _rows(self, layer: int, pages: Int32) -> NDArray[np.int64]:
        """Rows of the pool that hold a layer's pages."""
        pool, number = self._place[layer]
        size = self._program.page_tokens
        first = number * self._pages[self._program.pools[pool].kv_class]
        return ((first + pages.astype(np.int64))[:, None] * size + np.arange(size)).reshape(-1)

    def _zeros(self, index: int) -> jax.Array:
        program = self._program
        pool = program.pools[index]
        shape = pool_shape(pool, program, self._pages[pool.kv_class])
        place = sharding(self._mesh, specs(program)[1][index])
        return jax.numpy.zeros(shape, held_dtype(pool.dtype, self._wide), device=place)


def _empty(kind: Boundary, rows: int) -> Array:
    return np.empty((rows, _width(kind)), DTYPES[kind.dtype])


def _width(kind: Boundary) -> int:
    width = kind.shape[1]
    assert width is not None
    return width


def facts_of(grid: Grid) -> dict[str, Any]:
    """The facts of a grid as `Program.trace` takes them."""
    names = ("tokens", "positions", "kv_lens", "slots", "pages", "first")
    return {name: getattr(grid, name) for name in names}


def tables_of(program: Program, grid: Grid) -> list[tuple[NDArray[np.float32], NDArray[np.float32]]]:
    """The rotary tables of a grid."""
    return [_table(table, grid.positions) for table in program.tables]


def _table(table: RopeTable, positions: NDArray[np.int32]) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
    """cos and sin, [T, rotary_dim / 2], of float32 angles."""
    cos, sin = tables(table.rope, table.rotary_dim, positions)
    return cos.astype(np.float32), sin.astype(np.float32)
