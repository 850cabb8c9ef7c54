"""The driver's side of the workers: start them side by side, feed the first, hear the last, watch them all."""

from __future__ import annotations

import contextlib
import os
import selectors
import signal
import socket
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NoReturn

import numpy as np

from plait.errors import WorkerError
from plait.runtime import board as boards
from plait.runtime import launch
from plait.runtime.chain import Reply, Waker
from plait.runtime.messages import Failure, SliceInfo, SliceSpec, WorkerSpec, batch_tensors, step_info
from plait.runtime.scheduler import Step
from plait.runtime.stage import LOGITS
from plait.runtime.transport import Channel, Frame, PeerGoneError, pack, socket_pair

DRIVER = "the driver"

_GRACE_S = 2.0
"""How long a closing pipeline lets its workers free their devices before it kills them."""

_POSTMORTEM_S = 0.2
"""After the first sign of a failure, wait this long for others: a dead worker's neighbours complain too."""

_SECONDARY = frozenset({"peer-gone", "peer-timeout"})
"""Codes of errors that a worker reports because another one failed."""


@dataclass(frozen=True)
class WorkerSetup:
    """The slices of one worker and the interpreter that runs them."""

    slices: tuple[SliceSpec, ...]
    python: str = sys.executable

    @property
    def label(self) -> str:
        return " and ".join(part.label for part in self.slices)


