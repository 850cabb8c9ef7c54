"""Costs against counting: every pair, every key, every byte, every multiplication."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from xdsl.dialects.builtin import DYNAMIC_INDEX, TensorType
from xdsl.ir import SSAValue

from plait.ir import Builder, Cost, Rope, Step, ops
from plait.ir.facts import visible_pairs
from plait.ir.ops import (
    OPS,
    AttentionOp,
    EmbedOp,
    EmbedPositionsOp,
    ExpertsOp,
    GeluOp,
    HeadLinearOp,
    LatentAttentionOp,
    LayerNormOp,
    LogitsOp,
    OpaqueOp,
    PlaitOp,
    RouterOp,
    ScaleOp,
    WeightOp,
)
from plait.ir.passes import SLICE_PIPELINE, run_passes
from plait.ir.types import dtype_name
from tests.ir_models import Shape, build
from tests.props.ir_strategies import shapes

WINDOWS = st.none() | st.integers(1, 40)


@st.composite
def steps(draw: st.DrawFn) -> Step:
    queries = draw(st.lists(st.integers(1, 6), min_size=1, max_size=4))
    kv = tuple(query + draw(st.integers(0, 12)) for query in queries)
    return Step(tuple(queries), kv, draw(st.integers(0, sum(queries))))


def mask(query_len: int, kv_len: int, window: int | None) -> np.ndarray:
    """[query, key]: whether the query sees the key."""
    i = np.arange(kv_len - query_len, kv_len)[:, None]
    j = np.arange(kv_len)[None, :]
    return (j <= i) & (i - j < (kv_len + 1 if window is None else window))


@given(st.integers(1, 40), st.integers(0, 40), WINDOWS)
def test_visible_pairs_is_the_sum_of_the_mask(query_len: int, before: int, window: int | None) -> None:
    kv_len = query_len + before
    assert visible_pairs(query_len, kv_len, window) == mask(query_len, kv_len, window).sum()


class Tally:
    """A number that counts what is done to it."""

    count = 0

    def _operate(self, *_: Any) -> Tally:
        Tally.count += 1
        return self

    __add__ = __radd__ = __sub__ = __rsub__ = __mul__ = __rmul__ = __truediv__ = __rtruediv__ = __neg__ = _operate
    exp = tanh = sqrt = maximum = erf = _operate


def counted(work: Callable[[], object]) -> int:
    Tally.count = 0
    work()
    return Tally.count


def tallies(*shape: int) -> Any:
    return np.frompyfunc(lambda _: Tally(), 1, 1)(np.empty(shape, object))


def dot(a: Any, b: Any, start: Any = 0.0) -> Any:
    for x, y in zip(a, b, strict=True):
        start = start + x * y
    return start


def only(build_op: Callable[[Builder], SSAValue], cls: str) -> PlaitOp:
    b = Builder("m", "float32")
    b.block = 0
    return next(op for op in ops(b.finish({"y": build_op(b)})) if op.name == f"plait.{cls}")


T, H, N = 5, 6, 4
STEP = Step((2, 3), (2, 7), 2)


def test_flops_of_a_linear() -> None:
    x, w = tallies(T, H), tallies(N, H)
    bias = tallies(N)
    plain = only(lambda b: b.linear(b.embed("t", 9, H), "w", N), "linear").cost(STEP).flops
    assert plain == 2 * T * H * N == counted(lambda: [dot(row, column) for row in x for column in w])
    biased = only(lambda b: b.linear(b.embed("t", 9, H), "w", N, "b"), "linear").cost(STEP).flops
    assert biased == counted(lambda: [dot(row, w[n]) + bias[n] for row in x for n in range(N)])


def test_flops_of_the_logits_are_those_of_the_rows_asked_for() -> None:
    x, w = tallies(STEP.logit_rows, H), tallies(N, H)
    flops = only(lambda b: b.logits(b.embed("t", 9, H), "w", N), "logits").cost(STEP).flops
    assert flops == counted(lambda: [dot(row, column) for row in x for column in w])


def test_flops_of_the_elementwise_ops() -> None:
    x, y = tallies(T, H).ravel(), tallies(T, H).ravel()
    add = only(lambda b: b.add(v := b.embed("t", 9, H), v), "add").cost(STEP).flops
    assert add == counted(lambda: [a + b for a, b in zip(x, y, strict=True)])
    silu = only(lambda b: b.silu_mul(v := b.embed("t", 9, H), v), "silu_mul").cost(STEP).flops
    assert silu == counted(lambda: [a / (1.0 + (-a).exp()) * b for a, b in zip(x, y, strict=True)])


def test_flops_of_gelu_mul() -> None:
    x, y = tallies(T, H).ravel(), tallies(T, H).ravel()

    def flops(approximate: str) -> float:
        return only(lambda b: b.gelu_mul(v := b.embed("t", 9, H), v, approximate), "gelu_mul").cost(STEP).flops

    pairs = list(zip(x, y, strict=True))
    assert flops("none") == counted(lambda: [((a * 0.7).erf() + 1.0) * a * 0.5 * b for a, b in pairs])
    assert flops("tanh") == counted(
        lambda: [(((a * a * a * 0.04 + a) * 0.8).tanh() + 1.0) * a * 0.5 * b for a, b in pairs]
    )


def test_flops_of_a_rope() -> None:
    """Tables of cosines and sines are made once per position, for all heads and blocks: not counted."""
    a, b, cos, sin = (tallies(T * H // 2) for _ in range(4))
    flops = only(lambda m: m.rope(m.embed("t", 9, H), H, Rope(10.0)), "rope").cost(STEP).flops
    assert flops == counted(lambda: [(p * c - q * s, q * c + p * s) for p, q, c, s in zip(a, b, cos, sin, strict=True)])


def test_flops_of_a_norm_but_for_three_per_row() -> None:
    x, w = tallies(T, H), tallies(H)

    def norm(row: Any) -> Any:
        root = (dot(row, row) / 6.0 + 1e-5).sqrt()
        inverse = 1.0 / root
        return [value * inverse * scale for value, scale in zip(row, w, strict=True)]

    flops = only(lambda b: b.rms_norm(b.embed("t", 9, H), "w", 1e-5), "rms_norm").cost(STEP).flops
    assert flops == counted(lambda: [norm(row) for row in x]) - 4 * T  # mean, eps, root, inverse


@pytest.mark.parametrize("window", [None, 3])
@pytest.mark.parametrize("softcap", [None, 5.0])
@pytest.mark.parametrize("sinks", [None, "sinks"])
def test_flops_of_attention_but_for_the_last_division(
    window: int | None, softcap: float | None, sinks: str | None
) -> None:
    heads, d = 2, 4

    def attend(query_len: int, kv_len: int) -> None:
        q, k, v = tallies(query_len, d), tallies(kv_len, d), tallies(kv_len, d)
        for i, row in enumerate(mask(query_len, kv_len, window)):
            scores = [dot(q[i], k[j]) * 0.5 for j in np.flatnonzero(row)]
            if softcap is not None:
                scores = [(score / softcap).tanh() * softcap for score in scores]
            for score in scores:
                score.maximum(score)
            weights = [(score - score).exp() for score in scores]
            total = 0.0
            for weight in weights:
                total = total + weight
            if sinks is not None:
                sink = Tally()
                total = total + (sink.maximum(sink) - sink).exp()
            for c in range(d):
                dot(weights, v[np.flatnonzero(row), c])

    def work() -> None:
        for query_len, kv_len in zip(STEP.query_lens, STEP.kv_lens, strict=True):
            for _ in range(heads):
                attend(query_len, kv_len)

    def made(b: Builder) -> SSAValue:
        q, k = b.embed("q", 9, heads * d), b.embed("k", 9, d)
        shape = {"heads": heads, "kv_heads": 1, "head_dim": d, "scale": 0.5}
        return b.attention(q, k, k, window=window, softcap=softcap, sinks=sinks, **shape)

    assert only(made, "attention").cost(STEP).flops == counted(work)


@given(steps(), WINDOWS, st.sampled_from([("float32", 4), ("e4m3fn", 1)]))
def test_kv_bytes_are_those_of_the_keys_somebody_sees(step: Step, window: int | None, stored: tuple[str, int]) -> None:
    """K and V of every visible key are read once, those of every new token written once."""

    def made(b: Builder) -> SSAValue:
        q, k = b.embed("q", 9, 8), b.embed("k", 9, 4)
        return b.attention(q, k, k, heads=2, kv_heads=1, head_dim=4, scale=0.5, window=window, kv_dtype=stored[0])

    read = sum(
        int(mask(query, kv, window).any(axis=0).sum()) for query, kv in zip(step.query_lens, step.kv_lens, strict=True)
    )
    row = 2 * 1 * 4 * stored[1]
    assert only(made, "attention").cost(step).kv_bytes == (read + step.tokens) * row


ITEM = {"float32": np.float32, "float16": np.float16, "bfloat16": ml_dtypes.bfloat16}


def size(value: SSAValue, rows: int) -> int:
    """Bytes of the array that the value is, with `rows` in place of its tokens."""
    kind = value.type
    assert isinstance(kind, TensorType)
    shape = [rows if dim == DYNAMIC_INDEX else dim for dim in kind.get_shape()]
    return int(np.zeros(shape, ITEM[dtype_name(kind.element_type)]).nbytes)


@given(shapes(max_blocks=2), steps(), st.booleans())
def test_bytes_are_the_sizes_of_the_arrays(shape: Shape, step: Step, fuse: bool) -> None:
    """Every tensor that goes in or out of an op once; a weight apart from an activation."""
    module = build(shape)
    if fuse:
        run_passes(module, SLICE_PIPELINE)
    for op in ops(module):
        cost = op.cost(step)
        tensors = [value for value in op.operands if isinstance(value.type, TensorType)]
        held = [value for value in tensors if isinstance(value.owner, WeightOp)]
        moving = [value for value in tensors if value not in held]
        if isinstance(op, WeightOp):
            assert cost == Cost()
        elif isinstance(op, EmbedOp):  # the rows it looks up, not the table
            rows = size(op.result, step.tokens)
            assert (cost.weight_bytes, cost.activation_bytes) == (rows, rows)
        elif isinstance(op, LogitsOp):  # no table where nobody asks for logits
            assert cost.weight_bytes == (size(op.weight, 0) if step.logit_rows else 0)
            assert cost.activation_bytes == size(op.x, step.logit_rows) + size(op.result, step.logit_rows)
        else:
            assert cost.weight_bytes == sum(size(value, 0) for value in held)
            assert cost.activation_bytes == sum(size(value, step.tokens) for value in (*moving, *op.results))
        assert (cost.kv_bytes > 0) == isinstance(op, AttentionOp)
        assert cost.bytes == cost.weight_bytes + cost.activation_bytes + cost.kv_bytes


@given(shapes(max_blocks=2), steps())
def test_fusing_adds_no_flops_and_saves_bytes(shape: Shape, step: Step) -> None:
    plain, fused = build(shape), build(shape)
    run_passes(fused, SLICE_PIPELINE)

    def total(module: Any) -> Cost:
        return sum((op.cost(step) for op in ops(module)), Cost())

    before, after = total(plain), total(fused)
    assert after.flops == before.flops
    assert after.weight_bytes == before.weight_bytes
    assert after.kv_bytes == before.kv_bytes
    assert after.activation_bytes < before.activation_bytes


def _product(rows: int, columns: int, inner: int) -> int:
    x, w = tallies(rows, inner), tallies(columns, inner)
    return counted(lambda: [dot(row, column) for row in x for column in w])


def test_costs_of_the_families_ops() -> None:
    """Products counted one by one; what is moved, and of experts what is read of them."""
    lone = only(lambda b: b.scale(b.embed("t", 9, H), 2.0), "scale").cost(STEP)
    assert (lone.flops, lone.activation_bytes) == (T * H, 2 * T * H * 4)
    positions = only(lambda b: b.embed_positions("p", 9, H), "embed_positions").cost(STEP)
    assert (positions.flops, positions.weight_bytes, positions.activation_bytes) == (0, T * H * 4, T * H * 4)
    pair = only(lambda b: b.gelu_mul(v := b.embed("t", 9, H), v), "gelu_mul")
    alone = only(lambda b: b.gelu(b.embed("t", 9, H)), "gelu")
    assert pair.cost(STEP).flops - alone.cost(STEP).flops == T * H
    normed = only(lambda b: b.layer_norm(b.embed("t", 9, H), "w", "b", 1e-5), "layer_norm").cost(STEP)
    assert (normed.weight_bytes, normed.activation_bytes) == (2 * H * 4, 2 * T * H * 4)
    heads = only(lambda b: b.head_linear(b.embed("t", 9, 2 * H), "w", (2, N, H)), "head_linear").cost(STEP)
    assert heads.flops == 2 * _product(T, N, H)
    assert (heads.weight_bytes, heads.activation_bytes) == (2 * N * H * 4, T * 2 * (N + H) * 4)


def test_costs_of_experts() -> None:
    """Each token goes through its own experts; a step reads those that some token is expected to choose."""

    def build_op(b: Builder) -> SSAValue:
        x = b.embed("t", 9, H)
        routing = b.router(x, "r", 4, experts_per_token=2)
        return b.experts(x, routing, ("g", "u", "d"), N, experts_per_token=2)

    router, experts = (only(build_op, name).cost(STEP) for name in ("router", "experts"))
    assert router.flops == _product(T, 4, H) + 5 * T * 4
    assert router.weight_bytes == 4 * H * 4
    # Of each pair three products, five flops of the activation for a feature, and the weighted sum.
    assert experts.flops == 3 * _product(2 * T, N, H) + 2 * T * (5 * N + 2 * H)
    chosen = 4 * (1 - (1 - 2 / 4) ** T)
    assert experts.weight_bytes == pytest.approx(3 * N * H * 4 * chosen)


def test_costs_of_latent_attention() -> None:
    def build_op(b: Builder) -> SSAValue:
        widths = {"a": 2 * H, "b": 2 * N, "c": H, "d": N}
        q, turned, row, key = (b.embed(name, 9, width) for name, width in widths.items())
        return b.latent_attention(q, turned, row, key, heads=2, scale=0.5)

    cost = only(build_op, "latent_attention").cost(STEP)
    pairs = sum(int(mask(q, kv, None).sum()) for q, kv in zip(STEP.query_lens, STEP.kv_lens, strict=True))
    # A score is a product of whole keys, its share of the result one of the latent part; five more for the softmax.
    assert cost.flops == 2 * pairs * (2 * (H + N) + 2 * H + 5)
    assert cost.kv_bytes == (sum(STEP.kv_lens) + T) * (H + N) * 4


def test_every_op_is_counted_above() -> None:
    plain, fused, b = build(Shape(bias=True)), build(Shape(bias=True)), Builder("m", "float32")
    run_passes(fused, SLICE_PIPELINE)
    x = b.embed("t", 9, H)
    gelu = b.finish({"y": b.gelu_mul(x, x)})
    # Counted by the three tests before this one; an opaque op brings its counts along.
    others = {LayerNormOp, HeadLinearOp, LatentAttentionOp, GeluOp, RouterOp, ExpertsOp, ScaleOp, EmbedPositionsOp}
    found = {type(op) for module in (plain, fused, gelu) for op in ops(module)}
    assert found | others == set(OPS) - {OpaqueOp}
