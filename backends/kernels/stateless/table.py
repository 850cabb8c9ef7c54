"""The table of emitters, and what they read while a slice is traced."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from xdsl.ir import SSAValue

from plait.backends.kernels.lowering import Lowering
from plait.errors import UsageError


@dataclass(frozen=True)
class Shape:
    """One static shape. Raises UsageError `export-shape` where the new tokens have no room."""

    sequences: int
    tokens: int
    context: int

    def __post_init__(self) -> None:
        if min(self.sequences, self.tokens) < 1 or self.context < self.tokens:
            raise UsageError(
                "export-shape",
                f"no step of {self.sequences} x {self.tokens} tokens in a context of {self.context}",
                why="every sequence brings a token, and the context holds the new tokens too",
            )


@dataclass
class Run:
    """One call while it is traced; `kv`, K and V or K alone, is replaced when written."""

    shape: Shape
    args: dict[str, Tensor]
    kv: dict[SSAValue, tuple[Tensor, ...]] = field(default_factory=dict)

    @property
    def first(self) -> Tensor:
        """[S, 1] position of the first new token."""
        return (self.args["kv_lens"] - self.shape.tokens)[:, None]

    @property
    def positions(self) -> Tensor:
        """[S, T]."""
        return self.first + torch.arange(self.shape.tokens, dtype=torch.int32)


Emit = Callable[..., Any]
"""`emit(run, *activations)`: a tensor, or several."""

LOWERING: Lowering[Emit] = Lowering("torch.export")
