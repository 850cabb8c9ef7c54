"""GPT-2: learned positions, layer norms, and matrices stored as (in, out)."""

from __future__ import annotations

from plait.frontend.config import (
    Attention,
    DecoderConfig,
    Layer,
    Mlp,
    Names,
    Norm,
    read_activation,
    read_eps,
)
from plait.frontend.config_reader import ConfigReader
from plait.frontend.families.base import Family
from plait.frontend.families.reading import read_blocks, read_model
from plait.frontend.views import View
from plait.spec import Piece, Rows

NAMES = Names(
    embedding="transformer.wte",
    positions="transformer.wpe",
    norm="transformer.ln_f",
    block="transformer.h.{}.",
    attention_norm="ln_1",
    mlp_norm="ln_2",
    q="attn.q",
    k="attn.k",
    v="attn.v",
    o="attn.c_proj",
    up="mlp.c_fc",
    down="mlp.c_proj",
)
_CLASSIFIER = "it chooses what a classifier returns"
NO_EFFECT = {
    "summary_type": _CLASSIFIER,
    "summary_use_proj": _CLASSIFIER,
    "summary_activation": _CLASSIFIER,
    "summary_proj_to_labels": _CLASSIFIER,
    "summary_first_dropout": _CLASSIFIER,
    "n_ctx": "the number of positions once more",
}


def _read(reader: ConfigReader) -> DecoderConfig:
    hidden, heads, positions = (reader.positive(key) for key in ("n_embd", "n_head", "n_positions"))
    if hidden % heads:
        raise reader.error("config-value", f"n_embd {hidden} does not divide among {heads} heads")
    head_dim = hidden // heads
    attention = Attention(heads, heads, head_dim, head_dim**-0.5, None, bias=True, output_bias=True)
    mlp = Mlp(
        reader.optional_positive("n_inner") or 4 * hidden,
        read_activation(reader, "activation_function", ("gelu", "gelu_tanh")),
        gated=False,
        bias=True,
    )
    return read_model(
        reader,
        "gpt2",
        (Layer(attention, mlp),) * read_blocks(reader, "n_layer"),
        Norm(read_eps(reader, "layer_norm_epsilon"), "layer", bias=True),
        tied=True,
        hidden_size=hidden,
        max_positions=positions,
        names=NAMES,
        positions=positions,
    )


def _views(config: DecoderConfig) -> dict[str, View]:
    views, hidden = {}, config.hidden_size
    for index in range(config.blocks):
        prefix = f"transformer.h.{index}."
        for place, part in enumerate("qkv"):
            rows = Rows(1, 3 * hidden, (Piece(place * hidden, hidden),))
            views[f"{prefix}attn.{part}.weight"] = View((f"{prefix}attn.c_attn.weight",), rows, transposed=True)
            views[f"{prefix}attn.{part}.bias"] = View((f"{prefix}attn.c_attn.bias",), rows)
        for part in (NAMES.o, NAMES.up, NAMES.down):
            views[f"{prefix}{part}.weight"] = View((f"{prefix}{part}.weight",), transposed=True)
    return views


FAMILY = Family(
    "gpt2",
    ("GPT2LMHeadModel",),
    _read,
    views=_views,
    prefix="transformer.",
    no_effect=NO_EFFECT,
    fixed={
        "scale_attn_weights": (True,),
        "scale_attn_by_inverse_layer_idx": (False,),
        "reorder_and_upcast_attn": (False,),
    },
)
