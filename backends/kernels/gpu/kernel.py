"""What a kernel is to the rest of plait: a name, arguments, a grid, and the tiles it may be compiled with.

Nothing here imports Triton: a kernel's source is an import path, read when it is compiled or interpreted.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

Constant = int | float | str | bool
#: `multiply`: a matrix product, bound by compute when there are many tokens; `stream`: bound by memory always.
Nature = Literal["multiply", "attend", "stream"]


@dataclass(frozen=True)
class Tile:
    """One way to compile a kernel: the constants that set its shape on the chip, and how many warps and stages."""

    constants: Mapping[str, int]
    num_warps: int = 4
    num_stages: int = 2


@dataclass(frozen=True)
class Kernel:
    """A Triton function.

    Attributes:
        source: `module:function`, a function with `@triton.jit` (`plait.backends.kernels.gpu.loader`).
        pointers: run-time pointer arguments, in order; they come first.
        scalars: run-time arguments after the pointers, name -> `i32` or `f32`.
        constants: compile-time arguments that say what is computed (`HEAD_DIM`, `ACTIVATION`), after the scalars.
        tile: compile-time arguments that only say how: the keys of `Tile.constants`.
        grid: three expressions (see `plait.backends.kernels.gpu.expression`) over scalars, constants, tile constants
            and batch symbols.
        nature: what bounds it.
        written: pointers that are written.
        flops, bytes: expressions like `grid`, of one launch, for the time model; bytes counts each tensor once.
    """

    name: str
    source: str
    pointers: tuple[str, ...]
    scalars: Mapping[str, Literal["i32", "f32"]]
    constants: tuple[str, ...]
    tile: tuple[str, ...]
    grid: tuple[str, str, str]
    nature: Nature
    written: tuple[str, ...]
    flops: str = "0"
    bytes: str = "0"

    @property
    def arguments(self) -> tuple[str, ...]:
        """Every argument of the function, in order."""
        return (*self.pointers, *self.scalars, *self.constants, *self.tile)


@dataclass(frozen=True)
class Variant:
    """One binary: a kernel with everything that is settled at compile time. Equal variants have equal code.

    Attributes:
        types: element type of each pointer by name: `bf16`, `fp16`, `fp32`, `i32`, `i8`, `u8` (codes of e4m3fn),
            `fp8e4nv` (e4m3fn), `fp8e4b8` (e4m3fnuz), `fp8e5`.
        aligned: pointers that are multiples of 16 bytes, and i32 scalars that are multiples of 16.
        small: pointers from which every address is less than 2 GiB away, whatever the batch; AMD then gets loads with
            32-bit offsets. A pool whose size is known when a slice is loaded only is not small.
        constants: `Kernel.constants` by name. A pointer that a constant makes unused is passed all the same.
    """

    kernel: str
    types: Mapping[str, str]
    constants: Mapping[str, Constant]
    tile: Tile
    aligned: frozenset[str] = field(default=frozenset())
    small: frozenset[str] = field(default=frozenset())
