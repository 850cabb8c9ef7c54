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
