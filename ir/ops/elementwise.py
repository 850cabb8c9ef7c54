"""`plait.silu_mul`, `plait.gelu_mul`, `plait.add`; of one tensor `plait.gelu` and `plait.scale`."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, ClassVar

import numpy as np
from xdsl.dialects.builtin import StringAttr, TensorType
from xdsl.ir import Attribute, SSAValue
from xdsl.irdl import irdl_op_definition, operand_def, prop_def, result_def

from plait.ir.facts import Cost, Step
from plait.ir.ops.base import FORMAT, F64Attr, Float64, PlaitOp, activation_type, properties, require, tensor_type
from plait.ir.types import dtype_bytes


class _Binary(PlaitOp):
    """Two tensors (tokens, width) of one type in, one out."""

    x = operand_def(TensorType)
    y = operand_def(TensorType)
    result = result_def(TensorType)

    assembly_format = FORMAT

    def __init__(self, x: SSAValue, y: SSAValue, block: int | None = None, **own: str) -> None:
        super().__init__(operands=[x, y], result_types=[x.type], properties=properties(block=block, **own))

    def flops(self) -> float:
        """Flops per value."""
        return 1.0

    def infer(self) -> Sequence[Attribute]:
        kind = activation_type(self.x, "x")
        require(kind == self.y.type, "x is {} but y is {}", kind, self.y.type)
        return (kind,)

    def cost(self, step: Step) -> Cost:
        kind = tensor_type(self.x, "x", 2)
        values = step.tokens * kind.get_shape()[1]
        return Cost(self.flops() * values, 0.0, 3.0 * values * dtype_bytes(kind.element_type))


@irdl_op_definition
class SiluMulOp(_Binary):
    """silu(gate) * up, with silu(z) = z / (1 + exp(-z)) (Shazeer 2020, SwiGLU)."""

    name = "plait.silu_mul"
    FORMULA: ClassVar[str] = "x / (1 + exp(-x)) * y"

    def flops(self) -> float:
        return 5.0

    def oracle(self, *operands: Any) -> tuple[Float64, ...]:
        gate, up = operands
        return (gate * sigmoid(gate) * up,)


def sigmoid(z: Float64) -> Float64:
    # 1 / (1 + exp(-z)) as exp(-log(1 + exp(-z))): no overflow, and no cancellation far to the left.
    return np.asarray(np.exp(-np.logaddexp(0.0, -z)))


def _normal_cdf(z: Float64) -> Float64:
    # The complement of erf keeps its digits far to the left. NumPy has neither.
    return np.asarray(np.vectorize(math.erfc, otypes=[np.float64])(-z * math.sqrt(0.5)) / 2)


#: By `approximate`: gelu(z) / z, and the flops of gelu_mul. 1/2 (1 + tanh u) is sigmoid(2 u).
GELU: dict[str, tuple[Callable[[Float64], Float64], float]] = {
    "none": (_normal_cdf, 6.0),
    "tanh": (lambda z: sigmoid(math.sqrt(8.0 / math.pi) * (z + 0.044715 * z * z * z)), 10.0),
}


@irdl_op_definition
class GeluMulOp(_Binary):
    """gelu(gate) * up. `approximate` is `none`, z times the normal distribution's cdf, or `tanh`, which is
    z / 2 (1 + tanh(sqrt(2 / pi) (z + 0.044715 z^3))) (Hendrycks and Gimpel 2016)."""

    name = "plait.gelu_mul"
    FORMULA: ClassVar[str] = "x / 2 (1 + erf(x / sqrt(2))) * y, or its approximation by tanh"

    approximate = prop_def(StringAttr)

    def __init__(self, x: SSAValue, y: SSAValue, approximate: str, block: int | None = None) -> None:
        super().__init__(x, y, block, approximate=approximate)

    def infer(self) -> Sequence[Attribute]:
        known = self.approximate.data
        require(known in GELU, "approximate is one of {}, not {}", ", ".join(GELU), known)
        return super().infer()

    def oracle(self, *operands: Any) -> tuple[Float64, ...]:
        gate, up = operands
        return (gate * GELU[self.approximate.data][0](gate) * up,)

    def flops(self) -> float:
        return GELU[self.approximate.data][1]


@irdl_op_definition
class AddOp(_Binary):
    """The residual add."""

    name = "plait.add"
    FORMULA: ClassVar[str] = "x + y"

    def oracle(self, *operands: Any) -> tuple[Float64, ...]:
        return (operands[0] + operands[1],)


class _Unary(PlaitOp):
    """A tensor (tokens, width) in, one of the same type out."""

    x = operand_def(TensorType)
    result = result_def(TensorType)

    assembly_format = FORMAT

    def __init__(self, x: SSAValue, block: int | None = None, **own: str | float) -> None:
        super().__init__(operands=[x], result_types=[x.type], properties=properties(block=block, **own))

    def flops(self) -> float:
        """Flops per value."""
        return 1.0

    def infer(self) -> Sequence[Attribute]:
        return (activation_type(self.x, "x"),)

    def cost(self, step: Step) -> Cost:
        kind = tensor_type(self.x, "x", 2)
        values = step.tokens * kind.get_shape()[1]
        return Cost(self.flops() * values, 0.0, 2.0 * values * dtype_bytes(kind.element_type))


@irdl_op_definition
class GeluOp(_Unary):
    """gelu(x), of an MLP without a gate. `approximate` as in `plait.gelu_mul`."""

    name = "plait.gelu"
    FORMULA: ClassVar[str] = "x / 2 (1 + erf(x / sqrt(2))), or its approximation by tanh"

    approximate = prop_def(StringAttr)

    def __init__(self, x: SSAValue, approximate: str, block: int | None = None) -> None:
        super().__init__(x, block, approximate=approximate)

    def infer(self) -> Sequence[Attribute]:
        known = self.approximate.data
        require(known in GELU, "approximate is one of {}, not {}", ", ".join(GELU), known)
        return super().infer()

    def oracle(self, *operands: Any) -> tuple[Float64, ...]:
        return (operands[0] * GELU[self.approximate.data][0](operands[0]),)

    def flops(self) -> float:
        return GELU[self.approximate.data][1] - 1.0


@irdl_op_definition
class ScaleOp(_Unary):
    """x times one number: Gemma's and Granite's multipliers."""

    name = "plait.scale"
    FORMULA: ClassVar[str] = "factor x"

    factor = prop_def(F64Attr)

    def __init__(self, x: SSAValue, factor: float, block: int | None = None) -> None:
        super().__init__(x, block, factor=float(factor))

    def infer(self) -> Sequence[Attribute]:
        factor = self.factor.value.data
        require(math.isfinite(factor) and factor != 0, "factor must be finite and not 0, not {}", factor)
        return super().infer()

    def oracle(self, *operands: Any) -> tuple[Float64, ...]:
        return (operands[0] * self.factor.value.data,)
