"""`plait.rope`: rotary position embedding of every head of q or k."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

import numpy as np
from xdsl.dialects.builtin import ArrayAttr, StringAttr, TensorType
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
    number,
    properties,
    require,
    tensor_type,
)
from plait.ir.rope import PARAMETERS, Rope, tables
from plait.ir.types import BatchType, dtype_bytes

#: Parameters that are whole numbers, as `Rope` has them.
_WHOLE = ("original_positions", "truncate")


@irdl_op_definition
class RopeOp(PlaitOp):
    """Rotate pairs (i, i + rotary_dim / 2) of each head by position x frequency: the "rotate half" order of Hugging
    Face checkpoints. Interleaved rows are put into this order when they are read. Of a head only the first `rotary_dim`
    features turn; absent, all of them. cos and sin are multiplied by `attention_factor`, where there is one."""

    name = "plait.rope"
    FORMULA: ClassVar[str] = "(a, b) -> (a cos - b sin, b cos + a sin), pairs (i, i + rotary_dim/2)"

    x = operand_def(TensorType)
    batch = operand_def(BatchType)
    head_dim = prop_def(I64Attr)
    rotary_dim = opt_prop_def(I64Attr)
    kind = prop_def(StringAttr)
    theta = prop_def(F64Attr)
    factor = opt_prop_def(F64Attr)
    low_freq_factor = opt_prop_def(F64Attr)
    high_freq_factor = opt_prop_def(F64Attr)
    beta_fast = opt_prop_def(F64Attr)
    beta_slow = opt_prop_def(F64Attr)
    original_positions = opt_prop_def(I64Attr)
    truncate = opt_prop_def(I64Attr)
    factors = opt_prop_def(ArrayAttr[F64Attr])
    attention_factor = opt_prop_def(F64Attr)
    result = result_def(TensorType)

    assembly_format = FORMAT

    def __init__(
        self,
        x: SSAValue,
        batch: SSAValue,
        head_dim: int,
        rope: Rope,
        block: int | None = None,
        rotary_dim: int | None = None,
    ) -> None:
        given = {name: getattr(rope, name) for name in PARAMETERS}
        super().__init__(
            operands=[x, batch],
            result_types=[x.type],
            properties=properties(
                head_dim=head_dim,
                rotary_dim=rotary_dim,
                kind=rope.kind,
                theta=float(rope.theta),
                block=block,
                **{name: _exact(name, value) for name, value in given.items()},
            ),
        )

    @property
    def rope(self) -> Rope:
        """The parameters as one value."""
        factors = None if self.factors is None else tuple(factor.value.data for factor in self.factors)
        given = {name: number(getattr(self, name)) for name in PARAMETERS if name != "factors"}
        return Rope(theta=self.theta.value.data, kind=self.kind.data, factors=factors, **given)  # type: ignore[arg-type]

    @property
    def rotated(self) -> int:
        """Features of a head that turn."""
        return self.head_dim.value.data if self.rotary_dim is None else self.rotary_dim.value.data

    def infer(self) -> Sequence[Attribute]:
        kind, head_dim, rotated = activation_type(self.x, "x"), self.head_dim.value.data, self.rotated
        require(head_dim > 0, "head_dim must be positive, not {}", head_dim)
        what = "head_dim" if self.rotary_dim is None else "rotary_dim"
        require(rotated > 0 and rotated % 2 == 0, "{} must be even, not {}", what, rotated)
        require(rotated <= head_dim, "{} of {} features cannot turn", rotated, head_dim)
        require(kind.get_shape()[1] % head_dim == 0, "x is {}: not whole heads of {}", kind, head_dim)
        rope = self.rope
        problem = rope.problem()
        require(problem is None, "{}", problem)
        count = len(rope.factors or ())
        require(rope.factors is None or count == rotated // 2, "{} factors for {} pairs", count, rotated // 2)
        return (kind,)

    def oracle(self, *operands: Any) -> tuple[Float64, ...]:
        x: Float64 = operands[0]
        batch: BatchFacts = operands[1]
        cos, sin = (table[:, None, :] for table in tables(self.rope, self.rotated, batch.positions))
        heads = x.reshape(len(x), -1, self.head_dim.value.data)
        a, b = np.split(heads[..., : self.rotated], 2, axis=-1)
        rotated = (a * cos - b * sin, b * cos + a * sin, heads[..., self.rotated :])
        return (np.concatenate(rotated, axis=-1).reshape(x.shape),)

    def cost(self, step: Step) -> Cost:
        kind = tensor_type(self.x, "x", 2)
        values = step.tokens * kind.get_shape()[1]
        turned = values * self.rotated / self.head_dim.value.data
        return Cost(3.0 * turned, 0.0, 2.0 * values * dtype_bytes(kind.element_type))


def _exact(name: str, value: Any) -> Any:
    """A parameter in its property's type."""
    if value is None or name in _WHOLE:
        return value
    return tuple(map(float, value)) if isinstance(value, tuple) else float(value)
