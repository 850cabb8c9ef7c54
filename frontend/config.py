"""config.json read without forgiving anything: every key is used, known to change no number, or refused by name.

A family takes the keys it understands from a `ConfigReader`; whatever nobody took, and no table explains, is an error.
So the list of understood keys cannot drift from the code that understands them.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

from plait.errors import CheckpointError, UnsupportedError, did_you_mean
from plait.frontend.files import MAX_DIM, some
from plait.ir import Rope
from plait.ir.rope import ROPE_PARAMETERS
from plait.ir.types import DTYPES

T = TypeVar("T", int, float, bool, str)

_GENERATION = "chooses tokens, not logits; generation_config.json is where plait reads it"
_TRAINING = "used in training only"
_BOOKKEEPING = "says where the file comes from or how it was saved"
_OUTPUT = "chooses what transformers returns"

NO_EFFECT: dict[str, str] = {
    **dict.fromkeys(("_name_or_path", "name_or_path", "transformers_version", "transformers.js_config"), _BOOKKEEPING),
    **dict.fromkeys(("is_llama_config", "tokenizer_class", "torchscript", "tf_legacy_loss"), _BOOKKEEPING),
    **dict.fromkeys(("id2label", "label2id", "problem_type", "finetuning_task", "task_specific_params"), _BOOKKEEPING),
    **dict.fromkeys(("attention_dropout", "hidden_dropout", "resid_pdrop", "initializer_range"), _TRAINING),
    **dict.fromkeys(("gradient_checkpointing", "use_bfloat16"), _TRAINING),
    **dict.fromkeys(("return_dict", "output_attentions", "output_hidden_states", "use_return_dict"), _OUTPUT),
    **dict.fromkeys(("use_cache", "cache_implementation"), "plait always keeps a KV cache"),
    **dict.fromkeys(("_attn_implementation", "attn_implementation"), "names one of several equal implementations"),
    "_attn_implementation_autoset": "names one of several equal implementations",
    "pretraining_tp": "splits matrices, which changes the order of sums only",
    "chunk_size_feed_forward": "cuts the batch into chunks that do not see each other",
    "is_decoder": "plait builds decoders only",
    "pad_token_id": "plait's batches are ragged and have no padding",
    **dict.fromkeys(("sep_token_id", "decoder_start_token_id", "prefix", "suppress_tokens"), _GENERATION),
    **dict.fromkeys(("begin_suppress_tokens", "forced_bos_token_id", "forced_eos_token_id"), _GENERATION),
    **dict.fromkeys(
        ("do_sample", "temperature", "top_k", "top_p", "typical_p", "max_length", "min_length"), _GENERATION
    ),
    **dict.fromkeys(
        ("num_beams", "num_beam_groups", "diversity_penalty", "early_stopping", "bad_words_ids"), _GENERATION
    ),
    **dict.fromkeys(("length_penalty", "repetition_penalty", "no_repeat_ngram_size", "output_scores"), _GENERATION),
    **dict.fromkeys(("encoder_no_repeat_ngram_size", "num_return_sequences"), _GENERATION),
    **dict.fromkeys(
        ("exponential_decay_length_penalty", "remove_invalid_values", "return_dict_in_generate"), _GENERATION
    ),
}
"""Keys that change no logit, with the reason."""

FIXED: dict[str, tuple[Any, ...]] = {
    "hidden_act": ("silu",),
    "is_encoder_decoder": (False,),
    "add_cross_attention": (False,),
    "cross_attention_hidden_size": (None,),
    "tie_encoder_decoder": (False,),
    "pruned_heads": ({}, None),
    "rope_interleaved": (False,),
    "use_mrope": (False,),
    "partial_rotary_factor": (1.0, None),
    "quantization_config": (None,),
}
"""Keys that change numbers, and the values that plait implements. Anything else is refused by name."""

_ROPE_KEYS = {
    "factor": "factor",
    "low_freq_factor": "low_freq_factor",
    "high_freq_factor": "high_freq_factor",
    "original_max_position_embeddings": "original_positions",
}
"""Key of config.json -> field of `Rope`."""

_FIXED_ROPE: dict[str, tuple[Any, ...]] = {"partial_rotary_factor": (1.0, None)}

LAYER_TYPES = ("full_attention", "sliding_attention")


@dataclass(frozen=True)
class DecoderConfig:
    """A decoder of the Llama family in normal form, whatever the file called things.

    Attributes:
        ropes: the rotary embedding of each block.
        windows: the attention window of each block in tokens, None for full: key j is visible while i - j < window.
        tied: the logits use the embedding's table.
        dtype: what the config says the weights are: float32, float16 or bfloat16; None where it does not say.
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

    def __post_init__(self) -> None:
        assert len(self.ropes) == len(self.windows) == self.blocks


