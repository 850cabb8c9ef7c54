"""A program of `torch.export` as a module of plait's ops."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from xdsl.dialects.builtin import ModuleOp

from plait.frontend.aten import layout
from plait.frontend.aten.graph import Graph, refuse, refuse_text
from plait.frontend.aten.handlers import HANDLERS
from plait.frontend.aten.raiser import Product, Raiser, Unary, View
from plait.frontend.graph.tape import Tape
from plait.spec import WeightRef

if TYPE_CHECKING:
    from torch.export import ExportedProgram
    from torch.fx import Node

FAMILY = "exported"


@dataclass(frozen=True)
class Raised:
    """A raised program. It does not hold on to the program.

    Attributes:
        tape: step `result` gives the logits.
        refs: the weights that ops use, by name.
        ropes: kind and theta of each rope, as they were read back from cosines and sines.
        longest: tokens of the longest sequence.
        notes: what a user should know of the plan.
    """

    tape: Tape
    result: int
    vocabulary: int
    refs: dict[str, WeightRef]
    blocks: int
    ropes: tuple[str, ...]
    longest: int
    notes: tuple[str, ...]

    def build(self, dtype: str) -> ModuleOp:
        return self.tape.build(FAMILY, dtype, self.result)


def raise_program(program: ExportedProgram, weights: Mapping[str, WeightRef], dtype: str) -> Raised:
    """Raise a program.

    Args:
        program: without what writes in place (`run_decompositions({})`).
        weights: by the name of a parameter or buffer: where it lies.
        dtype: what is computed in.

    Raises:
        UnsupportedError: names the node that has no meaning here, its module and its line, and why.
    """
    graph = Graph(program, weights, dtype)
    raiser = Raiser(graph, HANDLERS)
    raiser.run()
    results = [graph.strip(node) for node in graph.outputs]
    logits, caches = results[0], results[1:]
    result, vocabulary = _logits(raiser, logits)
    found = [raiser.symbol(node) for node in caches]
    pasts = [item.past for item in found if isinstance(item, View)]
    if pasts != graph.pasts or raiser.attended != set(graph.pasts):
        names = ", ".join(node.name for node in graph.pasts) or "none"
        refuse_text("cache", f"the results behind the logits are not the caches that go in ({names}), in their order",
                    "each is to be K or V of the past with that of the new tokens behind it")  # fmt: skip
    notes, longest = set(raiser.notes), raiser.facts.longest
    if not raiser.facts.bounded:
        notes.add(f"the program states no longest sequence, {longest:,} tokens were taken")
    made = Raised(
        tape=raiser.tape,
        result=result,
        vocabulary=vocabulary,
        refs=raiser.refs,
        blocks=raiser.attentions,
        ropes=tuple(dict.fromkeys(f"{rope.kind}, theta {rope.theta:g}" for rope, _ in raiser.ropes.values())),
        longest=longest,
        notes=tuple(sorted(notes)),
    )
    made.build(dtype)  # blocks that are not to be told apart are found now
    return made


def _logits(raiser: Raiser, node: Node) -> tuple[int, int]:
    """The last product, perhaps scaled and capped: the step that gives it, and its width."""
    value = raiser.value(node)
    scale = softcap = None
    if isinstance(value, Unary) and value.kind == "softcap":
        softcap, value = value.number, value.of
    if isinstance(value, Unary) and value.kind == "scale":
        scale, value = value.number, value.of
    if not isinstance(value, View) or not isinstance(value.of, Product):
        refuse(node, "the result is no product of the tokens with a matrix", "outputs")
    product, size = value.of, value.of.width
    if (
        product.bias is not None
        or value.offset
        or value.turn
        or value.past
        or layout.feature_atoms(value.axes) != layout.features(size)
    ):
        refuse(node, "logits have a bias, turn, or are not all there", "outputs")
    name = raiser.use(product.weight)
    step = raiser.tape.add(lambda b, x: b.logits(x, name, size, scale=scale, softcap=softcap), [product.x])
    return step, size
