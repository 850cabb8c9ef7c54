"""Accelerators of this host as the operating system lists them. Loads no driver, imports no framework."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from plait.cost_models.entries import Entry

_GOOGLE_PCI_VENDOR = "0x1ae0"


@dataclass(frozen=True)
class Found:
    """One accelerator. `name` is what the driver calls it; `arch` is known where the driver says it (gfx942)."""

    backend: str
    name: str
    arch: str | None = None


def accelerators(root: Path = Path("/")) -> tuple[Found, ...]:
    """Everything under `root`/proc, /sys and /dev that is an accelerator. Unreadable files count as absent."""
    return (*_nvidia(root), *_amd(root), *_google(root))


def matches(entry: Entry, found: Found, entries: Iterable[Entry]) -> bool:
    """Whether a found accelerator is this chip of the catalogue.

    By architecture where the driver says it (chips that share one cannot be told apart), otherwise by the longest of
    all names of the catalogue that the driver's name contains: `NVIDIA A100-SXM4-80GB` is an a100, not an a10.
    """
    if found.backend != entry.backend:
        return False
    if found.arch is not None:
        return found.arch == entry.arch
    named = {name: chip for chip in entries if chip.backend == found.backend for name in chip.names}
    inside = [name for name in named if _plain(name) in _plain(found.name)]
    return bool(inside) and named[max(inside, key=lambda name: len(_plain(name)))] is entry


def _nvidia(root: Path) -> Iterable[Found]:
    for file in sorted(root.glob("proc/driver/nvidia/gpus/*/information")):
        model = re.search(r"^Model:\s*(.+?)\s*$", _read(file), re.MULTILINE)
        if model:
            yield Found("cuda", model[1])


def _amd(root: Path) -> Iterable[Found]:
    """The kernel's compute driver lists CPUs too; those have version 0."""
    for file in sorted(root.glob("sys/class/kfd/kfd/topology/nodes/*/properties")):
        version = re.search(r"^gfx_target_version (\d+)$", _read(file), re.MULTILINE)
        if version and int(version[1]):
            major, minor, step = int(version[1]) // 10000, int(version[1]) // 100 % 100, int(version[1]) % 100
            arch = f"gfx{major}{minor:x}{step:x}"
            yield Found("rocm", arch, arch)


def _google(root: Path) -> Iterable[Found]:
    for file in sorted(root.glob("sys/bus/pci/devices/*/vendor")):
        # 0x12 is the class of processing accelerators; a Google network card has the same vendor.
        if _read(file).strip() == _GOOGLE_PCI_VENDOR and _read(file.with_name("class")).startswith("0x12"):
            yield Found("xla", f"TPU ({_read(file.with_name('device')).strip()})")


def _read(file: Path) -> str:
    try:
        return file.read_text(errors="replace")
    except OSError:
        return ""


def _plain(name: str) -> str:
    return re.sub(r"[^a-z0-9]", "", name.lower())
