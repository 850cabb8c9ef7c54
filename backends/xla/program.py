"""The program of a slice: its ops in order, equal blocks as one scan, and the arrays it wants.

A run of equal blocks (or of equal periods of blocks, where windows alternate) is traced once and scanned: its weights
lie stacked, a layer behind the other, and its KV in one pool that the scan carries and writes in place. Compiling takes
one block's time however many there are.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from typing import TYPE_CHECKING, Any

from xdsl.dialects.builtin import ModuleOp, TensorType
from xdsl.ir import SSAValue

from plait.backends.kernels.lowering import refuse, weight_dtypes
from plait.backends.xla import ragged
from plait.backends.xla.attend import Facts, append_and_attend, masks
from plait.backends.xla.emit import LOWERING, Key, Run, Trace
from plait.backends.xla.record import Attention
from plait.backends.xla.split import Split
from plait.ir import kv_classes, kv_layouts, signature, weights
from plait.ir.module import boundary, ops
from plait.ir.ops import AddOp, AddRmsNormOp, AttentionOp, LogitsOp, PlaitOp, RmsNormOp, WeightOp
from plait.ir.types import KVType
from plait.spec import Boundary, kv_class

if TYPE_CHECKING:
    from jax import Array

#: Otherwise XLA may leave out a rounding to 16 bits between two ops, and the bits depend on where the model is cut.
COMPILER_OPTIONS = {"xla_allow_excess_precision": False}

_LONGEST_PERIOD = 8
"""Blocks of the longest pattern that is looked for: five local layers and a global one make six."""


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
    """The KV of equal layers; `kv` are the numbers of the slice's KV values in it, in order."""

    kv: tuple[int, ...]
    kv_heads: int
    head_dim: int
    dtype: str
    window: int | None

    @property
    def kv_class(self) -> str:
        return kv_class(self.window)


@dataclass(frozen=True)
class Step:
    """One trace with the values it reads and makes. `kind` is equal for equal ops with equal attributes and types."""

    trace: Trace
    operands: tuple[SSAValue, ...]
    results: tuple[SSAValue, ...]
    kv: tuple[SSAValue, ...]
    kind: tuple[object, ...]
    block: int | None


@dataclass(frozen=True)
class Segment:
    """Steps that run `repeats` times. From the second time on, `carried` values stand where `entering` ones stood; what
    the last time makes is known outside by `leaving`, in the same order."""

    steps: tuple[Step, ...]
    repeats: int = 1
    entering: tuple[SSAValue, ...] = ()
    carried: tuple[SSAValue, ...] = ()
    leaving: tuple[SSAValue, ...] = ()


class Program:
    """What is traced for every shape of a slice.

    Attributes:
        weights, pools, tables: the arrays that go in, in order.
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
                _check_pallas(op, self.split)
        self.windows = kv_classes(module)
        self._sig = signature(module)
        self.segments = tuple(_segments(_steps(module), set(self._sig.outputs.values()), scan))
        self.sizes = {name: op.result.type.get_shape() for name, op in weights(module).items()}
        self.weights = tuple(self._weights(weight_dtypes(module)))
        self.pools, self._pool_of = self._pools(module)
        traces = [step.trace for segment in self.segments for step in segment.steps]
        self.tables = tuple(dict.fromkeys(trace.table for trace in traces if trace.table is not None))
        self.inputs = {name: boundary(name, value) for name, value in self._sig.inputs.items()}
        self.outputs = {
            name: (boundary(name, value), isinstance(value.owner, LogitsOp))
            for name, value in self._sig.outputs.items()
        }

    @property
    def has_logits(self) -> bool:
        return any(is_logits for _, is_logits in self.outputs.values())

    def boundary_of(self, name: str) -> Boundary:
        return self.outputs[name][0]

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
            weights: as `self.weights`, scanned ones (layers, out, in).
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
                for number, key in enumerate(step.trace.weights):
                    layers = tuple(other.trace.weights[number] for other in segment.steps[index::period])
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
                    pools.append(Pool(held, kind.kv_heads, kind.head_dim, kind.dtype, kind.window))
        return tuple(pools), pool_of


def _check_pallas(op: PlaitOp, split: Split) -> None:
    """Raise UnsupportedError for an attention that JAX's kernel does not take."""
    if not isinstance(op, AttentionOp):
        return
    held = split.kv_heads(op.kv_heads) // split.chips
    if op.head_dim % ragged.LANES:
        raise refuse(op, "head_dim", op.head_dim, f"Pallas attention takes multiples of {ragged.LANES}")
    if op.sinks is not None:
        raise refuse(op, "sinks", op.sinks.type, "Pallas attention has none")
    if held not in (1, 2, 4) and held % 8:
        raise refuse(op, "KV heads on a chip", held, "Pallas attention takes 1, 2, 4 or a multiple of 8")


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
        inner = replace(run, weights=dict(zip(keys, stacked, strict=True)), pools=list(run.pools), layer=layer)
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


