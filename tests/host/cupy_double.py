"""A stand-in for cupy on a machine without a GPU: it records what it is asked, and can run the launches elsewhere.

It has what `plait.backends.kernels.gpu.cupy_device` and `here` use, with cupy's own rules: a launch takes NumPy scalars
of exactly the size of the kernel's arguments; an empty grid would start a block; nothing waits for another stream;
memory whose pointer is gone is somebody else's. `test_gpu_cupy.py` compares it with the cupy that is installed.
Imports neither torch nor Triton.
"""

from __future__ import annotations

import ctypes
import weakref
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np

ALIGNMENT = 512
"""Of what cupy's pools hand out."""

STATIC_LIMIT = 48 * 1024


class OutOfMemoryError(MemoryError):
    pass


class CUDARuntimeError(RuntimeError):
    def __init__(self, message: str, status: int = 100) -> None:
        super().__init__(message)
        self.status = status


class CUDADriverError(RuntimeError):
    pass


@dataclass(frozen=True)
class Launch:
    """What reached the driver."""

    file: str
    symbol: str
    grid: tuple[int, int, int]
    block: tuple[int, int, int]
    shared_bytes: int
    arguments: tuple[bytes, ...]


class Allocation:
    """Bytes of the device. Once nobody holds a pointer into it, it is gone."""

    ordinal = 0

    def __init__(self, nbytes: int) -> None:
        raw = np.full(nbytes + ALIGNMENT, 0xFF, np.uint8)
        start = -raw.__array_interface__["data"][0] % ALIGNMENT
        self.bytes = raw[start : start + nbytes]
        self.address = int(self.bytes.__array_interface__["data"][0])


@dataclass
class Log:
    """Everything that happened, in order."""

    launches: list[Launch] = field(default_factory=list)
    modules: list[str] = field(default_factory=list)
    allocations: list[int] = field(default_factory=list)
    copies: list[tuple[str, int]] = field(default_factory=list)
    captures: list[int] = field(default_factory=list)
    replays: int = 0


class Double:
    """The module `cupy`.

    Args:
        archs: `sm_90` or `gfx942`, one per device.
        execute: runs a launch; the arguments' addresses are addresses of this process, found with `find`.
        capacity_bytes: of the device.
    """

    def __init__(
        self,
        archs: tuple[str, ...] = ("sm_90",),
        execute: Callable[[Launch], None] | None = None,
        capacity_bytes: int = 1 << 40,
    ) -> None:
        self.log, self._execute, self._archs, self._capacity = Log(), execute, archs, capacity_bytes
        self.alive: weakref.WeakSet[Allocation] = weakref.WeakSet()
        self.stream: StreamDouble | None = None
        hip = archs[:1] != () and archs[0].startswith("gfx")
        self.RawModule = lambda **options: RawModuleDouble(self, **options)
        self.ndarray = lambda shape, dtype, memptr: SimpleNamespace(shape=shape, dtype=dtype, memptr=memptr)
        self.cuda = SimpleNamespace(
            Device=lambda ordinal: SimpleNamespace(use=lambda: self._use(ordinal)),
            MemoryPool=lambda: MemoryPoolDouble(self),
            Stream=lambda **options: StreamDouble(self, **options),
            Event=lambda: EventDouble(self),
            get_elapsed_time=lambda start, end: end.milliseconds - start.milliseconds,
            alloc_pinned_memory=lambda size: Allocation(size).bytes,
            memory=SimpleNamespace(OutOfMemoryError=OutOfMemoryError),
            driver=SimpleNamespace(CUDADriverError=CUDADriverError),
            runtime=SimpleNamespace(
                is_hip=hip,
                CUDARuntimeError=CUDARuntimeError,
                getDeviceCount=self._count,
                getDeviceProperties=self._properties,
                memGetInfo=lambda: (self._capacity - self.held, self._capacity),
            ),
        )
        self.ordinal = 0
        #: Of the device: what its events tell. Whoever has time pass moves it.
        self.milliseconds = 0.0

    @property
    def held(self) -> int:
        return sum(allocation.bytes.nbytes for allocation in self.alive)

    def find(self, address: int) -> np.ndarray[Any, Any]:
        """The bytes from an address to the end of its allocation. AssertionError where nobody holds it any more."""
        for allocation in self.alive:
            offset = address - allocation.address
            if 0 <= offset <= allocation.bytes.nbytes:
                return allocation.bytes[offset:]
        raise AssertionError(f"{address:#x} is in no memory that is alive")

    def reach(self, launch: Launch) -> None:
        """What a kernel does on the device."""
        self.log.launches.append(launch)
        if self._execute is not None:
            self._execute(launch)

    def _count(self) -> int:
        if not self._archs:
            raise CUDARuntimeError("cudaErrorNoDevice: no CUDA-capable device is detected")
        return len(self._archs)

    def _properties(self, ordinal: int) -> dict[str, Any]:
        name = self._archs[ordinal]
        if name.startswith("gfx"):
            return {"name": b"AMD", "gcnArchName": f"{name}:sramecc+:xnack-".encode(), "major": 9, "minor": 4}
        return {"name": b"NVIDIA", "major": int(name[3:-1]), "minor": int(name[-1])}

    def _use(self, ordinal: int) -> None:
        self.ordinal = ordinal


