"""Profiles: what `plait profile` measured of a device on one machine, and whether that is this machine.

A profile holds medians of repeats on grids, with the range that most repeats fell in. It is read strictly, and used for
devices of its name, backend and architecture only: one of another machine or of another PyTorch is refused where it was
asked for, and left aside with a note where it lies in the default place.
"""

from __future__ import annotations

import functools
import math
import os
import platform
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from importlib import metadata
from itertools import pairwise
from math import prod
from pathlib import Path
from typing import Literal

from plait.cost_models.host import core_count
from plait.errors import UserError
from plait.outputs import write_whole
from plait.spec import Device, digest, from_json, to_json

#: What is measured in every dtype; see `profiled.py`.
REQUIRED = ("linear", "logits", "decode", "prefill", "silu_mul")

#: The wheels that run what is measured, by backend.
_WHEELS = {"cpu": "torch", "cuda": "cupy", "rocm": "cupy", "xla": "jax"}


@dataclass(frozen=True)
class Machine:
    """Where a profile is good: `chip` as the system calls it, cores this process may use, and what runs there."""

    chip: str
    cores: int
    system: str
    software: str


@dataclass(frozen=True)
class Times:
    """Seconds on a rectangular grid.

    Attributes:
        axes: ascending values of each coordinate; what they are is said where they are looked up (`profiled.py`).
        seconds: medians, the last coordinate running fastest; low, high: what 80 % of the repeats lay between.
    """

    axes: tuple[tuple[float, ...], ...]
    seconds: tuple[float, ...]
    low: tuple[float, ...]
    high: tuple[float, ...]


@dataclass(frozen=True)
class Overheads:
    """What a step costs beside its ops.

    Attributes:
        slice_s: of each slice; sequence_s, token_s: more for each sequence and each new token (page tables, rotary
            tables).
        engine_s: of the pipeline once: scheduling, sampling, handing tokens on; engine_sequence_s: more for each
            sequence.
    """

    slice_s: float
    sequence_s: float
    token_s: float
    engine_s: float
    engine_sequence_s: float


@dataclass(frozen=True)
class Hop:
    """From one process to another of this machine, as the runtime sends frames."""

    latency_s: float
    bytes_per_s: float


@dataclass(frozen=True)
class Profile:
    """The file.

    Attributes:
        device, backend, arch: as `spec.Device` has them.
        threads: of the host that it was measured with.
        made: the day.
        quick: fewer points and repeats.
        tables: `op dtype` -> times; see `profiled.py`.
        copy_bytes_per_s: read and written, of host memory.
        shared, loopback: hops through shared memory and through the network interface of the host itself.
    """

    device: str
    backend: str
    arch: str
    machine: Machine
    threads: int
    made: str
    quick: bool
    tables: dict[str, Times]
    overheads: Overheads
    copy_bytes_per_s: float
    shared: Hop
    loopback: Hop
    schema: Literal[1] = 1

    @property
    def dtypes(self) -> tuple[str, ...]:
        return tuple(name.partition(" ")[2] for name in self.tables if name.startswith("linear "))


def default_folder() -> Path:
    """`$PLAIT_CACHE`, else `$XDG_CACHE_HOME/plait`, else `~/.cache/plait`; in it, `profiles`."""
    if own := os.environ.get("PLAIT_CACHE"):
        return Path(own) / "profiles"
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "plait" / "profiles"


def default_path(device: str) -> Path:
    return default_folder() / f"{device}.json"


def machine(backend: str, chip: str | None = None) -> Machine:
    """This one. `chip` is what a driver calls an accelerator; without it the CPU is meant."""
    wheel = _WHEELS.get(backend, "")
    return Machine(
        chip or cpu_model(),
        core_count(),
        f"{platform.system()} {platform.machine()}",
        f"{wheel} {_version(wheel)}".strip(),
    )


def cpu_model(cpuinfo: Path = Path("/proc/cpuinfo")) -> str:
    """The name, family, model and stepping: virtual machines call many CPUs the same."""
    try:
        text = cpuinfo.read_text(errors="replace")
    except OSError:
        return platform.processor() or platform.machine()
    found = [re.search(rf"^{key}\s*:\s*(.+)$", text, re.MULTILINE) for key in ("model name", "cpu family", "model")]
    return " ".join(match[1].strip() for match in found if match) or platform.machine()


def _version(wheel: str) -> str:
    names = list(metadata.packages_distributions().get(wheel, ())) if wheel == "cupy" else [wheel]
    for name in names:
        try:
            return metadata.version(name)
        except (metadata.PackageNotFoundError, ValueError):
            continue
    return ""


