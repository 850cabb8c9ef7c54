"""Every kernel there is, by name. Nothing here imports Triton."""

from __future__ import annotations

from plait.backends.kernels.gpu import gemm
from plait.backends.kernels.gpu.kernel import Kernel

KERNELS: dict[str, Kernel] = {kernel.name: kernel for area in (gemm,) for kernel in area.KERNELS}
