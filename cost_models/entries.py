"""The catalogue's files as frozen records, read strictly."""

from __future__ import annotations

import functools
from dataclasses import dataclass, field
from importlib.resources import files
from importlib.resources.abc import Traversable
from typing import Any, Literal

import yaml

from plait.spec import from_dict

#: The catalogue is plait's own and read at every start: the fast loader, where PyYAML was built with it.
_Loader: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)

GB, GIB = 10**9, 2**30
UNIT_BYTES = {"GB": GB, "GiB": GIB}


@dataclass(frozen=True)
class Memory:
    """Capacity in the unit the vendor means; bandwidth None where none is published."""

    capacity: float
    unit: Literal["GB", "GiB"]
    kind: str
    bandwidth_gb_per_s: float | None = None
    unified: bool = False


@dataclass(frozen=True)
class Logical:
    """One chip shows up as `count` devices, each with its share (`capacity_gib` where its memory is measured)."""

    count: int
    why: str
    capacity_gib: float | None = None


@dataclass(frozen=True)
class Peer:
    """Links between equal chips of one host, one way: to one neighbour, and to all of them together."""

    kind: str
    topology: str
    total_gb_per_s: float
    gb_per_s: float | None = None


@dataclass(frozen=True)
class HostLink:
    kind: str
    gb_per_s: float
    cpu: str | None = None


@dataclass(frozen=True)
class Derive:
    """The dense peak of dtype `of` is units x mhz x flop_per_clock."""

    of: str
    units: int
    mhz: float
    flop_per_clock: int


@dataclass(frozen=True)
class Price:
    """USD per accelerator and hour: the cheapest seen (spot or commitment) and the list price."""

    low: float
    high: float
    year: int
    sources: tuple[str, ...]


@dataclass(frozen=True)
class Entry:
    """One chip of the catalogue. `short` is the name that tables and folders use where it differs from `name`."""

    name: str
    title: str
    vendor: str
    backend: str
    arch: str
    confidence: Literal["read", "derived", "memory"]
    sources: tuple[str, ...]
    peak_tflops: dict[str, float]
    memory: Memory
    formats: tuple[str, ...]
    short: str | None = None
    aliases: tuple[str, ...] = ()
    status: Literal["ga", "cloud", "announced"] = "ga"
    emulated: dict[str, tuple[str, int]] = field(default_factory=dict)
    measured_matmul_tflops: dict[str, float] = field(default_factory=dict)
    derive: Derive | None = None
    logical: Logical | None = None
    peer: Peer | None = None
    host: HostLink | None = None
    on_chip_mb: dict[str, float] = field(default_factory=dict)
    tdp_w: float | None = None
    price_usd_per_hour: Price | None = None
    note: str | None = None

    @property
    def label(self) -> str:
        return self.short or self.name

    @property
    def names(self) -> tuple[str, ...]:
        """Everything a user may call it."""
        return tuple(dict.fromkeys((self.label, self.name, *self.aliases)))


@dataclass(frozen=True)
class Architecture:
    """A row of architectures.yaml, which says what its fields are."""

    rates: dict[str, float]
    source: str
    peer_gb_per_s: float | None = None
    logical: int = 1
    units: int | None = None


@dataclass(frozen=True)
class BackendDefaults:
    reserve_bytes: int
    reserve_fraction: float
    step_overhead_s: float


@dataclass(frozen=True)
class HostCpuDefaults:
    gflops_per_core: dict[str, float]
    bandwidth_gb_per_s_per_core: float
    peer_gb_per_s: float


@dataclass(frozen=True)
class Defaults:
    achieved: float
    bandwidth_achieved: float
    unified_usable: float
    backends: dict[str, BackendDefaults]
    host_cpu: HostCpuDefaults

    def of_backend(self, backend: str) -> BackendDefaults:
        return self.backends.get(backend, self.backends["other"])


@dataclass(frozen=True)
class Network:
    name: str
    gb_per_s: float
    latency_s: float
    source: str


@dataclass(frozen=True)
class Networks:
    default: str
    networks: tuple[Network, ...]


@dataclass(frozen=True)
class PeerPath:
    latency_s: float
    source: str


@dataclass(frozen=True)
class StagedPath:
    copies: int
    achieved: float
    latency_s: float
    source: str


@dataclass(frozen=True)
class LocalPaths:
    peer: PeerPath
    staged: StagedPath


@functools.cache
def entries() -> tuple[Entry, ...]:
    """Every chip, in the order of the files."""
    found = sorted((_root() / "devices").iterdir(), key=lambda file: file.name)
    return tuple(
        from_dict(Entry, data, path=f"{file.name}[{i}]")
        for file in found
        if file.name.endswith(".yaml")
        for i, data in enumerate(_load(file))
    )


@functools.cache
def architectures() -> dict[str, Architecture]:
    """Architecture -> what every chip of it has in common; those that the file does not name have no rule."""
    return from_dict(dict[str, Architecture], _load(_root() / "architectures.yaml"), path="architectures.yaml")


@functools.cache
def sources() -> dict[str, str]:
    """Source id -> its full text."""
    return from_dict(dict[str, str], _load(_root() / "sources.yaml"), path="sources.yaml")


@functools.cache
def defaults() -> Defaults:
    return from_dict(Defaults, _load(_root() / "defaults.yaml"), path="defaults.yaml")


@functools.cache
def networks() -> Networks:
    return from_dict(Networks, _load(_root() / "links" / "networks.yaml"), path="networks.yaml")


@functools.cache
def local_paths() -> LocalPaths:
    return from_dict(LocalPaths, _load(_root() / "links" / "local.yaml"), path="local.yaml")


def _root() -> Traversable:
    return files("plait.cost_models")


def _load(file: Traversable) -> Any:
    return yaml.load(file.read_text(encoding="utf-8"), Loader=_Loader)
