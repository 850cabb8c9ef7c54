"""Slices to measure: modules of one op repeated, their weights, and the batches that they step."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from math import prod
from pathlib import Path

import numpy as np
from xdsl.dialects.builtin import ModuleOp, TensorType
from xdsl.ir import SSAValue

from plait.backends.base import Backend, Batch, CompileOptions, Executable, LoadOptions
from plait.backends.weights import weights_json
from plait.cost_models.profiled import PAGE_TOKENS
from plait.ir import Builder, Rope, kv_classes, print_module, weights
from plait.ir.module import ops
from plait.ir.numbers import NUMPY
from plait.ir.ops import PlaitOp
from plait.ir.types import dtype_bytes, dtype_name
from plait.spec import Encoding, WeightRef, kv_class

VOCABULARY = 256

#: Attention is measured with four query heads to a KV head.
HEADS, KV_HEADS, HEAD_DIM = 8, 2, 64

#: The width of what is no product.
WIDTH = 512

#: Products that stand between the ops of a chain, so that each finds the caches as it does in a model.
BETWEEN = 8

_ROPE = Rope(10000.0)

Chain = Callable[[Builder, SSAValue, int], SSAValue]
"""Adds the i-th op to the value before it."""


#: Op -> how one is added, for ops that move activations.
MOVING: dict[str, Chain] = {
    "rms_norm": lambda b, x, i: b.rms_norm(x, f"norm{i}", 1e-5),
    "add": lambda b, x, i: b.add(x, x),
    "silu_mul": lambda b, x, i: b.silu_mul(x, x),
    "rope": lambda b, x, i: b.rope(x, HEAD_DIM, _ROPE),
}


def rows_of_table(dtype: str, width: int, vocabulary: int = VOCABULARY) -> ModuleOp:
    """Nothing but the input of the others."""
    b = Builder("measure", dtype)
    return b.finish({"y": b.embed("table", vocabulary, width)})


def linears(dtype: str, width: int, count: int) -> ModuleOp:
    """`count` products, one after the other, on rows of a table."""
    b = Builder("measure", dtype)
    x = b.embed("table", VOCABULARY, width)
    b.block = 0
    for i in range(count):
        x = b.linear(x, f"w{i}", width)
    return b.finish({"y": x})


def chain(dtype: str, count: int, add: Chain) -> ModuleOp:
    """`BETWEEN` products, the first `count` of which have an op after them."""
    b = Builder("measure", dtype)
    x = b.embed("table", VOCABULARY, WIDTH)
    b.block = 0
    for i in range(BETWEEN):
        x = b.linear(x, f"w{i}", WIDTH)
        x = add(b, x, i) if i < count else x
    return b.finish({"y": x})


def tied_logits(dtype: str, width: int, vocabulary: int) -> ModuleOp:
    """Scores with the table that tokens are looked up in, as small models have them."""
    b = Builder("measure", dtype)
    x = b.embed("table", vocabulary, width)
    b.block = 0
    return b.finish({"logits": b.logits(x, "table", vocabulary)})


def attentions(dtype: str, count: int) -> ModuleOp:
    """The same with attention, each with its own KV; keys and values are rows of tables."""
    b = Builder("measure", dtype)
    k, v = (b.embed(name, VOCABULARY, KV_HEADS * HEAD_DIM) for name in "kv")
    q = b.embed("table", VOCABULARY, HEADS * HEAD_DIM)
    for i in range(BETWEEN):
        b.block = i
        q = b.linear(q, f"w{i}", HEADS * HEAD_DIM)
        if i < count:
            q = b.attention(q, k, v, heads=HEADS, kv_heads=KV_HEADS, head_dim=HEAD_DIM, scale=HEAD_DIM**-0.5)
    return b.finish({"y": q})


def op_of(module: ModuleOp, name: str) -> PlaitOp:
    """One of the ops of a name, to ask for its cost."""
    return next(op for op in ops(module) if op.name == f"plait.{name}")


def batch(
    query_lens: Sequence[int], kv_lens: Sequence[int], *, logits: bool = False, vocabulary: int = VOCABULARY
) -> Batch:
    """Sequences of random tokens with KV pages of their own; greedy, scores of every token where `logits`."""
    queries, lengths = np.array(query_lens, np.int32), np.array(kv_lens, np.int32)
    counts = -(-lengths // PAGE_TOKENS)
    table = np.full((len(lengths), int(counts.max())), -1, np.int32)
    first = 0
    for row, count in zip(table, counts, strict=True):
        row[:count] = np.arange(first, first + count)
        first += int(count)
    starts = np.concatenate([[0], np.cumsum(queries)]).astype(np.int32)
    positions = np.concatenate([np.arange(kv - q, kv) for q, kv in zip(queries, lengths, strict=True)]).astype(np.int32)
    return Batch(
        tokens=np.random.default_rng(0).integers(0, vocabulary, len(positions)).astype(np.int32),
        positions=positions,
        query_starts=starts,
        kv_lens=lengths,
        page_tables={kv_class(None): table},
        logit_rows=np.arange(len(positions), dtype=np.int32) if logits else starts[1:] - 1,
        greedy=True,
    )


def pages(step: Batch) -> int:
    """That the tables of a batch name."""
    return int(max(table.max() for table in step.page_tables.values())) + 1


@dataclass
class Loader:
    """Compiles and loads modules on one backend, with random weights.

    Every tensor is the first bytes of one file: what is in it does not change times, and each is held by itself.
    """

    backend: Backend
    target: str
    device: str
    folder: Path
    threads: int | None = None
    _made: int = field(default=0, init=False)

    def __call__(self, module: ModuleOp, batches: Sequence[Batch]) -> Executable:
        """Ready for any of `batches`."""
        folder = self.folder / str(self._made)
        folder.mkdir(parents=True)
        self._made += 1
        tokens, sequences = max(b.token_count for b in batches), max(b.sequence_count for b in batches)
        options = CompileOptions(
            max_step_tokens=tokens,
            max_sequences=sequences,
            page_tokens=PAGE_TOKENS,
            max_context_tokens=max(int(b.kv_lens.max()) for b in batches),
        )
        compiled = self.backend.compile(module, self.target, options)
        refs = [_ref(name, op.result.type, self._file(op.result.type)) for name, op in weights(module).items()]
        (folder / "weights.json").write_text(weights_json(refs))
        (folder / "slice.mlir").write_text(print_module(module))
        for name, data in compiled.files.items():
            (folder / name).write_bytes(data)
        held = {name: max(map(pages, batches)) for name in kv_classes(module)}
        asked = LoadOptions(held, PAGE_TOKENS, tokens, sequences, self.threads, folder)
        made = self.backend.load(folder, self.device, asked)
        wait = getattr(made, "wait", None)  # until matrices are packed, on a CPU
        if wait is not None:
            wait()
        return made

    def _file(self, kind: object) -> Path:
        """Random numbers, as many as the largest tensor so far takes, in its dtype."""
        assert isinstance(kind, TensorType)
        dtype, size = dtype_name(kind.element_type), prod(kind.get_shape())
        path = self.folder / f"{dtype}.bin"
        if not path.exists() or path.stat().st_size < size * dtype_bytes(kind.element_type):
            values = np.random.default_rng(0).standard_normal(size, np.float32) * np.float32(0.03)
            path.write_bytes(values.astype(NUMPY[dtype]).tobytes())
        return path


def _ref(name: str, kind: object, file: Path) -> WeightRef:
    assert isinstance(kind, TensorType)
    encoding: Encoding = dtype_name(kind.element_type)  # type: ignore[assignment]
    nbytes = prod(kind.get_shape()) * dtype_bytes(kind.element_type)
    return WeightRef(name, str(file), 0, nbytes, encoding, tuple(kind.get_shape()))
