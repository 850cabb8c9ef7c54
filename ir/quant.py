"""Quantised weights between a checkpoint and a module: from how a tensor is stored to its element type."""

from __future__ import annotations

from collections.abc import Mapping

from xdsl.dialects.builtin import ModuleOp, TensorType
from xdsl.ir import Attribute
from xdsl.rewriter import Rewriter

from plait.ir.dialect import verify
from plait.ir.module import weights
from plait.ir.ops import WeightOp
from plait.ir.quant_type import PACKED
from plait.ir.types import CODES, DTYPES, SCALES, PackedType, Quant, QuantType, is_dtype, tensor
from plait.spec import Rows, WeightRef

GGUF: dict[str, Quant] = {
    "Q8_0": QuantType.get("i8", "float16", (1, 32)),
    "Q4_0": QuantType.get("u4", "float16", (1, 32), zero=8),
    "Q4_1": QuantType.get("u4", "float16", (1, 32), minimum="float16"),
    "MXFP4": QuantType.get("e2m1", "e8m0", (1, 32)),
    **{name: PackedType.get(name) for name in PACKED},
}
"""What GGUF's blocks are."""


def quant_type(ref: WeightRef) -> Quant | None:
    """The element type of a tensor as it is stored; None where it is not quantised, or where codes have no scale.

    Zeros that are stored as whole numbers are float16, which holds them exactly. A scale that is quantised itself, or
    that is changed by a factor or a shift, is float32. Where `rows` tear blocks of rows apart, each row has the scales
    of its block.
    """
    if ref.stack:
        kinds = {quant_type(member) for member in ref.stack}
        return kinds.pop() if len(kinds) == 1 else None
    if ref.encoding in GGUF:
        return GGUF[ref.encoding]
    scale, zero = ref.scale, ref.zero
    if ref.encoding not in CODES or scale is None or ref.block is None:
        return None
    plain = scale.scale is None and (scale.reciprocal, scale.factor, scale.shift) == (False, 1.0, 0.0)
    dtype = scale.encoding if plain else "float32"
    if dtype not in SCALES:
        return None
    whole = "float16" if isinstance(zero, WeightRef) and zero.encoding not in DTYPES else None
    return QuantType.get(
        ref.encoding,
        dtype,
        _block(ref.block, ref.rows),
        zero=whole or (zero.encoding if isinstance(zero, WeightRef) else zero),
        outer=ref.outer is not None,
        ordered=ref.group_of is not None,
    )


def _block(block: tuple[int, int], rows: Rows | None) -> tuple[int, int]:
    down, across = block
    if rows is None or down < 2:
        return block
    places = [(piece.start, piece.count) for piece in rows.pieces]
    whole = not any(size % down for place in (*places, (rows.stride, 0)) for size in place)
    return block if whole and not any(piece.pairs for piece in rows.pieces) else (1, across)


def held_dtype(op: WeightOp) -> Attribute:
    """What a weight is held in where it is dequantised: its own dtype, or, where it is quantised, the one that the ops
    which take it compute in."""
    beside = [value for use in op.result.uses for value in (*use.operation.operands, *use.operation.results)]
    kinds = (value.type.element_type for value in (op.result, *beside) if isinstance(value.type, TensorType))
    found: Attribute = next(kind for kind in kinds if is_dtype(kind))
    return found


def quantise_types(module: ModuleOp, kinds: Mapping[str, Attribute]) -> None:
    """Give weights of a module other element types, by name. What is computed with them keeps its dtype.

    Raises VerifyError where an op takes no quantised weight.
    """
    for name, op in weights(module).items():
        if name in kinds:
            kind = tensor(op.result.type.get_shape(), kinds[name])
            Rewriter.replace_value_with_new_type(op.result, kind)
    verify(module)
