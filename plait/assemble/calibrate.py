"""How large the inputs of linears are on a text: what quantising weighs its errors with.

The text runs through the model block by block on the host, in float32, with nothing quantised that the checkpoint does
not store so. Each block is loaded, stepped over the whole text and let go, so the memory taken is that of one block and
of the text's activations between two.
"""

from __future__ import annotations

import tempfile
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from xdsl.dialects.builtin import ArrayAttr, ModuleOp
from xdsl.dialects.func import ReturnOp
from xdsl.ir import SSAValue
from xdsl.rewriter import Rewriter

from plait.assemble.changed import find_changes, write_changed
from plait.backends.base import Batch, CompileOptions, LoadOptions
from plait.backends.weights import weights_json
from plait.errors import CheckpointError
from plait.frontend.checkpoint import Checkpoint
from plait.frontend.files import read_text
from plait.frontend.lora import Adapter
from plait.frontend.lower import lower
from plait.frontend.tokenizer import Tokenizer
from plait.ir import print_module, signature, weights
from plait.ir.dialect import verify
from plait.ir.module import block_range, kv_classes, main, name_list, ops
from plait.ir.ops import ExpertsOp, LinearOp, WeightOp
from plait.ir.passes import slice_modules
from plait.ir.quant import quantise_types
from plait.ir.types import element
from plait.registry import load_backend

Array = NDArray[Any]

SEQUENCE_TOKENS, MOST_TOKENS = 512, 16_384
"""The text is cut into sequences of so many tokens, each from position 0; what is beyond the most is left out."""

_PAGE_TOKENS = 16


@dataclass(frozen=True)
class Calibration:
    """What a text says of the inputs of linears.

    Attributes:
        tokens: how many were run.
        importance: by weight (..., out, in), the mean square of each of its inputs: (in,) in float64. Those of experts
            are of all tokens, chosen or not; what the last matrix of an expert is given is not known.
    """

    tokens: int
    importance: Mapping[str, Array]


def calibrate(
    checkpoint: Checkpoint, adapters: Sequence[Adapter], text: Path, progress: Callable[[int, int], None]
) -> Calibration:
    """Run a text through the model, adapters included.

    Args:
        progress: called with blocks done and blocks in all.

    Raises:
        CheckpointError: no tokenizer, or an unreadable or empty text.
        UnsupportedError: the host's backend refuses an op.
    """
    batches = _batches(checkpoint, text)
    module = lower(checkpoint, "float32", read=False)
    changed = {name for adapter in adapters for name in adapter.changed}
    quantise_types(module, dict.fromkeys(changed, element("float32")))
    first, last = block_range(module)
    inputs: list[dict[str, Array]] = [{} for _ in batches]
    totals: dict[str, Array] = {}
    for number, block in enumerate(slice_modules(module, [(i, i + 1) for i in range(first, last)])):
        progress(number, last - first)
        taps = _tap(block)
        sums: dict[str, Array] = defaultdict(lambda: np.zeros(1))
        with tempfile.TemporaryDirectory(prefix="plait-") as folder:
            executable = _load(Path(folder), block, checkpoint, adapters)
            try:
                for index, batch in enumerate(batches):
                    out = executable.step(batch, inputs[index])
                    for tap in taps:
                        sums[tap] = sums[tap] + np.square(out.pop(tap).astype(np.float64)).sum(axis=0)
                    inputs[index] = out
            finally:
                executable.close()
        totals |= {name: sums[tap] for tap, names in taps.items() for name in names}
    tokens = sum(batch.token_count for batch in batches)
    return Calibration(tokens, {name: total / tokens for name, total in totals.items()})


def _batches(checkpoint: Checkpoint, text: Path) -> list[Batch]:
    """One sequence each: a text of any length stays small in memory."""
    tokenizer = Tokenizer.open(checkpoint.tokenizer, bos_token_id=checkpoint.bos_token_id)
    ids = tokenizer.encode(read_text(text))[:MOST_TOKENS]
    if ids == tokenizer.encode(""):  # the tokens that begin any text, at most
        raise CheckpointError("calibrate-empty", f"{text} holds no tokens", hint="give a text of some thousand words")
    length = min(SEQUENCE_TOKENS, checkpoint.max_positions)
    return [_batch(ids[start : start + length]) for start in range(0, len(ids), length)]


def _batch(ids: Sequence[int]) -> Batch:
    count = len(ids)
    whole = np.array([0, count], np.int32)
    pages = np.arange(-(-count // _PAGE_TOKENS), dtype=np.int32)[None]
    return Batch(
        tokens=np.array(ids, np.int32),
        positions=np.arange(count, dtype=np.int32),
        query_starts=whole,
        kv_lens=whole[1:],
        page_tables=defaultdict(lambda: pages),
        logit_rows=whole[1:] - 1,
    )


def _tap(block: ModuleOp) -> dict[str, list[str]]:
    """Make the inputs of a block's linears results too, and those of its experts' gate and up. Returns, by the result's
    name, the weights that take it."""
    readers: dict[SSAValue, list[str]] = defaultdict(list)
    for op in ops(block):
        if isinstance(op, LinearOp | ExpertsOp):
            for value in (op.weight,) if isinstance(op, LinearOp) else (op.gate, op.up):
                assert isinstance(value.owner, WeightOp)
                readers[op.x].append(value.owner.symbol.data)
    names = {f"input.{index}": value for index, value in enumerate(readers)}
    function, outputs = main(block), signature(block).outputs | names
    returned = function.body.block.last_op
    assert returned is not None
    Rewriter.replace_op(returned, ReturnOp(*outputs.values()), [])
    function.update_function_type()  # type: ignore[no-untyped-call]
    function.res_attrs = ArrayAttr(name_list(list(outputs)).data)
    verify(block)
    return {name: readers[value] for name, value in names.items()}


def _load(folder: Path, block: ModuleOp, checkpoint: Checkpoint, adapters: Sequence[Adapter]) -> Any:
    """One block on the host, its merged weights in `folder`."""
    assert checkpoint.weights is not None
    backend, target = load_backend("cpu"), "cpu:host"
    options = CompileOptions(max_step_tokens=SEQUENCE_TOKENS, max_sequences=1, page_tokens=_PAGE_TOKENS)
    backend.compile(block, target, options)  # refuses what it does not know; torch has nothing to write
    changes = find_changes(block, checkpoint.weights, adapters, {})
    merged, _ = write_changed(folder, changes, {}) if changes else ({}, {})
    (folder / "slice.mlir").write_text(print_module(block), "utf-8")
    refs = [merged.get(name, checkpoint.weights[name]) for name in weights(block)]
    (folder / "weights.json").write_text(weights_json(refs), "utf-8")
    pages = dict.fromkeys(kv_classes(block), SEQUENCE_TOKENS // _PAGE_TOKENS)
    load = LoadOptions(pages, _PAGE_TOKENS, max_step_tokens=SEQUENCE_TOKENS, max_sequences=1)
    return backend.load(folder, "cpu", load)
