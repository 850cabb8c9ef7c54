"""Matrix products with a fixed weight.

They go through oneDNN. There a row's result does not depend on how many rows come with it, as long as there
are two or more: a request gets the same bits alone and in a batch. (MKL, which `torch.nn.functional.linear` uses for
float32, has other kernels for 1, 2, 3 and for leftover rows, and takes up to four times as long on few rows.)
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

Product = Callable[[Tensor], Tensor]

_FEW_ROWS = 2
"""oneDNN splits the sum of a single row over threads; two rows or more are summed in one order."""


def product(weight: Tensor, bias: Tensor | None, *, shared: bool = False) -> Product:
    """x (rows, in) -> x weight^T + bias (rows, out), accumulated in float32 and rounded once.

    Args:
        weight: (out, in).
        shared: somebody else holds the weight too, so packing it would hold it twice.
    """
    if not _onednn(weight):
        return lambda x: torch.nn.functional.linear(x, weight, bias)
    # Packing changes the time of a product, not its bits.
    matrix = weight if shared else torch.ops.mkldnn._reorder_linear_weight(weight, None)
    linear = torch.ops.mkldnn._linear_pointwise.default
    outs = weight.shape[0]

    def run(x: Tensor) -> Tensor:
        rows = x.shape[0]
        if rows >= _FEW_ROWS:
            out: Tensor = linear(x, matrix, bias, "none", [], "")
            return out
        if rows == 0:
            return x.new_empty(0, outs)
        return run(x.expand(_FEW_ROWS, -1))[:1]

    return run


def _onednn(weight: Tensor) -> bool:
    """Whether oneDNN multiplies this weight natively here."""
    if not torch._C._has_mkldnn:
        return False
    if weight.dtype == torch.bfloat16:
        return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
    if weight.dtype == torch.float16:
        return bool(torch.ops.mkldnn._is_mkldnn_fp16_supported())
    return weight.dtype == torch.float32
