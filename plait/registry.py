"""Backends by name. Nothing of a backend is imported until it is asked for.

In tree a backend is a row of `IN_TREE`; out of tree it is an entry point of the group `plait.backends`. Both are import
paths, `module:attribute`, which an artifact carries as well.
"""

from __future__ import annotations

import importlib
import importlib.util
from importlib.metadata import EntryPoint, entry_points
from typing import TYPE_CHECKING, NamedTuple

from plait.errors import MissingDependencyError, UsageError, did_you_mean

if TYPE_CHECKING:
    from plait.backends.base import Backend

GROUP = "plait.backends"


class Row(NamedTuple):
    """Where a backend of this repository lies, the wheel it cannot do without, and how to get that."""

    entry: str
    wheel: str | None = None
    install: str = ""


_RUN = "pip install 'plait[run]'"

IN_TREE: dict[str, Row] = {
    "cuda": Row("plait.backends.cuda:BACKEND"),
    "rocm": Row("plait.backends.rocm:BACKEND"),
    "cpu": Row("plait.backends.cpu:BACKEND", "torch", _RUN),
    "xla": Row("plait.backends.xla:BACKEND", "jax", _RUN),
    "null": Row("plait.backends.null:BACKEND"),
}


def backend_names() -> tuple[str, ...]:
    """Every backend that can be named, sorted: in tree and installed beside plait."""
    return tuple(sorted({*IN_TREE, *_installed()}))


def out_of_tree() -> tuple[str, ...]:
    """The backends that packages beside plait bring."""
    return tuple(sorted(_installed()))


def entry(name: str) -> str:
    """The import path of a backend, `module:attribute`. Raises UsageError `backend-unknown`."""
    if name in IN_TREE:
        return IN_TREE[name].entry
    installed = _installed()
    if name not in installed:
        known = backend_names()
        raise UsageError(
            "backend-unknown",
            f"no backend is called {name!r}",
            why="known are " + ", ".join(known),
            hint=did_you_mean(name, known) or "install the package that brings it",
        )
    return installed[name].value


def load_backend(name_or_entry: str) -> Backend:
    """The backend of a name (`cuda`) or of an import path (`plait.backends.cuda:BACKEND`).

    Raises:
        UsageError: `backend-unknown`, or `backend-broken` where the path leads to no backend.
        MissingDependencyError: `backend-wheel`, when a wheel that the backend needs is not installed.
    """
    from plait.backends.base import Backend

    path = name_or_entry if ":" in name_or_entry else entry(name_or_entry)
    row = next((row for row in IN_TREE.values() if row.entry == path), Row(path))
    if row.wheel is not None and importlib.util.find_spec(row.wheel) is None:
        raise _missing(name_or_entry, row.wheel, row.install)
    module, _, attribute = path.partition(":")
    try:
        found = getattr(importlib.import_module(module), attribute, None)
    except ModuleNotFoundError as err:
        raise _missing(name_or_entry, err.name or module, row.install) from err
    if not isinstance(found, Backend):
        raise UsageError(
            "backend-broken",
            f"{path} is not a backend",
            why="it lacks a name or a method of plait.backends.base.Backend" if found is not None else "it is absent",
        )
    return found


def _installed() -> dict[str, EntryPoint]:
    """Out-of-tree backends. A name of this repository is not up for grabs."""
    return {point.name: point for point in entry_points(group=GROUP) if point.name not in IN_TREE}


def _missing(backend: str, wheel: str, install: str) -> MissingDependencyError:
    return MissingDependencyError(
        "backend-wheel",
        f"backend {backend!r} cannot be loaded here",
        why=f"it needs {wheel!r}, which is not installed",
        hint=install or f"install the package that brings {wheel!r}",
    )
