"""A chain: the loaded slices of a pipeline in order, behind one interface.

The driver's thread hands steps in at one end and takes replies out at the other. `LocalChain` runs the slices itself;
`plait.runtime.workers.WorkerChain` has a process for each.
"""

from __future__ import annotations

import contextlib
import os
import select
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from numpy.typing import NDArray

from plait.runtime import board as boards
from plait.runtime.board import Board
from plait.runtime.messages import SliceInfo, SliceSpec, step_info
from plait.runtime.scheduler import Step
from plait.runtime.stage import Stage


@dataclass(frozen=True)
class Reply:
    """What came back for a step (`tokens`, `logits` of the rows kept), or for a question for counters (`infos`)."""

    step: int
    tokens: list[int] = field(default_factory=list)
    logits: NDArray[Any] | None = None
    infos: list[SliceInfo] | None = None


class Chain(Protocol):
    """One thread uses it; any thread may call `wake`.

    Attributes:
        board: how far each slice is (`plait.runtime.board`).
        infos: where each slice runs, as it said when it was loaded.
    """

    board: Board
    infos: list[SliceInfo]

    def start(self, timeout_s: float) -> None:
        """Load every slice. Raises PlaitError, with the slice and its device named."""

    def send(self, step: Step) -> None:
        """Hand a step to the first slice. Raises PlaitError when a slice has failed."""

    def ask(self) -> None:
        """Ask for the counters of every slice; the answer comes in order with the steps."""

    def poll(self, timeout_s: float | None) -> Reply | None:
        """The next reply; None after `timeout_s` or a `wake`. Raises PlaitError when a slice has failed."""

    def blame(self, step: int) -> str:
        """The slice that keeps `step` from coming back, e.g. `h100 (slice 0)`."""

    def wake(self) -> None:
        """Make `poll` return, now or at its next call."""

    def close(self, *, kill: bool = False) -> None:
        """End every worker and free everything; `kill` does not wait for them. Idempotent."""


class Waker:
    """Wakes a thread that waits for file descriptors."""

    def __init__(self) -> None:
        self._fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)

    def fileno(self) -> int:
        return self._fd

    def wake(self) -> None:
        os.eventfd_write(self._fd, 1)

    def drain(self) -> None:
        """Forget the wakes so far."""
        with contextlib.suppress(BlockingIOError):
            os.eventfd_read(self._fd)

    def close(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1


class LocalChain:
    """All slices in this process, run by the thread that calls `send`."""

    def __init__(self, slices: Sequence[SliceSpec]) -> None:
        self.board, self.infos = boards.private(len(slices)), list[SliceInfo]()
        self._specs = tuple(slices)
        self._stage: Stage | None = None
        self._replies: deque[Reply] = deque()
        self._waker = Waker()

    def start(self, timeout_s: float) -> None:
        self._stage = Stage(self._specs, self.board)
        self.infos = self._stage.info()

    def send(self, step: Step) -> None:
        assert self._stage is not None
        info = step_info(step, time.monotonic_ns())
        values = self._stage.run(step.id, step.batch, {}, info.sent_ns)
        sampled = self._stage.sample(step.id, values, info)
        self._replies.append(Reply(step.id, sampled.tokens.tolist(), sampled.logits))

    def ask(self) -> None:
        assert self._stage is not None
        self._replies.append(Reply(0, infos=self._stage.info()))

    def poll(self, timeout_s: float | None) -> Reply | None:
        if self._replies:
            return self._replies.popleft()
        select.select([self._waker], [], [], timeout_s)
        self._waker.drain()
        return None

    def blame(self, step: int) -> str:
        return boards.behind(self.board, [spec.label for spec in self._specs], step)

    def wake(self) -> None:
        self._waker.wake()

    def close(self, *, kill: bool = False) -> None:
        try:
            if self._stage is not None:
                self._stage.close()
        finally:
            self._waker.close()