class WorkerChain:
    """A `plait.runtime.chain.Chain` of processes. Frames go from worker to worker, not through the driver.

    Args:
        setups: the workers in order.
        threads: host threads of each worker; None leaves the libraries' defaults.
        timeout_s: how long a worker, or the driver, waits for the next one to take a frame.
        debug: digests in every frame, and the workers' stderr on this process's stderr.
    """

    def __init__(self, setups: Sequence[WorkerSetup], *, threads: int | None, timeout_s: float, debug: bool) -> None:
        self._setups, self._threads, self._timeout_s, self._debug = tuple(setups), threads, timeout_s, debug
        self._labels = [part.label for setup in setups for part in setup.slices]
        self.board = boards.private(len(self._labels))
        self.infos: list[SliceInfo] = []
        self._waker = Waker()
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._waker, selectors.EVENT_READ, ("wake", 0))
        self._processes: list[launch.Process] = []
        self._controls: list[Channel] = []
        self._ends: list[Channel] = []  # feed, results
        self._closed = False

    def start(self, timeout_s: float) -> None:
        self._launch()
        deadline = time.monotonic() + timeout_s
        waiting = set(range(len(self._setups)))
        while waiting:
            left = deadline - time.monotonic()
            if left <= 0:
                late = self._setups[min(waiting)].label
                raise WorkerError("peer-timeout", f"{late} was not ready in {timeout_s:g} s")
            for what, i in self._events(left):
                if what == "wake":
                    return  # the pipeline is being closed before it was ready
                if what == "control":
                    self.infos += self._ready(i)
                    waiting.remove(i)
                if what == "died":
                    self._fail()
        self.infos.sort(key=lambda info: info.index)

    def send(self, step: Step) -> None:
        self._feed(
            Frame("step", step.id, DRIVER, batch_tensors(step.batch), pack(step_info(step, time.monotonic_ns())))
        )

    def ask(self) -> None:
        self._feed(Frame("stats", 0, DRIVER, meta=pack([])))

    def poll(self, timeout_s: float | None) -> Reply | None:
        for what, _ in sorted(self._events(timeout_s)):
            if what in ("control", "died"):
                self._fail()
            if what == "result":
                return self._reply()
        return None

    def blame(self, step: int) -> str:
        return boards.behind(self.board, self._labels, step)

    def wake(self) -> None:
        self._waker.wake()

    def close(self, *, kill: bool = False) -> None:
        if self._closed:
            return
        self._closed = True
        for end in self._ends:
            end.close()
        deadline = time.monotonic() + (0 if kill else _GRACE_S)
        for process in self._processes:
            process.ended(max(deadline - time.monotonic(), 0))
        for process in self._processes:
            process.kill()
        for control in self._controls:
            control.close()
        self._selector.close()
        self._waker.close()
        self.board = np.array(self.board)  # lets go of the shared one, keeps the figures

    def _launch(self) -> None:
        with contextlib.ExitStack() as lent:  # what the workers inherit, closed here in the end
            # Ends in the order of the chain: ours, then into and out of each worker, then ours.
            ends = [lent.enter_context(sock) for _ in range(len(self._setups) + 1) for sock in socket_pair()]
            first, last = (socket.socket(fileno=sock.detach()) for sock in (ends[0], ends[-1]))
            self._ends = [
                Channel(first, self._setups[0].label, timeout_s=self._timeout_s, debug=self._debug),
                Channel(last, self._setups[-1].label),
            ]
            board_fd, self.board = boards.create(len(self._labels))
            lent.callback(os.close, board_fd)
            for i in range(len(self._setups)):
                self._start_worker(i, ends[2 * i + 1].fileno(), ends[2 * i + 2].fileno(), board_fd)
        self._selector.register(self._ends[1], selectors.EVENT_READ, ("result", 0))

    def _start_worker(self, i: int, upstream_fd: int, downstream_fd: int, board_fd: int) -> None:
        setup, names = self._setups[i], [DRIVER, *(setup.label for setup in self._setups), DRIVER]
        spec = WorkerSpec(
            slices=setup.slices,
            last=i == len(self._setups) - 1,
            upstream=names[i],
            downstream=names[i + 2],
            upstream_fd=upstream_fd,
            downstream_fd=downstream_fd,
            board_fd=board_fd,
            board_rows=len(self._labels),
            timeout_s=self._timeout_s,
            debug=self._debug,
        )
        ours, theirs = socket_pair()
        control = Channel(ours, setup.label, timeout_s=self._timeout_s)
        self._controls.append(control)
        with theirs:
            process = launch.start(
                setup.label,
                setup.python,
                theirs.fileno(),
                (upstream_fd, downstream_fd, board_fd),
                threads=self._threads,
                debug=self._debug,
            )
        self._processes.append(process)
        self._selector.register(control, selectors.EVENT_READ, ("control", i))
        self._selector.register(process.pidfd, selectors.EVENT_READ, ("died", i))
        with contextlib.suppress(PeerGoneError):  # `died` will tell why
            control.send(Frame("spec", sender=DRIVER, meta=pack(spec)))

    def _events(self, timeout_s: float | None) -> Iterator[tuple[str, int]]:
        for key, _ in self._selector.select(timeout_s):
            if key.data[0] == "wake":
                self._waker.drain()
            yield key.data

    def _ready(self, i: int) -> list[SliceInfo]:
        try:
            frame = self._controls[i].try_recv()
        except PeerGoneError:
            self._fail()
        assert frame is not None
        if frame.kind == "error":
            raise frame.unpack(Failure).error()
        return frame.unpack(list[SliceInfo])

    def _feed(self, frame: Frame) -> None:
        try:
            self._ends[0].send(frame)
        except PeerGoneError:
            self._fail()

    def _reply(self) -> Reply | None:
        try:
            frame = self._ends[1].try_recv()
        except PeerGoneError:
            self._fail()
        if frame is None:
            return None
        if frame.kind == "stats":
            return Reply(0, infos=frame.unpack(list[SliceInfo]))
        return Reply(frame.step, frame.tensors["tokens"].tolist(), np.array(frame.tensors[LOGITS]))

    def _fail(self) -> NoReturn:
        """Find out what happened and raise it: a worker's own error, else a death, else a neighbour's complaint."""
        deadline = time.monotonic() + _POSTMORTEM_S
        complaints: dict[int, Failure] = {}
        while True:
            for i, control in enumerate(self._controls):
                with contextlib.suppress(PeerGoneError):
                    frame = control.try_recv()
                    if frame is not None and frame.kind == "error":
                        complaints[i] = frame.unpack(Failure)
            for failure in complaints.values():
                if failure.code not in _SECONDARY:
                    raise failure.error()
            for i, process in enumerate(self._processes):
                if i not in complaints and process.ended() and process.popen.returncode != 0:
                    raise self._died(process)
            if time.monotonic() > deadline:
                break
            time.sleep(0.005)
        for failure in complaints.values():
            raise failure.error()
        raise self._died(next((p for p in self._processes if p.ended()), self._processes[0]))

    def _died(self, process: launch.Process) -> WorkerError:
        output = process.output()
        hint = ""
        if "No module named" in output and process.python != sys.executable:
            hint = f"install this version of plait for {process.python}"
        if process.popen.returncode == -signal.SIGKILL:
            hint = "if nobody killed it, the system did for want of memory: compile for fewer or shorter requests"
        return WorkerError("worker-died", f"{process.label} {process.epitaph()}", why=output, hint=hint)
