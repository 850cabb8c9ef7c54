"""`plait.router` and `plait.experts`."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from plait.backends.kernels.lowering import operand_dtype, weight_name
from plait.backends.kernels.matmul import Product, product
from plait.backends.kernels.mixture import EXPERTS, ROUTER, SCORING, activation, counted
from plait.backends.kernels.step import Step
from plait.backends.kernels.torch_eager.table import LOWERING, Bind, Kernel, Slice
from plait.ir.ops import ExpertsOp, RouterOp
from plait.ir.ops.base import number

_GROUP_SCORE: dict[str, Callable[[Tensor], Tensor]] = {
    "max": lambda grouped: grouped.amax(2),
    "top2": lambda grouped: grouped.topk(2, 2).values.sum(2),
}


def first_largest(values: Tensor, count: int) -> Tensor:
    """(rows, count): where the largest of each row stand; of equal ones the first. `topk` would take any."""
    return torch.argsort(values, dim=1, descending=True, stable=True)[:, :count]


@LOWERING.emits(RouterOp, *ROUTER)
def _router(op: RouterOp) -> Bind:
    """All in float32: in 16 bits other experts would often be chosen."""
    dtype, name = operand_dtype(op, op.x), weight_name(op, op.weight)
    bias, selection = (None if v is None else weight_name(op, v) for v in (op.bias, op.selection_bias))
    score, choose = SCORING[op.scoring.data], _chooser(op)
    least, scale = number(op.normalise), number(op.scale)

    def bind(where: Slice) -> Kernel:
        offset = None if bias is None else where.weight(bias, dtype).float()
        linear = product(where.weight(name, dtype).float(), offset)
        preference = None if selection is None else where.weight(selection, "float32")

        def run(step: Step, x: Tensor) -> Tensor:
            scores = score(linear(x.float()))
            chosen = choose(scores if preference is None else scores + preference)
            counts = counted(scores.gather(1, chosen), least, scale)
            return torch.zeros_like(scores).scatter_(1, chosen, counts)

        return run

    return bind


def _chooser(op: RouterOp) -> Callable[[Tensor], Tensor]:
    """From ranks (tokens, experts) to the experts chosen, (tokens, experts_per_token)."""
    count, groups, kept = op.experts_per_token.value.data, number(op.groups), number(op.groups_per_token)
    if op.group_score is None:
        return lambda ranks: first_largest(ranks, count)
    group_score = _GROUP_SCORE[op.group_score.data]

    def choose(ranks: Tensor) -> Tensor:
        grouped = ranks.view(len(ranks), groups, -1)
        best = first_largest(group_score(grouped), kept)
        shut = torch.ones(grouped.shape[:2], dtype=torch.bool).scatter_(1, best, False)
        return first_largest(grouped.masked_fill(shut[..., None], -torch.inf).view(ranks.shape), count)

    return choose


@LOWERING.emits(ExpertsOp, *EXPERTS)
def _experts(op: ExpertsOp) -> Bind:
    dtype, stacks = operand_dtype(op, op.x), [weight_name(op, stack) for stack in op.stacks]
    biases: Sequence[str | None] = [weight_name(op, bias) for bias in op.biases] or (None, None, None)
    activate = activation(op)

    def bind(where: Slice) -> Kernel:
        gate, up, down = (_products(where, *names, dtype) for names in zip(stacks, biases, strict=True))

        def run(step: Step, x: Tensor, routing: Tensor) -> Tensor:
            out = torch.zeros(x.shape)
            for e in routing.any(0).nonzero().flatten().tolist():
                rows = routing[:, e].nonzero().flatten()
                mine = x.index_select(0, rows)
                inner = activate(gate[e](mine).float(), up[e](mine).float()).to(x.dtype)
                out.index_add_(0, rows, down[e](inner).float() * routing[rows, e, None])
            return out.to(x.dtype)

        return run

    return bind


def _products(where: Slice, stack: str, bias: str | None, dtype: str) -> list[Product]:
    """The product with each matrix of a stack."""
    matrices, shared = where.weight(stack, dtype), where.is_shared(stack)
    offsets = [None] * len(matrices) if bias is None else where.weight(bias, dtype)
    return [product(*pair, shared=shared) for pair in zip(matrices, offsets, strict=True)]
