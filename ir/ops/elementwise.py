"""`plait.silu_mul` and `plait.add`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

import numpy as np
from xdsl.dialects.builtin import TensorType
from xdsl.ir import Attribute, SSAValue
from xdsl.irdl import irdl_op_definition, operand_def, result_def

from plait.ir.facts import Cost, Step
from plait.ir.ops.base import FORMAT, Float64, PlaitOp, activation_type, properties, require, tensor_type
from plait.ir.types import dtype_bytes


class _Binary(PlaitOp):
    """Two tensors (tokens, width) of one type in, one out."""

    x = operand_def(TensorType)
    y = operand_def(TensorType)
    result = result_def(TensorType)

    assembly_format = FORMAT

    #: Flops per value.
    FLOPS: ClassVar[float] = 1.0

    def __init__(self, x: SSAValue, y: SSAValue, block: int | None = None) -> None:
        super().__init__(operands=[x, y], result_types=[x.type], properties=properties(block=block))

    def infer(self) -> Sequence[Attribute]:
        kind = activation_type(self.x, "x")
        require(kind == self.y.type, "x is {} but y is {}", kind, self.y.type)
        return (kind,)

    def cost(self, step: Step) -> Cost:
        kind = tensor_type(self.x, "x", 2)
        values = step.tokens * kind.get_shape()[1]
        return Cost(self.FLOPS * values, 0.0, 3.0 * values * dtype_bytes(kind.element_type))


@irdl_op_definition
class SiluMulOp(_Binary):
    """silu(gate) * up, with silu(z) = z / (1 + exp(-z)) (Shazeer 2020, SwiGLU)."""

    name = "plait.silu_mul"
    FORMULA: ClassVar[str] = "x / (1 + exp(-x)) * y"
    FLOPS: ClassVar[float] = 5.0

    def oracle(self, *operands: Any) -> tuple[Float64, ...]:
        gate, up = operands
        # 1 / (1 + exp(-z)) as exp(-log(1 + exp(-z))): no overflow, and no cancellation far to the left.
        return (gate * np.exp(-np.logaddexp(0.0, -gate)) * up,)


@irdl_op_definition
class AddOp(_Binary):
    """The residual add."""

    name = "plait.add"
    FORMULA: ClassVar[str] = "x + y"

    def oracle(self, *operands: Any) -> tuple[Float64, ...]:
        return (operands[0] + operands[1],)
