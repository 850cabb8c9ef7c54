"""`cluster.yaml`: the devices somebody really has, with what differs from the catalogue.

    devices:
    - target: 2xh100@rack1          # the grammar of --targets; what follows overrides the catalogue
      free_bytes: 60 GB
    - name: npu                     # or a device of your own, with all its numbers
      backend: null
      arch: npu1
      memory_bytes: 32 GiB
      bandwidth_bytes_per_s: 500 GB
      peak_flops_per_s: {bfloat16: 200.0e12}
    links:
    - {a: rack1, b: npu.0, network: ethernet-25g}      # hosts or device ids; both ways unless `one_way: true`
    default_network: ethernet-10g

Sizes and rates are numbers in base units, or text with GB (1e9) or GiB (2**30).
"""

from __future__ import annotations

import re
from collections.abc import Collection
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from plait.cost_models.catalogue import NULL, check_device, cluster_for, network_link, reserve_bytes, with_links
from plait.cost_models.entries import defaults
from plait.cost_models.profiles import Chosen
from plait.errors import UserError
from plait.spec import Cluster, Device, Link, from_yaml, parse_target

Size = int | float | str

_SIZE = re.compile(r"\s*(?P<number>\d+(\.\d*)?([eE][+-]?\d+)?)\s*(?P<unit>[KMGT]i?B)?\s*")
_UNITS = {f"{prefix}{i}B": (1024 if i else 1000) ** n for n, prefix in enumerate("KMGT", 1) for i in ("", "i")}


@dataclass(frozen=True)
class DeviceEntry:
    """Either `target` (catalogue) or `name`, `arch` and the numbers; the rest overrides. Without a backend a device is
    planned on and nothing more (`null`)."""

    target: str | None = None
    name: str | None = None
    backend: str | None = None
    arch: str | None = None
    host: str | None = None
    count: int | None = None
    memory_bytes: Size | None = None
    free_bytes: Size | None = None
    reserve_bytes: Size | None = None
    bandwidth_bytes_per_s: Size | None = None
    peer_bytes_per_s: Size | None = None
    peak_flops_per_s: dict[str, Size] | None = None
    achieved: dict[str, float] | None = None
    bandwidth_achieved: float | None = None
    unified: bool | None = None
    step_overhead_s: float | None = None


@dataclass(frozen=True)
class LinkEntry:
    """A path between two hosts or two devices: a named network, or `bytes_per_s` and `latency_s`."""

    a: str
    b: str
    network: str | None = None
    bytes_per_s: Size | None = None
    latency_s: float | None = None
    one_way: bool = False


@dataclass(frozen=True)
class ClusterFile:
    devices: tuple[DeviceEntry, ...]
    links: tuple[LinkEntry, ...] = ()
    default_network: str | None = None
    schema: int = 1


def load_cluster(path: Path | str, profiles: Collection[Chosen] = ()) -> Cluster:
    """Read a cluster.yaml.

    Args:
        profiles: what was measured; see `catalogue.cluster_for`.

    Raises:
        UserError: `cluster-file` (cannot be read), `spec-yaml`, `spec-field` (unknown field or value),
            `device-numbers`, `device-memory`, `link-unknown`, `link-end`; UsageError for a target nobody knows.
    """
    path = Path(path)
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as err:
        raise UserError("cluster-file", f"cannot read the cluster file {path}", why=str(err)) from err
    return cluster_of(from_yaml(ClusterFile, text, path.name), profiles)


def cluster_of(file: ClusterFile, profiles: Collection[Chosen] = ()) -> Cluster:
    """The cluster a file describes. Raises as `load_cluster`."""
    if file.schema != 1:
        raise UserError("spec-schema", f"cluster.yaml has schema {file.schema}; this plait reads schema 1")
    if not file.devices:
        raise UserError("cluster-file", "cluster.yaml lists no devices")
    kinds = [_devices(number, entry, profiles) for number, entry in enumerate(file.devices)]
    counts: dict[str, int] = {}
    found = []
    for device in (device for kind in kinds for device in kind):
        index = counts.get(device.name, 0)
        counts[device.name] = index + 1
        found.append(check_device(replace(device, id=f"{device.name}.{index}")))
    ends = {device.id for device in found} | {device.host for device in found}
    links = tuple(link for entry in file.links for link in _links(entry, ends))
    default = network_link(file.default_network) if file.default_network else None
    return with_links(tuple(found), links, default)


