"""Raising a graph: every node that depends on the tokens is handed to what knows it, and what nobody knows is named.

A node that is only a part of a formula stays without a meaning of its own. Whoever needs a node without a meaning is
told where the part begins that is not known, so a graph is raised as a whole or not at all.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, TypeGuard

import numpy as np

from plait.errors import PlaitError
from plait.frontend.aten import layout
from plait.frontend.aten.facts import Facts
from plait.frontend.aten.formulas import Matcher
from plait.frontend.aten.graph import Graph, op, operands, refuse
from plait.frontend.aten.layout import Axes
from plait.frontend.graph.tape import Emit, Kind, Tape
from plait.frontend.graph.weights import take_rows, transposed, use
from plait.ir import Rope
from plait.spec import Piece, Rows, WeightRef

if TYPE_CHECKING:
    from torch.fx import Node


@dataclass(frozen=True)
class Product:
    """x weight^T + bias, not written yet: q, k and v may be parts of it."""

    x: int
    weight: WeightRef
    bias: WeightRef | None

    @property
    def width(self) -> int:
        return self.weight.shape[0]


@dataclass(frozen=True)
class Step:
    """Step `at` of the tape."""

    at: int
    width: int


@dataclass(frozen=True)
class Turn:
    """The first `rotary_dim` features of each head turn."""

    rope: Rope
    rotary_dim: int
    head_dim: int


@dataclass(frozen=True)
class View:
    """Features of a value, from `offset` on, as they stand in a tensor.

    Attributes:
        last: of the last token alone.
        past: the input of K or V that stands before the tokens.
        turn: how each head turns, once it is written.
    """

    of: Step | Product
    axes: Axes
    offset: int = 0
    last: bool = False
    past: Node | None = None
    turn: Turn | None = None


@dataclass(frozen=True)
class Unary:
    """A function of a value, not written yet: `silu`, `gelu`, `gelu_tanh`, `scale` by `number`, `softcap` at it."""

    kind: str
    of: View | Unary
    number: float = 1.0

    @property
    def axes(self) -> Axes:
        return self.of.axes


@dataclass(frozen=True)
class Tokens:
    """The token ids."""


@dataclass(frozen=True)
class Past:
    """K or V of the past, an input."""

    node: Node


Symbol = View | Unary | Tokens | Past
Handle = Callable[["Raiser", "Node"], Symbol | None]


class Raiser:
    """One graph while it is raised.

    Attributes:
        refs: the weights that ops use, by name.
        ropes: by the nodes of their cosines and sines, with the pairs that turn.
        windows: by the masks.
        attended: the inputs of K and V that an attention takes.
        notes: what a user should know.
    """

    def __init__(self, graph: Graph, handlers: Mapping[str, tuple[Handle, ...]]) -> None:
        self.graph, self.handlers = graph, handlers
        self.facts = Facts(graph)
        self.matcher = Matcher(graph, lambda node: self.weight(node) is not None, self.number)
        self.tape = Tape()
        self.refs: dict[str, WeightRef] = {}
        self.ropes: dict[tuple[Node, Node], tuple[Rope, int]] = {}
        self.windows: dict[tuple[Any, ...], int | None] = {}
        self.attended: set[Node] = set()
        self.notes: set[str] = set()
        self.attentions = 0
        self.symbols: dict[Node, Symbol] = {graph.tokens: Tokens(), **{node: Past(node) for node in graph.pasts}}
        self._written: dict[View | Unary, View] = {}

    def run(self) -> None:
        for node in self.graph.nodes:
            if node not in self.graph.tainted or node in self.symbols:
                continue
            try:
                made = self._meaning(node)
            except PlaitError:
                raise
            except Exception as err:  # arguments of another kind than any that was thought of
                refuse(node, f"{type(err).__name__}: {err}")
            if made is not None:
                self.symbols[node] = made

    def _meaning(self, node: Node) -> Symbol | None:
        made = (handle(self, node) for handle in self.handlers.get(op(node), ()))
        return next((symbol for symbol in made if symbol is not None), None)

    def symbol(self, node: Node) -> Symbol:
        """What a node is known to be. Raises UnsupportedError, naming where what is not known begins."""
        if node not in self.symbols:
            refuse(self._first_unknown(node), "plait has no op for it, here")
        return self.symbols[node]

    def _first_unknown(self, node: Node) -> Node:
        seen, stack = {node}, [node]
        while stack:
            for used in stack.pop().all_input_nodes:
                if used in self.graph.tainted and used not in self.symbols and used not in seen:
                    seen.add(used)
                    stack.append(used)
        calls = [item for item in self.graph.nodes if item in seen]
        return calls[0] if calls else node

    def known(self, node: Any) -> TypeGuard[Node]:
        return hasattr(node, "all_input_nodes") and node in self.symbols

    def value(self, node: Node) -> View | Unary:
        found = self.symbol(node)
        if isinstance(found, Tokens | Past):
            refuse(node, "token ids, or K and V of the past alone, are used as numbers")
        return found

    def view(self, node: Node) -> View:
        """A value as it stands in a tensor, written where it is a function of one."""
        found = self.value(node)
        return found if isinstance(found, View) else self.write(found, node)

    def whole(self, node: Node) -> View:
        """A value that is a step of the tape, all features of it in their order."""
        return self.write(self.value(node), node)

    def write(self, value: View | Unary, node: Node) -> View:
        if value not in self._written:
            self._written[value] = self._function(value, node) if isinstance(value, Unary) else self._view(value, node)
        return self._written[value]

    def _view(self, view: View, node: Node) -> View:
        if view.turn is not None:
            turn, base = view.turn, self.write(replace(view, turn=None), node)
            return self.step(lambda b, x: b.rope(x, turn.head_dim, turn.rope, turn.rotary_dim), base)
        if view.last or view.past is not None:
            refuse(node, "not all new tokens, or more than they, go into an op that takes each by itself")
        if any(atom.kind == "repeat" for atom in layout.flat(view.axes)):
            refuse(node, "repeated features go into an op that takes each by itself")
        source = view.of
        atoms, axes = layout.feature_atoms(view.axes), layout.compact(view.axes)
        if isinstance(source, Product):
            taken = self._rows(source, atoms, view.offset, node)
            weight, bias, width = self.use(taken.weight), None, taken.width
            bias = None if taken.bias is None else self.use(taken.bias)
            step = self.tape.add(lambda b, x: b.linear(x, weight, width, bias), [taken.x])
            return View(Step(step, width), axes)
        if view.offset or atoms != layout.features(source.width):
            refuse(node, "some features of a value, or all in another order, are no value of their own")
        return replace(view, axes=axes)

    def _rows(self, product: Product, atoms: layout.Axis, offset: int, node: Node) -> Product:
        """The product by the rows of the weight that make these features."""
        if not offset and atoms == layout.features(product.width):
            return product
        count, stride = (atoms[-1].size, atoms[-1].stride) if atoms else (1, 1)
        outer = atoms[:-1]

        def rows(ref: WeightRef) -> WeightRef:
            if not outer:
                return take_rows(ref, offset, count)
            pieces = (Piece(offset, count),)
            name = f"{ref.name}[{offset}:{offset + count}/{outer[0].stride}]"
            made = Rows(outer[0].size, outer[0].stride, pieces)
            return replace(ref, name=name, shape=(made.count, *ref.shape[1:]), rows=made)

        fits = stride == 1 and product.weight.rows is None and len(outer) < 2
        if not fits or (outer and (outer[0].size * outer[0].stride, offset + count <= outer[0].stride)
                        != (product.width, True)):  # fmt: skip
            refuse(node, "its features stand in an order that rows of a weight cannot be read in")
        return Product(product.x, rows(product.weight), None if product.bias is None else rows(product.bias))

    def _function(self, unary: Unary, node: Node) -> View:
        number = unary.number
        emits: dict[str, Emit] = {
            "gelu": lambda b, x: b.gelu(x),
            "gelu_tanh": lambda b, x: b.gelu(x, "tanh"),
            "scale": lambda b, x: b.scale(x, number),
        }
        if unary.kind not in emits:
            refuse(node, f"plait has an op for {unary.kind} only in its usual place")
        return self.step(emits[unary.kind], self.write(unary.of, node))

    def step(self, emit: Emit, *operands: View, kind: Kind = "other") -> View:
        """A step whose result is laid out as its first operand; operands are whole."""
        steps = [view.of for view in operands]
        assert all(isinstance(step, Step) for step in steps)
        at = self.tape.add(emit, [step.at for step in steps if isinstance(step, Step)], kind)
        return replace(operands[0], of=Step(at, steps[0].width))

    def use(self, ref: WeightRef) -> str:
        """The name of a weight that an op uses."""
        return use(self.refs, ref)

    def weight(self, node: Any) -> WeightRef | None:
        """The tensor of the file that a node is, perhaps transposed; None where it is none."""
        if not hasattr(node, "all_input_nodes") or node in self.graph.tainted:
            return None
        node = self.graph.strip(node)
        found = self.graph.ref(node)
        if found is not None or op(node) not in ("t", "transpose", "permute", "numpy_T"):
            return found
        inner = self.weight(operands(node)[0])
        if inner is None or len(inner.shape) != 2 or tuple(node.meta["val"].shape) != inner.shape[::-1]:
            return None
        swaps = {"permute": lambda: [dim % 2 for dim in operands(node)[1]] == [1, 0],
                 "transpose": lambda: {dim % 2 for dim in operands(node)[1:3]} == {0, 1}}  # fmt: skip
        return transposed(inner) if swaps.get(op(node), lambda: True)() else None

    def number(self, part: Any) -> float | None:
        """The number that an argument is, be it a tensor that holds one."""
        if isinstance(part, bool):
            return None
        if isinstance(part, int | float):
            return float(part)
        if not hasattr(part, "all_input_nodes") or part in self.graph.tainted:
            return None
        value = part.meta.get("val")
        if not hasattr(value, "dtype"):
            return float(value) if isinstance(value, int | float) else None
        if any(dim != 1 for dim in value.shape):
            return None
        found = self.facts.constant(part)
        return None if found is None or found.size != 1 or found.dtype == np.bool_ else float(found.reshape(()))
