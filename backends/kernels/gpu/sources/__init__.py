"""Triton source: the only files here that import Triton. See `plait.backends.kernels.gpu.kernel`."""
