"""A slice as a torch module without state, for export: weights, step and KV go in, results and KV come out.

Shapes are fixed: S sequences bring T new tokens each and have room for C tokens of KV. The new tokens are the last of
their sequence, at positions `kv_lens - T ... kv_lens - 1`. Activations are (S * T, width) as everywhere in the IR; KV
is contiguous, (S, C, heads, head_dim), and each layer's new K and V are put in their places.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn import functional as F  # noqa: N812
from xdsl.dialects.builtin import ModuleOp, TensorType
from xdsl.ir import SSAValue

from plait.backends.kernels.arrays import TORCH_DTYPES
from plait.backends.kernels.lowering import (
    ROPE_TABLE,
    Lowering,
    attribute_dtype,
    operand_dtype,
    refuse,
    rope_of,
    weight_name,
)
from plait.errors import UsageError
from plait.ir import signature, weights
from plait.ir.module import ops
from plait.ir.ops import (
    AddOp,
    AddRmsNormOp,
    AttentionOp,
    EmbedOp,
    GeluMulOp,
    LinearOp,
    LinearsOp,
    LogitsOp,
    RmsNormOp,
    RopeOp,
    SiluMulOp,
    WeightOp,
)
from plait.ir.rope import frequencies
from plait.ir.types import KVType


@dataclass(frozen=True)
class Shape:
    """One static shape. Raises UsageError `export-shape` where the new tokens have no room."""

    sequences: int
    tokens: int
    context: int

    def __post_init__(self) -> None:
        if min(self.sequences, self.tokens) < 1 or self.context < self.tokens:
            raise UsageError(
                "export-shape",
                f"no step of {self.sequences} x {self.tokens} tokens in a context of {self.context}",
                why="every sequence brings a token, and the context holds the new tokens too",
            )


@dataclass(frozen=True)
class Argument:
    """One argument or result of the exported function."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype


@dataclass
class Run:
    """One call while it is traced; `kv` is replaced when written."""

    shape: Shape
    args: dict[str, Tensor]
    kv: dict[SSAValue, tuple[Tensor, Tensor]] = field(default_factory=dict)

    @property
    def first(self) -> Tensor:
        """[S, 1] position of the first new token."""
        return (self.args["kv_lens"] - self.shape.tokens)[:, None]

    @property
    def positions(self) -> Tensor:
        """[S, T]."""
        return self.first + torch.arange(self.shape.tokens, dtype=torch.int32)


Emit = Callable[..., Any]
"""`emit(run, *activations)`: a tensor, or several."""

LOWERING: Lowering[Emit] = Lowering("torch.export")


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
        run.kv = {value: (args[f"{name}.k"], args[f"{name}.v"]) for name, value in sig.kv.items()}
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
    if AttentionOp in kinds or RopeOp in kinds:
        whole.append(Argument("kv_lens", (shape.sequences,), torch.int32))
    if LogitsOp in kinds:
        whole.append(Argument("logit_rows", (shape.sequences,), torch.int32))
    for name, value in sig.kv.items():
        kind = value.type
        assert isinstance(kind, KVType)
        pages = (shape.sequences, shape.context, kind.kv_heads.data, kind.head_dim.data)
        dtype = TORCH_DTYPES[attribute_dtype(_user(value), kind.dtype)]
        whole += [Argument(f"{name}.{side}", pages, dtype) for side in ("k", "v")]
    return whole


def _user(value: SSAValue) -> Any:
    return next(iter(value.uses)).operation


def _argument(name: str, value: SSAValue, rows: int) -> Argument:
    """A tensor of the IR; its dynamic dimension becomes `rows`."""
    kind = value.type
    assert isinstance(kind, TensorType)
    shape = tuple(rows if dim < 0 else dim for dim in kind.get_shape())
    return Argument(name, shape, TORCH_DTYPES[operand_dtype(_user(value), value)])


@LOWERING.emits(EmbedOp)
def _embed(op: EmbedOp) -> Emit:
    name = weight_name(op, op.table)
    operand_dtype(op, op.table)
    return lambda run: F.embedding(run.args["tokens"].reshape(-1).long(), run.args[name])


def _norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """In float32, rounded once."""
    return F.rms_norm(x.float(), weight.shape, weight.float(), eps).to(x.dtype)


@LOWERING.emits(RmsNormOp, "eps")
def _rms_norm(op: RmsNormOp) -> Emit:
    name, eps = weight_name(op, op.weight), op.eps.value.data
    operand_dtype(op, op.x)
    return lambda run, x: _norm(x, run.args[name], eps)


