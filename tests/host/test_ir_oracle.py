"""The oracle of each op against a definition that is not ours, and of the paged KV against plain attention."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as torch_f
from numpy.typing import NDArray
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding, apply_rotary_pos_emb

from plait.backends.base import Batch
from plait.ir import Builder, Rope, ops
from plait.ir.numbers import round_to
from plait.ir.ops import AddRmsNormOp, BatchFacts, OracleKV, PlaitOp, WeightOp
from plait.ir.oracle import Oracle
from plait.ir.passes import parse_passes, run_passes
from plait.ir.rope import angles, frequencies
from plait.ir.types import FP8, element
from tests.ir_models import Feed, Shape, build, in_chunks, random_weights, run

Float64 = NDArray[np.float64]
RNG = np.random.default_rng(7)


def draw(*shape: int) -> Float64:
    return RNG.normal(0, 1, shape)


def t(array: Any) -> torch.Tensor:
    return torch.from_numpy(np.asarray(array))


def only_op(b: Builder, value: Any, name: str, passes: str = "") -> PlaitOp:
    """The op called `name` of the module that the builder made."""
    module = b.finish({"y": value})
    run_passes(module, parse_passes(passes))
    return next(op for op in ops(module) if op.name == f"plait.{name}")


def facts(tokens: Sequence[int], first: int = 0, pages: Sequence[int] = (), window: int | None = None) -> BatchFacts:
    """One sequence whose new tokens stand from position `first` on."""
    count = len(tokens)
    return Batch(
        tokens=np.array(tokens, np.int32),
        positions=np.arange(first, first + count, dtype=np.int32),
        query_starts=np.array([0, count], np.int32),
        kv_lens=np.array([first + count], np.int32),
        page_tables={"full" if window is None else f"window{window}": np.array([pages], np.int32)},
        logit_rows=np.array([0, count - 1], np.int32),
    )


def test_embed() -> None:
    b = Builder("m", "float32")
    op = only_op(b, b.embed("w", 10, 8), "embed")
    table, tokens = draw(10, 8), [3, 0, 9, 3]
    (y,) = op.oracle(table, facts(tokens))
    np.testing.assert_array_equal(y, torch_f.embedding(torch.tensor(tokens), t(table)))


def test_embed_refuses_a_negative_token() -> None:
    b = Builder("m", "float32")
    op = only_op(b, b.embed("w", 10, 8), "embed")
    with pytest.raises(AssertionError, match="negative token"):
        op.oracle(draw(10, 8), facts([1, -1]))


@pytest.mark.parametrize("eps", [1e-6, 0.5])
def test_rms_norm(eps: float) -> None:
    b = Builder("m", "float32")
    op = only_op(b, b.rms_norm(b.embed("t", 4, 8), "w", eps), "rms_norm")
    x, w = draw(5, 8), draw(8)
    (y,) = op.oracle(x, w)
    np.testing.assert_allclose(y, torch_f.rms_norm(t(x), (8,), t(w), eps), rtol=1e-13)


@pytest.mark.parametrize("biased", [False, True])
def test_linear_and_linears(biased: bool) -> None:
    def made(passes: str, name: str) -> PlaitOp:
        b = Builder("m", "float32")
        x = b.embed("t", 4, 8)
        products = [b.linear(x, f"w{i}", out, f"b{i}" if biased else None) for i, out in enumerate((6, 3))]
        module = b.finish({f"y{i}": product for i, product in enumerate(products)})
        run_passes(module, parse_passes(passes))
        return next(op for op in ops(module) if op.name == f"plait.{name}")

    x, weights, biases = draw(5, 8), [draw(6, 8), draw(3, 8)], [draw(6), draw(3)] if biased else []
    expected = [torch_f.linear(t(x), t(w), t(biases[i]) if biased else None).numpy() for i, w in enumerate(weights)]
    (y,) = made("", "linear").oracle(x, weights[0], *biases[:1])
    np.testing.assert_allclose(y, expected[0], rtol=1e-12)
    for got, want in zip(made("fuse-linear", "linears").oracle(x, *weights, *biases), expected, strict=True):
        np.testing.assert_allclose(got, want, rtol=1e-12)


def test_silu_mul_and_add() -> None:
    b = Builder("m", "float32")
    x = b.embed("t", 4, 8)
    silu = only_op(b, b.silu_mul(x, x), "silu_mul")
    b = Builder("m", "float32")
    x = b.embed("t", 4, 8)
    add = only_op(b, b.add(x, x), "add")
    gate, up = draw(5, 8) * 100, draw(5, 8)  # far out, where 1 + tanh(x / 2) has no digits left
    (y,) = silu.oracle(gate, up)
    np.testing.assert_allclose(y, torch_f.silu(t(gate)) * t(up), rtol=1e-12)
    assert np.isfinite(y).all()
    np.testing.assert_array_equal(add.oracle(gate, up)[0], gate + up)


@pytest.mark.parametrize("approximate", ["none", "tanh"])
def test_gelu_mul(approximate: str) -> None:
    b = Builder("m", "float32")
    x = b.embed("t", 4, 8)
    op = only_op(b, b.gelu_mul(x, x, approximate), "gelu_mul")
    gate, up = draw(50, 8) * 3, draw(50, 8)
    (y,) = op.oracle(gate, up)
    np.testing.assert_allclose(y, torch_f.gelu(t(gate), approximate=approximate) * t(up), rtol=1e-12, atol=1e-15)
    assert np.isfinite(op.oracle(gate * 1e100, up)[0]).all()
    # Far to the left, where 1 + erf has no digits left: z Q(-z) with the continued fraction of Mills' ratio.
    (far,) = op.oracle(np.full((1, 8), -12.0), np.ones((1, 8)))
    if approximate == "none":
        mills = 1 / (12 + 1 / (12 + 2 / (12 + 3 / (12 + 4 / (12 + 5 / 12)))))
        np.testing.assert_allclose(far, -12 * mills * math.exp(-72) / math.sqrt(2 * math.pi), rtol=1e-7)


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_add_rms_norm_rounds_the_sum(dtype: str) -> None:
    b = Builder("m", dtype)
    x = b.embed("t", 4, 8)
    op = only_op(b, b.rms_norm(b.add(x, x), "w", 1e-5), "add_rms_norm", "fuse-add-norm")
    assert isinstance(op, AddRmsNormOp)
    kind, cls = element(dtype), getattr(torch, dtype)
    a, c, w = (t(draw(*shape)).to(cls).double().numpy() for shape in ((5, 8), (5, 8), (8,)))
    total, normed = op.oracle(a, c, w)
    expected = (t(a) + t(c)).to(cls).double()
    np.testing.assert_array_equal(total, expected)
    np.testing.assert_allclose(normed, torch_f.rms_norm(expected, (8,), t(w), 1e-5), rtol=1e-12)
    np.testing.assert_array_equal(round_to(total, kind), total)


def test_round_to_is_torchs_rounding() -> None:
    values = np.concatenate([draw(4000), draw(4000) * 1e-7, draw(1000) * 1e4, np.float32(1 + 2.0**-8) * np.ones(1)])
    for dtype in ("float32", "float16", "bfloat16"):
        expected = t(values).float().to(getattr(torch, dtype)).double()
        np.testing.assert_array_equal(round_to(values.astype(np.float32).astype(np.float64), element(dtype)), expected)


def test_logits_of_the_rows_asked_for() -> None:
    b = Builder("m", "float32")
    op = only_op(b, b.logits(b.embed("t", 4, 8), "w", 9), "logits")
    x, w = draw(5, 8), draw(9, 8)
    (y,) = op.oracle(x, w, facts([0] * 5))
    np.testing.assert_allclose(y, torch_f.linear(t(x)[[0, 4]], t(w)), rtol=1e-12)


ROPES: dict[str, tuple[Rope, dict[str, Any]]] = {
    "default": (Rope(10000.0), {"rope_type": "default", "rope_theta": 10000.0}),
    "theta": (Rope(500000.0), {"rope_type": "default", "rope_theta": 500000.0}),
    "linear": (Rope(10000.0, "linear", 4.0), {"rope_type": "linear", "rope_theta": 10000.0, "factor": 4.0}),
    "llama3": (
        Rope(500000.0, "llama3", 8.0, 1.0, 4.0, 64),
        {
            "rope_type": "llama3",
            "rope_theta": 500000.0,
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 64,
        },
    ),
}


def torch_rope(parameters: dict[str, Any], head_dim: int) -> LlamaRotaryEmbedding:
    config = LlamaConfig(
        hidden_size=head_dim * 2, num_attention_heads=2, head_dim=head_dim, rope_parameters=dict(parameters),
        max_position_embeddings=1024,
    )  # fmt: skip
    return LlamaRotaryEmbedding(config)


@pytest.mark.parametrize("kind", ROPES)
@pytest.mark.parametrize("head_dim", [4, 64, 128])
def test_rope_frequencies_are_transformers(kind: str, head_dim: int) -> None:
    rope, parameters = ROPES[kind]
    theirs = torch_rope(parameters, head_dim).inv_freq.numpy()
    np.testing.assert_allclose(frequencies(rope, head_dim), theirs, rtol=4e-7)


def test_llama3_keeps_blends_and_divides() -> None:
    """All three parts of the rule are in the table above: short wavelengths, long ones, and those between."""
    rope, _ = ROPES["llama3"]
    ratio = frequencies(Rope(rope.theta), 128) / frequencies(rope, 128)
    assert ratio.min() == 1.0
    assert ratio.max() == 8.0
    assert ((ratio > 1.01) & (ratio < 7.9)).any()


@pytest.mark.parametrize("kind", ROPES)
def test_rope_is_transformers(kind: str) -> None:
    """Beyond the original length and beyond the longest position that the configuration names."""
    rope, parameters = ROPES[kind]
    b = Builder("m", "float32")
    op = only_op(b, b.rope(b.embed("t", 4, 3 * 16), 16, rope), "rope")
    first, x = 1500, draw(6, 48)
    (y,) = op.oracle(x, facts([0] * 6, first))
    q = t(x).float().reshape(1, 6, 3, 16).transpose(1, 2)
    cos, sin = torch_rope(parameters, 16)(q, torch.arange(first, first + 6)[None])
    theirs, _ = apply_rotary_pos_emb(q, q, cos, sin)
    # One unit in the last place of a frequency is 6e-8 of an angle of up to 1500 radians.
    np.testing.assert_allclose(y, theirs.transpose(1, 2).reshape(6, 48), atol=5e-4)


def test_rope_turns_pairs_as_complex_numbers() -> None:
    """Pair (i, i + d/2) is a complex number times exp(i position frequency): exact, angles taken as they are."""
    rope, x, first = Rope(100.0), draw(6, 16), 30
    b = Builder("m", "float32")
    op = only_op(b, b.rope(b.embed("t", 4, 16), 8, rope), "rope")
    (y,) = op.oracle(x, facts([0] * 6, first))
    turn = np.exp(1j * angles(rope, 8, np.arange(first, first + 6)).astype(np.float64))
    for head in (0, 8):
        turned = (x[:, head : head + 4] + 1j * x[:, head + 4 : head + 8]) * turn
        np.testing.assert_allclose(y[:, head : head + 8], np.hstack([turned.real, turned.imag]), rtol=1e-12)


def naive_attention(
    q: Float64,
    k: Float64,
    v: Float64,
    heads: int,
    kv_heads: int,
    scale: float,
    window: int | None,
    cap: float | None,
    sinks: Float64 | None = None,
) -> Float64:
    """Attention as two loops; the last len(q) of len(k) tokens are the queries. A sink is a key more, of value 0."""
    d = q.shape[1] // heads
    out = np.zeros_like(q)
    for i in range(len(q)):
        position = len(k) - len(q) + i
        for h in range(heads):
            g = h // (heads // kv_heads)
            scores, values = [], []
            for j in range(len(k)):
                if j > position or (window is not None and position - j >= window):
                    continue
                score = scale * sum(q[i, h * d + c] * k[j, g * d + c] for c in range(d))
                scores.append(cap * math.tanh(score / cap) if cap is not None else score)
                values.append(v[j, g * d : (g + 1) * d])
            if sinks is not None:
                scores.append(sinks[h])
                values.append(np.zeros(d))
            top = max(scores)
            weights = [math.exp(score - top) for score in scores]
            out[i, h * d : (h + 1) * d] = sum(w * u for w, u in zip(weights, values, strict=True)) / sum(weights)
    return out


@pytest.mark.parametrize(("heads", "kv_heads"), [(2, 2), (3, 1), (6, 2), (8, 1)])
@pytest.mark.parametrize("window", [None, 1, 5])
@pytest.mark.parametrize("cap", [None, 2.0])
@pytest.mark.parametrize("sunk", [False, True])
def test_attention_is_the_double_loop(
    heads: int, kv_heads: int, window: int | None, cap: float | None, sunk: bool
) -> None:
    """Over scattered pages, in chunks of 4, 1, 6 and 1 tokens."""
    d, scale, page_tokens, pages = 4, 0.3, 3, (7, 2, 5, 0)
    b = Builder("m", "float32")
    b.block = 0
    narrow = b.embed("k", 4, kv_heads * d)
    y = b.attention(
        b.embed("q", 4, heads * d), narrow, narrow, heads=heads, kv_heads=kv_heads, head_dim=d, scale=scale,
        window=window, softcap=cap, sinks="sinks" if sunk else None,
    )  # fmt: skip
    op = only_op(b, y, "attention")
    q, k, v = draw(12, heads * d), draw(12, kv_heads * d), draw(12, kv_heads * d)
    cache, sinks = OracleKV(8, page_tokens, kv_heads, d), [draw(heads) * 3] if sunk else []
    parts, first = [], 0
    for count in (4, 1, 6, 1):
        rows = slice(first, first + count)
        batch = facts([0] * count, first, pages, window)
        parts.append(op.oracle(q[rows], k[rows], v[rows], cache, batch, *sinks)[0])
        first += count
    got = np.concatenate(parts)
    expected = naive_attention(q, k, v, heads, kv_heads, scale, window, cap, *sinks)
    np.testing.assert_allclose(got, expected, rtol=1e-11, atol=1e-13)
    untouched = [page for page in range(8) if page not in pages]
    assert np.isnan(cache.k[untouched]).all()
    if cap is None and not sunk:
        i, j = np.arange(12)[:, None], np.arange(12)[None, :]
        mask = torch.from_numpy((j <= i) & (i - j < (window or 99)))
        shaped = (t(x).reshape(1, 12, -1, d).transpose(1, 2) for x in (q, k, v))
        torchs = torch_f.scaled_dot_product_attention(*shaped, attn_mask=mask, scale=scale, enable_gqa=True)
        np.testing.assert_allclose(got, torchs.transpose(1, 2).reshape(12, -1), rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("name", FP8)
def test_fp8_kv_is_what_torch_stores(name: str) -> None:
    """Values far beyond the range of the format among them; new tokens attend to what was stored of them."""
    b = Builder("m", "float32")
    b.block = 0
    x = b.embed("q", 4, 8)
    op = only_op(b, b.attention(x, x, x, heads=2, kv_heads=2, head_dim=4, scale=0.3, kv_dtype=name), "attention")
    q, k, v = draw(6, 8), draw(6, 8), draw(6, 8)
    k[2, 1], v[:, 0] = 1e6, np.geomspace(1e-9, 1e9, 6)
    k, v = (x.astype(np.float32).astype(np.float64) for x in (k, v))
    kind = getattr(torch, f"float8_{name}")
    limit = torch.finfo(kind).max
    stored = [t(x).float().clamp(-limit, limit).to(kind).double().numpy() for x in (k, v)]
    assert np.abs(stored[1]).max() == limit
    assert not np.array_equal(stored[0], k)
    cache = OracleKV(4, 2, 2, 4)
    parts = [(first, slice(first, first + 3)) for first in (0, 3)]
    got = [op.oracle(q[i], k[i], v[i], cache, facts([0] * 3, first, (3, 1, 0)))[0] for first, i in parts]
    expected = naive_attention(q, *stored, 2, 2, 0.3, None, None)
    np.testing.assert_allclose(np.concatenate(got), expected, rtol=1e-11, atol=1e-13)
    np.testing.assert_array_equal(cache.k[[3, 1, 0]].reshape(6, 8), stored[0])


def test_attention_refuses_a_key_without_a_page() -> None:
    b = Builder("m", "float32")
    b.block = 0
    x = b.embed("q", 4, 4)
    op = only_op(b, b.attention(x, x, x, heads=1, kv_heads=1, head_dim=4, scale=1.0), "attention")
    cache, x4 = OracleKV(4, 2, 1, 4), draw(2, 4)
    with pytest.raises(AssertionError, match="a token has no page"):
        op.oracle(x4, x4, x4, cache, facts([0, 0], 0, (-1,)))
    with pytest.raises(AssertionError, match="a visible key has no page"):
        op.oracle(x4, x4, x4, cache, facts([0, 0], 2, (-1, 3)))


SHAPE = Shape(blocks=3, heads=6, kv_heads=2, windows=(None, 5, 9), softcap=8.0, bias=True)
LENGTHS = (23, 1, 14)


def test_chunks_and_decode_are_one_shot() -> None:
    """Prefill in chunks of 4 and then token by token; all sequences in one batch or alone; over rings of pages."""
    module = build(SHAPE)
    tensors = random_weights(module)
    one_shot = run([module], tensors, LENGTHS, in_chunks(LENGTHS, 99), max_step_tokens=64)
    ragged = [{0: 4, 2: 4}, {0: 4, 1: 1}, {0: 4, 2: 4}, {2: 4}, *({0: 1} for _ in range(11)), {2: 1}, {2: 1}]
    assert all(np.isfinite(rows).all() for rows in one_shot)
    chunked = run([module], tensors, LENGTHS, ragged, max_step_tokens=4)
    alone = run([module], tensors, LENGTHS, [{s: length} for s, length in enumerate(LENGTHS)], max_step_tokens=64)
    for rows, others, single in zip(one_shot, chunked, alone, strict=True):
        np.testing.assert_allclose(others, rows, rtol=1e-5, atol=1e-5)
        np.testing.assert_allclose(single, rows, rtol=1e-5, atol=1e-5)


def test_where_the_pages_lie_does_not_matter() -> None:
    module = build(SHAPE)
    tensors = random_weights(module)
    steps = in_chunks(LENGTHS, 4)
    first = run([module], tensors, LENGTHS, steps, max_step_tokens=4, page_seed=1)
    for options in ({"page_seed": 2}, {"rings": False}):
        for rows, others in zip(
            first, run([module], tensors, LENGTHS, steps, max_step_tokens=4, **options), strict=True
        ):
            np.testing.assert_array_equal(rows, others)


def test_a_ring_is_used_and_a_smaller_one_would_lose_keys() -> None:
    """The rings of the tests above wrap around: with a page less a visible key is overwritten."""
    module = build(Shape(blocks=1, windows=(5,)))
    tensors = random_weights(module)
    feed = Feed({"window5": 5}, (23,), max_step_tokens=4)
    table = feed._tables["window5"]
    ring = len(set(table[0]))
    assert ring < table.shape[1]

    def logits(table: NDArray[np.int32]) -> Float64:
        oracle = Oracle(module, tensors, feed.pages, feed.page_tokens)
        feed.done, feed._tables["window5"], out = [0], table, []
        for chunk in in_chunks((23,), 4):
            out.append(oracle.step(feed.step(chunk))["logits"])
        return np.concatenate(out)

    small = np.array([[table[0, i % (ring - 1)] for i in range(table.shape[1])]], np.int32)
    right = logits(table)
    assert not np.allclose(logits(small), right)


def test_a_shared_prefix_is_read_from_the_same_pages() -> None:
    """Two sequences with the same first 8 tokens and the same two pages for them."""
    module = build(Shape(blocks=2))
    tensors = random_weights(module)
    rng = np.random.default_rng(3)
    prompts = np.concatenate([np.tile(rng.integers(0, 32, 8), (2, 1)), rng.integers(0, 32, (2, 3))], axis=1)

    def steps(table: list[list[int]]) -> Float64:
        oracle = Oracle(module, tensors, {"full": 8}, 4)
        out = []
        for first, count, rows in ((0, 8, [0]), (8, 3, [0, 1])):
            n = len(rows)
            batch = Batch(
                tokens=prompts[rows, first : first + count].ravel().astype(np.int32),
                positions=np.tile(np.arange(first, first + count), n).astype(np.int32),
                query_starts=np.arange(0, n * count + 1, count).astype(np.int32),
                kv_lens=np.full(n, first + count, np.int32),
                page_tables={"full": np.array([table[r] for r in rows], np.int32)},
                logit_rows=np.arange(n * count, dtype=np.int32),
            )
            batch.check()
            out.append(oracle.step(batch)["logits"])
        return out[1]

    shared = steps([[3, 6, 1], [3, 6, 4]])
    whole = run([module], tensors, (11,), [{0: 11}])
    assert whole[0].shape == (11, 32)
    oracle = Oracle(module, tensors, {"full": 8}, 4)
    for row in range(2):
        batch = facts(list(prompts[row]), 0, (0, 1, 2))
        batch = Batch(**{**batch.__dict__, "logit_rows": np.arange(8, 11, dtype=np.int32)})
        alone = oracle.step(batch)["logits"]
        np.testing.assert_allclose(shared[3 * row : 3 * row + 3], alone, rtol=1e-5, atol=1e-5)


def test_the_oracle_refuses_wrong_shapes() -> None:
    """NumPy would broadcast a bias of one value."""
    module = build(Shape(blocks=1, bias=True))
    tensors = random_weights(module)
    tensors["model.layers.0.self_attn.q_proj.bias"] = np.ones(1)
    with pytest.raises(AssertionError, match=r"shape \(1,\) is not tensor<16xf32>"):
        run([module], tensors, (3,), [{0: 3}])


def test_the_oracle_knows_every_op_but_weight() -> None:
    names = {type(op) for op in ops(build(Shape()))} - {WeightOp}
    assert all(cls.oracle is not PlaitOp.oracle for cls in names)
