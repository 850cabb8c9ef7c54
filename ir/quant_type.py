"""Element types of quantised weights.

`!plait.quant<f8E4M3FN, scale f32 block 128x128>` says what codes are, and how scales are laid over them.
`!plait.packed<Q4_K>` is a block of GGUF whose scales have scales.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

from xdsl.dialects.builtin import Float32Type, IntAttr, IntegerType, NoneAttr, StringAttr, i32
from xdsl.ir import Attribute, ParametrizedAttribute, TypeAttribute
from xdsl.irdl import irdl_attr_definition
from xdsl.parser import AttrParser
from xdsl.printer import Printer
from xdsl.utils.exceptions import VerifyException

from plait.ir.dtypes import CODE_MAX, CODES, DTYPES, SCALES, bits, dtype_bytes, dtype_name, element, is_dtype

PACKED: dict[str, tuple[int, int]] = {
    "Q5_0": (32, 22),
    "Q5_1": (32, 24),
    "Q2_K": (256, 84),
    "Q3_K": (256, 110),
    "Q4_K": (256, 144),
    "Q5_K": (256, 176),
    "Q6_K": (256, 210),
    "IQ4_NL": (32, 18),
    "IQ4_XS": (256, 136),
}
"""Elements and bytes of a block, by GGUF's name (ggml-common.h). Blocks that are codes with a scale are `QuantType`."""


@irdl_attr_definition
class PackedType(ParametrizedAttribute, TypeAttribute):
    """The element type of a weight in GGUF's blocks, by name: rows are whole blocks, with all scales inside. The values
    are those of the `gguf` package's `dequantize`, in float32. Of a stack (..., rows, columns) each matrix is so."""

    name = "plait.packed"

    format: StringAttr

    @staticmethod
    def get(encoding: str) -> PackedType:
        """By GGUF's name, as in PACKED."""
        return PackedType(StringAttr(encoding))

    @property
    def encoding(self) -> str:
        return self.format.data

    def bytes_of(self, shape: Sequence[int]) -> int:
        """Bytes of a weight (..., rows, columns)."""
        elements, size = PACKED[self.encoding]
        return prod(shape) // elements * size

    def problem(self, shape: Sequence[int]) -> str | None:
        """Why a weight of `shape` cannot have this element type; None where it can."""
        elements, _ = PACKED[self.encoding]
        if len(shape) < 2:
            return _MATRICES
        return f"rows of {shape[-1]} are not whole blocks of {elements}" if shape[-1] % elements else None

    def verify(self) -> None:
        if self.encoding not in PACKED:
            raise VerifyException(f"{self.encoding} is not one of {', '.join(PACKED)}")

    def print_parameters(self, printer: Printer) -> None:
        printer.print_string(f"<{self.encoding}>")

    @classmethod
    def parse_parameters(cls, parser: AttrParser) -> Sequence[Attribute]:
        with parser.in_angle_brackets():
            return [StringAttr(parser.parse_identifier())]