def _steps(module: ModuleOp) -> list[Step]:
    """The ops, each as its traces."""
    steps: list[Step] = []
    made_in: dict[SSAValue, int] = {}
    for op in ops(module):
        traces = LOWERING.emit(op)
        if isinstance(op, WeightOp):
            continue
        if isinstance(op, AddRmsNormOp):
            # The sum belongs to the block that made its terms.
            block = max((made_in[x] for x in (op.x, op.y) if x in made_in), default=op.block_index)
            new = [
                _step(op, AddOp.name, traces[0], (op.x, op.y), (op.sum,), block),
                _step(op, RmsNormOp.name, traces[1], (op.sum,), (op.normed,), op.block_index),
            ]
        else:
            (trace,) = traces
            new = [_step(op, op.name, trace, tuple(_tensors(op)), tuple(op.results), op.block_index)]
        steps += new
        made_in |= {value: step.block for step in new for value in step.results if step.block is not None}
    return steps


def _step(
    op: PlaitOp,
    name: str,
    trace: Trace,
    operands: tuple[SSAValue, ...],
    results: tuple[SSAValue, ...],
    block: int | None,
) -> Step:
    kv = tuple(value for value in op.operands if isinstance(value.type, KVType))
    attributes = {key: str(value) for key, value in op.properties.items() if key != "block" and name != AddOp.name}
    shapes = [str(value.type) for value in op.operands if isinstance(value.owner, WeightOp) and trace.weights]
    types = [str(value.type) for value in (*operands, *results, *kv)]
    return Step(trace, operands, results, kv, (name, tuple(sorted(attributes.items())), *shapes, *types), block)


def _tensors(op: PlaitOp) -> list[SSAValue]:
    """The activations it reads."""
    return [v for v in op.operands if isinstance(v.type, TensorType) and not isinstance(v.owner, WeightOp)]


def _segments(steps: list[Step], outputs: set[SSAValue], scan: bool) -> list[Segment]:
    blocks = [tuple(part) for _, part in groupby(steps, key=lambda step: step.block)]
    segments: list[Segment] = []
    at = 0
    while at < len(blocks):
        best = Segment(blocks[at])
        taken = 1
        for period in range(1, _LONGEST_PERIOD + 1 if scan else 1):
            repeats = 1
            first = blocks[at : at + period]
            while [_kinds(b) for b in blocks[at + repeats * period :][:period]] == [_kinds(b) for b in first]:
                repeats += 1
            if len(first) == period and repeats > 1 and repeats * period > taken:
                inside = [step for block in blocks[at : at + repeats * period] for step in block]
                found = _repeated(inside, repeats, steps, outputs)
                if found is not None:
                    best, taken = found, repeats * period
        segments.append(best)
        at += taken
    return segments


def _kinds(block: tuple[Step, ...]) -> list[tuple[object, ...]]:
    return [step.kind for step in block]


def _repeated(inside: list[Step], repeats: int, steps: list[Step], outputs: set[SSAValue]) -> Segment | None:
    """The steps as one repeated segment, or None where one repetition reads what the one before did not hand on."""
    size = len(inside) // repeats
    parts = [inside[i * size : (i + 1) * size] for i in range(repeats)]
    wiring = [_wiring(part) for part in parts]
    entering = [outer for _, outer in wiring]
    if any(inner != wiring[0][0] for inner, _ in wiring):
        return None
    places = []
    for before, values in zip(parts, entering[1:], strict=False):
        made = [value for step in before for value in step.results]
        if not set(values) <= set(made):
            return None
        places.append([made.index(value) for value in values])
    if any(place != places[0] for place in places):
        return None
    leaving = [[value for step in part for value in step.results] for part in parts]
    handed = [[made[place] for place in places[0]] for made in leaving]
    # Nobody outside may read anything but what the last repetition hands on.
    own = {id(step) for step in inside}
    outside = {value for step in steps if id(step) not in own for value in step.operands} | outputs
    hidden = {value for made in leaving for value in made} - set(handed[-1])
    keys = [key for step in inside for key in step.trace.weights]
    if outside & hidden or len(set(keys)) != len(keys):
        return None
    return Segment(tuple(inside), repeats, tuple(entering[0]), tuple(handed[0]), tuple(handed[-1]))


def _wiring(part: list[Step]) -> tuple[list[object], list[SSAValue]]:
    """Where every operand of a repetition comes from, and what comes from outside, in the order of first use."""
    inner = {value: number for number, value in enumerate(v for step in part for v in step.results)}
    outer: dict[SSAValue, int] = {}
    found: list[object] = []
    for step in part:
        for value in step.operands:
            if value in inner:
                found.append(inner[value])
            else:
                found.append(("outer", outer.setdefault(value, len(outer))))
    return found, list(outer)
