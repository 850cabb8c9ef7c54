"""The contract between plait and a backend. Everything above this file knows backends by it and by nothing else.

A backend is one object with a name and four methods (`Backend`). It registers by import path, in tree in
`plait.registry`, out of tree by an entry point of the group `plait.backends`. `plait.backends.conformance` holds every
registered backend to the same cases against the NumPy oracle.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Protocol, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from plait.spec import Capability, KVLayout, Support

if TYPE_CHECKING:
    from xdsl.dialects.builtin import ModuleOp
    from xdsl.ir import Operation

Array = NDArray[np.generic]
Int32 = NDArray[np.int32]

TOKENS = "tokens"
"""What the last slice returns in place of `logits` where `Batch.greedy` says so."""


@dataclass(frozen=True)
class Batch:
    """The facts of one step: T new tokens of S sequences, prefill chunks and decode tokens together.

    Sequence s owns tokens `query_starts[s] : query_starts[s + 1]`; they are its last ones, so their positions are
    `kv_lens[s] - query_len .. kv_lens[s] - 1`.

    Attributes:
        tokens: [T] token ids.
        positions: [T] absolute positions.
        query_starts: [S + 1] first token of each sequence, then T.
        kv_lens: [S] tokens of the sequence including the new ones.
        page_tables: by KV class (`plait.spec.kv_class`), [S, P] physical page of each logical page; -1 beyond the end.
            Token at position p lies in page `table[s, p // page_tokens]`, slot `p % page_tokens`. In a window class
            entries repeat (a ring): read only keys with `position > query_position - window`.
        logit_rows: [R] tokens whose logits are wanted, ascending; the logits op returns exactly these rows.
        greedy: of the logits only the best token of each row is wanted: `best_tokens`.
    """

    tokens: Int32
    positions: Int32
    query_starts: Int32
    kv_lens: Int32
    page_tables: Mapping[str, Int32]
    logit_rows: Int32
    greedy: bool = False

    @property
    def token_count(self) -> int:
        return len(self.tokens)

    @property
    def sequence_count(self) -> int:
        return len(self.kv_lens)

    def check(self) -> None:
        """Raise AssertionError where the batch contradicts itself: it is made by plait's scheduler, not by a user."""
        starts, lens = self.query_starts, np.diff(self.query_starts)
        assert starts[0] == 0 and starts[-1] == self.token_count, "query_starts must cover the tokens"
        assert len(starts) == self.sequence_count + 1 and (lens > 0).all(), "every sequence brings a token"
        assert (lens <= self.kv_lens).all(), "kv_lens counts the new tokens too"
        for s in range(self.sequence_count):
            expected = np.arange(self.kv_lens[s] - lens[s], self.kv_lens[s])
            assert (self.positions[starts[s] : starts[s + 1]] == expected).all(), "new tokens are the last ones"
        assert (np.diff(self.logit_rows) > 0).all(), "logit_rows ascend"
        assert all(table.shape[0] == self.sequence_count for table in self.page_tables.values())


def best_tokens(logits: Array) -> Int32:
    """[R] of float32 logits [R, vocabulary]: the first index of the largest of each row; -1 where the largest is no
    finite number, a NaN counting as larger than all."""
    best = logits.argmax(axis=1)
    largest = np.take_along_axis(logits, best[:, None], axis=1)[:, 0]
    return np.where(np.isfinite(largest), best, -1).astype(np.int32)


Progress = Callable[[int, int, str], None]


def _silent(done: int, total: int, label: str) -> None:
    """Nobody listens."""


@dataclass(frozen=True)
class CompileOptions:
    """What a compile may be told. `max_step_tokens` and `max_sequences` bound one batch; their defaults are what plans
    are made for. A step of 512 prefill tokens keeps decode steps of other requests from waiting long.

    Attributes:
        max_context_tokens: tokens of the longest sequence, prompt and answer.
        max_kv_tokens: tokens that the KV pages of a full layer hold; None for `max_sequences` of the longest.
        group_size: devices that hold the slice together, its tensors split between them.
        device_code: make machine code; without it a backend that has a way to run on the host writes for that only.
        progress: called while code is made, with how much of it is done, how much there is, and what was made last.
    """

    max_step_tokens: int = 512
    max_sequences: int = 64
    page_tokens: int = 16
    max_context_tokens: int = 1024
    max_kv_tokens: int | None = None
    group_size: int = 1
    device_code: bool = True
    progress: Progress = field(default=_silent, compare=False)


@dataclass(frozen=True)
class CompiledSlice:
    """What a backend adds to the slice's folder: `files` by name, and `report` (plain data, written as report.json)."""

    files: Mapping[str, bytes] = field(default_factory=dict)
    report: Mapping[str, object] = field(default_factory=dict)


@dataclass(frozen=True)
class LoadOptions:
    """What an executable needs beside its folder.

    Attributes:
        pages: pages to allocate per KV class, for each layer of that class.
        page_tokens: tokens of one page.
        threads: host threads to compute with; None leaves the library's default.
        weight_root: folder that relative weight files are relative to.
        ordinal: which of this host's devices of the target to take; counted again from the first where there are fewer.
    """

    pages: Mapping[str, int]
    page_tokens: int = 16
    max_step_tokens: int = 512
    max_sequences: int = 64
    threads: int | None = None
    weight_root: Path | None = None
    ordinal: int = 0


class Executable(Protocol):
    """A loaded slice. One thread calls it at a time.

    `runs_on` says where it really runs: `h100`, or `h100 (emulated on host)`.
    """

    runs_on: str
    kv_layouts: tuple[KVLayout, ...]

    def step(self, batch: Batch, inputs: Mapping[str, Array]) -> dict[str, Array]:
        """Run one batch; append its K and V to the pages. Inputs and outputs are the slice's boundary tensors by name
        (the slice's module names them); bfloat16 is `ml_dtypes.bfloat16`. The last slice returns `logits`
        [R, vocabulary], or `best_tokens` of them as `tokens`, int32 [R], where the batch is greedy."""

    def export_pages(self, layer: int, pages: Int32) -> tuple[Array, Array]:
        """K and V of these physical pages of the slice's `layer`-th KV value, as (page, token, kv_head, head_dim)."""

    def import_pages(self, layer: int, pages: Int32, k: Array, v: Array) -> None:
        """The inverse of `export_pages`."""

    def stats(self) -> dict[str, int | float | str]:
        """Counters worth showing: weight and KV bytes held, compiled shapes, steps."""

    def close(self) -> None:
        """Free everything. Idempotent."""


@runtime_checkable
class Backend(Protocol):
    """One way to turn slices into something that runs."""

    name: str

    def capability(self, target: str, module: ModuleOp | None = None) -> Capability:
        """What this backend can do for `target` (`cuda:sm_90a`), and which ops of `module` it refuses and why."""

    def supports(self, op: Operation, target: str) -> Support:
        """Whether the very lowering that compiles would take this op with every attribute it carries."""

    def compile(self, module: ModuleOp, target: str, options: CompileOptions) -> CompiledSlice:
        """Make code for a slice. Needs no device. Raises UnsupportedError naming the op and the attribute."""

    def load(self, folder: Path, device: str, options: LoadOptions) -> Executable:
        """Load a slice's folder (`slice.mlir`, `weights.json` and the compiled files) for `device` (its short name)."""
