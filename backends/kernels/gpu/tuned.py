"""Tiles that were measured on a device, on disk: `choose` prefers them to its model.

An entry is found again by everything that it depends on: the kernel's row and source, Triton's version, the
architecture, and the launch (types, constants, sizes, rows). After a change of any of these it is as if it had never
been.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Self

import msgspec

from plait.backends.kernels.gpu.build import Job
from plait.backends.kernels.gpu.cache import Cache
from plait.backends.kernels.gpu.kernel import Tile

if TYPE_CHECKING:
    from plait.backends.kernels.gpu.choose import Request


@dataclass(frozen=True)
class Timed:
    """A tile and the median time of one launch, in microseconds."""

    tile: Tile
    us: float


@dataclass(frozen=True)
class Tuned:
    """What was measured for one request, the fastest first, and what the device calls itself."""

    device: str
    times: tuple[Timed, ...]

    @property
    def best(self) -> Timed:
        return self.times[0]


@dataclass(frozen=True)
class Store:
    """Measured tiles by request."""

    cache: Cache

    @classmethod
    def beside(cls, kernels: Cache) -> Self:
        """The store that goes with a cache of compiled kernels."""
        return cls(Cache(kernels.folder.with_name("tuned")))

    def get(self, request: Request) -> Tuned | None:
        payload = self.cache.get(_key(request))
        return None if payload is None else msgspec.json.decode(payload, type=Tuned)

    def put(self, request: Request, device: str, times: Sequence[Timed]) -> Tuned:
        """Keep what was measured.

        Raises:
            UserError: `cache-unwritable`.
        """
        tuned = Tuned(device, tuple(sorted(times, key=lambda timed: timed.us)))
        self.cache.put(_key(request), msgspec.json.encode(tuned))
        return tuned


def _key(request: Request) -> str:
    """The job's key stands for Triton, the source, the architecture and what is settled at compile time."""
    job = Job(request.kernel, request.variant(Tile({})), request.arch)
    parts = [job.key, request.rows, dict(request.names)]
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()
