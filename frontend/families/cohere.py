"""Command R: attention and MLP read one layer norm without bias, rope turns neighbours, logits are scaled; in the large
model q and k are normed, each head with weights of its own."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from plait.frontend.config import Attention, DecoderConfig, Names, Norm, QKNorm, read_eps
from plait.frontend.config_reader import ConfigReader
from plait.frontend.families.base import Family
from plait.frontend.families.reading import layers, read_attentions, read_blocks, read_mlp, read_model
from plait.frontend.views import View
from plait.spec import Piece, Rows

NAMES = Names(mlp_norm=None)


def _read(reader: ConfigReader) -> DecoderConfig:
    norm = Norm(read_eps(reader, "layer_norm_eps"), "layer")
    qk_norm = QKNorm(norm, "own") if reader.flag("use_qk_norm") else None
    bias, full = reader.flag("attention_bias"), (None,) * read_blocks(reader)
    attentions = read_attentions(reader, full, bias=bias, output_bias=bias, qk_norm=qk_norm)
    model = read_cohere(reader, "cohere", attentions, norm)
    # Command R was trained further than `max_position_embeddings` says.
    return replace(model, max_positions=reader.optional_positive("model_max_length") or model.max_positions)


def read_cohere(reader: ConfigReader, family: str, attentions: Sequence[Attention], norm: Norm) -> DecoderConfig:
    """What both generations read behind their attention."""
    return read_model(
        reader,
        family,
        layers(attentions, read_mlp(reader)),
        norm,
        tied=True,
        parallel=True,
        names=NAMES,
        logits_scale=reader.positive_number("logit_scale"),
    )


def interleaved_views(config: DecoderConfig) -> dict[str, View]:
    """q and k, whose rows stand as rope pairs, and what norms them."""
    views = {}
    for index, layer in enumerate(config.layers):
        own = layer.attention
        assert isinstance(own, Attention)
        if own.rope is None:
            continue
        for part, heads in (("q", own.heads), ("k", own.kv_heads)):
            prefix = f"model.layers.{index}.self_attn.{part}"
            rows = Rows(heads, own.head_dim, (Piece(0, own.head_dim, pairs=True),))
            for kind in ("weight", "bias") if own.bias else ("weight",):
                views[f"{prefix}_proj.{kind}"] = View((f"{prefix}_proj.{kind}",), rows)
            if own.qk_norm is not None:
                views[f"{prefix}_norm.weight"] = View((f"{prefix}_norm.weight",), rows, flat=True)
    return views


FAMILY = Family("cohere", ("CohereForCausalLM",), _read, views=interleaved_views)
