"""AMD devices, through torch."""

from __future__ import annotations

from plait.backends.kernels.torch_backend import TorchBackend

BACKEND = TorchBackend(
    name="rocm",
    archs=("gfx90a", "gfx942", "gfx950", "gfx1100"),
    dtypes=("float32", "bfloat16", "float16"),
    vendor="amd",
)
