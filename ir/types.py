"""The two types that are plait's own, and short hands for builtin ones.

`!plait.batch` is the facts of one step (token ids, positions, query and KV lengths, page tables).
`!plait.kv<3x64xf32, window 8>` is the KV cache of one layer: kv_heads x head_dim x dtype, and the window if it has one.
"""

from __future__ import annotations

from collections.abc import Sequence

from xdsl.dialects.builtin import (
    DYNAMIC_INDEX,
    AnyFloat,
    BFloat16Type,
    Float16Type,
    Float32Type,
    IntAttr,
    NoneAttr,
    TensorType,
)
from xdsl.ir import Attribute, ParametrizedAttribute, TypeAttribute
from xdsl.irdl import irdl_attr_definition
from xdsl.parser import AttrParser
from xdsl.printer import Printer
from xdsl.utils.exceptions import VerifyException

from plait.errors import UnsupportedError

DTYPES: dict[str, AnyFloat] = {"float32": Float32Type(), "float16": Float16Type(), "bfloat16": BFloat16Type()}
DTYPE_BYTES = {"float32": 4, "float16": 2, "bfloat16": 2}
_NAMES = {kind: name for name, kind in DTYPES.items()}

Tensor = TensorType[Attribute]


def element(dtype: str) -> AnyFloat:
    """The MLIR element type of a compute dtype's name. Raises UnsupportedError."""
    if dtype not in DTYPES:
        raise UnsupportedError(
            "dtype", f"dtype {dtype!r} is not a compute dtype", hint="use one of " + ", ".join(DTYPES)
        )
    return DTYPES[dtype]


def is_dtype(kind: Attribute) -> bool:
    return isinstance(kind, AnyFloat) and kind in _NAMES


def dtype_name(kind: Attribute) -> str:
    """`float32` for f32 and so on: the inverse of `element`."""
    assert isinstance(kind, AnyFloat) and kind in _NAMES, f"not a compute dtype: {kind}"
    return _NAMES[kind]


def dtype_bytes(kind: Attribute) -> int:
    return DTYPE_BYTES[dtype_name(kind)]


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
    """The KV cache of one layer. `window` w means key j is visible to query i while i - j < w."""

    name = "plait.kv"

    kv_heads: IntAttr
    head_dim: IntAttr
    dtype: Attribute
    window: IntAttr | NoneAttr

    @staticmethod
    def get(kv_heads: int, head_dim: int, dtype: Attribute, window: int | None = None) -> KVType:
        return KVType(IntAttr(kv_heads), IntAttr(head_dim), dtype, NoneAttr() if window is None else IntAttr(window))

    @property
    def window_tokens(self) -> int | None:
        return self.window.data if isinstance(self.window, IntAttr) else None

    def verify(self) -> None:
        if self.kv_heads.data < 1 or self.head_dim.data < 1:
            raise VerifyException("kv_heads and head_dim must be positive")
        if self.window_tokens is not None and self.window_tokens < 1:
            raise VerifyException("a window must be positive; leave it out for full attention")
        if not is_dtype(self.dtype):
            raise VerifyException(f"KV dtype {self.dtype} is not one of {', '.join(DTYPES)}")

    def print_parameters(self, printer: Printer) -> None:
        printer.print_string(f"<{self.kv_heads.data}x{self.head_dim.data}x")
        printer.print_attribute(self.dtype)
        if self.window_tokens is not None:
            printer.print_string(f", window {self.window_tokens}")
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
            if parser.parse_optional_punctuation(",") is not None:
                parser.parse_keyword("window")
                window = IntAttr(parser.parse_integer(allow_boolean=False, allow_negative=False))
        return [IntAttr(kv_heads), IntAttr(head_dim), dtype, window]
