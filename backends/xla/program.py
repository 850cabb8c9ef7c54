"""The program of a slice: its ops in order, equal blocks as one scan, and the arrays it wants.

A run of equal blocks (or of equal periods of blocks, where windows alternate) is traced once and scanned: its weights
lie stacked, a layer behind the other, and its KV in one pool that the scan carries and writes in place. Compiling takes
one block's time however many there are.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from xdsl.dialects.builtin import ModuleOp
from xdsl.ir import SSAValue

from plait.backends.kernels.lowering import weight_dtypes
from plait.backends.xla import ragged
from plait.backends.xla.attend import Facts, append_and_attend, masks
from plait.backends.xla.record import Attention
from plait.backends.xla.segments import Segment, segments
from plait.backends.xla.split import Split
from plait.backends.xla.trace import Key, Run
from plait.ir import kv_classes, kv_layouts, signature, weights
from plait.ir.module import boundary, ops
from plait.ir.ops import LogitsOp
from plait.spec import kv_class

if TYPE_CHECKING:
    from jax import Array

#: Otherwise XLA may leave out a rounding to 16 bits between two ops, and the bits depend on where the model is cut.
COMPILER_OPTIONS = {"xla_allow_excess_precision": False}


@dataclass(frozen=True)
class Weight:
    """One array of weights.

    Attributes:
        layers: for each repetition the tensors whose rows lie behind one another; the traces of all repetitions ask for
            it by the first's names.
        scanned: whether the layers are an axis of their own, in front.
    """

    layers: tuple[Key, ...]
    scanned: bool
    dtype: str

    @property
    def key(self) -> Key:
        return self.layers[0]


@dataclass(frozen=True)
class Pool:
    """The KV of equal layers; `kv` are the numbers of the slice's KV values in it, in order. A latent one has no V."""

    kv: tuple[int, ...]
    kv_heads: int
    head_dim: int
    dtype: str
    window: int | None
    is_latent: bool = False

    @property
    def sides(self) -> int:
        """K and V, or K alone."""
        return 1 if self.is_latent else 2

    @property
    def kv_class(self) -> str:
        return kv_class(self.window)


