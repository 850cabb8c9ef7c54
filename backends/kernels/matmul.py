"""Matrix products with a fixed weight.

They go through oneDNN. There a row's result does not depend on how many rows come with it, as long as there
are two or more: a request gets the same bits alone and in a batch. (MKL, which `torch.nn.functional.linear` uses for
float32, has other kernels for 1, 2, 3 and for leftover rows, and takes up to four times as long on few rows.)
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from contextvars import ContextVar

import torch
from torch import Tensor

Product = Callable[[Tensor], Tensor]

_FEW_ROWS = 2
"""oneDNN splits the sum of a single row over threads; two rows or more are summed in one order."""

Matrix = list[Tensor]
"""One element: the weight as oneDNN multiplies by it now. Packing puts another in its place."""


class Packer:
    """Packs matrices for their products on a thread of its own, so that a slice can run steps as soon as it is read.

    Packing changes the time of a product, not its bits: a step may take some matrices packed and others not yet. One at
    a time is held twice.
    """

    def __init__(self) -> None:
        threads = torch.get_num_threads()
        self._thread = ThreadPoolExecutor(1, "plait-pack", torch.set_num_threads, (threads,))
        self._jobs: list[Future[None]] = []

    @contextmanager
    def behind(self) -> Iterator[None]:
        """What `product` is given inside is packed from the end of it on: reading comes first."""
        matrices = list[Matrix]()
        token = _later.set(matrices.append)
        try:
            yield
        finally:
            _later.reset(token)
        self._jobs += [self._thread.submit(_pack, matrix) for matrix in matrices]

    def wait(self) -> None:
        """Until all is packed. Raises what packing raised."""
        for job in self._jobs:
            job.result()

    def close(self) -> None:
        """Leave what is not packed yet as it is."""
        self._thread.shutdown(cancel_futures=True)
        self._jobs.clear()


_later: ContextVar[Callable[[Matrix], None] | None] = ContextVar("later", default=None)


def _pack(matrix: Matrix) -> None:
    with torch.inference_mode():
        matrix[0] = torch.ops.mkldnn._reorder_linear_weight(matrix[0], None)


def product(weight: Tensor, bias: Tensor | None, *, shared: bool = False) -> Product:
    """x (rows, in) -> x weight^T + bias (rows, out), accumulated in float32 and rounded once.

    Args:
        weight: (out, in).
        shared: somebody else holds the weight too, so packing it would hold it twice.
    """
    if not _onednn(weight):
        return lambda x: torch.nn.functional.linear(x, weight, bias)
    matrix = [weight]
    if not shared:
        (_later.get() or _pack)(matrix)
    linear = torch.ops.mkldnn._linear_pointwise.default
    outs = weight.shape[0]

    def run(x: Tensor) -> Tensor:
        rows = x.shape[0]
        if rows >= _FEW_ROWS:
            out: Tensor = linear(x, matrix[0], bias, "none", [], "")
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
