"""Cutting a module into slices."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from xdsl.context import Context
from xdsl.dialects.builtin import ModuleOp, StringAttr, TensorType
from xdsl.dialects.func import FuncOp, ReturnOp
from xdsl.ir import Block, Region, SSAValue
from xdsl.passes import ModulePass

from plait.ir.module import block_count, main, name_list, ops, signature
from plait.ir.ops import PlaitOp, WeightOp


@dataclass(frozen=True)
class SlicePass(ModulePass):
    """Keep blocks [start, end). What stands before block 0 goes with it, what stands after the last block with that.

    Weights follow their users, so one that two slices use (a tied embedding) is in both. Every other value that crosses
    the cut becomes an argument or a result named `x0`, `x1` ... in the order of its making.
    """

    name = "slice"

    start: int
    end: int

    def apply(self, ctx: Context, op: ModuleOp) -> None:
        count = block_count(op)
        assert 0 <= self.start < self.end <= count, f"no blocks [{self.start}, {self.end}) in {count}"
        kept = [item for item, unit in _units(op, count) if self.start <= unit < self.end]
        model = main(op)
        inside = set(kept)
        sig = signature(op)
        crossing = _crossing(op, count)
        incoming = [v for v, (born, last) in crossing.items() if born < self.start <= last]
        outgoing = [v for v, (born, last) in crossing.items() if born < self.end <= last]
        caches = [(n, v) for n, v in sig.kv.items() if any(use.operation in inside for use in v.uses)]
        arguments: list[tuple[str, SSAValue]] = [("batch", sig.batch)]
        arguments += [(f"x{i}", value) for i, value in enumerate(incoming)]
        arguments += caches

        body = Block(arg_types=[value.type for _, value in arguments])
        mapped: dict[SSAValue, SSAValue] = {value: arg for (_, value), arg in zip(arguments, body.args, strict=True)}
        for weight in ops(op):
            users = {use.operation for use in weight.results[0].uses} if isinstance(weight, WeightOp) else set()
            if users & inside:
                body.add_op(weight.clone(mapped))
        for item in kept:
            body.add_op(item.clone(mapped))
        outputs = dict(sig.outputs) if self.end == count else {f"x{i}": value for i, value in enumerate(outgoing)}
        body.add_op(ReturnOp(*(mapped[value] for value in outputs.values())))
        sliced = FuncOp(
            "main",
            ([arg.type for arg in body.args], [value.type for value in outputs.values()]),
            Region(body),
            arg_attrs=name_list([name for name, _ in arguments]),
            res_attrs=name_list(list(outputs)),
        )
        model.detach()  # type: ignore[no-untyped-call]
        model.erase(safe_erase=False)
        op.body.block.add_op(sliced)
        op.attributes["plait.slice"] = StringAttr(f"{self.start}:{self.end} of {count}")


def slice_modules(module: ModuleOp, cuts: Sequence[tuple[int, int]]) -> list[ModuleOp]:
    """One module per range of blocks. The ranges must cover the blocks in order, without gap or overlap."""
    from plait.ir.dialect import context

    ends = [end for _, end in cuts]
    assert [start for start, _ in cuts] == [0, *ends[:-1]], f"{cuts} leaves a gap or an overlap"
    assert ends[-1] == block_count(module), f"{cuts} does not reach block {block_count(module)}"
    return [SlicePass(start, end).apply_to_clone(context(), module)[1] for start, end in cuts]


def _units(module: ModuleOp, count: int) -> Iterator[tuple[PlaitOp, int]]:
    """Every op but weights with the block it goes with."""
    unit = 0
    inside = False
    for op in ops(module):
        if isinstance(op, WeightOp):
            continue
        if op.block_index is not None:
            unit, inside = op.block_index, True
        elif inside:
            unit = count - 1
        yield op, unit


def _crossing(module: ModuleOp, count: int) -> dict[SSAValue, tuple[int, int]]:
    """Tensor values that live across a block boundary: the block that makes them and the last block that reads them."""
    unit = dict(_units(module, count))
    out: dict[SSAValue, tuple[int, int]] = {}
    for op, born in unit.items():
        for result in op.results:
            readers = [unit[use.operation] for use in result.uses if isinstance(use.operation, PlaitOp)]
            last = max(readers, default=born)
            if isinstance(result.type, TensorType) and last > born:
                out[result] = (born, last)
    return out
