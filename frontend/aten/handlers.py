"""What raises which op of ATen: the table at the end. The first that takes a node gives it its meaning."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np

from plait.frontend.aten import layout
from plait.frontend.aten.attention import cached, sdpa, weighted
from plait.frontend.aten.formulas import GELU, GELU_TANH, LAYER_NORM, RMS_NORM, SILU, SOFTCAP, given, part
from plait.frontend.aten.graph import SAME, count, op, operands, rank, refuse
from plait.frontend.aten.layout import Atom, Axes
from plait.frontend.aten.raiser import Handle, Past, Product, Raiser, Step, Symbol, Tokens, Unary, View
from plait.frontend.aten.ropes import joined, rotary
from plait.frontend.graph.weights import transposed
from plait.spec import WeightRef

if TYPE_CHECKING:
    from torch.fx import Node


def _same(raiser: Raiser, node: Node) -> Symbol | None:
    """Copies and casts."""
    inner = raiser.graph.strip(node)
    if isinstance(raiser.symbols.get(operands(node)[0]), Tokens):
        return Tokens() if str(node.meta["val"].dtype) in ("torch.int32", "torch.int64") else None
    return raiser.symbols.get(inner) if inner is not node else None


def _moved(raiser: Raiser, node: Node, change: Callable[[Axes], Axes | None]) -> Symbol | None:
    """The first operand, with other axes."""
    if not raiser.known(operands(node)[0]):
        return None
    found = raiser.symbols[operands(node)[0]]

    def moved(value: View | Unary) -> View | Unary:
        if isinstance(value, Unary):
            return replace(value, of=moved(value.of))
        axes = change(value.axes)
        if axes is None:
            refuse(node, "it parts or mixes tokens, heads or repetitions")
        return replace(value, axes=axes)

    if isinstance(found, Tokens):
        return found if count(raiser.graph.shape(node)) == raiser.graph.far.new else None
    return None if isinstance(found, Past) else moved(found)


def _reshape(raiser: Raiser, node: Node) -> Symbol | None:
    return _moved(raiser, node, lambda axes: layout.reshape(axes, raiser.graph.shape(node)))


def _permute(raiser: Raiser, node: Node) -> Symbol | None:
    order = list(range(rank(node)))
    if op(node) == "permute":
        order = [at % rank(node) for at in operands(node)[1]]
    else:
        one, other = operands(node)[1:3] if op(node) == "transpose" else (-2, -1)
        order[one], order[other] = order[other], order[one]
    return _moved(raiser, node, lambda axes: tuple(axes[at] for at in order))


def _expand(raiser: Raiser, node: Node) -> Symbol | None:
    return _moved(raiser, node, lambda axes: layout.expand(axes, raiser.graph.shape(node)))


def _repeat_interleave(raiser: Raiser, node: Node) -> Symbol | None:
    said = given(node, "self", "repeats", "dim", "output_size")
    if said is None or not isinstance(said["repeats"], int) or said["dim"] is None:
        return None
    at, more = said["dim"] % rank(node), (Atom("repeat", said["repeats"]),)
    return _moved(raiser, node, lambda axes: (*axes[:at], axes[at] + more, *axes[at + 1 :]))


def _part(raiser: Raiser, node: Node) -> Symbol | None:
    """A part of the features, or the last token."""
    found = part(node)
    if found is None:
        return _last(raiser, node)
    base, dim, start, end = found
    if not raiser.known(base):
        return None
    if not raiser.graph.dynamic and (last := _last(raiser, node)) is not None:
        return last
    if isinstance(raiser.symbols[base], Tokens | Past):
        return None
    view = raiser.view(base)
    view = view if view.turn is None else raiser.write(view, node)
    taken = layout.part(view.axes, dim, start, end - start)
    if taken is None:
        return None
    return replace(view, offset=view.offset + taken[0], axes=taken[1])


def _last(raiser: Raiser, node: Node) -> Symbol | None:
    """All tokens, or the last one, of a value."""
    if op(node) not in ("slice", "select") or not raiser.known(operands(node)[0]):
        return None
    found = raiser.symbols[operands(node)[0]]
    whole = raiser.graph.shape(operands(node)[0])
    dim = operands(node)[1] % len(whole) if len(operands(node)) > 1 else 0
    if not isinstance(found, View) or [atom.kind for atom in found.axes[dim]] != ["tokens"]:
        return None
    if op(node) == "slice" and raiser.graph.shape(node) == whole:
        return found
    start: Any = operands(node)[2] if len(operands(node)) > 2 else None
    start = raiser.graph.number(start.meta["val"]) if hasattr(start, "meta") else start
    one = op(node) == "select" or raiser.graph.shape(node)[dim] == 1
    if start not in (-1, whole[dim] - 1) or not one:
        return None
    axis = () if op(node) == "select" else ((),)
    return replace(found, axes=(*found.axes[:dim], *axis, *found.axes[dim + 1 :]), last=True)


def _embedding(raiser: Raiser, node: Node) -> Symbol | None:
    table, tokens = operands(node)[:2]
    ref = raiser.weight(table)
    if ref is None or not raiser.known(tokens) or not isinstance(raiser.symbols[tokens], Tokens):
        return None
    name, (vocabulary, hidden) = raiser.use(ref), ref.shape
    at = raiser.tape.add(lambda b: b.embed(name, vocabulary, hidden))
    return _by_token(raiser, node, at, hidden)


def _by_token(raiser: Raiser, node: Node, at: int, width: int) -> View:
    atoms = ((Atom("tokens", raiser.graph.far.new),), layout.features(width))
    axes = layout.reshape(atoms, raiser.graph.shape(node))
    assert axes is not None
    return View(Step(at, width), axes)


def _linear(raiser: Raiser, node: Node) -> Symbol | None:
    x, weight, *bias = operands(node)
    return _product(raiser, node, x, raiser.weight(weight), bias[0] if bias else None)


def _addmm(raiser: Raiser, node: Node) -> Symbol | None:
    said = given(node, "self", "mat1", "mat2")
    if said is None:
        return None
    ref = raiser.weight(said["mat2"])
    return _product(raiser, node, said["mat1"], None if ref is None else transposed(ref), said["self"])


def _matmul(raiser: Raiser, node: Node) -> Symbol | None:
    x, weight = operands(node)[:2]
    ref = raiser.weight(weight)
    return None if ref is None else _product(raiser, node, x, transposed(ref), None)


def _product(raiser: Raiser, node: Node, x: Any, weight: WeightRef | None, bias: Any) -> Symbol | None:
    offset = raiser.weight(bias)
    if weight is None or len(weight.shape) != 2 or (bias is not None and offset is None) or not raiser.known(x):
        return None
    view = raiser.value(x)
    last = isinstance(view, View) and view.last
    whole = raiser.write(replace(view, last=False) if isinstance(view, View) else view, x)
    if whole.axes[-1] != layout.features(weight.shape[1]) or whole.of.width != weight.shape[1]:
        refuse(node, f"it multiplies {layout.size(whole.axes[-1])} of {whole.of.width} features of each token")
    assert isinstance(whole.of, Step)
    axes = (*whole.axes[:-1], layout.features(weight.shape[0]))
    return View(Product(whole.of.at, weight, offset), axes, last=last)


def _rms_norm(raiser: Raiser, node: Node) -> Symbol | None:
    found = raiser.matcher.first(RMS_NORM, node)
    if found is None or not raiser.known(found["x"]):
        return None
    weight, group, x = _norm_parts(raiser, node, found)
    eps, offset = found["eps"], found.get("offset")
    return raiser.step(lambda b, x: b.rms_norm(x, weight, eps, group=group, offset=offset), x)


def _layer_norm(raiser: Raiser, node: Node) -> Symbol | None:
    found = raiser.matcher.first(LAYER_NORM, node)
    if found is None or not raiser.known(found["x"]):
        return None
    weight, group, x = _norm_parts(raiser, node, found)
    bias = None if "b" not in found else _vector(raiser, node, found["b"], layout.size(x.axes[-1]))
    eps = found["eps"]
    return raiser.step(lambda b, x: b.layer_norm(x, weight, bias, eps, group=group), x)


def _norm_parts(raiser: Raiser, node: Node, found: dict[str, Any]) -> tuple[str, int | None, View]:
    x = raiser.whole(found["x"])
    size = layout.size(x.axes[-1])
    if x.axes[-1] != layout.features(size):
        refuse(node, "what it norms are no neighbours")
    return _vector(raiser, node, found["w"], size), None if size == x.of.width else size, x


def _vector(raiser: Raiser, node: Node, weight: Node, size: int) -> str:
    ref = raiser.weight(weight)
    if ref is None or ref.shape != (size,):
        refuse(node, f"it takes {weight.name!r}, and a vector of {size} numbers is due")
    return raiser.use(ref)


def _function(kind: str, formulas: tuple[str, ...]) -> Handle:
    def handle(raiser: Raiser, node: Node) -> Symbol | None:
        found = raiser.matcher.first(formulas, node)
        if found is None or not raiser.known(found["x"]) or isinstance(raiser.symbols[found["x"]], Tokens | Past):
            return None
        return Unary(kind, raiser.value(found["x"]), found.get("limit", 1.0))

    return handle


GATES: Mapping[str, Callable[[Any, Any, Any], Any]] = {
    "silu": lambda b, x, y: b.silu_mul(x, y),
    "gelu": lambda b, x, y: b.gelu_mul(x, y),
    "gelu_tanh": lambda b, x, y: b.gelu_mul(x, y, "tanh"),
}


def _gated(raiser: Raiser, node: Node) -> Symbol | None:
    term = raiser.matcher.term(node)
    if term is None or term[0] != "mul" or not all(raiser.known(item) for item in term[1]):
        return None
    values = [raiser.value(item) for item in term[1]]
    for at, gate in enumerate(values):
        if isinstance(gate, Unary) and gate.kind in GATES:
            x, y = raiser.write(gate.of, node), raiser.write(values[1 - at], node)
            if x.axes != y.axes:
                refuse(node, "a gate and what it multiplies are laid out differently")
            return raiser.step(GATES[gate.kind], x, y)
    return None


def _scaled(raiser: Raiser, node: Node) -> Symbol | None:
    term = raiser.matcher.term(node)
    if term is None or term[0] not in ("mul", "div"):
        return None
    pairs = [term[1], term[1][::-1]] if term[0] == "mul" else [term[1]]
    for x, other in pairs:
        number = raiser.number(other)
        if number is None or not raiser.known(x) or isinstance(raiser.symbols[x], Tokens | Past):
            continue
        value, factor = raiser.value(x), number if term[0] == "mul" else 1 / number
        if isinstance(value, Unary) and value.kind == "scale":
            return Unary("scale", value.of, factor * value.number)
        return Unary("scale", value, factor)
    return None


def _add(raiser: Raiser, node: Node) -> Symbol | None:
    """A bias, learned positions, or the residual."""
    term = raiser.matcher.term(node)
    if term is None:
        return None
    known = [item for item in term[1] if raiser.known(item)]
    if len(known) == 2:
        x, y = (raiser.whole(item) for item in known)
        if x.axes != y.axes or x.of.width != y.of.width:
            refuse(node, "its operands are laid out differently")
        return raiser.step(lambda b, x, y: b.add(x, y), x, y, kind="add")
    if len(known) != 1:
        return None
    (other,) = (item for item in term[1] if item is not known[0])
    value, bias = raiser.value(known[0]), raiser.weight(other)
    if bias is not None and isinstance(value, View) and isinstance(value.of, Product) and value.of.bias is None:
        if value.turn is not None or value.past is not None:
            refuse(node, "it adds a bias to what has turned, or to K or V of the past too")
        if bias.shape == (value.of.width,) and value.axes[-1] == layout.features(value.of.width):
            return replace(value, of=replace(value.of, bias=bias))
        return None
    if not hasattr(other, "all_input_nodes") or other in raiser.graph.tainted:
        return None
    x = raiser.whole(known[0])
    places = _positions(raiser, node, other, x)
    return None if places is None else raiser.step(lambda b, x, y: b.add(x, y), x, places, kind="other")


def _positions(raiser: Raiser, node: Node, rows: Node, x: View) -> View | None:
    """Learned positions: rows of a table. Which rows they are shows when the table holds its own row and column numbers
    instead."""
    rows = raiser.graph.strip(rows)
    tables = [item for item in _sources(raiser, rows) if raiser.graph.ref(item) is not None]
    if len(tables) != 1 or x.axes[-1] != layout.features(x.of.width):
        return None
    (table,) = tables
    ref = raiser.graph.ref(table)
    if ref is None or len(ref.shape) != 2 or ref.shape[1] != x.of.width:
        return None
    import torch

    facts, (count_, width) = raiser.facts, ref.shape
    facts.limit(count_)
    numbers = [torch.arange(count_)[:, None].expand(ref.shape), torch.arange(width)[None].expand(ref.shape)]
    for sample in (*facts.samples(), facts.last()):
        due = np.arange(sample.past, sample.total)[:, None], np.arange(width)[None]
        for filled, want in zip(numbers, due, strict=True):
            found = facts.at(rows, sample, {table: filled.to(torch.float32)})
            if found.size != sample.new * width or (found.reshape(sample.new, width) != want).any():
                refuse(node, f"it does not add the rows of {ref.name!r} at the positions of the new tokens")
    name = raiser.use(ref)
    at = raiser.tape.add(lambda b: b.embed_positions(name, count_, width))
    return replace(x, of=Step(at, width))


def _sources(raiser: Raiser, node: Node) -> list[Node]:
    """The placeholders that a node is made of."""
    seen, stack = {node}, [node]
    while stack:
        for item in stack.pop().all_input_nodes:
            if item not in seen and item not in raiser.graph.tainted:
                seen.add(item)
                stack.append(item)
    return [item for item in seen if item.op == "placeholder"]


_NORMS: tuple[Handle, ...] = (_rms_norm, _layer_norm)
_FUNCTIONS: tuple[Handle, ...] = (
    _function("silu", SILU), _function("gelu", GELU), _function("gelu_tanh", GELU_TANH), _function("softcap", SOFTCAP),
)  # fmt: skip
_VIEWS = ["view", "reshape", "_unsafe_view", "flatten", "unflatten", "unsqueeze", "squeeze"]

HANDLERS: Mapping[str, tuple[Handle, ...]] = {
    **dict.fromkeys(SAME, (_same,)),
    **dict.fromkeys(_VIEWS, (_reshape,)),
    **dict.fromkeys(("transpose", "permute", "t", "numpy_T", "mT"), (_permute,)),
    **dict.fromkeys(("expand", "expand_as", "broadcast_to"), (_expand,)),
    **dict.fromkeys(("slice", "getitem", "select"), (_part,)),
    "repeat_interleave": (_repeat_interleave,),
    "embedding": (_embedding,),
    "linear": (_linear,),
    "addmm": (_addmm,),
    "mm": (_matmul,),
    "matmul": (_matmul, weighted),
    "bmm": (weighted,),
    "scaled_dot_product_attention": (sdpa,),
    "rms_norm": _NORMS,
    "layer_norm": _NORMS,
    "silu": _FUNCTIONS,
    "gelu": _FUNCTIONS,
    "mul": (*_NORMS, *_FUNCTIONS, _gated, _scaled),
    "div": (*_NORMS, *_FUNCTIONS, _scaled),
    "add": (rotary, _add),
    "cat": (cached, joined, rotary),
}
