"""The types that are plait's own, and short hands for builtin ones.

`!plait.batch` is the facts of one step (token ids, positions, query and KV lengths, page tables).
`!plait.kv<3x64xf32, window 8>` is the KV cache of one layer: kv_heads x head_dim x dtype, and the window if it has one.
Element types of weights are in `plait.ir.dtypes` and `plait.ir.quant_type`, and can be imported from here too.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

from xdsl.dialects.builtin import DYNAMIC_INDEX, IntAttr, NoneAttr, TensorType
from xdsl.ir import Attribute, ParametrizedAttribute, TypeAttribute
from xdsl.irdl import irdl_attr_definition
from xdsl.parser import AttrParser
from xdsl.printer import Printer
from xdsl.utils.exceptions import VerifyException

from plait.ir.dtypes import (
    CODE_MAX,
    CODES,
    DTYPES,
    FP8,
    SCALES,
    NF4Type,
    bits,
    dtype_bytes,
    dtype_name,
    element,
    is_dtype,
)
from plait.ir.quant_type import PackedType, Quant, QuantType

__all__ = [
    "CODES",
    "CODE_MAX",
    "DTYPES",
    "FP8",
    "SCALES",
    "BatchType",
    "KVType",
    "NF4Type",
    "PackedType",
    "Quant",
    "QuantType",
    "Tensor",
    "bits",
    "dtype_bytes",
    "dtype_name",
    "element",
    "is_dtype",
    "tensor",
    "tensor_bytes",
    "tokens_by",
]

Tensor = TensorType[Attribute]


def tokens_by(width: int, kind: Attribute) -> Tensor:
    """`tensor<?xWIDTHxKIND>`: one row per token of the batch."""
    return TensorType(kind, [DYNAMIC_INDEX, width])


def tensor(shape: Sequence[int], kind: Attribute) -> Tensor:
    return TensorType(kind, list(shape))


@irdl_attr_definition
class BatchType(ParametrizedAttribute, TypeAttribute):
    """The facts of one step: `plait.backends.base.Batch` at run time."""

    name = "plait.batch"


@irdl_attr_definition
class KVType(ParametrizedAttribute, TypeAttribute):
    """The KV cache of one layer. `window` w means key j is visible to query i while i - j < w. With `values` n K alone
    is kept, and the first n features of a key are its value (latent attention).

    The dtype is a compute dtype, or FP8 (f8E4M3FN, f8E5M2, f8E4M3FNUZ): then K and V are rounded to nearest even as
    they are appended, what is larger than the largest finite number becomes that number, and there is no scale.
    """

    name = "plait.kv"

    kv_heads: IntAttr
    head_dim: IntAttr
    dtype: Attribute
    window: IntAttr | NoneAttr
    values: IntAttr | NoneAttr

    @staticmethod
    def get(
        kv_heads: int, head_dim: int, dtype: Attribute, window: int | None = None, values: int | None = None
    ) -> KVType:
        optional = [NoneAttr() if part is None else IntAttr(part) for part in (window, values)]
        return KVType(IntAttr(kv_heads), IntAttr(head_dim), dtype, *optional)

    @property
    def is_latent(self) -> bool:
        """Whether only K is kept."""
        return isinstance(self.values, IntAttr)

    @property
    def value_features(self) -> int:
        """Features of a value."""
        return self.values.data if isinstance(self.values, IntAttr) else self.head_dim.data

    @property
    def token_bytes(self) -> int:
        """Bytes that a token takes."""
        return (1 if self.is_latent else 2) * self.kv_heads.data * self.head_dim.data * dtype_bytes(self.dtype)

    @property
    def is_fp8(self) -> bool:
        """Whether K and V are rounded to FP8 as they are appended."""
        return self.dtype in FP8.values()

    @property
    def window_tokens(self) -> int | None:
        return self.window.data if isinstance(self.window, IntAttr) else None

    def verify(self) -> None:
        if self.kv_heads.data < 1 or self.head_dim.data < 1:
            raise VerifyException("kv_heads and head_dim must be positive")
        if self.window_tokens is not None and self.window_tokens < 1:
            raise VerifyException("a window must be positive; leave it out for full attention")
        if not 0 < self.value_features <= self.head_dim.data:
            raise VerifyException(
                f"{self.value_features} features of a key of {self.head_dim.data} cannot be its value"
            )
        if not is_dtype(self.dtype) and not self.is_fp8:
            raise VerifyException(f"KV dtype {self.dtype} is not one of {', '.join(DTYPES | FP8)}")

    def print_parameters(self, printer: Printer) -> None:
        printer.print_string(f"<{self.kv_heads.data}x{self.head_dim.data}x")
        printer.print_attribute(self.dtype)
        if self.window_tokens is not None:
            printer.print_string(f", window {self.window_tokens}")
        if self.is_latent:
            printer.print_string(f", values {self.value_features}")
        printer.print_string(">")

    @classmethod
    def parse_parameters(cls, parser: AttrParser) -> Sequence[Attribute]:
        with parser.in_angle_brackets():
            kv_heads = parser.parse_shape_dimension(allow_dynamic=False)
            parser.parse_shape_delimiter()
            head_dim = parser.parse_shape_dimension(allow_dynamic=False)
            parser.parse_shape_delimiter()
            dtype = parser.parse_type()
            window: Attribute = NoneAttr()
            values: Attribute = NoneAttr()
            while parser.parse_optional_punctuation(",") is not None:
                if parser.parse_optional_keyword("values") is not None:
                    values = IntAttr(parser.parse_integer(allow_boolean=False, allow_negative=False))
                else:
                    parser.parse_keyword("window")
                    window = IntAttr(parser.parse_integer(allow_boolean=False, allow_negative=False))
        return [IntAttr(kv_heads), IntAttr(head_dim), dtype, window, values]


def tensor_bytes(kind: Tensor) -> int:
    """Bytes of a static tensor, or of one row of one whose first dimension is the batch's tokens."""
    shape = kind.get_shape()
    if isinstance(kind.element_type, Quant):
        return kind.element_type.bytes_of(shape)
    return prod(dim for dim in shape if dim >= 0) * dtype_bytes(kind.element_type)
