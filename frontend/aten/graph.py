"""A program's graph: what its placeholders are, what depends on the tokens, and where a node stands in the source."""

from __future__ import annotations

import operator
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from math import prod
from typing import TYPE_CHECKING, Any, NoReturn

from plait.errors import UnsupportedError
from plait.frontend.graph.sample import Sample
from plait.spec import WeightRef

if TYPE_CHECKING:
    from torch.export import ExportedProgram
    from torch.fx import Node

SHAPE_ALONE = frozenset(
    ["sym_size", "new_ones", "new_zeros", "new_full", "new_empty", "ones_like", "zeros_like", "full_like", "empty_like"]
)
"""Ops whose result depends on the shape of their operand alone."""

SAME = frozenset(["clone", "alias", "contiguous", "detach", "lift_fresh_copy", "dropout", "to", "_to_copy", "type_as"])
"""Ops that change no number, where `Graph.strip` finds nothing against it."""

NEW, PAST = 10_007, 20_011
"""Tokens that shapes are looked at for: primes, and larger than any head."""

_FRAME = re.compile(r'File "([^"]+)", line (\d+), in \w+(?:\n +([^\n]+))?')


@dataclass
class Graph:
    """One program.

    Attributes:
        program: without what writes in place.
        weights: by the name of a parameter or buffer: where it lies. Two names of one tensor have one.
        tokens: the placeholder of token ids; its second dimension counts the new ones.
        pasts: placeholders of K and V, (1, KV heads, past, head_dim), in their order.
        dtype: what is computed in, `float32`.
    """

    program: ExportedProgram
    weights: Mapping[str, WeightRef]
    dtype: str
    tokens: Node = field(init=False)
    pasts: list[Node] = field(init=False)
    nodes: list[Node] = field(init=False)
    live: set[Node] = field(init=False)
    tainted: set[Node] = field(init=False)

    def __post_init__(self) -> None:
        signature = self.program.graph_signature
        self.named: dict[str, str] = {**signature.inputs_to_parameters, **signature.inputs_to_buffers}
        self.constants: dict[str, str] = {
            **signature.inputs_to_lifted_tensor_constants, **signature.inputs_to_buffers
        }  # fmt: skip
        users = set(signature.user_inputs)
        self.inputs = [node for node in self.program.graph.nodes if node.op == "placeholder" and node.name in users]
        self.output = next(node for node in self.program.graph.nodes if node.op == "output")
        self.outputs: list[Node] = [node for node in self.output.args[0] if node is not None]
        self.tokens, self.pasts = self._inputs()
        self._symbols()
        self.live = self._live()
        self.nodes = [node for node in self.program.graph.nodes if node in self.live and node.op == "call_function"]
        self.tainted = self._tainted()

    def _inputs(self) -> tuple[Node, list[Node]]:
        whole = [node for node in self.inputs if _is_tensor(node) and not _value(node).dtype.is_floating_point]
        tokens = next((node for node in whole if node.name.startswith("input_ids")), whole[0] if whole else None)
        if tokens is None or len(_value(tokens).shape) != 2:
            refuse_text("signature", "the program has no input of token ids [1, tokens]")
        pasts = [
            node
            for node in self.inputs
            if _is_tensor(node) and _value(node).dtype.is_floating_point and len(_value(node).shape) == 4
        ]
        return tokens, pasts

    def _symbols(self) -> None:
        """Which symbols of shapes count sequences (there is one), new tokens and past ones."""
        self.kinds: dict[Any, str] = {}
        for node in sorted(self.inputs, key=lambda node: node is not self.tokens):
            for at, dim in enumerate(_value(node).shape if _is_tensor(node) else ()):
                expr = None if isinstance(dim, int) else dim.node.expr
                if expr is None or not expr.is_Symbol:
                    continue
                kind = {0: "batch"}.get(at)
                if node is self.tokens and at == 1:
                    kind = "new"
                elif node in self.pasts and at == 2:
                    kind = "past"
                elif node.name.startswith("attention_mask") and at == 1:
                    kind = "total"
                elif at < 2 and len(_value(node).shape) == at + 1:
                    kind = "new"  # positions
                if kind is not None:
                    self.kinds.setdefault(expr, kind)
        batch, new = _value(self.tokens).shape
        self.dynamic = not isinstance(new, int)
        if isinstance(batch, int) and batch != 1:
            refuse_text("signature", f"the program takes {batch} sequences at once", "one is raised")
        if new == 1:
            refuse_text("length", "the program takes one token", "export with a dynamic number of tokens")

    def limits(self, kind: str) -> tuple[int, int | None]:
        """The least and the most tokens that the program says it takes; None where there is no most."""
        found: tuple[int, int | None] = (0, None)
        if kind == "new" and not self.dynamic:
            return (int(_value(self.tokens).shape[1]),) * 2
        for symbol, name in self.kinds.items():
            limits = self.program.range_constraints.get(symbol)
            if name == kind and limits is not None:
                bounded = limits.upper.is_Integer and limits.upper < 1 << 30
                least, most = int(limits.lower), int(limits.upper) if bounded else None
                found = max(found[0], least), most if found[1] is None else min(found[1], most or found[1])
        return found

    def shape(self, node: Node, sample: Sample | None = None) -> tuple[int, ...]:
        """The shape at a sample; at that of `NEW` and `PAST` where none is given."""
        return tuple(self.number(dim, sample) for dim in _value(node).shape)

    def number(self, dim: Any, sample: Sample | None = None) -> int:
        """A dimension at a sample."""
        if isinstance(dim, int):
            return dim
        sample = sample or self.far
        counts = {"batch": 1, "new": sample.new, "past": sample.past, "total": sample.total}
        expr = dim.node.expr.subs({symbol: counts[kind] for symbol, kind in self.kinds.items()})
        if not expr.is_Integer:
            refuse_text("length", f"a dimension of the graph is {dim}, of which more is not known")
        return int(expr)

    @property
    def far(self) -> Sample:
        return Sample(PAST if self.pasts else 0, NEW if self.dynamic else self.limits("new")[0])

    def _live(self) -> set[Node]:
        found: set[Node] = set()
        stack = list(self.outputs)
        while stack:
            node = stack.pop()
            if node not in found:
                found.add(node)
                stack += node.all_input_nodes
        return found

    def _tainted(self) -> set[Node]:
        """What depends on more of the tokens, of K and of V than on how many there are."""
        found = {self.tokens, *self.pasts}
        for node in self.nodes:
            if op(node) not in SHAPE_ALONE and any(item in found for item in node.all_input_nodes):
                found.add(node)
        return found

    def strip(self, node: Node) -> Node:
        """The node behind copies and casts. A cast is one only between the dtype of the program and float32."""
        while op(node) in SAME and operands(node) and not (op(node) == "dropout" and operands(node)[2:] != (False,)):
            inner, value = operands(node)[0], _value(node)
            known = value.dtype.is_floating_point and _value(inner).dtype.is_floating_point
            known = known and str(value.dtype) in ("torch.float32", f"torch.{self.dtype}")
            if value.dtype != _value(inner).dtype and not known:
                break
            node = inner
        return node

    def ref(self, node: Node) -> WeightRef | None:
        """The tensor of the file that a placeholder is."""
        return self.weights.get(self.named.get(node.name, ""))


