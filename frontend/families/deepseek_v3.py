"""DeepSeek-V3 and R1, and Kimi K2, which is laid out alike: V2 whose experts are chosen by sigmoid with a bias."""

from __future__ import annotations

from plait.frontend.config import DecoderConfig, Experts, read_activation
from plait.frontend.config_reader import ConfigReader
from plait.frontend.families.base import Family
from plait.frontend.families.deepseek_v2 import FIXED, NEEDED, NO_EFFECT, read_layers, read_shared, unneeded, views
from plait.frontend.families.reading import read_experts, read_model, rms

LEAST = 1e-20
"""What is added to the sum that the chosen scores are divided by."""


def _read(reader: ConfigReader) -> DecoderConfig:
    experts = Experts(
        count=read_experts(reader, "n_routed_experts"),
        per_token=reader.positive("num_experts_per_tok"),
        intermediate_size=reader.positive("moe_intermediate_size"),
        activation=read_activation(reader),
        scoring="sigmoid",
        normalise=LEAST if reader.get("norm_topk_prob", bool) else None,
        scale=reader.positive_number("routed_scaling_factor"),
        groups=reader.positive("n_group"),
        groups_per_token=reader.positive("topk_group"),
        group_score="top2",
        selection_bias=True,
        shared=read_shared(reader),
    )
    return read_model(reader, "deepseek_v3", read_layers(reader, experts), rms(reader))


FAMILY = Family(
    "deepseek_v3",
    ("DeepseekV3ForCausalLM",),
    _read,
    views=views,
    unneeded=unneeded,
    no_effect=NO_EFFECT,
    needed=(*NEEDED, "first_k_dense_replace"),
    fixed=FIXED | {"scoring_func": ("sigmoid",), "topk_method": ("noaux_tc",), "rope_interleave": (True,)},
)
