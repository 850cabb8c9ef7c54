"""The experts of a step, one after the other, each with the tokens that chose it.

Tokens are put in the order of their experts, and a loop takes blocks of them: one expert's rows, a few at a time, by
that expert's matrices, which are cut out of the stack as they are used. So an expert that nobody chose is not read.
The other ways, by libtpu's own estimates for a layer of 64 experts of 3 x 2048 x 1024 on a v5e, 8 of them per token:

    tokens   blocks    all experts for all tokens   `jax.lax.ragged_dot`   a gather of each token's experts
    8        1.2 ms    1.5 ms                       12 ms                  19 ms
    512      2.4 ms    3.0 ms                       12 ms                  48 GiB of copies

`ragged_dot` and a gather copy what they take of the stack before they multiply. All experts for all tokens read every
expert, and need as many times the flops as there are experts to each chosen one: 8 here, up to 32 in models of today.

Legend: T tokens, E experts on this chip, K experts of a token, P = T * K pairs, M rows of a block.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from plait.backends.xla.trace import dot

if TYPE_CHECKING:
    from jax import Array

#: Rows of a block: a TPU's tiles have 16 rows of 16-bit numbers, and its multipliers 128 or 256.
LEAST_ROWS, MOST_ROWS = 16, 128


@dataclass(frozen=True)
class Experts:
    """The experts of a layer.

    Attributes:
        stacks: gate and up (E, inner, hidden), down (E, hidden, inner); with an axis of layers in front where they are
            scanned.
        biases: as the stacks, without their last axis; or none.
        layer: which of the layers.
        activate: gate and up in float32 to what the last matrix takes.
    """

    stacks: Sequence[Array]
    biases: Sequence[Array]
    layer: Array | int
    activate: Callable[[Array, Array], Array]

    @property
    def count(self) -> int:
        size: int = self.stacks[0].shape[-3]
        return size

    def __call__(self, expert: Array, rows: Array) -> Array:
        """One expert's MLP of rows (M, hidden): (M, hidden) in float32."""

        def product(which: int, x: Array) -> Array:
            y = dot(x, self._of(self.stacks[which], 2, expert))
            return y + self._of(self.biases[which], 1, expert) if self.biases else y

        return product(2, self.activate(product(0, rows), product(1, rows)))

    def _of(self, stack: Array, dims: int, expert: Array) -> Array:
        """An expert's part of a stack, the last `dims` axes."""
        import jax

        where = (self.layer, expert)[dims + 2 - stack.ndim :]
        size = stack.shape[-dims:]
        cut = jax.lax.dynamic_slice(stack, (*where, *(0,) * dims), (*(1,) * len(where), *size))
        return cut.reshape(size)


def apply(experts: Experts, x: Array, routing: Array, most: int) -> Array:
    """The sum over experts e of routing[:, e] times the MLP of e, (T, hidden) in float32.

    Args:
        x: (T, hidden).
        routing: float32 (T, E), of this chip's experts.
        most: of a row of all chips' routing at most so many are not 0.
    """
    import jax
    import jax.numpy as jnp

    tokens, most = len(x), min(most, experts.count)
    pairs = tokens * most
    rows = _block_rows(pairs, experts.count)
    chosen = jax.lax.top_k(jnp.abs(routing), most)[1]
    weights = jnp.take_along_axis(routing, chosen, axis=1)
    used = routing != 0
    sizes = used.sum(axis=0, dtype=jnp.int32)
    start = jnp.cumsum(sizes) - sizes
    # The place of a pair among all: behind those of earlier experts, and of earlier tokens with the same.
    places = start + jnp.cumsum(used, axis=0, dtype=jnp.int32) - used
    place = jnp.where(weights != 0, jnp.take_along_axis(places, chosen, axis=1), pairs + rows)
    owner = jnp.broadcast_to(jnp.arange(tokens, dtype=jnp.int32)[:, None], place.shape)
    sorted_rows = x[jnp.zeros(pairs + rows, jnp.int32).at[place].set(owner, mode="drop")]
    blocks = -(-sizes // rows)
    ends = jnp.cumsum(blocks)

    def block(index: Array, out: Array) -> Array:
        """The last block of an expert reaches into the rows of the next, which that one overwrites."""
        expert = (ends <= index).sum(dtype=jnp.int32)
        at = start[expert] + (index - ends[expert] + blocks[expert]) * rows
        made = experts(expert, jax.lax.dynamic_slice_in_dim(sorted_rows, at, rows))
        return jax.lax.dynamic_update_slice_in_dim(out, made, at, axis=0)

    with jax.named_scope(f"repeat{_blocks(pairs, experts.count, rows)}"):
        out = jax.lax.fori_loop(0, ends[-1], block, jnp.zeros((pairs + rows, x.shape[1]), jnp.float32))
    own = jnp.where(weights[:, :, None] != 0, out.at[place].get(mode="clip"), 0)
    # In the order of a token's choice, whoever else is in the step.
    return (weights[:, :, None] * own).sum(axis=1)


def _block_rows(pairs: int, experts: int) -> int:
    """Rows for which most experts need one block though some are chosen more often, a power of two."""
    rows = LEAST_ROWS
    while rows < MOST_ROWS and 2 * rows * experts < 3 * pairs:
        rows *= 2
    return rows


def _blocks(pairs: int, experts: int, rows: int) -> int:
    """How often the loop is expected to run, which its name tells `hlo`: where tokens choose at random, each chosen
    expert once, and where blocks are too small for that, its last block half full."""
    chosen = experts * (1 - (1 - 1 / experts) ** pairs)
    return round(max(chosen, pairs / rows + chosen / 2))
