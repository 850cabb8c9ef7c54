"""The oracle of what single families are made of, against transformers' own modules and formulas of torch."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as torch_f
from numpy.typing import NDArray
from transformers import LlamaConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
from transformers.models.deepseek_v2.modeling_deepseek_v2 import DeepseekV2TopkRouter
from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3TopkRouter
from transformers.models.gemma3.modeling_gemma3 import Gemma3RMSNorm
from transformers.models.gpt_oss.modeling_gpt_oss import GptOssExperts, GptOssTopKRouter
from transformers.models.mixtral.modeling_mixtral import MixtralExperts, MixtralTopKRouter
from transformers.models.phi3.modeling_phi3 import apply_rotary_pos_emb

from plait.ir import Builder, Rope
from plait.ir.ops import OracleKV, PlaitOp
from plait.ir.rope import frequencies
from tests.host.test_ir_oracle import draw, facts, only_op, t

Float64 = NDArray[np.float64]


def _op(name: str, width: int, make: Any) -> PlaitOp:
    """The op called `name` that `make(b, x)` adds for x of that width."""
    b = Builder("m", "float32")
    x = b.embed("t", 4, width)
    b.block = 0
    return only_op(b, make(b, x), name)


def test_rms_norm_with_an_offset_is_gemmas() -> None:
    norm = Gemma3RMSNorm(8, eps=0.5).double()
    norm.weight.data = t(w := draw(8))
    op = _op("rms_norm", 8, lambda b, x: b.rms_norm(x, "w", 0.5, offset=1.0))
    np.testing.assert_allclose(op.oracle(x := draw(5, 8), w)[0], norm(t(x)).detach(), rtol=1e-6, atol=1e-6)
    b = Builder("m", "float32")
    total = b.add(b.embed("t", 4, 8), b.embed("u", 4, 8))
    fused = only_op(b, b.rms_norm(total, "w", 0.5, offset=1.0), "add_rms_norm", "fuse-add-norm")
    np.testing.assert_allclose(fused.oracle(x, x, w)[1], norm(t(2 * x)).detach(), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("apart", [False, True])
def test_norms_of_heads(apart: bool) -> None:
    """Each head by itself, whether the weight is one for all or each has its own."""
    x, w, c = draw(5, 24), *(draw(24 if apart else 8) for _ in range(2))
    heads, rows = t(x).reshape(5, 3, 8), [t(v).reshape(-1, 8) for v in (w, c)]
    op = _op("rms_norm", 24, lambda b, y: b.rms_norm(y, "w", 0.5, group=8, per_group=apart, offset=0.25))
    want = torch_f.rms_norm(heads, (8,), None, 0.5) * (rows[0] + 0.25)
    np.testing.assert_allclose(op.oracle(x, w)[0], want.reshape(5, 24), rtol=1e-12)
    op = _op("layer_norm", 24, lambda b, y: b.layer_norm(y, "w", "c", 0.5, group=8, per_group=apart))
    want = torch_f.layer_norm(heads, (8,), None, None, 0.5) * rows[0] + rows[1]
    np.testing.assert_allclose(op.oracle(x, w, c)[0], want.reshape(5, 24), rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("biased", [False, True])
def test_layer_norm(biased: bool) -> None:
    op = _op("layer_norm", 8, lambda b, x: b.layer_norm(x, "w", "c" if biased else None, 1e-5))
    x, w, *bias = draw(5, 8) + 100, draw(8), *([draw(8)] if biased else [])
    want = torch_f.layer_norm(t(x), (8,), t(w), t(bias[0]) if biased else None, 1e-5)
    np.testing.assert_allclose(op.oracle(x, w, *bias)[0], want, rtol=1e-10)


def test_what_works_on_one_tensor() -> None:
    x = draw(50, 8) * 3
    for kind in ("none", "tanh"):
        op = _op("gelu", 8, lambda b, y, kind=kind: b.gelu(y, kind))
        np.testing.assert_allclose(op.oracle(x)[0], torch_f.gelu(t(x), approximate=kind), rtol=1e-12, atol=1e-15)
    np.testing.assert_array_equal(_op("scale", 8, lambda b, y: b.scale(y, -0.3)).oracle(x)[0], x * -0.3)


def test_embed_positions() -> None:
    b = Builder("m", "float32")
    op = only_op(b, b.embed_positions("p", 40, 8), "embed_positions")
    (y,) = op.oracle(table := draw(40, 8), facts([9, 9, 9], 30))
    np.testing.assert_array_equal(y, torch_f.embedding(torch.arange(30, 33), t(table)))


def test_logits_are_scaled_then_capped() -> None:
    op = _op("logits", 8, lambda b, x: b.logits(x, "w", 9, scale=3.0, softcap=2.0))
    x, w = draw(5, 8), draw(9, 8)
    (y,) = op.oracle(x, w, facts([0] * 5))
    np.testing.assert_allclose(y, 2.0 * torch.tanh(torch_f.linear(t(x)[[0, 4]], t(w)) * 3.0 / 2.0), rtol=1e-12)


@pytest.mark.parametrize("transposed", [False, True])
def test_head_linear_is_a_matrix_per_head(transposed: bool) -> None:
    shape = (3, 4, 6) if transposed else (3, 6, 4)
    op = _op("head_linear", 12, lambda b, x: b.head_linear(x, "w", shape, transposed=transposed))
    x, w = draw(5, 12), draw(*shape)
    heads = [x[:, 4 * h : 4 * h + 4] @ (w[h] if transposed else w[h].T) for h in range(3)]
    np.testing.assert_allclose(op.oracle(x, w)[0], np.concatenate(heads, axis=1), rtol=1e-12)


def _config_of(rope: dict[str, Any], head_dim: int, rotary: int) -> LlamaConfig:
    return LlamaConfig(
        hidden_size=2 * head_dim,
        num_attention_heads=2,
        max_position_embeddings=512,
        rope_parameters={**rope, "rope_theta": 10000.0, "partial_rotary_factor": rotary / head_dim},
    )


LONG = (1.0, 1.3, 2.0, 4.0, 7.5, 30.0)
ROPES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    f"yarn-{whole}": (
        {"rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 64, "beta_fast": 4.0,
         "beta_slow": 1.0, "truncate": bool(whole)},
        {"factor": 8.0, "beta_fast": 4.0, "beta_slow": 1.0, "original_positions": 64, "truncate": whole},
    )
    for whole in (0, 1)
} | {
    "longrope": (
        {"rope_type": "longrope", "short_factor": [1.0] * 6, "long_factor": list(LONG),
         "original_max_position_embeddings": 64},
        {"factors": LONG},
    )
}  # fmt: skip


@pytest.mark.parametrize(
    ("name", "rotary"), [("longrope", 12), *((f"yarn-{whole}", width) for whole in (0, 1) for width in (12, 16))]
)
def test_ropes_of_a_part_are_transformers(name: str, rotary: int) -> None:
    """Beyond the original length; the attention factor comes from transformers, and is in cos and sin once."""
    theirs, ours = ROPES[name]
    config = _config_of(theirs, 16, rotary)
    inverse, factor = ROPE_INIT_FUNCTIONS[theirs["rope_type"]](config, torch.device("cpu"), seq_len=512)
    assert factor != 1.0
    rope = Rope(10000.0, theirs["rope_type"], attention_factor=factor, **ours)
    np.testing.assert_allclose(frequencies(rope, rotary), inverse, rtol=1e-6)
    assert not np.allclose(inverse, frequencies(Rope(10000.0), rotary), rtol=1e-2), "the kind changes nothing"
    op = _op("rope", 48, lambda b, x: b.rope(x, 16, rope, rotary))
    first, x = 300, draw(6, 48)
    (y,) = op.oracle(x, facts([0] * 6, first))
    angle = torch.arange(first, first + 6)[:, None].float() * inverse
    cos, sin = (torch.cat((side, side), -1)[None] * factor for side in (angle.cos(), angle.sin()))
    q = t(x).float().reshape(1, 6, 3, 16).transpose(1, 2)
    want, _ = apply_rotary_pos_emb(q, q, cos, sin)
    np.testing.assert_allclose(y, want.transpose(1, 2).reshape(6, 48), atol=2e-4)
    if rotary < 16:
        np.testing.assert_array_equal(y.reshape(6, 3, 16)[..., rotary:], x.reshape(6, 3, 16)[..., rotary:])


def _config(**own: Any) -> Any:
    names = {"num_local_experts": 8, "num_experts": 8, "num_experts_per_tok": 3, "hidden_size": 8}
    names |= {"intermediate_size": 6, "hidden_act": "silu", "_experts_implementation": "eager"}
    return SimpleNamespace(**(names | own))


def _dense(weights: torch.Tensor, indices: torch.Tensor) -> Float64:
    return np.asarray(torch.zeros(len(weights), 8, dtype=weights.dtype).scatter(1, indices, weights).detach().double())


GROUPS = {"groups": 4, "groups_per_token": 2}
V3 = {"scoring": "sigmoid", "normalise": 1e-20, "scale": 2.5, "group_score": "top2", **GROUPS}
ROUTERS: dict[str, tuple[type[Any], dict[str, Any], dict[str, Any]]] = {
    "mixtral": (MixtralTopKRouter, {}, {"normalise": 0.0}),
    "gpt-oss": (GptOssTopKRouter, {}, {"normalise": 0.0, "bias": "b"}),
    "deepseek-v2": (
        DeepseekV2TopkRouter,
        {"topk_method": "group_limited_greedy", "n_group": 4, "topk_group": 2, "routed_scaling_factor": 16.0},
        {"scale": 16.0, "group_score": "max", **GROUPS},
    ),
    "deepseek-v2-lite": (
        DeepseekV2TopkRouter,
        {"topk_method": "greedy", "n_group": 1, "topk_group": 1, "routed_scaling_factor": 1.0},
        {},
    ),
    "deepseek-v3": (
        DeepseekV3TopkRouter,
        {"n_group": 4, "topk_group": 2, "norm_topk_prob": True, "routed_scaling_factor": 2.5},
        {"selection_bias": "s", **V3},
    ),
}


@pytest.mark.parametrize("name", ROUTERS)
def test_routers_are_transformers(name: str) -> None:
    cls, theirs, ours = ROUTERS[name]
    router = cls(_config(**theirs)).double()
    x, values = draw(40, 8), [draw(8, 8)]
    router.weight.data = t(values[0])
    if "bias" in ours:
        values.append(draw(8))
        router.bias.data = t(values[-1])
    if "selection_bias" in ours:
        values.append(draw(8) * 0.3)
        router.e_score_correction_bias.data = t(values[-1])
    op = _op("router", 8, lambda b, y: b.router(y, "w", 8, experts_per_token=3, **ours))
    _, weights, indices = router(t(x))
    (y,) = op.oracle(x, *values)
    assert ((y != 0).sum(1) == 3).all()
    np.testing.assert_allclose(y, _dense(weights, indices), rtol=2e-6, atol=1e-9)


def test_of_equal_experts_and_groups_the_first_are_chosen() -> None:
    op = _op("router", 8, lambda b, y: b.router(y, "w", 8, experts_per_token=3))
    (y,) = op.oracle(np.zeros((2, 8)), draw(8, 8))
    np.testing.assert_array_equal(y, [[1 / 8] * 3 + [0] * 5] * 2)
    op = _op("router", 8, lambda b, y: b.router(y, "w", 8, experts_per_token=3, **GROUPS, group_score="max"))
    weight = np.zeros((8, 8))
    weight[[3, 4, 7], 0] = 1.0  # the best of the groups 1, 2 and 3
    (y,) = op.oracle(np.eye(8)[:1], weight)
    assert np.flatnonzero(y[0]).tolist() == [2, 3, 4]


def _routing(tokens: int) -> tuple[Float64, torch.Tensor, torch.Tensor]:
    indices = torch.stack([torch.randperm(7)[:3] for _ in range(tokens)])  # nobody chooses the last
    weights = torch.rand(tokens, 3, dtype=torch.float64)
    return _dense(weights, indices), weights, indices


def test_experts_are_mixtrals() -> None:
    experts = MixtralExperts(_config()).double()
    gate, up, down = draw(8, 6, 8), draw(8, 6, 8), draw(8, 8, 6)
    gate[7] = np.nan  # not computed
    experts.gate_up_proj.data, experts.down_proj.data = t(np.concatenate((gate, up), axis=1)), t(down)

    def make(b: Builder, x: Any) -> Any:
        routing = b.router(x, "r", 8, experts_per_token=3)
        return b.experts(x, routing, ("g", "u", "d"), 6, experts_per_token=3)

    routing, weights, indices = _routing(30)
    (y,) = _op("experts", 8, make).oracle(x := draw(30, 8), routing, gate, up, down)
    np.testing.assert_allclose(y, experts(t(x), indices, weights).detach(), rtol=1e-10, atol=1e-12)


def test_clamped_experts_are_gpt_oss() -> None:
    experts = GptOssExperts(_config(swiglu_alpha=1.7, swiglu_limit=0.8)).double()
    stacks, biases = (draw(8, 6, 8), draw(8, 6, 8), draw(8, 8, 6)), (draw(8, 6), draw(8, 6), draw(8, 8))
    both = [np.stack((parts[0], parts[1]), axis=2) for parts in (stacks, biases)]  # gate and up interleaved
    experts.gate_up_proj.data = t(both[0].reshape(8, 12, 8)).transpose(1, 2).contiguous()
    experts.gate_up_proj_bias.data = t(both[1].reshape(8, 12))
    experts.down_proj.data, experts.down_proj_bias.data = t(stacks[2]).transpose(1, 2).contiguous(), t(biases[2])

    def make(b: Builder, x: Any) -> Any:
        own = {"activation": "clamped_swiglu", "alpha": 1.7, "limit": 0.8, "experts_per_token": 3}
        routing = b.router(x, "r", 8, experts_per_token=3)
        return b.experts(x, routing, ("g", "u", "d"), 6, biases=("gb", "ub", "db"), **own)

    routing, weights, indices = _routing(30)
    (y,) = _op("experts", 8, make).oracle(x := draw(30, 8), routing, *stacks, *biases)
    np.testing.assert_allclose(y, experts(t(x), indices, weights).detach(), rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("activation", ["gelu", "gelu_tanh"])
def test_experts_with_gelu(activation: str) -> None:
    def make(b: Builder, x: Any) -> Any:
        routing = b.router(x, "r", 2, experts_per_token=1)
        return b.experts(x, routing, ("g", "u", "d"), 6, experts_per_token=1, activation=activation)

    x, gate, up, down = draw(9, 8), draw(2, 6, 8), draw(2, 6, 8), draw(2, 8, 6)
    routing = np.tile([0.0, 0.5], (9, 1))
    (y,) = _op("experts", 8, make).oracle(x, routing, gate, up, down)
    kind = {"gelu": "none", "gelu_tanh": "tanh"}[activation]
    inner = torch_f.gelu(t(x) @ t(gate[1]).T, approximate=kind) * (t(x) @ t(up[1]).T)
    np.testing.assert_allclose(y, 0.5 * inner @ t(down[1]).T, rtol=1e-11, atol=1e-13)


def test_latent_attention_is_attention_to_what_the_latents_stand_for() -> None:
    """Keys and values of every head made out of the latents, and torch's attention to them; over scattered pages."""
    heads, nope, latent, rope, scale = 3, 5, 6, 4, 0.4
    b = Builder("m", "float32")
    b.block = 0
    parts = {"ql": heads * latent, "qr": heads * rope, "l": latent, "kr": rope}
    y = b.latent_attention(*(b.embed(name, 4, width) for name, width in parts.items()), heads=heads, scale=scale)
    op = only_op(b, y, "latent_attention")
    q, q_rope, rows, k_rope = draw(12, heads, nope), draw(12, heads, rope), draw(12, latent), draw(12, rope)
    k_b, v_b = draw(heads, nope, latent), draw(heads, nope, latent)
    q_latent = np.einsum("thn,hnl->thl", q, k_b)
    cache, made, first = OracleKV(8, 3, 1, latent + rope, 0), [], 0
    for count in (4, 1, 6, 1):
        here = slice(first, first + count)
        batch = facts([0] * count, first, (7, 2, 5, 0))
        given = (q_latent[here].reshape(count, -1), q_rope[here].reshape(count, -1), rows[here], k_rope[here])
        made.append(op.oracle(*given, cache, batch)[0])
        first += count
    got = np.einsum("thl,hvl->thv", np.concatenate(made).reshape(12, heads, latent), v_b)
    keys = np.concatenate((np.einsum("tl,hnl->htn", rows, k_b), np.broadcast_to(k_rope, (heads, 12, rope))), axis=2)
    values, queries = np.einsum("tl,hvl->htv", rows, v_b), np.concatenate((q, q_rope), axis=2).swapaxes(0, 1)
    want = torch_f.scaled_dot_product_attention(t(queries), t(keys), t(values), is_causal=True, scale=scale)
    np.testing.assert_allclose(got, want.transpose(0, 1), rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("name", ["e4m3fn", "e5m2", "e4m3fnuz"])
def test_latent_rows_in_fp8_are_what_torch_stores(name: str) -> None:
    from plait.ir.kv import store_kv
    from plait.ir.module import ops

    b = Builder("m", "float32")
    b.block = 0
    y = b.latent_attention(*(b.embed(n, 4, w) for n, w in (("a", 6), ("b", 2), ("c", 6), ("d", 2))), heads=1, scale=0.2)
    module = b.finish({"y": y})
    store_kv(module, name)
    op = next(op for op in ops(module) if op.name == "plait.latent_attention")
    q, q_rope, rows, k_rope = (np.float64(np.float32(draw(4, width))) for width in (6, 2, 6, 2))
    rows[1, 2], k_rope[2, 0] = 1e6, -1e6
    kind = getattr(torch, f"float8_{name}")
    limit = torch.finfo(kind).max
    key = t(np.concatenate((rows, k_rope), axis=1)).float().clamp(-limit, limit).to(kind).double()
    cache = OracleKV(2, 4, 1, 8, 0)
    (got,) = op.oracle(q, q_rope, rows, k_rope, cache, facts([0] * 4, 0, (1,)))
    np.testing.assert_array_equal(cache.k[1, :, 0], key)
    query = t(np.concatenate((q, q_rope), axis=1))
    want = torch_f.scaled_dot_product_attention(query[None], key[None], key[None, :, :6], is_causal=True, scale=0.2)
    np.testing.assert_allclose(got, want[0], rtol=1e-9, atol=1e-12)
