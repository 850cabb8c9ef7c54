"""The engine: one thread that owns the scheduler and the chain. Callers hand it requests and wait on their handles."""

from __future__ import annotations

import itertools
import os
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Any

from plait.errors import PlaitError, UsageError, WorkerError, system_error
from plait.runtime.board import BUSY_NS, FINISHED, HOP_NS
from plait.runtime.chain import Chain, Reply
from plait.runtime.messages import SliceInfo
from plait.runtime.request import Request
from plait.runtime.scheduler import Scheduler, Sequence, Step


class Engine:
    """See the module.

    The thread starts the workers too, because the kernel ends them together with the thread that started them.

    Args:
        timeout_s: the longest that the oldest step in flight may take.
    """

    def __init__(self, chain: Chain, scheduler: Scheduler, timeout_s: float) -> None:
        self._chain, self._scheduler, self._timeout_s = chain, scheduler, timeout_s
        self._owner = os.getpid()
        self._lock = threading.RLock()  # a finalizer may call `close` while this thread holds it
        self._orders: deque[Callable[[], None]] = deque()  # run by the thread, between steps
        self._requests: dict[int, Request] = {}
        self._questions: deque[_Question] = deque()
        self._in_flight: deque[Step] = deque()
        self._deadline = 0.0
        self._counts = {"requests": 0, "prompt_tokens": 0, "tokens": 0, "steps": 0}
        self._error: PlaitError | None = None
        self._stopping = self._ended = False
        self._ready = threading.Event()
        self._thread: threading.Thread | None = None

    def start(self, timeout_s: float) -> None:
        """Start the thread and wait until every slice is loaded. Raises what went wrong; nothing is left then."""
        self._thread = threading.Thread(target=self._run, args=(timeout_s,), name="plait-engine", daemon=True)
        self._thread.start()
        try:
            self._ready.wait()
        except BaseException:
            self.close()
            raise
        if self._error is not None:
            self._thread.join()
            raise self._error.again()

    def submit(self, sequence: Sequence) -> Request:
        """Queue a sequence.

        Raises:
            UserError, FitError: it could never run (`Scheduler.check_fits`).
            UsageError: `forked`.
            PlaitError: what ended the pipeline before.
        """
        self._check_owner()
        self._scheduler.check_fits(sequence)
        request = Request(lambda: self._order(lambda: self._cancel(sequence)))
        with self._lock:
            if self._error is not None:
                raise self._error.again()
            self._requests[sequence.id] = request
            self._counts["requests"] += 1
            self._counts["prompt_tokens"] += len(sequence.prompt)
            self._order(lambda: self._scheduler.submit(sequence))
        return request

    def stats(self) -> dict[str, Any]:
        """Counters; see `Pipeline.stats`."""
        infos, rows, scheduler = self._infos(), self._chain.board, self._scheduler
        return {
            **self._counts,
            "hop_s": float(rows[:, HOP_NS].sum()) / 1e9,
            "running": scheduler.running,
            "waiting": scheduler.waiting,
            "kv_pages": {
                name: {"used": pool.used, "total": pool.pages, "page_tokens": pool.page_tokens}
                for name, pool in scheduler.pages.pools.items()
            },
            "slices": [
                {
                    "slice": info.label,
                    "runs_on": info.runs_on,
                    "steps": int(rows[info.index, FINISHED]),
                    "busy_s": float(rows[info.index, BUSY_NS]) / 1e9,
                    "hop_s": float(rows[info.index, HOP_NS]) / 1e9,
                    "executable": info.stats,
                }
                for info in infos
            ],
        }

    def close(self) -> None:
        """End the thread and every worker. Idempotent; safe in a finalizer and at interpreter exit.

        A forked child has a copy of this object and neither the thread nor the workers: there it does nothing."""
        if os.getpid() != self._owner:
            return
        with self._lock:
            self._stopping = True
            if not self._ended:
                self._chain.wake()
        if self._thread not in (None, threading.current_thread()):
            self._thread.join()

    def _check_owner(self) -> None:
        """The thread did not come along into a forked child; whoever waited for it there would wait for ever."""
        if os.getpid() != self._owner:
            raise UsageError(
                "forked",
                f"the pipeline was opened by process {self._owner}, this is its fork {os.getpid()}",
                hint="open the pipeline in the process that uses it",
            )

    def _order(self, order: Callable[[], None]) -> None:
        """Have the thread run `order`, unless it has ended."""
        with self._lock:
            if not self._ended:
                self._orders.append(order)
                self._chain.wake()

    def _infos(self) -> list[SliceInfo]:
        """The counters of every slice, as they are now or, after the end, as they were at the start."""
        self._check_owner()
        question = _Question()
        with self._lock:
            if self._ended:
                return self._chain.infos
            self._questions.append(question)
            self._order(self._chain.ask)
        if not question.answered.wait(self._timeout_s):
            raise WorkerError("peer-timeout", f"the slices did not tell their counters in {self._timeout_s:g} s")
        return question.infos or self._chain.infos

    def _run(self, start_timeout_s: float) -> None:
        error: PlaitError | None = None
        try:
            self._chain.start(start_timeout_s)
            self._ready.set()
            while not self._stopping:
                self._turn()
        except PlaitError as err:
            error = err
        except BaseException as err:
            refused = system_error(err) if isinstance(err, OSError | MemoryError) else None
            error = refused or WorkerError("driver-failed", f"the driver failed: {type(err).__name__}: {err}")
            error.__cause__ = err
        finally:
            self._end(error)

    def _end(self, error: PlaitError | None) -> None:
        with self._lock:
            self._ended = True
            self._error = error or WorkerError("pipeline-closed", "the pipeline was closed")
        try:  # nobody wakes the chain any more, so it needs no lock, and new requests are refused at once
            self._chain.close(kill=error is not None)
        finally:
            for request in list(self._requests.values()):
                request._end(None, self._error)
            self._requests.clear()
            for question in self._questions:
                question.answered.set()
            self._ready.set()

    def _turn(self) -> None:
        """Take orders, keep the pipeline full, take one reply."""
        while self._orders:
            self._orders.popleft()()
        while len(self._in_flight) < self._scheduler.in_flight and (step := self._scheduler.next_step()):
            if not self._in_flight:
                self._deadline = time.monotonic() + self._timeout_s
            self._in_flight.append(step)
            self._chain.send(step)
        left = max(self._deadline - time.monotonic(), 0) if self._in_flight else None
        reply = self._chain.poll(left)
        if reply is None:
            self._check_deadline()
        elif reply.infos is not None:
            self._questions.popleft().answer(reply.infos)
        else:
            self._take(reply)

    def _check_deadline(self) -> None:
        if self._in_flight and time.monotonic() >= self._deadline:
            late = self._chain.blame(self._in_flight[0].id)
            raise WorkerError(
                "peer-timeout",
                f"{late} did not answer in {self._timeout_s:g} s",
                why=f"step {self._in_flight[0].id} of {self._in_flight[0].batch.token_count} tokens did not come back",
                hint="it hangs, or a step needs longer: give a larger timeout_s",
            )

    def _take(self, reply: Reply) -> None:
        step = self._in_flight.popleft()
        if reply.step != step.id:
            raise WorkerError("step-order", f"the result of step {reply.step} came, step {step.id} was due")
        self._deadline = time.monotonic() + self._timeout_s
        kept = (row.sequence.id for row in step.rows if row.keep)
        start = 0
        for owner, rows in itertools.groupby(kept):
            stop = start + len(list(rows))
            if owner in self._requests and reply.logits is not None:
                self._requests[owner]._keep(reply.logits[start:stop])
            start = stop
        fresh = self._scheduler.complete(step, reply.tokens)
        self._counts["steps"] += 1
        self._counts["tokens"] += len(fresh)
        for sequence, token in fresh:
            self._requests[sequence.id]._push(token)
        for sequence in step.sequences:
            self._settle(sequence)

    def _cancel(self, sequence: Sequence) -> None:
        self._scheduler.cancel(sequence)
        self._settle(sequence)

    def _settle(self, sequence: Sequence) -> None:
        """Tell the caller of an ended sequence."""
        if sequence.finish is not None and sequence.id in self._requests:
            self._requests.pop(sequence.id)._end(sequence.finish)


class _Question:
    """Someone waits for the counters of the slices."""

    def __init__(self) -> None:
        self.answered = threading.Event()
        self.infos: list[SliceInfo] = []

    def answer(self, infos: list[SliceInfo]) -> None:
        self.infos = infos
        self.answered.set()
