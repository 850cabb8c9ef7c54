"""What a mixture of experts computes, in torch: scores, and activations. In float32."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional as F  # noqa: N812

from plait.ir.ops import ExpertsOp
from plait.ir.ops.base import number

Activation = Callable[[Tensor, Tensor], Tensor]

#: The properties and optional operands that an emitter of `plait.router`, or of `plait.experts`, implements.
ROUTER = (
    "selection_bias",
    "experts_per_token",
    "scoring",
    "normalise",
    "scale",
    "groups",
    "groups_per_token",
    "group_score",
)
EXPERTS = ("gate_bias", "up_bias", "down_bias", "experts_per_token", "activation", "alpha", "limit")

SCORING: dict[str, Callable[[Tensor], Tensor]] = {
    "softmax": lambda raw: torch.softmax(raw, 1),
    "sigmoid": torch.sigmoid,
}

_ACTIVATIONS: dict[str, Activation] = {
    "silu": lambda gate, up: F.silu(gate) * up,
    "gelu": lambda gate, up: F.gelu(gate) * up,
    "gelu_tanh": lambda gate, up: F.gelu(gate, approximate="tanh") * up,
}


def activation(op: ExpertsOp) -> Activation:
    """Of gate and up."""
    alpha, limit = number(op.alpha), number(op.limit)
    return _ACTIVATIONS[op.activation.data] if alpha is None or limit is None else _clamped_swiglu(alpha, limit)


def _clamped_swiglu(alpha: float, limit: float) -> Activation:
    def run(gate: Tensor, up: Tensor) -> Tensor:
        gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
        return gate * torch.sigmoid(alpha * gate) * (up + 1)

    return run


def counted(scores: Tensor, least: float | None, scale: float | None) -> Tensor:
    """What chosen experts count; the scores of others are 0 or left out."""
    if least is not None:
        scores = scores / (scores.sum(1, keepdim=True) + least)
    return scores if scale is None else scores * scale
