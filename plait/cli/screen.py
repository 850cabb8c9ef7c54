"""Where a command writes: results to stdout, everything about the work to stderr, one JSON document with `--json`."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Mapping
from types import TracebackType
from typing import TYPE_CHECKING, Any, NoReturn, Self

if TYPE_CHECKING:
    from rich.console import Console, RenderableType
    from rich.status import Status

#: Columns of a table that goes to a pipe or a file.
PLAIN_WIDTH = 120


def console(*, stderr: bool = False) -> Console:
    """A console without colours where there is no terminal, and wide enough there that tables do not wrap."""
    import os

    from rich.console import Console

    class Quiet(Console):
        """A broken pipe is for `plait.cli.root` to end on, like every other one."""

        def on_broken_pipe(self) -> NoReturn:
            raise BrokenPipeError

    stream = sys.stderr if stderr else sys.stdout
    width = None if stream.isatty() or "COLUMNS" in os.environ else PLAIN_WIDTH
    return Quiet(stderr=stderr, width=width, highlight=False, emoji=False, markup=False)


class Screen:
    """The two streams of one command. With `as_json`, stdout takes nothing but `result`."""

    def __init__(self, *, as_json: bool) -> None:
        self.as_json = as_json
        self._out, self._err = console(stderr=as_json), console(stderr=True)

    @property
    def width(self) -> int:
        return self._out.width

    def show(self, item: RenderableType, style: str | None = None) -> None:
        """A table or a line that is the command's answer; with `--json` it goes to stderr. A string stays one line.

        A narrow terminal breaks lines; nothing is cut off, because `7.18 G` of `7.18 GB` looks whole."""
        _print(self._out, item, style)

    def note(self, text: str) -> None:
        """One dim line on stderr."""
        self._err.print(text, style="dim", soft_wrap=True)

    def aside(self, item: RenderableType) -> None:
        """A table about the work, not the answer: stderr."""
        _print(self._err, item)

    def next(self, command: str) -> None:
        """The exact command that comes next, on a line of its own so that it can be copied."""
        self._out.print(f"\nnext: {command}", style="bold", soft_wrap=True)

    def result(self, data: Mapping[str, Any]) -> None:
        """The JSON document of the command. Nothing without `--json`."""
        if self.as_json:
            write_json(data)

    def phases(self) -> Phases:
        return Phases(self._err)


def _print(console: Console, item: RenderableType, style: str | None = None) -> None:
    from rich.measure import Measurement
    from rich.table import Table

    if isinstance(item, Table) and item.show_header:
        least = Measurement.get(console, console.options.update(max_width=10_000), item).minimum
        if least > console.width:  # otherwise a column that has no room left goes missing
            item.width = least
    console.print(item, style=style, soft_wrap=isinstance(item, str), crop=False)


def write_json(data: Mapping[str, Any]) -> None:
    """Exactly one JSON document on stdout. NaN and infinity are not JSON and are refused."""
    sys.stdout.write(json.dumps(data, indent=2, allow_nan=False) + "\n")
    sys.stdout.flush()


class Phases:
    """Shows what goes on: a spinner on a terminal, and one line per finished phase. Called as `plait.api.Progress`."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._status: Status | None = None
        self._phase, self._detail, self._began = "", "", 0.0

    def __enter__(self) -> Self:
        if self._console.is_terminal:
            self._status = self._console.status("")
            self._status.start()
        return self

    def __call__(self, phase: str, done: int, total: int) -> None:
        if phase != self._phase:
            self._finish()
            self._phase, self._began = phase, time.monotonic()
        self._detail = f"{total}" if total > 1 else ""
        if self._status is not None:
            self._status.update(f"{phase} {done}/{total}" if total > 1 else phase)

    def _finish(self) -> None:
        if self._phase:
            seconds = time.monotonic() - self._began
            self._console.print(f"{self._phase:<9}{self._detail:>4}  {seconds:6.2f} s", style="dim")

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._status is not None:
            self._status.stop()
        if error is None:
            self._finish()
