"""A request as its caller holds it."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from plait.errors import PlaitError
from plait.runtime.scheduler import Finish


@dataclass(frozen=True)
class Result:
    """A request that has ended.

    Attributes:
        token_ids: the new tokens, the eos token included.
        finish: `eos`, `length`, or `cancelled` (then `token_ids` are those that came before).
        logits: [rows, vocabulary] float32 where logits were asked for, else None.
        ttft_s: time from submission to the first new token; None where none came.
        total_s: time from submission to the end.
    """

    token_ids: tuple[int, ...]
    finish: Finish
    logits: NDArray[np.float32] | None
    ttft_s: float | None
    total_s: float


class Request:
    """The handle that `Pipeline.submit` returns. Iterate it for tokens as they come, or wait for `result`.

    Several threads may iterate; each sees every token.
    """

    def __init__(self, cancel: Callable[[], None]) -> None:
        self._cancel = cancel
        self._changed = threading.Condition()
        self._tokens: list[int] = []
        self._rows: list[NDArray[np.float32]] = []
        self._finish: Finish | None = None
        self._error: PlaitError | None = None
        self._submitted = time.monotonic()
        self._first: float | None = None
        self._ended: float | None = None

    @property
    def done(self) -> bool:
        """Whether it has ended, well or not."""
        return self._ended is not None

    def __iter__(self) -> Iterator[int]:
        """New token ids as they come. Ends early after `cancel`.

        Raises:
            PlaitError: the pipeline failed or was closed.
        """
        given = 0
        while True:
            with self._changed:
                while not self.done and len(self._tokens) == given:
                    self._changed.wait()
                fresh, ended, error = self._tokens[given:], self.done, self._error
            yield from fresh
            given += len(fresh)
            if ended and error is not None:
                raise error.again()
            if ended:
                return

    def result(self, timeout_s: float | None = None) -> Result:
        """Wait for the end.

        Raises:
            PlaitError: the pipeline failed or was closed.
            TimeoutError: not ended after `timeout_s`; the request goes on.
        """
        with self._changed:
            if not self._changed.wait_for(lambda: self.done, timeout_s):
                raise TimeoutError(f"the request has not ended after {timeout_s:g} s")
            if self._error is not None:
                raise self._error.again()
            assert self._finish is not None
            assert self._ended is not None
            return Result(
                token_ids=tuple(self._tokens),
                finish=self._finish,
                logits=np.concatenate(self._rows) if self._rows else None,
                ttft_s=None if self._first is None else self._first - self._submitted,
                total_s=self._ended - self._submitted,
            )

    def cancel(self) -> None:
        """End it soon; its pages are freed when the steps it is in come back. Nothing happens when it has ended."""
        if not self.done:
            self._cancel()

    def _push(self, token: int) -> None:
        with self._changed:
            self._first = self._first or time.monotonic()
            self._tokens.append(token)
            self._changed.notify_all()

    def _keep(self, rows: NDArray[Any]) -> None:
        self._rows.append(rows)

    def _end(self, finish: Finish | None, error: PlaitError | None = None) -> None:
        with self._changed:
            if self.done:
                return
            self._finish, self._error, self._ended = finish, error, time.monotonic()
            self._changed.notify_all()
