"""A table of emitters: what a backend can lower, and the one place that decides what it refuses.

An emitter belongs to one op class and names the properties and optional operands it implements. An op that carries any
other, or any attribute at all that is not a property, is refused before its emitter runs: nothing is dropped because
nobody looked.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Generic, TypeVar

from xdsl.dialects.builtin import ModuleOp, TensorType
from xdsl.ir import Attribute, Operation, SSAValue
from xdsl.irdl import OptOperandDef

from plait.errors import CheckpointError, PlaitError, UnsupportedError
from plait.ir.module import ops, weights
from plait.ir.ops import PlaitOp, RopeOp, WeightOp
from plait.ir.quant import held_dtype, quant_type
from plait.ir.rope import PARAMETERS, ROPE_PARAMETERS, Rope
from plait.ir.types import DTYPES, Quant, dtype_name
from plait.spec import Support, WeightRef

Code = TypeVar("Code")
Op = TypeVar("Op", bound=PlaitOp)

#: Properties without an influence on numbers: where an op stands, and how its operands are grouped.
_NEUTRAL = frozenset({"block", "operandSegmentSizes"})

#: What a rotary table is made of. Whoever makes tables with `plait.ir.rope` implements every kind.
ROPE_TABLE = ("kind", "theta", *PARAMETERS)

#: Optional operands that every lowering implements.
_COMMON = frozenset({"bias"})


class Lowering(Generic[Code]):
    """Op class -> emitter. `Code` is what emitters return; they need neither a device nor weights."""

    def __init__(self, name: str) -> None:
        self.name = name
        self._emitters: dict[type[PlaitOp], tuple[frozenset[str], Callable[[Any], Code]]] = {}
        self._check: Callable[[PlaitOp], None] = lambda op: None

    def checked(self, check: Callable[[PlaitOp], None]) -> Lowering[Code]:
        """The same, for a place where `check` refuses more. It raises what `refuse` makes."""
        made: Lowering[Code] = Lowering(self.name)
        made._emitters, made._check = self._emitters, check
        return made

    def emits(self, kind: type[Op], *properties: str) -> Callable[[Callable[[Op], Code]], Callable[[Op], Code]]:
        """Register an emitter, and the properties and optional operands it implements."""

        def register(emitter: Callable[[Op], Code]) -> Callable[[Op], Code]:
            self._emitters[kind] = (frozenset(properties), emitter)
            return emitter

        return register

    def emit(self, op: Operation) -> Code:
        """Lower one op. Raises UnsupportedError naming the op, its block, the attribute and the value."""
        if not isinstance(op, PlaitOp) or type(op) not in self._emitters:
            raise refuse(op, why=f"{self.name} has no lowering for it{_elsewhere(op)}")
        known, emitter = self._emitters[type(op)]
        for where in (op.properties, op.attributes):
            for attribute, value in where.items():
                if attribute not in known | _NEUTRAL:
                    raise refuse(op, attribute, value, f"{self.name} does not know this attribute")
        for operand, definition in op.get_irdl_definition().operands:
            given = getattr(op, operand) if isinstance(definition, OptOperandDef) else None
            if given is not None and operand not in known | _COMMON:
                raise refuse(op, operand, given.type, f"{self.name} does not know this operand")
        self._check(op)
        return emitter(op)

    def supports(self, op: Operation) -> Support:
        """Whether `emit` takes the op."""
        try:
            self.emit(op)
        except UnsupportedError as err:
            return Support(False, err.why or err.what)
        return Support(True)

    def refused(self, module: ModuleOp) -> dict[str, str]:
        """Op (with block) -> why, for every op of the module that `emit` does not take."""
        answers = ((op_name(op), self.supports(op)) for op in ops(module))
        return {name: answer.why for name, answer in answers if not answer.ok}


def _elsewhere(op: Operation) -> str:
    """Where an op that no lowering here knows can go."""
    place = op.ELSEWHERE if isinstance(op, PlaitOp) else ""
    return f"; {place}" if place else ""


def op_name(op: Operation) -> str:
    """`plait.attention (block 3)`."""
    block = op.block_index if isinstance(op, PlaitOp) else None
    return op.name if block is None else f"{op.name} (block {block})"


def refuse(op: Operation, attribute: str = "", value: object = "", why: str = "") -> PlaitError:
    """The error for an op, or for one attribute of it, that a lowering does not implement."""
    what = f"{op_name(op)} is not supported"
    cause = f"{attribute} = {value}: {why}" if attribute else why
    return UnsupportedError("op-unsupported", what, why=cause, hint="place this block on another device")


def operand_dtype(op: Operation, value: SSAValue, dtypes: tuple[str, ...] = tuple(DTYPES)) -> str:
    """The compute dtype of a tensor operand. Raises UnsupportedError for one that is not in `dtypes`."""
    kind = value.type.element_type if isinstance(value.type, TensorType) else value.type
    return attribute_dtype(op, kind, dtypes)


def weight_kind(op: WeightOp) -> None:
    """Check a weight that is dequantised where it is quantised. Raises UnsupportedError for a dtype not computed in."""
    kind = op.result.type
    assert isinstance(kind, TensorType)
    if not isinstance(kind.element_type, Quant):
        operand_dtype(op, op.result)


def attribute_dtype(op: Operation, kind: Attribute, dtypes: tuple[str, ...] = tuple(DTYPES)) -> str:
    """The compute dtype's name of an element type. Raises UnsupportedError for one that is not in `dtypes`."""
    name = dtype_name(kind) if kind in DTYPES.values() else str(kind)
    if name not in dtypes:
        raise refuse(op, "dtype", name, "implemented are " + ", ".join(dtypes))
    return name


