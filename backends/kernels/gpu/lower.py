"""A slice's module to its launch plan. `LOWERING` says which ops with which attributes there are kernels for.

What is fused is settled here: linears of one input are one product whose results are strided views; gate, up and the
activation are one product; a residual add goes into the product before it; both rotary embeddings and the KV write are
one launch. No fusion crosses a block, so a slice computes what the whole model does.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from xdsl.dialects.builtin import ModuleOp
from xdsl.ir import SSAValue

from plait.backends.base import CompileOptions
from plait.backends.kernels.gpu import (  # noqa: F401  # they register their emitters
    lower_attention,
    lower_experts,
    lower_latent,
)
from plait.backends.kernels.gpu.archs import Arch
from plait.backends.kernels.gpu.draft import (
    LOWERING,
    Constants,
    Draft,
    Emit,
    Pick,
    Places,
    Scalars,
    View,
    null,
    pages_type,
    tensor_of,
    user,
    width_of,
)
from plait.backends.kernels.gpu.launch import Fact, LaunchPlan
from plait.backends.kernels.gpu.product import Activation, activation, gated_product, product, values
from plait.backends.kernels.lowering import Lowering, op_name, operand_dtype, refuse, weight_kind, weight_name
from plait.errors import UnsupportedError
from plait.ir.module import ops
from plait.ir.ops import (
    AddOp,
    AddRmsNormOp,
    AttentionOp,
    EmbedOp,
    EmbedPositionsOp,
    GeluMulOp,
    GeluOp,
    LatentAttentionOp,
    LayerNormOp,
    LinearOp,
    LinearsOp,
    LogitsOp,
    PlaitOp,
    RmsNormOp,
    ScaleOp,
    SiluMulOp,
    WeightOp,
)
from plait.ir.ops.base import number
from plait.ir.ops.elementwise import GELU

__all__ = ["LOWERING", "lower", "lowering"]


def lower(module: ModuleOp, target: str, arch: Arch, options: CompileOptions, pick: Pick) -> LaunchPlan:
    """The launch plan of a slice for batches up to the bounds of `options`.

    Raises:
        UnsupportedError: naming the op and the attribute.
    """
    program = [(op, lowering(arch).emit(op)) for op in ops(module)]
    _check_logits(module)
    draft = Draft(module, target, arch, options, pick)
    for op, emit in program:
        draft.op = op
        if op not in draft.done:
            emit(draft)
    return draft.finish()


def lowering(arch: Arch) -> Lowering[Emit]:
    """`LOWERING`, without what the architecture cannot do."""

    def check(op: PlaitOp) -> None:
        if isinstance(op, AttentionOp | LatentAttentionOp):
            pages_type(op, arch)

    return LOWERING.checked(check)


def _check_logits(module: ModuleOp) -> None:
    """Refuse what reads logits: their rows are not the batch's tokens."""
    for op in ops(module):
        if any(isinstance(value.owner, LogitsOp) for value in op.operands):
            raise UnsupportedError("op-unsupported", f"{op_name(op)} is not supported", why="it reads logits")


@LOWERING.emits(WeightOp, "symbol")
def _weight(op: WeightOp) -> Emit:
    """Its users read it by name."""
    weight_kind(op)
    return lambda draft: None


@LOWERING.emits(EmbedOp)
def _embed(op: EmbedOp) -> Emit:
    return _rows_of(op, Fact("tokens", "i32", ("T",)))


@LOWERING.emits(EmbedPositionsOp)
def _embed_positions(op: EmbedPositionsOp) -> Emit:
    return _rows_of(op, Fact("positions", "i32", ("T",)))


def _rows_of(op: EmbedOp | EmbedPositionsOp, chosen: Fact) -> Emit:
    """The chosen rows of a table, times the factor that follows at once: a table's values need no rounding between."""
    weight_name(op, op.table)
    dtype = operand_dtype(op, op.result)

    def emit(d: Draft) -> None:
        scale = user(op.result)
        if isinstance(scale, ScaleOp):
            d.done.add(scale)
            result, factor = scale.result, scale.factor.value.data
        else:
            result, factor = op.result, 1.0
        out = d.make(result)
        places: Places = {"tokens": d.fact(chosen), "table": d.weight(values([op.table], dtype)), "out": out}
        d.launch("embed", places, {"rows": "T", "H": out.width, "out_stride": out.stride, "factor": factor}, {})

    return emit


@LOWERING.emits(RmsNormOp, "eps", "group", "offset")
def _rms_norm(op: RmsNormOp) -> Emit:
    weight_name(op, op.weight)
    operand_dtype(op, op.x)
    return lambda d: _norm(d, op, d.view(op.x), d.make(op.result), number(op.group))


