"""Attention over paged KV, in plain JAX: KV heads are shared by their group of query heads and never repeated.

KV of a layer is one array of rows, a row per token: K of all heads, then V of all heads. One scatter writes a step and
one gather reads it, and a row is a whole number of a TPU's 128 lanes where a (heads, 64) layout would be padded twofold
and copied (measured by XLA's own estimate: 30 thousand cycles a layer against 9 million for 3 heads of 64).

Legend: B sequences, Q queries, T = B * Q tokens, L keys, N KV heads, G heads of each, D head_dim, P pages.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from plait.ir.numbers import NUMPY
from plait.ir.types import CODE_MAX
from plait.spec import kv_class

if TYPE_CHECKING:
    from jax import Array

#: The score of a key that is not seen. Finite, so that a padded query, which sees none, gives zeros and not NaN.
_LOWEST = -3e38


@dataclass(frozen=True)
class Heads:
    """The attributes of one attention; None means off. `code` is the FP8 that K and V are rounded to."""

    head_dim: int
    scale: float
    window: int | None
    softcap: float | None
    code: str | None


@dataclass(frozen=True)
class Facts:
    """The arrays of one `buckets.Grid`, and what is made of them once for all layers.

    Attributes:
        pool_pages: pages that a layer has, by KV class.
        masks: by window: which keys a query sees, (B, Q, L), and which any query of the sequence may see, (B, L).
    """

    tokens: Array
    positions: Array
    kv_lens: Array
    slots: dict[str, Array]
    pages: dict[str, Array]
    first: dict[str, Array]
    page_tokens: int
    pool_pages: dict[str, int]
    masks: dict[int | None, tuple[Array, Array]]


def masks(
    window: int | None, positions: Array, kv_lens: Array, pages: Array, first: Array, page_tokens: int
) -> tuple[Array, Array]:
    """`Facts.masks` of one window."""
    import jax.numpy as jnp

    keys = first[:, None] * page_tokens + jnp.arange(pages.shape[1] * page_tokens)
    queries = positions.reshape(pages.shape[0], -1)[:, :, None]
    visible = keys[:, None, :] <= queries
    if window is not None:
        visible &= keys[:, None, :] > queries - window
    return visible, keys < kv_lens[:, None]


def append_and_attend(
    facts: Facts,
    heads: Heads,
    pool: Array,
    layer: Array | int,
    q: Array,
    k: Array,
    v: Array,
    sink: Array | None,
    dtype: str,
) -> tuple[Array, Array]:
    """Write k and v (T, N D) to the layer's pages, attend with q (T, N G D): the pool, and (T, N G D) in float32.

    Args:
        pool: (layers * pages * page_tokens, 2 N D).
        sink: (N G).
        dtype: the module's, which attention's weights are rounded to.
    """
    import jax.numpy as jnp

    pool, rows, visible, alive = _append(facts, heads, pool, layer, jnp.concatenate((k, v), axis=1), q)
    keys, values = jnp.split(rows, 2, axis=2)
    # What nobody sees may be infinite, and 0 * inf is not 0.
    values = jnp.where(alive[:, :, None], values, 0)
    attend = _attend_one if visible.shape[1] == 1 else _attend_many
    return pool, attend(heads, q, keys, values, visible, sink, dtype).reshape(q.shape)


def append_and_attend_latent(
    facts: Facts, heads: Heads, pool: Array, layer: Array | int, q: Array, k: Array, latent: int, dtype: str
) -> tuple[Array, Array]:
    """Write k (T, D) to the layer's pages, attend with q (T, G D) to keys whose first `latent` features are their
    values: the pool, and (T, G latent) in float32.

    Args:
        pool: (layers * pages * page_tokens, D).
        dtype: as in `append_and_attend`.
    """
    import jax.numpy as jnp

    pool, keys, visible, alive = _append(facts, heads, pool, layer, k, q)
    # Whole rows are multiplied, and what is no value is left out of the products: keys need not be cut.
    values = jnp.where(alive[:, :, None], keys, 0)
    attend = _attend_one if visible.shape[1] == 1 else _attend_many
    out = attend(heads, q, keys, values, visible, None, dtype)
    return pool, out.reshape(len(q), -1, heads.head_dim)[:, :, :latent].reshape(len(q), -1)


def _append(
    facts: Facts, heads: Heads, pool: Array, layer: Array | int, new: Array, q: Array
) -> tuple[Array, Array, Array, Array]:
    """Write new rows (T, W) to the layer's pages: the pool, the rows (B, L, W) of the step's sequences, held as q is,
    and their `Facts.masks`."""
    name = kv_class(heads.window)
    slots = layer_slots(facts, name, layer, pool)
    pool = pool.at[slots].set(_stored(new, heads.code).astype(pool.dtype), mode="drop")
    visible, alive = facts.masks[heads.window]
    rows = pool.reshape(-1, facts.page_tokens, pool.shape[1])
    rows = rows.at[facts.pages[name] + layer * facts.pool_pages[name]].get(mode="clip").astype(q.dtype)
    return pool, rows.reshape(*alive.shape, -1), visible, alive


def _stored(rows: Array, code: str | None) -> Array:
    """Rounded as `plait.ir.numbers.saturate` does."""
    import jax.numpy as jnp

    return rows if code is None else jnp.clip(rows, -CODE_MAX[code], CODE_MAX[code]).astype(NUMPY[code])


def layer_slots(facts: Facts, name: str, layer: Array | int, pool: Array) -> Array:
    """The rows of the pool that a step's tokens are written to."""
    import jax.numpy as jnp

    slots, per_layer = facts.slots[name], facts.pool_pages[name] * facts.page_tokens
    # A slot beyond the layer's last is one that nothing is written to: it must not become the next layer's first.
    return jnp.where(slots < per_layer, slots + layer * per_layer, pool.shape[0])