def weight_name(op: Operation, value: SSAValue) -> str:
    """The tensor of the checkpoint behind an operand. Raises UnsupportedError where it is computed."""
    if not isinstance(value.owner, WeightOp):
        raise refuse(op, "weight", value.type, "only tensors of the checkpoint are implemented as weights")
    return value.owner.symbol.data


def rope_of(op: RopeOp) -> Rope:
    """The rotary parameters. Raises UnsupportedError for a kind that `plait.ir.rope` makes no tables of."""
    if op.kind.data not in ROPE_PARAMETERS:
        raise refuse(op, "kind", op.kind.data, "implemented are " + ", ".join(ROPE_PARAMETERS))
    return op.rope


def check_weights(module: ModuleOp, refs: Mapping[str, WeightRef]) -> None:
    """Raise CheckpointError where `weights.json` and the module disagree about a tensor."""
    for name, op in weights(module).items():
        kind = op.result.type
        assert isinstance(kind, TensorType)
        if name not in refs:
            raise CheckpointError("weight-missing", f"weights.json says nothing of {name!r}", hint="compile again")
        if refs[name].shape != kind.get_shape():
            raise CheckpointError(
                "weight-shape",
                f"{name!r} is {list(refs[name].shape)} in weights.json",
                why=f"the slice's module wants {list(kind.get_shape())}",
                hint="compile again",
            )
        if isinstance(kind.element_type, Quant) and quant_type(refs[name]) != kind.element_type:
            raise CheckpointError(
                "weight-format",
                f"{name!r} is {refs[name].encoding} of {quant_type(refs[name])} in weights.json",
                why=f"the slice's module wants {kind.element_type}",
                hint="compile again",
            )


def weight_dtypes(module: ModuleOp) -> dict[str, str]:
    """What each weight is held in where it is dequantised when it is loaded: its own dtype, or, of a quantised weight,
    the dtype that the ops which take it compute in."""
    return {name: dtype_name(held_dtype(op)) for name, op in weights(module).items()}


def dtypes_of(module: ModuleOp) -> tuple[str, ...]:
    """The dtypes that the module computes in, sorted."""
    return tuple(sorted(set(weight_dtypes(module).values())))


def dequantised(module: ModuleOp) -> dict[str, str]:
    """What a backend that dequantises says of the module, in its report and its stats; nothing where all is plain."""
    kinds = [op.result.type for op in weights(module).values()]
    if not any(isinstance(kind, TensorType) and isinstance(kind.element_type, Quant) for kind in kinds):
        return {}
    return {"weights": f"dequantised to {' and '.join(dtypes_of(module))}"}
