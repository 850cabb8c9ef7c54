"""`plait.rms_norm`, and `plait.add_rms_norm`, its fusion with the residual add before it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

import numpy as np
from xdsl.dialects.builtin import TensorType
from xdsl.ir import Attribute, SSAValue
from xdsl.irdl import irdl_op_definition, operand_def, prop_def, result_def

from plait.ir.facts import Cost, Step
from plait.ir.numbers import round_to
from plait.ir.ops.base import (
    FORMAT,
    F64Attr,
    Float64,
    PlaitOp,
    activation_type,
    properties,
    require,
    require_positive,
    tensor_type,
    weight_type,
)
from plait.ir.types import Tensor, dtype_bytes


def _normed(x: SSAValue, weight: SSAValue, eps: F64Attr) -> Tensor:
    """Check x (tokens, hidden) against weight (hidden) and give x's type."""
    kind, scale = activation_type(x, "x"), weight_type(weight, "the weight", 1)
    require(kind.get_shape()[1] == scale.get_shape()[0], "x is {} but the weight is {}", kind, scale)
    require(kind.element_type == scale.element_type, "x is {} but the weight is {}", kind, scale)
    require_positive(eps.value.data, "eps")
    return kind


def rms_norm(x: Float64, weight: Float64, eps: float) -> Float64:
    """x / sqrt(mean(x^2) + eps) * weight over the last axis (Zhang and Sennrich 2019, eq. 4)."""
    return np.asarray(x / np.sqrt(np.mean(x * x, axis=-1, keepdims=True) + eps) * weight)


@irdl_op_definition
class RmsNormOp(PlaitOp):
    """Root-mean-square norm over the hidden axis, one scale per feature."""

    name = "plait.rms_norm"
    FORMULA: ClassVar[str] = "x / sqrt(mean(x^2) + eps) * weight"

    x = operand_def(TensorType)
    weight = operand_def(TensorType)
    eps = prop_def(F64Attr)
    result = result_def(TensorType)

    assembly_format = FORMAT

    def __init__(self, x: SSAValue, weight: SSAValue, eps: float, block: int | None = None) -> None:
        super().__init__(
            operands=[x, weight], result_types=[x.type], properties=properties(eps=float(eps), block=block)
        )

    def infer(self) -> Sequence[Attribute]:
        return (_normed(self.x, self.weight, self.eps),)

    def oracle(self, *operands: Any) -> tuple[Float64, ...]:
        return (rms_norm(operands[0], operands[1], self.eps.value.data),)

    def cost(self, step: Step) -> Cost:
        kind = tensor_type(self.x, "x", 2)
        hidden, size = kind.get_shape()[1], dtype_bytes(kind.element_type)
        return Cost(4.0 * step.tokens * hidden, hidden * size, 2.0 * step.tokens * hidden * size)


@irdl_op_definition
class AddRmsNormOp(PlaitOp):
    """s = x + y, rounded to its type; result = rms_norm(s). Both are results: s is the residual stream."""

    name = "plait.add_rms_norm"
    FORMULA: ClassVar[str] = "sum = round(x + y); normed = rms_norm(sum, weight)"

    x = operand_def(TensorType)
    y = operand_def(TensorType)
    weight = operand_def(TensorType)
    eps = prop_def(F64Attr)
    sum = result_def(TensorType)
    normed = result_def(TensorType)

    assembly_format = FORMAT

    def __init__(self, x: SSAValue, y: SSAValue, weight: SSAValue, eps: float, block: int | None = None) -> None:
        super().__init__(
            operands=[x, y, weight],
            result_types=[x.type, x.type],
            properties=properties(eps=float(eps), block=block),
        )

    def infer(self) -> Sequence[Attribute]:
        kind = _normed(self.x, self.weight, self.eps)
        require(kind == self.y.type, "x is {} but y is {}", kind, self.y.type)
        return (kind, kind)

    def oracle(self, *operands: Any) -> tuple[Float64, ...]:
        # The sum is rounded before it is normed.
        total = round_to(operands[0] + operands[1], tensor_type(self.x, "x", 2).element_type)
        return total, rms_norm(total, operands[2], self.eps.value.data)

    def cost(self, step: Step) -> Cost:
        kind = tensor_type(self.x, "x", 2)
        hidden, size = kind.get_shape()[1], dtype_bytes(kind.element_type)
        return Cost(5.0 * step.tokens * hidden, hidden * size, 4.0 * step.tokens * hidden * size)
