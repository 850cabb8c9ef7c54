"""`plait.router` and `plait.experts`: a mixture of experts."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, ClassVar

import numpy as np
from xdsl.dialects.builtin import Float32Type, StringAttr, TensorType
from xdsl.ir import Attribute, SSAValue
from xdsl.irdl import (
    AttrSizedOperandSegments,
    ParsePropInAttrDict,
    irdl_op_definition,
    operand_def,
    opt_operand_def,
    opt_prop_def,
    prop_def,
    result_def,
)

from plait.ir.facts import Cost, Step
from plait.ir.ops.base import (
    F64Attr,
    Float64,
    I64Attr,
    PlaitOp,
    activation_type,
    number,
    properties,
    require,
    require_positive,
    stack_type,
    tensor_type,
    weight_type,
)
from plait.ir.ops.elementwise import GELU, sigmoid
from plait.ir.types import dtype_bytes, tensor, tensor_bytes, tokens_by

SCORING = ("softmax", "sigmoid")
GROUP_SCORES = ("max", "top2")


@irdl_op_definition
class RouterOp(PlaitOp):
    """How much each expert counts for each token: float32 (tokens, experts), 0 for experts that were not chosen.

    Scores are `scoring` of x weight^T + bias: a `softmax` over all experts, or the `sigmoid` of each. Chosen are the
    `experts_per_token` largest of the scores, to which `selection_bias`, float32, is added for this choice only; of
    equal ones the first. With `groups`, experts stand in that many groups of neighbours, and only those in the
    `groups_per_token` best groups can be chosen: a group's score is its largest (`max`), or the sum of its two largest
    (`top2`). What a chosen expert counts is its score; with `normalise` e divided by the sum of the chosen plus e; then
    times `scale`.

    Sources: Mixtral (Jiang et al. 2024), DeepSeek-V2 and -V3 (2024), whose softmax over the chosen scores alone is the
    softmax over all, normalised.
    """

    name = "plait.router"
    FORMULA: ClassVar[str] = "the largest of softmax(x weight^T + bias), or of sigmoid, per token; 0 elsewhere"

    x = operand_def(TensorType)
    weight = operand_def(TensorType)
    bias = opt_operand_def(TensorType)
    selection_bias = opt_operand_def(TensorType)
    experts_per_token = prop_def(I64Attr)
    scoring = prop_def(StringAttr)
    normalise = opt_prop_def(F64Attr)
    scale = opt_prop_def(F64Attr)
    groups = opt_prop_def(I64Attr)
    groups_per_token = opt_prop_def(I64Attr)
    group_score = opt_prop_def(StringAttr)
    result = result_def(TensorType)

    irdl_options = (AttrSizedOperandSegments(as_property=True), ParsePropInAttrDict())

    assembly_format = (
        "$x `,` $weight (`bias` $bias^ `:` type($bias))? (`selection` $selection_bias^ `:` type($selection_bias))? "
        "attr-dict `:` type($x) `,` type($weight) `->` type($result)"
    )

    def __init__(
        self,
        x: SSAValue,
        weight: SSAValue,
        bias: SSAValue | None = None,
        selection_bias: SSAValue | None = None,
        *,
        experts_per_token: int,
        scoring: str = "softmax",
        normalise: float | None = None,
        scale: float | None = None,
        groups: int | None = None,
        groups_per_token: int | None = None,
        group_score: str | None = None,
        block: int | None = None,
    ) -> None:
        experts = tensor_type(weight, "the weight", 2).get_shape()[0]
        super().__init__(
            operands=[x, weight, bias, selection_bias],
            result_types=[tokens_by(experts, Float32Type())],
            properties=properties(
                experts_per_token=experts_per_token,
                scoring=scoring,
                normalise=normalise,
                scale=scale,
                groups=groups,
                groups_per_token=groups_per_token,
                group_score=group_score,
                block=block,
            ),
        )

    def infer(self) -> Sequence[Attribute]:
        kind, matrix = activation_type(self.x, "x"), weight_type(self.weight, "the weight", 2)
        experts, inner = matrix.get_shape()
        require(kind.get_shape()[1] == inner, "x is {} but the weight is {} (experts, in)", kind, matrix)
        require(kind.element_type == matrix.element_type, "x is {} but the weight is {}", kind, matrix)
        for name, dtype in (("bias", kind.element_type), ("selection_bias", Float32Type())):
            value, wanted = getattr(self, name), tensor((experts,), dtype)
            require(value is None or weight_type(value, name, 1) == wanted, "the {} is not {}", name, wanted)
        chosen = self.experts_per_token.value.data
        require(0 < chosen <= experts, "{} of {} experts cannot be chosen", chosen, experts)
        require(self.scoring.data in SCORING, "scoring is one of {}, not {}", ", ".join(SCORING), self.scoring.data)
        if self.scale is not None:
            require_positive(self.scale.value.data, "scale (leave it out for none)")
        least = number(self.normalise)
        require(least is None or 0 <= least < 1, "normalise must be small, not {}", least)
        self._check_groups(experts, chosen)
        return (tokens_by(experts, Float32Type()),)

    def _check_groups(self, experts: int, chosen: int) -> None:
        given = [self.groups, self.groups_per_token, self.group_score]
        require(given.count(None) in (0, 3), "groups, groups_per_token and group_score stand together")
        if self.groups is None or self.groups_per_token is None or self.group_score is None:
            return
        groups, kept, score = self.groups.value.data, self.groups_per_token.value.data, self.group_score.data
        require(groups > 0 and experts % groups == 0, "{} experts do not divide into {} groups", experts, groups)
        require(0 < kept <= groups, "{} of {} groups cannot be kept", kept, groups)
        require(chosen <= kept * (experts // groups), "{} groups hold fewer than {} experts", kept, chosen)
        require(score in GROUP_SCORES, "group_score is one of {}, not {}", ", ".join(GROUP_SCORES), score)
        require(score == "max" or experts // groups > 1, "a group of one expert has no top2")

    def oracle(self, *operands: Any) -> tuple[Float64, ...]:
        x, weight, *rest = operands
        bias = rest.pop(0) if self.bias is not None else 0.0
        raw = x @ weight.T + bias
        if self.scoring.data == "sigmoid":
            scores = sigmoid(raw)
        else:
            scores = np.exp(raw - raw.max(axis=1, keepdims=True))
            scores /= scores.sum(axis=1, keepdims=True)
        ranked = scores + (rest[0] if rest else 0.0)
        if self.groups is not None:
            ranked = np.where(self._kept(ranked), ranked, -np.inf)
        # Stable, so that of equal scores the first wins.
        order = np.argsort(-ranked, axis=1, kind="stable")[:, : self.experts_per_token.value.data]
        counts = np.take_along_axis(scores, order, axis=1)
        if self.normalise is not None:
            counts = counts / (counts.sum(axis=1, keepdims=True) + self.normalise.value.data)
        out = np.zeros_like(scores)
        np.put_along_axis(out, order, counts * (1.0 if self.scale is None else self.scale.value.data), axis=1)
        return (out,)

    def _kept(self, ranked: Float64) -> Any:
        """Which experts stand in the best groups of their token."""
        assert self.groups is not None and self.groups_per_token is not None and self.group_score is not None
        grouped = np.sort(ranked.reshape(len(ranked), self.groups.value.data, -1), axis=2)
        score = grouped[:, :, -1] if self.group_score.data == "max" else grouped[:, :, -2:].sum(axis=2)
        order = np.argsort(-score, axis=1, kind="stable")[:, : self.groups_per_token.value.data]
        kept = np.zeros(score.shape, bool)
        np.put_along_axis(kept, order, True, axis=1)
        return np.repeat(kept, ranked.shape[1] // kept.shape[1], axis=1)

    def cost(self, step: Step) -> Cost:
        kind, matrix = tensor_type(self.x, "x", 2), tensor_type(self.weight, "the weight", 2)
        experts, inner = matrix.get_shape()
        held = sum(tensor_bytes(kind) for kind in self.operand_types[1:] if isinstance(kind, TensorType))
        return Cost(
            (2.0 * inner + 5.0) * step.tokens * experts,
            float(held),
            step.tokens * (inner * dtype_bytes(kind.element_type) + 4.0 * experts),
        )


def clamped_swiglu(gate: Float64, up: Float64, alpha: float, limit: float) -> Float64:
    """g sigmoid(alpha g) (u + 1), with g at most `limit` and u within it on both sides (GPT-OSS, OpenAI 2025)."""
    gate, up = np.minimum(gate, limit), np.clip(up, -limit, limit)
    return np.asarray(gate * sigmoid(alpha * gate) * (up + 1.0))


#: By `activation`: gate and up to what the last matrix takes; `clamped_swiglu` has parameters of its own.
ACTIVATIONS: dict[str, Callable[[Float64, Float64], Float64]] = {
    "silu": lambda gate, up: np.asarray(gate * sigmoid(gate) * up),
    "gelu": lambda gate, up: np.asarray(gate * GELU["none"][0](gate) * up),
    "gelu_tanh": lambda gate, up: np.asarray(gate * GELU["tanh"][0](gate) * up),
}
CLAMPED = "clamped_swiglu"


@irdl_op_definition
class ExpertsOp(PlaitOp):
    """The sum over experts e of routing[:, e] times the gated MLP of e. What routing has as 0 is not computed.

    gate and up are (experts, inner, hidden), down is (experts, hidden, inner); biases (experts, inner) and
    (experts, hidden), all three or none. `activation` is silu(g) u, gelu(g) u (by erf, or by tanh), or
    `clamped_swiglu`: g sigmoid(alpha g) (u + 1), with g at most `limit` and u within `limit` on both sides.
    Of each row of routing at most `experts_per_token` are not 0.
    """

    name = "plait.experts"
    FORMULA: ClassVar[str] = "sum_e routing_e (act(x gate_e^T + b, x up_e^T + b) down_e^T + b)"

    x = operand_def(TensorType)
    routing = operand_def(TensorType)
    gate = operand_def(TensorType)
    up = operand_def(TensorType)
    down = operand_def(TensorType)
    gate_bias = opt_operand_def(TensorType)
    up_bias = opt_operand_def(TensorType)
    down_bias = opt_operand_def(TensorType)
    experts_per_token = prop_def(I64Attr)
    activation = prop_def(StringAttr)
    alpha = opt_prop_def(F64Attr)
    limit = opt_prop_def(F64Attr)
    result = result_def(TensorType)

    irdl_options = (AttrSizedOperandSegments(as_property=True), ParsePropInAttrDict())

    assembly_format = (
        "$x `,` $routing `experts` `(` $gate `,` $up `,` $down `:` type($gate) `,` type($up) `,` type($down) `)` "
        "(`biases` `(` $gate_bias^ `,` $up_bias `,` $down_bias `:` type($gate_bias) `,` type($up_bias) `,` "
        "type($down_bias) `)`)? attr-dict `:` type($x) `,` type($routing) `->` type($result)"
    )

    def __init__(
        self,
        x: SSAValue,
        routing: SSAValue,
        weights: tuple[SSAValue, SSAValue, SSAValue],
        biases: tuple[SSAValue, SSAValue, SSAValue] | tuple[()] = (),
        *,
        experts_per_token: int,
        activation: str = "silu",
        alpha: float | None = None,
        limit: float | None = None,
        block: int | None = None,
    ) -> None:
        super().__init__(
            operands=[x, routing, *weights, *(biases or (None, None, None))],
            result_types=[x.type],
            properties=properties(
                experts_per_token=experts_per_token, activation=activation, alpha=alpha, limit=limit, block=block
            ),
        )

    @property
    def stacks(self) -> tuple[SSAValue, SSAValue, SSAValue]:
        """gate, up, down."""
        return self.gate, self.up, self.down

    @property
    def biases(self) -> tuple[SSAValue, ...]:
        """Those of gate, up and down; empty where there are none."""
        return tuple(bias for bias in (self.gate_bias, self.up_bias, self.down_bias) if bias is not None)

    def infer(self) -> Sequence[Attribute]:
        kind, routing = activation_type(self.x, "x"), activation_type(self.routing, "the routing")
        dtype, hidden = kind.element_type, kind.get_shape()[1]
        stacks = [stack_type(value, "the weight", dtype) for value in self.stacks]
        experts, inner, _ = stacks[0].get_shape()
        shapes = ((experts, inner, hidden), (experts, inner, hidden), (experts, hidden, inner))
        for stack, shape in zip(stacks, shapes, strict=True):
            require(stack.get_shape() == shape, "a weight is {} where {} is due", stack, shape)
        require(len(self.biases) in (0, 3), "gate, up and down have biases, or none of them")
        for value, shape in zip(self.biases, shapes, strict=False):
            wanted = tensor(shape[:2], dtype)
            require(weight_type(value, "a bias", 2) == wanted, "a bias is {} where {} is due", value.type, wanted)
        wanted = tokens_by(experts, Float32Type())
        require(routing == wanted, "the routing is {} where {} is due", routing, wanted)
        chosen = self.experts_per_token.value.data
        require(0 < chosen <= experts, "{} of {} experts cannot be chosen", chosen, experts)
        self._check_activation()
        return (kind,)

    def _check_activation(self) -> None:
        activation, known = self.activation.data, (*ACTIVATIONS, CLAMPED)
        require(activation in known, "activation is one of {}, not {}", ", ".join(known), activation)
        for name in ("alpha", "limit"):
            value = number(getattr(self, name))
            require(
                (value is not None) == (activation == CLAMPED), "{} is given for {} and for no other", name, CLAMPED
            )
            if value is not None:
                require_positive(value, name)

    def activate(self, gate: Float64, up: Float64) -> Float64:
        """What the last matrix takes."""
        if self.alpha is not None and self.limit is not None:
            return clamped_swiglu(gate, up, self.alpha.value.data, self.limit.value.data)
        return ACTIVATIONS[self.activation.data](gate, up)

    def oracle(self, *operands: Any) -> tuple[Float64, ...]:
        x, routing, gate, up, down, *biases = operands
        none = np.zeros((len(gate), 1))
        gate_bias, up_bias, down_bias = biases or (none, none, none)
        out = np.zeros_like(x)
        for e in range(len(gate)):
            rows = np.flatnonzero(routing[:, e])
            inner = self.activate(x[rows] @ gate[e].T + gate_bias[e], x[rows] @ up[e].T + up_bias[e])
            out[rows] += routing[rows, e, None] * (inner @ down[e].T + down_bias[e])
        return (out,)

    def distinct(self, tokens: int) -> float:
        """Experts that some token is expected to choose, if each chooses at random: E (1 - (1 - k / E)^tokens)."""
        experts = tensor_type(self.gate, "gate", 3).get_shape()[0]
        return experts * (1.0 - (1.0 - self.experts_per_token.value.data / experts) ** tokens)

    def cost(self, step: Step) -> Cost:
        kind, stacks = tensor_type(self.x, "x", 2), [tensor_type(value, "it", 3) for value in self.stacks]
        experts, inner, hidden = stacks[0].get_shape()
        size, pairs = dtype_bytes(kind.element_type), step.tokens * self.experts_per_token.value.data
        held = sum(map(tensor_bytes, stacks)) + (2 * inner + hidden) * experts * size * bool(self.biases)
        return Cost(
            pairs * (6.0 * inner * hidden + 5.0 * inner + 2.0 * hidden),
            held * self.distinct(step.tokens) / experts,
            2.0 * step.tokens * hidden * size + 4.0 * step.tokens * experts + 3.0 * pairs * inner * size,
        )
