"""`plait.rope`: rotary position embedding of every head of q or k."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

import numpy as np
from xdsl.dialects.builtin import StringAttr, TensorType
from xdsl.ir import Attribute, SSAValue
from xdsl.irdl import irdl_op_definition, operand_def, opt_prop_def, prop_def, result_def

from plait.ir.facts import Cost, Step
from plait.ir.ops.base import (
    FORMAT,
    BatchFacts,
    F64Attr,
    Float64,
    I64Attr,
    PlaitOp,
    activation_type,
    properties,
    require,
    tensor_type,
)
from plait.ir.rope import Rope, angles
from plait.ir.types import BatchType, dtype_bytes


@irdl_op_definition
class RopeOp(PlaitOp):
    """Rotate pairs (i, i + head_dim / 2) of each head by position x frequency: the "rotate half" order of Hugging Face
    checkpoints. GGUF's interleaved rows are put into this order when they are read."""

    name = "plait.rope"
    FORMULA: ClassVar[str] = "(a, b) -> (a cos - b sin, b cos + a sin), pairs (i, i + head_dim/2)"

    x = operand_def(TensorType)
    batch = operand_def(BatchType)
    head_dim = prop_def(I64Attr)
    kind = prop_def(StringAttr)
    theta = prop_def(F64Attr)
    factor = opt_prop_def(F64Attr)
    low_freq_factor = opt_prop_def(F64Attr)
    high_freq_factor = opt_prop_def(F64Attr)
    original_positions = opt_prop_def(I64Attr)
    result = result_def(TensorType)

    assembly_format = FORMAT

    def __init__(self, x: SSAValue, batch: SSAValue, head_dim: int, rope: Rope, block: int | None = None) -> None:
        def number(value: float | None) -> float | None:
            return None if value is None else float(value)

        super().__init__(
            operands=[x, batch],
            result_types=[x.type],
            properties=properties(
                head_dim=head_dim,
                kind=rope.kind,
                theta=float(rope.theta),
                factor=number(rope.factor),
                low_freq_factor=number(rope.low_freq_factor),
                high_freq_factor=number(rope.high_freq_factor),
                original_positions=rope.original_positions,
                block=block,
            ),
        )

    @property
    def rope(self) -> Rope:
        """The parameters as one value."""

        def number(attr: F64Attr | None) -> float | None:
            return None if attr is None else attr.value.data

        return Rope(
            theta=self.theta.value.data,
            kind=self.kind.data,  # type: ignore[arg-type]  # `infer` refuses unknown kinds
            factor=number(self.factor),
            low_freq_factor=number(self.low_freq_factor),
            high_freq_factor=number(self.high_freq_factor),
            original_positions=None if self.original_positions is None else self.original_positions.value.data,
        )

    def infer(self) -> Sequence[Attribute]:
        kind, head_dim = activation_type(self.x, "x"), self.head_dim.value.data
        require(head_dim > 0 and head_dim % 2 == 0, "head_dim must be even, not {}", head_dim)
        require(kind.get_shape()[1] % head_dim == 0, "x is {}: not whole heads of {}", kind, head_dim)
        problem = self.rope.problem()
        require(problem is None, "{}", problem)
        return (kind,)

    def oracle(self, *operands: Any) -> tuple[Float64, ...]:
        x: Float64 = operands[0]
        batch: BatchFacts = operands[1]
        head_dim = self.head_dim.value.data
        angle = angles(self.rope, head_dim, batch.positions).astype(np.float64)[:, None, :]
        a, b = np.split(x.reshape(len(x), -1, head_dim), 2, axis=-1)
        rotated = np.concatenate(
            (a * np.cos(angle) - b * np.sin(angle), b * np.cos(angle) + a * np.sin(angle)), axis=-1
        )
        return (rotated.reshape(x.shape),)

    def cost(self, step: Step) -> Cost:
        kind = tensor_type(self.x, "x", 2)
        values = step.tokens * kind.get_shape()[1]
        return Cost(3.0 * values, 0.0, 2.0 * values * dtype_bytes(kind.element_type))
