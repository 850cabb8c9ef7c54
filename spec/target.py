"""Targets: what code is made for, and how a user writes it.

    [COUNT x] [BACKEND :] NAME [@ HOST]      h100    2xcuda:h100@hostA    xla:tpu-v5e    rocm:gfx942    null:h100    cpu

This file knows the grammar only. What a NAME means (`mi300` is MI300X) is the catalogue's business
(`plait.cost_models.catalogue`).
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from plait.errors import UsageError

_GRAMMAR = re.compile(
    r"(?:(?P<count>\d+)x)?(?:(?P<backend>[A-Za-z][\w-]*):)?(?P<name>[A-Za-z][\w.-]*)(?:@(?P<host>[A-Za-z0-9][\w.-]*))?"
)


@dataclass(frozen=True)
class Target:
    """`count` devices of the kind `name`, each a pipeline stage of its own unless a plan groups them.

    `backend` is None until the catalogue has resolved `name`; `host` None means a host of its own.
    """

    name: str
    backend: str | None = None
    count: int = 1
    host: str | None = None

    def __str__(self) -> str:
        count = f"{self.count}x" if self.count != 1 else ""
        backend = f"{self.backend}:" if self.backend else ""
        return f"{count}{backend}{self.name}" + (f"@{self.host}" if self.host else "")


def parse_target(text: str) -> Target:
    """Read one target. The inverse of `str(target)`.

    Raises:
        UsageError: `target-syntax`, showing the grammar.
    """
    match = _GRAMMAR.fullmatch(text.strip())
    if not match:
        raise UsageError(
            "target-syntax",
            f"cannot read the target {text!r}",
            why="a target is [COUNTx][BACKEND:]NAME[@HOST]",
            hint="for example h100, 2xmi300x, xla:tpu-v5e or 2xcuda:h100@hostA",
        )
    count = int(match["count"] or 1)
    if not 1 <= count <= 4096:
        raise UsageError("target-count", f"{text!r} asks for {count} devices", why="a count is 1 to 4096")
    return Target(name=match["name"], backend=match["backend"], count=count, host=match["host"])


def parse_targets(text: str | list[str] | tuple[str, ...]) -> tuple[Target, ...]:
    """Read a comma-separated string, or a list of strings that may each hold several."""
    parts = [text] if isinstance(text, str) else list(text)
    names = [name for part in parts for name in part.split(",") if name.strip()]
    if not names:
        raise UsageError("target-none", "no target given", hint="--targets h100,mi300")
    return tuple(parse_target(name) for name in names)
