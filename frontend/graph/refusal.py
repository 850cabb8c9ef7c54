"""Graphs that are no decoder of ours."""

from __future__ import annotations

from typing import NoReturn

from plait.errors import UnsupportedError


def refuse(code: str, what: str, why: str = "") -> NoReturn:
    raise UnsupportedError(f"graph-{code}", what, why=why)
