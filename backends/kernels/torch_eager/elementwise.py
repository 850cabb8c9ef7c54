"""Ops that work on each feature by itself: in float32, rounded once."""

from __future__ import annotations

import torch
from torch import Tensor

from plait.backends.kernels.lowering import operand_dtype
from plait.backends.kernels.step import Step
from plait.backends.kernels.torch_eager.table import LOWERING, Bind
from plait.ir.ops import AddOp, GeluMulOp, GeluOp, ScaleOp, SiluMulOp


@LOWERING.emits(SiluMulOp)
def _silu_mul(op: SiluMulOp) -> Bind:
    operand_dtype(op, op.x)

    def run(step: Step, gate: Tensor, up: Tensor) -> Tensor:
        return torch.nn.functional.silu(gate.float()).mul_(up).to(gate.dtype)

    return lambda where: run


@LOWERING.emits(GeluMulOp, "approximate")
def _gelu_mul(op: GeluMulOp) -> Bind:
    operand_dtype(op, op.x)
    approximate = op.approximate.data

    def run(step: Step, gate: Tensor, up: Tensor) -> Tensor:
        return torch.nn.functional.gelu(gate.float(), approximate=approximate).mul_(up).to(gate.dtype)

    return lambda where: run


@LOWERING.emits(GeluOp, "approximate")
def _gelu(op: GeluOp) -> Bind:
    operand_dtype(op, op.x)
    approximate = op.approximate.data
    return lambda where: lambda step, x: torch.nn.functional.gelu(x.float(), approximate=approximate).to(x.dtype)


@LOWERING.emits(ScaleOp, "factor")
def _scale(op: ScaleOp) -> Bind:
    operand_dtype(op, op.x)
    factor = op.factor.value.data
    return lambda where: lambda step, x: (x.float() * factor).to(x.dtype)


@LOWERING.emits(AddOp)
def _add(op: AddOp) -> Bind:
    operand_dtype(op, op.x)
    return lambda where: lambda step, x, y: x + y
