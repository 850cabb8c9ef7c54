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

T = TypeVar("T", int, float, bool, str)

_GENERATION = "chooses tokens, not logits; whoever sends a prompt says how"
_TRAINING = "used in training only"
_BOOKKEEPING = "says where the file comes from or how it was saved"
_OUTPUT = "chooses what transformers returns"
_IMPLEMENTATION = "names one of several equal implementations"

_WITHOUT_EFFECT = {
    _BOOKKEEPING: """_name_or_path name_or_path transformers_version transformers.js_config is_llama_config
        tokenizer_class torchscript tf_legacy_loss id2label label2id problem_type finetuning_task task_specific_params
        unsloth_fixed unsloth_version""",
    _TRAINING: """attention_dropout hidden_dropout resid_pdrop embd_pdrop attn_pdrop
        router_aux_loss_coef router_jitter_noise initializer_range gradient_checkpointing use_bfloat16
        max_sequence_length""",
    _OUTPUT: "return_dict output_router_logits output_attentions output_hidden_states use_return_dict",
    _IMPLEMENTATION: "_attn_implementation attn_implementation _attn_implementation_autoset",
    _GENERATION: """sep_token_id decoder_start_token_id prefix suppress_tokens begin_suppress_tokens forced_bos_token_id
        forced_eos_token_id do_sample temperature top_k top_p typical_p max_length min_length num_beams num_beam_groups
        diversity_penalty early_stopping bad_words_ids length_penalty repetition_penalty no_repeat_ngram_size
        output_scores encoder_no_repeat_ngram_size num_return_sequences exponential_decay_length_penalty
        remove_invalid_values return_dict_in_generate""",
    "plait always keeps a KV cache": "use_cache cache_implementation",
    "it splits matrices, which changes the order of sums only": "pretraining_tp",
    "it cuts the batch into chunks that do not see each other": "chunk_size_feed_forward",
    "plait builds decoders only": "is_decoder",
    "it names code of the model's repository, which plait does not run": "auto_map",
    "plait's batches are ragged and have no padding; it is only checked": "pad_token_id",
}

NO_EFFECT = {key: reason for reason, keys in _WITHOUT_EFFECT.items() for key in keys.split()}
"""Keys that change no logit, with the reason."""

FIXED: dict[str, tuple[Any, ...]] = {
    "is_encoder_decoder": (False,),
    "add_cross_attention": (False,),
    "cross_attention_hidden_size": (None,),
    "tie_encoder_decoder": (False,),
    "pruned_heads": ({}, None),
    "rope_interleaved": (False,),
    "use_mrope": (False,),
}
"""Keys that change numbers, and the values that plait implements. Anything else is refused by name."""


PADDING = "pad_token_id"
"""-1 for none, in the first configs of Llama."""

