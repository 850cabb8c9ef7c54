"""Rotary embeddings as configs spell them. There is no default theta: a wrong one gives fluent nonsense."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from plait.errors import UnsupportedError
from plait.frontend.config_reader import ConfigReader, finite
from plait.ir import Rope

FULL, SLIDING = LAYER_TYPES = ("full_attention", "sliding_attention")
"""Attention kinds that `layer_types` and nested rope parameters may name."""


@dataclass(frozen=True)
class RopeByContext(ABC):
    """A rope whose table depends on the longest sequence. transformers changes the table while a sequence grows, which
    leaves stale keys behind; plait takes one table for all, the one that is right for the longest.

    Attributes:
        original_positions: tokens up to which a sequence has the table of the pretraining.
    """

    kind: str = field(init=False)
    theta: float
    original_positions: int

    @property
    @abstractmethod
    def tables(self) -> tuple[Rope, ...]:
        """The tables that are known, that of sequences up to `original_positions` first."""

    @abstractmethod
    def beyond(self, context: int) -> Rope:
        """The table for sequences of more than `original_positions` tokens."""

    @abstractmethod
    def limit(self, context: int, max_positions: int) -> int:
        """How many tokens the table for `context` is right for."""

    def at(self, context: int) -> Rope:
        """The table for sequences up to `context` tokens."""
        return self.tables[0] if context <= self.original_positions else self.beyond(context)

    def note(self, context: int) -> str:
        """Which table was taken, for people."""
        which = "within" if context <= self.original_positions else "beyond"
        return f"the {self.kind} table is the one for sequences {which} {self.original_positions} tokens"


@dataclass(frozen=True)
class DynamicRope(RopeByContext):
    """Dynamic NTK scaling, whose theta grows with the length.

    Attributes:
        rotary_dim: features of a head that turn.
    """

    kind: str = field(default="dynamic", init=False)
    factor: float
    rotary_dim: int

    @property
    def tables(self) -> tuple[Rope, ...]:
        return (Rope(self.theta),)

    def beyond(self, context: int) -> Rope:
        # NTK-aware scaling (bloc97, 2023), as transformers' "dynamic" applies it.
        stretch = self.factor * context / self.original_positions - (self.factor - 1)
        return Rope(self.theta * stretch ** (self.rotary_dim / (self.rotary_dim - 2)))

    def limit(self, context: int, max_positions: int) -> int:
        return max(context, self.original_positions)


@dataclass(frozen=True)
class LongRope(RopeByContext):
    """LongRoPE: one table up to the pretraining's context, another beyond.

    Attributes:
        short_factors, long_factors, attention_factor: as `Rope` has them.
    """

    kind: str = field(default="longrope", init=False)
    attention_factor: float
    short_factors: tuple[float, ...]
    long_factors: tuple[float, ...]

    @property
    def tables(self) -> tuple[Rope, ...]:
        both = (self.short_factors, self.long_factors)
        return tuple(
            Rope(self.theta, "longrope", factors=factors, attention_factor=self.attention_factor) for factors in both
        )

    def beyond(self, context: int) -> Rope:
        return self.tables[1]

    def limit(self, context: int, max_positions: int) -> int:
        return self.original_positions if context <= self.original_positions else max_positions


@dataclass(frozen=True)
class RopeFacts:
    """What the rest of a config says of its ropes.

    Attributes:
        rotary_dim: features of a head that turn.
        max_positions: tokens of the longest sequence.
        original_positions: of the pretraining, where it stands outside the rope parameters; None where it does not.
        share: of a head that turns.
    """

    rotary_dim: int
    max_positions: int
    original_positions: int | None = None
    share: float = 1.0


def read_ropes(
    reader: ConfigReader,
    kinds: tuple[str, ...],
    facts: RopeFacts,
    *,
    theta_key: str = "rope_theta",
    local_theta_key: str | None = None,
    unscaled_windows: bool = False,
) -> tuple[Rope | RopeByContext, ...]:
    """The rotary embedding of each block, from any of the spellings in use.

    Flat keys `rope_theta` and `rope_scaling`; `rope_parameters` that holds both; or `rope_parameters` by layer type.

    Args:
        kinds: the attention kind of each block.
        theta_key: the flat key of theta.
        local_theta_key: the flat key of the theta of blocks with a window, which are never scaled.
        unscaled_windows: blocks with a window are never scaled by flat parameters.
    """
    theta = reader.optional(theta_key, float)
    local_theta = None if local_theta_key is None else reader.optional(local_theta_key, float)
    given = _parameters(reader)
    if not given or not all(isinstance(value, dict) for value in given.values()):
        rope = local = read_rope(reader, given, theta, facts)
        if local_theta is None and local_theta_key is not None and SLIDING in kinds:
            raise reader.error("config-key-missing", f"{local_theta_key} is missing", why=_NO_THETA)
        if local_theta is not None or unscaled_windows:
            local = Rope(rope.theta if local_theta is None else local_theta)
        return tuple(local if kind == SLIDING else rope for kind in kinds)
    if local_theta is not None:
        raise reader.error("config-conflict", f"both {local_theta_key} and rope_parameters by layer type are given")
    unknown, missing = set(given) - set(LAYER_TYPES), set(kinds) - set(given)
    if unknown or missing:
        raise reader.error(
            "config-rope", f"rope_parameters by layer type: unknown {sorted(unknown)}, missing {sorted(missing)}"
        )
    by_kind = {kind: read_rope(reader, given[kind], theta, facts) for kind in given}
    return tuple(by_kind[kind] for kind in kinds)


_NO_THETA = "it differs between models, and a wrong one gives fluent nonsense; plait has no default"


def partial_factor(reader: ConfigReader, default: float = 1.0) -> float:
    """The share of a head that turns: `partial_rotary_factor`, flat or in the rope parameters."""
    found = [reader.optional("partial_rotary_factor", float)]
    for key in ("rope_parameters", "rope_scaling"):
        inner = reader.peek(key)
        if isinstance(inner, dict):
            found.append(ConfigReader(inner, f"{reader.source}: {key}").optional("partial_rotary_factor", float))
    given = sorted({share for share in found if share is not None})
    if len(given) > 1:
        raise reader.error("config-conflict", f"partial_rotary_factor is {' and '.join(map(str, given))}")
    return given[0] if given else default


def _parameters(reader: ConfigReader) -> dict[str, Any]:
    scaling, parameters = reader.raw("rope_scaling"), reader.raw("rope_parameters")
    if scaling is not None and parameters is not None:
        raise reader.error("config-conflict", "both rope_scaling and rope_parameters are given")
    given = parameters if parameters is not None else scaling
    if given is None:
        return {}
    if not isinstance(given, dict):
        raise reader.error("config-type", f"the rope parameters are {given!r:.100}, expected an object")
    return given


def read_rope(
    reader: ConfigReader, given: dict[str, Any], outer_theta: float | None, facts: RopeFacts
) -> Rope | RopeByContext:
    """One rope from its parameters.

    Raises:
        CheckpointError: `config-*`: no theta, a parameter missing, contradicting or left over.
        UnsupportedError: `rope-unsupported`.
    """
    own = ConfigReader(given, f"{reader.source}: rope parameters", no_effect=(), fixed={})
    share = own.optional("partial_rotary_factor", float)
    if share not in (None, facts.share):
        raise own.error("config-conflict", f"partial_rotary_factor is {share}, and {facts.share} of every head turns")
    theta = own.optional("rope_theta", float)
    if theta is not None and outer_theta is not None and theta != outer_theta:
        raise reader.error("config-conflict", f"rope_theta is {outer_theta} and {theta} in the rope parameters")
    theta = outer_theta if theta is None else theta
    if theta is None:
        raise reader.error(
            "config-key-missing",
            "rope_theta is missing",
            why=_NO_THETA,
            hint='add "rope_theta": the value the model was trained with, 10000.0 for Llama 1 and 2 and Falcon',
        )
    kinds = {own.optional("rope_type", str), own.optional("type", str)} - {None}
    if len(kinds) > 1:
        raise reader.error("config-conflict", f"the rope parameters give two types: {sorted(map(str, kinds))}")
    kind = kinds.pop() if kinds else "default"
    if kind not in KINDS:
        raise UnsupportedError(
            "rope-unsupported",
            f"{reader.source}: the rope type {kind!r} is not implemented",
            why=f"implemented: {', '.join(KINDS)}",
        )
    found = KINDS[kind](own, theta, facts)
    own.finish()
    for rope in (found,) if isinstance(found, Rope) else found.tables:
        if problem := rope.problem():
            raise reader.error("config-rope", f"the rope parameters do not fit together: {problem}")
    return found


def _needed(own: ConfigReader, key: str, kind: str) -> float:
    value = own.optional(key, float)
    if value is None:
        raise own.error("config-rope", f"rope kind {kind} needs {key}")
    return value


def _original(own: ConfigReader, facts: RopeFacts) -> int:
    """The context of the pretraining: in the rope parameters, else beside them, else the longest."""
    inside, outside = own.optional_positive("original_max_position_embeddings"), facts.original_positions
    if inside is not None and outside is not None and inside != outside:
        raise own.error("config-conflict", f"the pretraining's context is {inside} here and {outside} outside")
    return inside or outside or facts.max_positions


def _default(own: ConfigReader, theta: float, facts: RopeFacts) -> Rope:
    return Rope(theta)


def _linear(own: ConfigReader, theta: float, facts: RopeFacts) -> Rope:
    return Rope(theta, "linear", factor=_needed(own, "factor", "linear"))


def _llama3(own: ConfigReader, theta: float, facts: RopeFacts) -> Rope:
    key = "original_max_position_embeddings"
    original = own.optional_positive(key)
    if original is None:
        raise own.error("config-rope", f"rope kind llama3 needs {key}")
    factor, low, high = (_needed(own, key, "llama3") for key in ("factor", "low_freq_factor", "high_freq_factor"))
    return Rope(theta, "llama3", factor, low, high, original)


def _dynamic(own: ConfigReader, theta: float, facts: RopeFacts) -> DynamicRope:
    factor = _needed(own, "factor", "dynamic")
    if factor < 1 or facts.rotary_dim < 4:
        raise own.error("config-rope", f"dynamic scaling by {factor} of {facts.rotary_dim} features means nothing")
    # transformers takes the longest context for the original one.
    return DynamicRope(theta, facts.max_positions, factor, facts.rotary_dim)


def magnitude(factor: float, mscale: float = 1.0) -> float:
    """How much YaRN grows queries and keys (Peng et al. 2023, eq. 22)."""
    return 1.0 if factor <= 1 else 0.1 * mscale * math.log(factor) + 1.0


def _yarn(own: ConfigReader, theta: float, facts: RopeFacts) -> Rope:
    factor = _needed(own, "factor", "yarn")
    given = own.optional("attention_factor", float)
    mscale, all_dim = own.optional("mscale", float), own.optional("mscale_all_dim", float)
    if given is not None:
        attention = given
    elif mscale and all_dim:
        attention = magnitude(factor, mscale) / magnitude(factor, all_dim)
    else:
        attention = magnitude(factor)
    truncate = own.optional("truncate", bool)
    fast, slow = own.optional("beta_fast", float), own.optional("beta_slow", float)
    return Rope(
        theta,
        "yarn",
        factor=factor,
        beta_fast=fast or 32.0,  # the paper's values for Llama, and transformers' defaults
        beta_slow=slow or 1.0,
        original_positions=_original(own, facts),
        truncate=1 if truncate is None else int(truncate),
        attention_factor=attention,
    )


def _longrope(own: ConfigReader, theta: float, facts: RopeFacts) -> LongRope:
    original = _original(own, facts)
    if original < 2:
        raise own.error("config-rope", f"a pretraining with {original} token means nothing")
    given, factor = own.optional("attention_factor", float), own.optional("factor", float)
    stretch = facts.max_positions / original if factor is None else factor
    if given is None:
        given = 1.0 if stretch <= 1 else math.sqrt(1 + math.log(stretch) / math.log(original))
    tables = []
    for key in ("short_factor", "long_factor"):
        factors = own.raw(key)
        right = isinstance(factors, list) and all(type(item) in (int, float) and finite(item) for item in factors)
        if not right or len(factors) != facts.rotary_dim // 2:
            raise own.error("config-rope", f"{key!r} must list {facts.rotary_dim // 2} numbers, got {factors!r:.100}")
        tables.append(tuple(map(float, factors)))
    return LongRope(theta, original, given, *tables)


KINDS: dict[str, Callable[[ConfigReader, float, RopeFacts], Rope | RopeByContext]] = {
    "default": _default,
    "linear": _linear,
    "llama3": _llama3,
    "dynamic": _dynamic,
    "yarn": _yarn,
    "longrope": _longrope,
    "su": _longrope,  # Phi-3's first name for it
}