def _devices(number: int, entry: DeviceEntry, profiles: Collection[Chosen]) -> tuple[Device, ...]:
    where = f"devices[{number}]"
    if (entry.target is None) == (entry.name is None):
        raise UserError("spec-field", f"{where}: give either a target of the catalogue or a name of your own")
    if entry.target is not None:
        fixed = [name for name in ("backend", "arch", "count", "host") if getattr(entry, name) is not None]
        if fixed:
            raise UserError("spec-field", f"{where}: {fixed[0]} is part of the target", hint="2xcuda:h100@hostA")
        target = parse_target(entry.target)
        base = cluster_for([target], profiles=profiles).devices
        host = target.host or (base[0].host if base[0].host == "localhost" else f"host{number}")
        base = tuple(replace(device, host=host) for device in base)
    else:
        base = (_own(where, number, entry),) * (entry.count or 1)
    return tuple(_override(where, device, entry) for device in base)


def _own(where: str, number: int, entry: DeviceEntry) -> Device:
    """A device that is not in the catalogue: nothing is assumed but what `defaults.yaml` assumes for all."""
    required = ("arch", "memory_bytes", "bandwidth_bytes_per_s", "peak_flops_per_s")
    missing = [name for name in required if not getattr(entry, name)]
    if missing:
        raise UserError(
            "device-numbers",
            f"{where}: {entry.name} lacks {', '.join(missing)}",
            why="a device with unknown numbers is not a device with none",
        )
    backend = entry.backend or NULL
    assert entry.name and entry.arch and entry.peak_flops_per_s
    known = defaults()
    return Device(
        id="",
        name=entry.name,
        backend=backend,
        arch=entry.arch,
        host=entry.host or f"host{number}",
        memory_bytes=0,
        bandwidth_bytes_per_s=0.0,
        peak_flops_per_s={},
        achieved=dict.fromkeys(entry.peak_flops_per_s, known.achieved),
        bandwidth_achieved=known.bandwidth_achieved,
        step_overhead_s=known.of_backend(backend).step_overhead_s,
        sources=("given in cluster.yaml",),
    )


def _override(where: str, device: Device, entry: DeviceEntry) -> Device:
    """The numbers of the file over those of the catalogue; the reserve follows what is free unless it is given too."""
    given: dict[str, Any] = {}
    for name in ("memory_bytes", "free_bytes", "reserve_bytes"):
        if getattr(entry, name) is not None:
            given[name] = int(_size(getattr(entry, name), f"{where}.{name}"))
    for name in ("bandwidth_bytes_per_s", "peer_bytes_per_s"):
        if getattr(entry, name) is not None:
            given[name] = _size(getattr(entry, name), f"{where}.{name}")
    for name in ("achieved", "bandwidth_achieved", "unified", "step_overhead_s"):
        if getattr(entry, name) is not None:
            given[name] = getattr(entry, name)
    if entry.peak_flops_per_s is not None:
        given["peak_flops_per_s"] = {
            dtype: _size(value, f"{where}.peak_flops_per_s.{dtype}") for dtype, value in entry.peak_flops_per_s.items()
        }
    if not given:
        return device
    # Rates of the file are meant: what was measured does not go over them.
    profile = device.profile if all(name.endswith("_bytes") for name in given) else None
    out = replace(device, **given, confidence="user", profile=profile)
    if "reserve_bytes" not in given:
        free = out.memory_bytes if out.free_bytes is None else out.free_bytes
        out = replace(out, reserve_bytes=reserve_bytes(out.backend, free, out.unified))
    return out


def _links(entry: LinkEntry, ends: set[str]) -> tuple[Link, ...]:
    for end in (entry.a, entry.b):
        if end not in ends:
            raise UserError(
                "link-end",
                f"the link {entry.a} - {entry.b}: {end!r} is neither a host nor a device",
                hint=", ".join(sorted(ends)),
            )
    if (entry.network is None) == (entry.bytes_per_s is None):
        raise UserError(
            "spec-field", f"the link {entry.a} - {entry.b} needs either a network or bytes_per_s and latency_s"
        )
    if entry.network is not None:
        link = network_link(entry.network, entry.a, entry.b)
    else:
        rate = _size(entry.bytes_per_s or 0, "bytes_per_s")
        if rate <= 0 or entry.latency_s is None or entry.latency_s < 0:
            raise UserError(
                "spec-field", f"the link {entry.a} - {entry.b} needs a positive bytes_per_s and a latency_s"
            )
        link = Link(entry.a, entry.b, rate, entry.latency_s, kind="user", source="cluster.yaml")
    return (link,) if entry.one_way else (link, replace(link, a=link.b, b=link.a))


def _size(value: Size, where: str) -> float:
    """Base units of `60 GB`, `60 GiB`, `6e10` or a number."""
    if isinstance(value, int | float) and not isinstance(value, bool):
        return float(value)
    match = _SIZE.fullmatch(str(value))
    if not match:
        raise UserError(
            "spec-field", f"{where}: cannot read the size {value!r}", hint="for example 60 GB, 60 GiB or 60000000000"
        )
    return float(match["number"]) * float(_UNITS.get(match["unit"] or "", 1))
