"""Calibration on a real model: scales that a text chose keep a real block's products closer on another text."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

import plait
from tests.checkpoints import reference_model
from tests.e2e.conftest import LONG_TEXT, PROMPTS

CALIBRATION = (
    "Why is the sky blue? Light of short waves is scattered more than that of long ones, so what reaches us from all "
    "sides is blue. In the evening the way through the air is longer, most of the blue is gone, and the sun looks red. "
    "A recipe for bread: mix flour, water, salt and yeast, let the dough rise for two hours, bake it at 220 degrees. "
    "def add(a, b):\n    return a + b\n\nThe train from Lyon to Paris takes two hours; it leaves at 8:04 and 9:04. "
)


@pytest.fixture(scope="module")
def one_block(smollm2: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """SmolLM2 with nothing but its first block."""
    folder = tmp_path_factory.mktemp("one") / "smollm2"
    folder.mkdir()
    with safe_open(smollm2 / "model.safetensors", "pt") as file:
        kept = [name for name in file.keys() if ".layers." not in name or ".layers.0." in name]  # noqa: SIM118
        save_file(
            {name: file.get_tensor(name) for name in kept}, folder / "model.safetensors", metadata={"format": "pt"}
        )
    config = json.loads((smollm2 / "config.json").read_text()) | {"num_hidden_layers": 1}
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "tokenizer.json").write_bytes((smollm2 / "tokenizer.json").read_bytes())
    return folder


def products(model: Any, ids: list[int], weights: dict[str, Any]) -> float:
    """Sum over linears of |x (W - own W)|^2 / |x W|^2, with the inputs x that transformers' linears have on `ids`."""
    total = []

    def hook(name: str) -> Any:
        def add(module: Any, given: Any) -> None:
            (x,) = given
            own, given_to = module.weight, x.flatten(0, 1)
            error = given_to @ (weights[f"{name}.weight"] - own).T
            total.append(float(error.square().sum() / (given_to @ own.T).square().sum()))

        return add

    hooks = [
        module.register_forward_pre_hook(hook(name))
        for name, module in model.named_modules()
        if f"{name}.weight" in weights
    ]
    with torch.no_grad():
        model(torch.tensor([ids]))
    for held in hooks:
        held.remove()
    assert len(total) == len(weights) == 7
    return sum(total)


def dequantised(folder: Path) -> dict[str, Any]:
    """The 4-bit weights that compile wrote, read by torch."""
    tensors = load_file(folder / "slices" / "0-cpu" / "changed.safetensors")
    found = {}
    for name in (name for name in tensors if f"{name}_scale" in tensors):
        packed, scale = tensors[name].int(), tensors[f"{name}_scale"]
        codes = torch.stack([packed & 15, packed >> 4], -1).flatten(1) - 8
        found[name] = codes * scale.repeat_interleave(codes.shape[1] // scale.shape[1], 1)
    return found


def test_scales_that_a_text_chose_are_better_on_another_text(one_block: Path, tmp_path: Path) -> None:
    text = tmp_path / "text.txt"
    text.write_text(CALIBRATION)
    for name, options in (("plain", {}), ("calibrated", {"calibrate": text})):
        plait.compile_artifact(one_block, "cpu", output=tmp_path / name, quantize="int4", **options)
    report = json.loads((tmp_path / "calibrated/slices/0-cpu/report.json").read_text())
    for name, facts in report["quantized"].items():
        assert facts["output"] < 0.98 * facts["output_rounded"], name
    import tokenizers

    ids = tokenizers.Tokenizer.from_file(str(one_block / "tokenizer.json")).encode(" ".join(PROMPTS) + LONG_TEXT).ids
    model = reference_model(one_block)
    plain, calibrated = (products(model, ids, dequantised(tmp_path / name)) for name in ("plain", "calibrated"))
    assert calibrated < 0.9 * plain
    # What the report says of the plain codes is what they come to, as far as inputs are uncorrelated.
    assert 0.3 < plain / sum(facts["output_rounded"] ** 2 for facts in report["quantized"].values()) < 3


@pytest.mark.slow
def test_a_quantised_model_still_answers(smollm2: Path, tmp_path: Path) -> None:
    kinds = {"h100": "fp8", "mi300": "int8"}
    made = plait.compile_artifact(smollm2, "h100,mi300", output=tmp_path / "m.plait", quantize=kinds)
    with plait.open(made, in_process=True) as pipe:
        assert "Paris" in pipe.generate("The capital of France is", max_tokens=8)
    assert all(item.memory and item.memory.weights_bytes < 200e6 for item in made.plan.slices)
