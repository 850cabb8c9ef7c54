"""Whole tiny models, built with `Builder`, run by the oracle, against transformers on the same random weights."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    PreTrainedModel,
    Qwen2Config,
    Qwen2ForCausalLM,
)

from plait.ir import Rope
from tests.ir_models import Feed, Shape, Weights, build, in_chunks, random_weights, run

PAGE, WINDOW, ORIGINAL, LENGTH = 4, 8, 16, 40
"""Every test runs 40 tokens: beyond the page, the window and the rope's original length."""

BASE = Shape(blocks=3, hidden=24, heads=6, kv_heads=2, head_dim=8, ffn=40, vocabulary=50, eps=1e-5)

LLAMA3 = {
    "rope_type": "llama3", "rope_theta": 1000.0, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": ORIGINAL,
}  # fmt: skip


@dataclass(frozen=True)
class Case:
    """Our shape, and the same in transformers' words."""

    shape: Shape
    family: type[PreTrainedModel] = LlamaForCausalLM
    rope: tuple[tuple[str, Any], ...] = (("rope_type", "default"), ("rope_theta", 10000.0))


CASES: dict[str, Case] = {
    "llama": Case(BASE),
    "untied": Case(replace(BASE, tied=False)),
    "gqa-1": Case(replace(BASE, heads=4, kv_heads=4)),
    "gqa-8": Case(replace(BASE, heads=8, kv_heads=1)),
    "wide-heads": Case(replace(BASE, heads=4, kv_heads=2, head_dim=16)),
    "mistral-window": Case(replace(BASE, windows=(WINDOW,), tied=False), MistralForCausalLM),
    "qwen2-bias": Case(replace(BASE, bias=True, heads=3, kv_heads=1), Qwen2ForCausalLM),
    "llama3-rope": Case(
        replace(BASE, ropes=(Rope(1000.0, "llama3", 8.0, 1.0, 4.0, ORIGINAL),)), rope=tuple(LLAMA3.items())
    ),
    "linear-rope": Case(
        replace(BASE, ropes=(Rope(1000.0, "linear", 4.0),)),
        rope=(("rope_type", "linear"), ("rope_theta", 1000.0), ("factor", 4.0)),
    ),
    "theta": Case(replace(BASE, ropes=(Rope(500.0),)), rope=(("rope_type", "default"), ("rope_theta", 500.0))),
    "eps": Case(replace(BASE, eps=0.1)),
}

CONFIGS = {LlamaForCausalLM: LlamaConfig, MistralForCausalLM: MistralConfig, Qwen2ForCausalLM: Qwen2Config}


def theirs(case: Case, tensors: Weights, prompts: Sequence[NDArray[np.int32]]) -> list[NDArray[np.float32]]:
    """transformers' logits, each prompt alone, in float32."""
    shape = case.shape
    own: dict[str, Any] = {"head_dim": shape.head_dim}
    if case.family is MistralForCausalLM:
        own["sliding_window"] = shape.windows[0]
    config = CONFIGS[case.family](
        vocab_size=shape.vocabulary,
        hidden_size=shape.hidden,
        intermediate_size=shape.ffn,
        num_hidden_layers=shape.blocks,
        num_attention_heads=shape.heads,
        num_key_value_heads=shape.kv_heads,
        rms_norm_eps=shape.eps,
        max_position_embeddings=128,
        tie_word_embeddings=shape.tied,
        rope_parameters=dict(case.rope),
        attn_implementation="eager",
        **own,
    )
    model = case.family(config).eval()
    state = {name: torch.from_numpy(np.asarray(value, np.float32)) for name, value in tensors.items()}
    if shape.tied:
        state["lm_head.weight"] = state["model.embed_tokens.weight"]
    model.load_state_dict(state, strict=True)
    with torch.no_grad():
        return [model(torch.from_numpy(p).long()[None]).logits[0].numpy() for p in prompts]


def prompts(shape: Shape) -> list[NDArray[np.int32]]:
    return Feed({}, (LENGTH, 13), vocabulary=shape.vocabulary, seed=5).tokens


def ours(shape: Shape, tensors: Weights, step: int) -> list[NDArray[np.float64]]:
    lengths = (LENGTH, 13)
    options = {"page_tokens": PAGE, "max_step_tokens": step, "vocabulary": shape.vocabulary, "seed": 5}
    return run([build(shape)], tensors, lengths, in_chunks(lengths, step), **options)


def weights_of(shape: Shape) -> Weights:
    """Norms near one and matrices wide enough that attention is far from uniform."""
    tensors = random_weights(build(shape), seed=11)
    return {n: (v + 1 if "norm" in n else v).astype(np.float32) for n, v in tensors.items()}


def error(got: Sequence[NDArray[Any]], want: Sequence[NDArray[Any]]) -> float:
    """The largest difference, relative to the largest logit."""
    return max(float(np.abs(g - w).max() / np.abs(w).max()) for g, w in zip(got, want, strict=True))


@pytest.mark.parametrize("name", CASES)
def test_logits_are_transformers(name: str) -> None:
    case = CASES[name]
    tensors = weights_of(case.shape)
    want = theirs(case, tensors, prompts(case.shape))
    assert error(ours(case.shape, tensors, LENGTH), want) < 1e-5
    assert error(ours(case.shape, tensors, 7), want) < 1e-5, "in chunks of 7"


WRONG: dict[str, tuple[str, Shape]] = {
    "the window one longer": ("mistral-window", replace(CASES["mistral-window"].shape, windows=(WINDOW + 1,))),
    "the window one shorter": ("mistral-window", replace(CASES["mistral-window"].shape, windows=(WINDOW - 1,))),
    "the window in one block missing": (
        "mistral-window",
        replace(CASES["mistral-window"].shape, windows=(WINDOW, None, WINDOW)),
    ),
    "llama3 rope dropped": ("llama3-rope", replace(BASE, ropes=(Rope(1000.0),))),
    "llama3 original length": ("llama3-rope", replace(BASE, ropes=(Rope(1000.0, "llama3", 8.0, 1.0, 4.0, 32),))),
    "llama3 read as linear": ("llama3-rope", replace(BASE, ropes=(Rope(1000.0, "linear", 8.0),))),
    "linear factor": ("linear-rope", replace(BASE, ropes=(Rope(1000.0, "linear", 3.9),))),
    "theta at its usual value": ("theta", replace(BASE, ropes=(Rope(10000.0),))),
    "eps at its usual value": ("eps", BASE),
    "a soft-cap nobody asked for": ("llama", replace(BASE, softcap=20.0)),
}


@pytest.mark.parametrize("what", WRONG)
def test_a_wrong_attribute_shows(what: str) -> None:
    """The cases above would fail by a hundred tolerances: each of these mistakes is silent otherwise."""
    name, shape = WRONG[what]
    case = CASES[name]
    tensors = weights_of(case.shape)
    assert error(ours(shape, tensors, LENGTH), theirs(case, tensors, prompts(case.shape))) > 1e-3
