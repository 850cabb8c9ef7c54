"""`plait.weight`: a tensor of the checkpoint, by name."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

from xdsl.dialects.builtin import StringAttr, TensorType
from xdsl.ir import Attribute
from xdsl.irdl import irdl_op_definition, prop_def, result_def

from plait.ir.facts import Cost, Step
from plait.ir.ops.base import Float64, PlaitOp, properties, require, require_dtype
from plait.ir.types import Quant, Tensor


@irdl_op_definition
class WeightOp(PlaitOp):
    """A reference to a tensor of the checkpoint. The IR never holds its bytes; `weights.json` says where they lie.

    A quantised tensor (element type `!plait.quant`) is one weight with its scales, zeros and minima; what uses it takes
    the dequantised values. A weight op costs nothing itself: the op that uses it counts its bytes.
    """

    name = "plait.weight"
    FORMULA: ClassVar[str] = "the checkpoint's tensor, cast to the result's element type; exact where quantised"

    symbol = prop_def(StringAttr)
    result = result_def(TensorType)

    assembly_format = "$symbol attr-dict `:` type($result)"

    def __init__(self, symbol: str, kind: Tensor, block: int | None = None) -> None:
        super().__init__(result_types=[kind], properties=properties(symbol=symbol, block=block))

    def infer(self) -> Sequence[Attribute]:
        kind = self.result.type
        assert isinstance(kind, TensorType)
        # xDSL reads a literal that is not ASCII as bytes, no longer as text.
        require(bool(self.symbol.data) and self.symbol.data.isascii(), "a weight has a name in ASCII")
        require(all(dim > 0 for dim in kind.get_shape()), "a weight has a static, non-empty shape, not {}", kind)
        if isinstance(kind.element_type, Quant):
            problem = kind.element_type.problem(kind.get_shape())
            require(problem is None, "{}: {}", kind, problem)
        else:
            require_dtype(kind, "the weight")
        return (kind,)

    def oracle(self, *operands: Any) -> tuple[Float64, ...]:
        raise AssertionError("the interpreter looks weights up by name")

    def cost(self, step: Step) -> Cost:
        return Cost()
