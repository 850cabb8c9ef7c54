"""A stand-in for a GPU, so that what only a GPU runs is known to run up to it: cupy's double, whose launches go to
Triton's interpreter as the bytes that a driver would get."""

from __future__ import annotations

import sys
from typing import Any

import numpy as np

from plait.backends.kernels.gpu import cupy_device, here
from plait.backends.kernels.gpu.interpret import NUMPY_TYPES, run
from plait.backends.kernels.gpu.launch import Binary
from plait.backends.kernels.gpu.table import KERNELS
from tests.host.cupy_double import Double, Launch

_SCALARS = {"i32": np.int32, "f32": np.float32}


def fit(arch: str = "sm_90") -> None:
    """Put one GPU into this machine, for the rest of the process."""
    known: dict[str, Binary] = {}
    load = cupy_device.CupyDevice.load

    def remembering(self: Any, binary: Binary, folder: Any) -> Any:
        known[binary.file] = binary
        return load(self, binary, folder)

    double = Double((arch,), lambda launch: interpret(double, known[launch.file], launch))
    double.__spec__ = object()  # type: ignore[attr-defined]  # what is asked for to see whether cupy is installed
    cupy_device.CupyDevice.load = remembering  # type: ignore[method-assign]
    sys.modules["cupy"] = double  # type: ignore[assignment]
    here._DRIVERS["nvidia"] = (sys.executable,)


def interpret(double: Double, binary: Binary, launch: Launch) -> None:
    """A launch from its bytes alone. Every pointer sees all that is allocated behind it."""
    *arguments, scratch, profile = launch.arguments
    assert scratch == profile == bytes(8)
    arrays: dict[str, Any] = {}
    for (name, kind), raw in zip(binary.types.items(), arguments, strict=False):
        at, dtype = int.from_bytes(raw, "little"), NUMPY_TYPES[kind]
        there = double.find(at) if at else None
        arrays[name] = None if there is None else there[: len(there) // dtype.itemsize * dtype.itemsize].view(dtype)
    scalars = {
        name: np.frombuffer(raw, _SCALARS[kind])[0].item()
        for (name, kind), raw in zip(binary.scalars.items(), arguments[len(arrays) :], strict=True)
    }
    run(KERNELS[binary.kernel], binary.variant, arrays, scalars, launch.grid)
