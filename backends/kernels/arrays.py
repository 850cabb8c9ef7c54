"""Arrays between NumPy and torch, bfloat16 included, without a copy where none is needed."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

TORCH_DTYPES: dict[str, torch.dtype] = {
    "float32": torch.float32,
    "float16": torch.float16,
    "bfloat16": torch.bfloat16,
}

FP8_DTYPES: dict[str, torch.dtype] = {
    "e4m3fn": torch.float8_e4m3fn,
    "e5m2": torch.float8_e5m2,
    "e4m3fnuz": torch.float8_e4m3fnuz,
}


def to_codes(values: Tensor, kind: torch.dtype) -> Tensor:
    """Values as FP8 codes (uint8), as `plait.ir.numbers.saturate` says: torch itself makes NaN of what is too large."""
    largest = torch.finfo(kind).max
    return values.float().clamp(-largest, largest).to(kind).view(torch.uint8)


def of_codes(codes: Tensor, kind: torch.dtype, dtype: torch.dtype) -> Tensor:
    """The inverse of `to_codes`; every compute dtype holds every code."""
    return codes.view(kind).to(dtype)


def to_torch(array: NDArray[Any]) -> Tensor:
    """A tensor of the same values; it shares memory with a writable array."""
    array = np.ascontiguousarray(array)
    if not array.flags.writeable:  # torch cannot promise not to write, and would warn
        array = array.copy()
    if array.dtype == ml_dtypes.bfloat16:
        return torch.from_numpy(array.view(np.int16)).view(torch.bfloat16)
    return torch.from_numpy(array)


def to_numpy(tensor: Tensor) -> NDArray[Any]:
    """The inverse of `to_torch`."""
    tensor = tensor.detach().contiguous()
    if tensor.dtype == torch.bfloat16:
        return tensor.view(torch.int16).numpy().view(ml_dtypes.bfloat16)
    array: NDArray[Any] = tensor.numpy()
    return array
