"""Raising a graph: every node is handed to what knows it, and what nobody knows is refused by name.

Values are kept as what they are known to be: an activation, a product that is not written yet because its bias or its
parts follow, half of a SiLU. What depends on no token and no weight is a fact (see `facts`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from plait.frontend.graph.sample import Sample
from plait.frontend.graph.tape import Emit, Kind, Tape
from plait.frontend.graph.weights import transposed, use
from plait.frontend.onnx.facts import INPUTS, SAMPLES, Array, Facts, describe
from plait.frontend.onnx.file import OnnxFile, damaged, refuse
from plait.ir import Rope
from plait.spec import WeightRef

if TYPE_CHECKING:
    import onnx_ir as ir

Dims = tuple[int, ...]
"""The shape of an activation for one sequence; -n is n times its new tokens."""

UNBOUNDED_POSITIONS = 4096
"""The longest sequence of a graph whose tables do not end."""


@dataclass(frozen=True)
class Act:
    """Step `step` of the tape, `width` features for each token. `by_head`: the heads stand before the tokens."""

    step: int
    width: int
    dims: Dims
    by_head: bool = False


@dataclass(frozen=True)
class Product:
    """x weight^T + bias, not written yet."""

    x: int
    weight: WeightRef
    bias: WeightRef | None
    dims: Dims

    @property
    def width(self) -> int:
        return self.weight.shape[0]


@dataclass(frozen=True)
class Unary:
    """A function of an activation, not written yet: `sigmoid`, `silu`, `gelu`, `gelu tanh`, `tanh`, or `scale` by a
    factor and `softcap` at a limit, which is `number`."""

    kind: str
    of: Act | Product | Unary
    number: float = 1.0

    @property
    def dims(self) -> Dims:
        return self.of.dims

    @property
    def width(self) -> int:
        return self.of.width


@dataclass(frozen=True)
class Cache:
    """K or V of a layer, with the new tokens."""

    heads: int
    head_dim: int


Symbol = Act | Product | Unary
Handle = Callable[["Raiser", "ir.Node", dict[str, Any]], None]


@dataclass(frozen=True)
class Handler:
    """What raises one kind of node.

    Attributes:
        attributes: the names it reads, with their defaults.
        only: names that may have these values alone.
        inputs: how many inputs it reads; needs: how many of them, the first, must be there.
    """

    handle: Handle
    attributes: Mapping[str, Any]
    only: Mapping[str, tuple[Any, ...]]
    inputs: int
    needs: int


@dataclass
class Raiser:
    """One graph while it is raised.

    Attributes:
        refs: the weights that ops use, by name.
        ropes: by the names of their tables of cosines and sines.
        positions: the longest sequence that the tables of positions allow.
        notes: what a user should know.
    """

    file: OnnxFile
    handlers: Mapping[tuple[str, str], Handler]
    tape: Tape = field(default_factory=Tape)
    refs: dict[str, WeightRef] = field(default_factory=dict)
    ropes: dict[tuple[str, str], tuple[Rope, int]] = field(default_factory=dict)
    positions: int | None = None
    notes: set[str] = field(default_factory=set)
    symbols: dict[str, Symbol | Cache] = field(default_factory=dict)
    written: dict[Symbol, Act] = field(default_factory=dict)
    pasts: set[str] = field(default_factory=set)
    attended: set[str] = field(default_factory=set)
    attentions: int = 0

    def __post_init__(self) -> None:
        self.facts = Facts(self.file, self._known)

    def run(self, embeddings: Callable[[Raiser, ir.Node], bool]) -> None:
        """Raise every node that the outputs need, in order. `embeddings` takes those that read the tokens."""
        needed = self._needed()
        for node in self.file.model.graph:
            if node not in needed or embeddings(self, node):
                continue
            if node.op_type == "Shape" and not node.domain:
                continue
            if any(self.is_symbol(value) for value in node.inputs):
                self._raise(node)

    def _needed(self) -> set[ir.Node]:
        found: set[ir.Node] = set()
        stack = [value.producer() for value in self.file.model.graph.outputs]
        while stack:
            node = stack.pop()
            if node is not None and node not in found:
                found.add(node)
                stack += [value.producer() for value in node.inputs if value is not None]
        return found

    def _raise(self, node: ir.Node) -> None:
        handler = self.handlers.get((node.domain, node.op_type))
        if handler is None:
            refuse(
                "node", f"{describe(node)} is not raised", "plait has no op for it, here", "export the model otherwise"
            )
        given = {name: attribute.value for name, attribute in node.attributes.items()}
        for name, value in given.items():
            value = value.decode("utf-8", "replace") if isinstance(value, bytes) else value
            if name not in handler.attributes and value not in handler.only.get(name, ()):
                allowed = handler.only.get(name)
                why = f"only {' or '.join(map(str, allowed))} is" if allowed else "plait does not know this attribute"
                refuse("attribute", f"{describe(node)}: {name} = {value!r:.100} is not raised", why)
        for index, extra in enumerate(node.inputs):
            if index >= handler.inputs and extra is not None:
                refuse("attribute", f"{describe(node)}: its input {index}, {extra.name!r}, is not raised")
        for index in range(handler.needs):
            if index >= len(node.inputs) or node.inputs[index] is None:
                raise damaged(self.file.path, f"{describe(node)} lacks its input {index}")
        for name, default in handler.attributes.items():
            if not _alike(value := given.get(name, default), default):
                kind = type(default).__name__
                raise damaged(self.file.path, f"{describe(node)}: {name} is {value!r:.100}, and must be of type {kind}")
        if not node.outputs:
            raise damaged(self.file.path, f"{describe(node)} has no output")
        handler.handle(self, node, dict(handler.attributes) | given)

    def is_symbol(self, value: ir.Value | None) -> bool:
        return value is not None and value.name in self.symbols

    def symbol(self, node: ir.Node, index: int) -> Symbol:
        """What an input of a node is known to be. Raises UnsupportedError where it is no activation."""
        value = node.inputs[index] if index < len(node.inputs) else None
        found = None if value is None else self.symbols.get(value.name or "")
        if found is None or isinstance(found, Cache):
            refuse("node", f"{describe(node)}: its input {index} is no activation, and it has no other meaning here")
        return found

    def act(self, node: ir.Node, index: int) -> Act:
        return self.write(self.symbol(node, index), node)

    def write(self, symbol: Symbol, node: ir.Node) -> Act:
        """The symbol as a step of the tape."""
        if isinstance(symbol, Act):
            return symbol
        if symbol not in self.written:
            step = self._product(symbol) if isinstance(symbol, Product) else self._unary(symbol, node)
            by_head = isinstance(symbol, Unary) and self.write(symbol.of, node).by_head
            self.written[symbol] = Act(step, symbol.width, symbol.dims, by_head)
        return self.written[symbol]

    def _product(self, product: Product) -> int:
        weight, bias = self.use(product.weight), None if product.bias is None else self.use(product.bias)
        out = product.width
        return self.tape.add(lambda b, x: b.linear(x, weight, out, bias), [product.x])

    def _unary(self, unary: Unary, node: ir.Node) -> int:
        number = unary.number
        emits: dict[str, Emit] = {
            "gelu": lambda b, x: b.gelu(x),
            "gelu tanh": lambda b, x: b.gelu(x, "tanh"),
            "scale": lambda b, x: b.scale(x, number),
        }
        if unary.kind not in emits:
            refuse(
                "node", f"{describe(node)} takes a {unary.kind} alone", "plait has an op for it only in its usual place"
            )
        return self.tape.add(emits[unary.kind], [self.write(unary.of, node).step])

    def add(self, node: ir.Node, emit: Emit, *operands: Act, like: Act, width: int | None = None,
            kind: Kind = "other", output: int = 0) -> Act:  # fmt: skip
        """A step whose result is an output of the node; `like` says how it lies there."""
        made = Act(
            self.tape.add(emit, [act.step for act in operands], kind), width or like.width, like.dims, like.by_head
        )
        self.give(node, made, output)
        return made

    def give(self, node: ir.Node, symbol: Symbol | Cache, output: int = 0) -> None:
        self.symbols[node.outputs[output].name or ""] = symbol

    def use(self, ref: WeightRef) -> str:
        """The name of a weight that an op uses."""
        return use(self.refs, ref)

    def weight(self, value: ir.Value | None) -> WeightRef | None:
        """The tensor of the file that a value is, perhaps transposed by a node; None where it is none."""
        if value is None:
            return None
        if value.is_initializer():
            return self.file.ref(value)
        node = value.producer()
        if node is None or node.domain or node.op_type != "Transpose" or value.name in self.symbols:
            return None
        perm, inner = node.attributes.get("perm"), self.weight(node.inputs[0])
        if inner is None or len(inner.shape) != 2 or (perm is not None and tuple(perm.value) != (1, 0)):
            return None
        return transposed(inner)

    def vector(self, node: ir.Node, index: int, size: int) -> str:
        """The name of a weight of `size` numbers."""
        ref = self.weight(node.inputs[index] if index < len(node.inputs) else None)
        if ref is None or ref.shape != (size,):
            refuse("tensor", f"{describe(node)}: its input {index} is no tensor of {size} numbers in the file")
        return self.use(ref)

    def limit(self, positions: int) -> None:
        self.positions = positions if self.positions is None else min(self.positions, positions)

    @property
    def longest(self) -> int:
        return UNBOUNDED_POSITIONS if self.positions is None else self.positions

    def check(self, node: ir.Node, index: int, want: Callable[[Sample], Array], what: str) -> None:
        """Raises UnsupportedError `onnx-fact` where an input, if there is one, is not what it must be at a sample."""
        value = node.inputs[index] if index < len(node.inputs) else None
        if value is None:
            return
        for sample in (*SAMPLES, Sample(self.longest - 1, 1)):
            found, due = self.facts.at(value, sample), want(sample)
            if not np.array_equal(found.reshape(-1), due.reshape(-1)):
                refuse(
                    "fact",
                    f"{describe(node)}: its input {index}, {value.name!r}, is not {what}",
                    f"with {sample.past} tokens in the cache and {sample.new} new it is {found.reshape(-1)[:8]}",
                )

    def _known(self, value: ir.Value, sample: Sample) -> Array | None:
        """Zeros in the shape of an activation, and what an input of the graph holds."""
        symbol = self.symbols.get(value.name or "")
        if isinstance(symbol, Cache):
            return np.zeros((1, symbol.heads, sample.total, symbol.head_dim), np.float32)
        if symbol is not None:
            return np.zeros(shape(symbol.dims, sample), np.float32)
        if value.name in self.pasts:
            assert value.shape is not None
            heads, head_dim = (dim if isinstance(dim, int) else 1 for dim in (value.shape[1], value.shape[3]))
            return np.zeros((1, heads, sample.past, head_dim), np.float32)
        return INPUTS[value.name or ""](sample) if value.is_graph_input() and value.name in INPUTS else None


def shape(dims: Dims, sample: Sample) -> tuple[int, ...]:
    return tuple(dim if dim > 0 else -dim * sample.new for dim in dims)


def _alike(value: Any, default: Any) -> bool:
    """Whether an attribute is of the type of its default: a number, a text, or a list of whole numbers."""
    if isinstance(default, tuple):
        return isinstance(value, Sequence) and all(type(item) is int for item in value)
    return type(value) is type(default)
