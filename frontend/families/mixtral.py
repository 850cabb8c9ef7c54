"""Mixtral: Mistral whose MLP is a mixture of experts."""

from __future__ import annotations

from plait.frontend.config import DecoderConfig, Experts, Layer, Names, read_activation
from plait.frontend.config_reader import ConfigReader
from plait.frontend.families.base import Family
from plait.frontend.families.mistral import read_window
from plait.frontend.families.reading import expert_views, read_attentions, read_blocks, read_experts, read_model, rms
from plait.frontend.views import View

NAMES = Names(router="block_sparse_moe.gate", experts="block_sparse_moe.experts.")
PARTS = {"gate_proj": "w1", "up_proj": "w3", "down_proj": "w2"}


def _read(reader: ConfigReader) -> DecoderConfig:
    blocks = read_blocks(reader)
    window = read_window(reader, blocks, "Mixtral")
    experts = Experts(
        count=read_experts(reader, "num_local_experts"),
        per_token=reader.positive("num_experts_per_tok"),
        intermediate_size=reader.positive("intermediate_size"),
        activation=read_activation(reader),
        normalise=0.0,
    )
    attentions = read_attentions(reader, (window,) * blocks)
    return read_model(
        reader, "mixtral", [Layer(attention, experts) for attention in attentions], rms(reader), names=NAMES
    )


def _views(config: DecoderConfig) -> dict[str, View]:
    return expert_views(config, PARTS)


FAMILY = Family("mixtral", ("MixtralForCausalLM",), _read, views=_views, needed=("num_key_value_heads",))
