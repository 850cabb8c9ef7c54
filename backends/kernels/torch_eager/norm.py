"""`plait.rms_norm`, `plait.add_rms_norm`, `plait.layer_norm`: in float32, rounded once."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from plait.backends.kernels.lowering import operand_dtype, weight_name
from plait.backends.kernels.step import Step
from plait.backends.kernels.torch_eager.table import LOWERING, Bind, Kernel, Slice
from plait.ir.ops import AddRmsNormOp, LayerNormOp, RmsNormOp
from plait.ir.ops.base import number


def _rms(weight: Tensor, eps: float, offset: float | None, group: int | None = None) -> Callable[[Tensor], Tensor]:
    """x / sqrt(mean(x^2) + eps) * (weight + offset), over each run of `group` features."""
    each, floor = group or len(weight), torch.tensor(eps)
    scale, part = (weight.float() + (offset or 0.0)).view(-1, each), 1 / each

    def run(x: Tensor) -> Tensor:
        wide = x.float()
        length = torch.linalg.vector_norm(wide, 2, -1, True)  # the fewest passes over x
        mean = torch.addcmul(floor, length, length, value=part)
        return torch.mul(wide, mean.rsqrt_()).mul_(scale).to(x.dtype)

    return run if group is None else lambda x: run(x.reshape(len(x), -1, each)).view(x.shape)


@LOWERING.emits(RmsNormOp, "eps", "group", "offset")
def _rms_norm(op: RmsNormOp) -> Bind:
    name, dtype = weight_name(op, op.weight), operand_dtype(op, op.x)
    eps, offset, group = number(op.eps), number(op.offset), number(op.group)

    def bind(where: Slice) -> Kernel:
        norm = _rms(where.weight(name, dtype), eps, offset, group)
        return lambda step, x: norm(x)

    return bind


@LOWERING.emits(AddRmsNormOp, "eps", "offset")
def _add_rms_norm(op: AddRmsNormOp) -> Bind:
    name, dtype = weight_name(op, op.weight), operand_dtype(op, op.x)
    eps, offset = number(op.eps), number(op.offset)

    def bind(where: Slice) -> Kernel:
        norm = _rms(where.weight(name, dtype), eps, offset)

        def run(step: Step, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
            total = x + y
            return total, norm(total)

        return run

    return bind


@LOWERING.emits(LayerNormOp, "eps", "group")
def _layer_norm(op: LayerNormOp) -> Bind:
    name, dtype = weight_name(op, op.weight), operand_dtype(op, op.x)
    bias = None if op.bias is None else weight_name(op, op.bias)
    eps, group = number(op.eps), number(op.group)

    def bind(where: Slice) -> Kernel:
        scale = where.weight(name, dtype).float()
        each = group or len(scale)
        scale = scale.view(-1, each)
        offset = None if bias is None else where.weight(bias, dtype).float().view(-1, each)

        def run(step: Step, x: Tensor) -> Tensor:
            wide = x.float().reshape(len(x), -1, each)
            made = torch.nn.functional.layer_norm(wide, (each,), eps=eps) * scale
            return (made if offset is None else made + offset).to(x.dtype).view(x.shape)

        return run

    return bind
