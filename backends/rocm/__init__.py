"""AMD devices: machine code from the kernels of `plait.backends.kernels.gpu`, or torch where no device is here."""

from __future__ import annotations

from plait.backends.kernels.gpu.backend import GpuBackend

BACKEND = GpuBackend(
    name="rocm",
    archs=("gfx90a", "gfx942", "gfx950", "gfx1100"),
    dtypes=("float32", "bfloat16", "float16"),
    vendor="amd",
)
