"""`plait.logits`: scores over the vocabulary for the rows the step asks for."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

import numpy as np
from xdsl.dialects.builtin import Float32Type, TensorType
from xdsl.ir import Attribute, SSAValue
from xdsl.irdl import irdl_op_definition, operand_def, opt_prop_def, result_def

from plait.ir.facts import Cost, Step
from plait.ir.ops.base import (
    FORMAT,
    BatchFacts,
    F64Attr,
    Float64,
    PlaitOp,
    activation_type,
    matrix_type,
    number,
    properties,
    require,
    require_positive,
    tensor_type,
)
from plait.ir.types import BatchType, dtype_bytes, tensor_bytes, tokens_by


@irdl_op_definition
class LogitsOp(PlaitOp):
    """float32 scores x[batch.logit_rows] weight^T; weight is (vocabulary, hidden), perhaps the embedding's table.

    They are multiplied by `scale`, and with a `softcap` c they then become c * tanh(score / c). Absent is off.
    """

    name = "plait.logits"
    FORMULA: ClassVar[str] = "cap(scale x[logit_rows] weight^T), in float32"

    x = operand_def(TensorType)
    weight = operand_def(TensorType)
    batch = operand_def(BatchType)
    scale = opt_prop_def(F64Attr)
    softcap = opt_prop_def(F64Attr)
    result = result_def(TensorType)

    assembly_format = FORMAT

    def __init__(
        self,
        x: SSAValue,
        weight: SSAValue,
        batch: SSAValue,
        block: int | None = None,
        *,
        scale: float | None = None,
        softcap: float | None = None,
    ) -> None:
        matrix = tensor_type(weight, "the weight", 2)
        super().__init__(
            operands=[x, weight, batch],
            result_types=[tokens_by(matrix.get_shape()[0], Float32Type())],
            properties=properties(scale=scale, softcap=softcap, block=block),
        )

    def infer(self) -> Sequence[Attribute]:
        kind = activation_type(self.x, "x")
        matrix = matrix_type(self.weight, "the weight", kind.element_type)
        require(kind.get_shape()[1] == matrix.get_shape()[1], "x is {} but the weight is {} (out, in)", kind, matrix)
        for name in ("scale", "softcap"):
            if (value := number(getattr(self, name))) is not None:
                require_positive(value, f"{name} (leave it out for none)")
        return (tokens_by(matrix.get_shape()[0], Float32Type()),)

    def oracle(self, *operands: Any) -> tuple[Float64, ...]:
        x, weight = operands[0], operands[1]
        batch: BatchFacts = operands[2]
        scores: Float64 = x[batch.logit_rows] @ weight.T * (1.0 if self.scale is None else self.scale.value.data)
        if self.softcap is not None:
            cap = self.softcap.value.data
            scores = cap * np.tanh(scores / cap)
        return (scores,)

    def cost(self, step: Step) -> Cost:
        matrix = tensor_type(self.weight, "the weight", 2)
        vocabulary, hidden = matrix.get_shape()
        size = dtype_bytes(tensor_type(self.x, "x", 2).element_type)
        return Cost(
            2.0 * step.logit_rows * vocabulary * hidden,
            float(tensor_bytes(matrix)) if step.logit_rows else 0.0,
            step.logit_rows * (hidden * size + 4.0 * vocabulary),
        )
