"""A GPU through cupy, of either vendor: modules from the artifact's files, a memory pool, one stream, graphs.

Only documented parts of cupy are used (`RawModule`, `RawKernel`, `MemoryPool`, `Stream`, pinned memory).
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from plait.backends.kernels.gpu.device import Call, Region
from plait.backends.kernels.gpu.launch import Binary
from plait.errors import FitError, UnsupportedError

#: Dynamic shared memory that every NVIDIA kernel may have; for more the function has to be told.
_FREE_SHARED_BYTES = 48 * 1024

#: How scalars are handed over. cupy would pass a Python int as 64 bits, and None as no argument at all.
_SCALARS: dict[str, type[Any]] = {"i32": np.int32, "f32": np.float32}
_POINTER = np.uint64


class Loaded(NamedTuple):
    """A kernel with what every launch of it has in common."""

    kernel: Any
    block: tuple[int, int, int]
    shared_bytes: int
    scalars: tuple[type[Any], ...]


class CupyDevice:
    """`plait.backends.kernels.gpu.device.Device` on a GPU. One process may have several; one thread uses each.

    Args:
        cupy: the module. It is handed in, so that nothing imports it where there is no GPU.
    """

    def __init__(self, cupy: Any, ordinal: int = 0) -> None:
        self._cupy = cupy
        #: cupy's current device is the thread's, and another of ours may have changed it.
        self._use = cupy.cuda.Device(ordinal).use
        self._use()
        #: cupy captures no streams on ROCm.
        self.graphs = not cupy.cuda.runtime.is_hip
        self._pool = cupy.cuda.MemoryPool()
        self.stream = cupy.cuda.Stream(non_blocking=True)

    def allocate(self, nbytes: int) -> Any:
        self._use()
        try:
            pointer = self._pool.malloc(nbytes)
        except self._cupy.cuda.memory.OutOfMemoryError as error:
            free, total = self._cupy.cuda.runtime.memGetInfo()
            raise FitError(
                "the slice does not fit the device's free memory",
                why=f"{nbytes} bytes were asked for, {free} of {total} are free",
                hint="close what else uses the device, or compile with less --context or --concurrency",
            ) from error
        return _Memory(pointer, nbytes)

    def host(self, nbytes: int) -> NDArray[Any]:
        if not nbytes:
            return np.empty(0, np.uint8)
        return np.frombuffer(self._cupy.cuda.alloc_pinned_memory(nbytes), np.uint8, nbytes)

    def write(self, memory: _Memory, offset: int, array: NDArray[Any]) -> None:
        if array.nbytes:
            self._use()
            (memory.pointer + offset).copy_from_host_async(_address(array), array.nbytes, self.stream)
            self.stream.synchronize()

    def send(self, memory: _Memory, array: NDArray[Any]) -> None:
        if array.nbytes:
            self._use()
            memory.pointer.copy_from_host_async(_address(array), array.nbytes, self.stream)

    def read(self, memory: _Memory, offset: int, array: NDArray[Any]) -> None:
        self._use()
        if array.nbytes:
            (memory.pointer + offset).copy_to_host_async(_address(array), array.nbytes, self.stream)
        self.stream.synchronize()

    def load(self, binary: Binary, folder: Path) -> Loaded:
        self._use()
        try:
            kernel = self._cupy.RawModule(path=str(folder / binary.file)).get_function(binary.symbol)
            kernel.compile()  # loads it now: a capture must not
        except self._cupy.cuda.driver.CUDADriverError as error:
            raise UnsupportedError(
                "device-driver",
                f"this machine's driver does not load {binary.file}",
                why=str(error),
                hint="update the driver; code for NVIDIA's Blackwell and later wants one of CUDA 13: 580 or newer",
            ) from error
        if binary.shared_bytes > _FREE_SHARED_BYTES and not self._cupy.cuda.runtime.is_hip:
            kernel.max_dynamic_shared_size_bytes = binary.shared_bytes
        scalars = tuple(_SCALARS[kind] for kind in binary.scalars.values())
        return Loaded(kernel, (binary.threads, 1, 1), binary.shared_bytes, scalars)

    def bind(
        self,
        function: Loaded,
        grid: tuple[int, int, int],
        regions: Sequence[Region | None],
        scalars: Sequence[int | float],
    ) -> Call:
        pointers = [_POINTER(0 if at is None else at.memory.pointer.ptr + at.offset) for at in regions]
        values = [kind(value) for kind, value in zip(function.scalars, scalars, strict=True)]
        # Triton's scratch memory, for all programs and for profiling: none of our kernels asks for any.
        arguments = (*pointers, *values, _POINTER(0), _POINTER(0))
        return partial(function.kernel, grid, function.block, arguments, shared_mem=function.shared_bytes)

    def run(self, calls: Sequence[Call]) -> None:
        self._use()
        with self.stream:
            for call in calls:
                call()

    def capture(self, calls: Sequence[Call]) -> Call:
        self._use()
        with self.stream:
            self.stream.begin_capture()
            for call in calls:
                call()
            graph = self.stream.end_capture()
        return partial(graph.launch, self.stream)

    def close(self) -> None:
        self._use()
        self.stream.synchronize()
        self._pool.free_all_blocks()

    def array(self, region: Region, dtype: Any, shape: tuple[int, ...]) -> Any:
        """A region as a `cupy.ndarray`, no copy: `torch.from_dlpack` takes it."""
        pointer = region.memory.pointer + region.offset
        return self._cupy.ndarray(shape, dtype, memptr=pointer)


class _Memory(NamedTuple):
    pointer: Any
    nbytes: int


def _address(array: NDArray[Any]) -> int:
    return int(array.__array_interface__["data"][0])