def op(node: Node) -> str:
    """`mul` for aten.mul.Tensor; the name of a Python function; empty for placeholders."""
    if node.op != "call_function":
        return ""
    schema = getattr(node.target, "_schema", None)
    if schema is not None:
        return str(schema.name).partition("::")[2]
    return "getitem" if node.target is operator.getitem else str(getattr(node.target, "__name__", node.target))


def operands(node: Node) -> Any:
    """Its arguments by position, of any kind."""
    return node.args


def _is_tensor(node: Node) -> bool:
    return hasattr(node.meta.get("val"), "dtype")


def _value(node: Node) -> Any:
    return node.meta["val"]


def rank(node: Node) -> int:
    return len(_value(node).shape)


def count(shape: tuple[int, ...]) -> int:
    return prod(shape)


def describe(node: Node) -> str:
    """`the node 'tanh' (aten.tanh.default) of 'model.layers.0.mlp', at lm/model.py:12 (`y = torch.tanh(x)`)`."""
    text = f"the node {node.name!r} ({node.target})"
    modules = [path for path, _ in (node.meta.get("nn_module_stack") or {}).values() if path]
    if modules:
        text += f" of {modules[-1]!r}"
    frames = _FRAME.findall(node.meta.get("stack_trace") or "")
    if frames:
        file, line, code = frames[-1]
        text += f", at {'/'.join(file.split('/')[-2:])}:{line}" + (f" (`{code.strip():.100}`)" if code else "")
    return text


def refuse_text(code: str, what: str, why: str = "", hint: str = "") -> NoReturn:
    raise UnsupportedError(f"exported-{code}", what, why=why, hint=hint)


def refuse(node: Node, why: str, code: str = "node") -> NoReturn:
    refuse_text(code, f"{describe(node)} is not raised", why)
