"""What is kept of the course of a simulation: busy intervals and queue lengths, thinned so that both stay short."""

from __future__ import annotations

from dataclasses import dataclass

#: Entries kept of each; twice as many while it runs.
MOST_ENTRIES = 500


@dataclass(frozen=True)
class Interval:
    """A stretch of a device's time: `busy_s` of it at work, on so many steps and tokens."""

    start_s: float
    end_s: float
    busy_s: float
    steps: int
    prompt_tokens: int
    decode_tokens: int


@dataclass(frozen=True)
class QueuePoint:
    """A pipeline at a moment: requests that wait and that run, and KV pages taken (of the class that keeps all)."""

    at_s: float
    waiting: int
    running: int
    kv_pages: int


class Timeline:
    """Steps of one device in order. Neighbours become one interval where there are too many; their sums stay exact."""

    def __init__(self, most: int = MOST_ENTRIES) -> None:
        self._most, self._rows, self._each, self._in_last = most, list[list[float]](), 1, 0

    def add(self, start_s: float, end_s: float, prompt_tokens: int, decode_tokens: int) -> None:
        if self._in_last and self._in_last < self._each:
            row = self._rows[-1]
            row[1] = end_s
            row[2] += end_s - start_s
            row[3] += 1
            row[4] += prompt_tokens
            row[5] += decode_tokens
            self._in_last += 1
            return
        if len(self._rows) == 2 * self._most:
            self._halve()
        self._rows.append([start_s, end_s, end_s - start_s, 1, prompt_tokens, decode_tokens])
        self._in_last = 1

    def _halve(self) -> None:
        pairs = zip(self._rows[::2], self._rows[1::2], strict=True)
        self._rows = [[a[0], b[1], *(x + y for x, y in zip(a[2:], b[2:], strict=True))] for a, b in pairs]
        self._each *= 2

    def intervals(self) -> tuple[Interval, ...]:
        if len(self._rows) > self._most and len(self._rows) % 2 == 0:
            self._halve()
        return tuple(Interval(a, b, busy, int(n), int(p), int(d)) for a, b, busy, n, p, d in self._rows)


class Queue:
    """Points of one pipeline; every so many, and fewer the longer it takes."""

    def __init__(self, most: int = MOST_ENTRIES) -> None:
        self._most, self._points, self._every, self._seen = most, list[QueuePoint](), 1, 0
        self.most_waiting = 0

    def add(self, at_s: float, waiting: int, running: int, kv_pages: int) -> None:
        if waiting > self.most_waiting:
            self.most_waiting = waiting
        if self._seen % self._every == 0:
            self._points.append(QueuePoint(at_s, waiting, running, kv_pages))
            if len(self._points) == 2 * self._most:
                self._points = self._points[::2]
                self._every *= 2
        self._seen += 1

    def points(self) -> tuple[QueuePoint, ...]:
        return tuple(self._points)
