"""Every kernel there is, by name. Nothing here imports Triton."""

from __future__ import annotations

from collections.abc import Mapping

from plait.backends.kernels.gpu import attend, experts, gemm, latent, streams
from plait.backends.kernels.gpu.archs import Arch
from plait.backends.kernels.gpu.kernel import Constant, Kernel, Tile

_AREAS = (attend, experts, gemm, latent, streams)

KERNELS: dict[str, Kernel] = {kernel.name: kernel for area in _AREAS for kernel in area.KERNELS}


def candidates(
    kernel: Kernel, types: Mapping[str, str], constants: Mapping[str, Constant], arch: Arch, rows: int | None = None
) -> tuple[Tile, ...]:
    """Tiles worth compiling for launches of at most `rows` rows (None: any number)."""
    (area,) = (area for area in _AREAS if kernel in area.KERNELS)
    tiles: tuple[Tile, ...] = area.candidates(kernel, types, constants, arch, rows)
    return tiles
