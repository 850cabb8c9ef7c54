"""A config in normal form, and the keys that families share."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Literal

from plait.errors import UnsupportedError
from plait.frontend.config_reader import ConfigReader
from plait.frontend.quantisation import Quantisation
from plait.frontend.rope import LAYER_TYPES, RopeByContext
from plait.ir import Rope
from plait.ir.types import DTYPES

AnyRope = Rope | RopeByContext


@dataclass(frozen=True)
class Norm:
    """`rms` or `layer`; `offset` is added to the weight; `bias` of a layer norm."""

    eps: float
    kind: Literal["rms", "layer"] = "rms"
    offset: float | None = None
    bias: bool = False


@dataclass(frozen=True)
class QKNorm:
    """The norm of q and k: of each `head`, of each with `own` weights, or of the `whole` width."""

    norm: Norm
    over: Literal["head", "own", "whole"] = "head"


@dataclass(frozen=True)
class Attention:
    """The attention of one block.

    Attributes:
        scale: what scores are multiplied by.
        rope: None for a block without positions (NoPE), or with learned ones.
        rotary_dim: features of a head that turn; None for all.
        window: key j is visible while i - j < window; None for full attention.
        softcap: None for none.
        sinks: one more score per head, in the tensor of that name.
        bias: of q, k and v.
        output_bias: of the output projection.
    """

    heads: int
    kv_heads: int
    head_dim: int
    scale: float
    rope: AnyRope | None
    rotary_dim: int | None = None
    window: int | None = None
    softcap: float | None = None
    sinks: bool = False
    bias: bool = False
    output_bias: bool = False
    qk_norm: QKNorm | None = None


@dataclass(frozen=True)
class LatentAttention:
    """Multi-head latent attention (DeepSeek-V2, 2024, section 2.1): K and V come from one latent row of a token.

    Attributes:
        q_rank: features of the compressed query; None where q is projected at once.
        kv_rank: features of the latent row.
        nope_dim, rope_dim: features of a query head without and with positions.
        value_dim: features of a value head.
        norm: of the compressed query and of the latent row.
    """

    heads: int
    q_rank: int | None
    kv_rank: int
    nope_dim: int
    rope_dim: int
    value_dim: int
    scale: float
    rope: AnyRope | None
    norm: Norm
    bias: bool = False


@dataclass(frozen=True)
class Mlp:
    """A gated MLP, or one with a single activated matrix. Activations are `silu`, `gelu` and `gelu_tanh`."""

    intermediate_size: int
    activation: str = "silu"
    gated: bool = True
    bias: bool = False


@dataclass(frozen=True)
class Experts:
    """A mixture of experts; the words are those of `plait.router` and `plait.experts`.

    Attributes:
        shared: what every token goes through too.
    """

    count: int
    per_token: int
    intermediate_size: int
    activation: str = "silu"
    scoring: str = "softmax"
    normalise: float | None = None
    scale: float | None = None
    groups: int | None = None
    groups_per_token: int | None = None
    group_score: str | None = None
    alpha: float | None = None
    limit: float | None = None
    bias: bool = False
    router_bias: bool = False
    selection_bias: bool = False
    shared: Mlp | None = None


@dataclass(frozen=True)
class Layer:
    """One block."""

    attention: Attention | LatentAttention
    mlp: Mlp | Experts


@dataclass(frozen=True)
class Names:
    """What a family calls its tensors, without `.weight` and `.bias`: those of a block stand behind `block`, in which
    `{}` is its number. A norm that a family does not have is None.

    Attributes:
        positions: the table of learned positions.
        attention_norm, mlp_norm: before attention and before the MLP; with `mlp_norm` None in a parallel block both
            read the same.
        after_attention, after_mlp: before what they make is added to the stream.
        experts: one stack of matrices for each of gate, up and down, behind this.
    """

    embedding: str = "model.embed_tokens"
    head: str = "lm_head"
    positions: str = ""
    norm: str = "model.norm"
    block: str = "model.layers.{}."
    attention_norm: str | None = "input_layernorm"
    after_attention: str | None = None
    mlp_norm: str | None = "post_attention_layernorm"
    after_mlp: str | None = None
    q: str = "self_attn.q_proj"
    k: str = "self_attn.k_proj"
    v: str = "self_attn.v_proj"
    o: str = "self_attn.o_proj"
    q_norm: str = "self_attn.q_norm"
    k_norm: str = "self_attn.k_norm"
    sinks: str = "self_attn.sinks"
    gate: str = "mlp.gate_proj"
    up: str = "mlp.up_proj"
    down: str = "mlp.down_proj"
    router: str = "mlp.gate"
    selection_bias: str = "mlp.gate.e_score_correction_bias"
    experts: str = "mlp.experts."
    shared: str = "mlp.shared_experts."


@dataclass(frozen=True)
class DecoderConfig:
    """A decoder in normal form, whatever the file called things.

    Attributes:
        norm: of the blocks and of the end.
        names: what its tensors are called.
        positions: rows of the table of learned positions; None where there is none.
        tied: the logits use the embedding's table.
        parallel: attention and MLP of a block read the same residual stream.
        embedding_scale, residual_scale, logits_scale: multipliers of the embedded tokens, of what attention and MLP
            add, and of the scores; None for none.
        rounded_scale: the embedding's multiplier is a tensor of the model's dtype, and rounded to it.
        logits_softcap: None for none.
        dtype: what the config says the weights are: float32, float16 or bfloat16; None where it does not say.
        quantisation: how weights are quantised; None where they are not.
    """

    family: str
    vocab_size: int
    hidden_size: int
    layers: tuple[Layer, ...]
    norm: Norm
    max_positions: int
    tied: bool
    dtype: str | None
    bos_token_id: int | None
    eos_token_ids: tuple[int, ...]
    names: Names = field(default=Names(), repr=False)
    positions: int | None = None
    parallel: bool = False
    embedding_scale: float | None = None
    rounded_scale: bool = False
    residual_scale: float | None = None
    logits_scale: float | None = None
    logits_softcap: float | None = None
    quantisation: Quantisation | None = None

    @property
    def embedding(self) -> str:
        """The embedding's table."""
        return f"{self.names.embedding}.weight"

    @property
    def head(self) -> str:
        """The table of the logits, where it is not the embedding's."""
        return f"{self.names.head}.weight"

    @property
    def blocks(self) -> int:
        return len(self.layers)

    def at(self, context: int) -> DecoderConfig:
        """The config for sequences up to `context` tokens: each rope is one table, and `max_positions` is as far as
        that table is right."""
        found = [layer.attention.rope for layer in self.layers]
        limits = [rope.limit(context, self.max_positions) for rope in found if isinstance(rope, RopeByContext)]
        layers = tuple(_with_rope(layer, lambda rope: rope.at(context)) for layer in self.layers)
        return replace(self, layers=layers, max_positions=min((self.max_positions, *limits)))

    @property
    def context_choices(self) -> tuple[RopeByContext, ...]:
        """Ropes whose table depends on the longest sequence."""
        found = dict.fromkeys(layer.attention.rope for layer in self.layers)
        return tuple(rope for rope in found if isinstance(rope, RopeByContext))


