"""Every kernel there is, by name. Nothing here imports Triton."""

from __future__ import annotations

from plait.backends.kernels.gpu import attend, gemm, streams
from plait.backends.kernels.gpu.kernel import Kernel

KERNELS: dict[str, Kernel] = {kernel.name: kernel for area in (attend, gemm, streams) for kernel in area.KERNELS}
