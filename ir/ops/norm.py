"""`plait.rms_norm`, `plait.add_rms_norm`, its fusion with the residual add before it, and `plait.layer_norm`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

import numpy as np
from xdsl.dialects.builtin import TensorType
from xdsl.ir import Attribute, SSAValue
from xdsl.irdl import irdl_op_definition, operand_def, opt_operand_def, opt_prop_def, prop_def, result_def

from plait.ir.facts import Cost, Step
from plait.ir.numbers import round_to
from plait.ir.ops.base import (
    FORMAT,
    F64Attr,
    Float64,
    I64Attr,
    PlaitOp,
    activation_type,
    number,
    properties,
    require,
    require_positive,
    tensor_type,
    weight_type,
)
from plait.ir.types import Tensor, dtype_bytes, tensor_bytes


def _normed(x: SSAValue, weight: SSAValue, eps: F64Attr, group: I64Attr | None = None) -> Tensor:
    """Check x (tokens, hidden) against weight (hidden), or (group), and give x's type."""
    kind, scale = activation_type(x, "x"), weight_type(weight, "the weight", 1)
    width, each = kind.get_shape()[1], number(group)
    if each is not None:
        require(each > 0 and width % each == 0, "x is {}: not whole groups of {}", kind, each)
    require(scale.get_shape()[0] in (width, each or width), "x is {} but the weight is {}", kind, scale)
    require(kind.element_type == scale.element_type, "x is {} but the weight is {}", kind, scale)
    require_positive(eps.value.data, "eps")
    return kind


def _require_offset(offset: F64Attr | None) -> None:
    require(offset is None or np.isfinite(offset.value.data), "offset must be finite, not {}", number(offset))


def rms_norm(x: Float64, weight: Float64, eps: float, offset: float | None = None) -> Float64:
    """x / sqrt(mean(x^2) + eps) * (weight + offset) over the last axis (Zhang and Sennrich 2019, eq. 4)."""
    return np.asarray(x / np.sqrt(np.mean(x * x, axis=-1, keepdims=True) + eps) * (weight + (offset or 0.0)))


def layer_norm(x: Float64, weight: Float64, eps: float) -> Float64:
    """(x - mean) / sqrt(variance + eps) * weight over the last axis (Ba et al. 2016, eq. 4)."""
    apart = x - np.mean(x, axis=-1, keepdims=True)
    return np.asarray(apart / np.sqrt(np.mean(apart * apart, axis=-1, keepdims=True) + eps) * weight)


def _grouped(x: Float64, weight: Float64, group: int | None) -> tuple[Float64, Float64]:
    """x and weight with an axis of groups: (tokens, groups, group), and (groups or 1, group)."""
    each = group or x.shape[1]
    return x.reshape(len(x), -1, each), weight.reshape(-1, each)


@irdl_op_definition
class RmsNormOp(PlaitOp):
    """Root-mean-square norm over the hidden axis, one scale per feature.

    With a `group` each run of that many features (a head) is normed by itself; the weight has one scale for each
    feature of a group, the same for all groups, or one for each of the whole width. `offset` is added to the weight:
    1.0 where a checkpoint keeps the scale's distance from one (Gemma).
    """

    name = "plait.rms_norm"
    FORMULA: ClassVar[str] = "x / sqrt(mean(x^2) + eps) * (weight + offset)"

    x = operand_def(TensorType)
    weight = operand_def(TensorType)
    eps = prop_def(F64Attr)
    group = opt_prop_def(I64Attr)
    offset = opt_prop_def(F64Attr)
    result = result_def(TensorType)

    assembly_format = FORMAT

    def __init__(
        self,
        x: SSAValue,
        weight: SSAValue,
        eps: float,
        block: int | None = None,
        *,
        group: int | None = None,
        offset: float | None = None,
    ) -> None:
        super().__init__(
            operands=[x, weight],
            result_types=[x.type],
            properties=properties(eps=float(eps), group=group, offset=offset, block=block),
        )

    def infer(self) -> Sequence[Attribute]:
        _require_offset(self.offset)
        return (_normed(self.x, self.weight, self.eps, self.group),)

    def oracle(self, *operands: Any) -> tuple[Float64, ...]:
        x, weight = _grouped(operands[0], operands[1], number(self.group))
        return (rms_norm(x, weight, self.eps.value.data, number(self.offset)).reshape(operands[0].shape),)

    def cost(self, step: Step) -> Cost:
        return _norm_cost(self.x, [self.weight], 4.0, step)


