"""A loaded slice that is one `plait.opaque`: StableHLO text, compiled by XLA when a length first comes.

Legend: L tokens of a program, R rows of logits, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import ShapeDtypeStruct, export
from jaxlib.mlir.dialects import stablehlo
from numpy.typing import NDArray

from plait.backends.base import TOKENS, Array, Batch, Int32, LoadOptions
from plait.backends.kernels.lowering import check_weights, operand_dtype, weight_name
from plait.backends.weights import read_weight, read_weights_json
from plait.backends.xla.arrays import devices_of
from plait.backends.xla.best import best_tokens
from plait.errors import UnsupportedError
from plait.ir import kv_layouts, read_module, signature
from plait.ir.module import ops
from plait.ir.ops import OpaqueOp
from plait.spec import KVLayout, kv_class


def array_kind(shape: Sequence[int], dtype: Any) -> ShapeDtypeStruct:
    """What JAX knows of an array before there is one."""
    return ShapeDtypeStruct(shape, dtype)  # type: ignore[no-untyped-call]


def stablehlo_function(
    text: str, inputs: Sequence[ShapeDtypeStruct], outputs: Sequence[ShapeDtypeStruct]
) -> Callable[..., Any]:
    """A function that JAX traces as a call of the text's `@main`: arrays like `inputs` in, a list like `outputs` back.

    JAX exports a function of the same signature, whose body is then exchanged for the text. Which platform that was
    made for is not asked: StableHLO is for all of them.
    """

    def stand_in(*_: jax.Array) -> list[jax.Array]:
        return [jnp.zeros(kind.shape, kind.dtype) for kind in outputs]

    make = export.export(
        jax.jit(stand_in, keep_unused=True),
        platforms=("cpu",),
        disabled_checks=[export.DisabledSafetyCheck.platform()],
    )
    call: Callable[..., Any] = replace(make(*inputs), mlir_module_serialized=portable(text)).call
    return call


def portable(text: str) -> bytes:
    """StableHLO text as the artifact that JAX takes. Raises UnsupportedError `stablehlo` where it is no such text."""
    try:
        body: bytes = stablehlo.serialize_portable_artifact_str(text, stablehlo.get_current_version())
    except Exception as err:
        raise UnsupportedError(
            "stablehlo", "XLA does not take the program", why=str(err) or "it holds ops that are not StableHLO"
        ) from err
    return body


class OpaqueSlice:
    """`plait.backends.base.Executable`. Each sequence whose logits are wanted is one call of a program, from its first
    token on; what the KV pages hold is its token ids, and they stay on the host."""

    def __init__(self, folder: Path, runs_on: str, options: LoadOptions) -> None:
        module = read_module(folder / "slice.mlir")
        self._op = next(op for op in ops(module) if isinstance(op, OpaqueOp))
        self.runs_on = runs_on
        self.kv_layouts: tuple[KVLayout, ...] = kv_layouts(module, options.page_tokens)
        (self._output,) = signature(module).outputs
        refs = read_weights_json(folder / "weights.json")
        check_weights(module, refs)
        (device,) = devices_of(1, options.ordinal)
        self._weights = [
            jax.device_put(
                read_weight(refs[weight_name(self._op, w)], operand_dtype(self._op, w), options.weight_root), device
            )
            for w in self._op.weights
        ]
        name = kv_class(self._op.window_tokens)
        self._class, self._page_tokens = name, options.page_tokens
        self._ids: NDArray[np.int32] = np.zeros((options.pages[name], options.page_tokens), np.int32)
        self._programs: dict[int, Callable[..., jax.Array]] = {}
        self._steps = self._runs = self._compiles = 0

    def step(self, batch: Batch, inputs: Mapping[str, Array]) -> dict[str, Array]:
        count, vocabulary = len(batch.logit_rows), self._op.vocabulary.value.data
        out: Array = np.empty(count, np.int32) if batch.greedy else np.empty((count, vocabulary), np.float32)
        table, size = batch.page_tables[self._class], self._page_tokens
        for s in range(batch.sequence_count):
            start, end = int(batch.query_starts[s]), int(batch.query_starts[s + 1])
            places = batch.positions[start:end]
            self._ids[table[s, places // size], places % size] = batch.tokens[start:end]
            wanted = (batch.logit_rows >= start) & (batch.logit_rows < end)
            if wanted.any():
                ids = self._ids[table[s, : -(-int(batch.kv_lens[s]) // size)]].reshape(-1)[: batch.kv_lens[s]]
                scores, rows = self._scores(ids, batch.positions[batch.logit_rows[wanted]])
                out[wanted] = np.asarray(best_tokens(scores, vocabulary) if batch.greedy else scores)[rows]
        self._steps += 1
        return {TOKENS if batch.greedy else self._output: out}

    def export_pages(self, layer: int, pages: Int32) -> tuple[Array, Array]:
        k = self._ids[pages].astype(np.float32)[:, :, None, None]
        return k, np.zeros_like(k)

    def import_pages(self, layer: int, pages: Int32, k: Array, v: Array) -> None:
        self._ids[pages] = k[:, :, 0, 0].astype(np.int32)

    def stats(self) -> dict[str, int | float | str]:
        """`runs` counts programs run: one per sequence and step in which its logits are wanted."""
        return {
            "steps": self._steps,
            "runs": self._runs,
            "compiled_shapes": self._compiles,
            "weight_bytes": sum(weight.nbytes for weight in self._weights),
            "kv_bytes": self._ids.nbytes,
        }

    def close(self) -> None:
        self._weights, self._programs = [], {}

    def _scores(self, ids: Int32, rows: Int32) -> tuple[jax.Array, Int32]:
        """Scores (any, V) after tokens of a sequence, and which of them are those after the tokens at `rows`."""
        index = self._op.index_for(len(ids))
        length = self._op.token_lengths[index]
        assert len(ids) <= length, "the manifest's max_positions is the longest program"
        padded = np.zeros((1, length), np.int32)
        padded[0, : len(ids)] = ids
        if index not in self._programs:
            self._programs[index] = self._program(index)
        self._runs += 1
        # One row, which is what decoding asks for, or all of them: two shapes to compile, not one per count.
        asked = rows if len(rows) == 1 else np.arange(length, dtype=np.int32)
        scores = self._programs[index](self._weights, padded, asked)
        return scores, np.zeros(1, np.int32) if len(rows) == 1 else rows

    def _program(self, index: int) -> Callable[..., jax.Array]:
        length, vocabulary = self._op.token_lengths[index], self._op.vocabulary.value.data
        kinds = [array_kind(weight.shape, weight.dtype) for weight in self._weights]
        call = stablehlo_function(
            self._op.texts[index],
            [*kinds, array_kind((1, length), np.int32)],
            [array_kind((length, vocabulary), np.float32)],
        )
        return jax.jit(partial(self._trace, call))

    def _trace(self, call: Callable[..., Any], weights: list[jax.Array], ids: jax.Array, rows: jax.Array) -> jax.Array:
        """JAX runs this only to compile a new shape, which is how compiles are counted."""
        self._compiles += 1
        scores: jax.Array = call(*weights, ids)[0][rows]
        return scores
