"""What the driver and its workers say to each other: the metadata of frames, and batches as tensors.

Kinds of frames:

    spec      driver -> worker    WorkerSpec: what to load and where the channels are
    ready     worker -> driver    list[SliceInfo]
    step      driver -> first slice -> ... -> last slice    StepInfo, the batch, the boundary tensors
    result    last slice -> driver    StepInfo, `tokens` [samples], `logits` [rows kept, vocabulary]
    stats     driver -> ... -> driver    list[SliceInfo], each worker adds its own
    error     worker -> driver    Failure
"""

from __future__ import annotations

import traceback
from collections.abc import Mapping
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from plait import errors
from plait.backends.base import Batch
from plait.errors import PlaitError, UserError, WorkerError
from plait.runtime.sampler import SamplingParams
from plait.runtime.scheduler import Step
from plait.spec import Boundary

Array = NDArray[Any]

BATCH = "batch/"
TABLE = "page_table/"
BOUNDARY = "boundary/"
GREEDY = "greedy"
_BATCH_FIELDS = ("tokens", "positions", "query_starts", "kv_lens", "logit_rows")


class SliceSpec(msgspec.Struct, frozen=True):
    """One slice to load.

    Attributes:
        label: its name in every message: `h100 (slice 0)`.
        keep: boundary tensors that a later slice reads; everything else is dropped after the slice.
        pages: pages to allocate per KV class.
        ordinal: how many slices before it were compiled for the same target: each gets a device of its own.
    """

    index: int
    label: str
    device: str
    entry: str
    folder: str
    weight_root: str
    inputs: tuple[str, ...]
    outputs: tuple[Boundary, ...]
    keep: tuple[str, ...]
    pages: dict[str, int]
    page_tokens: int
    max_step_tokens: int
    max_sequences: int
    threads: int | None
    ordinal: int = 0


class WorkerSpec(msgspec.Struct, frozen=True):
    """One worker: its slices, its neighbours and the inherited file descriptors of its channels and of the board."""

    slices: tuple[SliceSpec, ...]
    last: bool
    upstream: str
    downstream: str
    upstream_fd: int
    downstream_fd: int
    board_fd: int
    board_rows: int
    timeout_s: float
    debug: bool


class SliceInfo(msgspec.Struct, frozen=True):
    """A loaded slice: where it really runs, and the executable's counters."""

    index: int
    label: str
    runs_on: str
    stats: dict[str, int | float | str]


class Sample(msgspec.Struct, frozen=True, array_like=True):
    """Sample one token from logits row `row`."""

    row: int
    position: int
    temperature: float
    top_k: int | None
    top_p: float
    seed: int

    @property
    def params(self) -> SamplingParams:
        return SamplingParams(self.temperature, self.top_k, self.top_p, self.seed)


class StepInfo(msgspec.Struct, frozen=True, array_like=True):
    """What to do with the logits of a step, and when the frame was handed over (CLOCK_MONOTONIC, the same clock in all
    processes of a machine)."""

    samples: list[Sample]
    keep_rows: list[int]
    sent_ns: int


class Failure(msgspec.Struct, frozen=True):
    """An exception on its way to the driver. `kind` is the class of plait.errors to raise there."""

    kind: str
    code: str
    what: str
    why: str
    hint: str

    @classmethod
    def of(cls, error: BaseException, label: str, doing: str) -> Failure:
        """Describe `error`, which slice `label` met while `doing` something."""
        if isinstance(error, PlaitError):
            what = error.what if label in error.what else f"{label}: {error.what}"
            return cls(type(error).__name__, error.code, what, error.why, error.hint)
        what = f"{label} failed while {doing}: {type(error).__name__}: {error}"
        return cls("WorkerError", "worker-failed", what, _where(error), "")

    def error(self) -> PlaitError:
        """The exception to raise: of its own class, or of the nearest one that holds nothing but the four texts."""
        kind: type[PlaitError] = getattr(errors, self.kind, WorkerError)
        if kind.__init__ is not PlaitError.__init__:
            kind = UserError if issubclass(kind, UserError) else WorkerError
        made: PlaitError = kind(self.code, self.what, why=self.why, hint=self.hint)
        return made


def step_info(step: Step, sent_ns: int) -> StepInfo:
    """The metadata of the first frame of `step`."""
    samples = [
        Sample(i, row.position, params.temperature, params.top_k, params.top_p, params.seed)
        for i, row in enumerate(step.rows)
        if row.position is not None and (params := row.sequence.params)
    ]
    return StepInfo(samples, [i for i, row in enumerate(step.rows) if row.keep], sent_ns)


def batch_tensors(batch: Batch) -> dict[str, Array]:
    """A batch as the tensors of a frame. The inverse of `read_batch`."""
    tensors: dict[str, Array] = {BATCH + name: getattr(batch, name) for name in _BATCH_FIELDS}
    tensors[BATCH + GREEDY] = np.array([batch.greedy])
    return tensors | {BATCH + TABLE + name: table for name, table in batch.page_tables.items()}


def read_batch(tensors: Mapping[str, Array]) -> tuple[Batch, dict[str, Array]]:
    """The batch and the boundary tensors of a `step` frame."""
    prefix = BATCH + TABLE
    tables = {name.removeprefix(prefix): table for name, table in tensors.items() if name.startswith(prefix)}
    boundary = {name.removeprefix(BOUNDARY): array for name, array in tensors.items() if name.startswith(BOUNDARY)}
    facts = {name: tensors[BATCH + name].astype(np.int32, copy=False) for name in _BATCH_FIELDS}
    return Batch(**facts, page_tables=tables, greedy=bool(tensors[BATCH + GREEDY][0])), boundary


def _where(error: BaseException) -> str:
    """The last frames of the traceback, innermost last, in one line."""
    frames = traceback.extract_tb(error.__traceback__)[-4:]
    return " > ".join(f"{frame.filename.rsplit('/', 1)[-1]}:{frame.lineno} {frame.name}" for frame in frames)