def read(path: Path) -> Profile:
    """Raises UserError: `profile-unreadable`, `profile-damaged` naming the table, or a field that is wrong."""
    try:
        text = path.read_text("utf-8")
    except (OSError, UnicodeDecodeError) as err:
        raise UserError(
            "profile-unreadable",
            f"cannot read the profile {path}",
            why=getattr(err, "strerror", None) or str(err),
            hint="plait profile measures one",
        ) from err
    found = from_json(Profile, text)
    for name, times in found.tables.items():
        if fault := _fault(times):
            raise UserError(
                "profile-damaged", f"{path}: the table {name!r} {fault}", hint="measure again: plait profile"
            )
    numbers = [*vars(found.overheads).values(), *vars(found.shared).values(), *vars(found.loopback).values()]
    if not all(math.isfinite(number) and number >= 0 for number in numbers) or not found.copy_bytes_per_s > 0:
        raise _damaged(f"{path}: a number is negative or none")
    if not found.dtypes:
        raise _damaged(f"{path}: no product was measured")
    for dtype in found.dtypes:
        if missing := [f"{name} {dtype}" for name in REQUIRED if f"{name} {dtype}" not in found.tables]:
            raise _damaged(f"{path} lacks the tables {', '.join(missing)}")
    return found


def write(profile: Profile, path: Path) -> None:
    """Write a profile so that it is never there in part. Raises UserError: `output-unwritable`."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
    except OSError as err:
        raise UserError("output-unwritable", f"cannot write {path}", why=err.strerror or str(err)) from err
    write_whole(path, to_json(profile, indent=1) + "\n")
    _read_once.cache_clear()


def _damaged(what: str) -> UserError:
    return UserError("profile-damaged", what, hint="measure again: plait profile")


def _fault(times: Times) -> str:
    """What is wrong with a table."""
    size = prod(len(axis) for axis in times.axes)
    if not times.axes or not size or any(len(values) != size for values in (times.seconds, times.low, times.high)):
        return "has other numbers of times than its axes say"
    if any(not 0 < a < b for axis in times.axes for a, b in pairwise(axis)) or any(
        not 0 < axis[0] < math.inf for axis in times.axes
    ):
        return "has an axis that does not ascend"
    rows = zip(times.low, times.seconds, times.high, strict=True)
    return "" if all(0 < low <= value <= high < math.inf for low, value, high in rows) else "has times out of order"


def foreign(profile: Profile, here: Machine | None = None) -> str:
    """Why a profile is not of this machine as it is now; empty where it is.

    Args:
        here: this machine; None for what there is. An accelerator's profile is held against its host alone: whoever
            plans need not be where the device is.
    """
    if here is None:
        if profile.backend != "cpu":
            return ""
        here = machine(profile.backend)
    was = profile.machine
    different = [
        f"{name} was {before or 'absent'} and is {now or 'absent'}"
        for name, before, now in (
            ("the chip", was.chip, here.chip),
            ("cores", was.cores, here.cores),
            ("the system", was.system, here.system),
            ("the software", was.software, here.software),
        )
        if before != now
    ]
    return ", ".join(different)


@dataclass(frozen=True)
class Chosen:
    """A profile and where it lies."""

    profile: Profile
    path: Path

    @property
    def said(self) -> str:
        return f"measured on {self.profile.made} by plait profile: {self.path} ({digest(self.profile)[7:15]})"


def given(path: Path) -> Chosen:
    """The profile a user names. Raises UserError: as `read`, and `profile-foreign`."""
    found = read(path)
    if why := foreign(found):
        raise UserError(
            "profile-foreign",
            f"{path} was measured on another machine, or under other software",
            why=why,
            hint="measure this one: plait profile",
        )
    return Chosen(found, path.absolute())


def default() -> tuple[tuple[Chosen, ...], tuple[str, ...]]:
    """The profiles in the default place that hold here, and notes on those that do not."""
    chosen, notes = [], []
    for path in sorted(default_folder().glob("*.json")):
        try:
            chosen.append(given(path))
        except UserError as err:
            notes.append(f"the profile {path} is left aside: {err.why or err.what}")
    return tuple(chosen), tuple(notes)


def applied(device: Device, chosen: Iterable[Chosen]) -> Device:
    """The device with the numbers of the first profile that is of its kind; as it was where none is.

    Several slices on one host's CPU have all its cores each: the runtime has one step in flight there.
    """
    from plait.cost_models.profiled import peak_flops_per_s, stream_bytes_per_s

    for one in chosen:
        found = one.profile
        if (found.device, found.backend, found.arch) == (device.name, device.backend, device.arch):
            peaks = {dtype: peak_flops_per_s(found, dtype) for dtype in found.dtypes}
            return replace(
                device,
                peak_flops_per_s={**device.peak_flops_per_s, **peaks},
                achieved={**device.achieved, **dict.fromkeys(peaks, 1.0)},
                bandwidth_bytes_per_s=stream_bytes_per_s(found),
                bandwidth_achieved=1.0,
                step_overhead_s=found.overheads.slice_s,
                peer_bytes_per_s=found.shared.bytes_per_s if found.backend == "cpu" else device.peer_bytes_per_s,
                confidence="measured",
                sources=(*device.sources, one.said),
                profile=str(one.path),
            )
    return device


def of(device: Device) -> Profile | None:
    """The profile a device was given; None for one without.

    Raises:
        UserError: as `read`: a plan may have come from another machine.
    """
    return None if device.profile is None else _read_once(device.profile)


@functools.lru_cache(maxsize=16)
def _read_once(path: str) -> Profile:
    return read(Path(path))


def hops(devices: Sequence[Device]) -> Hop | None:
    """What frames between slices on this host take, where its CPU was measured."""
    for device in devices:
        if device.backend == "cpu" and (found := of(device)) is not None:
            return found.shared
    return None
