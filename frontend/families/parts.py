"""The pieces that blocks are made of."""

from __future__ import annotations

import numpy as np
from xdsl.ir import SSAValue

from plait.frontend.config import Norm
from plait.ir import Builder
from plait.ir.numbers import NUMPY


def linear(b: Builder, x: SSAValue, name: str, out: int, bias: bool) -> SSAValue:
    """x (tokens, in) by the matrix `name.weight` (out, in), perhaps plus `name.bias`."""
    return b.linear(x, f"{name}.weight", out, f"{name}.bias" if bias else None)


def normed(
    b: Builder, norm: Norm, x: SSAValue, name: str, *, group: int | None = None, per_group: bool = False
) -> SSAValue:
    """x (tokens, hidden) by the norm `name.weight`; `group` as in `plait.rms_norm`."""
    if norm.kind == "rms":
        return b.rms_norm(x, f"{name}.weight", norm.eps, group=group, per_group=per_group, offset=norm.offset)
    bias = f"{name}.bias" if norm.bias else None
    return b.layer_norm(x, f"{name}.weight", bias, norm.eps, group=group, per_group=per_group)


def rounded(value: float, dtype: str) -> float:
    """The nearest number of a compute dtype."""
    return float(np.float64(np.float32(value).astype(NUMPY[dtype])))
