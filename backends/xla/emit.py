"""The emitters of JAX: each op becomes a function that traces it.

`LOWERING.emit(op)` checks the op; what it returns is called while a program is traced: `trace(run, *values)`, where the
values are activations, and `run` holds weights, KV pages and the step's facts as traced arrays. It keeps to `jax.numpy`
on arrays, so neither a device nor weights are needed to check.

Legend: B sequences, Q queries, T = B * Q tokens, L keys, N KV heads, G heads of each, D head_dim.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import TYPE_CHECKING, Any

from xdsl.ir import SSAValue

from plait.backends.kernels.lowering import Lowering, attribute_dtype, operand_dtype, refuse, rope_of, weight_name
from plait.ir.ops import (
    AddOp,
    AddRmsNormOp,
    AttentionOp,
    EmbedOp,
    LinearOp,
    LinearsOp,
    LogitsOp,
    RmsNormOp,
    RopeOp,
    SiluMulOp,
    WeightOp,
)
from plait.ir.rope import Rope
from plait.spec import kv_class

if TYPE_CHECKING:
    from jax import Array

#: The score of a key that is not seen. Finite, so that a padded query, which sees none, gives zeros and not NaN.
_LOWEST = -3e38


@dataclass(frozen=True)
class RopeTable:
    """A table that the step brings: [T, D / 2] cos and sin."""

    rope: Rope
    head_dim: int


@dataclass(frozen=True)
class Trace:
    """How one op is traced, and what it needs of the slice: stacked weights by name and rotary tables."""

    run: Callable[..., Any]
    weights: tuple[tuple[str, ...], ...] = ()
    table: RopeTable | None = None


@dataclass
class Run:
    """One program while it is traced.

    Attributes:
        weights: by the names that are stacked in it.
        kv: by KV argument, K and V as (pages * page_tokens, N, D); replaced when written.
        tokens, kv_lens, positions, slots, pages, first, logit_rows: see `buckets.Grid`.
        tables: cos and sin.
    """

    weights: dict[tuple[str, ...], Array]
    kv: dict[SSAValue, tuple[Array, Array]]
    tokens: Array
    positions: Array
    kv_lens: Array
    slots: dict[str, Array]
    pages: dict[str, Array]
    first: dict[str, Array]
    tables: dict[RopeTable, tuple[Array, Array]]
    logit_rows: Array | None
    page_tokens: int
    masks: dict[int | None, tuple[Array, Array]] = field(default_factory=dict)


LOWERING: Lowering[Trace] = Lowering("jax")


def _rounded(y: Array, x: Array, dtype: str) -> Array:
    """A result y in the module's dtype, held as the operand x is: in that dtype, or in float32 on a CPU host.

    The bits so do not depend on where the model is cut; see `executable.COMPILER_OPTIONS`.
    """
    return y.astype(dtype).astype(x.dtype)


def _dot(x: Array, weight: Array) -> Array:
    """x (T, in) times weight (out, in) transposed, in full float32 where the operands are."""
    import jax

    return jax.lax.dot_general(
        x, weight, (((1,), (1,)), ((), ())), precision="highest", preferred_element_type="float32"
    )


@LOWERING.emits(WeightOp, "symbol")
def _weight(op: WeightOp) -> Trace:
    operand_dtype(op, op.result)
    return Trace(lambda run: ())


@LOWERING.emits(EmbedOp)
def _embed(op: EmbedOp) -> Trace:
    key = (weight_name(op, op.table),)
    operand_dtype(op, op.table)
    return Trace(lambda run: run.weights[key][run.tokens], (key,))


def _norm(x: Array, weight: Array, eps: float, dtype: str) -> Array:
    import jax
    import jax.numpy as jnp

    wide = x.astype(jnp.float32)
    scale = jax.lax.rsqrt(jnp.mean(jnp.square(wide), axis=-1, keepdims=True) + eps)
    return _rounded(wide * scale * weight.astype(jnp.float32), x, dtype)


@LOWERING.emits(RmsNormOp, "eps")
def _rms_norm(op: RmsNormOp) -> Trace:
    key, eps = (weight_name(op, op.weight),), op.eps.value.data
    dtype = operand_dtype(op, op.x)
    return Trace(lambda run, x: _norm(x, run.weights[key], eps, dtype), (key,))


@LOWERING.emits(AddRmsNormOp, "eps")
def _add_rms_norm(op: AddRmsNormOp) -> Trace:
    key, eps = (weight_name(op, op.weight),), op.eps.value.data
    dtype = operand_dtype(op, op.x)

    def trace(run: Run, x: Array, y: Array) -> tuple[Array, Array]:
        total = _rounded(x + y, x, dtype)
        return total, _norm(total, run.weights[key], eps, dtype)

    return Trace(trace, (key,))


@LOWERING.emits(LinearOp)
def _linear(op: LinearOp) -> Trace:
    names, biases = [weight_name(op, op.weight)], [] if op.bias is None else [weight_name(op, op.bias)]
    product, keys = _product(names, biases, operand_dtype(op, op.x))
    return Trace(product, keys)


@LOWERING.emits(LinearsOp)
def _linears(op: LinearsOp) -> Trace:
    names, biases = [weight_name(op, w) for w in op.weights], [weight_name(op, b) for b in op.biases]
    product, keys = _product(names, biases, operand_dtype(op, op.x))
    widths = [kind.get_shape()[1] for kind in op.products.types]
    edges = list(accumulate(widths))[:-1]

    def trace(run: Run, x: Array) -> Sequence[Array]:
        import jax.numpy as jnp

        return jnp.split(product(run, x), edges, axis=1)

    return Trace(trace, keys)


def _product(
    names: list[str], biases: list[str], dtype: str
) -> tuple[Callable[[Run, Array], Array], tuple[tuple[str, ...], ...]]:
    matrix, offset = tuple(names), tuple(biases)

    def trace(run: Run, x: Array) -> Array:
        y = _dot(x, run.weights[matrix])
        return _rounded(y + run.weights[offset] if offset else y, x, dtype)

    return trace, (matrix, offset) if offset else (matrix,)


@LOWERING.emits(
    RopeOp, "head_dim", "kind", "theta", "factor", "low_freq_factor", "high_freq_factor", "original_positions"
)
def _rope(op: RopeOp) -> Trace:
    dtype = operand_dtype(op, op.x)
    head_dim = op.head_dim.value.data
    table = RopeTable(rope_of(op), head_dim)

    def trace(run: Run, x: Array) -> Array:
        import jax.numpy as jnp

        cos, sin = (side[:, None, :] for side in run.tables[table])
        a, b = jnp.split(x.reshape(x.shape[0], -1, head_dim).astype(jnp.float32), 2, axis=-1)
        turned = jnp.concatenate((a * cos - b * sin, b * cos + a * sin), axis=-1)
        return _rounded(turned.reshape(x.shape), x, dtype)

    return Trace(trace, table=table)


@LOWERING.emits(AttentionOp, "heads", "scale", "window", "softcap")
def _attention(op: AttentionOp) -> Trace:
    dtype = operand_dtype(op, op.q)
    if attribute_dtype(op, op.cache.dtype) != dtype:
        raise refuse(op, "KV dtype", op.cache.dtype, f"q is {dtype}, and this lowering attends in one dtype")
    window, scale, kv = op.window_tokens, op.scale.value.data, op.kv
    softcap = None if op.softcap is None else op.softcap.value.data
    kv_heads, head_dim = op.kv_heads, op.head_dim
    name = kv_class(window)

    def trace(run: Run, q: Array, k: Array, v: Array) -> Array:
        import jax
        import jax.numpy as jnp

        heads = (k.shape[0], kv_heads, head_dim)
        slots = run.slots[name]
        run.kv[kv] = keys, values = tuple(  # type: ignore[assignment]
            pages.at[slots].set(new.reshape(heads).astype(pages.dtype), mode="drop")
            for pages, new in zip(run.kv[kv], (k, v), strict=True)
        )
        visible, alive = _masks(run, window)
        count = visible.shape[0]
        keys, values = (_gather(side, run.pages[name], run.page_tokens) for side in (keys, values))
        # What nobody sees may be infinite, and 0 * inf is not 0.
        values = jnp.where(alive[:, :, None, None], values, 0)
        queries = q.reshape(count, -1, kv_heads, q.shape[1] // (kv_heads * head_dim), head_dim)
        scores = scale * jnp.einsum(
            "bqngd,blnd->bngql", queries, keys, precision="highest", preferred_element_type="float32"
        )
        if softcap is not None:
            scores = softcap * jnp.tanh(scores / softcap)
        scores = jnp.where(visible[:, None, None], scores, _LOWEST)
        weights = _rounded(jax.nn.softmax(scores, axis=-1), values, dtype)
        out = jnp.einsum("bngql,blnd->bqngd", weights, values, precision="highest", preferred_element_type="float32")
        return _rounded(out.reshape(q.shape), q, dtype)

    return Trace(trace)


def _gather(side: Array, pages: Array, page_tokens: int) -> Array:
    """(B, L, N, D) from pages (B, P)."""
    blocks = side.reshape(-1, page_tokens, *side.shape[1:])[pages]
    return blocks.reshape(pages.shape[0], -1, *side.shape[1:])


def _masks(run: Run, window: int | None) -> tuple[Array, Array]:
    """Which keys a query sees, (B, Q, L), and which any query of the sequence may see, (B, L)."""
    import jax.numpy as jnp

    if window not in run.masks:
        name = kv_class(window)
        pages, first = run.pages[name], run.first[name]
        keys = first[:, None] * run.page_tokens + jnp.arange(pages.shape[1] * run.page_tokens)
        queries = run.positions.reshape(pages.shape[0], -1)[:, :, None]
        visible = keys[:, None, :] <= queries
        if window is not None:
            visible &= keys[:, None, :] > queries - window
        run.masks[window] = visible, keys < run.kv_lens[:, None]
    return run.masks[window]


@LOWERING.emits(SiluMulOp)
def _silu_mul(op: SiluMulOp) -> Trace:
    dtype = operand_dtype(op, op.x)

    def trace(run: Run, gate: Array, up: Array) -> Array:
        import jax
        import jax.numpy as jnp

        wide = gate.astype(jnp.float32)
        return _rounded(wide * jax.nn.sigmoid(wide) * up.astype(jnp.float32), gate, dtype)

    return Trace(trace)


@LOWERING.emits(AddOp)
def _add(op: AddOp) -> Trace:
    dtype = operand_dtype(op, op.x)
    return Trace(lambda run, x, y: _rounded(x + y, x, dtype))


@LOWERING.emits(LogitsOp)
def _logits(op: LogitsOp) -> Trace:
    key = (weight_name(op, op.weight),)
    operand_dtype(op, op.x)

    def trace(run: Run, x: Array) -> Array:
        rows = x if run.logit_rows is None else x[run.logit_rows]
        return _dot(rows, run.weights[key])

    return Trace(trace, (key,))
