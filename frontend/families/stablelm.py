"""StableLM: layer norms, heads that turn in part, and attention and MLP together or one after the other."""

from __future__ import annotations

from plait.frontend.config import DecoderConfig, Names, Norm, read_eps
from plait.frontend.config_reader import ConfigReader
from plait.frontend.families.base import Family
from plait.frontend.families.reading import layers, read_attentions, read_blocks, read_mlp, read_model


def _read(reader: ConfigReader) -> DecoderConfig:
    norm, parallel = Norm(read_eps(reader, "layer_norm_eps"), "layer", bias=True), reader.flag("use_parallel_residual")
    bias, full = reader.flag("use_qkv_bias"), (None,) * read_blocks(reader)
    attentions = read_attentions(reader, full, bias=bias, partial=0.25)
    names = Names(mlp_norm=None) if parallel else Names()
    return read_model(reader, "stablelm", layers(attentions, read_mlp(reader)), norm, parallel=parallel, names=names)


FAMILY = Family(
    "stablelm",
    ("StableLmForCausalLM",),
    _read,
    fixed={"qk_layernorm": (False,)},
    needed=("num_key_value_heads",),
)
