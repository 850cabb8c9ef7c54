"""What every op of the dialect brings: type rule, oracle, cost. One class, so that they cannot drift apart."""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar, Protocol

import numpy as np
from numpy.typing import NDArray
from xdsl.dialects import builtin
from xdsl.dialects.builtin import (
    DYNAMIC_INDEX,
    I64,
    ArrayAttr,
    Float64Type,
    FloatAttr,
    IntegerAttr,
    StringAttr,
    TensorType,
)
from xdsl.ir import Attribute, Operation, SSAValue
from xdsl.irdl import IRDLOperation, IRDLOption, ParsePropInAttrDict, opt_prop_def
from xdsl.utils.exceptions import VerifyException

from plait.ir.facts import Cost, Step
from plait.ir.types import DTYPES, Quant, Tensor, is_dtype

Float64 = NDArray[np.float64]
I64Attr = IntegerAttr[I64]
F64Attr = FloatAttr[Float64Type]

_F64 = Float64Type()
_DTYPES = ", ".join(map(str, DTYPES.values()))

#: Assembly format of an op with plain operands and one result.
FORMAT = "operands attr-dict `:` functional-type(operands, results)"


def i64(value: int) -> I64Attr:
    return IntegerAttr(value, builtin.i64)


def f64(value: float) -> F64Attr:
    return FloatAttr(value, _F64)


def f64s(values: Sequence[float]) -> ArrayAttr[F64Attr]:
    """No dense array: xDSL writes some numbers as their bits, and does not read those there."""
    return ArrayAttr([f64(value) for value in values])


def properties(**values: int | float | str | tuple[float, ...] | None) -> dict[str, Attribute]:
    """Python values as the ops' properties; None leaves the property out: absent means off."""
    make: dict[type, Callable[[Any], Attribute]] = {int: i64, float: f64, str: StringAttr, tuple: f64s}
    return {name: make[type(value)](value) for name, value in values.items() if value is not None}


class BatchFacts(Protocol):
    """What the oracle reads of a step; `plait.backends.base.Batch` has it."""

    tokens: Any
    positions: Any
    query_starts: Any
    kv_lens: Any
    page_tables: Mapping[str, Any]
    logit_rows: Any


class OracleKV:
    """K and V pages of one layer in float64, (page, token, kv_head, head_dim); NaN where nothing was written. Where K
    holds the values too, V is empty."""

    def __init__(
        self, pages: int, page_tokens: int, kv_heads: int, head_dim: int, v_head_dim: int | None = None
    ) -> None:
        shape = (pages, page_tokens, kv_heads)
        self.page_tokens = page_tokens
        self.k: Float64 = np.full((*shape, head_dim), np.nan)
        self.v: Float64 = np.full((*shape, head_dim if v_head_dim is None else v_head_dim), np.nan)


class PlaitOp(IRDLOperation):
    """Base of all ops. `block` is the transformer layer the op belongs to; absent before the first and after the last.

    The oracle computes in float64 on operands that are already rounded to their types; its caller rounds each result
    once to the result's type. That is the exact meaning of every op, whatever a backend does inside.
    """

    irdl_options: tuple[IRDLOption, ...] = (ParsePropInAttrDict(),)

    block = opt_prop_def(I64Attr)

    #: One line for the docs: what the op computes.
    FORMULA: ClassVar[str] = ""

    #: Of an op that one kind of backend alone can know: where to place it.
    ELSEWHERE: ClassVar[str] = ""

    @abstractmethod
    def infer(self) -> Sequence[Attribute]:
        """The result types, from operands and properties. Raises VerifyException where they contradict each other."""

    @abstractmethod
    def oracle(self, *operands: Any) -> tuple[Float64, ...]:
        """The results in float64. Batch operands are BatchFacts, KV operands OracleKV (mutated), tensors float64."""

    @abstractmethod
    def cost(self, step: Step) -> Cost:
        """Flops and bytes of one step."""

    @property
    def block_index(self) -> int | None:
        return self.block.value.data if self.block is not None else None

    def verify_(self) -> None:
        # A misspelt attribute would be carried along and ignored, and numbers would change in silence.
        require(not self.attributes, "unknown attribute {}", ", ".join(self.attributes))
        inferred = tuple(self.infer())
        actual = tuple(result.type for result in self.results)
        if inferred != actual:
            shown = [", ".join(map(str, types)) for types in (inferred, actual)]
            raise VerifyException(f"the result type should be {shown[0]}, not {shown[1]}")


def require(condition: bool, message: str, *facts: object) -> None:
    """Raise VerifyException unless `condition`. The facts go into the message's `{}` only then: printing the types of
    every sound op would take most of the verifier's time."""
    if not condition:
        raise VerifyException(message.format(*facts))


def tensor_type(value: SSAValue, what: str, rank: int) -> Tensor:
    """The type of `value`, which must be a tensor of `rank`."""
    kind = value.type
    assert isinstance(kind, TensorType), "the operand's definition says so"
    require(len(kind.get_shape()) == rank, "{} must have {} dimensions, not {}", what, rank, kind)
    return kind


def activation_type(value: SSAValue, what: str) -> Tensor:
    """The type of `value`, which must be `tensor<?xWIDTHxDTYPE>`: one row per token."""
    kind = tensor_type(value, what, 2)
    rows, width = kind.get_shape()
    require(rows == DYNAMIC_INDEX, "{} must have one row per token, tensor<?x...>, not {}", what, kind)
    require(width > 0, "{} must have a static, positive width, not {}", what, kind)
    require_dtype(kind, what)
    return kind


def weight_type(value: SSAValue, what: str, rank: int) -> Tensor:
    """The type of `value`, which must be the result of a `plait.weight` of `rank`."""
    kind = tensor_type(value, what, rank)
    owner = value.owner
    made_by = owner.name if isinstance(owner, Operation) else "an argument of @main"
    require(made_by == "plait.weight", "{} must come from plait.weight, not from {}", what, made_by)
    return kind


def matrix_type(value: SSAValue, what: str, dtype: Attribute | None = None) -> Tensor:
    """The type of `value`, which must be a matrix made by a `plait.weight`: quantised, or of `dtype` where given."""
    kind = weight_type(value, what, 2)
    if dtype is not None and not isinstance(kind.element_type, Quant):
        require(kind.element_type == dtype, "{} is {} where {} is due", what, kind, dtype)
    return kind


def stack_type(value: SSAValue, what: str, dtype: Attribute) -> Tensor:
    """The type of `value`, which must be a stack of matrices made by a `plait.weight`: quantised, or of `dtype`."""
    kind = weight_type(value, what, 3)
    if not isinstance(kind.element_type, Quant):
        require(kind.element_type == dtype, "{} is {} where {} is due", what, kind, dtype)
    return kind


def require_dtype(kind: Tensor, what: str) -> None:
    require(is_dtype(kind.element_type), "{} is {}: its element type must be one of {}", what, kind, _DTYPES)


def number(attr: I64Attr | F64Attr | None) -> Any:
    """The value of an attribute; None where it is absent."""
    return None if attr is None else attr.value.data


def require_positive(value: float, what: str) -> None:
    """Infinity is not a number to compute with; NaN is not positive."""
    require(value > 0 and math.isfinite(value), "{} must be positive and finite, not {}", what, value)
