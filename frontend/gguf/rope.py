"""Rotary embeddings as GGUF says them: keys under `rope.`, and factors in small tensors."""

from __future__ import annotations

from collections.abc import Mapping, MutableMapping
from math import prod
from pathlib import Path
from typing import Any

import numpy as np

from plait.errors import CheckpointError, UnsupportedError
from plait.frontend.files import unreadable
from plait.frontend.rope import magnitude
from plait.spec import WeightRef

MAX_FACTORS = 4096
"""More than half a head ever has."""

FREQS, LONG, SHORT = "rope_freqs.weight", "rope_factors_long.weight", "rope_factors_short.weight"

_SCALING = "rope.scaling."
KEYS = {
    f"{_SCALING}{key}"
    for key in (
        "type", "factor", "attn_factor", "original_context_length", "finetuned",
        "yarn_ext_factor", "yarn_attn_factor", "yarn_beta_fast", "yarn_beta_slow",
    )
} | {"rope.scale_linear"}  # fmt: skip
"""Keys that `scaling` understands. `yarn_log_multiplier` is DeepSeek's alone, and means different things by version."""

FIXED: dict[str, tuple[Any, ...]] = {
    "rope.scale_linear": (1.0,),
    f"{_SCALING}yarn_ext_factor": (1.0,),
    f"{_SCALING}yarn_attn_factor": (1.0,),
}


def scaling(
    own: Mapping[str, Any], tensors: Mapping[str, tuple[float, ...]], yarn: Mapping[str, Any], source: str
) -> dict[str, Any]:
    """`rope_scaling` as config.json says it; empty for a rope that is not scaled.

    Args:
        own: the keys of the architecture, without its name in front.
        tensors: LONG and SHORT, where they are there.
        yarn: words of it that the architecture means and no key says.

    Raises:
        UnsupportedError: another kind of scaling, or one that contradicts the tensors, by name.
    """

    def said(key: str, default: Any = None) -> Any:
        return own.get(f"{_SCALING}{key}", default)

    # llama.cpp: "linear" where only a factor is given.
    kind = said("type", "linear" if said("factor") not in (None, 0.0, 1.0) else "none")
    grown, original = said("attn_factor", 1.0), said("original_context_length")
    if tensors:
        if kind not in ("none", "longrope") or tensors.keys() != {LONG, SHORT}:
            raise UnsupportedError(
                "gguf-rope", f"{source}: {', '.join(sorted(tensors))} with rope.scaling.type {kind!r:.50}"
            )
        return {
            "rope_type": "longrope",
            "long_factor": list(tensors[LONG]),
            "short_factor": list(tensors[SHORT]),
            "attention_factor": grown,
            "original_max_position_embeddings": original,
        }
    if kind == "yarn":
        # llama.cpp grows by both factors; transformers by the one given, or by the paper's.
        factor = said("factor")
        both = {} if grown == 1.0 or type(factor) is not float else {"attention_factor": grown * magnitude(factor)}
        return {
            "rope_type": "yarn",
            "factor": factor,
            "original_max_position_embeddings": original,
            "beta_fast": said("yarn_beta_fast"),
            "beta_slow": said("yarn_beta_slow"),
            **yarn,
            **both,
        }
    if kind not in ("none", "linear") or grown != 1.0:
        raise UnsupportedError(
            "gguf-rope",
            f"{source}: rope.scaling.type is {kind!r:.50} and attn_factor {grown!r:.50}",
            why="none, linear and yarn are read, and longrope with its factors in tensors",
        )
    return {} if kind == "none" else {"rope_type": "linear", "factor": said("factor")}


def take_factors(tensors: MutableMapping[str, WeightRef], source: str) -> dict[str, tuple[float, ...]]:
    """The numbers of the tensors of factors, which are no weights, and leave the map.

    Raises:
        CheckpointError: one of another shape or type, by name.
    """
    found = {}
    for name in (FREQS, LONG, SHORT):
        ref = tensors.pop(name, None)
        if ref is None:
            continue
        if len(ref.shape) != 1 or ref.encoding != "float32" or prod(ref.shape) > MAX_FACTORS:
            raise CheckpointError(
                "gguf-shape",
                f"{source}: {name!r} is {ref.encoding} of {list(ref.shape)}",
                why="rope factors are a float32 vector",
            )
        try:
            values = np.fromfile(ref.file, "<f4", count=ref.shape[0], offset=ref.offset)
        except OSError as err:
            raise unreadable(Path(ref.file), err) from err
        if not (np.isfinite(values) & (values > 0)).all():
            raise CheckpointError("gguf-rope", f"{source}: {name!r} holds a factor that is not positive")
        found[name] = tuple(map(float, values))
    return found