ENDS = ("bos_token_id", "eos_token_id", PADDING)


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
        self._data, self._taken = data, set[str]()
        self._no_effect, self._fixed = set(no_effect), dict(fixed)

    def allow(self, no_effect: Collection[str], fixed: Mapping[str, tuple[Any, ...]]) -> None:
        """More keys to pass over, and to hold to these values."""
        self._no_effect |= set(no_effect)
        self._fixed |= fixed

    def error(self, code: str, what: str, why: str = "", hint: str = "") -> CheckpointError:
        return CheckpointError(code, f"{self.source}: {what}", why=why, hint=hint)

    def raw(self, key: str) -> Any:
        """Any value; None where the key is absent or null."""
        self._taken.add(key)
        return self._data.get(key)

    def peek(self, key: str) -> Any:
        """Any value, which somebody else takes."""
        return self._data.get(key)

    def optional(self, key: str, kind: type[T]) -> T | None:
        """A value of `kind`, or None where the key is absent or null."""
        return self._typed(key, self.raw(key), kind)

    def get(self, key: str, kind: type[T]) -> T:
        """A value of `kind`. Absent or null is an error: plait has no defaults for what changes numbers."""
        value = self.optional(key, kind)
        if value is None:
            raise self._missing(key)
        return value

    def has(self, key: str) -> bool:
        """Whether the key is there, be it null."""
        self._taken.add(key)
        return key in self._data

    def need(self, keys: Collection[str]) -> None:
        """Refuse a config that lacks one of the keys; null is there."""
        for key in keys:
            if key not in self._data:
                raise self._missing(key)

    def positive(self, key: str) -> int:
        return self._positive(key, self.get(key, int))

    def optional_positive(self, key: str) -> int | None:
        value = self.optional(key, int)
        return None if value is None else self._positive(key, value)

    def positive_number(self, key: str) -> float:
        value = self.optional_positive_number(key)
        if value is None:
            raise self._missing(key)
        return value

    def optional_positive_number(self, key: str) -> float | None:
        """A number above 0; None where the key is absent or null. Zero is no way to say "off"."""
        value = self.optional(key, float)
        if value is not None and value <= 0:
            raise self.error("config-value", f"{key!r} is {value}, expected a positive number")
        return value

    def spelling(self, *keys: str) -> str:
        """Which of several spellings of one key is there; the first where none is. Where more are, they must agree."""
        there = [key for key in keys if self.raw(key) is not None]
        if any(self._data[key] != self._data[there[0]] for key in there):
            raise self.error("config-conflict", " and ".join(f"{key} is {self._data[key]!r:.50}" for key in there))
        return there[0] if there else keys[0]

    def count(self, key: str) -> int:
        """A number of things, perhaps 0; 0 where the key is absent or null."""
        value = self.optional(key, int) or 0
        if value < 0:
            raise self.error("config-value", f"{key!r} is {value}, expected 0 or more")
        return value

    def flag(self, key: str) -> bool:
        """A switch that is off where absent: every family's own default."""
        return bool(self.optional(key, bool))

    def ends(self, vocabulary: int) -> Ends:
        """The tokens that begin, end and fill a text; see `read_ends`."""
        return read_ends({key: self.raw(key) for key in ENDS}, self.source, vocabulary)

    def finish(self) -> None:
        """Refuse values that are not implemented and keys that nobody understands."""
        for key, allowed in self._fixed.items():
            if key in self._data and key not in self._taken and self._data[key] not in allowed:
                raise self._refuse(key, self._data[key], allowed)
        known = self._taken | self._no_effect | self._fixed.keys()
        unknown = [key for key in self._data if key not in known]
        if unknown:
            raise UnsupportedError(
                "config-key-unknown",
                f"{self.source} has keys that plait does not understand: {some(unknown)}",
                why="a key that is ignored can change numbers in silence",
                hint=did_you_mean(unknown[0], known) or "remove the key if it has no effect on the model",
            )

    def _missing(self, key: str) -> CheckpointError:
        return self.error("config-key-missing", f"the key {key!r} is missing", hint=f'add "{key}" to the config')

    def _refuse(self, key: str, value: Any, allowed: tuple[Any, ...]) -> UnsupportedError:
        return UnsupportedError(
            "config-value",
            f"{self.source}: {key!r} is {value!r:.100}, which is not implemented",
            why=f"implemented: {' or '.join(map(repr, allowed))}",
        )

    def _typed(self, key: str, value: Any, kind: type[T]) -> T | None:
        if value is None:
            return None
        # JSON has one kind of number: 10000 is a fine float. True is no number here, though Python says so.
        accepted = (int, float) if kind is float else (kind,)
        if type(value) not in accepted or (kind is float and not finite(value)):
            raise self.error("config-type", f"{key!r} is {value!r:.100}, expected {_KIND_NAMES[kind]}")
        typed: T = kind(value)
        return typed

    def _positive(self, key: str, value: int) -> int:
        if not 1 <= value <= MAX_DIM:
            expected = "a positive number" if value < 1 else f"at most {MAX_DIM}"
            raise self.error("config-value", f"{key!r} is {value}, expected {expected}")
        return value


@dataclass(frozen=True)
class Ends:
    """Tokens that begin and end a text."""

    bos: int | None
    eos: tuple[int, ...]


def read_ends(data: Mapping[str, Any], source: str, vocabulary: int) -> Ends:
    """What the keys of `ENDS` say, as config.json and generation_config.json have them.

    Raises:
        CheckpointError: as `token_ids`, naming `source` and the key; of padding too, though plait has none.
    """
    said = {key: None if key == PADDING and data.get(key) == -1 else data.get(key) for key in ENDS}
    bos, eos, _ = (token_ids(value, f"{source}: {key!r}", vocabulary) for key, value in said.items())
    return Ends(bos[0] if bos else None, eos)


def token_ids(value: Any, what: str, vocabulary: int) -> tuple[int, ...]:
    """One id, a list of them, or none.

    Raises:
        CheckpointError: naming `what`: `config-type`, or `config-value` for an id that is not below `vocabulary`.
    """
    ids = [] if value is None else value if isinstance(value, list) else [value]
    if not all(type(item) is int and item >= 0 for item in ids):
        raise CheckpointError("config-type", f"{what} is {value!r:.100}, expected token ids")
    if beyond := [item for item in ids if item >= vocabulary]:
        raise CheckpointError(
            "config-value",
            f"{what} is {value!r:.100}, and the vocabulary ends before {beyond[0]}",
            why=f"its tokens are 0 to {vocabulary - 1}",
            hint="does the file belong to this model?",
        )
    return tuple(dict.fromkeys(ids))


def finite(value: float) -> bool:
    """Whether a float can hold the number."""
    try:
        return math.isfinite(value)
    except OverflowError:  # a whole number too large for a float
        return False


_KIND_NAMES: dict[type, str] = {
    int: "a whole number",
    float: "a finite number",
    bool: "true or false",
    str: "a string",
}
