"""A device for conformance: the launch plan as it is, its kernels in Triton's interpreter, on memory of the host."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from plait.backends.kernels.gpu.device import Call, Region
from plait.backends.kernels.gpu.interpret import NUMPY_TYPES, run
from plait.backends.kernels.gpu.launch import ALIGNMENT, Binary
from plait.backends.kernels.gpu.table import KERNELS

Bytes = NDArray[np.uint8]

#: What new memory holds: as fp32, fp16, bf16 and fp8 it is NaN, so whatever is read before it is written shows.
RUBBISH = 0xFF


class InterpretDevice:
    """`plait.backends.kernels.gpu.device.Device` on the host. A kernel that leaves its buffers is an error."""

    graphs = False

    def allocate(self, nbytes: int) -> Bytes:
        return aligned_bytes(nbytes)

    def host(self, nbytes: int) -> Bytes:
        return aligned_bytes(nbytes)

    def write(self, memory: Bytes, offset: int, array: NDArray[Any]) -> None:
        memory[offset : offset + array.nbytes] = array

    def send(self, memory: Bytes, array: NDArray[Any]) -> None:
        self.write(memory, 0, array)

    def read(self, memory: Bytes, offset: int, array: NDArray[Any]) -> None:
        array[:] = memory[offset : offset + array.nbytes]

    def load(self, binary: Binary, folder: Path) -> Binary:
        return binary

    def bind(
        self,
        function: Binary,
        grid: tuple[int, int, int],
        regions: Sequence[Region | None],
        scalars: Sequence[int | float],
    ) -> Call:
        arrays = {
            name: None if region is None else typed(region, kind)
            for (name, kind), region in zip(function.types.items(), regions, strict=True)
        }
        values = dict(zip(function.scalars, scalars, strict=True))
        return lambda: run(KERNELS[function.kernel], function.variant, arrays, values, grid)

    def run(self, calls: Sequence[Call]) -> None:
        for call in calls:
            call()

    def capture(self, calls: Sequence[Call]) -> Call:
        raise NotImplementedError("the interpreter records nothing")

    def close(self) -> None:
        pass


def typed(region: Region, kind: str) -> NDArray[Any]:
    """The whole elements of a region."""
    dtype = NUMPY_TYPES[kind]
    end = region.offset + region.nbytes // dtype.itemsize * dtype.itemsize
    array: NDArray[Any] = region.memory[region.offset : end].view(dtype)
    return array


def aligned_bytes(nbytes: int) -> Bytes:
    """Memory that starts where a device's would."""
    raw = np.full(nbytes + ALIGNMENT, RUBBISH, np.uint8)
    start = -raw.__array_interface__["data"][0] % ALIGNMENT
    return raw[start : start + nbytes]
