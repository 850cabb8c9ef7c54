"""This host, through torch."""

from __future__ import annotations

from plait.backends.kernels.torch_backend import TorchBackend

BACKEND = TorchBackend(name="cpu", archs=(), dtypes=("float32", "bfloat16", "float16"), vendor="host")
