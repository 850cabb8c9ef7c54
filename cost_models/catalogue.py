"""The device catalogue: names to chips, targets to the devices of a cluster."""

from __future__ import annotations

import functools
import re
from collections import Counter
from collections.abc import Collection, Iterable, Sequence
from dataclasses import replace

from plait.cost_models import host
from plait.cost_models.entries import GB, GIB, UNIT_BYTES, Entry, defaults, entries, local_paths, networks
from plait.cost_models.figures import checked
from plait.cost_models.profiles import Chosen, applied, hops
from plait.errors import UsageError, UserError, did_you_mean
from plait.spec import Cluster, Device, Link, Target

#: The target that is this host, and the backend that compiles for nothing: it plans and schedules any chip.
HOST_CPU, NULL = "cpu", "null"

#: As `spec.target` writes names, and with a digit in front: somebody may call a device 3090.
_NAME = re.compile(r"[A-Za-z0-9][\w.-]*")

#: Device -> host -> device, per copy, where no chip states its own link: PCIe 4.0 x16.
_PCIE_GB_PER_S = 31.0


@functools.cache
def devices() -> tuple[Entry, ...]:
    """Every chip of the catalogue. `cpu`, this host, is not among them: its numbers are read when it is asked for.

    Raises:
        UserError: `catalogue-figures`, where those of a chip cannot be right (`figures.py`).
    """
    return tuple(map(checked, entries()))


def lookup(name: str) -> Entry:
    """The chip that a name, a short name or an architecture means. Case and `_` for `-` do not matter.

    Raises:
        UsageError: `target-unknown`, with the names that come close.
    """
    known = _index()
    entry = known.get(_plain(name))
    if entry is None:
        raise UsageError(
            "target-unknown",
            f"no device is called {name!r}",
            why="it is not in the catalogue, and a guess would have made-up numbers",
            hint=did_you_mean(_plain(name), [*known, HOST_CPU])
            or "`plait devices` lists them; cluster.yaml can describe others",
        )
    return entry


def resolve(target: Target, *, backends: Collection[str] = ()) -> tuple[Device, ...]:
    """The devices of one target, on a host of their own unless it names one. See `cluster_for`."""
    return cluster_for([target], backends=backends).devices


def cluster_for(
    targets: Sequence[Target], *, backends: Collection[str] = (), profiles: Iterable[Chosen] = ()
) -> Cluster:
    """The devices of all targets, with the links the catalogue knows.

    Devices of one target share a host; targets that name no host have one each. `cpu` is this host: several of it
    share its cores and memory evenly. A chip that shows up as several logical devices brings them all.

    Args:
        backends: names of out-of-tree backends, which may compile for any chip.
        profiles: what was measured, which devices of its kind take instead of the catalogue's numbers.

    Raises:
        UsageError: unknown name; a backend that does not compile for the chip.
        UserError: a chip that is only announced, or whose numbers are not published; no memory.
    """
    host_share = sum(target.count for target in targets if _plain(target.name) == HOST_CPU)
    found: list[Device] = []
    counts: Counter[str] = Counter()
    for number, target in enumerate(targets):
        for device in _devices_of(target, host_share, backends):
            host_name = target.host or ("localhost" if _plain(target.name) == HOST_CPU else f"host{number}")
            named = replace(device, id=f"{device.name}.{counts[device.name]}", host=host_name)
            found.append(applied(named, profiles))
            counts[device.name] += 1
    return with_links(tuple(found))


def with_links(found: tuple[Device, ...], links: tuple[Link, ...] = (), default: Link | None = None) -> Cluster:
    """A cluster with the catalogue's assumptions for the paths that `links` does not name."""
    hop = hops(found)
    if hop is not None:
        host = next(device.host for device in found if device.backend == HOST_CPU and device.profile)
        links = (*links, Link(host, host, hop.bytes_per_s, hop.latency_s, kind="shared memory", source="measured"))
    return Cluster(found, links, default_link=default or network_link(networks().default), local_link=_staged(found))


def network_link(name: str, a: str = "*", b: str = "*") -> Link:
    """A network of `links/networks.yaml` by name. Raises UserError `link-unknown`."""
    known = {network.name: network for network in networks().networks}
    if name not in known:
        raise UserError(
            "link-unknown", f"no network is called {name!r}", hint=did_you_mean(name, known) or ", ".join(known)
        )
    network = known[name]
    return Link(a, b, network.gb_per_s * GB, network.latency_s, kind=name, source=network.source)


