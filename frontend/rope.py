"""Rotary embeddings as configs spell them. There is no default theta: a wrong one gives fluent nonsense."""

from __future__ import annotations

from typing import Any

from plait.errors import UnsupportedError
from plait.frontend.config_reader import ConfigReader
from plait.ir import Rope
from plait.ir.rope import ROPE_PARAMETERS

LAYER_TYPES = ("full_attention", "sliding_attention")
"""Attention kinds that `layer_types` and nested rope parameters may name."""

_ROPE_KEYS = {
    "factor": "factor",
    "low_freq_factor": "low_freq_factor",
    "high_freq_factor": "high_freq_factor",
    "original_max_position_embeddings": "original_positions",
}
"""Key of config.json -> field of `Rope`."""

_FIXED_ROPE: dict[str, tuple[Any, ...]] = {"partial_rotary_factor": (1.0, None)}


def read_ropes(reader: ConfigReader, kinds: tuple[str, ...]) -> tuple[Rope, ...]:
    """The rotary embedding of each block, from any of the spellings in use.

    Flat keys `rope_theta` and `rope_scaling`; `rope_parameters` that holds both; or `rope_parameters` by layer type.

    Args:
        kinds: the attention kind of each block.
    """
    theta = reader.optional("rope_theta", float)
    scaling, parameters = reader.raw("rope_scaling"), reader.raw("rope_parameters")
    if scaling is not None and parameters is not None:
        raise reader.error("config-conflict", "both rope_scaling and rope_parameters are given")
    given = parameters if parameters is not None else scaling
    if given is None:
        given = {}
    if not isinstance(given, dict):
        raise reader.error("config-type", f"the rope parameters are {given!r:.100}, expected an object")
    if not given or not all(isinstance(value, dict) for value in given.values()):
        return (_rope(reader, given, theta),) * len(kinds)
    unknown, missing = set(given) - set(LAYER_TYPES), set(kinds) - set(given)
    if unknown or missing:
        raise reader.error(
            "config-rope", f"rope_parameters by layer type: unknown {sorted(unknown)}, missing {sorted(missing)}"
        )
    by_kind = {kind: _rope(reader, given[kind], theta) for kind in given}
    return tuple(by_kind[kind] for kind in kinds)


def _rope(reader: ConfigReader, given: dict[str, Any], outer_theta: float | None) -> Rope:
    own = ConfigReader(given, f"{reader.source}: rope parameters", no_effect=(), fixed=_FIXED_ROPE)
    theta = own.optional("rope_theta", float)
    if theta is not None and outer_theta is not None and theta != outer_theta:
        raise reader.error("config-conflict", f"rope_theta is {outer_theta} and {theta} in the rope parameters")
    theta = outer_theta if theta is None else theta
    if theta is None:
        raise reader.error(
            "config-key-missing",
            "rope_theta is missing",
            why="it differs between models, and a wrong one gives fluent nonsense; plait has no default",
            hint='add "rope_theta": the value the model was trained with, 10000.0 for Llama 1 and 2',
        )
    kinds = {own.optional("rope_type", str), own.optional("type", str)} - {None}
    if len(kinds) > 1:
        raise reader.error("config-conflict", f"the rope parameters give two types: {sorted(map(str, kinds))}")
    kind = kinds.pop() if kinds else "default"
    if kind not in ROPE_PARAMETERS:
        raise UnsupportedError(
            "rope-unsupported",
            f"{reader.source}: the rope type {kind!r} is not implemented",
            why=f"implemented: {', '.join(ROPE_PARAMETERS)}",
        )
    values: dict[str, Any] = {
        field: own.optional_positive(key) if field == "original_positions" else own.optional(key, float)
        for key, field in _ROPE_KEYS.items()
    }
    own.finish()
    rope = Rope(theta, kind, **values)  # type: ignore[arg-type]  # held against ROPE_PARAMETERS above
    if problem := rope.problem():
        raise reader.error("config-rope", f"the rope parameters do not fit together: {problem}")
    return rope
