"""The GPU that the tests of this folder run on, and the kernels of a test on it."""

from __future__ import annotations

import ctypes
import functools
import warnings
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from plait.backends.cuda import BACKEND as CUDA
from plait.backends.kernels.gpu.archs import ARCHS, Arch
from plait.backends.kernels.gpu.backend import GpuBackend
from plait.backends.kernels.gpu.build import Job, compile_variant
from plait.backends.kernels.gpu.cupy_device import CupyDevice
from plait.backends.kernels.gpu.device import Region
from plait.backends.kernels.gpu.expression import evaluate
from plait.backends.kernels.gpu.here import devices
from plait.backends.kernels.gpu.interpret import address
from plait.backends.kernels.gpu.interpret_device import RUBBISH
from plait.backends.kernels.gpu.kernel import Kernel, Variant
from plait.backends.kernels.gpu.launch import Binary
from plait.backends.rocm import BACKEND as ROCM

Bytes = NDArray[np.uint8]

#: Bytes on either side of what a kernel is given, which it must leave alone.
GUARD = 4096


@dataclass(frozen=True)
class Machine:
    """A GPU of this machine that code can be made for. `cupy` is None where nothing runs (`prepared.Recording`)."""

    backend: GpuBackend
    arch: Arch
    cupy: Any
    ordinal: int = 0

    @property
    def target(self) -> str:
        return f"{self.backend.name}:{self.arch.name}"

    def device(self, *, graphs: bool = True) -> CupyDevice:
        made = CupyDevice(self.cupy, self.ordinal)
        made.graphs = made.graphs and graphs
        return made


def backend_of(arch: Arch) -> GpuBackend:
    return CUDA if arch.vendor == "nvidia" else ROCM


@functools.cache
def find() -> Machine | str:
    """The first GPU here that code can be made for, or why there is none.

    Raises:
        MissingDependencyError: `cupy-missing`.
    """
    seen: list[str] = []
    for backend in (CUDA, ROCM):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # what cupy says of the toolkits it does not find is nothing to us
            here = devices(backend.vendor)
        for ordinal, name in enumerate(here.archs if here is not None else ()):
            if name in ARCHS:
                return Machine(backend, ARCHS[name], here.cupy, ordinal)  # type: ignore[union-attr]
            seen.append(name)
    if seen:
        return f"no GPU code is made for what is here: {', '.join(seen)}"
    return "there is no GPU here: neither NVIDIA's driver nor AMD's shows one"


@dataclass(frozen=True)
class Block:
    """The memory that an array is cut out of: whole, so that what lies beside the array is looked at too."""

    owner: NDArray[Any]
    start: int
    nbytes: int

    @property
    def bytes(self) -> Bytes:
        found: Bytes = np.ctypeslib.as_array((ctypes.c_uint8 * self.nbytes).from_address(self.start))
        return found


def blocks(pointers: Mapping[str, NDArray[Any] | None]) -> dict[str, Block]:
    """The block of every pointer that is not null; arrays cut out of one have the same."""
    found = {}
    for name, array in pointers.items():
        if array is None:
            continue
        owner = array
        while isinstance(owner.base, np.ndarray):
            owner = owner.base
        start, end = np.lib.array_utils.byte_bounds(owner)
        found[name] = Block(owner, start, end - start)
    return found


def job(
    kernel: Kernel,
    variant: Variant,
    pointers: Mapping[str, NDArray[Any] | None],
    scalars: Mapping[str, int | float],
    arch: Arch,
) -> Job:
    """What is compiled for a launch: with the promises that a launch plan would make about it."""
    lacking = {t for t in variant.types.values() if t.startswith("fp8")} - set(arch.fp8)
    if lacking:
        pytest.skip(f"{arch.name} has no {', '.join(sorted(lacking))}")
    found = blocks(pointers)
    aligned = {
        name
        for name, array in pointers.items()
        if array is None or not (GUARD + address(array) - found[name].start) % 16
    }
    aligned |= {name for name, kind in kernel.scalars.items() if kind == "i32" and not scalars[name] % 16}
    promised = replace(
        variant,
        types={name: variant.types[name] for name in kernel.pointers},
        aligned=frozenset(aligned),
        small=frozenset(kernel.pointers),
    )
    return Job(kernel, promised, arch.name)