def _with_rope(layer: Layer, choose: Callable[[RopeByContext], Rope]) -> Layer:
    rope = layer.attention.rope
    if not isinstance(rope, RopeByContext):
        return layer
    return replace(layer, attention=replace(layer.attention, rope=choose(rope)))


def read_dtype(reader: ConfigReader) -> str | None:
    """The checkpoint's dtype, in either spelling. None where the config does not say."""
    dtype = reader.optional(reader.spelling("dtype", "torch_dtype"), str)
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
    return heads, kv_heads, head_dim or hidden_size // heads


def read_rotary_dim(reader: ConfigReader, head_dim: int, share: float = 1.0) -> int | None:
    """The features of a head that turn, of a share of them; None for all. Raises where they are no pairs."""
    rotary = int(head_dim * share) if 0 < share <= 1 else 0
    if rotary < 2 or rotary % 2:
        what = f"head_dim {head_dim}" if share == 1 else f"{share} of head_dim {head_dim}"
        raise reader.error(
            "config-value", f"{what} is odd" if rotary > 0 else what, why="rotary embeddings rotate pairs"
        )
    return None if rotary == head_dim else rotary


STACKS = ("gate_proj", "up_proj", "down_proj")
"""What stands behind `Names.experts`."""

ACTIVATIONS = {
    "silu": "silu",
    "swish": "silu",
    "gelu": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_fast": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
}
"""What configs call activations -> what the IR calls them."""


def read_activation(reader: ConfigReader, key: str = "hidden_act", known: tuple[str, ...] = ("silu",)) -> str:
    """The activation, which must be one of `known` (the IR's names)."""
    name = reader.get(key, str)
    if ACTIVATIONS.get(name) not in known:
        raise UnsupportedError(
            "config-value",
            f"{reader.source}: {key!r} is {name!r}, which is not implemented",
            why=f"{', '.join(word for word, ours in ACTIVATIONS.items() if ours in known)} is",
        )
    return ACTIVATIONS[name]


def read_eps(reader: ConfigReader, key: str = "rms_norm_eps") -> float:
    eps = reader.get(key, float)
    if eps <= 0:
        raise reader.error("config-value", f"{key!r} is {eps}, expected a positive number")
    return eps


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
                why=f"implemented: {', '.join(LAYER_TYPES)}",
            )
    return tuple(kinds)