class ConfigReader:
    """Keys taken one by one, with their types checked; `finish` refuses what is left.

    Args:
        source: what errors call the file.
        no_effect: keys to pass over.
        fixed: keys that must hold one of these values if they are there.
    """

    def __init__(
        self,
        data: dict[str, Any],
        source: str,
        *,
        no_effect: Collection[str] = NO_EFFECT.keys(),
        fixed: Mapping[str, tuple[Any, ...]] = FIXED,
    ) -> None:
        self.source = source
        self._data = dict(data)
        self._no_effect, self._fixed = no_effect, fixed
        self._known = {*no_effect, *fixed}

    def error(self, code: str, what: str, why: str = "", hint: str = "") -> CheckpointError:
        return CheckpointError(code, f"{self.source}: {what}", why=why, hint=hint)

    def raw(self, key: str) -> Any:
        """Any value; None where the key is absent or null."""
        self._known.add(key)
        return self._data.pop(key, None)

    def optional(self, key: str, kind: type[T]) -> T | None:
        """A value of `kind`, or None where the key is absent or null."""
        return self._typed(key, self.raw(key), kind)

    def get(self, key: str, kind: type[T]) -> T:
        """A value of `kind`. Absent or null is an error: plait has no defaults for what changes numbers."""
        value = self.optional(key, kind)
        if value is None:
            raise self.error("config-key-missing", f"the key {key!r} is missing", hint=f'add "{key}" to the config')
        return value

    def has(self, key: str) -> bool:
        """Whether the key is there, be it null."""
        self._known.add(key)
        return key in self._data

    def positive(self, key: str) -> int:
        return self._positive(key, self.get(key, int))

    def optional_positive(self, key: str) -> int | None:
        value = self.optional(key, int)
        return None if value is None else self._positive(key, value)

    def flag(self, key: str) -> bool:
        """A switch that is off where absent: every family's own default."""
        return bool(self.optional(key, bool))

    def token_ids(self, key: str) -> tuple[int, ...]:
        """One id, a list of them, or none."""
        value = self.raw(key)
        ids = [] if value is None else value if isinstance(value, list) else [value]
        if not all(type(item) is int and item >= 0 for item in ids):
            raise self.error("config-type", f"{key!r} is {value!r:.100}, expected token ids")
        return tuple(ids)

    def finish(self) -> None:
        """Refuse values that are not implemented and keys that nobody understands."""
        for key, allowed in self._fixed.items():
            if key in self._data and (value := self._data.pop(key)) not in allowed:
                raise self._refuse(key, value, allowed)
        unknown = [key for key in self._data if key not in self._no_effect]
        if unknown:
            raise UnsupportedError(
                "config-key-unknown",
                f"{self.source} has keys that plait does not understand: {some(unknown)}",
                why="a key that is ignored can change numbers in silence",
                hint=did_you_mean(unknown[0], self._known) or "remove the key if it has no effect on the model",
            )

    def _refuse(self, key: str, value: Any, allowed: tuple[Any, ...]) -> UnsupportedError:
        method = (
            value.get("quant_method", "unnamed") if key == "quantization_config" and isinstance(value, dict) else None
        )
        shown = f"method {method!r}" if method else repr(value)[:100]
        return UnsupportedError(
            "config-value",
            f"{self.source}: {key!r} is {shown}, which is not implemented",
            why=f"implemented: {' or '.join(map(repr, allowed))}",
            hint="use the unquantised checkpoint, or a GGUF file in Q4_0, Q4_1 or Q8_0" if method else "",
        )

    def _typed(self, key: str, value: Any, kind: type[T]) -> T | None:
        if value is None:
            return None
        # JSON has one kind of number: 10000 is a fine float. True is no number here, though Python says so.
        accepted = (int, float) if kind is float else (kind,)
        if type(value) not in accepted or (kind is float and not _finite(value)):
            raise self.error("config-type", f"{key!r} is {value!r:.100}, expected a {_KIND_NAMES[kind]}")
        typed: T = kind(value)
        return typed

    def _positive(self, key: str, value: int) -> int:
        if not 1 <= value <= MAX_DIM:
            raise self.error("config-value", f"{key!r} is {value}, expected a positive number")
        return value


def _finite(value: float) -> bool:
    try:
        return math.isfinite(value)
    except OverflowError:  # a whole number too large for a float
        return False


_KIND_NAMES: dict[type, str] = {int: "whole number", float: "finite number", bool: "true or false", str: "string"}


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
