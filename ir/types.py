"""The three types that are plait's own, and short hands for builtin ones.

`!plait.batch` is the facts of one step (token ids, positions, query and KV lengths, page tables).
`!plait.kv<3x64xf32, window 8>` is the KV cache of one layer: kv_heads x head_dim x dtype, and the window if it has one.
`!plait.quant<f8E4M3FN, scale f32 block 128x128>` is the element type of a quantised weight: what its codes are, and how
scales are laid over them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import prod

from xdsl.dialects.builtin import (
    DYNAMIC_INDEX,
    AnyFloat,
    BFloat16Type,
    Float4E2M1FNType,
    Float8E4M3FNType,
    Float8E4M3FNUZType,
    Float8E5M2Type,
    Float8E8M0FNUType,
    Float16Type,
    Float32Type,
    IntAttr,
    IntegerType,
    NoneAttr,
    Signedness,
    TensorType,
)
from xdsl.ir import Attribute, ParametrizedAttribute, TypeAttribute
from xdsl.irdl import irdl_attr_definition
from xdsl.parser import AttrParser
from xdsl.printer import Printer
from xdsl.utils.exceptions import VerifyException

from plait.errors import UnsupportedError

DTYPES: dict[str, AnyFloat] = {"float32": Float32Type(), "float16": Float16Type(), "bfloat16": BFloat16Type()}
"""What is computed in, by name."""

FP8: dict[str, AnyFloat] = {
    "e4m3fn": Float8E4M3FNType(),
    "e5m2": Float8E5M2Type(),
    "e4m3fnuz": Float8E4M3FNUZType(),
}
"""What is only stored in: codes of weights, and KV."""


@irdl_attr_definition
class NF4Type(ParametrizedAttribute, TypeAttribute):
    """Codes 0 .. 15 that stand for the 16 quantiles of a normal distribution, scaled to -1 .. 1 (Dettmers et al. 2023,
    QLoRA, appendix E): `plait.ir.numbers.BOOKS` has them."""

    name = "plait.nf4"


CODES: dict[str, AnyFloat | IntegerType | NF4Type] = {
    **FP8,
    "e2m1": Float4E2M1FNType(),
    "nf4": NF4Type(),
    "i8": IntegerType(8, Signedness.SIGNED),
    "u8": IntegerType(8, Signedness.UNSIGNED),
    "u4": IntegerType(4, Signedness.UNSIGNED),
}
"""What the codes of a quantised weight may be. `i8` is -128 .. 127, `u8` is 0 .. 255, `u4` is 0 .. 15."""

CODE_MAX = {"e4m3fn": 448, "e5m2": 57344, "e4m3fnuz": 240, "e2m1": 6, "nf4": 1, "i8": 127, "u8": 255, "u4": 15}
"""The largest finite number that a code stands for."""

SCALES: dict[str, AnyFloat] = {**DTYPES, "e8m0": Float8E8M0FNUType(), "e4m3fn": FP8["e4m3fn"]}
"""What scales may be. `e8m0` is a power of two, 2 ** (code - 127) (OCP Microscaling Formats 1.0)."""

_NAMES: Mapping[Attribute, str] = {kind: name for name, kind in (SCALES | CODES).items()}

Tensor = TensorType[Attribute]


def element(dtype: str) -> AnyFloat:
    """The MLIR element type of a compute dtype's name. Raises UnsupportedError."""
    if dtype not in DTYPES:
        raise UnsupportedError(
            "dtype", f"dtype {dtype!r} is not a compute dtype", hint="use one of " + ", ".join(DTYPES)
        )
    return DTYPES[dtype]


def is_dtype(kind: Attribute) -> bool:
    """Whether it is computed in."""
    return kind in DTYPES.values()


def dtype_name(kind: Attribute) -> str:
    """`float32` for f32, `e4m3fn` for f8E4M3FN and so on."""
    assert kind in _NAMES, f"neither a compute dtype nor a code: {kind}"
    return _NAMES[kind]


def dtype_bytes(kind: Attribute) -> int:
    """Bytes of one element of a compute dtype or of FP8."""
    return _bits(kind) // 8


