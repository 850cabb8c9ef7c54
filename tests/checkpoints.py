"""Tiny random checkpoints made with transformers' own classes, and what transformers says about them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from plait.spec import Piece, Rows
from tests.families import VOCABULARY, config_of, draw, model_class
from tests.gguf_files import save_gguf as save_gguf

CHAT_TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}<|{{ message['role'] }}|>{{ message['content'] }}{{ eos_token }}"
    "{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


def pairs(heads: int, rows: int) -> Rows:
    """Rope pairs in each head, as GGUF's llama has them."""
    return Rows(heads, rows // heads, (Piece(0, rows // heads, pairs=True),))


def save(
    folder: Path,
    family: str = "llama",
    *,
    seed: int = 0,
    dtype: str = "float32",
    max_shard_size: str = "1GB",
    tokenizer: bool = False,
    **config: Any,
) -> Path:
    """Write a random checkpoint of `family` as transformers saves it. Returns the folder.

    Args:
        dtype: of the stored weights.
        max_shard_size: `"100KB"` gives shards and an index.
        tokenizer: write a byte-level tokenizer and a chat template too.
        config: overrides of `tests.families`, in transformers' words.
    """
    import torch

    model = model_class(family)(config_of(family, config))
    draw(model, family, seed)
    model = model.to(getattr(torch, dtype))
    model.save_pretrained(folder, max_shard_size=max_shard_size)
    if tokenizer:
        save_tokenizer(folder)
    return folder


FP8_MAX = 448.0
FP8_LAYOUTS = ("tensor", "row", "static", "block")


def save_fp8(folder: Path, source: Path, layout: str = "tensor", block: tuple[int, int] = (32, 48)) -> Path:
    """The checkpoint in `source` with its linears in e4m3fn, as the tools that make such files lay them out. Made with
    torch alone. Returns the folder.

    Args:
        layout: `tensor` or `row` (compressed-tensors), `static` (one scale each, and one of activations), or `block`
            (DeepSeek's), with the last blocks cut short where `block` does not divide the matrix.
    """
    import torch
    from safetensors.torch import load_file, save_file

    made = {}
    for name, tensor in load_file(source / "model.safetensors").items():
        if "_proj.weight" not in name:
            made[name] = tensor
            continue
        rows, columns = {"row": (1, tensor.shape[1]), "block": block}.get(layout, tuple(tensor.shape))
        scale = torch.stack(
            [
                torch.stack([part.abs().max() / FP8_MAX for part in band.split(columns, 1)])
                for band in tensor.float().split(rows)
            ]
        )
        wide = scale.repeat_interleave(rows, 0)[: tensor.shape[0]].repeat_interleave(columns, 1)[:, : tensor.shape[1]]
        made[name] = (tensor.float() / wide).clamp(-FP8_MAX, FP8_MAX).to(torch.float8_e4m3fn)
        module = name.removesuffix(".weight")
        made[f"{module}.weight_scale{'_inv' if layout == 'block' else ''}"] = (
            scale.reshape(1) if layout in ("tensor", "static") else scale
        )
        if layout == "static":
            made[f"{module}.input_scale"] = torch.ones(1)
    folder.mkdir(parents=True)
    save_file(made, folder / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((source / "config.json").read_text()) | {"quantization_config": fp8_config(layout, block)}
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def fp8_config(layout: str, block: tuple[int, int] = (32, 48)) -> dict[str, Any]:
    """`quantization_config`, with the keys that published checkpoints have."""
    if layout == "block":
        return {
            "activation_scheme": "dynamic",
            "fmt": "e4m3",
            "quant_method": "fp8",
            "weight_block_size": list(block),
        }
    if layout == "static":
        return {"activation_scheme": "static", "ignored_layers": ["lm_head"], "quant_method": "fp8"}
    kind = {"num_bits": 8, "type": "float", "symmetric": True, "group_size": None, "block_structure": None}
    kind |= {"actorder": None, "observer_kwargs": {}}
    activations = {"dynamic": True, "strategy": "token", "observer": None}
    weights = {"dynamic": False, "strategy": "channel" if layout == "row" else "tensor", "observer": "minmax"}
    group = {"input_activations": kind | activations, "output_activations": None, "targets": ["Linear"]}
    return {
        "config_groups": {"group_0": group | {"weights": kind | weights}},
        "format": "float-quantized",
        "global_compression_ratio": 1.5,
        "ignore": ["lm_head"],
        "kv_cache_scheme": None,
        "quant_method": "compressed-tensors",
        "quantization_status": "compressed",
        "sparsity_config": {},
        "transform_config": {},
        "version": "0.12.2",
    }


def dequantised(folder: Path, source: Path) -> Path:
    """What the FP8 checkpoint in `source` means, without any quantisation, computed by torch. Returns the folder."""
    import torch
    from safetensors.torch import load_file, save_file

    config = json.loads((source / "config.json").read_text())
    block = config.pop("quantization_config").get("weight_block_size")
    stored = load_file(source / "model.safetensors")
    made = {}
    for name, tensor in stored.items():
        scale = stored.get(f"{name}_scale", stored.get(f"{name}_scale_inv"))
        if scale is None:
            if not name.endswith(("_scale", "_scale_inv")):
                made[name] = tensor
            continue
        if block is None:
            made[name] = tensor.float() * scale.float()
            continue
        made[name] = torch.empty(tensor.shape)
        for i, j in np.ndindex(*scale.shape):
            part = slice(i * block[0], (i + 1) * block[0]), slice(j * block[1], (j + 1) * block[1])
            made[name][part] = tensor[part].float() * scale[i, j].float()
    folder.mkdir(parents=True)
    save_file(made, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def reference_logits(folder: Path, ids: list[int], dtype: str = "float32") -> NDArray[np.float32]:
    """[len(ids), vocabulary] float32: the scores after every token, by transformers computing in `dtype`."""
    import torch

    with torch.no_grad():
        logits = reference_model(folder).to(getattr(torch, dtype))(torch.tensor([ids])).logits[0]
    return np.asarray(logits.float().numpy(), np.float32)


def reference_model(folder: Path) -> Any:
    """transformers' model of a folder, in float32 with eager attention."""
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager")
    return model.eval()


def random_ids(count: int, seed: int = 0, vocabulary: int = VOCABULARY) -> list[int]:
    return [int(token) for token in np.random.default_rng(seed).integers(2, vocabulary, count)]


def edit_config(folder: Path, **changes: Any) -> Path:
    """Change config.json in place; a value of `...` removes the key. Returns the folder."""
    path = folder / "config.json"
    config = json.loads(path.read_text()) | changes
    path.write_text(json.dumps({key: value for key, value in config.items() if value is not ...}))
    return folder


def save_tokenizer(folder: Path) -> Path:
    """A byte-level tokenizer of 264 tokens (ids 0 to 3 special, 4 to 259 bytes, then merges) with a chat template.

    It adds BOS (id 0) in front, as Llama's does.
    """
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors

    special = ["<s>", "</s>", "<|user|>", "<|assistant|>"]
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    merges = [("h", "e"), ("l", "l"), ("he", "ll"), ("hell", "o")]
    tokens = special + alphabet + ["".join(pair) for pair in merges]
    tokenizer = Tokenizer(models.BPE(vocab={token: index for index, token in enumerate(tokens)}, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in special])
    tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {"bos_token": "<s>", "eos_token": "</s>", "chat_template": CHAT_TEMPLATE}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return folder
