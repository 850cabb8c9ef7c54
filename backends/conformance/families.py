"""What single families are made of: modules of ops and attributes that a backend may refuse."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

from xdsl.dialects.builtin import ModuleOp
from xdsl.ir import SSAValue

from plait.backends.conformance.models import FORMATS, HIDDEN, ROPES, VOCABULARY, Attention, Build, attend, op
from plait.ir import Builder, Rope
from plait.ir.kv import store_kv
from plait.ir.types import FP8

Rows = Callable[[str, int], SSAValue]

YARN = Rope(
    10000.0, "yarn", factor=8.0, beta_fast=8.0, beta_slow=1.0, original_positions=32, truncate=1, attention_factor=1.2
)
LONGROPE = Rope(10000.0, "longrope", factors=(1.0, 1.25, 2.0, 3.0, 4.5, 16.0), attention_factor=1.19)

#: Scripts reach position 36, one of them 259: beyond yarn's original length, and with a part of each ramp.
TURNS: dict[str, Callable[[Builder, SSAValue], SSAValue]] = {
    "yarn": lambda b, x: b.rope(x, 32, YARN),
    "yarn-untruncated": lambda b, x: b.rope(x, 32, Rope(**{**vars(YARN), "truncate": 0})),
    "longrope-part": lambda b, x: b.rope(x, 32, LONGROPE, 12),
    "llama3-part": lambda b, x: b.rope(x, 32, ROPES["llama3"], 8),
}

EXPERTS, INNER = 8, 40

ROUTERS: dict[str, dict[str, Any]] = {
    "softmax": {"experts_per_token": 2},
    "one": {"experts_per_token": 1},
    "softmax-bias-normalised": {"bias": "b", "experts_per_token": 3, "normalise": 0.0, "scale": 2.5},
    "sigmoid-selection": {"selection_bias": "s", "experts_per_token": 3, "scoring": "sigmoid", "normalise": 1e-20},
    "groups-max": {"experts_per_token": 3, "groups": 4, "groups_per_token": 2, "group_score": "max", "scale": 16.0},
    "groups-top2": {
        "selection_bias": "s",
        "experts_per_token": 3,
        "scoring": "sigmoid",
        "normalise": 0.25,
        "scale": 1.5,
        "groups": 2,
        "groups_per_token": 1,
        "group_score": "top2",
    },
}

CLAMPED: dict[str, Any] = {"activation": "clamped_swiglu", "alpha": 1.7, "limit": 1.0}

STACKS = ("gate", "up", "down")


def experts(b: Builder, x: SSAValue, at: str = "", *, inner: int = INNER, biased: bool = False, **own: Any) -> SSAValue:
    """A mixture of which each token gets three."""
    routing = b.router(x, f"{at}router", EXPERTS, experts_per_token=3, normalise=0.0)
    gate, up, down = (f"{at}{name}" for name in STACKS)
    biases = (f"{gate}.b", f"{up}.b", f"{down}.b") if biased else None
    return b.experts(x, routing, (gate, up, down), inner, biases=biases, experts_per_token=3, **own)


def _tensor(make: Callable[[Builder, SSAValue], SSAValue], width: int = HIDDEN) -> Build:
    """A module of one tensor in and one out."""
    return op(lambda b, rows: {"y": make(b, rows("x", width))})


OPS: dict[str, Build] = {
    "rms_norm-offset": _tensor(lambda b, x: b.rms_norm(x, "w", 0.5, offset=1.0)),
    "rms_norm-heads": _tensor(lambda b, x: b.rms_norm(x, "w", 0.5, group=24), 72),
    "rms_norm-heads-apart": _tensor(lambda b, x: b.rms_norm(x, "w", 0.5, group=24, per_group=True, offset=1.0), 72),
    "add_rms_norm-offset": op(
        lambda b, rows: {"y": b.rms_norm(b.add(rows("x", HIDDEN), rows("z", HIDDEN)), "w", 1e-5, offset=1.0)}
    ),
    "layer_norm": _tensor(lambda b, x: b.layer_norm(x, "w", None, 0.5)),
    "layer_norm-bias": _tensor(lambda b, x: b.layer_norm(x, "w", "b", 1e-5)),
    "layer_norm-heads": _tensor(lambda b, x: b.layer_norm(x, "w", "b", 0.5, group=24), 72),
    "layer_norm-heads-apart": _tensor(lambda b, x: b.layer_norm(x, "w", "b", 1e-5, group=24, per_group=True), 72),
    "gelu-none": _tensor(lambda b, x: b.gelu(x)),
    "gelu-tanh": _tensor(lambda b, x: b.gelu(x, "tanh")),
    "scale": _tensor(lambda b, x: b.scale(x, -0.3)),
    "embed_positions": op(lambda b, rows: {"y": b.add(rows("x", HIDDEN), b.embed_positions("p", 300, HIDDEN))}),
    "logits-scale": op(lambda b, rows: {"logits": b.logits(rows("x", HIDDEN), "w", 97, scale=0.25)}),
    "logits-softcap": op(lambda b, rows: {"logits": b.logits(rows("x", HIDDEN), "w", 97, scale=3.0, softcap=1.5)}),
    "head_linear": _tensor(lambda b, x: b.head_linear(x, "w", (3, 20, 16))),
    "head_linear-transposed": _tensor(lambda b, x: b.head_linear(x, "w", (3, 16, 20), transposed=True)),
    **{f"rope-{name}": _tensor(turn, 64) for name, turn in TURNS.items()},
    **{
        f"router-{name}": _tensor(partial(Builder.router, weight="w", experts=EXPERTS, **given))
        for name, given in ROUTERS.items()
    },
    "experts-silu": _tensor(experts),
    "experts-gelu": _tensor(partial(experts, activation="gelu")),
    "experts-gelu_tanh-biases": _tensor(partial(experts, activation="gelu_tanh", biased=True)),
    "experts-clamped-biases": _tensor(partial(experts, biased=True, **CLAMPED)),
}


def _quantised(make: Callable[[Builder, SSAValue], SSAValue], kind: str, *names: str) -> Build:
    return op(lambda b, rows: {"y": make(b, rows("x", 64))}, dict.fromkeys(names, FORMATS[kind]))


QUANTISED: dict[str, Build] = {
    **{
        f"experts-{kind}": _quantised(partial(experts, inner=32), kind, *STACKS)
        for kind in ("e2m1-e8m0", "e2m1-outer", "e4m3fn-block", "i8-row", "u4-zeros", "u8-order")
    },
    "experts-clamped-e2m1-e8m0": _quantised(partial(experts, inner=32, biased=True, **CLAMPED), "e2m1-e8m0", *STACKS),
    "head_linear-e4m3fn-block": _quantised(lambda b, x: b.head_linear(x, "w", (2, 40, 32)), "e4m3fn-block", "w"),
    "head_linear-transposed-e4m3fn-block": _quantised(
        lambda b, x: b.head_linear(x, "w", (2, 32, 40), transposed=True), "e4m3fn-block", "w"
    ),
}
"""Stacks of matrices in a format of their own."""


@dataclass(frozen=True)
class Latent:
    """Attributes of one latent attention."""

    heads: int = 6
    latent: int = 32
    rope: int = 16
    scale: float = 0.2
    kv_dtype: str | None = None

    def __call__(self, dtype: str) -> ModuleOp:
        """A module of it alone."""
        widths = {"q_latent": self.heads * self.latent, "q_rope": self.heads * self.rope}
        widths |= {"latent": self.latent, "k_rope": self.rope}
        build = op(
            lambda b, rows: {
                "y": b.latent_attention(
                    *(rows(name, width) for name, width in widths.items()), heads=self.heads, scale=self.scale
                )
            }
        )
        module = build(dtype)
        if self.kv_dtype is not None:
            store_kv(module, self.kv_dtype)
        return module


LATENTS: dict[str, Latent] = {
    "heads6": Latent(),
    "heads1": Latent(heads=1),
    "heads16-wide": Latent(heads=16, latent=64, rope=32, scale=0.1),
}

KV_FP8: dict[str, Latent] = {name: Latent(kv_dtype=name) for name in FP8}


def _model(block: Callable[[Builder, SSAValue, int], SSAValue], blocks: int = 2, **end: float) -> Build:
    """A model of such blocks."""

    def build(dtype: str) -> ModuleOp:
        b = Builder("model", dtype)
        x = b.scale(b.embed("embed", VOCABULARY, HIDDEN), 1.5)
        for index in range(blocks):
            b.block = index
            x = block(b, x, index)
        b.block = None
        return b.finish({"logits": b.logits(b.rms_norm(x, "norm", 1e-6, offset=1.0), "embed", VOCABULARY, **end)})

    return build


def _plain(b: Builder, x: SSAValue, at: str, inner: int) -> SSAValue:
    """A gated MLP."""
    return b.linear(b.silu_mul(b.linear(x, f"{at}gate", inner), b.linear(x, f"{at}up", inner)), f"{at}down", HIDDEN)


def _sinks(b: Builder, x: SSAValue, index: int) -> SSAValue:
    """Attention with sinks, every other one in a window, and a mixture with biases: as GPT-OSS."""
    at, a = f"{index}.", Attention(window=None if index % 2 else 8, sinks=True)
    h = b.rms_norm(x, f"{at}in", 1e-5)

    def project(name: str, width: int) -> SSAValue:
        y = b.linear(h, f"{at}{name}", width, f"{at}{name}.b")
        return y if name == "v" else b.rope(y, a.head_dim, YARN)

    x = b.add(x, b.linear(attend(b, a, project, at), f"{at}o", HIDDEN, f"{at}o.b"))
    return b.add(x, experts(b, b.rms_norm(x, f"{at}post", 1e-5), at, biased=True, **CLAMPED))


def _compressed(b: Builder, x: SSAValue, index: int) -> SSAValue:
    """Latent attention, then a plain MLP in the first block and a mixture with a shared expert after it: as
    DeepSeek-V3."""
    at, heads, nope, latent, turned = f"{index}.", 3, 16, 32, 8
    h = b.rms_norm(x, f"{at}in", 1e-6)
    low = b.rms_norm(b.linear(h, f"{at}q_a", 24), f"{at}q_norm", 1e-6)
    q = b.head_linear(b.linear(low, f"{at}q_nope", heads * nope), f"{at}k_b", (heads, nope, latent), transposed=True)
    q_rope = b.rope(b.linear(low, f"{at}q_rope", heads * turned), turned, YARN)
    row = b.rms_norm(b.linear(h, f"{at}kv_a", latent), f"{at}kv_norm", 1e-6)
    k_rope = b.rope(b.linear(h, f"{at}k_rope", turned), turned, YARN)
    made = b.latent_attention(q, q_rope, row, k_rope, heads=heads, scale=0.2)
    values = b.head_linear(made, f"{at}v_b", (heads, nope, latent))
    x = b.add(x, b.linear(values, f"{at}o", HIDDEN))
    h = b.rms_norm(x, f"{at}post", 1e-6)
    if index == 0:
        return b.add(x, _plain(b, h, at, 80))
    routing = b.router(h, f"{at}router", EXPERTS, **{**ROUTERS["groups-top2"], "selection_bias": f"{at}selection"})
    names = (f"{at}gate", f"{at}up", f"{at}down")
    routed = b.experts(h, routing, names, INNER, experts_per_token=3)
    return b.add(x, b.add(routed, _plain(b, h, f"{at}shared.", INNER)))


def _parallel(b: Builder, x: SSAValue, index: int) -> SSAValue:
    """Attention and MLP side by side of one layer norm, norms of heads of which a part turns, a GELU without a gate."""
    at, a = f"{index}.", Attention(window=8 if index else None)
    h = b.layer_norm(x, f"{at}in", f"{at}in.b", 1e-5)

    def project(name: str, width: int) -> SSAValue:
        y = b.linear(h, f"{at}{name}", width)
        if name == "v":
            return y
        normed = b.rms_norm(y, f"{at}{name}.norm", 1e-6, group=a.head_dim, offset=1.0)
        return b.rope(normed, a.head_dim, LONGROPE, 12)

    mixed = b.scale(b.linear(attend(b, a, project, at), f"{at}o", HIDDEN), 0.7)
    return b.add(b.add(x, mixed), b.linear(b.gelu(b.linear(h, f"{at}fc", 80, f"{at}fc.b")), f"{at}proj", HIDDEN))


MODELS: dict[str, Build] = {
    "mixture": _model(_sinks),
    "latent": _model(_compressed, blocks=3),
    "parallel": _model(_parallel, scale=0.5, softcap=3.0),
}
