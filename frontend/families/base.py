"""What a family of models is to plait: what its config says, and what it calls its tensors."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from plait.frontend.config import DecoderConfig
from plait.frontend.config_reader import ConfigReader
from plait.frontend.views import View


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


LLAMA = Names()
"""Llama's, which most families took over."""


def _no_views(config: DecoderConfig) -> dict[str, View]:
    return {}


HARMLESS = {
    r"model\.(layers\.\d+\.self_attn\.)?rotary_emb\.inv_freq": "rotary frequencies, which the config states too",
}


@dataclass(frozen=True)
class Family:
    """A reader of configs, and the names of tensors.

    Attributes:
        name: `model_type` in config.json.
        architectures: class names in config.json that mean exactly this module.
        read: takes the keys it understands.
        names: of the module's weights.
        views: the weights that are not stored under these names.
        harmless: patterns of tensors that stand in checkpoints although no op needs them, with the reason.
        no_effect: keys that change no number in this family, with the reason.
        fixed: keys that must hold one of these values if they are there.
    """

    name: str
    architectures: tuple[str, ...]
    read: Callable[[ConfigReader], DecoderConfig]
    names: Names = LLAMA
    views: Callable[[DecoderConfig], dict[str, View]] = _no_views
    harmless: Mapping[str, str] = field(default_factory=lambda: HARMLESS)
    no_effect: Mapping[str, str] = field(default_factory=dict)
    fixed: Mapping[str, tuple[object, ...]] = field(default_factory=dict)

    @property
    def embedding(self) -> str:
        """The embedding's table."""
        return f"{self.names.embedding}.weight"

    @property
    def head(self) -> str:
        """The table of the logits, where it is not the embedding's."""
        return f"{self.names.head}.weight"
