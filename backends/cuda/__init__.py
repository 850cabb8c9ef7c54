"""NVIDIA devices: machine code from the kernels of `plait.backends.kernels.gpu`, or torch where no device is here."""

from __future__ import annotations

from plait.backends.kernels.gpu.backend import GpuBackend

BACKEND = GpuBackend(
    name="cuda",
    archs=("sm_80", "sm_86", "sm_89", "sm_90", "sm_90a", "sm_100", "sm_100a", "sm_103", "sm_103a", "sm_120", "sm_120a"),
    dtypes=("float32", "bfloat16", "float16"),
    vendor="nvidia",
)
