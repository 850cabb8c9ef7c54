"""Products with weights: `plait.linear`, `plait.linears`, `plait.head_linear`, `plait.logits`."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from plait.backends.kernels.arrays import to_torch
from plait.backends.kernels.lowering import operand_dtype, weight_name
from plait.backends.kernels.matmul import product
from plait.backends.kernels.step import Step
from plait.backends.kernels.torch_eager.table import LOWERING, Bind, Kernel, Slice
from plait.backends.weights import fresh
from plait.ir.ops import HeadLinearOp, LinearOp, LinearsOp, LogitsOp
from plait.ir.ops.base import number


@LOWERING.emits(LinearOp)
def _linear(op: LinearOp) -> Bind:
    name, dtype = weight_name(op, op.weight), operand_dtype(op, op.x)
    bias = None if op.bias is None else weight_name(op, op.bias)

    def bind(where: Slice) -> Kernel:
        offset = None if bias is None else where.weight(bias, dtype)
        run = product(where.weight(name, dtype), offset, shared=where.is_shared(name))
        return lambda step, x: run(x)

    return bind


@LOWERING.emits(LinearsOp)
def _linears(op: LinearsOp) -> Bind:
    names, dtype = [weight_name(op, weight) for weight in op.weights], operand_dtype(op, op.x)
    biases = [weight_name(op, bias) for bias in op.biases]
    widths = [kind.get_shape()[1] for kind in op.products.types]

    def bind(where: Slice) -> Kernel:
        run = product(where.stacked(names, dtype), where.stacked(biases, dtype) if biases else None)
        return lambda step, x: torch.split(run(x), widths, 1)

    return bind


@LOWERING.emits(HeadLinearOp, "transposed")
def _head_linear(op: HeadLinearOp) -> Bind:
    """A product per head: a batched one would sum a row otherwise, depending on how many rows come with it."""
    name, dtype = weight_name(op, op.weight), operand_dtype(op, op.x)
    transposed, inner = op.transposed is not None, op.sizes[2]

    def bind(where: Slice) -> Kernel:
        stack = where.weight(name, dtype)
        matrices = stack.transpose(1, 2).contiguous() if transposed else stack
        shared = where.is_shared(name) and not transposed
        runs = [product(matrix, None, shared=shared) for matrix in matrices]

        def run(step: Step, x: Tensor) -> Tensor:
            return torch.cat([head(part) for head, part in zip(runs, torch.split(x, inner, 1), strict=True)], 1)

        return run

    return bind


@LOWERING.emits(LogitsOp, "scale", "softcap")
def _logits(op: LogitsOp) -> Bind:
    name, dtype = weight_name(op, op.weight), operand_dtype(op, op.x)
    scale, cap = number(op.scale), number(op.softcap)

    def bind(where: Slice) -> Kernel:
        # Logits are float32 whatever the dtype of the model; in 16 bits the best two tokens would often tie.
        # A 16-bit weight, rounded to the model's dtype, is held in float32: twice what the plan counts.
        weight = where.weight(name, dtype)
        if weight.dtype != torch.float32:
            weight = to_torch(fresh(tuple(weight.shape), np.dtype(np.float32))).copy_(weight)
        score = product(weight, None, shared=dtype == "float32" and where.is_shared(name))

        def run(step: Step, x: Tensor) -> Tensor:
            scores = score((x if step.logit_rows is None else x.index_select(0, step.logit_rows)).float())
            scores = scores if scale is None else scores * scale
            return scores if cap is None else torch.tanh(scores / cap) * cap

        return run

    return bind
