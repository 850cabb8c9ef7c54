"""A loaded slice in torch on the host: its weights, its KV pages, and its module as a flat list of calls."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from xdsl.dialects.builtin import ModuleOp, TensorType
from xdsl.ir import SSAValue

from plait.backends.base import TOKENS, Array, Batch, Int32, LoadOptions, best_tokens
from plait.backends.kernels.arrays import to_numpy, to_torch
from plait.backends.kernels.attention import Cache
from plait.backends.kernels.lowering import check_weights, dequantised
from plait.backends.kernels.matmul import Packer
from plait.backends.kernels.step import Step
from plait.backends.kernels.torch_eager import LOWERING
from plait.backends.weights import is_interleaved, read_stacked, read_together, read_weights_json, stored_of
from plait.ir import kv_layouts, read_module, signature, weights
from plait.ir.module import ops
from plait.ir.numbers import NUMPY
from plait.ir.ops import SCORING, PlaitOp, WeightOp
from plait.ir.types import KVType, dtype_name
from plait.spec import KVLayout, WeightRef, kv_class

Call = tuple[Callable[..., Any], tuple[int, ...], tuple[int, ...], tuple[int, ...]]
"""A kernel, the slots it reads, the slots it writes, and the slots nobody reads afterwards."""


class TorchSlice:
    """`plait.backends.base.Executable` in torch."""

    def __init__(self, folder: Path, runs_on: str, options: LoadOptions) -> None:
        module = read_module(folder / "slice.mlir")
        if options.threads is not None and torch.get_num_threads() != options.threads:
            torch.set_num_threads(options.threads)
        self.runs_on = runs_on
        self.kv_layouts: tuple[KVLayout, ...] = kv_layouts(module, options.page_tokens)
        self._page_tokens, self._steps = options.page_tokens, 0
        self._sizes: dict[str, int] = {}
        self._refs, self._root = read_weights_json(folder / "weights.json"), options.weight_root
        self._uses = Counter({name: len(list(op.result.uses)) for name, op in weights(module).items()})
        check_weights(module, self._refs)
        self._dequantised = dequantised(module)
        self._held: dict[tuple[str, str], Tensor] = {}
        # What is read with the same bytes is kept until it is asked for.
        self._interleaved: dict[WeightRef | None, list[str]] = {}
        for name, ref in self._refs.items():
            if is_interleaved(ref):
                self._interleaved.setdefault(stored_of(ref), []).append(name)
        sig = signature(module)
        self._outputs = {name: isinstance(value.owner, SCORING) for name, value in sig.outputs.items()}
        self._input_names = list(sig.inputs)
        with torch.inference_mode():
            self._caches: dict[SSAValue, Cache] = {value: self._cache(value, options) for value in sig.kv.values()}
            self._packer = Packer()
            with self._packer.behind():
                self._calls, self._slots = self._program(module)
        self._held.clear()

    def step(self, batch: Batch, inputs: Mapping[str, Array]) -> dict[str, Array]:
        with torch.inference_mode():
            slots: list[Any] = [None] * self._slots
            for slot, name in enumerate(self._input_names):
                slots[slot] = to_torch(inputs[name])
            step = Step(batch, self._page_tokens)
            for kernel, reads, writes, dead in self._calls:
                result = kernel(step, *[slots[slot] for slot in reads])
                if len(writes) == 1:
                    slots[writes[0]] = result
                else:
                    for number, slot in enumerate(writes):
                        slots[slot] = result[number]
                del result  # or a part of it would outlive its slot, until the next op with several results
                for slot in dead:
                    slots[slot] = None
            self._steps += 1
            made: dict[str, Array] = {}
            for (name, is_logits), slot in zip(self._outputs.items(), self._results, strict=True):
                values = to_numpy(slots[slot])
                made |= {TOKENS: best_tokens(values)} if is_logits and batch.greedy else {name: values}
            return made

    def export_pages(self, layer: int, pages: Int32) -> tuple[Array, Array]:
        with torch.inference_mode():
            k, *rest = self._layer(layer).pages.index_select(1, self._index(pages)).unbind(0)
            dtype = NUMPY[self.kv_layouts[layer].dtype]
            v = rest[0] if rest else k[..., :0]
            return to_numpy(k).view(dtype), to_numpy(v).view(dtype)

    def import_pages(self, layer: int, pages: Int32, k: Array, v: Array) -> None:
        with torch.inference_mode():
            held = self._layer(layer).pages
            for side, values in zip(held, (k, v)[: len(held)], strict=True):
                own = values.view(np.uint8) if held.dtype == torch.uint8 else values
                side.index_copy_(0, self._index(pages), to_torch(own))

    def stats(self) -> dict[str, int | float | str]:
        kv_bytes = sum(cache.pages.nbytes for cache in self._caches.values())
        return {
            "steps": self._steps,
            "weight_bytes": sum(self._sizes.values()),
            "kv_bytes": kv_bytes,
            "threads": torch.get_num_threads(),
            **self._dequantised,
        }

    def wait(self) -> None:
        """Until all matrices are packed, from when on steps take no longer than they must."""
        self._packer.wait()

    def close(self) -> None:
        self._packer.close()
        self._calls, self._caches = [], {}

    def weight(self, name: str, dtype: str) -> Tensor:
        """See `torch_eager.Slice`."""
        key = name, dtype
        if key not in self._held:
            ref = self._refs[name]  # which may be whole runs of a tensor whose other rows alternate
            names = self._interleaved[stored_of(ref)] if is_interleaved(ref) else [name]
            for one, array in zip(
                names, read_together([self._refs[one] for one in names], dtype, self._root), strict=True
            ):
                self._held[one, dtype] = to_torch(array)
                self._sizes[one] = array.nbytes
        return self._held[key] if self.is_shared(name) else self._held.pop(key)

    def stacked(self, names: Sequence[str], dtype: str) -> Tensor:
        """See `torch_eager.Slice`. What another op holds too is read again."""
        out = to_torch(read_stacked([self._refs[name] for name in names], dtype, self._root))
        size = out[:1].nbytes
        self._sizes |= {name: self._refs[name].shape[0] * size for name in names}
        return out

    def is_shared(self, name: str) -> bool:
        """See `torch_eager.Slice`."""
        return self._uses[name] > 1

    def cache(self, value: SSAValue) -> Cache:
        """See `torch_eager.Slice`."""
        return self._caches[value]

    def _cache(self, value: SSAValue, options: LoadOptions) -> Cache:
        kind = value.type
        assert isinstance(kind, KVType)
        return Cache(
            options.pages[kv_class(kind.window_tokens)],
            options.page_tokens,
            kind.kv_heads.data,
            kind.head_dim.data,
            dtype_name(kind.dtype),
            kind.value_features if kind.is_latent else None,
        )

    def _program(self, module: ModuleOp) -> tuple[list[Call], int]:
        sig = signature(module)
        slot_of: dict[SSAValue, int] = {}
        for value in sig.inputs.values():
            slot_of[value] = len(slot_of)
        program = [op for op in ops(module) if not isinstance(op, WeightOp)]
        for op in program:
            for result in op.results:
                slot_of[result] = len(slot_of)
        self._results = [slot_of[value] for value in sig.outputs.values()]
        last_use = {slot_of[value]: op for op in program for value in _activations(op)}
        calls: list[Call] = []
        for op in program:
            reads = tuple(slot_of[value] for value in _activations(op))
            writes = tuple(slot_of[result] for result in op.results)
            dead = {slot for slot in reads if last_use[slot] is op} | {slot for slot in writes if slot not in last_use}
            calls.append((LOWERING.emit(op)(self), reads, writes, tuple(dead - set(self._results))))
        return calls, len(slot_of)

    def _layer(self, layer: int) -> Cache:
        return list(self._caches.values())[layer]

    def _index(self, pages: Int32) -> Tensor:
        return to_torch(pages.astype("int64"))


def _activations(op: PlaitOp) -> list[SSAValue]:
    """The operands that are computed in the step."""
    return [
        value for value in op.operands if isinstance(value.type, TensorType) and not isinstance(value.owner, WeightOp)
    ]
