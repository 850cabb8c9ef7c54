"""Emitters of what is done value by value: gates, multipliers, the residual add."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from plait.backends.kernels.lowering import operand_dtype
from plait.backends.xla.trace import LOWERING, Run, Trace, rounded
from plait.ir.ops import AddOp, AddRmsNormOp, GeluMulOp, GeluOp, ScaleOp, SiluMulOp

if TYPE_CHECKING:
    from jax import Array


def _silu(z: Array) -> Array:
    import jax

    return z * jax.nn.sigmoid(z)


def _gelu(z: Array) -> Array:
    import jax

    return jax.nn.gelu(z, approximate=False)


def _gelu_tanh(z: Array) -> Array:
    import jax

    return jax.nn.gelu(z, approximate=True)


#: By `approximate`.
GELU = {"none": _gelu, "tanh": _gelu_tanh}
#: By the `activation` of experts, on float32.
GATES: dict[str, Callable[[Array], Array]] = {"silu": _silu, "gelu": _gelu, "gelu_tanh": _gelu_tanh}


@LOWERING.emits(SiluMulOp)
def _silu_mul(op: SiluMulOp) -> tuple[Trace, ...]:
    return (Trace(_gated(operand_dtype(op, op.x), _silu)),)


@LOWERING.emits(GeluMulOp, "approximate")
def _gelu_mul(op: GeluMulOp) -> tuple[Trace, ...]:
    return (Trace(_gated(operand_dtype(op, op.x), GELU[op.approximate.data])),)


def _gated(dtype: str, gate: Callable[[Array], Array]) -> Callable[[Run, Array, Array], Array]:
    return lambda run, x, y: rounded(gate(x.astype("float32")) * y.astype("float32"), x, dtype)


@LOWERING.emits(GeluOp, "approximate")
def _gelu_op(op: GeluOp) -> tuple[Trace, ...]:
    dtype, gelu = operand_dtype(op, op.x), GELU[op.approximate.data]
    return (Trace(lambda run, x: rounded(gelu(x.astype("float32")), x, dtype)),)


@LOWERING.emits(ScaleOp, "factor")
def _scale(op: ScaleOp) -> tuple[Trace, ...]:
    dtype, factor = operand_dtype(op, op.x), op.factor.value.data
    return (Trace(lambda run, x: rounded(factor * x.astype("float32"), x, dtype)),)


@LOWERING.emits(AddOp)
def _add(op: AddOp) -> tuple[Trace, ...]:
    return added(op)


def added(op: AddOp | AddRmsNormOp) -> tuple[Trace, ...]:
    """The sum of an op's x and y."""
    dtype = operand_dtype(op, op.x)
    return (Trace(lambda run, x, y: rounded(x + y, x, dtype)),)
