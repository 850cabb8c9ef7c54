"""Qwen3-MoE: Qwen3 with a mixture of experts in most blocks."""

from __future__ import annotations

from plait.errors import UnsupportedError
from plait.frontend.config import DecoderConfig, Experts, Layer, QKNorm, read_activation
from plait.frontend.config_reader import ConfigReader
from plait.frontend.families.base import Family
from plait.frontend.families.qwen2 import switched_window
from plait.frontend.families.reading import (
    expert_views,
    read_attentions,
    read_blocks,
    read_experts,
    read_mlp,
    read_model,
    rms,
)


def _read(reader: ConfigReader) -> DecoderConfig:
    bias, norm, blocks = reader.flag("attention_bias"), rms(reader), read_blocks(reader)
    attentions = read_attentions(reader, (_window(reader),) * blocks, bias=bias, output_bias=bias, qk_norm=QKNorm(norm))
    experts = Experts(
        count=read_experts(reader, "num_experts", "num_local_experts"),  # transformers 5 writes the second name
        per_token=reader.positive("num_experts_per_tok"),
        intermediate_size=reader.positive("moe_intermediate_size"),
        activation=read_activation(reader),
        normalise=0.0 if reader.get("norm_topk_prob", bool) else None,
    )
    mlp, dense = read_mlp(reader), _dense(reader, blocks)
    layers = [Layer(own, mlp if index in dense else experts) for index, own in enumerate(attentions)]
    return read_model(reader, "qwen3_moe", layers, norm)


def _window(reader: ConfigReader) -> int | None:
    """The window of all blocks, where it is switched on."""
    window = switched_window(reader)
    if reader.has("max_window_layers") and window is not None:
        raise UnsupportedError(
            "config-value",
            f"{reader.source}: a window in some blocks of a Qwen3-MoE is not implemented ('max_window_layers')",
            why="transformers gives it to all blocks, others do not",
        )
    return window


def _dense(reader: ConfigReader, blocks: int) -> set[int]:
    """Blocks with an MLP: those listed, and all but each `decoder_sparse_step`-th."""
    listed, step = reader.raw("mlp_only_layers") or [], reader.optional_positive("decoder_sparse_step") or 1
    if not isinstance(listed, list) or not all(type(index) is int and 0 <= index < blocks for index in listed):
        raise reader.error("config-value", f"'mlp_only_layers' is {listed!r:.100}, expected numbers of blocks")
    return {*listed, *(index for index in range(blocks) if (index + 1) % step)}


FAMILY = Family("qwen3_moe", ("Qwen3MoeForCausalLM",), _read, views=expert_views, needed=("num_key_value_heads",))
