"""What raises which node: the table of ops, and what each means here. Attention is in `attention`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from math import prod
from typing import TYPE_CHECKING, Any

import numpy as np

from plait.frontend.graph.sample import Sample
from plait.frontend.graph.weights import take_rows, transposed
from plait.frontend.onnx.codes import codes
from plait.frontend.onnx.facts import SAMPLES, describe
from plait.frontend.onnx.file import refuse
from plait.frontend.onnx.raiser import Act, Handle, Handler, Product, Raiser, Symbol, Unary, shape
from plait.spec import WeightRef

if TYPE_CHECKING:
    import onnx_ir as ir

MS = "com.microsoft"
TOKENS = ("input_ids", "tokens")
"""What the input of token ids is called."""

HANDLERS: dict[tuple[str, str], Handler] = {}


def handles(
    domain: str,
    *kinds: str,
    inputs: int,
    needs: int | None = None,
    only: dict[str, tuple[Any, ...]] | None = None,
    **attributes: Any,
) -> Callable[[Handle], Handle]:
    """Register what raises a node. `attributes` have their defaults; `only` has those that may say nothing else; of the
    inputs the first `needs` must be there, or all."""

    def register(handle: Handle) -> Handle:
        handler = Handler(handle, attributes, only or {}, inputs, inputs if needs is None else needs)
        HANDLERS.update(dict.fromkeys([(domain, kind) for kind in kinds], handler))
        return handle

    return register


def embeddings(raiser: Raiser, node: ir.Node) -> bool:
    """Whether the node reads the tokens; then it looks up their embeddings, and is raised.

    Raises UnsupportedError `onnx-node` where it does anything else with them.
    """
    if not any(value is not None and value.name in TOKENS for value in node.inputs) or node.op_type == "Shape":
        return False
    table = _table_of(raiser, node)
    tokens = node.inputs[1] if len(node.inputs) > 1 else None
    if table is None or len(table.shape) != 2 or tokens is None or tokens.name not in TOKENS:
        refuse("node", f"{describe(node)} looks up no tokens in a table of the file")
    name, (rows, width) = raiser.use(table), table.shape
    step = raiser.tape.add(lambda b: b.embed(name, rows, width))
    raiser.give(node, Act(step, width, (1, -1, width)))
    return True


def _table_of(raiser: Raiser, node: ir.Node) -> WeightRef | None:
    given = {name: attribute.value for name, attribute in node.attributes.items()}
    if (node.domain, node.op_type) == ("", "Gather"):
        return raiser.weight(node.inputs[0]) if given.get("axis", 0) == 0 else None
    if (node.domain, node.op_type) != (MS, "GatherBlockQuantized"):
        return None
    data = node.inputs[0]
    lookup = None if data is None else data.producer()
    parts = [raiser.weight(value) for value in node.inputs[2:4]]
    weight = raiser.weight(data if lookup is None or lookup.op_type != "Reshape" else lookup.inputs[0])
    expected = {"gather_axis": 0, "quantize_axis": 1} | {name: given.get(name) for name in ("bits", "block_size")}
    if weight is None or weight.encoding != "u8" or not parts or parts[0] is None or given != expected:
        return None
    rows, groups = parts[0].shape[0], prod(parts[0].shape[1:])
    size = rows, groups * given["block_size"]
    zero = parts[1] if len(parts) > 1 else None
    return codes(weight, parts[0], zero, size, given["bits"], given["block_size"], describe(node))


@handles("", "MatMul", inputs=2)
def _matmul(raiser: Raiser, node: ir.Node, _: dict[str, Any]) -> None:
    weight = raiser.weight(node.inputs[1])
    if weight is None:
        refuse(
            "node", f"{describe(node)} multiplies by what is no matrix of the file", "attention is raised as one node"
        )
    _product(raiser, node, transposed(weight))


@handles("", "Gemm", inputs=3, needs=2, only={"alpha": (1.0,), "beta": (1.0,), "transA": (0,)}, transB=0)
def _gemm(raiser: Raiser, node: ir.Node, given: dict[str, Any]) -> None:
    weight = raiser.weight(node.inputs[1])
    if weight is None:
        refuse("node", f"{describe(node)} multiplies by what is no matrix of the file")
    bias = raiser.weight(node.inputs[2]) if len(node.inputs) > 2 else None
    if bias is None and len(node.inputs) > 2 and node.inputs[2] is not None:
        refuse("node", f"{describe(node)} adds what is no tensor of the file")
    _product(raiser, node, weight if given["transB"] else transposed(weight), bias)


@handles(
    MS, "MatMulNBits", inputs=6, needs=3, only={"weight_prepacked": (0,)},
    K=0, N=0, bits=4, block_size=0, accuracy_level=0,
)  # fmt: skip
def _matmul_bits(raiser: Raiser, node: ir.Node, given: dict[str, Any]) -> None:
    parts = [raiser.weight(value) if value is not None else None for value in node.inputs]
    _, weight, scale, zero, order, bias = parts + [None] * (6 - len(parts))
    if weight is None or scale is None or (zero is None and len(node.inputs) > 3 and node.inputs[3] is not None):
        refuse("tensor", f"{describe(node)}: its codes, scales or zeros are no tensors of the file")
    if order is not None:
        refuse("attribute", f"{describe(node)}: its input 4, {order.name!r}, the order of groups, is not raised")

    if given["accuracy_level"] == 4:
        raiser.notes.add(
            "MatMulNBits has accuracy_level 4: onnxruntime may round activations to 8 bits there, and plait does not"
        )
    size, group = (given["N"], given["K"]), given["block_size"]
    _product(raiser, node, codes(weight, scale, zero, size, given["bits"], group, describe(node)), bias)


def _product(raiser: Raiser, node: ir.Node, weight: WeightRef, bias: WeightRef | None = None) -> None:
    x = raiser.act(node, 0)
    if len(weight.shape) != 2 or x.by_head or x.dims[-1] != x.width or x.width != weight.shape[1]:
        refuse("node", f"{describe(node)} multiplies {list(x.dims)} by the matrix {list(weight.shape)} (out, in)")
    if bias is not None and bias.shape != weight.shape[:1]:
        refuse("node", f"{describe(node)} adds {list(bias.shape)} to {weight.shape[0]} features")
    raiser.give(node, Product(x.step, weight, bias, (*x.dims[:-1], weight.shape[0])))


@handles("", "SimplifiedLayerNormalization", "RMSNormalization", inputs=2,
         only={"axis": (-1,), "stash_type": (1,)}, epsilon=1e-5)  # fmt: skip
def _rms_norm(raiser: Raiser, node: ir.Node, given: dict[str, Any]) -> None:
    _norm(raiser, node, raiser.act(node, 0), given["epsilon"], 1, None)


@handles("", "LayerNormalization", inputs=3, needs=2, only={"axis": (-1,), "stash_type": (1,)}, epsilon=1e-5)
def _layer_norm(raiser: Raiser, node: ir.Node, given: dict[str, Any]) -> None:
    _norm(raiser, node, raiser.act(node, 0), given["epsilon"], 1, 2)


@handles(MS, "SkipSimplifiedLayerNormalization", inputs=3, epsilon=1e-5)
def _skip_rms_norm(raiser: Raiser, node: ir.Node, given: dict[str, Any]) -> None:
    _norm(raiser, node, _sum(raiser, node), given["epsilon"], 2, None)


@handles(MS, "SkipLayerNormalization", inputs=4, needs=3, epsilon=1e-5)
def _skip_layer_norm(raiser: Raiser, node: ir.Node, given: dict[str, Any]) -> None:
    _norm(raiser, node, _sum(raiser, node), given["epsilon"], 2, 3)


def _sum(raiser: Raiser, node: ir.Node) -> Act:
    """The residual add of a Skip op, which is its fourth output where that is used."""
    x, y = raiser.act(node, 0), raiser.act(node, 1)
    if x.dims != y.dims:
        refuse("node", f"{describe(node)} adds {list(x.dims)} and {list(y.dims)}")
    total = Act(raiser.tape.add(lambda b, x, y: b.add(x, y), [x.step, y.step], "add"), x.width, x.dims)
    if len(node.outputs) > 3:
        raiser.give(node, total, 3)
    return total


def _norm(raiser: Raiser, node: ir.Node, x: Act, eps: float, weight: int, bias: int | None) -> None:
    """Over the last axis: all features, or those of each head. The other outputs of a norm are for training."""
    last = x.dims[-1]
    group = None if last == x.width else last
    scale, number = raiser.vector(node, weight, last), decimal(eps)
    if bias is None:
        raiser.add(node, lambda b, x: b.rms_norm(x, scale, number, group=group), x, like=x)
        return
    given = bias < len(node.inputs) and node.inputs[bias] is not None
    shift = raiser.vector(node, bias, last) if given else None
    raiser.add(node, lambda b, x: b.layer_norm(x, scale, shift, number, group=group), x, like=x)


def decimal(number: float) -> float:
    """A float32 attribute as the decimal number that was meant: 1e-6, not 9.999999974752427e-07."""
    return float(str(np.float32(number)))


@handles("", "Sigmoid", inputs=1)
def _sigmoid(raiser: Raiser, node: ir.Node, _: dict[str, Any]) -> None:
    raiser.give(node, Unary("sigmoid", raiser.symbol(node, 0)))


@handles("", "Swish", inputs=1, only={"alpha": (1.0,)})
def _swish(raiser: Raiser, node: ir.Node, _: dict[str, Any]) -> None:
    raiser.give(node, Unary("silu", raiser.symbol(node, 0)))


@handles("", "Tanh", inputs=1)
def _tanh(raiser: Raiser, node: ir.Node, _: dict[str, Any]) -> None:
    raiser.give(node, Unary("tanh", raiser.symbol(node, 0)))


@handles("", "Gelu", inputs=1, approximate="none")
def _gelu(raiser: Raiser, node: ir.Node, given: dict[str, Any]) -> None:
    kinds = {"none": "gelu", "tanh": "gelu tanh"}
    raiser.give(node, Unary(kinds[given["approximate"]], raiser.symbol(node, 0)))


@handles(MS, "Gelu", inputs=1)
def _gelu_erf(raiser: Raiser, node: ir.Node, _: dict[str, Any]) -> None:
    raiser.give(node, Unary("gelu", raiser.symbol(node, 0)))


@handles(MS, "FastGelu", inputs=1)
def _gelu_tanh(raiser: Raiser, node: ir.Node, _: dict[str, Any]) -> None:
    raiser.give(node, Unary("gelu tanh", raiser.symbol(node, 0)))


@handles("", "Mul", inputs=2)
def _mul(raiser: Raiser, node: ir.Node, _: dict[str, Any]) -> None:
    if not all(raiser.is_symbol(value) for value in node.inputs):
        symbol, number = _with_number(raiser, node)
        cap = isinstance(symbol, Unary) and symbol.kind == "tanh"
        raiser.give(node, _capped(symbol, number) if cap else _scaled(symbol, number))
        return
    x, y = raiser.symbol(node, 0), raiser.symbol(node, 1)
    for gate, other in ((x, y), (y, x)):
        if not isinstance(gate, Unary):
            continue
        if gate.kind == "sigmoid" and gate.of == other:
            raiser.give(node, Unary("silu", other))
            return
        if gate.kind in _GATES and gate.dims == other.dims:
            of, up = raiser.write(gate.of, node), raiser.write(other, node)
            raiser.add(node, _GATES[gate.kind], of, up, like=of)
            return
    refuse(
        "node", f"{describe(node)} multiplies two activations", "SiLU and GELU times another are raised, nothing else"
    )


_GATES: dict[str, Callable[..., Any]] = {
    "silu": lambda b, x, y: b.silu_mul(x, y),
    "gelu": lambda b, x, y: b.gelu_mul(x, y),
    "gelu tanh": lambda b, x, y: b.gelu_mul(x, y, "tanh"),
}


@handles("", "Div", inputs=2)
def _div(raiser: Raiser, node: ir.Node, _: dict[str, Any]) -> None:
    if not raiser.is_symbol(node.inputs[0]) or raiser.is_symbol(node.inputs[1]):
        refuse("node", f"{describe(node)} divides by an activation")
    symbol, number = _with_number(raiser, node)
    raiser.give(node, _scaled(symbol, 1 / number))


def _with_number(raiser: Raiser, node: ir.Node) -> tuple[Symbol, float]:
    """An activation, and the one number beside it. It is as exact as its dtype."""
    index = 0 if raiser.is_symbol(node.inputs[0]) else 1
    other = node.inputs[1 - index]
    assert other is not None
    value = raiser.facts.constant(other, Sample(raiser.longest - 1, 1))  # a number may grow in long sequences alone
    if value.size != 1 or not np.isfinite(value).all() or not value.all():
        refuse("node", f"{describe(node)}: an activation is multiplied by {list(value.shape)}, and not by one number")
    return raiser.symbol(node, index), decimal(float(value.reshape(-1)[0]))


def _scaled(symbol: Symbol, number: float) -> Symbol:
    if isinstance(symbol, Unary) and symbol.kind == "scale":
        number, symbol = number * symbol.number, symbol.of
    return symbol if number == 1 else Unary("scale", symbol, number)


def _capped(tanh: Symbol, cap: float) -> Unary:
    """c tanh(x / c)."""
    assert isinstance(tanh, Unary)
    inner, number = tanh.of, cap
    if isinstance(inner, Unary) and inner.kind == "scale":
        number, inner = inner.number * cap, inner.of
    return Unary("softcap", inner if abs(number - 1) < 1e-6 else _scaled(inner, number), cap)


@handles("", "Add", inputs=2)
def _add(raiser: Raiser, node: ir.Node, _: dict[str, Any]) -> None:
    if all(raiser.is_symbol(value) for value in node.inputs):
        x, y = raiser.act(node, 0), raiser.act(node, 1)
        if x.dims != y.dims or x.by_head != y.by_head:
            refuse("node", f"{describe(node)} adds {list(x.dims)} and {list(y.dims)}")
        raiser.add(node, lambda b, x, y: b.add(x, y), x, y, like=x, kind="add")
        return
    index = 0 if raiser.is_symbol(node.inputs[0]) else 1
    symbol, other = raiser.symbol(node, index), node.inputs[1 - index]
    bias = raiser.weight(other)
    if isinstance(symbol, Product) and symbol.bias is None and bias is not None and bias.shape == (symbol.width,):
        raiser.give(node, replace(symbol, bias=bias))
        return
    assert other is not None
    _add_positions(raiser, node, raiser.write(symbol, node), other)


def _add_positions(raiser: Raiser, node: ir.Node, x: Act, other: ir.Value) -> None:
    """Learned positions: rows of a table, looked up by position."""
    lookup = other.producer()
    table = raiser.weight(lookup.inputs[0]) if lookup is not None and lookup.op_type == "Gather" else None
    if lookup is None or table is None or table.shape[1:] != (x.width,):
        refuse(
            "node", f"{describe(node)} adds {other.name!r} to an activation", "biases and learned positions are raised"
        )
    raiser.limit(table.shape[0])
    raiser.check(lookup, 1, lambda sample: sample.positions, "the positions of the new tokens")
    name, (rows, width) = raiser.use(table), table.shape
    at = Act(raiser.tape.add(lambda b: b.embed_positions(name, rows, width)), width, x.dims)
    raiser.add(node, lambda b, x, y: b.add(x, y), x, at, like=x)


FLOATS = (1, 10, 16)
"""FLOAT, FLOAT16 and BFLOAT16 of onnx.TensorProto."""


@handles("", "Cast", inputs=1, to=0, saturate=1)
def _cast(raiser: Raiser, node: ir.Node, given: dict[str, Any]) -> None:
    """Between floats a module has one dtype for all activations, and its ops compute in more inside."""
    if given["to"] not in FLOATS:
        refuse("attribute", f"{describe(node)}: to = {given['to']} is not raised", "activations are floats")
    raiser.give(node, raiser.symbol(node, 0))


@handles("", "Identity", inputs=1)
def _identity(raiser: Raiser, node: ir.Node, _: dict[str, Any]) -> None:
    raiser.give(node, raiser.symbol(node, 0))


@handles("", "Split", inputs=2, needs=1, axis=0, num_outputs=0)
def _split(raiser: Raiser, node: ir.Node, given: dict[str, Any]) -> None:
    product = _fused(raiser, node)
    if given["axis"] not in (-1, len(product.dims) - 1):
        refuse(
            "attribute", f"{describe(node)}: axis = {given['axis']} is not raised", "features are split, the last axis"
        )
    count = len(node.outputs)
    if len(node.inputs) > 1 and node.inputs[1] is not None:
        sizes = raiser.facts.constant(node.inputs[1]).reshape(-1).tolist()
    else:
        sizes = [product.width // count] * count
    if len(sizes) != count or sum(sizes) != product.width or min(sizes) < 1:
        refuse("node", f"{describe(node)} splits {product.width} features into {sizes}")
    for index, size in enumerate(sizes):
        raiser.give(node, part(product, sum(sizes[:index]), size), index)


@handles("", "Slice", inputs=5, needs=3)
def _slice(raiser: Raiser, node: ir.Node, _: dict[str, Any]) -> None:
    product = _fused(raiser, node)
    numbers = [raiser.facts.constant(value).reshape(-1).tolist() for value in node.inputs[1:] if value is not None]
    starts, ends, axes, steps = numbers + [[-1], [1]][len(numbers) - 2 :]
    last = len(product.dims) - 1
    if len(starts) != 1 or axes[0] not in (-1, last) or steps != [1]:
        refuse("node", f"{describe(node)} is not raised", "runs of features of a product are, the last axis")
    start, end, step = slice(starts[0], ends[0]).indices(product.width)
    assert step == 1
    if end <= start:
        refuse("node", f"{describe(node)} takes nothing of {product.width} features")
    raiser.give(node, part(product, start, end - start))


def _fused(raiser: Raiser, node: ir.Node) -> Product:
    symbol = raiser.symbol(node, 0)
    if not isinstance(symbol, Product):
        refuse("node", f"{describe(node)} is not raised", "the parts of a fused product are, of nothing else")
    return symbol


def part(product: Product, start: int, count: int) -> Product:
    """Some of its features: rows of its weight."""
    weight = take_rows(product.weight, start, count)
    bias = None if product.bias is None else take_rows(product.bias, start, count)
    return Product(product.x, weight, bias, (*product.dims[:-1], count))


@handles("", "Reshape", inputs=2, allowzero=0)
def _reshape(raiser: Raiser, node: ir.Node, given: dict[str, Any]) -> None:
    symbol = raiser.symbol(node, 0)
    target = node.inputs[1]
    assert target is not None
    made = []
    for sample in SAMPLES:
        before = np.empty(shape(symbol.dims, sample), np.bool_)
        wanted = raiser.facts.at(target, sample).reshape(-1).tolist()
        if not given["allowzero"]:
            wanted = [before.shape[at] if dim == 0 and at < before.ndim else dim for at, dim in enumerate(wanted)]
        try:
            made.append(before.reshape(wanted).shape)
        except ValueError as err:
            refuse("node", f"{describe(node)}: {err}")
    _relaid(raiser, node, symbol, made)


@handles("", "Squeeze", "Unsqueeze", inputs=2, needs=1)
def _squeeze(raiser: Raiser, node: ir.Node, _: dict[str, Any]) -> None:
    symbol = raiser.symbol(node, 0)
    axes = None if len(node.inputs) < 2 or node.inputs[1] is None else raiser.facts.constant(node.inputs[1])
    if axes is None:
        refuse("node", f"{describe(node)} does not say which axes it means")
    change = np.squeeze if node.op_type == "Squeeze" else np.expand_dims
    at = tuple(axes.reshape(-1).tolist())
    try:
        made = [change(np.empty(shape(symbol.dims, sample), np.bool_), at).shape for sample in SAMPLES]
    except ValueError as err:
        refuse("node", f"{describe(node)}: {err}")
    _relaid(raiser, node, symbol, made)


def _relaid(raiser: Raiser, node: ir.Node, symbol: Symbol, made: list[tuple[int, ...]]) -> None:
    """The same numbers in another shape, which is known at every sample."""
    dims = tuple(map(_dim, zip(*made, strict=False)))

    if 0 in dims or len({len(item) for item in made}) > 1 or (dims[-1] != symbol.width and symbol.width % dims[-1]):
        refuse("node", f"{describe(node)} is not raised", f"{list(symbol.dims)} becomes {made[0]}, then {made[1]}")
    if isinstance(symbol, Product):
        raiser.give(node, replace(symbol, dims=dims))
        return
    act = raiser.write(symbol, node)
    if act.by_head and dims != act.dims:
        refuse("node", f"{describe(node)} is not raised", "heads stand before tokens")
    raiser.give(node, replace(act, dims=dims))


def _dim(values: tuple[int, ...]) -> int:
    """A dimension from its size at every sample; 0 where it is neither fixed nor a multiple of the new tokens."""
    if len(set(values)) == 1:
        return values[0]
    multiples = {value / sample.new for value, sample in zip(values, SAMPLES, strict=True)}
    (multiple, *others) = multiples
    return -int(multiple) if not others and multiple == int(multiple) else 0


@handles("", "Transpose", inputs=1, perm=())
def _transpose(raiser: Raiser, node: ir.Node, given: dict[str, Any]) -> None:
    """(1, tokens, heads, head_dim) to (1, heads, tokens, head_dim), or back."""
    x = raiser.act(node, 0)
    if tuple(given["perm"]) != (0, 2, 1, 3) or len(x.dims) != 4 or x.dims[0] != 1:
        refuse("attribute", f"{describe(node)}: perm = {given['perm']} of {list(x.dims)} is not raised")
    dims = (x.dims[0], x.dims[2], x.dims[1], x.dims[3])
    raiser.give(node, replace(x, dims=dims, by_head=not x.by_head))
