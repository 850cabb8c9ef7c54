"""Patterns of nodes, written as formulas, and how a graph is held against them.

Letters say what may stand there: see `KINDS`. A letter that stands twice means one and the same. Sums and products may
stand in either order; copies and casts in between are looked through (`Graph.strip`).
"""

from __future__ import annotations

import ast
import math
from collections.abc import Callable, Iterator, Mapping
from functools import lru_cache
from typing import TYPE_CHECKING, Any

from plait.frontend.aten.graph import Graph, op, operands, rank

if TYPE_CHECKING:
    from torch.fx import Node

KINDS: Mapping[str, str] = {
    "x": "activation", "q": "activation", "k": "activation",
    "w": "weight", "b": "weight",
    "m": "fact", "cos": "fact", "sin": "fact",
}  # fmt: skip
"""What a letter stands for; any other is a number."""

RMS_NORM = (
    "rms_norm(x, w, eps)",
    "w * (x * rsqrt(mean(x ** 2) + eps))",
    "w * x * rsqrt(mean(x ** 2) + eps)",
    "w * (x / sqrt(mean(x ** 2) + eps))",
    "w * x / sqrt(mean(x ** 2) + eps)",
    "(w + offset) * (x * rsqrt(mean(x ** 2) + eps))",
    "(w + offset) * (x / sqrt(mean(x ** 2) + eps))",
)
LAYER_NORM = (
    "layer_norm(x, w, b, eps)",
    "layer_norm(x, w, eps)",
)
SILU = ("silu(x)", "x * sigmoid(x)", "x / (1 + exp(-x))")
GELU = (
    "gelu(x)",
    "x * 0.5 * (1 + erf(x / 1.4142135623730951))",
    "x * 0.5 * (1 + erf(x * 0.7071067811865476))",
    "x * (0.5 * (1 + erf(x / 1.4142135623730951)))",
    "x * (0.5 * (1 + erf(x * 0.7071067811865476)))",
)
GELU_TANH = (
    "gelu_tanh(x)",
    "0.5 * x * (1 + tanh(0.7978845608028654 * (x + 0.044715 * x ** 3)))",
    "x * (0.5 * (1 + tanh(0.7978845608028654 * (x + 0.044715 * x ** 3))))",
    "0.5 * x * (1 + tanh(x * 0.7978845608028654 * (1 + 0.044715 * x * x)))",
)
SOFTCAP = ("limit * tanh(x / limit)",)
ROPE = (
    "x * cos + cat(-slice(x, half, end), slice(x, 0, half)) * sin",
    "cat(slice(x, 0, half) * cos - slice(x, half, end) * sin, slice(x, half, end) * cos + slice(x, 0, half) * sin)",
    "cat(slice(x, 0, half) * cos - slice(x, half, end) * sin, slice(x, 0, half) * sin + slice(x, half, end) * cos)",
)

MASKED = ("x + m", "where(m, x, hidden)", "masked_fill(x, m, hidden)")
"""Outermost of what stands between scores and their softmax."""
SCALED = ("x * factor", "x / divisor")
SCORES = ("q @ k",)

Bindings = dict[str, Any]
Term = tuple[str, list[Any]]

_INFINITY = 1 << 62


@lru_cache
def parsed(formula: str) -> ast.expr:
    return ast.parse(formula, mode="eval").body


