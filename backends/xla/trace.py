"""How ops become functions that trace them in JAX; `emit` has all of them.

`LOWERING.emit(op)` checks the op; what it returns is called while a program is traced: `trace.run(run, *values)`, where
the values are activations, and `run` holds weights, KV and the step's facts as traced arrays. Emitters keep to
`jax.numpy` on arrays, so neither a device nor weights are needed to check.

On a chip of a tensor-parallel group every array is the chip's own part (`split`), so emitters read sizes off arrays and
not off ops. The chips speak to each other in a product over a split input, in a norm over a split width, in the
embedding and in the experts.

Legend: B sequences, Q queries, T = B * Q tokens, L keys, N KV heads, G heads of each, D head_dim.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from xdsl.ir import SSAValue

from plait.backends.kernels.lowering import Lowering
from plait.backends.xla.attend import Facts
from plait.backends.xla.split import AXIS, Split
from plait.ir.rope import Rope

if TYPE_CHECKING:
    from jax import Array

Key = tuple[str, ...]
"""Weights by the names that are stacked in one array: rows of q, k and v behind one another."""


@dataclass(frozen=True)
class RopeTable:
    """A table that the step brings: [T, rotary_dim / 2] cos and sin."""

    rope: Rope
    rotary_dim: int


@dataclass(frozen=True)
class Trace:
    """How one op is traced, and what it needs of the slice.

    Attributes:
        weights: by the names that are stacked in one array.
        experts: weights of which the trace takes one expert at a time, and inside a scan finds the layer itself:
            cutting a layer out first would copy all its experts.
        table: the rotary table.
        positions: how many positions there are, where they are learned.
    """

    run: Callable[..., Any]
    weights: tuple[Key, ...] = ()
    experts: tuple[Key, ...] = ()
    table: RopeTable | None = None
    positions: int | None = None

    @property
    def arrays(self) -> tuple[Key, ...]:
        """All weights."""
        return self.weights + self.experts


@dataclass
class Run:
    """One program while it is traced.

    Attributes:
        weights: by the names that are stacked in it.
        attend: `attend.append_and_attend` or its like.
        pools: the KV of equal layers in one array, (layers * pages * page_tokens, ...); replaced when written.
        pool_of: the number of the pool by KV argument.
        layer: which of a pool's layers is traced; a traced number inside a scan.
        facts: the step's, see `buckets.Grid`.
        tables: cos and sin.
        logit_rows: [R] rows wanted, None for all.
        split: what a chip of a group holds of each weight.
    """

    weights: dict[Key, Array]
    attend: Callable[..., tuple[Array, Array]]
    pools: list[Array]
    pool_of: dict[SSAValue, int]
    layer: Array | int
    facts: Facts
    tables: dict[RopeTable, tuple[Array, Array]]
    logit_rows: Array | None
    split: Split


LOWERING: Lowering[tuple[Trace, ...]] = Lowering("jax")
"""An op is one trace, or two in a row: the second takes what the first made, and their results are the op's."""


def rounded(y: Array, x: Array, dtype: str) -> Array:
    """A result y in the module's dtype, held as the operand x is: in that dtype, or in float32 on a CPU host.

    The bits so do not depend on where the model is cut; see `program.COMPILER_OPTIONS`.
    """
    return y.astype(dtype).astype(x.dtype)


def dot(x: Array, weight: Array) -> Array:
    """x (T, in) times weight (out, in) transposed, in full float32 where the operands are."""
    import jax

    return jax.lax.dot_general(
        x, weight, (((1,), (1,)), ((), ())), precision="highest", preferred_element_type="float32"
    )


def sum_over_group(y: Array) -> Array:
    import jax

    total: Array = jax.lax.psum(y, AXIS)  # type: ignore[no-untyped-call]
    return total