@irdl_attr_definition
class QuantType(ParametrizedAttribute, TypeAttribute):
    """The element type of a quantised weight (rows, columns): `code, scale DTYPE LAYOUT`, perhaps `zero` or `min`,
    `outer` and `order`.

    The value of an element is `code * scale`; with a zero `(code - zero) * scale`; with a minimum `code * scale + min`.
    The layout says which elements share a scale: all (`per tensor`), those of a row (`per row`), `group G` neighbours
    of a row (whole groups), or a `block RxC` (the last ones may be cut short). `zero 8` is one number for all;
    `zero f16` and `min f16` are tensors laid out as the scale is. With `outer f32` there is one more number for the
    matrix, which every scale is multiplied by. With `order i32` the columns of a group are no neighbours: a tensor says
    for each column which group it belongs to.

    Codes are f8E4M3FN, f8E5M2, f8E4M3FNUZ, f4E2M1FN, !plait.nf4, si8, ui8 or ui4; scales are of a compute dtype,
    f8E8M0FNU or f8E4M3FN. Of a stack (..., rows, columns) each matrix is so, with numbers of its own. An op takes the
    values exactly as they are here, unrounded.
    """

    name = "plait.quant"

    code: Attribute
    scale: Attribute
    rows: IntAttr
    columns: IntAttr
    zero: Attribute
    minimum: Attribute
    outer: Attribute
    order: Attribute

    @staticmethod
    def get(
        code: str,
        scale: str = "float32",
        block: tuple[int, int] = (0, 0),
        *,
        zero: int | str | None = None,
        minimum: str | None = None,
        outer: bool = False,
        ordered: bool = False,
    ) -> QuantType:
        """Names as in CODES and SCALES; `block` as `self.block` says; a zero is a number or the dtype of a tensor."""
        rows, columns = block
        offset: Attribute = NoneAttr() if zero is None else IntAttr(zero) if isinstance(zero, int) else element(zero)
        least = NoneAttr() if minimum is None else element(minimum)
        whole = Float32Type() if outer else NoneAttr()
        order = i32 if ordered else NoneAttr()
        return QuantType(CODES[code], SCALES[scale], IntAttr(rows), IntAttr(columns), offset, least, whole, order)

    @property
    def code_name(self) -> str:
        """`e4m3fn`, `e2m1`, `u4` and so on, as in CODES."""
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

    @property
    def has_outer(self) -> bool:
        """Whether each matrix has one more number that its scales are multiplied by."""
        return not isinstance(self.outer, NoneAttr)

    @property
    def is_ordered(self) -> bool:
        """Whether a tensor says which group each column belongs to."""
        return not isinstance(self.order, NoneAttr)

    def scale_shape(self, shape: Sequence[int]) -> tuple[int, ...]:
        """The shape of the scale (and of zeros and minima) of a weight (..., rows, columns)."""
        across = (-(-size // part) if part else 1 for size, part in zip(shape[-2:], self.block, strict=True))
        return (*shape[:-2], *across)

    def bytes_of(self, shape: Sequence[int]) -> int:
        """Bytes of a weight (..., rows, columns): its codes, scales, zeros, minima, outer scales and order."""
        matrices = prod(shape[:-2])
        shared = dtype_bytes(self.scale) + sum(
            dtype_bytes(part) for part in (self.zero, self.minimum) if is_dtype(part)
        )
        own = 4 * self.has_outer + 4 * shape[-1] * self.is_ordered
        return prod(shape) * bits(self.code) // 8 + prod(self.scale_shape(shape)) * shared + matrices * own

    def problem(self, shape: Sequence[int]) -> str | None:
        """Why a weight of `shape` cannot have this element type; None where it can."""
        rows, columns = self.block
        if len(shape) < 2:
            return _MATRICES
        if rows == 1 and columns and shape[-1] % columns:
            return f"rows of {shape[-1]} are not whole groups of {columns}"
        if shape[-1] * bits(self.code) % 8:
            return f"rows of {shape[-1]} {self.code_name} codes are not whole bytes"
        return None

    def verify(self) -> None:
        if self.code not in CODES.values():
            raise VerifyException(f"code {self.code} is not one of {', '.join(CODES)}")
        if self.scale not in SCALES.values():
            raise VerifyException(f"a scale is of {', '.join(SCALES)}, not {self.scale}")
        for part in (self.zero, self.minimum):
            if not isinstance(part, NoneAttr | IntAttr) and not is_dtype(part):
                raise VerifyException(f"zero and min are of {', '.join(DTYPES)}, not {part}")
        rows, columns = self.block
        if (rows, columns) not in ((0, 0), (1, 0)) and min(rows, columns) < 1:
            raise VerifyException(f"a scale is laid out in positive numbers, not {rows} x {columns}")
        if not isinstance(self.zero, NoneAttr) and not isinstance(self.minimum, NoneAttr):
            raise VerifyException("a weight has a zero or a min, not both")
        if not isinstance(self.zero, NoneAttr) and not isinstance(self.code, IntegerType):
            raise VerifyException(f"{self.code} has its own zero")
        if self.zero_point is not None and not 0 < self.zero_point <= CODE_MAX[self.code_name]:
            raise VerifyException(f"{self.zero_point} is no zero of {self.code} (leave 0 out)")
        if self.has_outer and not isinstance(self.outer, Float32Type):
            raise VerifyException(f"outer is f32, not {self.outer}")
        if self.is_ordered and (self.order != i32 or not columns):
            raise VerifyException("an order is i32, and of groups of columns")

    def print_parameters(self, printer: Printer) -> None:
        printer.print_string("<")
        printer.print_attribute(self.code)
        printer.print_string(", scale ")
        printer.print_attribute(self.scale)
        printer.print_string(f" {self._layout()}")
        for word, part in zip(_OPTIONAL, (self.zero, self.minimum, self.outer, self.order), strict=True):
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
            parts: dict[str, Attribute] = dict.fromkeys(_OPTIONAL, NoneAttr())
            while parser.parse_optional_punctuation(",") is not None:
                word = next((word for word in _OPTIONAL if parser.parse_optional_keyword(word) is not None), None)
                if word is None:
                    parser.raise_error(f"expected one of {', '.join(_OPTIONAL)}")
                point = None if word != "zero" else parser.parse_optional_integer(False, False)
                parts[word] = parser.parse_type() if point is None else IntAttr(point)
        return [code, scale, IntAttr(rows), IntAttr(columns), *parts.values()]

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


Quant = QuantType | PackedType
"""Every element type of a quantised weight."""

_OPTIONAL = ("zero", "min", "outer", "order")
_MATRICES = "only a matrix, or a stack of them, is quantised"