class Matcher:
    """Holds nodes against formulas.

    Args:
        is_weight, number: what a node is known to be; `number` gives the number that an argument is, or None.
    """

    def __init__(self, graph: Graph, is_weight: Callable[[Node], bool], number: Callable[[Any], float | None]) -> None:
        self.graph, self.is_weight, self.number = graph, is_weight, number
        self._terms: dict[Node, Term | None] = {}

    def first(self, formulas: tuple[str, ...], node: Node) -> Bindings | None:
        """What the letters of the first formula that fits stand for; `formula` is its number."""
        for at, formula in enumerate(formulas):
            for found in self._match(parsed(formula), node, {}):
                return {**found, "formula": at}
        return None

    def _match(self, pattern: ast.expr, given: Any, bound: Bindings) -> Iterator[Bindings]:
        node = self.graph.strip(given) if hasattr(given, "all_input_nodes") else given
        if isinstance(pattern, ast.Constant):
            number, due = self.number(node), pattern.value
            assert isinstance(due, int | float)
            if number is not None and math.isclose(number, due, rel_tol=1e-6):
                yield bound
        elif isinstance(pattern, ast.Name):
            value = self._value(KINDS.get(pattern.id, "number"), node)
            if value is not None and bound.get(pattern.id, value) == value:
                yield bound | {pattern.id: value}
        else:
            name, parts = _inside(pattern)
            term = self.term(node) if hasattr(node, "all_input_nodes") else None
            if term is None or term[0] != name or len(term[1]) != len(parts):
                return
            yield from self._all(parts, term[1], bound)
            if name in ("add", "mul"):
                yield from self._all(parts, term[1][::-1], bound)

    def _all(self, parts: list[ast.expr], args: list[Any], bound: Bindings) -> Iterator[Bindings]:
        if not parts:
            yield bound
            return
        for found in self._match(parts[0], args[0], bound):
            yield from self._all(parts[1:], args[1:], found)

    def _value(self, kind: str, node: Any) -> Any:
        if kind == "number":
            return self.number(node)
        if not hasattr(node, "all_input_nodes"):
            return None
        fits = {
            "activation": node in self.graph.tainted,
            "weight": self.is_weight(node),
            "fact": node not in self.graph.tainted,
        }
        return node if fits[kind] else None

    def term(self, node: Node) -> Term | None:
        """The node as one name for all spellings, with what matters of its arguments; None where it has none."""
        if node not in self._terms:
            known = _TERMS.get(op(node))
            self._terms[node] = None if known is None else known(node)
        return self._terms[node]


def _inside(pattern: ast.expr) -> tuple[str, list[ast.expr]]:
    if isinstance(pattern, ast.BinOp):
        return _OPERATORS[type(pattern.op)], [pattern.left, pattern.right]
    if isinstance(pattern, ast.UnaryOp):
        return "neg", [pattern.operand]
    assert isinstance(pattern, ast.Call) and isinstance(pattern.func, ast.Name)
    return pattern.func.id, pattern.args


_OPERATORS: dict[type[ast.operator], str] = {
    ast.Add: "add", ast.Sub: "sub", ast.Mult: "mul", ast.Div: "div", ast.Pow: "pow", ast.MatMult: "matmul",
}  # fmt: skip


def given(node: Node, *names: str) -> dict[str, Any] | None:
    """The arguments of a node by the names of its schema, those left out too; None where one beside `names` is not
    left at its default."""
    schema: Any = getattr(node.target, "_schema", None)
    found = {item.name: item.default_value if item.has_default_value() else None for item in schema.arguments}
    defaults = dict(found)
    found |= dict(zip(found, operands(node), strict=False)) | dict(node.kwargs)
    free = {*names, "device", "layout", "pin_memory", "memory_format"}
    return None if any(found[name] != defaults[name] for name in found if name not in free) else found


def last_dim(node: Node, dim: Any) -> bool:
    """Whether a dimension, or the one of a list, is the last."""
    dims = list(dim) if isinstance(dim, list | tuple) else [dim]
    return len(dims) == 1 and dims[0] in (-1, rank(node) - 1)


def _plain(name: str, *arguments: str, also: tuple[str, ...] = ()) -> Callable[[Node], Term | None]:
    def term(node: Node) -> Term | None:
        found = given(node, *arguments, *also)
        return None if found is None else (name, [found[item] for item in arguments])

    return term


def _mul(node: Node) -> Term | None:
    found = given(node, "self", "other")
    if found is None:
        return None
    same = found["self"] is found["other"]
    return ("pow", [found["self"], 2]) if same else ("mul", [found["self"], found["other"]])


def _mean(node: Node) -> Term | None:
    found = given(node, "self", "dim", "keepdim", "dtype")
    if found is None or not found["keepdim"] or not last_dim(found["self"], found["dim"]):
        return None
    return "mean", [found["self"]]