@LOWERING.emits(AddRmsNormOp, "eps", "offset")
def _add_rms_norm(op: AddRmsNormOp) -> Emit:
    weight_name(op, op.weight)
    dtype = operand_dtype(op, op.x)

    def emit(d: Draft) -> None:
        if d.knows(op.sum):  # the product before it added already
            _norm(d, op, d.view(op.sum), d.make(op.normed))
            return
        views = {"x": d.view(op.x), "y": d.view(op.y), "total": d.make(op.sum), "out": d.make(op.normed)}
        strides = {f"{name}_stride": view.stride for name, view in views.items()}
        width = views["x"].width
        scalars: Scalars = {"rows": "T", "H": width, "eps": op.eps.value.data, "offset": _offset(op), **strides}
        constants = {"BLOCK": _power_of_two(width)}
        d.launch("add_rms_norm", {**views, "weight": d.weight(values([op.weight], dtype))}, scalars, constants)

    return emit


@LOWERING.emits(LayerNormOp, "eps", "group")
def _layer_norm(op: LayerNormOp) -> Emit:
    for value in (op.weight, op.bias):
        if value is not None:
            weight_name(op, value)
    operand_dtype(op, op.x)
    return lambda d: _norm(d, op, d.view(op.x), d.make(op.result), number(op.group))


