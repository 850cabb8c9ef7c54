"""Attention by JAX's own TPU kernel, ragged paged attention in Pallas: keys are read page by page, no further than a
sequence is long, where `attend` gathers as many as the shape allows.

It wants a page as (page_tokens, 2 N, D), K and V of a head behind one another, and heads of 128 lanes.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from plait.backends.kernels.lowering import refuse
from plait.backends.xla.attend import Facts, Heads, layer_slots
from plait.backends.xla.split import Split
from plait.ir.ops import AttentionOp, LatentAttentionOp, PlaitOp
from plait.spec import kv_class

if TYPE_CHECKING:
    from jax import Array

LANES = 128

#: Keys and queries that one step of the kernel takes: small enough for 16 MiB of VMEM with 8 KV heads of 128.
BLOCK_KEYS, BLOCK_QUERIES = 512, 32


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
    """As `attend.append_and_attend`, with a pool (layers * pages * page_tokens, 2 N, D)."""
    import jax.numpy as jnp
    from jax.experimental.pallas.ops.tpu.ragged_paged_attention import ragged_paged_attention

    assert sink is None, "the lowering refuses sinks"
    name, size = kv_class(heads.window), facts.page_tokens
    rows = jnp.stack([side.reshape(len(side), -1, heads.head_dim) for side in (k, v)], axis=2)
    slots = layer_slots(facts, name, layer, pool)
    pool = pool.at[slots].set(rows.reshape(len(rows), *pool.shape[1:]).astype(pool.dtype), mode="drop")
    pages, first = facts.pages[name], facts.first[name]
    queries = facts.positions.reshape(len(pages), -1)
    lengths = (queries >= 0).sum(axis=1, dtype=jnp.int32)
    out = ragged_paged_attention(
        q.reshape(len(q), -1, heads.head_dim),
        pool.reshape(-1, size, *pool.shape[1:]),
        facts.kv_lens - first * size,
        pages + layer * facts.pool_pages[name],
        jnp.concatenate((jnp.zeros(1, jnp.int32), jnp.cumsum(lengths, dtype=jnp.int32))),
        (facts.kv_lens > 0).sum(dtype=jnp.int32)[None],
        sm_scale=heads.scale,
        sliding_window=heads.window,
        soft_cap=heads.softcap,
        num_kv_pages_per_block=min(pages.shape[1], max(1, BLOCK_KEYS // size)),
        num_queries_per_block=min(len(q), BLOCK_QUERIES),
    )
    # Nothing is written to the rows that are padding.
    return pool, jnp.where((facts.positions >= 0)[:, None], out.reshape(q.shape), 0)


def check(op: PlaitOp, split: Split) -> None:
    """Raise UnsupportedError for an attention that JAX's kernel does not take."""
    if isinstance(op, LatentAttentionOp):
        raise refuse(op, why="Pallas attention keeps V beside K, and a latent row is both")
    if not isinstance(op, AttentionOp):
        return
    held = split.kv_heads(op.kv_heads) // split.chips
    if op.head_dim % LANES:
        raise refuse(op, "head_dim", op.head_dim, f"Pallas attention takes multiples of {LANES}")
    if op.cache.is_fp8:
        raise refuse(op, "KV dtype", op.cache.dtype, "Pallas attention stores KV in the dtype of q")
    if op.sinks is not None:
        raise refuse(op, "sinks", op.sinks.type, "Pallas attention has none")
    if held not in (1, 2, 4) and held % 8:
        raise refuse(op, "KV heads on a chip", held, "Pallas attention takes 1, 2, 4 or a multiple of 8")
