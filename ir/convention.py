"""The rules of `@main` that no single op can see; `plait.ir.dialect.verify` checks them after the ops' own.

One function; names on every argument and result; one batch; every KV value used by one attention, in their order;
values made before they are used; one reference per weight; blocks contiguous and in order.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from itertools import pairwise

from xdsl.dialects.builtin import ArrayAttr, DictionaryAttr, ModuleOp, StringAttr, TensorType
from xdsl.dialects.func import FuncOp, ReturnOp
from xdsl.ir import BlockArgument, Operation, SSAValue
from xdsl.utils.exceptions import VerifyException

from plait.ir.module import MODEL, NAME, SLICE, slice_of
from plait.ir.ops import CACHING, PlaitOp, WeightOp
from plait.ir.ops.base import activation_type
from plait.ir.types import BatchType, KVType


class ConventionError(VerifyException):
    """`op` breaks a rule of `@main`."""

    def __init__(self, op: Operation, message: str) -> None:
        super().__init__(message)
        self.op = op


def check_convention(module: ModuleOp) -> None:
    """Check a module whose ops are each verified. Raises ConventionError."""
    model = module.attributes.get(MODEL)
    if model is not None and not (isinstance(model, StringAttr) and model.data.isascii()):
        raise ConventionError(module, f"{MODEL} is a name in ASCII, not {model}")
    function = _only_function(module)
    body = list(function.body.block.ops)
    _check_ops(body)
    _check_arguments(function)
    _check_results(function)
    _check_weights(op for op in body if isinstance(op, WeightOp))
    _check_blocks(module, [op for op in body if isinstance(op, PlaitOp) and not isinstance(op, WeightOp)])


def _only_function(module: ModuleOp) -> FuncOp:
    held = list(module.body.block.ops) if len(module.body.blocks) == 1 else []
    names = [op.sym_name.data if isinstance(op, FuncOp) else op.name for op in held]
    if names != ["main"] or not isinstance(held[0], FuncOp):
        raise ConventionError(module, f"a module holds one function, @main, not {', '.join(names) or 'nothing'}")
    if len(held[0].body.blocks) != 1:
        raise ConventionError(held[0], f"@main has a body of one MLIR block, not {len(held[0].body.blocks)}")
    return held[0]


def _check_ops(body: Sequence[Operation]) -> None:
    made: set[Operation] = set()
    for op in body:
        if not isinstance(op, PlaitOp | ReturnOp):
            raise ConventionError(op, f"{op.name} is not an op of the plait dialect")
        for operand in op.operands:
            if isinstance(operand.owner, Operation) and operand.owner not in made:
                raise ConventionError(op, f"it uses a result of {operand.owner.name} before that is made")
        made.add(op)


def _check_arguments(function: FuncOp) -> None:
    args = function.body.block.args
    _check_names(function, "argument", function.arg_attrs, len(args))
    batches = [arg for arg in args if isinstance(arg.type, BatchType)]
    if len(batches) != 1:
        raise ConventionError(function, f"@main takes one !plait.batch, not {len(batches)}")
    readers: list[Operation] = []
    for arg in args:
        if isinstance(arg.type, KVType):
            readers.append(_reader_of(function, arg))
        elif not isinstance(arg.type, BatchType):
            _check_boundary(function, f"argument {arg.index}", arg)
    places = {op: place for place, op in enumerate(function.body.block.ops)}
    for first, second in pairwise(readers):
        if places[first] > places[second]:
            raise ConventionError(second, "the KV arguments of @main do not stand in the order of their attentions")


def _reader_of(function: FuncOp, arg: BlockArgument) -> Operation:
    readers = [use.operation for use in arg.uses]
    if len(readers) != 1 or not isinstance(readers[0], CACHING):
        shown = ", ".join(op.name for op in readers) or "nothing"
        raise ConventionError(function, f"a KV value is used by one attention; argument {arg.index} by {shown}")
    return readers[0]


def _check_results(function: FuncOp) -> None:
    returned = function.body.block.last_op
    assert isinstance(returned, ReturnOp), "xDSL asks for a terminator, and no other op of the dialects is one"
    if not returned.arguments:
        raise ConventionError(function, "@main returns nothing")
    _check_names(function, "result", function.res_attrs, len(returned.arguments))
    for index, value in enumerate(returned.arguments):
        _check_boundary(function, f"result {index}", value)


def _check_boundary(function: FuncOp, what: str, value: SSAValue) -> None:
    if not isinstance(value.type, TensorType):
        raise ConventionError(function, f"{what} of @main is {value.type}, not a tensor")
    try:
        activation_type(value, f"{what} of @main")
    except VerifyException as err:
        raise ConventionError(function, str(err)) from err


def _check_names(function: FuncOp, what: str, attrs: ArrayAttr[DictionaryAttr] | None, count: int) -> None:
    entries = [] if attrs is None else list(attrs.data)
    if len(entries) != count:
        raise ConventionError(function, f"@main has {count} {what}s but names for {len(entries)}")
    names: list[str] = []
    for index, entry in enumerate(entries):
        named = entry.data.get(NAME)
        if not isinstance(named, StringAttr) or not named.data or not named.data.isascii():
            raise ConventionError(function, f"{what} {index} of @main has no {NAME} in ASCII")
        names.append(named.data)
    for name, times in Counter(names).items():
        if times > 1:
            raise ConventionError(function, f"{times} {what}s of @main are called {name!r}")


def _check_weights(weights: Iterable[WeightOp]) -> None:
    seen: set[str] = set()
    for op in weights:
        if op.symbol.data in seen:
            raise ConventionError(op, f"the weight {op.symbol.data!r} is referred to twice; use the first reference")
        seen.add(op.symbol.data)


def _check_blocks(module: ModuleOp, body: Sequence[PlaitOp]) -> None:
    """Blocks run from 0, or from where `plait.slice` says; ops without a block stand before the first or after all."""
    try:
        first, end, _ = slice_of(module) or (0, None, None)
    except VerifyException as err:
        raise ConventionError(module, str(err)) from err
    current, closed = first - 1, False
    for op in body:
        block = op.block_index
        if block is None:
            closed = current >= first
        elif closed:
            raise ConventionError(op, f"it belongs to block {block} but stands after ops that belong to none")
        elif block not in ((current, current + 1) if current >= first else (first,)):
            expected = f"{current} or {current + 1}" if current >= first else f"{first}"
            raise ConventionError(op, f"it belongs to block {block} where {expected} is due")
        else:
            current = block
    if end is not None and current + 1 != end:
        raise ConventionError(module, f"{SLICE} says that the blocks end at {end}, but they end at {current + 1}")
