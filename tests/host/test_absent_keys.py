"""A key that is not there means what transformers takes it for, or is refused by name.

The configs are those that transformers writes, in its own spelling and in the flat one of the files people published
before. From each a key is taken, or set to null; transformers fills in what its class says and writes the whole config
again. plait must read the same model from both, or refuse the one that lacks the key.
"""

from __future__ import annotations

from copy import deepcopy
from dataclasses import replace
from typing import Any

import pytest

from plait.errors import PlaitError
from plait.frontend.config import DecoderConfig
from plait.frontend.families import read_config
from tests.families import FAMILIES, config_of

ALWAYS = {"model_type", "architectures"}
"""What says which config it is."""

SHAPE = {"hidden_size": 128, "num_attention_heads": 8}
"""Other heads than 4, which several classes take for the number of KV heads."""

VOCABULARY = {"vocab_size": 300_000}
"""Beyond the ends of a text that classes take where none are given."""

NEOX = {"rope_theta": "rotary_emb_base", "partial_rotary_factor": "rotary_pct"}


def written(name: str) -> dict[str, Any]:
    """config.json as transformers writes it."""
    kind = FAMILIES[name].classes[1]
    config: dict[str, Any] = config_of(name, VOCABULARY | ({} if name == "gpt2" else SHAPE)).to_dict()
    return config | {"architectures": [kind if kind.endswith("Model") else f"{kind}ForCausalLM"]}


def flat(name: str) -> dict[str, Any]:
    """The same in the spelling of transformers 4, which had no `layer_types` either."""
    config = written(name)
    ropes = config.pop("rope_parameters", None)
    if name != "ministral":  # whose kinds follow no pattern
        config.pop("layer_types", None)
    config.pop("no_rope_layers", None)
    if ropes is None:
        return config
    if "full_attention" in ropes:
        if name == "gemma3_text":
            config["rope_local_base_freq"] = ropes["sliding_attention"]["rope_theta"]
        ropes = ropes["full_attention"]
    if name == "olmo3":
        # transformers 5 reads a flat theta for the blocks without a window only: that of the published models is the
        # only one that both versions understand alike.
        ropes["rope_theta"] = 500000.0
    for key in NEOX.keys() & ropes.keys():
        config[NEOX[key] if name.startswith("gpt_neox") else key] = ropes.pop(key)
    return config | {"rope_scaling": None if ropes == {"rope_type": "default"} else ropes}


def filled(config: dict[str, Any], name: str) -> dict[str, Any] | None:
    """The whole config that transformers makes of it; None where it refuses."""
    try:
        again: dict[str, Any] = type(config_of(name, {})).from_dict(deepcopy(config)).to_dict()
    except Exception:  # whatever a class that checks its fields raises
        return None
    return again


def meaning(config: dict[str, Any] | None) -> DecoderConfig | str:
    """The model; why not, where the config is refused."""
    if config is None:
        return "transformers refuses it"
    try:
        return replace(read_config(config, "config.json"), dtype=None, bos_token_id=None, eos_token_ids=())
    except PlaitError as err:
        return err.what


@pytest.mark.parametrize("spelling", [written, flat])
@pytest.mark.parametrize("name", FAMILIES)
def test_an_absent_key_means_what_transformers_takes_it_for(name: str, spelling: Any) -> None:
    config = spelling(name)
    whole = meaning(config)
    assert isinstance(whole, DecoderConfig), whole
    assert whole == meaning(filled(config, name))
    wrong, refused = [], 0
    for key in sorted(config.keys() - ALWAYS):
        absent = {other: value for other, value in config.items() if other != key}
        for how, without in (("absent", absent), ("null", config | {key: None})):
            ours, again = meaning(without), filled(without, name)
            refused += isinstance(ours, str)
            if isinstance(ours, DecoderConfig) and again is not None and ours != meaning(again):
                wrong.append(f"{key} {how}: {meaning(again)}")
    assert not wrong, f"{name} takes for something else: {', '.join(wrong)}"
    assert refused, "no key is needed?"
