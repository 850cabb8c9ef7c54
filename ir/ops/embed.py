"""`plait.embed`: token ids to rows of a table; `plait.embed_positions`: positions to rows of one."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

import numpy as np
from xdsl.dialects.builtin import TensorType
from xdsl.ir import Attribute, SSAValue
from xdsl.irdl import irdl_op_definition, operand_def, result_def

from plait.ir.facts import Cost, Step
from plait.ir.ops.base import (
    FORMAT,
    BatchFacts,
    Float64,
    PlaitOp,
    activation_type,
    matrix_type,
    properties,
    require_dtype,
    tensor_type,
    weight_type,
)
from plait.ir.types import BatchType, Quant, dtype_bytes, tensor_bytes, tokens_by


@irdl_op_definition
class EmbedOp(PlaitOp):
    """x[t] = table[batch.tokens[t]]; table is (vocabulary, hidden). The rows have the dtype of the table, or of the
    result where the table is quantised."""

    name = "plait.embed"
    FORMULA: ClassVar[str] = "x[t] = table[tokens[t]]"

    table = operand_def(TensorType)
    batch = operand_def(BatchType)
    result = result_def(TensorType)

    assembly_format = FORMAT

    def __init__(self, table: SSAValue, batch: SSAValue, dtype: Attribute, block: int | None = None) -> None:
        width = tensor_type(table, "the table", 2).get_shape()[1]
        super().__init__(
            operands=[table, batch], result_types=[tokens_by(width, dtype)], properties=properties(block=block)
        )

    def infer(self) -> Sequence[Attribute]:
        kind = matrix_type(self.table, "the table")
        dtype = kind.element_type
        if isinstance(dtype, Quant):
            dtype = activation_type(self.result, "the result").element_type
        return (tokens_by(kind.get_shape()[1], dtype),)

    def oracle(self, *operands: Any) -> tuple[Float64, ...]:
        table: Float64 = operands[0]
        batch: BatchFacts = operands[1]
        assert (np.asarray(batch.tokens) >= 0).all(), "NumPy would count a negative token id from the end"
        return (table[batch.tokens],)

    def cost(self, step: Step) -> Cost:
        table, out = tensor_type(self.table, "the table", 2), tensor_type(self.result, "the result", 2)
        return Cost(
            weight_bytes=step.tokens * tensor_bytes(table) / table.get_shape()[0],
            activation_bytes=float(step.tokens * out.get_shape()[1] * dtype_bytes(out.element_type)),
        )


@irdl_op_definition
class EmbedPositionsOp(PlaitOp):
    """x[t] = table[batch.positions[t]]: learned positions; table is (positions, hidden), of the dtype of its rows."""

    name = "plait.embed_positions"
    FORMULA: ClassVar[str] = "x[t] = table[positions[t]]"

    table = operand_def(TensorType)
    batch = operand_def(BatchType)
    result = result_def(TensorType)

    assembly_format = FORMAT

    def __init__(self, table: SSAValue, batch: SSAValue, block: int | None = None) -> None:
        kind = tensor_type(table, "the table", 2)
        made = tokens_by(kind.get_shape()[1], kind.element_type)
        super().__init__(operands=[table, batch], result_types=[made], properties=properties(block=block))

    def infer(self) -> Sequence[Attribute]:
        kind = weight_type(self.table, "the table", 2)
        require_dtype(kind, "the table")
        return (tokens_by(kind.get_shape()[1], kind.element_type),)

    def oracle(self, *operands: Any) -> tuple[Float64, ...]:
        table: Float64 = operands[0]
        batch: BatchFacts = operands[1]
        return (table[batch.positions],)

    def cost(self, step: Step) -> Cost:
        out = tensor_type(self.result, "the result", 2)
        moved = float(step.tokens * out.get_shape()[1] * dtype_bytes(out.element_type))
        return Cost(weight_bytes=moved, activation_bytes=moved)
