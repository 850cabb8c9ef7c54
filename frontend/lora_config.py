"""adapter_config.json of PEFT, read without forgiving anything: which modules an adapter changes, and by how much.

Source: `LoraConfig` of PEFT 0.21 and the rules by which PEFT matches names to it.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from math import sqrt
from typing import Any

from plait.frontend.config_reader import ConfigReader

ALL_LINEAR = "all-linear"
"""Means every linear but that of the logits."""

_BOOKKEEPING = "says where the adapter comes from or how it was saved"
_TRAINING = "used in training only"

NO_EFFECT = {
    **dict.fromkeys(
        (*("auto_mapping", "base_model_name_or_path", "revision", "task_type", "inference_mode", "peft_version"),),
        _BOOKKEEPING,
    ),
    **dict.fromkeys(("lora_dropout", "eva_config", "corda_config", "lora_ga_config", "loftq_config"), _TRAINING),
    **dict.fromkeys(("megatron_core", "runtime_config", "qalora_group_size"), "chooses how PEFT computes"),
    "fan_in_fan_out": "says how PEFT stores the base; the product B A is (out, in) either way",
    "layers_pattern": "the name of the list of layers; plait takes the first number in a module's name",
    "ensure_weight_tying": "plait refuses to change a tied table",
}
"""Keys that change no number, with the reason."""

FIXED: dict[str, tuple[Any, ...]] = {
    "peft_type": ("LORA",),
    "bias": ("none",),
    "lora_bias": (False,),
    "use_dora": (False,),
    "use_qalora": (False,),
    "use_bdlora": (None, False),
    # What starts from a change of the base's own weights is refused: the adapter alone does not say it.
    "init_lora_weights": (True, False, None, "gaussian", "orthogonal", "eva"),
    "trainable_token_indices": (None, [], {}),
    "target_parameters": (None, []),
    "layer_replication": (None, []),
    "alora_invocation_tokens": (None,),
    **dict.fromkeys(("megatron_config", "arrow_config", "velora_config", "monteclora_config", "kasa_config"), (None,)),
}
"""Keys that change numbers, and the values that are implemented."""


@dataclass(frozen=True)
class LoraConfig:
    """What an adapter says of itself.

    Attributes:
        source: the file, for errors.
        targets: names of modules (whole, or what follows a dot), a regular expression for whole names, `all-linear`,
            or None where it does not say.
        excluded: as `targets`.
        layers: the only layers whose modules are changed; None for all.
        saved: names of modules that are replaced as a whole.
        ranks, alphas: by the end of a module's name (a regular expression); the first that matches counts.
    """

    source: str
    r: int
    alpha: float
    rslora: bool
    targets: tuple[str, ...] | str | None
    excluded: tuple[str, ...] | str
    layers: tuple[int, ...] | None
    saved: tuple[str, ...]
    ranks: Mapping[str, int]
    alphas: Mapping[str, float]

    def rank(self, module: str) -> int:
        return self.ranks[key] if (key := _matching(self.ranks, module)) is not None else self.r

    def scale(self, module: str) -> float:
        """What B A is multiplied by: alpha / r, or alpha / sqrt(r) where it is rank-stabilised (Kalajdzievski 2023)."""
        key = _matching(self.alphas, module)
        alpha, rank = self.alpha if key is None else self.alphas[key], self.rank(module)
        return alpha / (sqrt(rank) if self.rslora else rank)

    def wants(self, module: str, *, linear: bool) -> bool:
        """Whether the adapter says that it changes a matrix: `linear` is one of a block, not embedding or logits."""
        if self.targets is None or self.saves(module) or _names(self.excluded, module):
            return False
        if self.targets == ALL_LINEAR:
            return linear
        number = re.search(r"\.(\d+)\.", module)
        if self.layers is not None and (number is None or int(number[1]) not in self.layers):
            return False
        return _names(self.targets, module)

    def saves(self, module: str) -> bool:
        """Whether the module, or one that it is part of, is replaced as a whole: its name ends as one of `saved`, be
        that in the middle of a word (`norm` is `input_layernorm` too)."""
        return any(_ends(name, module) for name in self.saved)

    def unmet(self, modules: Iterable[str], changed: Iterable[str]) -> list[str]:
        """What the config lists by name, and none of the model's modules is, or none of the changed ones that are
        replaced. A listed one may be left out on purpose; see `wants`."""
        known, replaced = list(modules), list(changed)
        targets = self.targets if isinstance(self.targets, tuple) else ()
        absent = [name for name in targets if not any(_names((name,), module) for module in known)]
        return absent + [name for name in self.saved if not any(_ends(name, module) for module in replaced)]


def read_lora_config(data: dict[str, Any], source: str) -> LoraConfig:
    """Every key is used, known to be without effect, or refused.

    Raises:
        UnsupportedError: a key or a value that is not implemented, by name.
        CheckpointError: a value of the wrong type, or a key that is missing.
    """
    reader = ConfigReader(data, source, no_effect=NO_EFFECT.keys(), fixed=FIXED)
    targets = _name_list(reader, "target_modules")
    layers = reader.raw("layers_to_transform")
    listed = layers if isinstance(layers, list) else [] if layers is None else [layers]
    if not all(type(item) is int and item >= 0 for item in listed):
        raise reader.error("config-type", f"'layers_to_transform' is {layers!r:.100}, expected numbers of layers")
    saved = _name_list(reader, "modules_to_save")
    if isinstance(saved, str):
        raise reader.error("config-type", f"'modules_to_save' is {saved!r:.100}, expected a list of names")
    found = LoraConfig(
        source=source,
        r=reader.positive("r"),
        alpha=reader.get("lora_alpha", float),
        rslora=reader.flag("use_rslora"),
        targets=targets,
        excluded=_name_list(reader, "exclude_modules") or (),
        layers=tuple(listed) or None,
        saved=saved or (),
        ranks=_pattern(reader, "rank_pattern", int),
        alphas=_pattern(reader, "alpha_pattern", float),
    )
    if reader.peek("peft_type") is None:
        raise reader.error("config-key-missing", "the key 'peft_type' is missing", hint="is it an adapter of PEFT?")
    reader.finish()
    return found


def _name_list(reader: ConfigReader, key: str) -> tuple[str, ...] | str | None:
    value = reader.raw(key)
    if isinstance(value, str):
        _compiled(reader, key, value)
    elif not (value is None or (isinstance(value, list) and all(isinstance(name, str) for name in value))):
        raise reader.error("config-type", f"{key!r} is {value!r:.100}, expected a list of names")
    return tuple(value) if isinstance(value, list) else value


def _pattern(reader: ConfigReader, key: str, kind: type[int] | type[float]) -> dict[str, Any]:
    value = reader.raw(key)
    if value is None:
        return {}
    if not isinstance(value, dict):
        raise reader.error("config-type", f"{key!r} is {value!r:.100}, expected an object")
    inner = ConfigReader(value, f"{reader.source}: {key}", no_effect=(), fixed={})
    for name in value:
        _compiled(reader, key, name)
    return {name: inner.positive(name) if kind is int else inner.get(name, float) for name in value}


def _compiled(reader: ConfigReader, key: str, pattern: str) -> None:
    try:
        re.compile(pattern)
    except (re.error, RecursionError, OverflowError) as err:
        raise reader.error("config-value", f"{key!r} holds {pattern!r:.100}", why=str(err)) from err


def _matching(patterns: Iterable[str], module: str) -> str | None:
    return next((key for key in patterns if re.match(rf"(.*\.)?({key})$", module)), None)


def _ends(name: str, module: str) -> bool:
    """Whether the module, or one that it is part of, ends so."""
    return f"{name}." in f"{module}."


def _names(names: tuple[str, ...] | str, module: str) -> bool:
    """Whether a list names the module, in whole or by its end; or a regular expression, in whole."""
    if isinstance(names, str):
        return bool(names) and re.fullmatch(names, module) is not None
    return any(module == name or module.endswith(f".{name}") for name in names)
