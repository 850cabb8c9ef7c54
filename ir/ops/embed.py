"""`plait.embed`: token ids to rows of a table."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

import numpy as np
from xdsl.dialects.builtin import TensorType
from xdsl.ir import Attribute, SSAValue
from xdsl.irdl import irdl_op_definition, operand_def, result_def

from plait.ir.facts import Cost, Step
from plait.ir.ops.base import FORMAT, BatchFacts, Float64, PlaitOp, properties, tensor_type, weight_type
from plait.ir.types import BatchType, dtype_bytes, tokens_by


@irdl_op_definition
class EmbedOp(PlaitOp):
    """x[t] = table[batch.tokens[t]]; table is (vocabulary, hidden)."""

    name = "plait.embed"
    FORMULA: ClassVar[str] = "x[t] = table[tokens[t]]"

    table = operand_def(TensorType)
    batch = operand_def(BatchType)
    result = result_def(TensorType)

    assembly_format = FORMAT

    def __init__(self, table: SSAValue, batch: SSAValue, block: int | None = None) -> None:
        kind = tensor_type(table, "the table", 2)
        super().__init__(
            operands=[table, batch],
            result_types=[tokens_by(kind.get_shape()[1], kind.element_type)],
            properties=properties(block=block),
        )

    def infer(self) -> Sequence[Attribute]:
        kind = weight_type(self.table, "the table", 2)
        return (tokens_by(kind.get_shape()[1], kind.element_type),)

    def oracle(self, *operands: Any) -> tuple[Float64, ...]:
        table: Float64 = operands[0]
        batch: BatchFacts = operands[1]
        assert (np.asarray(batch.tokens) >= 0).all(), "NumPy would count a negative token id from the end"
        return (table[batch.tokens],)

    def cost(self, step: Step) -> Cost:
        kind = tensor_type(self.table, "the table", 2)
        row = kind.get_shape()[1] * dtype_bytes(kind.element_type)
        return Cost(weight_bytes=step.tokens * row, activation_bytes=step.tokens * row)
