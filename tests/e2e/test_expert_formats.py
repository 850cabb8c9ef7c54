"""Experts and latent attention in the formats they are published in, whole models against transformers."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

import plait
from tests.checkpoints import dequantised, edit_config, fp8_config, random_ids, reference_logits, save
from tests.quantised_checkpoints import e2m1, halves, spread

DEVICES = ["cpu", pytest.param("h100", marks=pytest.mark.slow), pytest.param("v5e", marks=pytest.mark.slow)]
COUNT, LIMIT = 40, 1e-5
PER_TENSOR = {"activation_scheme": "dynamic", "quant_method": "fp8"}


def copied(source: Path, folder: Path, tensors: dict[str, torch.Tensor]) -> Path:
    folder.mkdir(parents=True)
    (folder / "config.json").write_text((source / "config.json").read_text())
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, folder / "model.safetensors")
    return folder


def logits_agree(folder: Path, expected: np.ndarray, device: str) -> None:
    ids = random_ids(COUNT)
    with plait.compile(folder, f"2x{device}", layers=(1, 1), run={"in_process": True}) as pipe:
        for given in ({}, {"chunk": 7}):
            assert np.abs(pipe.logits(ids, **given) - expected).max() < LIMIT * np.abs(expected).max()


@pytest.mark.parametrize("device", DEVICES)
def test_gpt_oss_with_experts_in_mxfp4(device: str, tmp_path: Path) -> None:
    """`*_blocks` and `*_scales` with gate and up row by row; beside them biases, which stay as they are."""
    source = save(tmp_path / "m", "gpt_oss", intermediate_size=64)
    codes, values = {}, {}
    for name, tensor in load_file(source / "model.safetensors").items():
        if not name.endswith(("gate_up_proj", "down_proj")):
            codes[name] = values[name] = tensor
            continue
        rows = tensor.transpose(1, 2)  # (experts, out, in)
        flat = rows.reshape(-1, rows.shape[2])
        exponent = flat.reshape(len(flat), -1, 32).abs().amax(2).log2().floor() - 2
        real = spread(2.0**exponent, flat)
        code, numbers = e2m1((flat / real).clamp(-6, 6))
        codes[f"{name}_blocks"] = halves(code).reshape(*rows.shape[:2], -1, 16)
        codes[f"{name}_scales"] = (exponent + 127).to(torch.uint8).reshape(*rows.shape[:2], -1)
        values[name] = (numbers * real).reshape(rows.shape).transpose(1, 2)
    wide = copied(source, tmp_path / "wide", values)
    quantised = edit_config(
        copied(source, tmp_path / "q", codes),
        quantization_config={
            "quant_method": "mxfp4",
            "modules_to_not_convert": ["model.layers.*.self_attn", "model.layers.*.mlp.router", "lm_head"],
        },
    )
    logits_agree(quantised, reference_logits(wide, random_ids(COUNT)), device)


@pytest.mark.parametrize("block", [(32, 48), None], ids=["blocks", "tensor"])
@pytest.mark.parametrize("device", DEVICES)
def test_deepseek_in_fp8(device: str, block: tuple[int, int] | None, tmp_path: Path) -> None:
    """Rows of one block stand in two heads: each row takes the scale of the block that it is in."""
    source = save(tmp_path / "m", "deepseek_v3", num_hidden_layers=2)
    made = {}
    for name, tensor in load_file(source / "model.safetensors").items():
        if "_proj" not in name:
            made[name] = tensor
            continue
        rows, columns = block or tuple(tensor.shape)
        scale = torch.empty(-(-tensor.shape[0] // rows), -(-tensor.shape[1] // columns))
        code = torch.empty(tensor.shape, dtype=torch.float8_e4m3fn)
        for i, j in np.ndindex(*scale.shape):
            part = slice(i * rows, (i + 1) * rows), slice(j * columns, (j + 1) * columns)
            scale[i, j] = tensor[part].abs().max() / 448
            code[part] = (tensor[part] / scale[i, j]).to(torch.float8_e4m3fn)
        made[name] = code
        made[f"{name}_scale_inv" if block else f"{name}_scale"] = scale if block else scale.reshape(1)
    quantised = copied(source, tmp_path / "q", made)
    edit_config(quantised, quantization_config=fp8_config("block", block) if block else PER_TENSOR)
    wide = dequantised(tmp_path / "wide", quantised)
    logits_agree(quantised, reference_logits(wide, random_ids(COUNT)), device)
