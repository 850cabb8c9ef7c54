"""Rotary embeddings of a graph: cosines and sines are evaluated, and read back into the rope that makes them."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np

from plait.errors import UnsupportedError
from plait.frontend.aten import layout
from plait.frontend.aten.facts import Array
from plait.frontend.aten.formulas import ROPE, Bindings
from plait.frontend.aten.graph import SAME, describe, op, operands, refuse
from plait.frontend.aten.raiser import Raiser, Symbol, Turn, View
from plait.frontend.graph.rope import recover
from plait.frontend.graph.sample import Sample, reach
from plait.ir import Rope

if TYPE_CHECKING:
    from torch.fx import Node

_MOST = 1 << 17
"""Positions that a table is looked at for; none says more at later ones."""


def rotary(raiser: Raiser, node: Node) -> Symbol | None:
    """The heads of x, whose pairs (i, i + half) turn."""
    found = raiser.matcher.first(ROPE, node)
    if found is None:
        return None
    view = raiser.view(found["x"])
    if view.past is not None:
        refuse(node, "K of the past turns once more")
    half, width = int(found["half"]), layout.size(view.axes[-1])
    if (found["end"], view.axes[-1]) != (2 * half, layout.features(width)) or width != 2 * half or view.turn:
        refuse(node, f"of {width} features, {half} and {int(found['end']) - half} turn against each other")
    for table in (found["cos"], found["sin"]):
        _check_axis(raiser, node, table, view)
    rope, pairs = _rope(raiser, node, found)
    if pairs != half:
        refuse(node, f"{half} pairs turn by {pairs} cosines")
    return replace(view, turn=Turn(rope, width, width))


def _check_axis(raiser: Raiser, node: Node, table: Node, view: View) -> None:
    """That the rows of a table belong to the tokens. Where there are as many tokens as heads, sizes do not tell."""
    kinds = [[atom.kind for atom in axis] for axis in view.axes[:-1]]
    rows = raiser.graph.shape(table)[:-1]
    rows = (1,) * (len(kinds) - len(rows)) + rows
    for kind, count in zip(kinds, rows, strict=True):
        if count != (raiser.graph.far.new if kind == ["tokens"] else 1):
            refuse(node, "its cosines and sines do not belong to the tokens")


def joined(raiser: Raiser, node: Node) -> Symbol | None:
    """Features that turned, and behind them the rest of each head."""
    found = raiser.matcher.term(node)
    if found is None or len(found[1]) != 2 or not all(raiser.known(item) for item in found[1]):
        return None
    turned, rest = (raiser.symbols[item] for item in found[1])
    if not isinstance(turned, View) or not isinstance(rest, View) or turned.turn is None:
        return None
    width, more = layout.size(turned.axes[-1]), layout.size(rest.axes[-1])
    behind = replace(turned, turn=None, offset=turned.offset + width, axes=(*turned.axes[:-1], rest.axes[-1]))
    if rest != behind or turned.turn.rotary_dim != width:
        refuse(node, "what stands behind the features that turn is not the rest of their heads")
    axes = (*turned.axes[:-1], layout.features(width + more))
    return replace(turned, axes=axes, turn=replace(turned.turn, head_dim=width + more))


def _rope(raiser: Raiser, node: Node, found: Bindings) -> tuple[Rope, int]:
    tables = _bare(found["cos"]), _bare(found["sin"])
    if tables not in raiser.ropes:
        whole = found["formula"] == 0
        positions, rows = _rows(raiser, node, tables)
        halves = [np.split(table, 2, axis=1) if whole else [table] for table in rows]
        if any(not np.array_equal(half[0], half[-1]) for half in halves):
            refuse(node, "the two features of a pair turn by different angles")
        cos, sin = (half[0] for half in halves)
        dtype = str(tables[0].meta["val"].dtype).removeprefix("torch.")
        raiser.ropes[tables] = recover(cos, sin, positions, dtype, describe(tables[0])), cos.shape[1]
    return raiser.ropes[tables]


def _bare(node: Node) -> Node:
    """A table as it was before it was rounded to the dtype of the activations."""
    while op(node) in (*SAME, "unsqueeze") and operands(node):
        node = operands(node)[0]
    return node


def _rows(raiser: Raiser, node: Node, tables: tuple[Node, Node]) -> tuple[Array, list[Array]]:
    """The positions that were looked at, and their rows."""
    facts, cached = raiser.facts, bool(raiser.graph.pasts)

    def row(table: Node, sample: Sample) -> Array:
        return facts.at(table, sample).reshape(sample.new, -1)

    def there(positions: int) -> bool:
        sample = Sample(positions - facts.least, facts.least) if cached else Sample(0, max(facts.least, positions))
        try:
            return bool(row(tables[0], sample).shape[1])
        except (UnsupportedError, ValueError):
            return False

    facts.limit(reach(there, facts.longest) if facts.longest <= _MOST else facts.longest)
    if cached:
        first = facts.least_past
        near = Sample(first, max(facts.least, min(256, facts.longest - first, facts.most or 256)))
        samples = [near]
        for power in range(8, facts.longest.bit_length()):
            if near.total <= 1 << power <= facts.longest - facts.least:
                samples.append(Sample(1 << power, facts.least))
    else:
        samples = [Sample(0, min(facts.longest, _MOST))]
    rows = [np.concatenate([row(table, sample) for sample in samples]) for table in tables]
    positions = np.concatenate([np.arange(sample.past, sample.total) for sample in samples])
    for sample in facts.samples():
        known = np.isin(np.arange(sample.past, sample.total), positions)
        at = np.searchsorted(positions, np.arange(sample.past, sample.total)[known])
        for table, due in zip(tables, rows, strict=True):
            if not np.array_equal(row(table, sample)[known], due[at]):
                refuse(node, "the cosines and sines are not those of the new tokens' positions")
    return positions, rows
