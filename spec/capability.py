"""What a backend can do, as values that the planner is handed: it never imports a backend."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True)
class Support:
    """Whether one op is implemented with every attribute it carries; `why` names the one that is not."""

    ok: bool
    why: str = ""


@dataclass(frozen=True)
class Capability:
    """A backend's answer for one target.

    Attributes:
        dtypes: compute dtypes that give right numbers there.
        runs_on: where a slice would run here and now: `h100`, or `h100 (emulated on host)`.
        refused: op name (with block) -> why, for the module asked about; empty when all of it is supported.
        environment: slices whose backends name the same environment may share a worker process.
    """

    backend: str
    target: str
    dtypes: tuple[str, ...]
    runs_on: str
    emulated: bool
    environment: str
    refused: dict[str, str] = field(default_factory=dict)
