"""`plait.linear`, and `plait.linears`: several that share their input, in one."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

from xdsl.dialects.builtin import TensorType
from xdsl.ir import Attribute, SSAValue
from xdsl.irdl import (
    AttrSizedOperandSegments,
    ParsePropInAttrDict,
    irdl_op_definition,
    operand_def,
    opt_operand_def,
    result_def,
    var_operand_def,
    var_result_def,
)

from plait.ir.facts import Cost, Step
from plait.ir.ops.base import (
    FORMAT,
    Float64,
    PlaitOp,
    activation_type,
    matrix_type,
    properties,
    require,
    tensor_type,
    weight_type,
)
from plait.ir.types import Tensor, dtype_bytes, tensor_bytes, tokens_by


def _product(x: SSAValue, weight: SSAValue, bias: SSAValue | None) -> Tensor:
    """The type of x (tokens, in) times weight (out, in) transposed, plus bias (out)."""
    kind = activation_type(x, "x")
    matrix = matrix_type(weight, "the weight", kind.element_type)
    out, inner = matrix.get_shape()
    require(kind.get_shape()[1] == inner, "x is {} but the weight is {} (out, in)", kind, matrix)
    if bias is not None:
        offset = weight_type(bias, "the bias", 1)
        require(offset.get_shape()[0] == out, "the weight is {} (out, in) but the bias is {}", matrix, offset)
        require(offset.element_type == kind.element_type, "x is {} but the bias is {}", kind, offset)
    return tokens_by(out, kind.element_type)


def _product_cost(x: SSAValue, weight: SSAValue, biased: bool, step: Step) -> Cost:
    """Flops, and bytes of the weight and of the product; the input is counted by the op."""
    matrix = tensor_type(weight, "the weight", 2)
    out, inner = matrix.get_shape()
    size = dtype_bytes(tensor_type(x, "x", 2).element_type)
    return Cost(
        2.0 * step.tokens * out * inner + (step.tokens * out if biased else 0),
        float(tensor_bytes(matrix) + (out * size if biased else 0)),
        float(step.tokens * out * size),
    )


def _input_cost(x: SSAValue, step: Step) -> Cost:
    kind = tensor_type(x, "x", 2)
    return Cost(activation_bytes=float(step.tokens * kind.get_shape()[1] * dtype_bytes(kind.element_type)))


@irdl_op_definition
class LinearOp(PlaitOp):
    """y = x weight^T + bias; weight is (out, in)."""

    name = "plait.linear"
    FORMULA: ClassVar[str] = "y = x weight^T + bias"

    x = operand_def(TensorType)
    weight = operand_def(TensorType)
    bias = opt_operand_def(TensorType)
    result = result_def(TensorType)

    assembly_format = FORMAT

    def __init__(self, x: SSAValue, weight: SSAValue, bias: SSAValue | None = None, block: int | None = None) -> None:
        kind, matrix = tensor_type(x, "x", 2), tensor_type(weight, "the weight", 2)
        super().__init__(
            operands=[x, weight, bias],
            result_types=[tokens_by(matrix.get_shape()[0], kind.element_type)],
            properties=properties(block=block),
        )

    def infer(self) -> Sequence[Attribute]:
        return (_product(self.x, self.weight, self.bias),)

    def oracle(self, *operands: Any) -> tuple[Float64, ...]:
        x, weight, *bias = operands
        return (x @ weight.T + (bias[0] if bias else 0.0),)

    def cost(self, step: Step) -> Cost:
        return _input_cost(self.x, step) + _product_cost(self.x, self.weight, self.bias is not None, step)


@irdl_op_definition
class LinearsOp(PlaitOp):
    """Several linears on one input (q, k, v or gate, up): the input is read once, one wide matrix product does all.

    Either every weight has a bias or none has.
    """

    name = "plait.linears"
    FORMULA: ClassVar[str] = "y_i = x weight_i^T + bias_i"

    x = operand_def(TensorType)
    weights = var_operand_def(TensorType)
    biases = var_operand_def(TensorType)
    products = var_result_def(TensorType)

    irdl_options = (AttrSizedOperandSegments(as_property=True), ParsePropInAttrDict())

    assembly_format = (
        "$x `weights` `(` $weights `:` type($weights) `)` (`biases` `(` $biases^ `:` type($biases) `)`)? "
        "attr-dict `:` type($x) `->` type($products)"
    )

    def __init__(
        self, x: SSAValue, weights: Sequence[SSAValue], biases: Sequence[SSAValue] = (), block: int | None = None
    ) -> None:
        kind = tensor_type(x, "x", 2)
        outs = [tensor_type(weight, "the weight", 2).get_shape()[0] for weight in weights]
        super().__init__(
            operands=[x, list(weights), list(biases)],
            result_types=[[tokens_by(out, kind.element_type) for out in outs]],
            properties=properties(block=block),
        )

    def _bias(self, index: int) -> SSAValue | None:
        return self.biases[index] if self.biases else None

    def infer(self) -> Sequence[Attribute]:
        require(len(self.weights) > 0, "at least one weight")
        require(len(self.biases) in (0, len(self.weights)), "either every weight has a bias or none has")
        return tuple(_product(self.x, weight, self._bias(i)) for i, weight in enumerate(self.weights))

    def oracle(self, *operands: Any) -> tuple[Float64, ...]:
        count = len(self.weights)
        x, weights, biases = operands[0], operands[1 : 1 + count], operands[1 + count :]
        offsets = biases or (0.0,) * count
        return tuple(x @ weight.T + offset for weight, offset in zip(weights, offsets, strict=True))

    def cost(self, step: Step) -> Cost:
        total = _input_cost(self.x, step)
        for weight in self.weights:
            total = total + _product_cost(self.x, weight, bool(self.biases), step)
        return total
