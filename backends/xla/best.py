"""The best tokens of logits, found where the logits are: only they come to the host."""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp


@partial(jax.jit, static_argnames="vocabulary")
def best_tokens(logits: jax.Array, vocabulary: int) -> jax.Array:
    """`plait.backends.base.best_tokens` of logits (R, vocabulary), which a group may have padded to more columns."""
    own = logits[:, :vocabulary]
    return jnp.where(jnp.isfinite(own.max(axis=1)), own.argmax(axis=1), -1).astype(jnp.int32)