def _bits(kind: Attribute) -> int:
    if isinstance(kind, NF4Type):
        return 4
    assert isinstance(kind, AnyFloat | IntegerType)
    return kind.bitwidth


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
    """The KV cache of one layer. `window` w means key j is visible to query i while i - j < w. With `values` n only K is
    kept, and the first n features of a key are its value (latent attention).

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
            raise VerifyException(f"{self.value_features} features of a key of {self.head_dim.data} cannot be its value")
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


@irdl_attr_definition
class QuantType(ParametrizedAttribute, TypeAttribute):
    """The element type of a quantised weight (rows, columns): `code, scale DTYPE LAYOUT`, perhaps `zero` or `min`.

    The value of an element is `code * scale`; with a zero `(code - zero) * scale`; with a minimum `code * scale + min`.
    The layout says which elements share a scale: all (`per tensor`), those of a row (`per row`), `group G` neighbours
    of a row (whole groups), or a `block RxC` (the last ones may be cut short). `zero 8` is one number for all;
    `zero f16` and `min f16` are tensors laid out as the scale is.

    Codes are f8E4M3FN, f8E5M2, f8E4M3FNUZ, si8 or ui4. An op takes the values exactly as they are here, unrounded.
    """

    name = "plait.quant"

    code: Attribute
    scale: Attribute
    rows: IntAttr
    columns: IntAttr
    zero: Attribute
    minimum: Attribute

    @staticmethod
    def get(
        code: str,
        scale: str = "float32",
        block: tuple[int, int] = (0, 0),
        *,
        zero: int | str | None = None,
        minimum: str | None = None,
    ) -> QuantType:
        """Names as in CODES and DTYPES; `block` as `self.block` says; a zero is a number or the dtype of a tensor."""
        rows, columns = block
        offset: Attribute = NoneAttr() if zero is None else IntAttr(zero) if isinstance(zero, int) else element(zero)
        least = NoneAttr() if minimum is None else element(minimum)
        return QuantType(CODES[code], element(scale), IntAttr(rows), IntAttr(columns), offset, least)

    @property
    def code_name(self) -> str:
        """`e4m3fn`, `e5m2`, `e4m3fnuz`, `i8` or `u4`."""
        return dtype_name(self.code)

    @property
    def scale_dtype(self) -> str:
        return dtype_name(self.scale)

    @property
    def block(self) -> tuple[int, int]:
        """Rows and columns of the matrix that share a scale; 0 means all of them."""
        return self.rows.data, self.columns.data

    @property
    def zero_point(self) -> int | None:
        """The one zero of all codes; None where there is none, or where it is a tensor."""
        return self.zero.data if isinstance(self.zero, IntAttr) else None

    @property
    def zero_dtype(self) -> str | None:
        """The dtype of the tensor of zeros; None where there is none."""
        return dtype_name(self.zero) if is_dtype(self.zero) else None

    @property
    def minimum_dtype(self) -> str | None:
        """The dtype of the tensor of minima; None where there is none."""
        return dtype_name(self.minimum) if is_dtype(self.minimum) else None

    def scale_shape(self, shape: Sequence[int]) -> tuple[int, int]:
        """The shape of the scale (and of zeros and minima) of a weight (rows, columns)."""
        rows, columns = (-(-size // part) if part else 1 for size, part in zip(shape, self.block, strict=True))
        return rows, columns

    def bytes_of(self, shape: Sequence[int]) -> int:
        """Bytes of a weight (rows, columns): its codes, scales, zeros and minima."""
        rows, columns = self.scale_shape(shape)
        parts = [part for part in (self.scale, self.zero, self.minimum) if is_dtype(part)]
        return shape[0] * shape[1] * _bits(self.code) // 8 + rows * columns * sum(map(dtype_bytes, parts))

    def problem(self, shape: Sequence[int]) -> str | None:
        """Why a weight of `shape` cannot have this element type; None where it can."""
        rows, columns = self.block
        if len(shape) != 2:
            return "only a matrix is quantised"
        if rows == 1 and columns and shape[1] % columns:
            return f"rows of {shape[1]} are not whole groups of {columns}"
        if shape[1] * _bits(self.code) % 8:
            return f"rows of {shape[1]} {self.code_name} codes are not whole bytes"
        return None

    def verify(self) -> None:
        if self.code not in CODES.values():
            raise VerifyException(f"code {self.code} is not one of {', '.join(CODES)}")
        for part in (self.scale, self.zero, self.minimum):
            if not isinstance(part, NoneAttr | IntAttr) and not is_dtype(part):
                raise VerifyException(f"scale, zero and min are of {', '.join(DTYPES)}, not {part}")
        rows, columns = self.block
        if (rows, columns) not in ((0, 0), (1, 0)) and min(rows, columns) < 1:
            raise VerifyException(f"a scale is laid out in positive numbers, not {rows} x {columns}")
        if not isinstance(self.zero, NoneAttr) and not isinstance(self.minimum, NoneAttr):
            raise VerifyException("a weight has a zero or a min, not both")
        if not isinstance(self.zero, NoneAttr) and not isinstance(self.code, IntegerType):
            raise VerifyException(f"{self.code} has its own zero")
        if self.zero_point is not None and not 0 < self.zero_point <= CODE_MAX[self.code_name]:
            raise VerifyException(f"{self.zero_point} is no zero of {self.code} (leave 0 out)")

    def print_parameters(self, printer: Printer) -> None:
        printer.print_string("<")
        printer.print_attribute(self.code)
        printer.print_string(", scale ")
        printer.print_attribute(self.scale)
        printer.print_string(f" {self._layout()}")
        for word, part in (("zero", self.zero), ("min", self.minimum)):
            if isinstance(part, IntAttr):
                printer.print_string(f", {word} {part.data}")
            elif not isinstance(part, NoneAttr):
                printer.print_string(f", {word} ")
                printer.print_attribute(part)
        printer.print_string(">")

    def _layout(self) -> str:
        rows, columns = self.block
        if not columns:
            return "per row" if rows else "per tensor"
        return f"group {columns}" if rows == 1 else f"block {rows}x{columns}"

    @classmethod
    def parse_parameters(cls, parser: AttrParser) -> Sequence[Attribute]:
        with parser.in_angle_brackets():
            code = parser.parse_type()
            parser.parse_punctuation(",")
            parser.parse_keyword("scale")
            scale = parser.parse_type()
            rows, columns = cls._parse_layout(parser)
            zero: Attribute = NoneAttr()
            minimum: Attribute = NoneAttr()
            while parser.parse_optional_punctuation(",") is not None:
                if parser.parse_optional_keyword("zero") is not None:
                    point = parser.parse_optional_integer(allow_boolean=False, allow_negative=False)
                    zero = parser.parse_type() if point is None else IntAttr(point)
                else:
                    parser.parse_keyword("min")
                    minimum = parser.parse_type()
        return [code, scale, IntAttr(rows), IntAttr(columns), zero, minimum]

    @staticmethod
    def _parse_layout(parser: AttrParser) -> tuple[int, int]:
        if parser.parse_optional_keyword("per") is not None:
            if parser.parse_optional_keyword("row") is not None:
                return 1, 0
            parser.parse_keyword("tensor")
            return 0, 0
        if parser.parse_optional_keyword("group") is not None:
            size = parser.parse_integer(allow_boolean=False, allow_negative=False)
            return 1, size or parser.raise_error("a group has at least one element")
        parser.parse_keyword("block")
        rows = parser.parse_shape_dimension(allow_dynamic=False)
        parser.parse_shape_delimiter()
        return rows, parser.parse_shape_dimension(allow_dynamic=False)


def tensor_bytes(kind: Tensor) -> int:
    """Bytes of a static tensor, or of one row of one whose first dimension is the batch's tokens."""
    shape = kind.get_shape()
    if isinstance(kind.element_type, QuantType):
        return kind.element_type.bytes_of(shape)
    return prod(dim for dim in shape if dim >= 0) * dtype_bytes(kind.element_type)
