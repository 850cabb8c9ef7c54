"""LoRA adapters as PEFT lays them out, and the checkpoint they mean: merged by torch, by the definition."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.checkpoints import edit_config

CONFIG: dict[str, Any] = {
    "alora_invocation_tokens": None,
    "alpha_pattern": {},
    "arrow_config": None,
    "auto_mapping": None,
    "base_model_name_or_path": "some/model",
    "bias": "none",
    "corda_config": None,
    "ensure_weight_tying": False,
    "eva_config": None,
    "exclude_modules": None,
    "fan_in_fan_out": False,
    "inference_mode": True,
    "init_lora_weights": True,
    "layer_replication": None,
    "layers_pattern": None,
    "layers_to_transform": None,
    "loftq_config": {},
    "lora_alpha": 8,
    "lora_bias": False,
    "lora_dropout": 0.1,
    "megatron_config": None,
    "megatron_core": "megatron.core",
    "modules_to_save": None,
    "peft_type": "LORA",
    "peft_version": "0.21.2",
    "qalora_group_size": 16,
    "r": 4,
    "rank_pattern": {},
    "revision": None,
    "target_modules": ["q_proj", "v_proj", "down_proj"],
    "target_parameters": None,
    "task_type": "CAUSAL_LM",
    "trainable_token_indices": None,
    "use_dora": False,
    "use_qalora": False,
    "use_rslora": False,
}
"""What PEFT 0.21 writes, key by key."""

Change = Callable[[dict[str, Any]], None]


def save_adapter(
    folder: Path,
    source: Path,
    *,
    seed: int = 0,
    ranks: dict[str, int] | None = None,
    conv1d: bool = False,
    **config: Any,
) -> Path:
    """A random adapter for the checkpoint in `source`. Returns the folder.

    Args:
        ranks: the rank of modules by the end of their names, where it is not `r`.
        conv1d: matrices are stored as (in, out), as GPT-2's are.
        config: overrides of CONFIG; `target_modules` is a list of ends of names.
    """
    import torch
    from safetensors.torch import load_file, save_file

    said = CONFIG | config
    generator = torch.Generator().manual_seed(seed)
    made = {}
    for name, tensor in load_file(source / "model.safetensors").items():
        module = name.removesuffix(".weight")
        if any(module.endswith(end) for end in said["modules_to_save"] or ()):
            made[f"base_model.model.{name}"] = torch.randn(tensor.shape, generator=generator) * 0.2
        elif any(module.endswith(end) for end in said["target_modules"]):
            rank = next((rank for end, rank in (ranks or {}).items() if module.endswith(end)), said["r"])
            out, into = tensor.shape[::-1] if conv1d else tensor.shape
            embedding = "embed" in name
            shapes = ((rank, out), (into, rank)) if embedding else ((rank, into), (out, rank))
            for side, shape in zip("AB", shapes, strict=True):
                part = f"lora_embedding_{side}" if embedding else f"lora_{side}.weight"
                made[f"base_model.model.{module}.{part}"] = torch.randn(shape, generator=generator) * 0.2
    folder.mkdir(parents=True, exist_ok=True)
    save_file(made, folder / "adapter_model.safetensors", metadata={"format": "pt"})
    (folder / "adapter_config.json").write_text(json.dumps(said))
    return folder


def edit_adapter(folder: Path, change: Change | None = None, **config: Any) -> Path:
    """Change the tensors of an adapter in place, and keys of its config; a value of `...` removes the key."""
    from safetensors.torch import load_file, save_file

    file, said = folder / "adapter_model.safetensors", folder / "adapter_config.json"
    tensors = load_file(file)
    if change is not None:
        change(tensors)
        save_file(tensors, file, metadata={"format": "pt"})
    data = json.loads(said.read_text()) | config
    said.write_text(json.dumps({key: value for key, value in data.items() if value is not ...}))
    return folder


def merged(folder: Path, source: Path, *steps: tuple[Path, Callable[[str], float]], conv1d: bool = False) -> Path:
    """The checkpoint in `source` with adapters added to its weights in float32, saved in float32. Returns the folder.

    Args:
        steps: an adapter each, with the factor of B A by the module's name.
    """
    import torch
    from safetensors.torch import load_file, save_file

    tensors = {name: tensor.float() for name, tensor in load_file(source / "model.safetensors").items()}
    for adapter, scale in steps:
        stored = load_file(adapter / "adapter_model.safetensors")
        plain = {name.removeprefix("base_model.model."): tensor.float() for name, tensor in stored.items()}
        for name, a in plain.items():
            module, part, _ = re.split(r"\.(lora_A|lora_embedding_A)", name + ".lora_A")[:3]
            if module == name:
                if "lora_" not in name:
                    tensors[name] = a
                continue
            b = plain[name.replace("lora_A", "lora_B").replace("embedding_A", "embedding_B")]
            product = torch.matmul(b.double(), a.double()) * scale(module)
            whole = tensors[f"{module}.weight"]
            flat = "embedding" in part or (conv1d and whole.shape != product.shape)
            tensors[f"{module}.weight"] = (whole.double() + (product.T if flat else product)).float()
    folder.mkdir(parents=True)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "config.json").write_text((source / "config.json").read_text())
    return edit_config(folder, dtype="float32")
