"""Reading a module: its function, blocks, weights, KV values and boundaries.

A module holds one function `@main`. Its arguments are the batch, the boundary tensors that come in and one KV value
per attention; each carries its name (`plait.name`), and so does each result. The names are what the runtime and the
backends call the tensors by.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

from xdsl.dialects.builtin import ArrayAttr, DictionaryAttr, ModuleOp, StringAttr, TensorType
from xdsl.dialects.func import FuncOp, ReturnOp
from xdsl.ir import BlockArgument, SSAValue
from xdsl.utils.exceptions import VerifyException

from plait.ir.ops import CACHING, PlaitOp, WeightOp
from plait.ir.types import BatchType, KVType, dtype_name
from plait.spec import Boundary, KVLayout, kv_class

#: Attribute of every argument and result of `@main`.
NAME = "plait.name"
#: Attribute of a module: the family it was made for.
MODEL = "plait.model"
#: Attribute of a module that is a slice: `"START:END of COUNT"`, its blocks and those of the whole model.
SLICE = "plait.slice"


@dataclass(frozen=True)
class Signature:
    """What goes in and out of a module, by name and in order."""

    batch: BlockArgument
    inputs: dict[str, BlockArgument]
    kv: dict[str, BlockArgument]
    outputs: dict[str, SSAValue]


def main(module: ModuleOp) -> FuncOp:
    """The module's only function."""
    functions = [op for op in module.ops if isinstance(op, FuncOp)]
    assert len(functions) == 1, "a plait module holds one function"
    return functions[0]


def ops(module: ModuleOp) -> Iterator[PlaitOp]:
    """The plait ops in order."""
    for op in main(module).body.block.ops:
        if isinstance(op, PlaitOp):
            yield op


def name_list(names: list[str]) -> ArrayAttr[DictionaryAttr]:
    """Names as argument or result attributes of a function."""
    return ArrayAttr([DictionaryAttr({NAME: StringAttr(name)}) for name in names])


def _names(attrs: ArrayAttr[DictionaryAttr] | None, count: int) -> list[str]:
    assert attrs is not None and len(attrs.data) == count, "every argument and result of @main has a plait.name"
    names = []
    for entry in attrs.data:
        name = entry.data[NAME]
        assert isinstance(name, StringAttr)
        names.append(name.data)
    return names


def signature(module: ModuleOp) -> Signature:
    """Arguments and results of `@main`, sorted by what they are."""
    function = main(module)
    args = function.body.block.args
    named = dict(zip(_names(function.arg_attrs, len(args)), args, strict=True))
    returned = function.body.block.last_op
    assert isinstance(returned, ReturnOp)
    outputs = _names(function.res_attrs, len(returned.arguments))
    return Signature(
        batch=next(arg for arg in args if isinstance(arg.type, BatchType)),
        inputs={name: arg for name, arg in named.items() if isinstance(arg.type, TensorType)},
        kv={name: arg for name, arg in named.items() if isinstance(arg.type, KVType)},
        outputs=dict(zip(outputs, returned.arguments, strict=True)),
    )


def boundary(name: str, value: SSAValue) -> Boundary:
    """A tensor that crosses, as the manifest says it."""
    kind = value.type
    assert isinstance(kind, TensorType)
    return Boundary(name, tuple(None if dim < 0 else dim for dim in kind.get_shape()), dtype_name(kind.element_type))


def kv_layouts(module: ModuleOp, page_tokens: int) -> tuple[KVLayout, ...]:
    """The KV of every layer of the module, in the order of its KV arguments."""
    layouts = []
    for value in signature(module).kv.values():
        kind = value.type
        assert isinstance(kind, KVType)
        layouts.append(
            KVLayout(
                kv_heads=kind.kv_heads.data,
                head_dim=kind.head_dim.data,
                dtype=dtype_name(kind.dtype),
                page_tokens=page_tokens,
                window=kind.window_tokens,
                values=kind.value_features if kind.is_latent else None,
            )
        )
    return tuple(layouts)


def kv_classes(module: ModuleOp) -> dict[str, int | None]:
    """KV class -> window, over all attentions of the module, and what else keeps KV."""
    return {kv_class(op.window_tokens): op.window_tokens for op in ops(module) if isinstance(op, CACHING)}


def weights(module: ModuleOp) -> dict[str, WeightOp]:
    """The tensors of the checkpoint that the module uses, by name."""
    return {op.symbol.data: op for op in ops(module) if isinstance(op, WeightOp)}


def slice_of(module: ModuleOp) -> tuple[int, int, int] | None:
    """The first block, the end and the whole model's count of blocks that `plait.slice` says; None of a whole model.

    Raises VerifyException where the attribute says something else.
    """
    declared = module.attributes.get(SLICE)
    if declared is None:
        return None
    text = declared.data if isinstance(declared, StringAttr) else str(declared)
    match = re.fullmatch(r"(\d+):(\d+) of (\d+)", text)
    start, end, count = (int(number) for number in match.groups()) if match else (0, 0, 0)
    if not start < end <= count:
        raise VerifyException(f'{SLICE} is "START:END of COUNT", not {text!r}')
    return start, end, count


def block_range(module: ModuleOp) -> tuple[int, int]:
    """The first block of the module and the end: (0, n) of a whole model, others of a slice; (0, 0) without blocks."""
    # A weight says which block used it first; in a slice that may be a block of another slice.
    indices = [op.block_index for op in ops(module) if not isinstance(op, WeightOp) and op.block_index is not None]
    return (indices[0], indices[-1] + 1) if indices else (0, 0)


def block_count(module: ModuleOp) -> int:
    """How many transformer layers the module holds."""
    start, end = block_range(module)
    return end - start
