"""Emitters of a mixture of experts. The chips of a group hold different experts, and add up what theirs give."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from plait.backends.kernels.lowering import operand_dtype, weight_name
from plait.backends.xla.emit_elementwise import GATES
from plait.backends.xla.experts import Experts, apply
from plait.backends.xla.split import AXIS
from plait.backends.xla.trace import LOWERING, Run, Trace, dot, rounded, sum_over_group
from plait.ir.ops import ExpertsOp, RouterOp
from plait.ir.ops.base import number

if TYPE_CHECKING:
    from jax import Array


@LOWERING.emits(
    RouterOp,
    "experts_per_token",
    "scoring",
    "normalise",
    "scale",
    "groups",
    "groups_per_token",
    "group_score",
    "selection_bias",
)
def _router(op: RouterOp) -> tuple[Trace, ...]:
    operand_dtype(op, op.x)
    optional = {"bias": op.bias, "selection": op.selection_bias}
    keys = {name: (weight_name(op, value),) for name, value in optional.items() if value is not None}
    weight, chosen, scoring = (weight_name(op, op.weight),), op.experts_per_token.value.data, op.scoring.data
    least, scale = number(op.normalise), number(op.scale)

    def trace(run: Run, x: Array) -> Array:
        import jax
        import jax.numpy as jnp

        given = {name: run.weights[key].astype(jnp.float32) for name, key in keys.items()}
        raw = dot(x, run.weights[weight]) + given.get("bias", 0.0)
        scores = jax.nn.sigmoid(raw) if scoring == "sigmoid" else jax.nn.softmax(raw, axis=1)
        ranked = _in_groups(op, scores + given.get("selection", 0.0))
        # Of equal numbers `top_k` takes the first, as the op says.
        places = jax.lax.top_k(ranked, chosen)[1]
        counts = jnp.take_along_axis(scores, places, axis=1)
        if least is not None:
            counts = counts / (counts.sum(axis=1, keepdims=True) + least)
        if scale is not None:
            counts = scale * counts
        return jnp.put_along_axis(jnp.zeros_like(scores), places, counts, axis=1, inplace=False)

    return (Trace(trace, (weight, *keys.values())),)


def _in_groups(op: RouterOp, ranked: Array) -> Array:
    """-inf for experts outside their token's best groups."""
    import jax
    import jax.numpy as jnp

    if op.groups is None or op.groups_per_token is None or op.group_score is None:
        return ranked
    count = op.groups.value.data
    grouped = ranked.reshape(len(ranked), count, -1)
    score = jax.lax.top_k(grouped, 1 if op.group_score.data == "max" else 2)[0].sum(axis=2)
    best = jax.lax.top_k(score, op.groups_per_token.value.data)[1]
    kept = (best[:, :, None] == jnp.arange(count)).any(axis=1)
    return jnp.where(kept[:, :, None], grouped, -jnp.inf).reshape(ranked.shape)


@LOWERING.emits(ExpertsOp, "experts_per_token", "activation", "alpha", "limit", "gate_bias", "up_bias", "down_bias")
def _experts(op: ExpertsOp) -> tuple[Trace, ...]:
    dtype, most = operand_dtype(op, op.x), op.experts_per_token.value.data
    stacks = [(weight_name(op, value),) for value in op.stacks]
    biases = [(weight_name(op, value),) for value in op.biases]
    activate = _activation(op)

    def trace(run: Run, x: Array, routing: Array) -> Array:
        import jax

        held = [run.weights[key] for key in (*stacks, *biases)]
        apart = run.split.axis(stacks[0]) is not None
        if apart:
            own = held[0].shape[-3]
            routing = jax.lax.dynamic_slice_in_dim(routing, jax.lax.axis_index(AXIS) * own, own, axis=1)
        experts = Experts(held[:3], held[3:], run.layer, lambda gate, up: rounded(activate(gate, up), x, dtype))
        total = apply(experts, x, routing, most)
        return rounded(sum_over_group(total) if apart else total, x, dtype)

    return (Trace(trace, experts=(*stacks, *biases)),)


def _activation(op: ExpertsOp) -> Callable[[Array, Array], Array]:
    """gate and up, both float32, to what the last matrix takes."""
    if op.alpha is None or op.limit is None:
        act = GATES[op.activation.data]
        return lambda gate, up: act(gate) * up
    alpha, limit = op.alpha.value.data, op.limit.value.data

    def clamped(gate: Array, up: Array) -> Array:
        import jax
        import jax.numpy as jnp

        gate, up = jnp.minimum(gate, limit), jnp.clip(up, -limit, limit)
        return gate * jax.nn.sigmoid(alpha * gate) * (up + 1.0)

    return clamped
