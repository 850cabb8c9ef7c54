"""Traces: files with one request a line, as CSV with a header or as JSON Lines.

Columns go by these names, letter case aside; others are left alone:

| what | names |
| --- | --- |
| arrival, seconds or a date with time | `arrival_s`, `arrived_at`, `TIMESTAMP` |
| prompt tokens | `prompt_tokens`, `num_prefill_tokens`, `ContextTokens` |
| output tokens | `output_tokens`, `num_decode_tokens`, `GeneratedTokens` |
| of the prompt, shared with its group (both or neither) | `prefix_group`, `prefix_tokens` |

The first request comes at 0, whatever the clock said.
"""

from __future__ import annotations

import csv
import json
import math
from collections.abc import Iterator, Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, NoReturn

from plait.cost_models.simulator.traffic import MOST_REQUESTS, Ask
from plait.errors import UserError, did_you_mean

#: What a column may be called, in lower case.
NAMES: dict[str, tuple[str, ...]] = {
    "arrival_s": ("arrival_s", "arrived_at", "timestamp"),
    "prompt_tokens": ("prompt_tokens", "num_prefill_tokens", "contexttokens"),
    "output_tokens": ("output_tokens", "num_decode_tokens", "generatedtokens"),
    "prefix_group": ("prefix_group",),
    "prefix_tokens": ("prefix_tokens",),
}
_REQUIRED = ("arrival_s", "prompt_tokens", "output_tokens")
_JSON_ENDINGS = (".jsonl", ".ndjson", ".json")

#: Longer texts and lines belong to a file of another kind.
_LONGEST_LINE = 1 << 20

#: Tokens of one request; beyond it a column was mistaken for another.
_MOST_TOKENS = 100_000_000


def read_trace(path: Path, limit: int | None = None) -> tuple[Ask, ...]:
    """The requests of a trace, in the order of the file; the first `limit` of them.

    Raises:
        UserError: `trace-unreadable`, `trace-columns`, `trace-value`, `trace-empty`, naming file, line and column.
    """
    asks = list[Ask]()
    try:
        with path.open(encoding="utf-8-sig", newline="") as file:
            rows = _json_rows(path, file) if path.suffix.lower() in _JSON_ENDINGS else _csv_rows(path, file)
            columns: dict[str, str] = {}
            for line, row in rows:
                if not columns:
                    columns = _columns(path, line, row)
                asks.append(_ask(path, line, row, columns))
                if len(asks) == limit:
                    break
                if len(asks) > MOST_REQUESTS:
                    raise UserError("trace-unreadable", f"{path} has more than {MOST_REQUESTS:,} requests")
    except (OSError, UnicodeDecodeError, csv.Error, RecursionError) as err:
        raise UserError("trace-unreadable", f"cannot read the trace {path}", why=str(err)) from err
    if not asks:
        raise UserError("trace-empty", f"{path} holds no request", hint="a CSV needs a header and a line per request")
    return tuple(asks)


def _lines(path: Path, file: Any) -> Iterator[str]:
    for number, line in enumerate(iter(lambda: file.readline(_LONGEST_LINE), ""), 1):
        if len(line) == _LONGEST_LINE or "\0" in line:
            raise UserError("trace-unreadable", f"{path}:{number} is no line of a trace", why="too long, or not text")
        yield line


def _csv_rows(path: Path, file: Any) -> Iterator[tuple[int, Mapping[str, Any]]]:
    reader = csv.reader(_lines(path, file), strict=True)
    header = [name.strip() for name in next(reader, [])]
    twice = next((name for name in header if header.count(name) > 1), None)
    if twice is not None:
        raise UserError("trace-columns", f"{path}: the column {twice!r} stands twice")
    for cells in reader:
        if not any(cell.strip() for cell in cells):
            continue
        if len(cells) != len(header):
            what = f"{path}:{reader.line_num} has {len(cells)} cells, the header has {len(header)}"
            raise UserError("trace-value", what)
        yield reader.line_num, dict(zip(header, cells, strict=True))


def _json_rows(path: Path, file: Any) -> Iterator[tuple[int, Mapping[str, Any]]]:
    for number, line in enumerate(_lines(path, file), 1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except ValueError as err:
            raise UserError("trace-value", f"{path}:{number} is not JSON", why=str(err)) from err
        if not isinstance(row, dict):
            raise UserError("trace-value", f"{path}:{number} is no JSON object", hint="one object per line")
        yield number, row


def _columns(path: Path, line: int, row: Mapping[str, Any]) -> dict[str, str]:
    """What -> the column that holds it."""
    found: dict[str, str] = {}
    for what, names in NAMES.items():
        named = [column for column in row if column.lower() in names]
        if len(named) > 1:
            raise UserError("trace-columns", f"{path}: {' and '.join(named)} both say the {what}")
        if named:
            found[what] = named[0]
    missing = [what for what in _REQUIRED if what not in found]
    if ("prefix_group" in found) != ("prefix_tokens" in found):
        missing += [what for what in ("prefix_group", "prefix_tokens") if what not in found]
    if missing:
        accepted = [name for what in missing for name in NAMES[what]]
        raise UserError(
            "trace-columns",
            f"{path}:{line} has no column for {', '.join(missing)}",
            why="it has " + (", ".join(map(repr, row)) or "none"),
            hint=next(filter(None, (did_you_mean(column.lower(), accepted) for column in row)), "")
            or "names that are known: " + ", ".join(accepted),
        )
    return found


def _ask(path: Path, line: int, row: Mapping[str, Any], columns: Mapping[str, str]) -> Ask:
    def cell(what: str) -> Any:
        if columns[what] not in row:
            _bad(path, line, columns[what], "nothing", "every line has it")
        return row[columns[what]]

    def tokens(what: str, least: int) -> int:
        value = cell(what)
        try:
            number = float(value) if isinstance(value, str) else value
            if isinstance(number, bool) or not number == int(number) or not least <= number <= _MOST_TOKENS:
                raise ValueError
        except (TypeError, ValueError, OverflowError):
            _bad(path, line, columns[what], value, f"a whole number, {least} to {_MOST_TOKENS:,}")
        return int(number)

    prompt = tokens("prompt_tokens", 1)
    group, prefix = None, 0
    if "prefix_group" in columns and cell("prefix_group") not in ("", None):
        group, prefix = str(cell("prefix_group")), tokens("prefix_tokens", 0)
        if prefix > prompt:
            _bad(path, line, columns["prefix_tokens"], prefix, f"at most the prompt's {prompt} tokens")
    return Ask(
        arrival_s=_seconds(path, line, columns["arrival_s"], cell("arrival_s")),
        prompt_tokens=prompt,
        output_tokens=tokens("output_tokens", 1),
        prefix_group=group,
        prefix_tokens=prefix,
    )


def _seconds(path: Path, line: int, column: str, value: Any) -> float:
    """Seconds of any clock; a date without a zone is read as UTC."""
    try:
        if isinstance(value, bool):
            raise ValueError
        seconds = float(value)
    except (TypeError, ValueError):
        try:
            moment = datetime.fromisoformat(str(value).strip())
        except ValueError:
            _bad(path, line, column, value, "seconds, or a date with time")
        seconds = (moment if moment.tzinfo else moment.replace(tzinfo=UTC)).timestamp()
    if not math.isfinite(seconds) or abs(seconds) > 1e12:
        _bad(path, line, column, value, "a finite number of seconds")
    return seconds


def _bad(path: Path, line: int, column: str, value: Any, expected: str) -> NoReturn:
    raise UserError("trace-value", f"{path}:{line}, column {column}: {value!r:.100}", why=f"it must be {expected}")
