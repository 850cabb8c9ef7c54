"""A slice's module to its launch plan. `LOWERING` says which ops with which attributes there are kernels for.

What is fused is settled here: linears of one input are one product whose results are strided views; gate, up and the
activation are one product; a residual add goes into the product before it; both rotary embeddings and the KV write are
one launch. No fusion crosses a block, so a slice computes what the whole model does.
"""

from __future__ import annotations

from xdsl.dialects.builtin import ModuleOp

from plait.backends.base import CompileOptions
from plait.backends.kernels.gpu import lower_attention  # noqa: F401  # registers its emitters
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
    pages_type,
    user,
    width_of,
)
from plait.backends.kernels.gpu.launch import Fact, LaunchPlan
from plait.backends.kernels.gpu.product import activation, gated_product, product, values
from plait.backends.kernels.lowering import Lowering, op_name, operand_dtype, refuse, weight_kind, weight_name
from plait.errors import UnsupportedError
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
    PlaitOp,
    RmsNormOp,
    SiluMulOp,
    WeightOp,
)

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
        if isinstance(op, AttentionOp):
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
    weight_name(op, op.table)
    dtype = operand_dtype(op, op.result)

    def emit(d: Draft) -> None:
        out = d.make(op.result)
        tokens = d.fact(Fact("tokens", "i32", ("T",)))
        places: Places = {"tokens": tokens, "table": d.weight(values([op.table], dtype)), "out": out}
        d.launch("embed", places, {"rows": "T", "H": out.width, "out_stride": out.stride}, {})

    return emit


@LOWERING.emits(RmsNormOp, "eps")
def _rms_norm(op: RmsNormOp) -> Emit:
    weight_name(op, op.weight)
    operand_dtype(op, op.x)
    return lambda d: _norm(d, d.view(op.x), op, d.make(op.result))


@LOWERING.emits(AddRmsNormOp, "eps")
def _add_rms_norm(op: AddRmsNormOp) -> Emit:
    weight_name(op, op.weight)
    dtype = operand_dtype(op, op.x)

    def emit(d: Draft) -> None:
        if d.knows(op.sum):  # the product before it added already
            _norm(d, d.view(op.sum), op, d.make(op.normed))
            return
        views = {"x": d.view(op.x), "y": d.view(op.y), "total": d.make(op.sum), "out": d.make(op.normed)}
        strides = {f"{name}_stride": view.stride for name, view in views.items()}
        width = views["x"].width
        scalars: Scalars = {"rows": "T", "H": width, "eps": op.eps.value.data, **strides}
        d.launch("add_rms_norm", {**views, "weight": d.weight(values([op.weight], dtype))}, scalars, _row(width))

    return emit


def _norm(d: Draft, x: View, op: RmsNormOp | AddRmsNormOp, out: View) -> None:
    weight = d.weight(values([op.weight], operand_dtype(op, op.x)))
    strides = {"x_stride": x.stride, "out_stride": out.stride}
    scalars: Scalars = {"rows": "T", "H": x.width, "eps": op.eps.value.data, **strides}
    d.launch("rms_norm", {"x": x, "weight": weight, "out": out}, scalars, _row(x.width))


def _row(width: int) -> Constants:
    """A whole row in one block: the next power of two."""
    return {"BLOCK": 1 << (width - 1).bit_length()}


@LOWERING.emits(LinearOp)
def _linear(op: LinearOp) -> Emit:
    biases = [] if op.bias is None else [op.bias]
    for value in (op.weight, *biases):
        weight_name(op, value)
    operand_dtype(op, op.x)

    def emit(d: Draft) -> None:
        add, residual = user(op.result), None
        if isinstance(add, AddOp | AddRmsNormOp):
            other = add.y if add.x is op.result else add.x
            residual = d.view(other) if d.knows(other) else None
        if residual is None:
            product(d, d.view(op.x), [op.weight], biases, d.make(op.result))
            return
        assert isinstance(add, AddOp | AddRmsNormOp)
        if isinstance(add, AddOp):
            d.done.add(add)
        total = add.result if isinstance(add, AddOp) else add.sum
        product(d, d.view(op.x), [op.weight], biases, d.make(total), residual)

    return emit


@LOWERING.emits(LinearsOp)
def _linears(op: LinearsOp) -> Emit:
    for value in (*op.weights, *op.biases):
        weight_name(op, value)
    operand_dtype(op, op.x)

    def emit(d: Draft) -> None:
        x, gate = d.view(op.x), _gate(op)
        if gate is not None:
            act, first = gate
            order = (first, 1 - first)
            weights, biases = ([items[i] for i in order] if items else [] for items in (op.weights, op.biases))
            if gated_product(d, x, weights, biases, act):
                return
        widths = [width_of(value) for value in op.products]
        out, start = d.activation(sum(widths), x.type), 0
        for value, width in zip(op.products, widths, strict=True):
            d.set(value, out.columns(start, width))
            start += width
        product(d, x, list(op.weights), list(op.biases), out)

    return emit


def _gate(op: LinearsOp) -> tuple[SiluMulOp | GeluMulOp, int] | None:
    """The activation that takes both products, which nothing else does, and which of them is the gate."""
    users = [user(value) for value in op.products]
    act = users[0]
    if len(users) != 2 or act is not users[1] or not isinstance(act, SiluMulOp | GeluMulOp):
        return None
    return act, 0 if act.x is op.products[0] else 1


def _elementwise(op: AddOp | SiluMulOp | GeluMulOp, kernel: str, constants: Constants) -> Emit:
    operand_dtype(op, op.x)

    def emit(d: Draft) -> None:
        views = {"x": d.view(op.x), "y": d.view(op.y), "out": d.make(op.result)}
        strides = {f"{name}_stride": view.stride for name, view in views.items()}
        d.launch(kernel, views, {"rows": "T", "N": views["out"].width, **strides}, constants)

    return emit


@LOWERING.emits(SiluMulOp)
def _silu_mul(op: SiluMulOp) -> Emit:
    return _elementwise(op, "silu_mul", {})


@LOWERING.emits(GeluMulOp, "approximate")
def _gelu_mul(op: GeluMulOp) -> Emit:
    if activation(op) is None:
        raise refuse(op, "approximate", op.approximate.data, "implemented are none, tanh")
    return _elementwise(op, "gelu_mul", {"APPROXIMATE": op.approximate.data == "tanh"})


@LOWERING.emits(AddOp)
def _add(op: AddOp) -> Emit:
    return _elementwise(op, "add", {})


@LOWERING.emits(LogitsOp)
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
        product(d, asked, [op.weight], [], logits, rows="R")
        sizes: Scalars = {"rows": "R", "V": logits.width, "stride": logits.stride}
        d.launch("argmax", {"logits": logits, "out": d.best()}, sizes, {}, rows="R", when="G")

    return emit
