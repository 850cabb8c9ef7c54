"""The real model, fetched once, and transformers' answers on it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from numpy.typing import NDArray

PROMPTS = (
    "The capital of France is",
    "def fibonacci(n):",
    "Once upon a time, in a small village by the sea, there lived",
    "Water boils at",
    "List three prime numbers:",
)
NEW_TOKENS = 64


@dataclass(frozen=True)
class Reference:
    """transformers in float32: prompts as ids, greedy continuations, logits after every token of a text."""

    prompts: list[list[int]]
    greedy: list[list[int]]
    text: list[int]
    logits: NDArray[Any]


@pytest.fixture(scope="session")
def smollm2(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """SmolLM2-135M-Instruct in Hugging Face layout; the one `make demo` fetched, if it is there."""
    from plait.pull import pull

    fetched = Path(__file__).parents[2] / "models" / "smollm2"
    return fetched if (fetched / "config.json").is_file() else pull("smollm2", tmp_path_factory.mktemp("m") / "smollm2")


@pytest.fixture(scope="session")
def reference(smollm2: Path) -> Reference:
    import tokenizers
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(smollm2, dtype=torch.float32).eval()
    tokenizer = tokenizers.Tokenizer.from_file(str(smollm2 / "tokenizer.json"))
    prompts = [tokenizer.encode(prompt).ids for prompt in PROMPTS]
    text = tokenizer.encode(" ".join(PROMPTS) + " " + LONG_TEXT).ids
    with torch.inference_mode():
        greedy = [_greedy(model, ids) for ids in prompts]
        logits = model(torch.tensor([text])).logits[0].numpy()
    return Reference(prompts, greedy, text, logits)


def _greedy(model: Any, ids: list[int]) -> list[int]:
    """transformers' own greedy decoding, the end-of-text token included."""
    import torch

    prompt = torch.tensor([ids])
    out = model.generate(
        prompt, attention_mask=torch.ones_like(prompt), do_sample=False, max_new_tokens=NEW_TOKENS, pad_token_id=0
    )
    return [int(token) for token in out[0, len(ids) :]]


LONG_TEXT = (
    "The pipeline reads a checkpoint, cuts it into slices and runs each slice where it is fastest. A page "
    "holds a fixed number of tokens of keys and values of one layer; when a sequence grows beyond it, the "
    "scheduler hands out another. Rotary embeddings turn pairs of features by an angle that grows with the "
    "position, so a mistake in the frequencies stays invisible in short prompts and ruins long ones. For that "
    "reason every comparison in this file is made far beyond the first page, and on the scores themselves "
    "rather than on text that merely looks sensible."
)
