"""Phi-3 and Phi-4: fused q, k and v, fused gate and up, LongRoPE, and in Phi-4-mini heads that turn in part."""

from __future__ import annotations

from plait.errors import UnsupportedError
from plait.frontend.config import AnyRope, Attention, DecoderConfig, Mlp
from plait.frontend.config_reader import ConfigReader
from plait.frontend.families.base import Family
from plait.frontend.families.reading import layers, read_attentions, read_blocks, read_mlp, read_model, rms
from plait.frontend.views import View, rows_of

ORIGINAL = 4096
"""The context of the pretraining where a config does not say it, as transformers has it."""

FIXED: dict[str, tuple[object, ...]] = {
    "attention_bias": (False,),
    "mlp_bias": (False,),
    "lm_head_bias": (False,),
    "full_attn_mod": (1,),
    "interpolate_factor": (1,),
}
"""What Microsoft's files say beside the keys that transformers knows."""


def _read(reader: ConfigReader) -> DecoderConfig:
    window, blocks = reader.optional_positive("sliding_window"), read_blocks(reader)
    attentions = read_attentions(
        reader,
        (window,) * blocks,
        partial=1.0,
        original_positions=reader.optional_positive("original_max_position_embeddings") or ORIGINAL,
    )
    if not _known(attentions[0].rope):
        raise UnsupportedError(
            "rope-unsupported",
            f"{reader.source}: this kind of rope is unknown in a Phi-3",
            why="default and longrope are",
        )
    return read_model(reader, "phi3", layers(attentions, read_mlp(reader)), rms(reader))


def _known(rope: AnyRope | None) -> bool:
    return rope is not None and rope.kind in ("default", "longrope")


def _views(config: DecoderConfig) -> dict[str, View]:
    views = {}
    for index, layer in enumerate(config.layers):
        own, mlp, prefix = layer.attention, layer.mlp, f"model.layers.{index}."
        assert isinstance(own, Attention) and isinstance(mlp, Mlp)
        q, kv, inner = own.heads * own.head_dim, own.kv_heads * own.head_dim, mlp.intermediate_size
        fused = {
            "self_attn.qkv_proj.weight": {"self_attn.q_proj": q, "self_attn.k_proj": kv, "self_attn.v_proj": kv},
            "mlp.gate_up_proj.weight": {"mlp.gate_proj": inner, "mlp.up_proj": inner},
        }
        for source, parts in fused.items():
            start = 0
            for name, count in parts.items():
                views[f"{prefix}{name}.weight"] = rows_of(prefix + source, start, count, sum(parts.values()))
                start += count
    return views


FAMILY = Family("phi3", ("Phi3ForCausalLM",), _read, views=_views, fixed=FIXED)
