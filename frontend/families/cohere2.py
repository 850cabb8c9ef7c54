"""Command R7B and A: Command R with a window in three blocks of four; those without one have no positions."""

from __future__ import annotations

from dataclasses import replace

from plait.frontend.config import DecoderConfig, Norm, read_eps
from plait.frontend.config_reader import ConfigReader
from plait.frontend.families.base import Family
from plait.frontend.families.cohere import interleaved_views, read_cohere
from plait.frontend.families.gemma2 import read_pattern, read_windows
from plait.frontend.families.reading import read_attentions, read_blocks

PATTERN = 4


def _read(reader: ConfigReader) -> DecoderConfig:
    norm, bias = Norm(read_eps(reader, "layer_norm_eps"), "layer"), reader.flag("attention_bias")
    windows = read_windows(reader, read_blocks(reader), read_pattern(reader, PATTERN))
    attentions = read_attentions(reader, windows, bias=bias, output_bias=bias)
    turned = [own if own.window is not None else replace(own, rope=None) for own in attentions]
    return read_cohere(reader, "cohere2", turned, norm)


FIXED: dict[str, tuple[object, ...]] = {
    "layer_switch": (PATTERN,),
    "order_of_interleaved_layers": ("local_attn_first",),
    "position_embedding_type": ("rope_gptj",),
    "rotary_pct": (1.0,),
    "use_embedding_sharing": (True,),
    "use_gated_activation": (True,),
    "use_parallel_block": (True,),
    "use_parallel_embedding": (False,),
}
"""What Cohere's files say beside the keys that transformers knows."""

FAMILY = Family(
    "cohere2", ("Cohere2ForCausalLM",), _read, views=interleaved_views, fixed=FIXED, needed=("sliding_window",)
)
