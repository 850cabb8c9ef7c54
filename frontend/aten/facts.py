"""What a program computes from lengths and positions alone: masks, rope tables, sizes.

They are not recognised by the look of their nodes but evaluated by torch at sample lengths, and compared with what they
must be.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from plait.errors import PlaitError
from plait.frontend.aten.graph import Graph, describe, op, refuse_text
from plait.frontend.graph.sample import Sample

if TYPE_CHECKING:
    import torch
    from torch.fx import Node

Array = NDArray[Any]

MAX_BYTES = 1 << 26
"""Of a tensor that a fact may be computed from; weights are larger, and no part of any."""

UNBOUNDED_POSITIONS = 4096
"""The longest sequence of a program whose tables do not end."""

INPUTS: dict[str, Callable[[Sample], list[Any]]] = {
    "attention_mask": lambda sample: [[1] * sample.total],
    "position_ids": lambda sample: [list(range(sample.past, sample.total))],
    "cache_position": lambda sample: list(range(sample.past, sample.total)),
}
"""What an input holds, by its name: every token there is counts, at its own place."""


class Facts:
    """Evaluates nodes that do not depend on tokens.

    Attributes:
        longest: the longest sequence. Tables that end earlier make it shorter.
    """

    def __init__(self, graph: Graph) -> None:
        self.graph = graph
        self._made: dict[tuple[Node, Sample], Array] = {}
        self.least, self.most = graph.limits("new")
        self.least = max(1, self.least)
        past = graph.limits("past")
        self.least_past = past[0] if graph.pasts else 0
        ends = [end for end in (self.most, past[1] if graph.pasts else 0) if end is not None]
        self.bounded = len(ends) == 2
        self.longest = sum(ends) if self.bounded else max(UNBOUNDED_POSITIONS, self.least)

    def samples(self) -> list[Sample]:
        """A first chunk, later ones, and one token, as far as the program takes them."""
        wanted = [(0, 7), (11, 3), (5, 13), (17, 1)] if self.graph.pasts else [(0, 7), (0, 13), (0, 1)]
        found = []
        for past, new in wanted:
            new = max(self.least, new if self.most is None else min(new, self.most))
            sample = Sample(max(past, self.least_past), new)
            if sample.total <= self.longest and sample not in found:
                found.append(sample)
        return found

    def last(self) -> Sample:
        """The longest sequence: its last token where there is a cache, and else the whole."""
        return Sample(self.longest - self.least, self.least) if self.graph.pasts else Sample(0, self.longest)

    def limit(self, positions: int) -> None:
        self.longest = min(self.longest, positions)

    def at(self, node: Node, sample: Sample, given: Mapping[Node, torch.Tensor] | None = None) -> Array:
        """The value of a node. `given`: what some of the nodes are taken to be.

        Raises UnsupportedError `exported-fact`, naming the node that is in the way."""
        key = node, sample
        if given or key not in self._made:
            made = self._evaluate(node, sample, dict(given or {}))
            found: Array = made.detach().cpu().float().numpy() if made.dtype.is_floating_point else made.cpu().numpy()
            if given:
                return found
            self._made[key] = found
        return self._made[key]

    def constant(self, node: Node) -> Array | None:
        """What does not depend on lengths; None where it does, be it at the longest alone."""
        first, *others = (self.at(node, sample) for sample in (*self.samples(), self.last()))
        return first if all(np.array_equal(first, other) for other in others) else None

    def _evaluate(self, node: Node, sample: Sample, values: dict[Node, Any]) -> Any:
        import torch
        from torch.fx.node import map_arg

        order = self._order(node, set(values))
        uses: dict[Node, int] = {}
        for item in order:
            for used in item.all_input_nodes:
                uses[used] = uses.get(used, 0) + 1

        def plain(part: Any) -> Any:
            return torch.device("cpu") if isinstance(part, torch.device) else part

        with torch.no_grad():
            for item in order:
                if item in values:
                    continue
                if item.op != "call_function" or item in self.graph.tainted:
                    values[item] = self._given(item, sample)
                    continue
                if op(item) == "sym_size":
                    values[item] = self.graph.number(item.meta["val"], sample)
                    continue
                args = map_arg(item.args, lambda used: values[used])
                kwargs = {name: plain(part) for name, part in map_arg(item.kwargs, lambda used: values[used]).items()}
                try:
                    values[item] = item.target(*map(plain, args), **kwargs)  # type: ignore[operator]
                except PlaitError:
                    raise
                except Exception as err:
                    refuse_text("fact", f"{describe(item)} cannot be computed", f"{type(err).__name__}: {err}"[:300])
                for used in item.all_input_nodes:
                    uses[used] -= 1
                    if not uses[used] and used is not node:
                        values.pop(used, None)
        return torch.as_tensor(values[node])

    def _order(self, node: Node, known: set[Node]) -> list[Node]:
        order: dict[Node, None] = {}
        stack = [(node, False)]
        while stack:
            item, ready = stack.pop()
            if ready or item in known or item in self.graph.tainted or item.op != "call_function":
                order.setdefault(item)
            elif item not in order:
                stack.append((item, True))
                if op(item) != "sym_size":
                    stack += [(used, False) for used in reversed(item.all_input_nodes)]
        return list(order)

    def _given(self, node: Node, sample: Sample) -> Any:
        import torch

        value = node.meta["val"]
        if node in self.graph.tainted:  # only its shape is looked at
            return torch.zeros(self.graph.shape(node, sample), dtype=value.dtype)
        found = self._tensor(node.name)
        if found is not None:
            if found.numel() * found.element_size() > MAX_BYTES:
                refuse_text("fact", f"the tensor {node.name!r} {list(found.shape)} is used as a table of numbers")
            return found.detach().cpu()
        known = next((fill for name, fill in INPUTS.items() if node.name.startswith(name)), None)
        if known is None:
            known_names = ", ".join(INPUTS)
            refuse_text("input", f"the input {node.name!r} is not known", f"known are token ids, K, V, {known_names}")
        return torch.tensor(known(sample), dtype=value.dtype).reshape(self.graph.shape(node, sample))

    def _tensor(self, name: str) -> Any:
        program = self.graph.program
        for names, tensors in (
            (self.graph.named, program.state_dict),
            (self.graph.constants, program.constants),
        ):
            if name in names and names[name] in tensors:
                return tensors[names[name]]
        return None