def _gelu(node: Node) -> Term | None:
    found = given(node, "self", "approximate")
    return None if found is None else ("gelu_tanh" if found["approximate"] == "tanh" else "gelu", [found["self"]])


def _norm(name: str) -> Callable[[Node], Term | None]:
    def term(node: Node) -> Term | None:
        found = given(node, "input", "normalized_shape", "weight", "bias", "eps", "cudnn_enable")
        if found is None or len(found["normalized_shape"]) != 1 or found["weight"] is None:
            return None
        eps = found["eps"]
        if eps is None:
            if str(found["input"].meta["val"].dtype) != "torch.float32":
                return None
            eps = 2.0**-23
        bias = [] if found.get("bias") is None else [found["bias"]]
        return name, [found["input"], found["weight"], *bias, eps]

    return term


def _cat(node: Node) -> Term | None:
    found = given(node, "tensors", "dim")
    return ("cat", list(found["tensors"])) if found and last_dim(node, found["dim"]) else None


def part(node: Node) -> tuple[Node, int, int, int] | None:
    """What a node is a part of, along which dimension, from where to where; None where it is none."""
    name = op(node)
    if name == "slice":
        found = given(node, "self", "dim", "start", "end")
        if found is None or not all(isinstance(found[end] or 0, int) for end in ("start", "end")):
            return None
        base, dim = found["self"], found["dim"] % rank(found["self"])
        whole = base.meta["val"].shape[dim]
        start, end = found["start"] or 0, _INFINITY if found["end"] is None else found["end"]
        if not isinstance(whole, int):
            return None
        return base, dim, max(0, start + whole if start < 0 else start), min(whole, end + whole if end < 0 else end)
    if name == "getitem" and op(operands(node)[0]) in ("split", "chunk", "split_with_sizes", "unbind"):
        whole = operands(node)[0]
        before = [item.shape for item in whole.meta["val"][: operands(node)[1]]]
        found = given(whole, "self", "dim", "chunks", "split_size", "split_sizes")
        if found is None or op(whole) == "unbind":
            return None
        dim = found["dim"] % rank(found["self"])
        start = sum(shape[dim] for shape in before)
        return found["self"], dim, start, start + node.meta["val"].shape[dim]
    return None


def _slice(node: Node) -> Term | None:
    found = part(node)
    if found is None or found[1] != rank(node) - 1:
        return None
    return "slice", [found[0], found[2], found[3]]


def _rsqrt(node: Node) -> Term | None:
    return "rsqrt", [operands(node)[0]]


def _div(node: Node) -> Term | None:
    found = given(node, "self", "other")
    return None if found is None else ("div", [found["self"], found["other"]])


def _pow(node: Node) -> Term | None:
    found = given(node, "self", "exponent")
    return None if found is None else ("pow", [found["self"], found["exponent"]])


_TERMS: dict[str, Callable[[Node], Term | None]] = {
    "add": _plain("add", "self", "other"),
    "sub": _plain("sub", "self", "other"),
    "mul": _mul,
    "div": _div,
    "pow": _pow,
    "square": lambda node: ("pow", [operands(node)[0], 2]),
    "neg": _plain("neg", "self"),
    "rsqrt": _rsqrt,
    "sqrt": _plain("sqrt", "self"),
    "exp": _plain("exp", "self"),
    "erf": _plain("erf", "self"),
    "tanh": _plain("tanh", "self"),
    "sigmoid": _plain("sigmoid", "self"),
    "silu": _plain("silu", "self"),
    "mean": _mean,
    "gelu": _gelu,
    "rms_norm": _norm("rms_norm"),
    "layer_norm": _norm("layer_norm"),
    "cat": _cat,
    "slice": _slice,
    "getitem": _slice,
    "matmul": _plain("matmul", "self", "other"),
    "where": _plain("where", "condition", "self", "other"),
    "masked_fill": _plain("masked_fill", "self", "mask", "value"),
}
