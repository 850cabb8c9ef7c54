"""What a family of models is to plait."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from plait.frontend.config import DecoderConfig
from plait.frontend.config_reader import ConfigReader
from plait.frontend.views import View


def _no_views(config: DecoderConfig) -> dict[str, View]:
    return {}


def _nothing(config: DecoderConfig) -> dict[str, str]:
    return {}


_INV_FREQ = r"(model|gpt_neox)\.(layers\.\d+\.(self_attn|attention)\.)?rotary_emb\.inv_freq"
_MASK = r"(transformer\.h\.\d+\.attn|gpt_neox\.layers\.\d+\.attention)\.(bias|masked_bias)"
HARMLESS = {
    _INV_FREQ: "rotary frequencies, which the config states too",
    _MASK: "the causal mask, which every decoder has",
}
"""Patterns of tensors that stand in checkpoints although no op needs them, with the reason."""


@dataclass(frozen=True)
class Family:
    """A reader of configs.

    Attributes:
        name: `model_type` in config.json.
        architectures: class names in config.json that mean exactly this module.
        read: takes the keys it understands.
        prefix: of all names; some checkpoints leave it out.
        views: the weights that are not stored under `DecoderConfig.names`.
        unneeded: the same as `HARMLESS`, where it depends on the config.
        no_effect: keys that change no number in this family, with the reason.
        fixed: keys that must hold one of these values if they are there.
        needed: keys that may be null but not absent: the family's own class has a number for them then, and plait has
            none.
    """

    name: str
    architectures: tuple[str, ...]
    read: Callable[[ConfigReader], DecoderConfig]
    prefix: str = ""
    views: Callable[[DecoderConfig], dict[str, View]] = _no_views
    unneeded: Callable[[DecoderConfig], dict[str, str]] = _nothing
    no_effect: Mapping[str, str] = field(default_factory=dict)
    fixed: Mapping[str, tuple[object, ...]] = field(default_factory=dict)
    needed: tuple[str, ...] = ()
