"""Ops that look at one token at a time: tables, norms, products, and what works on each feature by itself.

All but products compute in float32 and round once.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F  # noqa: N812

from plait.backends.kernels.lowering import operand_dtype, weight_name
from plait.backends.kernels.stateless.table import LOWERING, Emit, Run
from plait.ir.ops import (
    AddOp,
    AddRmsNormOp,
    EmbedOp,
    EmbedPositionsOp,
    GeluMulOp,
    GeluOp,
    HeadLinearOp,
    LayerNormOp,
    LinearOp,
    LinearsOp,
    LogitsOp,
    RmsNormOp,
    ScaleOp,
    SiluMulOp,
)
from plait.ir.ops.base import number


@LOWERING.emits(EmbedOp)
def _embed(op: EmbedOp) -> Emit:
    name = weight_name(op, op.table)
    operand_dtype(op, op.table)
    return lambda run: F.embedding(run.args["tokens"].reshape(-1).long(), run.args[name])


@LOWERING.emits(EmbedPositionsOp)
def _embed_positions(op: EmbedPositionsOp) -> Emit:
    name = weight_name(op, op.table)
    operand_dtype(op, op.table)
    return lambda run: F.embedding(run.positions.reshape(-1).long(), run.args[name])


def _normed(op: RmsNormOp | AddRmsNormOp | LayerNormOp, group: int | None, norm: Callable[..., Tensor]) -> Emit:
    """`norm(wide, each, weight, bias)` of x with an axis of groups of `each` features; weight and bias lie likewise."""
    operand_dtype(op, op.x)
    name, given = weight_name(op, op.weight), getattr(op, "bias", None)
    bias = None if given is None else weight_name(op, given)

    def emit(run: Run, x: Tensor) -> Tensor:
        each = group or x.shape[1]
        weight, offset = (None if n is None else run.args[n].float().reshape(-1, each) for n in (name, bias))
        return norm(x.float().reshape(x.shape[0], -1, each), each, weight, offset).reshape(x.shape).to(x.dtype)

    return emit


def _rms(op: RmsNormOp | AddRmsNormOp, group: int | None = None) -> Emit:
    eps, more = op.eps.value.data, number(op.offset) or 0.0

    def norm(wide: Tensor, each: int, weight: Tensor, bias: Any) -> Tensor:
        return F.rms_norm(wide, (each,), None, eps) * (weight + more)

    return _normed(op, group, norm)


@LOWERING.emits(RmsNormOp, "eps", "group", "offset")
def _rms_norm(op: RmsNormOp) -> Emit:
    return _rms(op, number(op.group))


@LOWERING.emits(AddRmsNormOp, "eps", "offset")
def _add_rms_norm(op: AddRmsNormOp) -> Emit:
    norm = _rms(op)

    def emit(run: Run, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        total = x + y
        return total, norm(run, total)

    return emit


@LOWERING.emits(LayerNormOp, "eps", "group")
def _layer_norm(op: LayerNormOp) -> Emit:
    eps = op.eps.value.data

    def norm(wide: Tensor, each: int, weight: Tensor, bias: Tensor | None) -> Tensor:
        scaled = F.layer_norm(wide, (each,), None, None, eps) * weight
        return scaled if bias is None else scaled + bias

    return _normed(op, number(op.group), norm)


@LOWERING.emits(LinearOp)
def _linear(op: LinearOp) -> Emit:
    operand_dtype(op, op.weight)
    return _product(weight_name(op, op.weight), None if op.bias is None else weight_name(op, op.bias))


def _product(matrix: str, bias: str | None) -> Emit:
    return lambda run, x: F.linear(x, run.args[matrix], None if bias is None else run.args[bias])


@LOWERING.emits(LinearsOp)
def _linears(op: LinearsOp) -> Emit:
    for weight in op.weights:
        operand_dtype(op, weight)
    names: list[str | None] = [weight_name(op, bias) for bias in op.biases] or [None] * len(op.weights)
    products = [_product(weight_name(op, w), name) for w, name in zip(op.weights, names, strict=True)]
    return lambda run, x: [product(run, x) for product in products]


@LOWERING.emits(HeadLinearOp, "transposed")
def _head_linear(op: HeadLinearOp) -> Emit:
    operand_dtype(op, op.weight)
    name, (heads, out, inner), transposed = weight_name(op, op.weight), op.sizes, op.transposed is not None

    def emit(run: Run, x: Tensor) -> Tensor:
        stack = run.args[name] if transposed else run.args[name].transpose(1, 2)  # (heads, in, out)
        made = torch.bmm(x.reshape(-1, heads, inner).transpose(0, 1), stack)
        return made.transpose(0, 1).reshape(-1, heads * out)

    return emit


@LOWERING.emits(LogitsOp, "scale", "softcap")
def _logits(op: LogitsOp) -> Emit:
    name, scale, cap = weight_name(op, op.weight), number(op.scale), number(op.softcap)
    operand_dtype(op, op.weight)

    def emit(run: Run, x: Tensor) -> Tensor:
        scores = F.linear(x[run.args["logit_rows"].long()].float(), run.args[name].float()) * (scale or 1.0)
        return scores if cap is None else cap * torch.tanh(scores / cap)

    return emit


@LOWERING.emits(SiluMulOp)
def _silu_mul(op: SiluMulOp) -> Emit:
    operand_dtype(op, op.x)
    return lambda run, gate, up: (F.silu(gate.float()) * up.float()).to(gate.dtype)


@LOWERING.emits(GeluMulOp, "approximate")
def _gelu_mul(op: GeluMulOp) -> Emit:
    operand_dtype(op, op.x)
    kind = op.approximate.data
    return lambda run, gate, up: (F.gelu(gate.float(), approximate=kind) * up.float()).to(gate.dtype)


@LOWERING.emits(GeluOp, "approximate")
def _gelu(op: GeluOp) -> Emit:
    operand_dtype(op, op.x)
    kind = op.approximate.data
    return lambda run, x: F.gelu(x.float(), approximate=kind).to(x.dtype)


@LOWERING.emits(ScaleOp, "factor")
def _scale(op: ScaleOp) -> Emit:
    operand_dtype(op, op.x)
    factor = op.factor.value.data
    return lambda run, x: (x.float() * factor).to(x.dtype)


@LOWERING.emits(AddOp)
def _add(op: AddOp) -> Emit:
    operand_dtype(op, op.x)
    return lambda run, x, y: x + y
