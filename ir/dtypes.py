"""Element types by name: what is computed in, what codes and scales of quantised weights are."""

from __future__ import annotations

from collections.abc import Mapping

from xdsl.dialects.builtin import (
    AnyFloat,
    BFloat16Type,
    Float4E2M1FNType,
    Float8E4M3FNType,
    Float8E4M3FNUZType,
    Float8E5M2Type,
    Float8E8M0FNUType,
    Float16Type,
    Float32Type,
    IntegerType,
    Signedness,
)
from xdsl.ir import Attribute, ParametrizedAttribute, TypeAttribute
from xdsl.irdl import irdl_attr_definition

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
    return bits(kind) // 8


def bits(kind: Attribute) -> int:
    """Bits of one element of a compute dtype, or of a code."""
    if isinstance(kind, NF4Type):
        return 4
    assert isinstance(kind, AnyFloat | IntegerType)
    return kind.bitwidth