def check_device(device: Device) -> Device:
    """`device`, if it can be planned on.

    Raises:
        UserError: `device-name`, `device-numbers` (one is missing or not positive), `device-memory` (nothing free, or
            too much).
    """
    if not _NAME.fullmatch(device.name):
        raise UserError(
            "device-name",
            f"{device.name!r} cannot be the name of a device",
            why="commands and folders of an artifact are called after it",
            hint="use letters, digits and . _ -, a letter or digit first",
        )
    numbers = {
        "memory_bytes": device.memory_bytes,
        "bandwidth_bytes_per_s": device.bandwidth_bytes_per_s,
        "bandwidth_achieved": device.bandwidth_achieved,
        "peak_flops_per_s": min(device.peak_flops_per_s.values(), default=0),
        "achieved": min(device.achieved.values(), default=1),
    }
    missing = [name for name, value in numbers.items() if not value > 0]
    free = device.memory_bytes if device.free_bytes is None else device.free_bytes
    if device.memory_bytes > 0 and free <= 0:
        raise UserError(
            "device-memory", f"{device.id} has no free memory", why=f"{free} bytes free of {device.memory_bytes}"
        )
    if missing:
        raise UserError(
            "device-numbers",
            f"{device.id} cannot be planned on: {', '.join(missing)} is missing or not positive",
            why="a device with unknown numbers is not a device with none",
            hint="give the numbers in cluster.yaml",
        )
    if free > device.memory_bytes:
        raise UserError(
            "device-memory",
            f"{device.id} has {free} bytes free of {device.memory_bytes}",
            why="free memory is part of all",
        )
    if device.reserve_bytes < 0 or device.reserve_bytes >= free:
        raise UserError(
            "device-memory",
            f"{device.id} has no memory left for a slice",
            why=f"{free} bytes are free and driver, runtime and fragmentation take {device.reserve_bytes}",
        )
    return device


def reserve_bytes(backend: str, available: int, unified: bool) -> int:
    """What is never given to slices, of `available` bytes (assumed, `defaults.yaml`)."""
    known = defaults().of_backend(backend)
    shared = (1 - defaults().unified_usable) * available if unified else 0.0
    return known.reserve_bytes + int(max(known.reserve_fraction * available, shared))


def device_of(entry: Entry, backend: str | None = None) -> Device:
    """One logical device of a chip, `id` and `host` still to be given.

    Raises:
        UserError: `device-announced`, `device-numbers`.
    """
    if entry.status == "announced":
        raise UserError(
            "device-announced",
            f"{entry.title} is announced only; there is nothing to plan for",
            why=entry.note or "",
            hint="describe it in cluster.yaml with numbers of your own",
        )
    missing = [
        name
        for name, value in (("memory bandwidth", entry.memory.bandwidth_gb_per_s), ("peaks", entry.peak_tflops or None))
        if value is None
    ]
    if missing:
        raise UserError(
            "device-numbers",
            f"no {' and no '.join(missing)} is published for {entry.title}",
            hint="describe the device in cluster.yaml with numbers of your own",
        )
    assert entry.memory.bandwidth_gb_per_s is not None
    parts = entry.logical.count if entry.logical else 1
    memory = int(entry.memory.capacity * UNIT_BYTES[entry.memory.unit]) // parts
    if entry.logical and entry.logical.capacity_gib:
        memory = int(entry.logical.capacity_gib * GIB)
    known = defaults()
    return Device(
        id="",
        name=entry.label,
        backend=backend or entry.backend,
        arch=entry.arch,
        host="",
        memory_bytes=memory,
        bandwidth_bytes_per_s=entry.memory.bandwidth_gb_per_s * GB / parts,
        peak_flops_per_s={dtype: peak / parts for dtype, peak in _peaks(entry).items()},
        achieved=_achieved(entry),
        bandwidth_achieved=known.bandwidth_achieved,
        reserve_bytes=reserve_bytes(entry.backend, memory, entry.memory.unified),
        unified=entry.memory.unified,
        step_overhead_s=known.of_backend(entry.backend).step_overhead_s,
        peer_bytes_per_s=entry.peer.gb_per_s * GB if entry.peer and entry.peer.gb_per_s else None,
        confidence=entry.confidence,
        sources=(*entry.sources, _achieved_source(entry)),
    )


