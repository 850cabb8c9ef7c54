"""What a family of models is to plait."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from xdsl.dialects.builtin import ModuleOp

from plait.frontend.config import DecoderConfig
from plait.frontend.config_reader import ConfigReader


@dataclass(frozen=True)
class Family:
    """A reader of configs and a builder of modules.

    Attributes:
        name: `model_type` in config.json.
        architectures: class names in config.json that mean exactly this module.
        read: takes the keys it understands.
        build: the module in a compute dtype (float32, float16, bfloat16), weights under the checkpoint's own names.
        harmless: patterns of tensors that stand in checkpoints although no op needs them, with the reason.
    """

    name: str
    architectures: tuple[str, ...]
    read: Callable[[ConfigReader], DecoderConfig]
    build: Callable[[DecoderConfig, str], ModuleOp]
    harmless: dict[str, str]