class OnDevice:
    """`tests.kernels.Runner` on a GPU: arrays there, one launch, arrays back.

    A kernel that writes beside the memory it was given, or into memory it only reads, fails.
    """

    def __init__(self, device: CupyDevice, arch: Arch, folder: Path) -> None:
        self._device, self._arch, self._folder = device, arch, folder
        self._loaded: dict[str, Any] = {}

    def __call__(
        self,
        kernel: Kernel,
        variant: Variant,
        pointers: Mapping[str, NDArray[Any] | None],
        scalars: Mapping[str, int | float],
        grid: tuple[int, int, int] | None = None,
    ) -> None:
        asked = job(kernel, variant, pointers, scalars, self._arch)
        if grid is None:
            known = {**scalars, **variant.constants, **variant.tile.constants}
            names = {name: int(value) for name, value in known.items() if isinstance(value, int)}
            x, y, z = (evaluate(axis, names) for axis in kernel.grid)
            grid = (x, y, z)
        there = blocks(pointers)
        memory = {start: (block, self._send(block)) for start, block in {b.start: b for b in there.values()}.items()}
        regions = [
            None if array is None else Region(memory[there[name].start][1], *_place(there[name], array))
            for name, array in ((name, pointers[name]) for name in kernel.pointers)
        ]
        if all(grid):
            values = [scalars[name] for name in kernel.scalars]
            self._device.run([self._device.bind(self._function(asked), grid, regions, values)])
        written = {there[name].start for name in kernel.written if name in there}
        for block, allocated in memory.values():
            self._fetch(kernel, block, allocated, block.start in written)

    def _function(self, asked: Job) -> Any:
        if asked.key not in self._loaded:
            kernel, variant = asked.kernel, asked.variant
            made = compile_variant(kernel, variant, asked.arch)
            binary = Binary(
                kernel=kernel.name,
                types=dict(variant.types),
                scalars=dict(kernel.scalars),
                constants=dict(variant.constants),
                tile=dict(variant.tile.constants),
                num_warps=variant.tile.num_warps,
                num_stages=variant.tile.num_stages,
                aligned=tuple(sorted(variant.aligned)),
                small=tuple(sorted(variant.small)),
                grid=kernel.grid,
                symbol=made.symbol,
                file=f"{asked.key}.{made.suffix}",
                threads=made.threads,
                shared_bytes=made.shared_bytes,
            )
            (self._folder / binary.file).write_bytes(made.code)
            self._loaded[asked.key] = self._device.load(binary, self._folder)
        return self._loaded[asked.key]

    def _send(self, block: Block) -> Any:
        whole = np.full(block.nbytes + 2 * GUARD, RUBBISH, np.uint8)
        whole[GUARD : GUARD + block.nbytes] = block.bytes
        memory = self._device.allocate(len(whole))
        self._device.write(memory, 0, whole)
        return memory

    def _fetch(self, kernel: Kernel, block: Block, memory: Any, written: bool) -> None:
        whole = np.empty(block.nbytes + 2 * GUARD, np.uint8)
        self._device.read(memory, 0, whole)
        before, inside, after = np.split(whole, [GUARD, GUARD + block.nbytes])
        assert (before == RUBBISH).all() and (after == RUBBISH).all(), f"{kernel.name} wrote beside its arrays"
        if written:
            block.bytes[:] = inside
        else:
            assert (inside == block.bytes).all(), f"{kernel.name} wrote into what it only reads"


def _place(block: Block, array: NDArray[Any]) -> tuple[int, int]:
    """Where an array begins in its block's memory, and what there is from there on."""
    offset = address(array) - block.start
    return GUARD + offset, block.nbytes - offset
