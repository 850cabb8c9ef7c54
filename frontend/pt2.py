"""The archive that `torch.export.save` writes: where its records lie, and whether reading it could run code.

A `.pt2` is a zip archive without compression. torch unpickles some of its records, evaluates expressions and calls
functions by name, so whoever wrote the file could have anything run: what goes beyond a graph of torch's ops is refused
before torch sees it.
"""

from __future__ import annotations

import io
import json
import re
import zipfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

from plait.errors import CheckpointError, PlaitError, UnsupportedError
from plait.frontend.files import header_digest, some, unreadable

_CONFIGS = {
    "data/weights/model_weights_config.json": "weight_",
    "data/constants/model_constants_config.json": "tensor_",
}
"""What says which record holds which tensor, and how the records' names begin; others are pickled."""

_MODEL = "models/model.json"
_SAMPLES = "data/sample_inputs/model.pt"

_TARGETS = re.compile(
    r"torch\.ops\.\w+\.\w+(\.\w+)?|torch\.sym_\w+|math\.\w+|"
    r"_operator\.(getitem|add|sub|mul|truediv|floordiv|mod|pow|neg|pos|eq|ne|lt|le|gt|ge|and_|or_|lshift|rshift)"
)
"""What a graph may call. torch takes any path to something callable: `torch.os.system` too."""

_EXPRESSION = re.compile(
    r"(?>[A-Z]\w*|'[a-z]{1,4}\d+'|'[\d.]+'|[a-z]{1,4}\d+|[a-z]+=(?!=)|\d+\.\d+|[\d\s+\-*/%(),<>=!&|~])*+"
)
"""Sizes: `Max(1, Symbol('s27', integer=True))`. sympy evaluates them as Python, with `exec` at hand."""

_NAME = re.compile(r"[\w.+-]*")
"""Names become part of Python code too."""

_GUARD = re.compile(
    r"(?>(?:[A-Za-z_]\w*|L\['\w+'\](?:\[(?:\d+|'\w+')\])*+)\.(?:size|stride)\(\)\[\d+\]|"
    r"and |or |not |min(?=\()|max(?=\()|[\d\s+\-*/%(),<>=!&|~])*+"
)
"""Conditions on the input: `L['tokens'].size()[1] <= 50`, `L['past'][0][1].size()[2]`."""

_ALLOWED = {"target": _TARGETS, "as_operator": _TARGETS, "guards_code": _GUARD, "expr_str": _EXPRESSION}

_FREE = frozenset({"metadata", "in_spec", "out_spec", "as_string", "as_strings"})
"""Parts of a program that are neither called nor evaluated."""


@dataclass(frozen=True)
class Archive:
    """Records by their path inside the archive: first byte in the file and length.

    Attributes:
        weights: what the archive says of each parameter and buffer, by name.
        identity: size in bytes and digest of what says where the weights lie and what is computed.
    """

    path: Path
    records: dict[str, tuple[int, int]]
    weights: dict[str, Any]
    identity: tuple[int, str]

    def read(self, record: str) -> bytes:
        offset, length = self.records[record]
        with self.path.open("rb") as file:
            file.seek(offset)
            return file.read(length)


def damaged(path: Path, why: str) -> CheckpointError:
    return CheckpointError(
        "exported-damaged", f"{path} is no program that torch.export.save wrote", why=why, hint="save it again"
    )


def refuse(code: str, what: str, why: str = "", hint: str = "") -> NoReturn:
    raise UnsupportedError(f"exported-{code}", what, why=why, hint=hint)


def identity(path: Path) -> tuple[int, str]:
    """Size in bytes and digest of what says where the weights lie and what is computed."""
    return read_archive(path).identity


def read_archive(path: Path) -> Archive:
    """Raises:
    CheckpointError: `exported-damaged`: it is no whole archive.
    UnsupportedError: `exported-pickle`: it holds tensors that are pickled.
    """
    try:
        records = _records(path)
        archive = Archive(path, records, {}, (0, ""))
        texts = [archive.read(name) for name in (*_CONFIGS, _MODEL)]
        configs = [dict(json.loads(text.decode())["config"]) for text in texts[: len(_CONFIGS)]]
        pickled = [
            name
            for config, prefix in zip(configs, _CONFIGS.values(), strict=True)
            for name, item in config.items()
            if item["use_pickle"] or not item["path_name"].startswith(prefix)
        ]
        size = path.stat().st_size
    except PlaitError:
        raise
    except OSError as err:
        raise unreadable(path, err) from err
    except (zipfile.BadZipFile, ValueError, LookupError, TypeError, AttributeError, RuntimeError) as err:
        raise damaged(path, f"{type(err).__name__}: {err}") from err
    if pickled:
        refuse("pickle", f"{path} holds objects that must be unpickled: {some(pickled)}", "that can run code")
    return Archive(path, records, configs[0], (size, header_digest(b"".join(texts))))


def _records(path: Path) -> dict[str, tuple[int, int]]:
    records: dict[str, tuple[int, int]] = {}
    with zipfile.ZipFile(path) as file, path.open("rb") as raw:
        entries = file.infolist()
        for info in entries:
            if info.compress_type != zipfile.ZIP_STORED:
                raise damaged(path, f"{info.filename} is compressed, and torch compresses nothing")
            # The record begins behind its own header: 30 bytes, its name and its padding.
            raw.seek(info.header_offset + 26)
            name, extra = (int.from_bytes(raw.read(2), "little") for _ in range(2))
            records[info.filename.partition("/")[2]] = (info.header_offset + 30 + name + extra, info.file_size)
    if len(records) != len(entries):
        raise damaged(path, "it holds two records of one name")
    if missing := {*_CONFIGS, _MODEL, _SAMPLES} - records.keys():
        raise damaged(path, f"it lacks {some(missing)}")
    known = ("data/weights/", "data/constants/", _MODEL, _SAMPLES)
    if foreign := [name for name in records if name.startswith(("data/", "models/")) and not name.startswith(known)]:
        refuse("contents", f"{path} holds more than one program: {some(foreign)}", "only `model` is read")
    return records


def check_code(archive: Archive) -> None:
    """Raises UnsupportedError where reading or running the program could run anything but torch's ops: `exported-code`,
    `exported-pickle`."""
    import torch

    try:
        # torch unpickles these without limits where its safe way fails, so that has to work.
        torch.load(io.BytesIO(archive.read(_SAMPLES)), weights_only=True)
    except Exception as err:
        refuse("pickle", f"its sample inputs must be unpickled: {err}"[:300], "that can run code")
    try:
        program = json.loads(archive.read(_MODEL).decode())
    except (ValueError, RecursionError) as err:
        raise damaged(archive.path, f"{_MODEL}: {err}") from err
    for key, text in _strings(program):
        if _ALLOWED.get(key, _NAME).fullmatch(text) is None:
            refuse("code", f"{archive.path}: its program has {text!r:.100} as {key!r}", "that can run code")


def _strings(part: Any, key: str = "") -> Iterator[tuple[str, str]]:
    """Every text of a JSON value that is not free, names of members included, with the member it stands in."""
    if isinstance(part, str):
        yield key, part
    elif isinstance(part, list):
        for item in part:
            yield from _strings(item, key)
    elif isinstance(part, dict):
        for name, item in part.items():
            if name not in _FREE:
                yield "name", name
                yield from _strings(item, name)
