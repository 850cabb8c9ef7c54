"""The decoder that Llama, Mistral and Qwen2 share: pre-norm blocks of rotary attention and a gated MLP.

Families differ in which config keys they have, where they put biases and which blocks attend through a window; the
ops are the same. Tensor names are those of the `transformers` classes.
"""

from __future__ import annotations

from xdsl.dialects.builtin import ModuleOp
from xdsl.ir import SSAValue

from plait.errors import UnsupportedError
from plait.frontend.config import DecoderConfig, read_dtype, read_heads
from plait.frontend.config_reader import ConfigReader
from plait.frontend.rope import read_ropes
from plait.ir import Builder

EMBEDDING = "model.embed_tokens.weight"
LM_HEAD = "lm_head.weight"

HARMLESS = {
    r"model\.(layers\.\d+\.self_attn\.)?rotary_emb\.inv_freq": "rotary frequencies, which the config states too",
}

MAX_BLOCKS = 65536
"""Far beyond any model: a damaged config must not build ops until memory ends."""


def read_blocks(reader: ConfigReader) -> int:
    """The number of blocks."""
    blocks = reader.positive("num_hidden_layers")
    if blocks > MAX_BLOCKS:
        raise reader.error("config-value", f"'num_hidden_layers' is {blocks}, more than {MAX_BLOCKS}")
    return blocks


def read_decoder(
    reader: ConfigReader,
    family: str,
    windows: tuple[int | None, ...],
    *,
    qkv_bias: bool = False,
    output_bias: bool = False,
    mlp_bias: bool = False,
) -> DecoderConfig:
    """The keys that all families share. The rest is the family's.

    Args:
        windows: the window of each block, None for full attention.
    """
    hidden_size = reader.positive("hidden_size")
    heads, kv_heads, head_dim = read_heads(reader, hidden_size)
    norm_eps = reader.get("rms_norm_eps", float)
    if norm_eps <= 0:
        raise reader.error("config-value", f"'rms_norm_eps' is {norm_eps}, expected a positive number")
    activation = reader.get("hidden_act", str)
    if activation != "silu":
        raise UnsupportedError(
            "config-value", f"{reader.source}: 'hidden_act' is {activation!r}, which is not implemented", why="silu is"
        )
    kinds = tuple("full_attention" if window is None else "sliding_attention" for window in windows)
    bos = reader.token_ids("bos_token_id")
    return DecoderConfig(
        family=family,
        vocab_size=reader.positive("vocab_size"),
        hidden_size=hidden_size,
        intermediate_size=reader.positive("intermediate_size"),
        blocks=len(windows),
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        max_positions=reader.positive("max_position_embeddings"),
        norm_eps=norm_eps,
        ropes=read_ropes(reader, kinds),
        windows=windows,
        qkv_bias=qkv_bias,
        output_bias=output_bias,
        mlp_bias=mlp_bias,
        tied=reader.flag("tie_word_embeddings"),
        dtype=read_dtype(reader),
        bos_token_id=bos[0] if bos else None,
        eos_token_ids=reader.token_ids("eos_token_id"),
    )


def build_decoder(config: DecoderConfig, dtype: str) -> ModuleOp:
    """The module of the whole model in `dtype`."""
    b = Builder(config.family, dtype)
    x = b.embed(EMBEDDING, config.vocab_size, config.hidden_size)
    for index in range(config.blocks):
        b.block = index
        x = _block(b, config, index, x)
    b.block = None
    x = b.rms_norm(x, "model.norm.weight", config.norm_eps)
    table = EMBEDDING if config.tied else LM_HEAD
    return b.finish({"logits": b.logits(x, table, config.vocab_size)})


def _block(b: Builder, config: DecoderConfig, index: int, x: SSAValue) -> SSAValue:
    prefix = f"model.layers.{index}."
    h = b.rms_norm(x, f"{prefix}input_layernorm.weight", config.norm_eps)
    x = b.add(x, _attention(b, config, index, f"{prefix}self_attn.", h))
    h = b.rms_norm(x, f"{prefix}post_attention_layernorm.weight", config.norm_eps)
    return b.add(x, _mlp(b, config, f"{prefix}mlp.", h))


def _attention(b: Builder, config: DecoderConfig, index: int, prefix: str, x: SSAValue) -> SSAValue:
    width, kv_width = config.heads * config.head_dim, config.kv_heads * config.head_dim
    q = _linear(b, x, f"{prefix}q_proj", width, config.qkv_bias)
    k = _linear(b, x, f"{prefix}k_proj", kv_width, config.qkv_bias)
    v = _linear(b, x, f"{prefix}v_proj", kv_width, config.qkv_bias)
    rope = config.ropes[index]
    mixed = b.attention(
        b.rope(q, config.head_dim, rope),
        b.rope(k, config.head_dim, rope),
        v,
        heads=config.heads,
        kv_heads=config.kv_heads,
        head_dim=config.head_dim,
        scale=config.head_dim**-0.5,
        window=config.windows[index],
    )
    return _linear(b, mixed, f"{prefix}o_proj", config.hidden_size, config.output_bias)


def _mlp(b: Builder, config: DecoderConfig, prefix: str, x: SSAValue) -> SSAValue:
    gate = _linear(b, x, f"{prefix}gate_proj", config.intermediate_size, config.mlp_bias)
    up = _linear(b, x, f"{prefix}up_proj", config.intermediate_size, config.mlp_bias)
    return _linear(b, b.silu_mul(gate, up), f"{prefix}down_proj", config.hidden_size, config.mlp_bias)


def _linear(b: Builder, x: SSAValue, name: str, out: int, bias: bool) -> SSAValue:
    return b.linear(x, f"{name}.weight", out, f"{name}.bias" if bias else None)
