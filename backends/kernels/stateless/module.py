"""The module itself: its arguments, its results, and the ops one after the other."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from xdsl.dialects.builtin import ModuleOp, TensorType
from xdsl.ir import SSAValue

from plait.backends.kernels.arrays import TORCH_DTYPES
from plait.backends.kernels.lowering import attribute_dtype, operand_dtype
from plait.backends.kernels.stateless.table import LOWERING, Run, Shape
from plait.ir import signature, weights
from plait.ir.module import ops
from plait.ir.ops import AttentionOp, EmbedOp, EmbedPositionsOp, LatentAttentionOp, LogitsOp, RopeOp, WeightOp
from plait.ir.types import KVType

_PLACED = {AttentionOp, EmbedPositionsOp, LatentAttentionOp, RopeOp}
"""Ops that ask where a token stands."""


@dataclass(frozen=True)
class Argument:
    """One argument or result of the exported function."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype


class StatelessSlice(torch.nn.Module):
    """The slice's function; call it with tensors as `arguments` lists them.

    Raises UnsupportedError, naming the op and the attribute, where it cannot be written this way.
    """

    def __init__(self, module: ModuleOp, shape: Shape) -> None:
        super().__init__()
        self._shape, self._signature = shape, signature(module)
        program = [op for op in ops(module) if not isinstance(op, WeightOp)]
        self._program = [(LOWERING.emit(op), op.operands, op.results) for op in program]
        self.arguments = tuple(_arguments(module, shape))
        rows = {True: shape.sequences, False: shape.sequences * shape.tokens}
        self.results = tuple(
            chain(
                (
                    _argument(name, value, rows[isinstance(value.owner, LogitsOp)])
                    for name, value in self._signature.outputs.items()
                ),
                (argument for argument in self.arguments if argument.name.startswith("kv.")),
            )
        )

    def example(self) -> list[Tensor]:
        """Arguments of the right shapes that take no memory."""
        with FakeTensorMode():
            return [torch.empty(a.shape, dtype=a.dtype) for a in self.arguments]

    def forward(self, *tensors: Tensor) -> tuple[Tensor, ...]:
        args = dict(zip((a.name for a in self.arguments), tensors, strict=True))
        run = Run(self._shape, args)
        sig = self._signature
        run.kv = {value: tuple(args[f"{name}.{side}"] for side in _sides(value)) for name, value in sig.kv.items()}
        env: dict[SSAValue, Any] = {value: args[name] for name, value in sig.inputs.items()}
        for emit, operands, results in self._program:
            made = emit(run, *[env[value] for value in operands if value in env])
            env.update(zip(results, made if len(results) > 1 else (made,), strict=True))
        kept = chain.from_iterable(run.kv[value] for value in sig.kv.values())
        return (*(env[value] for value in sig.outputs.values()), *kept)


def _arguments(module: ModuleOp, shape: Shape) -> Sequence[Argument]:
    """Weights, boundary tensors, what the step says, KV: only what the slice uses."""
    sig, kinds = signature(module), {type(op) for op in ops(module)}
    whole = [_argument(name, op.result, 0) for name, op in weights(module).items()]
    whole += [_argument(name, value, shape.sequences * shape.tokens) for name, value in sig.inputs.items()]
    if EmbedOp in kinds:
        whole.append(Argument("tokens", (shape.sequences, shape.tokens), torch.int32))
    if kinds & _PLACED:
        whole.append(Argument("kv_lens", (shape.sequences,), torch.int32))
    if LogitsOp in kinds:
        whole.append(Argument("logit_rows", (shape.sequences,), torch.int32))
    for name, value in sig.kv.items():
        kind = _kind(value)
        pages = (shape.sequences, shape.context, kind.kv_heads.data, kind.head_dim.data)
        dtype = TORCH_DTYPES[attribute_dtype(_user(value), kind.dtype)]
        whole += [Argument(f"{name}.{side}", pages, dtype) for side in _sides(value)]
    return whole


def _kind(value: SSAValue) -> KVType:
    assert isinstance(value.type, KVType)
    return value.type


def _sides(value: SSAValue) -> str:
    """The arguments that a layer's KV is: of a latent one K alone."""
    return "k" if _kind(value).is_latent else "kv"


def _user(value: SSAValue) -> Any:
    return next(iter(value.uses)).operation


def _argument(name: str, value: SSAValue, rows: int) -> Argument:
    """A tensor of the IR; its dynamic dimension becomes `rows`."""
    kind = value.type
    assert isinstance(kind, TensorType)
    shape = tuple(rows if dim < 0 else dim for dim in kind.get_shape())
    return Argument(name, shape, TORCH_DTYPES[operand_dtype(_user(value), value)])
