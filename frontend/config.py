"""A config in normal form, and the keys that families share."""

from __future__ import annotations

from dataclasses import dataclass

from plait.errors import UnsupportedError
from plait.frontend.config_reader import ConfigReader
from plait.frontend.quantisation import Quantisation
from plait.frontend.rope import LAYER_TYPES
from plait.ir import Rope
from plait.ir.types import DTYPES


@dataclass(frozen=True)
class DecoderConfig:
    """A decoder of the Llama family in normal form, whatever the file called things.

    Attributes:
        ropes: the rotary embedding of each block.
        windows: the attention window of each block in tokens, None for full: key j is visible while i - j < window.
        tied: the logits use the embedding's table.
        dtype: what the config says the weights are: float32, float16 or bfloat16; None where it does not say.
        quantisation: how weights are quantised; None where they are not.
    """

    family: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    blocks: int
    heads: int
    kv_heads: int
    head_dim: int
    max_positions: int
    norm_eps: float
    ropes: tuple[Rope, ...]
    windows: tuple[int | None, ...]
    qkv_bias: bool
    output_bias: bool
    mlp_bias: bool
    tied: bool
    dtype: str | None
    bos_token_id: int | None
    eos_token_ids: tuple[int, ...]
    quantisation: Quantisation | None = None

    def __post_init__(self) -> None:
        assert len(self.ropes) == len(self.windows) == self.blocks


def read_dtype(reader: ConfigReader) -> str | None:
    """The checkpoint's dtype, in either spelling. None where the config does not say."""
    old, new = reader.optional("torch_dtype", str), reader.optional("dtype", str)
    if old is not None and new is not None and old != new:
        raise reader.error("config-conflict", f"torch_dtype is {old!r} and dtype is {new!r}")
    dtype = new or old
    if dtype is not None and dtype not in DTYPES:
        raise UnsupportedError(
            "dtype-unsupported", f"{reader.source}: the dtype {dtype!r} is not implemented", hint=", ".join(DTYPES)
        )
    return dtype


def read_heads(reader: ConfigReader, hidden_size: int) -> tuple[int, int, int]:
    """(heads, KV heads, head_dim). Absent KV heads mean one per head; an absent head_dim means hidden / heads."""
    heads = reader.positive("num_attention_heads")
    kv_heads = reader.optional_positive("num_key_value_heads") or heads
    head_dim = reader.optional_positive("head_dim")
    if heads % kv_heads:
        raise reader.error("config-value", f"{heads} heads do not divide among {kv_heads} KV heads")
    if head_dim is None and hidden_size % heads:
        raise reader.error("config-value", f"hidden_size {hidden_size} does not divide among {heads} heads")
    head_dim = head_dim or hidden_size // heads
    if head_dim % 2:
        raise reader.error("config-value", f"head_dim {head_dim} is odd", why="rotary embeddings rotate pairs")
    return heads, kv_heads, head_dim


def read_layer_types(reader: ConfigReader, blocks: int) -> tuple[str, ...] | None:
    """The attention kind of each block, or None where the config does not list them."""
    kinds = reader.raw("layer_types")
    if kinds is None:
        return None
    if not isinstance(kinds, list) or len(kinds) != blocks:
        raise reader.error("config-value", f"'layer_types' must list {blocks} layers, got {kinds!r:.100}")
    for kind in kinds:
        if kind not in LAYER_TYPES:
            raise UnsupportedError(
                "config-value",
                f"{reader.source}: the layer type {kind!r:.100} is not implemented",
                why=f"{LAYER_TYPES}",
            )
    return tuple(kinds)
