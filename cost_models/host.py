"""This host, as the operating system tells it: cores and memory."""

from __future__ import annotations

import os
from pathlib import Path

_CGROUP = Path("/sys/fs/cgroup")
_GRAIN = 2**30


def core_count() -> int:
    """Cores this process may use."""
    affinity = getattr(os, "sched_getaffinity", None)
    return len(affinity(0)) if affinity else os.cpu_count() or 1


def memory_bytes() -> tuple[int, int]:
    """(all, available) bytes, the smaller of the machine's and the control group's.

    Available memory is rounded down to whole GiB (MiB below one), so that the same plan comes out twice in a row.
    """
    total, available = _machine()
    limit, used = _number(_CGROUP / "memory.max"), _number(_CGROUP / "memory.current")
    if limit is not None and limit < total:
        total, available = limit, min(available, limit - (used or 0))
    grain = _GRAIN if available >= _GRAIN else 2**20
    return total, max(0, available // grain * grain)


def _machine() -> tuple[int, int]:
    try:
        lines = dict(line.split(":") for line in Path("/proc/meminfo").read_text().splitlines())
        total, available = (int(lines[key].split()[0]) * 1024 for key in ("MemTotal", "MemAvailable"))
    except (OSError, KeyError, ValueError):
        page = os.sysconf("SC_PAGE_SIZE")
        total = available = os.sysconf("SC_PHYS_PAGES") * page
    return total, available


def _number(file: Path) -> int | None:
    """A control group's number; None where there is none or it is `max`."""
    try:
        return int(file.read_text())
    except (OSError, ValueError):
        return None
