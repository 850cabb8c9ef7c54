"""Emitters of norms. Where a group of chips splits the width that is normed over, its mean is one of all chips'."""

from __future__ import annotations

from typing import TYPE_CHECKING

from plait.backends.kernels.lowering import operand_dtype, weight_name
from plait.backends.xla.emit_elementwise import added
from plait.backends.xla.split import AXIS
from plait.backends.xla.trace import LOWERING, Run, Trace, rounded
from plait.ir.ops import AddRmsNormOp, LayerNormOp, RmsNormOp
from plait.ir.ops.base import number

if TYPE_CHECKING:
    from jax import Array


@LOWERING.emits(RmsNormOp, "eps", "group", "offset")
def _rms_norm(op: RmsNormOp) -> tuple[Trace, ...]:
    return _normed(op, number(op.group))


@LOWERING.emits(AddRmsNormOp, "eps", "offset")
def _add_rms_norm(op: AddRmsNormOp) -> tuple[Trace, ...]:
    """The sum ends a block and the norm begins the next one, so that blocks are alike: XLA fuses as it likes."""
    return (*added(op), *_normed(op))


def _normed(op: RmsNormOp | AddRmsNormOp, group: int | None = None) -> tuple[Trace, ...]:
    name, dtype = weight_name(op, op.weight), operand_dtype(op, op.x)
    eps, offset = op.eps.value.data, number(op.offset) or 0.0

    def trace(run: Run, x: Array) -> Array:
        import jax
        import jax.numpy as jnp

        wide, scale = _grouped(x, group), _grouped(run.weights[name,][None], group)
        square = _mean(jnp.square(wide), _is_apart(run, name, group))
        return rounded((wide * jax.lax.rsqrt(square + eps) * (scale + offset)).reshape(x.shape), x, dtype)

    return (Trace(trace, ((name,),)),)


@LOWERING.emits(LayerNormOp, "eps", "group")
def _layer_norm(op: LayerNormOp) -> tuple[Trace, ...]:
    names = [weight_name(op, value) for value in (op.weight, op.bias) if value is not None]
    dtype, eps, group = operand_dtype(op, op.x), op.eps.value.data, number(op.group)

    def trace(run: Run, x: Array) -> Array:
        import jax
        import jax.numpy as jnp

        wide, apart = _grouped(x, group), _is_apart(run, names[0], group)
        scale, *bias = (_grouped(run.weights[name,][None], group) for name in names)
        centred = wide - _mean(wide, apart)
        made = centred * jax.lax.rsqrt(_mean(jnp.square(centred), apart) + eps) * scale
        return rounded((made + bias[0] if bias else made).reshape(x.shape), x, dtype)

    return (Trace(trace, tuple((name,) for name in names)),)


def _grouped(x: Array, group: int | None) -> Array:
    """x (T, width) in float32, (T, groups, group)."""
    return x.reshape(len(x), -1, group or x.shape[1]).astype("float32")


def _is_apart(run: Run, name: str, group: int | None) -> bool:
    """Whether the other chips hold parts of what is normed."""
    return group is None and run.split.axis((name,)) is not None


def _mean(values: Array, apart: bool) -> Array:
    """Over the last axis; over the group's chips too where they hold the rest of it, all equally much. KV heads that
    several chips hold count as often as others do."""
    import jax
    import jax.numpy as jnp

    mean = jnp.mean(values, axis=-1, keepdims=True)
    if not apart:
        return mean
    everybody: Array = jax.lax.pmean(mean, AXIS)  # type: ignore[no-untyped-call]
    return everybody
