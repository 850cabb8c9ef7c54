"""What a graph computes from lengths and positions alone: masks, positions, rope tables, shapes.

They are not raised by the look of their nodes, of which every exporter has its own, but evaluated at sample lengths by
onnx's reference implementation, and compared with what they must be.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from plait.errors import PlaitError
from plait.frontend.graph.sample import Sample
from plait.frontend.onnx.file import OnnxFile, dimensions, refuse

if TYPE_CHECKING:
    import onnx_ir as ir

Array = NDArray[Any]

MAX_BYTES = 1 << 26
"""Of a tensor that a fact may be computed from; weights are larger, and no part of any."""


#: A first chunk, later ones, and one token. The lengths are prime, so that no product of others equals them.
SAMPLES = (Sample(0, 7), Sample(11, 3), Sample(5, 13), Sample(17, 1))

#: What an input of the graph holds, by its name: every token there is counts, at its own place.
INPUTS: dict[str, Callable[[Sample], Array]] = {
    "input_ids": lambda sample: np.zeros((1, sample.new), np.int64),
    "attention_mask": lambda sample: np.ones((1, sample.total), np.int64),
    "position_ids": lambda sample: sample.positions[None],
    "cache_position": lambda sample: sample.positions,
    "past_sequence_length": lambda sample: np.array(sample.past),
    "past_seq_len": lambda sample: np.array([[sample.past]]),
    "total_sequence_length": lambda sample: np.array(sample.total),
    "total_seq_len": lambda sample: np.array(sample.total),
}


class Facts:
    """Evaluates values of a graph.

    Args:
        known: what a value is at a sample, where it is neither a tensor of the file nor computed from others: inputs
            and activations, of which only the shape matters.
    """

    def __init__(self, file: OnnxFile, known: Callable[[ir.Value, Sample], Array | None]) -> None:
        self._file, self._known = file, known
        self._made: dict[tuple[int, Sample], Array] = {}

    def at(self, value: ir.Value, sample: Sample) -> Array:
        """Raises UnsupportedError `onnx-fact`, naming the node that is in the way."""
        key = id(value), sample
        if key not in self._made:
            self._made[key] = self._evaluate(value, sample)
        return self._made[key]

    def constant(self, value: ir.Value, *more: Sample) -> Array:
        """What does not depend on lengths; `more` are looked at too. Raises UnsupportedError `onnx-fact`."""
        first, *others = (self.at(value, sample) for sample in (*SAMPLES, *more))
        if not all(np.array_equal(first, other) for other in others):
            refuse("fact", f"{self._name(value)} changes with the length of the sequence")
        return first

    def _evaluate(self, value: ir.Value, sample: Sample) -> Array:
        feeds: dict[str, Array] = {}
        nodes = list(dict.fromkeys(self._needed(value, sample, feeds)))
        if not nodes:
            return feeds[value.name or ""]
        import onnx
        import onnx_ir as ir
        from onnx.reference import ReferenceEvaluator

        def info(name: str) -> Any:
            return onnx.helper.make_value_info(name, onnx.TypeProto())

        try:
            graph = onnx.helper.make_graph(
                [ir.to_proto(node) for node in nodes], "fact", [info(name) for name in feeds], [info(value.name or "")]
            )
            opsets = [onnx.helper.make_opsetid(*item) for item in self._file.model.opset_imports.items()]
            with np.errstate(all="ignore"):
                (made,) = ReferenceEvaluator(onnx.helper.make_model(graph, opset_imports=opsets)).run(None, feeds)
        except PlaitError:
            raise
        except Exception as err:
            cause = err.__cause__ or err
            refuse("fact", f"{self._name(value)} cannot be computed", f"{type(cause).__name__}: {cause}"[:300])
        return np.asarray(made)

    def _needed(self, value: ir.Value, sample: Sample, feeds: dict[str, Array]) -> Iterator[ir.Node]:
        """The nodes that compute a value, in order; what they start from is put into `feeds`."""
        stack: list[tuple[ir.Value, bool]] = [(value, False)]
        seen: set[str | None] = set()
        while stack:
            item, ready = stack.pop()
            node = item.producer()
            if ready:
                assert node is not None
                yield node
                continue
            if item.name in seen:
                continue
            seen.add(item.name)
            found = self._given(item, sample)
            if found is not None:
                feeds[item.name or ""] = found
                continue
            assert node is not None
            self._check(node)
            stack.append((item, True))
            stack += [(part, False) for part in node.inputs if part is not None]

    def _given(self, value: ir.Value, sample: Sample) -> Array | None:
        found = self._known(value, sample)
        if found is not None:
            return found
        tensor = value.const_value
        if value.is_initializer() and tensor is not None:
            if tensor.nbytes > MAX_BYTES:
                refuse("fact", f"the tensor {value.name!r} {list(dimensions(tensor))} is used as a table of numbers")
            return self._numbers(tensor)
        if value.producer() is None:
            refuse(
                "input",
                f"the input {value.name!r} of the graph is not known",
                f"known are {', '.join(INPUTS)}, and K and V of the past",
            )
        return None

    def _numbers(self, tensor: Any) -> Array:
        """A small tensor. A file of external data is read here and not by onnx-ir, which follows no link: in the hub's
        cache every file is one."""
        import onnx_ir as ir

        try:
            if not isinstance(tensor, ir.ExternalTensor) or tensor.dtype.bitwidth < 8:
                return np.asarray(tensor.numpy())
            path, offset, nbytes = self._file.place(tensor)
            data = np.fromfile(path, np.uint8, nbytes, offset=offset)
            return data.view(tensor.dtype.numpy()).reshape(dimensions(tensor))
        except PlaitError:
            raise
        except (TypeError, ValueError) as err:
            refuse("fact", f"the tensor {tensor.name!r} cannot be read", f"{err!s:.300}")

    @staticmethod
    def _check(node: ir.Node) -> None:
        import onnx_ir as ir

        inner = [name for name, attribute in node.attributes.items() if attribute.type == ir.AttributeType.GRAPH]
        if node.domain or inner:
            refuse(
                "node",
                f"{describe(node)} is not raised",
                "masks, positions and rope tables are computed by ONNX's own ops, without branches",
            )

    @staticmethod
    def _name(value: ir.Value) -> str:
        node = value.producer()
        return f"the value {value.name!r}" if node is None else f"the result of {describe(node)}"


def describe(node: ir.Node) -> str:
    """`the node '/model/attn' (com.microsoft.GroupQueryAttention)`."""
    kind = f"{node.domain}.{node.op_type}" if node.domain else node.op_type
    return f"the node {node.name or node.outputs[0].name!r} ({kind})"
