"""A slice as an ONNX model of standard ops (opset 21), which onnxruntime runs as it is.

Shapes are dynamic: [batch, sequence] tokens of sequences that all have `past` tokens in their KV cache. K and V go in
and come out as (batch, kv_heads, tokens, head_dim), the new ones behind the old; nothing is padded, and a window hides
keys but forgets none. Names are those of other exporters: `input_ids`, `past_key_values.N.key`, `present.N.key`,
`logits`; what crosses between slices has the module's own name, as (batch, sequence, width). Logits are those of every
token.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from xdsl.dialects.builtin import ModuleOp
from xdsl.ir import Operation, SSAValue

from plait.backends.kernels.lowering import attribute_dtype, check_weights, operand_dtype, refuse, weight_dtypes
from plait.backends.kernels.onnx_lowering import DTYPES, LOWERING, Run, dtype_of, width_of
from plait.backends.weights import read_weight
from plait.errors import MissingDependencyError
from plait.ir import signature, weights
from plait.ir.module import ops
from plait.ir.ops import EmbedOp, LinearOp, LinearsOp, LogitsOp, WeightOp
from plait.ir.types import KVType
from plait.spec import WeightRef

if TYPE_CHECKING:
    import onnx_ir as ir

OPSET = 21
IR_VERSION = 10
"""What onnxruntime 1.20 reads, the oldest that the extra `onnx` names."""

TOKENS = "input_ids"


def require() -> None:
    """Raises MissingDependencyError where onnx-ir is not installed."""
    if importlib.util.find_spec("onnx_ir") is None:
        raise MissingDependencyError(
            "onnx-missing", "ONNX needs onnx-ir, which is not installed", hint="pip install 'plait[onnx]'"
        )


@dataclass(frozen=True)
class Port:
    """An input or result of a model; a text in the shape is a dynamic dimension."""

    name: str
    shape: tuple[int | str, ...]
    dtype: str


@dataclass(frozen=True)
class OnnxSlice:
    """A written model; call `save`."""

    model: ir.Model
    inputs: tuple[Port, ...]
    outputs: tuple[Port, ...]

    def save(self, path: Path) -> None:
        """Write `path` and its weights beside it, as NAME.data; one tensor is in memory at a time."""
        import onnx_ir as ir

        ir.save(self.model, path, external_data=f"{path.name}.data")


def to_onnx(module: ModuleOp, refs: Mapping[str, WeightRef], root: Path | None = None) -> OnnxSlice:
    """The slice as an ONNX model. No weight is read before it is saved.

    Args:
        refs: where its weights lie, by name.
        root: folder that relative files are relative to.

    Raises:
        MissingDependencyError: onnx-ir is not installed.
        UnsupportedError: `op-unsupported`, naming the op and the attribute, where it cannot be written this way.
        CheckpointError: the weights are not those of the module.
    """
    require()
    import onnx_ir as ir

    program = [(LOWERING.emit(op), op.operands, op.results) for op in ops(module) if not isinstance(op, WeightOp)]
    check_weights(module, refs)
    tensors = {value.name or "": value for value in _tensors(module, refs, root)}
    inputs = {port.name: _value(port) for port in _inputs(module)}
    graph = ir.Graph(
        list(inputs.values()),
        [],
        nodes=[],
        initializers=list(tensors.values()),
        name="slice",
        opset_imports={"": OPSET},
    )
    sig = signature(module)
    run = _run(module, ir.tape.Tape(graph), tensors, inputs)
    env: dict[SSAValue, Any] = {value: inputs[name] for name, value in sig.inputs.items()}
    for emit, operands, results in program:
        made = emit(run, *[env[value] for value in operands if value in env])
        env.update(zip(results, made if len(results) > 1 else (made,), strict=True))
    outputs = tuple(_outputs(module))
    values = [env[value] for value in sig.outputs.values()] + [
        x for value in sig.kv.values() for x in run.present[value]
    ]
    for port, value in zip(outputs, values, strict=True):
        # A value that is also an input keeps its name, and another value may be two results.
        graph.outputs.append(_named(run("Identity", value), port))
    model = ir.Model(graph, ir_version=IR_VERSION, producer_name="plait")
    return OnnxSlice(model, tuple(_inputs(module)), outputs)


def _value(port: Port) -> ir.Value:
    import onnx_ir as ir

    return _named(ir.Value(), port)


def _named(value: ir.Value, port: Port) -> ir.Value:
    import onnx_ir as ir

    value.name, value.shape, value.type = port.name, ir.Shape(port.shape), ir.TensorType(dtype_of(port.dtype))
    return value


def _run(module: ModuleOp, tape: Any, tensors: Mapping[str, ir.Value], inputs: Mapping[str, ir.Value]) -> Run:
    sig = signature(module)
    past: dict[SSAValue, Any] = {
        value: (inputs[_past(name, "key")], inputs[_past(name, "value")]) for name, value in sig.kv.items()
    }
    first = inputs[TOKENS] if TOKENS in inputs else inputs[next(iter(sig.inputs))]
    new = tape.op("Shape", [first], attributes={"start": 1, "end": 2})
    if past:
        known = tape.op("Shape", [next(iter(past.values()))[0]], attributes={"start": 2, "end": 3})
    else:
        known = tape.op("Sub", [new, new])  # nothing is kept
    plain = all(
        value.dtype == dtype_of("float32") for value in (*tensors.values(), *inputs.values()) if value.name != TOKENS
    )
    return Run(tape, tensors, _flipped(module), past, inputs.get(TOKENS), new, known, plain)


def _past(name: str, side: str) -> str:
    return f"past_key_values.{name.removeprefix('kv.')}.{side}"


def _inputs(module: ModuleOp) -> Iterator[Port]:
    if any(isinstance(op, EmbedOp) for op in ops(module)):
        yield Port(TOKENS, ("batch", "sequence"), "int64")
    sig = signature(module)
    for name, value in sig.inputs.items():
        yield Port(name, ("batch", "sequence", width_of(value)), operand_dtype(_user(value), value, DTYPES))
    yield from _caches(module, "past_key_values", "past")


def _outputs(module: ModuleOp) -> Iterator[Port]:
    for name, value in signature(module).outputs.items():
        assert isinstance(value.owner, Operation)
        yield Port(name, ("batch", "sequence", width_of(value)), operand_dtype(value.owner, value, DTYPES))
    yield from _caches(module, "present", "total")


def _caches(module: ModuleOp, word: str, tokens: str) -> Iterator[Port]:
    for name, value in signature(module).kv.items():
        kind = value.type
        assert isinstance(kind, KVType)
        shape = ("batch", kind.kv_heads.data, tokens, kind.head_dim.data)
        for side in ("key", "value"):
            yield Port(
                f"{word}.{name.removeprefix('kv.')}.{side}", shape, attribute_dtype(_user(value), kind.dtype, DTYPES)
            )


def _user(value: SSAValue) -> Any:
    return next(iter(value.uses)).operation


_MULTIPLIED = (LinearOp, LinearsOp, LogitsOp)


def _flipped(module: ModuleOp) -> frozenset[str]:
    """The matrices that are stored as (in, out), for `x @ w`: all that nothing but products use."""
    return frozenset(
        name
        for name, op in weights(module).items()
        if len(op.result.type.get_shape()) == 2
        and all(isinstance(use.operation, _MULTIPLIED) for use in op.result.uses)
    )


def _tensors(module: ModuleOp, refs: Mapping[str, WeightRef], root: Path | None) -> Iterator[ir.Value]:
    import onnx_ir as ir

    flipped = _flipped(module)
    for name, dtype in weight_dtypes(module).items():
        if dtype not in DTYPES:
            raise refuse(_user(weights(module)[name].result), "dtype", dtype, _IMPLEMENTED)
        shape = refs[name].shape[::-1] if name in flipped else refs[name].shape
        read = partial(_read, refs[name], dtype, root, flip=name in flipped)
        tensor = ir.LazyTensor(read, dtype_of(dtype), ir.Shape(shape), name=name)
        yield ir.Value(name=name, shape=ir.Shape(shape), type=ir.TensorType(dtype_of(dtype)), const_value=tensor)


_IMPLEMENTED = "implemented are " + " and ".join(DTYPES)


def _read(ref: WeightRef, dtype: str, root: Path | None, *, flip: bool) -> Any:
    import onnx_ir as ir

    values = read_weight(ref, dtype, root)
    return ir.Tensor(np.ascontiguousarray(values.T) if flip else values)
