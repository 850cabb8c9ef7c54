"""The table of emitters, and what kernels are bound to."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

from torch import Tensor
from xdsl.ir import SSAValue

from plait.backends.kernels.attention import Cache
from plait.backends.kernels.lowering import Lowering

Kernel = Callable[..., Any]


class Slice(Protocol):
    """What kernels are bound to."""

    def weight(self, name: str, dtype: str) -> Tensor:
        """A tensor of the checkpoint."""

    def stacked(self, names: Sequence[str], dtype: str) -> Tensor:
        """Tensors of the checkpoint as one, stacked along their first dimension."""

    def is_shared(self, name: str) -> bool:
        """Whether several ops of the slice use the tensor."""

    def cache(self, value: SSAValue) -> Cache:
        """The pages behind a KV argument."""


Bind = Callable[[Slice], Kernel]

LOWERING: Lowering[Bind] = Lowering("torch")
