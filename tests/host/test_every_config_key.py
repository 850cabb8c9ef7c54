"""Every key of every family's config.json is used, known to change no number, or refused by name.

The configs are those that transformers writes. Each value is changed: the module must become another one, or the
config must be refused, or the key must stand in a table of keys without effect, with its reason.
"""

from __future__ import annotations

from typing import Any

import pytest

from plait.errors import PlaitError
from plait.frontend.config_reader import NO_EFFECT
from plait.frontend.families import family, read_config
from plait.frontend.families.decoder import build_decoder
from plait.ir.dialect import print_module
from tests.families import FAMILIES, config_of

#: Keys that decide about tokens, positions or storage and not about the module.
ELSEWHERE = {
    "bos_token_id",
    "eos_token_id",
    "dtype",
    "torch_dtype",
    "max_position_embeddings",
    "n_positions",
}

#: Keys whose value another key overrules in that family's config, and which one.
OVERRULED = {
    "sliding_window_pattern": "layer_types",
    "_sliding_window_pattern": "layer_types",
    "max_window_layers": "layer_types",
    "use_sliding_window": "layer_types",
    "no_rope_layer_interval": "no_rope_layers",
    "decoder_sparse_step": "mlp_only_layers",
    "num_kv_heads": "multi_query",
    "multi_query": "new_decoder_architecture",
    "sliding_window": "layer_types",
    "intermediate_size": "mlp_only_layers",
    "num_key_value_heads": "kv_lora_rank",
    "n_group": "topk_method",
    "topk_group": "topk_method",
    "original_max_position_embeddings": "rope_parameters",
    "initial_context_length": "rope_parameters",
    "partial_rotary_factor": "rope_parameters",
    "new_decoder_architecture": "multi_query",
}


def written(name: str) -> dict[str, Any]:
    """config.json as transformers writes it."""
    config: dict[str, Any] = config_of(name, {}).to_dict()
    kind = FAMILIES[name].classes[1]
    return config | {"architectures": [kind if kind.endswith("Model") else f"{kind}ForCausalLM"]}


def module_of(config: dict[str, Any]) -> str:
    """The module and what the config says of it, as text. Raises PlaitError."""
    read = read_config(config, "config.json")
    return f"{print_module(build_decoder(read, 'float32'))} {read.tied} {read.max_positions}"


def changed(value: Any) -> list[Any]:
    """Other values of the same kind."""
    if isinstance(value, bool):
        return [not value]
    if isinstance(value, int):
        return [value + 1, value * 2, value - 1]
    if isinstance(value, float):
        return [value * 2 or 0.5, value / 2]
    if isinstance(value, str):
        return ["gelu_pytorch_tanh", "silu", f"{value}x"]
    if isinstance(value, list) and value:
        return [[value[-1], *value[:-1]], [*value[:-1], "x"], value[:-1]]
    if isinstance(value, dict) and value:
        return [dict(value, unheard_of=1)]
    return [7, 7.0, True, "x", [1, 0]]


@pytest.mark.parametrize("name", FAMILIES)
def test_every_key_counts(name: str) -> None:
    config = written(name)
    kind, first = family(config["model_type"]), module_of(config)
    silent = []
    for key in config.keys() - NO_EFFECT.keys() - kind.no_effect.keys() - ELSEWHERE:
        for value in changed(config[key]):
            try:
                again = module_of(config | {key: value})
            except PlaitError:
                break
            if again != first:
                break
        else:
            overruling = OVERRULED.get(key)
            off = config.get("use_sliding_window") is False and "sliding_window" in key
            if not off and (overruling is None or config.get(overruling) in (None, False)):
                silent.append(f"{key} = {config[key]!r}")
    assert not silent, f"{name} ignores {', '.join(silent)}"


@pytest.mark.parametrize("name", FAMILIES)
def test_every_rope_parameter_counts(name: str) -> None:
    config = written(name)
    ropes = config.get("rope_parameters") or {}
    nested = {kind: value for kind, value in ropes.items() if isinstance(value, dict)} or {"": ropes}
    first = module_of(config)
    for kind, own in nested.items():
        for key, value in own.items():
            for other in changed(value):
                parameters = own | {key: other}
                try:
                    again = module_of(config | {"rope_parameters": ropes | {kind: parameters} if kind else parameters})
                except PlaitError:
                    break
                if again != first:
                    break
            else:
                overruled = key in ("factor", "mscale", "mscale_all_dim") and "attention_factor" in own
                assert overruled or value is None, f"{name} ignores the rope parameter {kind} {key} = {value!r}"


@pytest.mark.parametrize("name", FAMILIES)
def test_an_unknown_key_is_refused_by_name(name: str) -> None:
    with pytest.raises(PlaitError) as caught:
        module_of(written(name) | {"attention_tempo": 1.5})
    assert "attention_tempo" in caught.value.what