@irdl_op_definition
class LayerNormOp(PlaitOp):
    """Norm to mean zero and variance one over the hidden axis, one scale and perhaps one bias per feature. `group` is
    as in `plait.rms_norm`."""

    name = "plait.layer_norm"
    FORMULA: ClassVar[str] = "(x - mean(x)) / sqrt(var(x) + eps) * weight + bias"

    x = operand_def(TensorType)
    weight = operand_def(TensorType)
    bias = opt_operand_def(TensorType)
    eps = prop_def(F64Attr)
    group = opt_prop_def(I64Attr)
    result = result_def(TensorType)

    assembly_format = FORMAT

    def __init__(
        self,
        x: SSAValue,
        weight: SSAValue,
        bias: SSAValue | None,
        eps: float,
        block: int | None = None,
        *,
        group: int | None = None,
    ) -> None:
        super().__init__(
            operands=[x, weight, bias],
            result_types=[x.type],
            properties=properties(eps=float(eps), group=group, block=block),
        )

    def infer(self) -> Sequence[Attribute]:
        if self.bias is not None:
            require(
                self.bias.type == self.weight.type, "the weight is {}, the bias {}", self.weight.type, self.bias.type
            )
            weight_type(self.bias, "the bias", 1)
        return (_normed(self.x, self.weight, self.eps, self.group),)

    def oracle(self, *operands: Any) -> tuple[Float64, ...]:
        x, weight = _grouped(operands[0], operands[1], number(self.group))
        made = layer_norm(x, weight, self.eps.value.data)
        if len(operands) > 2:
            made = made + operands[2].reshape(weight.shape)
        return (made.reshape(operands[0].shape),)

    def cost(self, step: Step) -> Cost:
        weights = [self.weight] if self.bias is None else [self.weight, self.bias]
        return _norm_cost(self.x, weights, 6.0 + len(weights), step)


def _norm_cost(x: SSAValue, weights: Sequence[SSAValue], flops: float, step: Step) -> Cost:
    kind = tensor_type(x, "x", 2)
    values, size = step.tokens * kind.get_shape()[1], dtype_bytes(kind.element_type)
    held = sum(tensor_bytes(tensor_type(weight, "the weight", 1)) for weight in weights)
    return Cost(flops * values, float(held), 2.0 * values * size)


@irdl_op_definition
class AddRmsNormOp(PlaitOp):
    """s = x + y, rounded to its type; result = rms_norm(s), with its `offset`. Both are results: s is the residual
    stream."""

    name = "plait.add_rms_norm"
    FORMULA: ClassVar[str] = "sum = round(x + y); normed = rms_norm(sum, weight)"

    x = operand_def(TensorType)
    y = operand_def(TensorType)
    weight = operand_def(TensorType)
    eps = prop_def(F64Attr)
    offset = opt_prop_def(F64Attr)
    sum = result_def(TensorType)
    normed = result_def(TensorType)

    assembly_format = FORMAT

    def __init__(
        self,
        x: SSAValue,
        y: SSAValue,
        weight: SSAValue,
        eps: float,
        block: int | None = None,
        *,
        offset: float | None = None,
    ) -> None:
        super().__init__(
            operands=[x, y, weight],
            result_types=[x.type, x.type],
            properties=properties(eps=float(eps), offset=offset, block=block),
        )

    def infer(self) -> Sequence[Attribute]:
        _require_offset(self.offset)
        kind = _normed(self.x, self.weight, self.eps)
        require(kind == self.y.type, "x is {} but y is {}", kind, self.y.type)
        return (kind, kind)

    def oracle(self, *operands: Any) -> tuple[Float64, ...]:
        # The sum is rounded before it is normed.
        total = round_to(operands[0] + operands[1], tensor_type(self.x, "x", 2).element_type)
        return total, rms_norm(total, operands[2], self.eps.value.data, number(self.offset))

    def cost(self, step: Step) -> Cost:
        kind = tensor_type(self.x, "x", 2)
        hidden, size = kind.get_shape()[1], dtype_bytes(kind.element_type)
        return Cost(5.0 * step.tokens * hidden, hidden * size, 4.0 * step.tokens * hidden * size)