@LOWERING.emits(AddRmsNormOp, "eps")
def _add_rms_norm(op: AddRmsNormOp) -> Emit:
    name, eps = weight_name(op, op.weight), op.eps.value.data
    operand_dtype(op, op.x)

    def emit(run: Run, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        total = x + y
        return total, _norm(total, run.args[name], eps)

    return emit


@LOWERING.emits(LinearOp)
def _linear(op: LinearOp) -> Emit:
    operand_dtype(op, op.weight)
    return _product(weight_name(op, op.weight), None if op.bias is None else weight_name(op, op.bias))


def _product(matrix: str, bias: str | None) -> Emit:
    return lambda run, x: F.linear(x, run.args[matrix], None if bias is None else run.args[bias])


@LOWERING.emits(LinearsOp)
def _linears(op: LinearsOp) -> Emit:
    for weight in op.weights:
        operand_dtype(op, weight)
    names: list[str | None] = [weight_name(op, bias) for bias in op.biases] or [None] * len(op.weights)
    products = [_product(weight_name(op, w), name) for w, name in zip(op.weights, names, strict=True)]
    return lambda run, x: [product(run, x) for product in products]


@LOWERING.emits(RopeOp, "head_dim", *ROPE_TABLE)
def _rope(op: RopeOp) -> Emit:
    operand_dtype(op, op.x)
    head_dim, rope = op.head_dim.value.data, rope_of(op)
    per_position = torch.from_numpy(frequencies(rope, head_dim))
    factor = rope.attention_factor or 1.0

    def emit(run: Run, x: Tensor) -> Tensor:
        angle = run.positions.reshape(-1, 1, 1).float() * per_position
        cos, sin = angle.cos() * factor, angle.sin() * factor
        a, b = x.reshape(x.shape[0], -1, head_dim).float().chunk(2, dim=-1)
        return torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1).reshape(x.shape).to(x.dtype)

    return emit


@LOWERING.emits(AttentionOp, "heads", "scale", "window", "softcap", "sinks")
def _attention(op: AttentionOp) -> Emit:
    dtype = operand_dtype(op, op.q)
    if attribute_dtype(op, op.cache.dtype) != dtype:
        raise refuse(op, "KV dtype", op.cache.dtype, f"q is {dtype}, and this form attends in one dtype")
    sinks = None if op.sinks is None else weight_name(op, op.sinks)
    window, scale, kv = op.window_tokens, op.scale.value.data, op.kv
    softcap = None if op.softcap is None else op.softcap.value.data
    kv_heads, head_dim = op.kv_heads, op.head_dim

    def emit(run: Run, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        shape = run.shape
        new = (shape.sequences, shape.tokens, kv_heads, head_dim)
        run.kv[kv] = keys, values = tuple(  # type: ignore[assignment]
            _written(run, held, fresh.reshape(new)) for held, fresh in zip(run.kv[kv], (k, v), strict=True)
        )
        places, positions = torch.arange(shape.context, dtype=torch.int32), run.positions[:, :, None]
        visible = places <= positions  # [S, T, C]
        if window is not None:
            visible = visible & (places > positions - window)
        # What nobody sees may be infinite, and 0 * inf is not 0.
        alive = (places < run.args["kv_lens"][:, None])[:, :, None, None]
        values = torch.where(alive, values, torch.zeros((), dtype=values.dtype))
        queries = q.reshape(*new[:3], -1, head_dim)  # by the KV head they share
        scores = torch.einsum("stngd,scnd->sngtc", queries.float(), keys.float()) * scale
        if softcap is not None:
            scores = softcap * torch.tanh(scores / softcap)
        scores = scores.masked_fill(~visible[:, None, None], float("-inf"))
        if sinks is not None:  # one more score per head, of a key without a value
            sink = run.args[sinks].float().reshape(1, kv_heads, -1, 1, 1).expand(*scores.shape[:-1], 1)
            scores = torch.cat((scores, sink), dim=-1)
        shares = torch.softmax(scores, dim=-1)[..., : shape.context]
        return torch.einsum("sngtc,scnd->stngd", shares, values.float()).reshape(q.shape).to(q.dtype)

    return emit


def _written(run: Run, held: Tensor, fresh: Tensor) -> Tensor:
    """`held` [S, C, N, D] with `fresh` [S, T, N, D] in its places."""
    step = torch.arange(run.shape.context, dtype=torch.int32) - run.first  # [S, C]: which new token stands there
    inside = ((step >= 0) & (step < run.shape.tokens))[:, :, None, None]
    index = step.clamp(0, run.shape.tokens - 1).long()[:, :, None, None].expand(held.shape)
    return torch.where(inside, fresh.gather(1, index), held)


@LOWERING.emits(SiluMulOp)
def _silu_mul(op: SiluMulOp) -> Emit:
    operand_dtype(op, op.x)
    return lambda run, gate, up: (F.silu(gate.float()) * up.float()).to(gate.dtype)


@LOWERING.emits(GeluMulOp, "approximate")
def _gelu_mul(op: GeluMulOp) -> Emit:
    operand_dtype(op, op.x)
    kind = op.approximate.data
    return lambda run, gate, up: (F.gelu(gate.float(), approximate=kind) * up.float()).to(gate.dtype)


@LOWERING.emits(AddOp)
def _add(op: AddOp) -> Emit:
    operand_dtype(op, op.x)
    return lambda run, x, y: x + y


@LOWERING.emits(LogitsOp)
def _logits(op: LogitsOp) -> Emit:
    name = weight_name(op, op.weight)
    operand_dtype(op, op.weight)
    return lambda run, x: F.linear(x[run.args["logit_rows"].long()].float(), run.args[name].float())