def _attend_many(
    heads: Heads, q: Array, keys: Array, values: Array, visible: Array, sink: Array | None, dtype: str
) -> Array:
    """Q queries of each sequence; keys and values are (B, L, N D)."""
    import jax.numpy as jnp

    count, length, width = keys.shape
    n = width // heads.head_dim
    queries = q.reshape(count, -1, n, q.shape[1] // width, heads.head_dim)
    keys, values = (side.reshape(count, length, n, heads.head_dim) for side in (keys, values))
    scores = jnp.einsum("bqngd,blnd->bngql", queries, keys, precision="highest", preferred_element_type="float32")
    sinks = None if sink is None else sink.reshape(n, -1, 1, 1)
    weights = _weights(heads, scores, visible[:, None, None], sinks, values, dtype)
    return jnp.einsum("bngql,blnd->bqngd", weights, values, precision="highest", preferred_element_type="float32")


def _attend_one(
    heads: Heads, q: Array, keys: Array, values: Array, visible: Array, sink: Array | None, dtype: str
) -> Array:
    """One query of each sequence, against whole rows of K and V.

    A query is laid out over a row with zeros for the KV heads that are not its own, and of what comes back only its own
    head's part is kept. That is N times the products, which a TPU has to spare in decode, and no reordering of the
    keys, which it has not.
    """
    import jax.numpy as jnp

    count, _, width = keys.shape
    n = width // heads.head_dim
    queries = q.reshape(count, n, -1, 1, heads.head_dim)
    own = jnp.eye(n, dtype=bool)[:, None, :, None]
    spread = jnp.where(own, queries, 0).reshape(count, -1, width)
    scores = jnp.einsum("bhw,blw->bhl", spread, keys, precision="highest", preferred_element_type="float32")
    weights = _weights(heads, scores, visible, None if sink is None else sink[:, None], values, dtype)
    rows = jnp.einsum("bhl,blw->bhw", weights, values, precision="highest", preferred_element_type="float32")
    return jnp.where(own, rows.reshape(count, n, -1, n, heads.head_dim), 0).sum(axis=3)


def _weights(heads: Heads, scores: Array, visible: Array, sink: Array | None, values: Array, dtype: str) -> Array:
    """softmax of the scores over their last axis, rounded to `dtype` and held as `values` are."""
    import jax.numpy as jnp

    scores = heads.scale * scores
    if heads.softcap is not None:
        scores = heads.softcap * jnp.tanh(scores / heads.softcap)
    scores = jnp.where(visible, scores, _LOWEST)
    top = jnp.max(scores, axis=-1, keepdims=True)
    if sink is not None:
        top = jnp.maximum(top, sink.astype(jnp.float32))
    weights = jnp.exp(scores - top)
    total = weights.sum(axis=-1, keepdims=True)
    if sink is not None:
        total = total + jnp.exp(sink.astype(jnp.float32) - top)
    return (weights / total).astype(dtype).astype(values.dtype)
