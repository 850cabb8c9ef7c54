"""GPT-NeoX and Pythia: fused q, k and v of each head, heads that turn in part, attention and MLP together."""

from __future__ import annotations

from plait.frontend.config import Attention, DecoderConfig, Mlp, Names, Norm, read_activation, read_eps
from plait.frontend.config_reader import ConfigReader
from plait.frontend.families.base import Family
from plait.frontend.families.reading import layers, read_attentions, read_blocks, read_model
from plait.frontend.views import View
from plait.spec import Piece, Rows

NAMES = Names(
    embedding="gpt_neox.embed_in",
    head="embed_out",
    norm="gpt_neox.final_layer_norm",
    block="gpt_neox.layers.{}.",
    q="attention.q",
    k="attention.k",
    v="attention.v",
    o="attention.dense",
    up="mlp.dense_h_to_4h",
    down="mlp.dense_4h_to_h",
)


def _read(reader: ConfigReader) -> DecoderConfig:
    norm = Norm(read_eps(reader, "layer_norm_eps"), "layer", bias=True)
    bias = reader.optional("attention_bias", bool)
    full = (None,) * read_blocks(reader)
    attentions = read_attentions(
        reader,
        full,
        partial=reader.optional_positive_number("rotary_pct") or 0.25,
        bias=bias is not False,
        output_bias=bias is not False,
        theta_key="rotary_emb_base",
    )
    activation = read_activation(reader, known=("gelu", "gelu_tanh"))
    mlp = Mlp(reader.positive("intermediate_size"), activation, gated=False, bias=True)
    parallel = reader.get("use_parallel_residual", bool)
    return read_model(reader, "gpt_neox", layers(attentions, mlp), norm, parallel=parallel, names=NAMES)


def _views(config: DecoderConfig) -> dict[str, View]:
    views = {}
    for index, layer in enumerate(config.layers):
        own, prefix = layer.attention, f"gpt_neox.layers.{index}.attention."
        assert isinstance(own, Attention)
        for place, part in enumerate("qkv"):
            rows = Rows(own.heads, 3 * own.head_dim, (Piece(place * own.head_dim, own.head_dim),))
            for kind in ("weight", "bias") if own.bias else ("weight",):
                views[f"{prefix}{part}.{kind}"] = View((f"{prefix}query_key_value.{kind}",), rows)
    return views


FAMILY = Family(
    "gpt_neox",
    ("GPTNeoXForCausalLM",),
    _read,
    views=_views,
    no_effect={"classifier_dropout": "used in training only"},
)
