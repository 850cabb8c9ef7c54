"""Which GPUs of this machine run the code of an artifact. Imports cupy only where the vendor's driver is."""

from __future__ import annotations

import importlib
import importlib.util
import os
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from plait.errors import MissingDependencyError, UnsupportedError

Vendor = Literal["nvidia", "amd"]

#: Devices to emulate on the host although a GPU is here: their names, separated by commas, or `all`.
EMULATE = "PLAIT_EMULATE"

#: cudaErrorNoDevice, hipErrorNoDevice.
_NO_DEVICE = 100

#: What a vendor's kernel driver leaves in the file system.
_DRIVERS = {"nvidia": ("/proc/driver/nvidia/version", "/dev/nvidiactl"), "amd": ("/dev/kfd",)}

_CUPY = {
    "nvidia": "pip install 'plait[cuda12]' or 'plait[cuda13]', as the driver's CUDA version is",
    "amd": "pip install 'plait[rocm7]'",
}


@dataclass(frozen=True)
class Devices:
    """cupy, and the architectures of the devices that it sees, by ordinal."""

    cupy: Any
    archs: tuple[str, ...]

    def fitting(self, arch: str) -> tuple[int, ...]:
        """The ordinals of those that run code made for `arch`.

        Raises:
            UnsupportedError: `device-arch`: there is none.
        """
        ordinals = tuple(i for i, name in enumerate(self.archs) if runs(arch, name))
        if not ordinals:
            raise UnsupportedError(
                "device-arch",
                f"the code was made for {arch}, and no device here runs that",
                why="here are " + ", ".join(dict.fromkeys(self.archs)),
                hint=f"compile for what is here, or set {EMULATE}=all to emulate it on the host",
            )
        return ordinals


def devices(vendor: Vendor) -> Devices | None:
    """The vendor's devices; None where this machine has none.

    Raises:
        MissingDependencyError: `cupy-missing`: a driver is here and cupy is not, or it is the other vendor's.
        UnsupportedError: `device-driver`: the driver and cupy do not understand each other.
    """
    if not any(Path(file).exists() for file in _DRIVERS[vendor]):
        return None
    cupy = _cupy(vendor)
    archs = tuple(_archs(cupy))
    return Devices(cupy, archs) if archs else None


def emulation_asked(device: str) -> bool:
    """Whether the user wants `device` emulated whatever is here."""
    return bool({device, "all"} & set(os.environ.get(EMULATE, "").split(",")))


def runs(arch: str, device: str) -> bool:
    """Whether a binary made for `arch` runs on a device of another name: `gfx942`, or `sm_90` with its capability.

    A cubin runs on its own major version, from its own minor version on; from 9.0 on our compiler uses what only that
    very chip has. An hsaco runs on its own architecture.
    """
    made, here = (re.fullmatch(r"sm_(\d+)(\d)a?", name) for name in (arch, device))
    if made is None or here is None:
        return arch == device
    major, minor = int(made[1]), int(made[2])
    if major >= 9:
        return (major, minor) == (int(here[1]), int(here[2]))
    return major == int(here[1]) and minor <= int(here[2])


def _cupy(vendor: Vendor) -> Any:
    def missing(why: str) -> MissingDependencyError:
        return MissingDependencyError(
            "cupy-missing",
            f"a GPU of {vendor.upper() if vendor == 'amd' else 'NVIDIA'} is here, and what runs code on it is not",
            why=why,
            hint=f"{_CUPY[vendor]}; or set {EMULATE}=all to emulate it on the host",
        )

    if importlib.util.find_spec("cupy") is None:
        raise missing("cupy is not installed")
    cupy = importlib.import_module("cupy")
    if cupy.cuda.runtime.is_hip != (vendor == "amd"):
        raise missing("the cupy that is installed is the other vendor's")
    return cupy


def _archs(cupy: Any) -> Iterator[str]:
    """The architecture of every device that cupy sees."""
    runtime = cupy.cuda.runtime
    try:
        count = runtime.getDeviceCount()
    except runtime.CUDARuntimeError as err:
        if err.status == _NO_DEVICE:  # the driver shows none, or hides all
            return
        raise UnsupportedError(
            "device-driver",
            "the GPUs of this machine cannot be asked",
            why=str(err),
            hint=f"install the cupy that fits the driver (cuda12, cuda13, rocm7), or set {EMULATE}=all to emulate it "
            "on the host",
        ) from err
    for ordinal in range(count):
        properties = runtime.getDeviceProperties(ordinal)
        if runtime.is_hip:
            yield properties["gcnArchName"].decode().partition(":")[0]
        else:
            yield f"sm_{properties['major']}{properties['minor']}"