def _norm(d: Draft, op: RmsNormOp | AddRmsNormOp | LayerNormOp, x: View, out: View, group: int | None = None) -> None:
    """A norm of every `group` features of a row, or of the whole."""
    dtype, each = operand_dtype(op, op.x), group or x.width
    weight = d.weight(values([op.weight], dtype))
    scalars: Scalars = {
        "rows": "T",
        "H": each,
        "x_stride": x.stride,
        "out_stride": out.stride,
        "weight_stride": each if tensor_of(op.weight).get_shape()[0] > each else 0,
        "eps": op.eps.value.data,
        "offset": 0.0 if isinstance(op, LayerNormOp) else _offset(op),
    }
    constants: Constants = {"GROUPS": x.width // each, "BLOCK": _power_of_two(each)}
    if not isinstance(op, LayerNormOp):
        d.launch("rms_norm", {"x": x, "weight": weight, "out": out}, scalars, constants)
        return
    bias = null(x.type) if op.bias is None else d.weight(values([op.bias], dtype))
    constants = {**constants, "HAS_BIAS": op.bias is not None}
    d.launch("layer_norm", {"x": x, "weight": weight, "bias": bias, "out": out}, scalars, constants)


def _offset(op: RmsNormOp | AddRmsNormOp) -> float:
    return 0.0 if op.offset is None else float(op.offset.value.data)


def _power_of_two(width: int) -> int:
    """The next one: whole groups of features in one block."""
    return 1 << (width - 1).bit_length()


@LOWERING.emits(LinearOp)
def _linear(op: LinearOp) -> Emit:
    biases = [] if op.bias is None else [op.bias]
    for value in (op.weight, *biases):
        weight_name(op, value)
    operand_dtype(op, op.x)

    def emit(d: Draft) -> None:
        act, result = _activated(d, op.result)
        residual, result = _added(d, result)
        product(d, d.view(op.x), [op.weight], biases, d.make(result), residual, act)

    return emit


def _activated(d: Draft, made: SSAValue) -> tuple[Activation, SSAValue]:
    """What is done to a product that nothing else reads, and its result."""
    op = user(made)
    if not isinstance(op, GeluOp | ScaleOp):
        return Activation(), made
    d.done.add(op)
    return activation(op), op.result


def _added(d: Draft, made: SSAValue) -> tuple[View | None, SSAValue]:
    """What is added to a product that nothing else reads, where it is known by then, and the sum."""
    add = user(made)
    if not isinstance(add, AddOp | AddRmsNormOp):
        return None, made
    other = add.y if add.x is made else add.x
    if not d.knows(other):
        return None, made
    if isinstance(add, AddRmsNormOp):
        return d.view(other), add.sum
    d.done.add(add)
    return d.view(other), add.result


@LOWERING.emits(LinearsOp)
def _linears(op: LinearsOp) -> Emit:
    for value in (*op.weights, *op.biases):
        weight_name(op, value)
    operand_dtype(op, op.x)

    def emit(d: Draft) -> None:
        x, rest = d.view(op.x), list(range(len(op.products)))
        for gating, gate, up in _gates(op):
            if gated_product(d, x, *_chosen(op, [gate, up]), gating):
                rest = [i for i in rest if i not in (gate, up)]
        for i in tuple(rest):
            act, result = _activated(d, op.products[i])
            if result is not op.products[i]:
                product(d, x, *_chosen(op, [i]), d.make(result), act=act)
                rest.remove(i)
        if not rest:
            return
        products = [op.products[i] for i in rest]
        out, start = d.activation(sum(map(width_of, products)), x.type), 0
        for value in products:
            d.set(value, out.columns(start, width_of(value)))
            start += width_of(value)
        product(d, x, *_chosen(op, rest), out)

    return emit


def _chosen(op: LinearsOp, indices: Sequence[int]) -> tuple[list[SSAValue], list[SSAValue]]:
    """Some of the weights, and their biases where there are any."""
    return [op.weights[i] for i in indices], [op.biases[i] for i in indices] if op.biases else []


def _gates(op: LinearsOp) -> Iterator[tuple[SiluMulOp | GeluMulOp, int, int]]:
    """Activations that take two of the products, which nothing else does, and which are the gate and the other one."""
    for gate, value in enumerate(op.products):
        act = user(value)
        if isinstance(act, SiluMulOp | GeluMulOp) and act.x is value and act.y in op.products and user(act.y) is act:
            yield act, gate, op.products.index(act.y)


def _elementwise(
    op: AddOp | SiluMulOp | GeluMulOp | GeluOp | ScaleOp,
    kernel: str,
    constants: Constants,
    numbers: Scalars | None = None,
) -> Emit:
    operand_dtype(op, op.x)

    def emit(d: Draft) -> None:
        inputs = {name: d.view(value) for name, value in zip("xy", op.operands, strict=False)}
        _rowwise(d, kernel, {**inputs, "out": d.make(op.result)}, constants, "T", numbers or {})

    return emit


def _rowwise(
    d: Draft, kernel: str, views: Mapping[str, View], constants: Constants, rows: str, numbers: Scalars
) -> None:
    """Views of one width through an elementwise kernel."""
    strides = {f"{name}_stride": view.stride for name, view in views.items()}
    d.launch(kernel, views, {"rows": rows, "N": views["out"].width, **strides, **numbers}, constants, rows=rows)


@LOWERING.emits(SiluMulOp)
def _silu_mul(op: SiluMulOp) -> Emit:
    return _elementwise(op, "silu_mul", {})


@LOWERING.emits(GeluMulOp, "approximate")
def _gelu_mul(op: GeluMulOp) -> Emit:
    return _elementwise(op, "gelu_mul", _approximate(op))


@LOWERING.emits(GeluOp, "approximate")
def _gelu(op: GeluOp) -> Emit:
    return _elementwise(op, "gelu", _approximate(op))


def _approximate(op: GeluMulOp | GeluOp) -> Constants:
    if op.approximate.data not in GELU:
        raise refuse(op, "approximate", op.approximate.data, f"implemented are {', '.join(GELU)}")
    return {"APPROXIMATE": op.approximate.data == "tanh"}


@LOWERING.emits(ScaleOp, "factor")
def _scale(op: ScaleOp) -> Emit:
    return _elementwise(op, "scale", {}, {"factor": op.factor.value.data})


@LOWERING.emits(AddOp)
def _add(op: AddOp) -> Emit:
    return _elementwise(op, "add", {})


@LOWERING.emits(LogitsOp, "scale", "softcap")
def _logits(op: LogitsOp) -> Emit:
    weight_name(op, op.weight)
    operand_dtype(op, op.x)

    def emit(d: Draft) -> None:
        x, index = d.view(op.x), d.fact(Fact("logit_rows", "i32", ("A",)))
        asked = d.activation(x.width, x.type, "R")
        strides = {"x_stride": x.stride, "out_stride": asked.stride}
        d.launch(
            "gather_rows", {"x": x, "index": index, "out": asked}, {"rows": "R", "H": x.width, **strides}, {}, rows="R"
        )
        logits = d.make(op.result, "R")
        scale, limit = Activation("scale", number(op.scale) or 1.0), number(op.softcap)
        act = Activation() if op.scale is None or limit is not None else scale
        product(d, asked, [op.weight], [], logits, act=act, rows="R")
        if limit is not None:
            _rowwise(d, "softcap", {"x": logits, "out": logits}, {}, "R", {"factor": scale.factor, "limit": limit})
        sizes: Scalars = {"rows": "R", "V": logits.width, "stride": logits.stride}
        d.launch("argmax", {"logits": logits, "out": d.best()}, sizes, {}, rows="R", when="G")

    return emit
