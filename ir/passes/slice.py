"""Cutting a module into slices."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from xdsl.context import Context
from xdsl.dialects.builtin import ModuleOp, StringAttr
from xdsl.dialects.func import FuncOp, ReturnOp
from xdsl.ir import Block, Operation, Region, SSAValue
from xdsl.passes import ModulePass

from plait.errors import UsageError
from plait.ir.module import SLICE, Signature, block_range, main, name_list, ops, signature, slice_of
from plait.ir.ops import WeightOp


@dataclass(frozen=True)
class SlicePass(ModulePass):
    """Keep blocks [start, end). What stands before the first block goes with it, what stands after the last with that.

    Weights follow their users, so one that two slices use (a tied embedding) is in both. Every other value that crosses
    the cut becomes an argument or a result named `x0`, `x1` ... in the order of its making; at the module's own ends
    the names are the module's. A slice can be sliced again: blocks keep their numbers.

    Applying it raises UsageError `slice-range` where the module has no such blocks.
    """

    name = "slice"

    start: int
    end: int

    def apply(self, ctx: Context, op: ModuleOp) -> None:
        cut = _cut(op, self.start, self.end)
        whole, kept = main(op), main(cut)
        for function in (whole, kept):
            function.detach()  # type: ignore[no-untyped-call]
        whole.erase(safe_erase=False)
        op.body.block.add_op(kept)
        op.attributes.update(cut.attributes)


def slice_modules(module: ModuleOp, cuts: Sequence[tuple[int, int]]) -> list[ModuleOp]:
    """One module per range of blocks; `module` stays as it is.

    Raises UsageError `slice-cover` where the ranges do not cover the blocks in order, without gap or overlap.
    """
    first, last = block_range(module)
    ends = [first, *(end for _, end in cuts)]
    if [start for start, _ in cuts] != ends[:-1] or ends[-1] != last:
        raise UsageError("slice-cover", f"{list(cuts)} leaves a gap or an overlap in blocks [{first}, {last})")
    return [_cut(module, start, end) for start, end in cuts]


def _cut(module: ModuleOp, start: int, end: int) -> ModuleOp:
    """A new module of the blocks [start, end) of `module`."""
    first, last = block_range(module)
    if not first <= start < end <= last:
        raise UsageError("slice-range", f"no blocks [{start}, {end}) in a module of blocks [{first}, {last})")
    units = _units(module, first, last)
    inside = {op for op, unit in units.items() if start <= unit < end}
    whole = signature(module)
    lives = _lives(whole, units, first, last)
    inputs = whole.inputs if start == first else _crossing(lives, start)
    outputs = whole.outputs if end == last else _crossing(lives, end)
    caches = {name: arg for name, arg in whole.kv.items() if any(use.operation in inside for use in arg.uses)}
    arguments: dict[str, SSAValue] = {"batch": whole.batch, **inputs, **caches}

    body = Block(arg_types=[value.type for value in arguments.values()])
    mapped: dict[SSAValue, SSAValue] = dict(zip(arguments.values(), body.args, strict=True))
    used = (op for op in ops(module) if isinstance(op, WeightOp) and any(u.operation in inside for u in op.result.uses))
    for op in (*used, *(op for op in units if op in inside)):
        body.add_op(op.clone(mapped))
    body.add_op(ReturnOp(*(mapped[value] for value in outputs.values())))
    function = FuncOp(
        "main",
        ([arg.type for arg in body.args], [value.type for value in outputs.values()]),
        Region(body),
        arg_attrs=name_list(list(arguments)),
        res_attrs=name_list(list(outputs)),
    )
    _, _, count = slice_of(module) or (first, last, last)
    return ModuleOp([function], attributes={**module.attributes, SLICE: StringAttr(f"{start}:{end} of {count}")})


def _units(module: ModuleOp, first: int, last: int) -> dict[Operation, int]:
    """Every op but weights, in order, with the block it goes with."""
    units: dict[Operation, int] = {}
    inside = False
    for op in ops(module):
        if isinstance(op, WeightOp):
            continue
        inside = inside or op.block_index is not None
        outside = last - 1 if inside else first
        units[op] = outside if op.block_index is None else op.block_index
    return units


def _lives(whole: Signature, units: dict[Operation, int], first: int, last: int) -> dict[SSAValue, tuple[int, int]]:
    """Every tensor that is no weight, in the order of making: the block that makes it (one before the first where it is
    an input of the module) and the last block that reads it (the module's last where it is a result)."""
    born: dict[SSAValue, int] = dict.fromkeys(whole.inputs.values(), first - 1)
    born |= {result: unit for op, unit in units.items() for result in op.results}
    return {
        value: (unit, max((units.get(use.operation, last - 1) for use in value.uses), default=unit))
        for value, unit in born.items()
    }


def _crossing(lives: dict[SSAValue, tuple[int, int]], cut: int) -> dict[str, SSAValue]:
    """What is alive across the cut before block `cut`, by boundary name."""
    alive = [value for value, (born, read) in lives.items() if born < cut <= read]
    return {f"x{index}": value for index, value in enumerate(alive)}
