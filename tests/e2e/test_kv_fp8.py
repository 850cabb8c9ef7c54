"""KV in FP8 on every backend, against transformers with a cache that rounds what it is given.

A key that differs in the last place of float32 may be rounded to another code, so limits are parts of what the rounding
itself changes.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from tokenizers import Tokenizer
from transformers import AutoModelForCausalLM, DynamicCache

import plait
from plait.errors import UsageError
from plait.spec import from_yaml, to_yaml
from tests.checkpoints import random_ids, reference_logits, save
from tests.e2e.conftest import PROMPTS

SHAPE = {"num_attention_heads": 9, "num_key_value_heads": 3, "head_dim": 16, "hidden_size": 72}


class Rounding(DynamicCache):
    """Keys and values in e4m3fn, saturated at its largest number, and attended to as that."""

    def update(self, key_states: Any, value_states: Any, layer_idx: int, *args: Any, **kwargs: Any) -> Any:
        k, v = (x.clamp(-448, 448).to(torch.float8_e4m3fn).to(x.dtype) for x in (key_states, value_states))
        return super().update(k, v, layer_idx, *args, **kwargs)


def rounded_logits(folder: Path, texts: list[list[int]]) -> list[NDArray[np.float32]]:
    """[tokens, vocabulary] of each."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    with torch.inference_mode():
        return [model(torch.tensor([ids]), cache=Rounding(), use_cache=True).logits[0].numpy() for ids in texts]


@pytest.mark.parametrize("family", ["llama", "mistral"])
@pytest.mark.parametrize("device", ["h100", "mi300", "a100", "v5e", "cpu"])
def test_logits_are_those_of_a_rounded_cache(device: str, family: str, tmp_path: Path) -> None:
    """In two slices, in one step and in chunks; beyond the window of mistral."""
    folder = save(tmp_path / "m", family, **SHAPE, **({"sliding_window": 8} if family == "mistral" else {}))
    ids = random_ids(40)
    (expected,) = rounded_logits(folder, [ids])
    effect = np.abs(reference_logits(folder, ids) - expected).max()
    assert effect > 1e-3 * np.abs(expected).max()
    with plait.compile(folder, f"2x{device}", layers=(1, 2), kv_dtype="fp8", run={"in_process": True}) as pipe:
        assert {layout.dtype for part in pipe.manifest.slices for layout in part.kv} == {"e4m3fn"}
        for chunk in (None, 7):
            assert np.abs(pipe.logits(ids, chunk=chunk) - expected).max() < 0.05 * effect


def test_the_real_model_in_two_vendors_slices(smollm2: Path) -> None:
    """Of the two million keys and values of a long text some are rounded otherwise, and 30 blocks carry that on: in
    transformers too, float32 and float64 differ by a quarter of what rounding changes. Of short texts few are, so the
    mean is small; without rounding it would be all of it."""
    tokenizer = Tokenizer.from_file(str(smollm2 / "tokenizer.json"))
    texts = [tokenizer.encode(prompt).ids for prompt in PROMPTS]
    off = effect = 0.0
    with plait.compile(smollm2, "h100,mi300", dtype="float32", kv_dtype="fp8") as pipe:
        for ids, expected in zip(texts, rounded_logits(smollm2, texts), strict=True):
            off += np.abs(pipe.logits(ids) - expected).mean()
            effect += np.abs(reference_logits(smollm2, ids) - expected).mean()
    assert off < 0.2 * effect


def test_pages_take_a_byte_a_value_as_planned(tmp_path: Path) -> None:
    folder = save(tmp_path / "m", **SHAPE)
    found = {}
    for kv_dtype in (None, "fp8"):
        made = plait.plan(folder, "h100", dtype="bfloat16", kv_dtype=kv_dtype)
        (part,) = made.slices
        assert part.memory is not None and part.kv_tokens is not None
        found[kv_dtype] = (part.memory.kv_bytes, part.kv_tokens)
    assert found[None][0] == 2 * found["fp8"][0]
    assert found["fp8"][1] / found[None][1] == pytest.approx(2, rel=1e-3), "as many tokens again"
    with plait.compile(folder, "h100", dtype="bfloat16", kv_dtype="fp8", run={"in_process": True}) as pipe:
        assert pipe.plan.slices[0].memory is not None
        held = pipe.stats()["slices"][0]["executable"]["kv_bytes"]
        assert held == pipe.plan.slices[0].memory.kv_bytes == found["fp8"][0]


def test_a_plan_keeps_it_and_contradictions_are_refused(tmp_path: Path) -> None:
    folder = save(tmp_path / "m", **SHAPE)
    made = plait.plan(folder, "h100", kv_dtype="fp8")
    assert made.kv_dtype == "e4m3fn"
    again = plait.plan(folder, plan=from_yaml(plait.Plan, to_yaml(made)))
    assert again.kv_dtype == "e4m3fn" and again.slices[0].memory == made.slices[0].memory
    assert plait.plan(folder, plan=made, kv_dtype="fp8") == again
    plain = plait.plan(folder, "h100")
    assert plain.kv_dtype is None and "kv_dtype" not in to_yaml(plain)
    with pytest.raises(UsageError, match="KV in fp8 was asked for, the plan says float32"):
        plait.plan(folder, plan=plain, kv_dtype="fp8")
    with pytest.raises(UsageError, match="KV cannot be stored in 'f8'"):
        plait.plan(folder, "h100", kv_dtype="f8")