def _peaks(entry: Entry) -> dict[str, float]:
    """FLOP/s of the whole chip by dtype; an emulated dtype takes several passes of another."""
    peaks = dict(entry.peak_tflops)
    for dtype, (base, passes) in entry.emulated.items():
        peaks[dtype] = peaks[base] / passes
    return {dtype: tflops * 1e12 for dtype, tflops in peaks.items()}


def _achieved(entry: Entry) -> dict[str, float]:
    """Fraction of the peak a large matmul reaches: measured, else that of a dtype with the same peak, else assumed."""
    peaks = entry.peak_tflops
    measured = {dtype: value / peaks[dtype] for dtype, value in entry.measured_matmul_tflops.items()}
    by_peak = {peaks[dtype]: fraction for dtype, fraction in measured.items()}
    return {
        dtype: measured.get(dtype, by_peak.get(peaks.get(dtype, 0.0), defaults().achieved)) for dtype in _peaks(entry)
    }


def _achieved_source(entry: Entry) -> str:
    measured = ", ".join(entry.measured_matmul_tflops)
    return f"achieved: {measured} measured, the rest assumed" if measured else "achieved: assumed"


def host_cpu(backend: str = HOST_CPU, share: int = 1) -> Device:
    """This host as a device, or the `share`-th part of it. Its rates are assumed, its cores and memory read."""
    cores, (memory, free) = host.core_count(), host.memory_bytes()
    known, cpu = defaults().of_backend(HOST_CPU), defaults().host_cpu
    return Device(
        id="",
        name=HOST_CPU,
        backend=backend,
        arch=HOST_CPU,
        host="localhost",
        memory_bytes=memory // share,
        bandwidth_bytes_per_s=cpu.bandwidth_gb_per_s_per_core * cores * GB / share,
        peak_flops_per_s={dtype: rate * 1e9 * cores / share for dtype, rate in cpu.gflops_per_core.items()},
        achieved=dict.fromkeys(cpu.gflops_per_core, defaults().achieved),
        bandwidth_achieved=defaults().bandwidth_achieved,
        reserve_bytes=reserve_bytes(HOST_CPU, free // share, unified=False),
        free_bytes=free // share,
        step_overhead_s=known.step_overhead_s,
        peer_bytes_per_s=cpu.peer_gb_per_s * GB,
        confidence="assumed",
        sources=(f"{cores} cores and memory read from this host; rates assumed",),
    )


def _devices_of(target: Target, host_share: int, backends: Collection[str]) -> tuple[Device, ...]:
    """The logical devices of one target, not yet named."""
    if _plain(target.name) == HOST_CPU:
        backend = _backend(target, HOST_CPU, "this host", backends)
        return (check_device(replace(host_cpu(backend, host_share), id=HOST_CPU)),) * target.count
    entry = lookup(target.name)
    backend = _backend(target, entry.backend, entry.title, backends)
    count = target.count * (entry.logical.count if entry.logical else 1)
    return (check_device(replace(device_of(entry, backend), id=entry.label)),) * count


def _backend(target: Target, own: str, title: str, more: Collection[str]) -> str:
    """The backend a target names, if it may compile for the chip."""
    if target.backend in (None, own):
        return own
    if target.backend == NULL or target.backend in more:
        return target.backend or own
    known = {entry.backend for entry in devices()} | {HOST_CPU, NULL, *more}
    near = "" if target.backend in known else did_you_mean(target.backend or "", known)
    raise UsageError(
        "target-backend",
        f"{str(target)!r}: the backend {target.backend!r} does not make code for {title}",
        why=f"{title} is a {own} device",
        hint=near or f"write {own}:{target.name}, or only {target.name}",
    )


def _staged(found: tuple[Device, ...]) -> Link:
    """The path between kinds inside a host: as fast as the slowest chip's way to host memory allows."""
    path = local_paths().staged
    rates = [entry.host.gb_per_s for device in found if (entry := _index().get(_plain(device.name))) and entry.host]
    rate = min(rates, default=_PCIE_GB_PER_S) * path.achieved / path.copies
    return Link("*", "*", rate * GB, path.latency_s, kind="host-staged", source=path.source)


@functools.cache
def _index() -> dict[str, Entry]:
    out: dict[str, Entry] = {}
    for entry in devices():
        for name in entry.names:
            assert _plain(name) not in out, f"two chips are called {name}"
            out[_plain(name)] = entry
    return out


def _plain(name: str) -> str:
    return name.lower().replace("_", "-")
