"""How ops become ONNX nodes: the table that `onnx_export` writes a slice by.

Norms, rope and attention are computed in float32 and rounded once, whatever the slice computes in.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import numpy as np
from xdsl.dialects.builtin import TensorType
from xdsl.ir import SSAValue

from plait.backends.kernels.lowering import (
    ROPE_TABLE,
    Lowering,
    attribute_dtype,
    operand_dtype,
    refuse,
    rope_of,
    weight_name,
)
from plait.ir.ops import (
    AddOp,
    AddRmsNormOp,
    AttentionOp,
    EmbedOp,
    EmbedPositionsOp,
    GeluMulOp,
    GeluOp,
    LayerNormOp,
    LinearOp,
    LinearsOp,
    LogitsOp,
    RmsNormOp,
    RopeOp,
    ScaleOp,
    SiluMulOp,
)
from plait.ir.rope import Rope, frequencies

if TYPE_CHECKING:
    import onnx_ir as ir

DTYPES = ("float32", "float16")
"""onnxruntime multiplies no bfloat16 matrices on CPUs."""


def dtype_of(dtype: str) -> ir.DataType:
    import onnx_ir as ir

    return {"float32": ir.DataType.FLOAT, "float16": ir.DataType.FLOAT16, "int64": ir.DataType.INT64}[dtype]


def _elem(dtype: str) -> int:
    return int(dtype_of(dtype))


def width_of(value: SSAValue) -> int:
    """Of (tokens, width)."""
    kind = value.type
    assert isinstance(kind, TensorType)
    return kind.get_shape()[1]


@dataclass
class Run:
    """One model while it is written.

    Attributes:
        tape: collects nodes.
        tensors: the weights, stored as (in, out) where `flipped` says so.
        past: K and V that go in; `present` those that come out.
    """

    tape: Any
    tensors: Mapping[str, ir.Value]
    flipped: frozenset[str]
    past: Mapping[SSAValue, tuple[ir.Value, ir.Value]]
    tokens: ir.Value | None
    new: ir.Value
    """[1] the new tokens of each sequence."""
    known: ir.Value
    """[1] the tokens of each sequence in the KV cache."""
    plain: bool
    """All is float32."""
    present: dict[SSAValue, tuple[ir.Value, ir.Value]] = field(default_factory=dict)
    made: dict[Any, Any] = field(default_factory=dict)

    def __call__(self, kind: str, *inputs: ir.Value | None, **attributes: Any) -> ir.Value:
        """The result of a new node."""
        made: ir.Value = self.tape.op(kind, inputs, attributes=attributes)
        return made

    def constant(self, values: Any, dtype: Any = np.float32) -> ir.Value:
        import onnx_ir as ir

        array = np.asarray(values, dtype)
        return self("Constant", value=ir.tensor(array))

    def sizes(self, *values: int) -> ir.Value:
        return self.constant(values, np.int64)

    def once(self, key: Any, make: Callable[[], Any]) -> Any:
        """What several ops share is written once."""
        if key not in self.made:
            self.made[key] = make()
        return self.made[key]

    def wide(self, x: ir.Value) -> ir.Value:
        """An activation or a weight in float32."""
        return x if self.plain else self("Cast", x, to=_elem("float32"))

    def rounded(self, x: ir.Value, dtype: str) -> ir.Value:
        return x if dtype == "float32" else self("Cast", x, to=_elem(dtype))

    def total(self) -> ir.Value:
        """[1] the tokens of each sequence, the new ones counted."""
        made: ir.Value = self.once("total", lambda: self("Add", self.known, self.new))
        return made

    def positions(self) -> ir.Value:
        """[sequence] int64."""
        made: ir.Value = self.once("positions", lambda: self.range(self.known, self.total()))
        return made

    def range(self, start: ir.Value, end: ir.Value) -> ir.Value:
        flat = self.sizes()
        return self("Range", self("Reshape", start, flat), self("Reshape", end, flat), self.constant(1, np.int64))


Emit = Callable[..., Any]
"""`emit(run, *activations)`: an ONNX value, or several."""

LOWERING: Lowering[Emit] = Lowering("ONNX")


@LOWERING.emits(EmbedOp)
def _embed(op: EmbedOp) -> Emit:
    name, dtype = weight_name(op, op.table), operand_dtype(op, op.result, DTYPES)
    return lambda run: run.rounded(run("Gather", run.tensors[name], run.tokens, axis=0), dtype)


@LOWERING.emits(EmbedPositionsOp)
def _embed_positions(op: EmbedPositionsOp) -> Emit:
    name, width = weight_name(op, op.table), width_of(op.result)
    operand_dtype(op, op.result, DTYPES)

    def emit(run: Run) -> ir.Value:
        rows = run("Gather", run.tensors[name], run.positions(), axis=0)
        batch = run("Shape", run.tokens, start=0, end=1)
        return run("Expand", rows, run("Concat", batch, run.new, run.sizes(width), axis=0))

    return emit


def _norm(run: Run, x: ir.Value, dtype: str, eps: float, weight: Norm) -> ir.Value:
    """Over the last axis or, with a group, over each run of it; in float32, rounded once."""
    wide = run.wide(x)
    if weight.group is not None:
        wide = run("Reshape", wide, run.sizes(0, 0, -1, weight.group))
    axis = run.sizes(-1)
    if weight.centred:
        wide = run("Sub", wide, run("ReduceMean", wide, axis, keepdims=1))
    mean = run("ReduceMean", run("Mul", wide, wide), axis, keepdims=1)
    made = run("Div", wide, run("Sqrt", run("Add", mean, run.constant(eps))))
    scale = weight.scale(run)
    made = run("Mul", made, run("Add", scale, run.constant(weight.offset)) if weight.offset else scale)
    if weight.bias is not None:
        made = run("Add", made, weight.reshaped(run, weight.bias))
    if weight.group is not None:
        made = run("Reshape", made, run.sizes(0, 0, weight.width))
    return run.rounded(made, dtype)


@dataclass(frozen=True)
class Norm:
    """What a norm multiplies by and adds; `width` features, those of each `group` by themselves."""

    name: str
    bias: str | None
    width: int
    group: int | None
    per_group: bool
    offset: float
    centred: bool

    def reshaped(self, run: Run, name: str) -> ir.Value:
        wide = run.wide(run.tensors[name])
        return run("Reshape", wide, run.sizes(-1, self.group)) if self.group and self.per_group else wide

    def scale(self, run: Run) -> ir.Value:
        return self.reshaped(run, self.name)


def _norm_of(op: Any, group: Any = None, offset: Any = None, bias: str | None = None, *, centred: bool = False) -> Norm:
    each = None if group is None else group.value.data
    width, held = width_of(op.x), op.weight.type.get_shape()[0]
    shift = 0.0 if offset is None else offset.value.data
    return Norm(weight_name(op, op.weight), bias, width, each, each is not None and held == width, shift, centred)


@LOWERING.emits(RmsNormOp, "eps", "group", "offset")
def _rms_norm(op: RmsNormOp) -> Emit:
    dtype, eps, norm = operand_dtype(op, op.x, DTYPES), op.eps.value.data, _norm_of(op, op.group, op.offset)
    return lambda run, x: _norm(run, x, dtype, eps, norm)


@LOWERING.emits(LayerNormOp, "eps", "group")
def _layer_norm(op: LayerNormOp) -> Emit:
    dtype, eps = operand_dtype(op, op.x, DTYPES), op.eps.value.data
    bias = None if op.bias is None else weight_name(op, op.bias)
    norm = _norm_of(op, op.group, bias=bias, centred=True)
    return lambda run, x: _norm(run, x, dtype, eps, norm)


@LOWERING.emits(AddRmsNormOp, "eps", "offset")
def _add_rms_norm(op: AddRmsNormOp) -> Emit:
    dtype, eps, norm = operand_dtype(op, op.x, DTYPES), op.eps.value.data, _norm_of(op, offset=op.offset)

    def emit(run: Run, x: ir.Value, y: ir.Value) -> tuple[ir.Value, ir.Value]:
        total = run("Add", x, y)
        return total, _norm(run, total, dtype, eps, norm)

    return emit


def _matrix(run: Run, name: str) -> ir.Value:
    """A weight as (in, out)."""
    matrix = run.tensors[name]
    if name not in run.flipped:
        matrix = run.once(("matrix", name), lambda: run("Transpose", run.tensors[name], perm=(1, 0)))
    return matrix


def _product(matrix: str, bias: str | None) -> Emit:
    def emit(run: Run, x: ir.Value) -> ir.Value:
        made = run("MatMul", x, _matrix(run, matrix))
        return made if bias is None else run("Add", made, run.tensors[bias])

    return emit


@LOWERING.emits(LinearOp)
def _linear(op: LinearOp) -> Emit:
    operand_dtype(op, op.x, DTYPES)
    return _product(weight_name(op, op.weight), None if op.bias is None else weight_name(op, op.bias))


@LOWERING.emits(LinearsOp)
def _linears(op: LinearsOp) -> Emit:
    operand_dtype(op, op.x, DTYPES)
    names: list[str | None] = [weight_name(op, bias) for bias in op.biases] or [None] * len(op.weights)
    products = [_product(weight_name(op, w), name) for w, name in zip(op.weights, names, strict=True)]
    return lambda run, x: [product(run, x) for product in products]


def _angles(run: Run, rope: Rope, rotary_dim: int) -> tuple[ir.Value, ir.Value]:
    """cos and sin, [sequence, 1, rotary_dim / 2], of float32 angles."""
    positions = run("Cast", run("Reshape", run.positions(), run.sizes(-1, 1, 1)), to=_elem("float32"))
    angle = run("Mul", positions, run.constant(frequencies(rope, rotary_dim)))
    tables = run("Cos", angle), run("Sin", angle)
    if rope.attention_factor is None:
        return tables
    factor = run.constant(rope.attention_factor)
    return run("Mul", tables[0], factor), run("Mul", tables[1], factor)


@LOWERING.emits(RopeOp, "head_dim", "rotary_dim", *ROPE_TABLE)
def _rope(op: RopeOp) -> Emit:
    dtype, width = operand_dtype(op, op.x, DTYPES), width_of(op.x)
    head_dim, rotated, rope = op.head_dim.value.data, op.rotated, rope_of(op)

    def emit(run: Run, x: ir.Value) -> ir.Value:
        cos, sin = run.once((rope, rotated), lambda: _angles(run, rope, rotated))
        heads = run("Reshape", run.wide(x), run.sizes(0, 0, -1, head_dim))
        cuts = [0, rotated // 2, rotated, head_dim]
        a, b, *rest = (
            run("Slice", heads, run.sizes(start), run.sizes(end), run.sizes(3))
            for start, end in pairwise(cuts)
            if start < end
        )
        left = run("Sub", run("Mul", a, cos), run("Mul", b, sin))
        right = run("Add", run("Mul", b, cos), run("Mul", a, sin))
        turned = run("Concat", left, right, *rest, axis=-1)
        return run.rounded(run("Reshape", turned, run.sizes(0, 0, width)), dtype)

    return emit


def _visible(run: Run, window: int | None) -> ir.Value:
    """[sequence, total] whether a key is seen."""
    positions = run("Unsqueeze", run.positions(), run.sizes(1))
    places = run.once("places", lambda: run.range(run.sizes(0), run.total()))
    behind = run("LessOrEqual", places, positions)
    if window is None:
        return behind
    return run("And", behind, run("Greater", places, run("Sub", positions, run.sizes(window))))


@LOWERING.emits(AttentionOp, "heads", "scale", "window", "softcap", "sinks")
def _attention(op: AttentionOp) -> Emit:
    dtype = operand_dtype(op, op.q, DTYPES)
    if attribute_dtype(op, op.cache.dtype, DTYPES) != dtype:
        raise refuse(op, "KV dtype", op.cache.dtype, f"q is {dtype}, and this form attends in one dtype")
    sinks = None if op.sinks is None else weight_name(op, op.sinks)
    window, scale, kv = op.window_tokens, op.scale.value.data, op.kv
    softcap = None if op.softcap is None else op.softcap.value.data
    kv_heads, head_dim, group = op.kv_heads, op.head_dim, op.heads.value.data // op.kv_heads

    def emit(run: Run, q: ir.Value, k: ir.Value, v: ir.Value) -> ir.Value:
        fresh = (run("Reshape", x, run.sizes(0, 0, kv_heads, head_dim)) for x in (k, v))
        new = (run("Transpose", x, perm=(0, 2, 1, 3)) for x in fresh)
        run.present[kv] = held = tuple(run("Concat", *pair, axis=2) for pair in zip(run.past[kv], new, strict=True))  # type: ignore[assignment]
        keys, values = (run("Unsqueeze", run.wide(x), run.sizes(2)) for x in held)  # [B, KV, 1, total, D]
        queries = run("Reshape", run.wide(q), run.sizes(0, 0, kv_heads, group, head_dim))
        queries = run("Transpose", queries, perm=(0, 2, 3, 1, 4))  # [B, KV, group, sequence, D]
        scores = run("MatMul", queries, run("Transpose", keys, perm=(0, 1, 2, 4, 3)))
        scores = run("Mul", scores, run.constant(scale))
        if softcap is not None:
            cap = run.constant(softcap)
            scores = run("Mul", run("Tanh", run("Div", scores, cap)), cap)
        visible = run.once(("visible", window), lambda: _visible(run, window))
        scores = run("Where", visible, scores, run.constant(-np.inf))
        if sinks is not None:  # one more score per head, of a key without a value
            shape = run("Concat", run("Shape", scores, start=0, end=4), run.sizes(1), axis=0)
            sink = run("Reshape", run.wide(run.tensors[sinks]), run.sizes(1, kv_heads, group, 1, 1))
            scores = run("Concat", scores, run("Expand", sink, shape), axis=-1)
        shares = run("Softmax", scores, axis=-1)
        if sinks is not None:
            shares = run("Slice", shares, run.sizes(0), run.total(), run.sizes(4))
        mixed = run("Transpose", run("MatMul", shares, values), perm=(0, 3, 1, 2, 4))
        return run.rounded(run("Reshape", mixed, run.sizes(0, 0, kv_heads * group * head_dim)), dtype)

    return emit


@LOWERING.emits(SiluMulOp)
def _silu_mul(op: SiluMulOp) -> Emit:
    dtype = operand_dtype(op, op.x, DTYPES)

    def emit(run: Run, gate: ir.Value, up: ir.Value) -> ir.Value:
        wide = run.wide(gate)
        return run.rounded(run("Mul", run("Mul", wide, run("Sigmoid", wide)), run.wide(up)), dtype)

    return emit


@LOWERING.emits(GeluMulOp, "approximate")
def _gelu_mul(op: GeluMulOp) -> Emit:
    dtype, kind = operand_dtype(op, op.x, DTYPES), op.approximate.data
    return lambda run, gate, up: run.rounded(
        run("Mul", run("Gelu", run.wide(gate), approximate=kind), run.wide(up)), dtype
    )


@LOWERING.emits(GeluOp, "approximate")
def _gelu(op: GeluOp) -> Emit:
    dtype, kind = operand_dtype(op, op.x, DTYPES), op.approximate.data
    return lambda run, x: run.rounded(run("Gelu", run.wide(x), approximate=kind), dtype)


@LOWERING.emits(AddOp)
def _add(op: AddOp) -> Emit:
    operand_dtype(op, op.x, DTYPES)
    return lambda run, x, y: run("Add", x, y)


@LOWERING.emits(ScaleOp, "factor")
def _scale(op: ScaleOp) -> Emit:
    dtype, factor = operand_dtype(op, op.x, DTYPES), op.factor.value.data
    return lambda run, x: run.rounded(run("Mul", run.wide(x), run.constant(factor)), dtype)


@LOWERING.emits(LogitsOp, "scale", "softcap")
def _logits(op: LogitsOp) -> Emit:
    name = weight_name(op, op.weight)
    operand_dtype(op, op.x, DTYPES)
    scale, softcap = (None if attr is None else attr.value.data for attr in (op.scale, op.softcap))

    def emit(run: Run, x: ir.Value) -> ir.Value:
        scores = run("MatMul", run.wide(x), run.wide(_matrix(run, name)))
        if scale is not None:
            scores = run("Mul", scores, run.constant(scale))
        if softcap is not None:
            cap = run.constant(softcap)
            scores = run("Mul", run("Tanh", run("Div", scores, cap)), cap)
        return scores

    return emit
