"""Quantised weights between a checkpoint and a module: from how a tensor is stored to its element type."""

from __future__ import annotations

from collections.abc import Mapping

from xdsl.dialects.builtin import ModuleOp, TensorType
from xdsl.ir import Attribute
from xdsl.rewriter import Rewriter

from plait.ir.dialect import verify
from plait.ir.module import weights
from plait.ir.ops import WeightOp
from plait.ir.types import CODES, DTYPES, QuantType, is_dtype, tensor
from plait.spec import WeightRef

GGUF = {
    "Q8_0": QuantType.get("i8", "float16", (1, 32)),
    "Q4_0": QuantType.get("u4", "float16", (1, 32), zero=8),
    "Q4_1": QuantType.get("u4", "float16", (1, 32), minimum="float16"),
}
"""What GGUF's blocks are."""


def quant_type(ref: WeightRef) -> QuantType | None:
    """The element type of a tensor as it is stored; None where it is not quantised, or where codes have no scale."""
    if ref.encoding in GGUF:
        return GGUF[ref.encoding]
    if ref.encoding not in CODES or ref.scale is None or ref.block is None or ref.scale.encoding not in DTYPES:
        return None
    zero = ref.zero.encoding if isinstance(ref.zero, WeightRef) else ref.zero
    return QuantType.get(ref.encoding, ref.scale.encoding, ref.block, zero=zero)


def held_dtype(op: WeightOp) -> Attribute:
    """What a weight is held in where it is dequantised: its own dtype, or, where it is quantised, the one that the ops
    which take it compute in."""
    beside = [value for use in op.result.uses for value in (*use.operation.operands, *use.operation.results)]
    kinds = (value.type.element_type for value in (op.result, *beside) if isinstance(value.type, TensorType))
    found: Attribute = next(kind for kind in kinds if is_dtype(kind))
    return found


def quantise_types(module: ModuleOp, kinds: Mapping[str, QuantType]) -> None:
    """Give weights of a module quantised element types, by name. What is computed with them keeps its dtype.

    Raises VerifyError where an op takes no quantised weight.
    """
    for name, op in weights(module).items():
        if name in kinds:
            kind = tensor(op.result.type.get_shape(), kinds[name])
            Rewriter.replace_value_with_new_type(op.result, kind)
    verify(module)