class MemoryPointerDouble:
    def __init__(self, double: Double, allocation: Allocation, offset: int = 0) -> None:
        self._double, self._allocation, self._offset = double, allocation, offset

    @property
    def ptr(self) -> int:
        return self._allocation.address + self._offset

    def __add__(self, offset: int) -> MemoryPointerDouble:
        return MemoryPointerDouble(self._double, self._allocation, self._offset + offset)

    def copy_from_host_async(self, mem: int, size: int, stream: StreamDouble) -> None:
        ctypes.memmove(self._checked("to", size, stream), mem, size)

    def copy_to_host_async(self, mem: int, size: int, stream: StreamDouble) -> None:
        ctypes.memmove(mem, self._checked("from", size, stream), size)

    def memset_async(self, value: int, size: int, stream: StreamDouble) -> None:
        ctypes.memset(self._checked("set", size, stream), value, size)

    def _checked(self, way: str, size: int, stream: StreamDouble) -> int:
        assert isinstance(stream, StreamDouble), "the default stream would not wait for ours"
        assert stream.capturing is None, "no copy goes into a graph here"
        assert self._offset + size <= self._allocation.bytes.nbytes, "the copy leaves its memory"
        self._double.log.copies.append((way, size))
        return self.ptr


class MemoryPoolDouble:
    def __init__(self, double: Double) -> None:
        self._double = double

    def malloc(self, size: int) -> MemoryPointerDouble:
        if self._double.held + size > self._double._capacity:
            raise OutOfMemoryError(f"Out of memory allocating {size:,} bytes")
        allocation = Allocation(size)
        allocation.ordinal = self._double.ordinal
        self._double.alive.add(allocation)
        self._double.log.allocations.append(size)
        return MemoryPointerDouble(self._double, allocation)

    def free_all_blocks(self) -> None:
        pass


class StreamDouble:
    def __init__(self, double: Double, non_blocking: bool = False) -> None:
        assert non_blocking, "a blocking stream waits for the default one"
        self._double, self.ordinal = double, double.ordinal
        self.capturing: list[Callable[[], None]] | None = None

    def __enter__(self) -> StreamDouble:
        assert self.ordinal == self._double.ordinal, "the stream is another device's than the current one"
        self._double.stream = self
        return self

    def __exit__(self, *error: object) -> None:
        self._double.stream = None

    def synchronize(self) -> None:
        assert self.capturing is None, "a capture cannot wait"

    def begin_capture(self) -> None:
        assert not self._double.cuda.runtime.is_hip, "not supported on HIP"
        assert self.capturing is None
        self.capturing = []

    def end_capture(self) -> GraphDouble:
        assert self.capturing is not None
        recorded, self.capturing = self.capturing, None
        self._double.log.captures.append(len(recorded))
        return GraphDouble(self._double, recorded)


class EventDouble:
    def __init__(self, double: Double) -> None:
        self._double = double

    def record(self, stream: StreamDouble) -> None:
        assert isinstance(stream, StreamDouble), "the default stream would not wait for ours"
        self.milliseconds = self._double.milliseconds


class GraphDouble:
    def __init__(self, double: Double, recorded: list[Callable[[], None]]) -> None:
        self._double, self._recorded = double, recorded

    def launch(self, stream: StreamDouble) -> None:
        assert isinstance(stream, StreamDouble) and stream.capturing is None
        self._double.log.replays += 1
        for work in self._recorded:
            work()


class RawModuleDouble:
    def __init__(self, double: Double, *, path: str) -> None:
        self._double, self._path = double, path

    def get_function(self, name: str) -> RawKernelDouble:
        return RawKernelDouble(self._double, Path(self._path), name)


class RawKernelDouble:
    #: What cupy hands over as it is; of every other type it makes 64 bits, and None is no argument at all.
    TYPES = tuple(np.dtype(code).type for code in "?bhilqBHILQefdFD")

    def __init__(self, double: Double, path: Path, name: str) -> None:
        self._double, self._path, self._name = double, path, name
        self.max_dynamic_shared_size_bytes = STATIC_LIMIT
        self._loaded = False

    def compile(self) -> None:
        code = self._path.read_bytes()
        assert code[:4] == b"\x7fELF", f"{self._path} is no binary"
        assert self._name.encode() in code, f"{self._path} has no function {self._name}"
        self._double.log.modules.append(self._path.name)
        self._loaded = True

    def __call__(
        self, grid: tuple[int, ...], block: tuple[int, ...], args: tuple[Any, ...], *, shared_mem: int = 0
    ) -> None:
        stream = self._double.stream
        assert stream is not None, "it would run on the default stream"
        assert self._loaded or stream.capturing is None, "code must not be loaded during a capture"
        assert all(type(arg) in self.TYPES for arg in args), f"cupy makes something else of {args}"
        assert len(grid) == len(block) == 3 and min(*grid, *block) > 0, f"{grid} x {block}"
        hip = self._double.cuda.runtime.is_hip
        assert shared_mem <= (64 * 1024 if hip else self.max_dynamic_shared_size_bytes), shared_mem
        launch = Launch(self._path.name, self._name, grid, block, shared_mem, tuple(arg.tobytes() for arg in args))  # type: ignore[arg-type]
        work = lambda: self._double.reach(launch)  # noqa: E731
        if stream.capturing is None:
            work()
        else:
            stream.capturing.append(work)
