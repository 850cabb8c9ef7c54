"""DeepSeek-V2: latent attention, and experts beside shared ones, chosen by softmax, perhaps in groups."""

from __future__ import annotations

from plait.errors import UnsupportedError
from plait.frontend.config import DecoderConfig, Experts, LatentAttention, Layer, Mlp, Norm, read_activation
from plait.frontend.config_reader import ConfigReader
from plait.frontend.families.base import Family
from plait.frontend.families.latent import latent_views
from plait.frontend.families.reading import expert_views, read_blocks, read_experts, read_mlp, read_model, rms
from plait.frontend.rope import FULL, RopeFacts, magnitude, read_ropes
from plait.frontend.views import View

NO_EFFECT = {
    "aux_loss_alpha": "used in training only",
    "seq_aux": "used in training only",
    "ep_size": "how experts were spread over devices",
    "num_key_value_heads": "latent attention has one row for all heads",
    "head_dim": "transformers writes the rotary part here",
    "qk_head_dim": "the sum of its two parts",
    "num_nextn_predict_layers": "layers that predict more tokens, which plait does not use",
    "num_mtp_layers": "layers that predict more tokens, which plait does not use",
}
FIXED: dict[str, tuple[object, ...]] = {"moe_layer_freq": (1,)}
NEEDED = ("q_lora_rank", "n_shared_experts")


def read_latent(reader: ConfigReader) -> LatentAttention:
    """The attention of all blocks."""
    nope, rope_dim = reader.positive("qk_nope_head_dim"), reader.positive("qk_rope_head_dim")
    facts = RopeFacts(rope_dim, reader.positive("max_position_embeddings"))
    if rope_dim % 2:
        raise reader.error("config-value", f"qk_rope_head_dim {rope_dim} is odd", why="rotary embeddings rotate pairs")
    (rope,) = read_ropes(reader, (FULL,), facts)
    return LatentAttention(
        heads=reader.positive("num_attention_heads"),
        q_rank=reader.optional_positive("q_lora_rank"),
        kv_rank=reader.positive("kv_lora_rank"),
        nope_dim=nope,
        rope_dim=rope_dim,
        value_dim=reader.positive("v_head_dim"),
        scale=(nope + rope_dim) ** -0.5 * _growth(reader),
        rope=rope,
        norm=Norm(LATENT_EPS),
        bias=reader.flag("attention_bias"),
    )


LATENT_EPS = 1e-6
"""The norms inside latent attention have this epsilon, whatever the config says for the others."""


def _growth(reader: ConfigReader) -> float:
    """YaRN's magnitude for all features, squared, belongs to the scores (DeepSeek-V2's own code)."""
    given = reader.peek("rope_parameters") or reader.peek("rope_scaling") or {}
    given = given.get(FULL, given)
    every, factor = given.get("mscale_all_dim"), given.get("factor")
    return magnitude(factor, every) ** 2 if every and factor else 1.0


def read_layers(reader: ConfigReader, experts: Experts) -> list[Layer]:
    """Blocks: the first ones with an MLP, then experts."""
    blocks, dense = read_blocks(reader), reader.count("first_k_dense_replace")
    attention, mlp = read_latent(reader), read_mlp(reader, bias=reader.flag("mlp_bias"))
    return [Layer(attention, mlp if index < dense else experts) for index in range(blocks)]


def read_shared(reader: ConfigReader) -> Mlp | None:
    """The shared experts, as one MLP."""
    count, inner = reader.count("n_shared_experts"), reader.positive("moe_intermediate_size")
    return Mlp(count * inner, read_activation(reader)) if count > 0 else None


def _read(reader: ConfigReader) -> DecoderConfig:
    method = reader.optional("topk_method", str) or "greedy"
    if method not in ("greedy", "group_limited_greedy"):
        raise UnsupportedError(
            "config-value",
            f"{reader.source}: 'topk_method' is {method!r}, which is not implemented",
            why="greedy and group_limited_greedy are",
        )
    groups, kept = reader.optional_positive("n_group"), reader.optional_positive("topk_group")
    grouped = method != "greedy"
    if grouped and (groups is None or kept is None):
        raise reader.error("config-key-missing", f"'topk_method' is {method}, and n_group or topk_group is missing")
    experts = Experts(
        count=read_experts(reader, "n_routed_experts"),
        per_token=reader.positive("num_experts_per_tok"),
        intermediate_size=reader.positive("moe_intermediate_size"),
        activation=read_activation(reader),
        scale=reader.positive_number("routed_scaling_factor"),
        groups=groups if grouped else None,
        groups_per_token=kept if grouped else None,
        group_score="max" if grouped else None,
        shared=read_shared(reader),
    )
    return read_model(reader, "deepseek_v2", read_layers(reader, experts), rms(reader))


def views(config: DecoderConfig) -> dict[str, View]:
    """Where the parts of attention and the experts are stored."""
    return latent_views(config) | expert_views(config)


def unneeded(config: DecoderConfig) -> dict[str, str]:
    """Tensors of the layers behind the last block."""
    return {rf"model\.layers\.{config.blocks}\..+": "a layer that predicts more tokens, which plait does not use"}


FAMILY = Family(
    "deepseek_v2",
    ("DeepseekV2ForCausalLM",),
    _read,
    views=views,
    unneeded=unneeded,
    no_effect=NO_EFFECT,
    needed=NEEDED,
    # transformers ignores the first; DeepSeek's own code does not.
    fixed=FIXED | {"norm_topk_prob": (False,), "scoring_func": ("softmax",)},
)