class Program:
    """What is traced for every shape of a slice.

    Attributes:
        weights, pools, tables: the arrays that go in, in order.
        positions: how many there are, where they are learned.
        outputs: what comes out, by name, and whether it is logits.
        sizes: shapes of the checkpoint's tensors, by name.

    Args:
        scan: whether equal blocks are scanned; without, every block is traced.
    """

    def __init__(
        self,
        module: ModuleOp,
        page_tokens: int,
        split: Split | None = None,
        *,
        attention: Attention = "gather",
        scan: bool = True,
    ) -> None:
        self.page_tokens, self.split, self.attention = page_tokens, split or Split(), attention
        if attention == "pallas":
            for op in ops(module):
                ragged.check(op, self.split)
        self.windows = kv_classes(module)
        self._sig = signature(module)
        self.segments = tuple(segments(module, scan))
        self.sizes = {name: op.result.type.get_shape() for name, op in weights(module).items()}
        self.weights = tuple(self._weights(weight_dtypes(module)))
        self.pools, self._pool_of = self._pools(module)
        traces = [step.trace for segment in self.segments for step in segment.steps]
        self.tables = tuple(dict.fromkeys(trace.table for trace in traces if trace.table is not None))
        self.positions = min((trace.positions for trace in traces if trace.positions is not None), default=None)
        self.inputs = {name: boundary(name, value) for name, value in self._sig.inputs.items()}
        self.outputs = {
            name: (boundary(name, value), isinstance(value.owner, LogitsOp))
            for name, value in self._sig.outputs.items()
        }

    @property
    def has_logits(self) -> bool:
        return any(is_logits for _, is_logits in self.outputs.values())

    def trace(
        self,
        weights: Sequence[Array],
        pools: Sequence[Array],
        inputs: Mapping[str, Array],
        facts: Mapping[str, Any],
        tables: Sequence[tuple[Array, Array]],
        logit_rows: Array | None,
    ) -> tuple[dict[str, Array], list[Array]]:
        """Outputs by name, and the pools with this step's K and V.

        Args:
            weights: as `self.weights`, scanned ones with the layers in front, (layers, out, in).
            pools: as `self.pools`, see `arrays.pool_shape`.
            inputs: boundary tensors (T, width), padded rows included.
            facts: the arrays of a `buckets.Grid` by name.
            logit_rows: [R] rows of the logits that are wanted; None for all.
        """
        slots = {pool.kv_class: array.shape[0] // len(pool.kv) for pool, array in zip(self.pools, pools, strict=True)}
        seen = {
            window: masks(
                window,
                facts["positions"],
                facts["kv_lens"],
                facts["pages"][name],
                facts["first"][name],
                self.page_tokens,
            )
            for name, window in self.windows.items()
        }
        run = Run(
            weights={weight.key: array for weight, array in zip(self.weights, weights, strict=True)},
            attend=append_and_attend if self.attention == "gather" else ragged.append_and_attend,
            pools=list(pools),
            pool_of=self._pool_of,
            layer=0,
            facts=Facts(
                page_tokens=self.page_tokens,
                pool_pages={name: count // self.page_tokens for name, count in slots.items()},
                masks=seen,
                **facts,
            ),
            tables=dict(zip(self.tables, tables, strict=True)),
            logit_rows=logit_rows,
            split=self.split,
        )
        env: dict[SSAValue, Any] = {arg: inputs[name] for name, arg in self._sig.inputs.items()}
        for segment in self.segments:
            if segment.repeats == 1:
                _execute(segment, run, env)
            else:
                _scan(segment, run, env)
        return {name: env[value] for name, value in self._sig.outputs.items()}, run.pools

    def _weights(self, dtypes: Mapping[str, str]) -> list[Weight]:
        found: dict[Key, Weight] = {}
        for segment in self.segments:
            period = len(segment.steps) // segment.repeats
            for index, step in enumerate(segment.steps[:period]):
                for number, key in enumerate(step.trace.arrays):
                    layers = tuple(other.trace.arrays[number] for other in segment.steps[index::period])
                    found[key] = Weight(layers, segment.repeats > 1, dtypes[key[0]])
        return list(found.values())

    def _pools(self, module: ModuleOp) -> tuple[tuple[Pool, ...], dict[SSAValue, int]]:
        numbers: dict[SSAValue, int] = {value: number for number, value in enumerate(self._sig.kv.values())}
        layouts = kv_layouts(module, self.page_tokens)
        pools: list[Pool] = []
        pool_of: dict[SSAValue, int] = {}
        for segment in self.segments:
            period = len(segment.steps) // segment.repeats
            for index, step in enumerate(segment.steps[:period]):
                if step.kv:
                    values = [other.kv[0] for other in segment.steps[index::period]]
                    kind = layouts[numbers[values[0]]]
                    pool_of |= dict.fromkeys(values, len(pools))
                    held = tuple(numbers[value] for value in values)
                    latent = kind.values is not None
                    pools.append(Pool(held, kind.kv_heads, kind.head_dim, kind.dtype, kind.window, latent))
        return tuple(pools), pool_of


def _execute(segment: Segment, run: Run, env: dict[SSAValue, Any], steps: int | None = None) -> None:
    """Trace the first `steps` steps (all by default) once."""
    for step in segment.steps[:steps]:
        made = step.trace.run(run, *[env[value] for value in step.operands])
        env.update(zip(step.results, made if len(step.results) > 1 else (made,), strict=True))


def _scan(segment: Segment, run: Run, env: dict[SSAValue, Any]) -> None:
    import jax
    import jax.numpy as jnp

    period = len(segment.steps) // segment.repeats
    steps = segment.steps[:period]
    keys = list(dict.fromkeys(key for step in steps for key in step.trace.weights))
    own = sorted({run.pool_of[value] for step in steps for value in step.kv})

    def body(carry: Any, xs: Any) -> Any:
        values, pools = carry
        layer, stacked = xs
        # Only what this segment carries changes; the rest is the outer trace's.
        weights = run.weights | dict(zip(keys, stacked, strict=True))
        inner = replace(run, weights=weights, pools=list(run.pools), layer=layer)
        for number, pool in zip(own, pools, strict=True):
            inner.pools[number] = pool
        local = dict(zip(segment.entering, values, strict=True))
        _execute(segment, inner, local, period)
        return ([local[value] for value in segment.carried], [inner.pools[number] for number in own]), None

    # The name tells `hlo` how often the loop runs.
    with jax.named_scope(f"repeat{segment.repeats}"):
        (values, pools), _ = jax.lax.scan(
            body,
            ([env[value] for value in segment.entering], [run.pools[number] for number in own]),
            (jnp.arange(segment.repeats, dtype=jnp.int32), [run.weights[key] for key in keys]),
        )
    for number, pool in zip(own, pools, strict=True):
        run.pools[number] = pool
    env.update(zip(segment.leaving, values, strict=True))
