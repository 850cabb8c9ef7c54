"""`plait.router` and `plait.experts`, with shapes that do not depend on what is chosen: every expert computes every
token, and those that were not chosen count nothing."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F  # noqa: N812

from plait.backends.kernels.lowering import operand_dtype, weight_name
from plait.backends.kernels.mixture import EXPERTS, ROUTER, SCORING, activation, counted
from plait.backends.kernels.stateless.table import LOWERING, Emit, Run
from plait.ir.ops import ExpertsOp, RouterOp
from plait.ir.ops.base import number


@LOWERING.emits(RouterOp, *ROUTER)
def _router(op: RouterOp) -> Emit:
    operand_dtype(op, op.x)
    name, score = weight_name(op, op.weight), SCORING[op.scoring.data]
    bias, selection = (None if value is None else weight_name(op, value) for value in (op.bias, op.selection_bias))
    count, least, scale = op.experts_per_token.value.data, number(op.normalise), number(op.scale)

    def emit(run: Run, x: Tensor) -> Tensor:
        offset = None if bias is None else run.args[bias].float()
        scores = score(F.linear(x.float(), run.args[name].float(), offset))
        ranks = scores if selection is None else scores + run.args[selection]
        chosen = _largest(_open(op, ranks), count)
        return counted(torch.where(chosen, scores, torch.zeros_like(scores)), least, scale)

    return emit


def _open(op: RouterOp, ranks: Tensor) -> Tensor:
    """Ranks (tokens, experts), with -inf where an expert's group was not chosen."""
    if op.groups is None or op.groups_per_token is None or op.group_score is None:
        return ranks
    groups, each = op.groups.value.data, ranks.shape[1] // op.groups.value.data
    grouped = ranks.reshape(-1, each)
    best = _largest(grouped, 1 if op.group_score.data == "max" else 2)
    scores = torch.where(best, grouped, torch.zeros_like(grouped)).sum(1).reshape(-1, groups)
    kept = _largest(scores, op.groups_per_token.value.data)[:, :, None].expand(-1, -1, each)
    return ranks.masked_fill(~kept.reshape(ranks.shape), float("-inf"))


def _largest(values: Tensor, count: int) -> Tensor:
    """Which of each row are the `count` largest, of equal ones the first: those that fewer than `count` go before."""
    place = torch.arange(values.shape[1])
    ahead = (values[:, None] == values[:, :, None]) & (place < place[:, None])
    return ((values[:, None] > values[:, :, None]) | ahead).sum(2) < count


@LOWERING.emits(ExpertsOp, *EXPERTS)
def _experts(op: ExpertsOp) -> Emit:
    for stack in op.stacks:
        operand_dtype(op, stack)
    stacks, biases = ([weight_name(op, value) for value in values] for values in (op.stacks, op.biases))
    activate = activation(op)

    def emit(run: Run, x: Tensor, routing: Tensor) -> Tensor:
        def product(index: int, rows: Tensor) -> Tensor:
            """Rows (T, in), or (E, T, in), by each matrix: (E, T, out) in float32."""
            made = torch.matmul(rows, run.args[stacks[index]].transpose(1, 2))
            return (made if not biases else made + run.args[biases[index]][:, None]).float()

        inner = activate(product(0, x), product(1, x)).to(x.dtype)
        shares = routing.t()[:, :, None]  # [E, T, 1]
        made = product(2, inner) * shares
        # What was not chosen may be infinite, and 0 * inf is not 0.
        return torch.where(shares != 0, made, torch.zeros_like(made)).sum(0).to(x.dtype)

    return emit
