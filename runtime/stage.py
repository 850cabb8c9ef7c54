"""A run of consecutive slices in one process: what a worker holds, and what `in_process=True` runs directly."""

from __future__ import annotations

import importlib
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from plait.backends.base import TOKENS, Batch, Executable, LoadOptions
from plait.errors import WorkerError
from plait.runtime import board as columns
from plait.runtime.board import Board
from plait.runtime.messages import Failure, SliceInfo, SliceSpec, StepInfo
from plait.runtime.sampler import sample, sampled
from plait.spec import Boundary

Array = NDArray[Any]
Tensors = Mapping[str, Array]

LOGITS = "logits"
"""The output of the last slice; `plait.backends.base.TOKENS` in a greedy step."""

_BEST = Boundary(TOKENS, (None,), "int32")


class Sampled(NamedTuple):
    """The end of a step: `tokens` [samples] int32, `logits` [rows kept, vocabulary] float32."""

    tokens: NDArray[np.int32]
    logits: NDArray[np.float32]


class Stage:
    """Loaded slices, in order.

    Args:
        specs: the slices.
        board: where progress is noted.

    Raises:
        PlaitError: whatever a backend raises while loading, with the slice and its device named.
    """

    def __init__(self, specs: Sequence[SliceSpec], board: Board) -> None:
        self._board, self._slices = board, list[tuple[SliceSpec, Executable]]()
        for spec in specs:
            try:
                self._slices.append((spec, _load(spec)))
            except Exception as err:
                self.close()
                raise Failure.of(err, spec.label, "loading").error() from err

    def run(self, step: int, batch: Batch, tensors: Tensors, sent_ns: int) -> dict[str, Array]:
        """Run one step through the slices.

        Args:
            step: its number; steps come in order.
            tensors: boundary tensors by name.
            sent_ns: when the step was handed over.

        Returns:
            The boundary tensors that later slices read; after the last slice `logits`, or `tokens` in a greedy step.

        Raises:
            PlaitError: naming the slice and its device.
        """
        values = dict(tensors)
        for spec, executable in self._slices:
            row = self._board[spec.index]
            if step <= row[columns.STARTED]:
                raise WorkerError("step-order", f"{spec.label} got step {step} after step {row[columns.STARTED]}")
            begun = time.monotonic_ns()
            row[columns.HOP_NS] += begun - sent_ns
            row[columns.STARTED] = step
            try:
                outputs = executable.step(batch, {name: values[name] for name in spec.inputs})
                values = _checked(spec, batch, outputs, values)
            except Exception as err:
                raise Failure.of(err, spec.label, f"running step {step}").error() from err
            sent_ns = time.monotonic_ns()
            row[columns.BUSY_NS] += sent_ns - begun
            row[columns.FINISHED] = step
        return values

    def sample(self, step: int, values: Tensors, info: StepInfo) -> Sampled:
        """Sample what a step asked for, from what `run` returned.

        Raises:
            WorkerError: `logits-not-finite`, naming the last slice and the step.
        """
        try:
            if TOKENS in values:
                tokens = [sampled(int(values[TOKENS][ask.row]), ask.position) for ask in info.samples]
            else:
                tokens = [sample(values[LOGITS][ask.row], ask.params, ask.position) for ask in info.samples]
        except WorkerError as err:
            raise Failure.of(err, self._slices[-1][0].label, f"sampling step {step}").error() from err
        kept = values[LOGITS][info.keep_rows] if info.keep_rows else np.zeros((0, 0), np.float32)
        return Sampled(np.array(tokens, np.int32), kept.astype(np.float32, copy=False))

    def info(self) -> list[SliceInfo]:
        """Where each slice runs, and its counters."""
        return [
            SliceInfo(spec.index, spec.label, executable.runs_on, dict(executable.stats()))
            for spec, executable in self._slices
        ]

    def close(self) -> None:
        """Free every executable. Idempotent."""
        while self._slices:
            self._slices.pop()[1].close()


def _load(spec: SliceSpec) -> Executable:
    module, _, attribute = spec.entry.partition(":")
    backend = getattr(importlib.import_module(module), attribute)
    options = LoadOptions(
        pages=spec.pages,
        page_tokens=spec.page_tokens,
        max_step_tokens=spec.max_step_tokens,
        max_sequences=spec.max_sequences,
        threads=spec.threads,
        weight_root=Path(spec.weight_root),
        ordinal=spec.ordinal,
    )
    executable: Executable = backend.load(Path(spec.folder), spec.device, options)
    return executable


def _checked(spec: SliceSpec, batch: Batch, outputs: Tensors, inputs: Tensors) -> dict[str, Array]:
    """What later slices (or the sampler) need of the outputs, as the manifest describes it.

    `inputs` that later slices read too pass through.
    """
    boundaries = {boundary.name: boundary for boundary in (_BEST, *spec.outputs)}
    kept: dict[str, Array] = {}
    for name in [TOKENS if name == LOGITS and batch.greedy else name for name in spec.keep]:
        if name not in outputs:
            if name in inputs and name not in boundaries:
                kept[name] = inputs[name]
                continue
            raise WorkerError("boundary", f"{spec.label} did not return {name!r}", why=f"it returned {list(outputs)}")
        kept[name] = outputs[name]
        if name in boundaries:
            rows = len(batch.logit_rows) if name in (LOGITS, TOKENS) else batch.token_count
            _check(spec, boundaries[name], rows, kept[name])
    return kept


def _check(spec: SliceSpec, boundary: Boundary, rows: int, array: Array) -> None:
    shape = tuple(rows if size is None else size for size in boundary.shape)
    if array.shape != shape or array.dtype.name != boundary.dtype:
        raise WorkerError(
            "boundary",
            f"{spec.label} returned {boundary.name!r} as {array.dtype.name} {list(array.shape)}, "
            f"the artifact says {boundary.dtype} {list(shape)}",
        )
