"""GPT-OSS: experts whose gate and up stand row by row in one tensor, sinks, every other block with a window, YaRN."""

from __future__ import annotations

from plait.frontend.config import DecoderConfig, Experts, Layer, Names
from plait.frontend.config_reader import ConfigReader
from plait.frontend.families.base import Family
from plait.frontend.families.gemma2 import read_windows
from plait.frontend.families.reading import read_attentions, read_blocks, read_experts, read_model, rms
from plait.frontend.views import View
from plait.ir.ops.experts import CLAMPED
from plait.spec import Piece, Rows

NAMES = Names(router="mlp.router")
ALPHA, LIMIT = 1.702, 7.0
"""Of the activation; configs that say nothing mean these."""


def _read(reader: ConfigReader) -> DecoderConfig:
    bias, windows = reader.get("attention_bias", bool), read_windows(reader, read_blocks(reader), 2)
    if not (reader.peek("rope_parameters") or reader.peek("rope_scaling")):
        raise reader.error(
            "config-key-missing",
            "rope_scaling is missing",
            why="without it transformers takes the YaRN of the published models",
            hint='add "rope_scaling", with "rope_type": "default" for none',
        )
    attentions = read_attentions(
        reader,
        windows,
        bias=bias,
        output_bias=bias,
        sinks=True,
        original_positions=reader.optional_positive("initial_context_length"),
    )
    experts = Experts(
        count=read_experts(reader, "num_local_experts"),
        per_token=reader.positive(reader.spelling("num_experts_per_tok", "experts_per_token")),
        intermediate_size=reader.positive("intermediate_size"),
        activation=CLAMPED,
        normalise=0.0,
        alpha=reader.optional_positive_number("swiglu_alpha") or ALPHA,
        limit=reader.optional_positive_number("swiglu_limit") or LIMIT,
        bias=True,
        router_bias=True,
    )
    return read_model(reader, "gpt_oss", [Layer(own, experts) for own in attentions], rms(reader), names=NAMES)


def _views(config: DecoderConfig) -> dict[str, View]:
    views = {}
    for index, layer in enumerate(config.layers):
        own, prefix = layer.mlp, f"model.layers.{index}.mlp.experts."
        assert isinstance(own, Experts)
        for start, part in enumerate(("gate_proj", "up_proj")):
            every = (Piece(start, 1),)
            rows = Rows(own.count * own.intermediate_size, 2, every)
            views[f"{prefix}{part}.weight"] = View((f"{prefix}gate_up_proj",), rows, transposed=True)
            vector = Rows(own.intermediate_size, 2, every)
            views[f"{prefix}{part}.bias"] = View((f"{prefix}gate_up_proj_bias",), vector, vectors=True)
        views[f"{prefix}down_proj.weight"] = View((f"{prefix}down_proj",), transposed=True)
        views[f"{prefix}down_proj.bias"] = View((f"{prefix}down_proj_bias",))
    return views


FAMILY = Family(
    "gpt_oss",
    ("GptOssForCausalLM",),
    _read,
    views=_views,
    fixed={"hidden_act": ("silu",)},
    needed=("num_key_value_heads", "head_dim", "sliding_window"),
)
