"""Runs a launch plan on a device: weights and pages in, one batch at a time."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from math import prod
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from plait.backends.base import TOKENS, Array, Batch, Int32, LoadOptions
from plait.backends.kernels.gpu.arena import size_bytes
from plait.backends.kernels.gpu.batch import Facts, fill
from plait.backends.kernels.gpu.device import Call, Device, Memory, Region
from plait.backends.kernels.gpu.experts import indices
from plait.backends.kernels.gpu.expression import evaluate
from plait.backends.kernels.gpu.held import Reader
from plait.backends.kernels.gpu.launch import ALIGNMENT, ELEMENT_BYTES, SIDES, LaunchPlan, Side, Step, Value
from plait.backends.kernels.gpu.table import KERNELS
from plait.backends.weights import read_weights_json
from plait.errors import ArtifactError
from plait.ir.numbers import NUMPY
from plait.spec import kv_class

Symbols = tuple[tuple[str, int], ...]

#: Batches of so many different shapes stay resolved to launches.
_SHAPES = 256

_OUTPUTS = NUMPY | {"int32": np.dtype(np.int32)}
_FACT_DTYPES: dict[str, np.dtype[Any]] = {"i32": np.dtype(np.int32), "fp32": np.dtype(np.float32)}


class _Place(NamedTuple):
    """Where a fact of the batch lies among all of them, in bytes."""

    offset: int
    nbytes: int
    shape: tuple[int, ...]


class LaunchSlice:
    """`plait.backends.base.Executable` of a launch plan.

    Args:
        folder: the slice's, with `weights.json` and the files of the plan's binaries.
        runs_on: what the device is called.

    Raises:
        ArtifactError: `launch-bounds`: larger batches, or other pages, than the plan was made for.
        CheckpointError: `weights.json` and the plan disagree.
        FitError: the device has too little memory.
    """

    def __init__(self, folder: Path, plan: LaunchPlan, device: Device, runs_on: str, options: LoadOptions) -> None:
        _check_bounds(plan, options)
        self.runs_on, self.kv_layouts = runs_on, plan.kv
        self._plan, self._device, self._steps = plan, device, 0
        self._functions = [device.load(binary, folder) for binary in plan.binaries]
        self._weights, self._pages = dict[str, Memory](), dict[str, Memory]()
        self._arena = self._facts = device.allocate(0)
        self._host = device.host(0)
        self._queries = _queries(plan)
        self._programs = functools.lru_cache(_SHAPES)(self._resolve)
        self._graphs: dict[Symbols, Call | None] = {}
        try:
            self._load(folder, options)
        except BaseException:
            self.close()  # whoever keeps the error keeps this object, and need not keep its memory
            raise

    def step(self, batch: Batch, inputs: Mapping[str, Array]) -> dict[str, Array]:
        facts = self._make_facts(batch)
        for name, value in self._plan.inputs.items():
            self._device.write(self._arena, self._plan.activations[value.buffer].offset, _bytes(inputs[name]))
        self._send(facts)
        symbols, outputs = facts.symbols, dict[str, list[Array]]()
        rows, most = symbols["A"], self._plan.bounds.rows
        for first in range(0, max(rows, 1), most):
            part = symbols | {"R": min(rows - first, most)}
            self._launch(part, first)
            for name, value in self._plan.outputs.items():
                if evaluate(value.when, symbols) and (value.rows == "R" or not first):
                    real = min(len(batch.logit_rows) - first, most) if value.rows == "R" else batch.token_count
                    outputs.setdefault(name, []).append(self._read(value, real))
        self._steps += 1
        made = {name: parts[0] if len(parts) == 1 else np.concatenate(parts) for name, parts in outputs.items()}
        return made | {TOKENS: made[TOKENS][:, 0]} if TOKENS in made else made

    def export_pages(self, layer: int, pages: Int32) -> tuple[Array, Array]:
        k, v = (np.empty(self._shape(layer, side, len(pages)), self._kv_dtype(layer)) for side in SIDES)
        self._each_page(layer, pages, (k, v), self._device.read)
        return k, v

    def import_pages(self, layer: int, pages: Int32, k: Array, v: Array) -> None:
        for side, values in zip(SIDES, (k, v), strict=True):
            shape, dtype = self._shape(layer, side, len(pages)), self._kv_dtype(layer)
            assert values.shape == shape and values.dtype == dtype, f"pages are {values.dtype} {values.shape}"
        self._each_page(layer, pages, (np.ascontiguousarray(k), np.ascontiguousarray(v)), self._device.write)

    def stats(self) -> dict[str, int | float | str]:
        return {
            "steps": self._steps,
            "weight_bytes": sum(weight.nbytes for weight in self._plan.weights.values()),
            "kv_bytes": sum(memory.nbytes for memory in self._pages.values()),
            "arena_bytes": self._plan.arena_bytes,
            "graphs": sum(graph is not None for graph in self._graphs.values()),
        }

    def close(self) -> None:
        self._programs.cache_clear()
        self._graphs.clear()
        self._weights.clear()
        self._pages.clear()
        self._functions = []
        self._arena = self._facts = self._device.allocate(0)
        self._device.close()

    def memory(self, name: str) -> Region:
        """The device memory of a weight (`w0`), of pages (`k0`, `v0`), or of an activation at its largest."""
        if name in self._weights:
            return Region(self._weights[name], 0, self._weights[name].nbytes)
        if name in self._pages:
            return Region(self._pages[name], 0, self._pages[name].nbytes)
        buffer = self._plan.activations[name]
        return Region(self._arena, buffer.offset, buffer.nbytes)

    # Tuning

    def replan(self, plan: LaunchPlan, folder: Path) -> None:
        """Go on with a plan of the same slice that differs in its binaries only, and in what these want to know of a
        batch; `folder` has their files."""
        same = ("bounds", "weights", "pages", "activations")
        assert all(getattr(plan, name) == getattr(self._plan, name) for name in same), "it is another slice"
        self._programs.cache_clear()
        self._graphs.clear()
        self._plan = plan
        self._functions = [self._device.load(binary, folder) for binary in plan.binaries]
        self._queries = _queries(plan)

    def single(self, batch: Batch, index: int) -> Call | None:
        """One step's launch in this batch, good until the next one; None where the batch leaves it out."""
        facts = self._make_facts(batch)
        self._send(facts)
        symbols = facts.symbols | {"R": min(facts.symbols["A"], self._plan.bounds.rows)}
        step = self._plan.steps[index]
        binary = self._plan.binaries[step.choices[0].binary]
        for name, array in indices(KERNELS[binary.kernel], binary.constants, symbols["T"]).items():
            pointer = step.pointers[name]
            assert pointer is not None, "an activation"
            self._device.write(self._arena, self._plan.activations[pointer.buffer].offset, _bytes(array))
        return self._call(step, symbols, self._regions(symbols, 0))

    # Loading

    def _load(self, folder: Path, options: LoadOptions) -> None:
        """Take the memory, and fill that of the weights."""
        plan, allocate = self._plan, self._device.allocate
        self._arena = allocate(plan.arena_bytes)
        for name, pages in plan.pages.items():
            count = options.pages[kv_class(plan.kv[pages.layer].window)]
            self._pages[name] = allocate(count * self._page_bytes(pages.layer, pages.side))
        reader = Reader(read_weights_json(folder / "weights.json"), options.weight_root)
        for name, weight in plan.weights.items():
            self._weights[name], offset = allocate(weight.nbytes), 0
            for array in reader.arrays(weight):
                self._device.write(self._weights[name], offset, _bytes(array))
                offset += array.nbytes
            assert offset == weight.nbytes, f"{name} has {offset} bytes, not {weight.nbytes}"

    def _kv_dtype(self, layer: int) -> np.dtype[Any]:
        return NUMPY[self._plan.kv[layer].dtype]

    def _shape(self, layer: int, side: Side, pages: int) -> tuple[int, int, int, int]:
        layout = self._plan.kv[layer]
        width = layout.head_dim if side == "k" else layout.v_head_dim
        return pages, layout.page_tokens, layout.kv_heads, width

    def _page_bytes(self, layer: int, side: Side) -> int:
        return prod(self._shape(layer, side, 1)) * self._kv_dtype(layer).itemsize

    def _each_page(
        self, layer: int, pages: Int32, sides: Sequence[Array], move: Callable[[Memory, int, NDArray[Any]], None]
    ) -> None:
        for side, values in zip(SIDES, sides, strict=True):
            if f"{side}{layer}" not in self._pages:
                continue  # K holds the values
            size = self._page_bytes(layer, side)
            for page, value in zip(pages.tolist(), values, strict=True):
                move(self._pages[f"{side}{layer}"], page * size, _bytes(value))

    # One batch

    def _make_facts(self, batch: Batch) -> Facts:
        bounds = self._plan.bounds
        facts = Facts(batch, bounds.page_tokens)
        tokens, decodes = facts.symbols["T"], facts.symbols["D"]
        assert tokens <= bounds.tokens and decodes <= bounds.sequences, "the batch is larger than the plan's bounds"
        padded = self._bucket(facts)
        if padded is not None:
            facts = Facts(batch, bounds.page_tokens, padded)
        facts.tiles(self._queries)
        return facts

    def _bucket(self, facts: Facts) -> int | None:
        """How many sequences a decode step is padded to, where steps are captured: no more than there is memory for."""
        count, bounds = facts.symbols["D"], self._plan.bounds
        most = min(bounds.sequences, bounds.tokens)
        wants_head = facts.symbols["A"] > 0 or self._plan.head == len(self._plan.steps)
        if not self._device.graphs or not facts.is_decode or not wants_head:
            return None
        return min(most, 1 << (count - 1).bit_length() if count <= 16 else -(-count // 16) * 16)

    def _send(self, facts: Facts) -> None:
        """Every fact of the batch, in one copy."""
        places, nbytes = self._places(facts.symbols)
        if nbytes > self._facts.nbytes:
            self._facts = self._device.allocate(nbytes * 3 // 2)
            self._host = self._device.host(self._facts.nbytes)
            self._programs.cache_clear()  # they point at the memory from before
            self._graphs.clear()
        for name, (offset, size, shape) in places.items():
            fact = self._plan.facts[name]
            fill(self._host[offset : offset + size].view(_FACT_DTYPES[fact.type]).reshape(shape), fact, facts)
        self._device.send(self._facts, self._host[:nbytes])

    def _places(self, symbols: Mapping[str, int]) -> tuple[dict[str, _Place], int]:
        """Where every fact lies, and the bytes of all."""
        places, offset = {}, 0
        for name, fact in self._plan.facts.items():
            shape = tuple(evaluate(size, symbols) for size in fact.shape)
            nbytes = prod(shape) * ELEMENT_BYTES[fact.type]
            places[name] = _Place(offset, nbytes, shape)
            offset += -(-nbytes // ALIGNMENT) * ALIGNMENT
        return places, offset

    def _launch(self, symbols: dict[str, int], first: int) -> None:
        """Everything for the first logit rows; for later ones the head alone."""
        key = tuple(symbols.items())
        if first or not self._device.graphs or not _is_decode(symbols):
            self._device.run(self._programs(key, first))
            return
        if key not in self._graphs:  # the first time as it is: code may still be loaded lazily
            self._graphs[key] = None
            self._device.run(self._programs(key, 0))
            return
        graph = self._graphs[key] or self._device.capture(self._programs(key, 0))
        self._graphs[key] = graph
        self._device.run([graph])

    def _resolve(self, key: Symbols, first: int) -> list[Call]:
        """The launches of a batch with these symbols, from logit row `first` on."""
        symbols = dict(key)
        regions = self._regions(symbols, first)
        steps = self._plan.steps[self._plan.head if first else 0 :]
        return [call for step in steps if (call := self._call(step, symbols, regions)) is not None]

    def _regions(self, symbols: Mapping[str, int], first: int) -> dict[str, Region]:
        plan = self._plan
        made = {name: self.memory(name) for name in (*self._weights, *self._pages)}
        for name, buffer in plan.activations.items():
            made[name] = Region(self._arena, buffer.offset, size_bytes(buffer, symbols))
        for name, (offset, nbytes, _) in self._places(symbols)[0].items():
            fact = plan.facts[name]
            skipped = first * ELEMENT_BYTES[fact.type] if fact.kind == "logit_rows" else 0
            made[name] = Region(self._facts, offset + skipped, nbytes - skipped)
        return made

    def _call(self, step: Step, symbols: Mapping[str, int], regions: Mapping[str, Region]) -> Call | None:
        if not evaluate(step.when, symbols):
            return None
        rows = symbols[step.rows]
        choice = next(choice for choice in step.choices if choice.most is None or rows <= choice.most)
        binary = self._plan.binaries[choice.binary]
        scalars = {k: evaluate(v, symbols) if isinstance(v, str) else v for k, v in step.scalars.items()}
        extra = {name: evaluate(text, symbols) for name, text in step.names.items()}
        known = {**binary.constants, **binary.tile, **symbols, **scalars, **extra}
        names = {name: int(value) for name, value in known.items() if isinstance(value, int)}
        x, y, z = (evaluate(axis, names) for axis in binary.grid)
        if not x * y * z:
            return None
        pointers = [_at(step.pointers[name], regions) for name in binary.types]
        values = [scalars[name] for name in binary.scalars]
        return self._device.bind(self._functions[choice.binary], (x, y, z), pointers, values)

    def _read(self, value: Value, rows: int) -> Array:
        """A boundary tensor: columns of the first rows of its buffer."""
        dtype = _OUTPUTS[value.dtype]
        whole = np.empty((rows, value.stride), dtype)
        self._device.read(self._arena, self._plan.activations[value.buffer].offset, _bytes(whole))
        return np.ascontiguousarray(whole[:, value.column : value.column + value.width])


def _at(pointer: Any, regions: Mapping[str, Region]) -> Region | None:
    if pointer is None:
        return None
    memory, offset, nbytes = regions[pointer.buffer]
    return Region(memory, offset + pointer.offset, nbytes - pointer.offset)


def _queries(plan: LaunchPlan) -> list[int]:
    """The tokens of a prefill tile, of every kind of tile."""
    return sorted({fact.queries for fact in plan.facts.values() if fact.queries is not None})


def _is_decode(symbols: Mapping[str, int]) -> bool:
    return symbols["D"] == symbols["S"]


def _bytes(array: Array) -> NDArray[Any]:
    """A contiguous array as bytes, without a copy where it is contiguous already."""
    return np.ascontiguousarray(array).reshape(-1).view(np.uint8)


def _check_bounds(plan: LaunchPlan, options: LoadOptions) -> None:
    bounds = plan.bounds
    asked = {"max_step_tokens": options.max_step_tokens, "max_sequences": options.max_sequences}
    made = {"max_step_tokens": bounds.tokens, "max_sequences": bounds.sequences}
    wrong = [f"{name} {asked[name]} > {made[name]}" for name in asked if asked[name] > made[name]]
    if options.page_tokens != bounds.page_tokens:
        wrong.append(f"page_tokens {options.page_tokens} instead of {bounds.page_tokens}")
    if wrong:
        raise ArtifactError(
            "launch-bounds", "the slice was compiled for other batches", why="; ".join(wrong), hint="compile again"
        )
