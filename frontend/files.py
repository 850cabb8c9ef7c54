"""What every reader of a checkpoint gives, and JSON read without forgiving anything."""

from __future__ import annotations

import hashlib
import json
import re
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

from plait.errors import CheckpointError
from plait.spec import WeightRef

MAX_RANK = 8
MAX_DIM = 1 << 40
"""More than any tensor or config has: beyond them a header is damaged, and products of dimensions stay harmless."""

_HALF = re.compile(rb"\\u[dD][89a-fA-F]")
"""Half of a character outside of the first 65,536, as JSON spells it; alone it is none."""

_KINDS = {list: "a list", str: "a text", bool: "true or false", type(None): "null"}
"""JSON's own names of what is no object."""


@dataclass(frozen=True)
class TensorFiles:
    """The tensors of one checkpoint. No tensor data has been read.

    Attributes:
        weights: byte range of every tensor, by the name it has in the checkpoint.
        files: size in bytes and digest of the header, by path.
        metadata: what the headers say beside the tensors.
    """

    weights: dict[str, WeightRef]
    files: dict[str, tuple[int, str]]
    metadata: dict[str, Any]


def some(names: Iterable[str], limit: int = 5) -> str:
    """Up to `limit` of the names, sorted, and how many more there are."""
    ordered = sorted(names)
    more = f" and {len(ordered) - limit} more" if len(ordered) > limit else ""
    return ", ".join(repr(name) for name in ordered[:limit]) + more


def header_digest(header: bytes) -> str:
    return "sha256:" + hashlib.sha256(header).hexdigest()


def unreadable(path: Path, err: OSError) -> CheckpointError:
    return CheckpointError("checkpoint-unreadable", f"cannot read {path}", why=err.strerror or str(err))


def version(path: Path) -> tuple[int, int]:
    """Size in bytes and time of the last change, by which a file that was read is known to be still the same.

    Raises CheckpointError `checkpoint-unreadable`.
    """
    try:
        stat = path.stat()
    except OSError as err:
        raise unreadable(path, err) from err
    return stat.st_size, stat.st_mtime_ns


def parse_json(text: bytes, source: str) -> dict[str, Any]:
    """A JSON object. Duplicate keys, NaN, invalid UTF-8 and halves of characters are refused: each has two readings.

    Raises:
        CheckpointError: `json-invalid`, naming `source`.
    """

    def refuse(why: str) -> NoReturn:
        raise CheckpointError("json-invalid", f"{source} is not valid JSON", why=why)

    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        out = dict(pairs)
        if len(out) != len(pairs):
            refuse(
                "more than once: " + some(key for key, count in Counter(key for key, _ in pairs).items() if count > 1)
            )
        return out

    def constant(word: str) -> NoReturn:
        refuse(f"{word} is no JSON number")

    try:
        data = json.loads(text.decode("utf-8"), object_pairs_hook=unique, parse_constant=constant)
        if _HALF.search(text):
            json.dumps(data, ensure_ascii=False).encode("utf-8")
    except CheckpointError:
        raise
    except (ValueError, RecursionError) as err:
        refuse(str(err))
    if not isinstance(data, dict):
        kind = _KINDS.get(type(data), "a number")
        raise CheckpointError("json-invalid", f"{source} holds no JSON object", why=f"it holds {kind}")
    return data


def read_text(path: Path) -> str:
    """A UTF-8 file. Raises CheckpointError."""
    try:
        return path.read_text("utf-8")
    except OSError as err:
        raise unreadable(path, err) from err
    except UnicodeDecodeError as err:
        raise CheckpointError("checkpoint-unreadable", f"{path} is not UTF-8 text", why=str(err)) from err


def read_json(path: Path) -> dict[str, Any]:
    """`parse_json` of a file."""
    try:
        return parse_json(path.read_bytes(), str(path))
    except OSError as err:
        raise unreadable(path, err) from err
