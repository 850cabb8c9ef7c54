"""NVIDIA devices, through torch."""

from __future__ import annotations

from plait.backends.kernels.torch_backend import TorchBackend

BACKEND = TorchBackend(
    name="cuda",
    archs=("sm_80", "sm_86", "sm_89", "sm_90", "sm_90a", "sm_100", "sm_100a", "sm_103", "sm_103a", "sm_120", "sm_120a"),
    dtypes=("float32", "bfloat16", "float16"),
    vendor="nvidia",
)
