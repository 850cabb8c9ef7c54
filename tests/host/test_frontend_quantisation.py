"""FP8 checkpoints: every key of their config used or refused, every scale with its weight, nothing left over."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from plait.backends.weights import read_weight
from plait.cost_models.catalogue import resolve
from plait.cost_models.memory import MemoryModel
from plait.cost_models.profile import at_element_bytes, profile
from plait.errors import CheckpointError, PlaitError, UnsupportedError
from plait.frontend.checkpoint import open_checkpoint
from plait.frontend.lower import lower, unused_tensors
from plait.frontend.quantisation import Quantisation
from plait.ir import weights
from plait.ir.quant import GGUF, quant_type
from plait.ir.types import QuantType, dtype_name
from plait.spec import Workload, parse_target, parts
from tests.checkpoints import FP8_LAYOUTS, dequantised, edit_config, fp8_config, save, save_fp8, save_gguf
from tests.host.test_frontend_config import LLAMA, read, refused

TYPES = {
    "tensor": QuantType.get("e4m3fn"),
    "static": QuantType.get("e4m3fn"),
    "row": QuantType.get("e4m3fn", "float32", (1, 0)),
    "block": QuantType.get("e4m3fn", "float32", (32, 48)),
}
TENSOR = "model.layers.1.mlp.down_proj.weight"


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save(tmp_path_factory.mktemp("fp8") / "m", num_hidden_layers=2, dtype="bfloat16")


def changed(folder: Path, change: Callable[[dict[str, torch.Tensor]], object]) -> Path:
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def error_of(folder: Path, kind: type[PlaitError] = CheckpointError) -> PlaitError:
    with pytest.raises(kind) as caught:
        lower(open_checkpoint(folder))
    return caught.value


@pytest.mark.parametrize("layout", FP8_LAYOUTS)
def test_weights_and_scales_are_one(layout: str, source: Path, tmp_path: Path) -> None:
    """Values are torch's; the module has the types; every byte of the file is in a part, or unused with a reason."""
    folder = save_fp8(tmp_path / "q", source, layout)
    wide = load_file(dequantised(tmp_path / "w", folder) / "model.safetensors")
    checkpoint = open_checkpoint(folder)
    assert checkpoint.dtype == "bfloat16"
    assert checkpoint.weights is not None
    module = lower(checkpoint)
    kinds = {name: op.result.type.element_type for name, op in weights(module).items()}
    for name, tensor in wide.items():
        ref = checkpoint.weights[name]
        assert np.array_equal(read_weight(ref, "float32"), tensor.float().numpy())
        if "_proj" in name:
            assert quant_type(ref) == kinds[name] == TYPES[layout]
        else:
            assert dtype_name(kinds[name]) == "bfloat16"
    unused = unused_tensors(checkpoint, module)
    assert len(unused) == (14 if layout == "static" else 0)
    assert all(name.endswith(".input_scale") and "activations" in why for name, why in unused.items())
    size = sum(part.nbytes for ref in checkpoint.weights.values() for part in parts(ref))
    ((path, (whole, _)),) = checkpoint.files.items()
    header = int.from_bytes(Path(path).read_bytes()[:8], "little")
    assert size == whole - 8 - header
    # The dtype that is asked for is that of activations and of what is not quantised.
    other = weights(lower(checkpoint, "float32"))
    assert other[TENSOR].result.type.element_type == TYPES[layout]
    assert dtype_name(other["model.norm.weight"].result.type.element_type) == "float32"


def test_a_scale_in_another_shard(source: Path, tmp_path: Path) -> None:
    folder = save_fp8(tmp_path / "q", source, "block")
    tensors = load_file(folder / "model.safetensors")
    shards = {"a.safetensors": {}, "b.safetensors": {}}
    for name, tensor in tensors.items():
        shards["b.safetensors" if name.endswith("_inv") else "a.safetensors"][name] = tensor
    for shard, held in shards.items():
        save_file(held, folder / shard, metadata={"format": "pt"})
    index = {name: shard for shard, held in shards.items() for name in held}
    (folder / "model.safetensors").unlink()
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": index}))
    checkpoint = open_checkpoint(folder)
    assert checkpoint.weights is not None
    ref = checkpoint.weights[TENSOR]
    assert [Path(part.file).name for part in parts(ref)] == ["a.safetensors", "b.safetensors"]
    lower(checkpoint)


def test_a_config_that_does_not_say_its_dtype(source: Path, tmp_path: Path) -> None:
    folder = edit_config(save_fp8(tmp_path / "q", source), torch_dtype=..., dtype=...)
    assert open_checkpoint(folder).dtype == "bfloat16"


SCALE = TENSOR + "_scale"


@pytest.mark.parametrize(
    ("layout", "change", "code", "word"),
    [
        ("tensor", lambda t: t.pop(SCALE), "scale-missing", repr(TENSOR)),
        ("block", lambda t: t.pop(SCALE + "_inv"), "scale-missing", repr(TENSOR)),
        ("static", lambda t: t.update({SCALE + "_inv": t[SCALE].clone()}), "quantisation-conflict", repr(TENSOR)),
        ("tensor", lambda t: t.update({SCALE: torch.ones(2)}), "scale-shape", repr(SCALE)),
        ("row", lambda t: t.update({SCALE: torch.ones(1)}), "scale-shape", repr(SCALE)),
        ("block", lambda t: t.update({SCALE + "_inv": torch.ones(4, 1)}), "scale-shape", "_scale_inv"),
        ("tensor", lambda t: t.update({SCALE: t[TENSOR][0, :1].clone()}), "scale-shape", repr(SCALE)),
        ("tensor", lambda t: t.update({TENSOR: t[TENSOR].bfloat16()}), "tensor-unused", repr(SCALE)),
        ("tensor", lambda t: t.update({"lm_head.weight": t[TENSOR].clone()}), "quantisation-conflict", "lm_head"),
        ("tensor", lambda t: t.update({"model.layers.0.self_attn.k_scale": torch.ones(1)}), "tensor-unused", "k_scale"),
        (
            "row",
            lambda t: t.update({TENSOR.replace("weight", "input_scale"): torch.ones(1)}),
            "tensor-unused",
            "input_",
        ),
    ],
)
def test_scales_and_weights_that_do_not_fit(
    layout: str, change: Callable[[dict[str, torch.Tensor]], object], code: str, word: str, source: Path, tmp_path: Path
) -> None:
    error = error_of(changed(save_fp8(tmp_path / "q", source, layout), change))
    assert error.code == code
    assert word in error.what


@pytest.mark.parametrize(
    "change",
    [
        lambda t: t.update({TENSOR: t[TENSOR].float().to(torch.float8_e5m2)}),
        lambda t: t.update({"model.norm.weight": t["model.norm.weight"].to(torch.float8_e4m3fn)}),
    ],
)
def test_fp8_that_is_no_e4m3fn_matrix(change: Any, source: Path, tmp_path: Path) -> None:
    error = error_of(changed(save_fp8(tmp_path / "q", source), change), UnsupportedError)
    assert error.code == "dtype-unsupported"
    assert "weight'" in error.what


def test_fp8_without_a_config_that_explains_it_and_the_other_way_round(source: Path, tmp_path: Path) -> None:
    """E48: valid numbers with another meaning."""
    folder = save_fp8(tmp_path / "q", source)
    error = error_of(edit_config(folder, quantization_config=...), UnsupportedError)
    assert error.code == "dtype-unsupported"
    assert "stored as FP8" in error.what
    plain = save(tmp_path / "p")
    assert error_of(edit_config(plain, quantization_config=fp8_config("tensor"))).code == "quantisation-conflict"


def quantisation(config: dict[str, Any]) -> Quantisation:
    found = read(LLAMA, quantization_config=config).quantisation
    assert isinstance(found, Quantisation)
    return found


def test_what_configs_say() -> None:
    assert read(LLAMA).quantisation is None
    assert read(LLAMA, quantization_config=None).quantisation is None
    assert [quantisation(fp8_config(layout)).block for layout in FP8_LAYOUTS] == [(0, 0), (1, 0), (0, 0), (32, 48)]
    assert [quantisation(fp8_config(layout)).static for layout in FP8_LAYOUTS] == [False, False, True, False]
    block = fp8_config("tensor")
    block["config_groups"]["group_0"]["weights"] |= {"strategy": "block", "block_structure": [128, 64]}
    assert quantisation(block).block == (128, 64)
    names = {"modules_to_not_convert": ["model.layers.0.mlp", "lm_head"], "quant_method": "fp8"}
    found = quantisation(names | {"ignored_layers": None, "scale_fmt": "ue8m0"})
    assert [found.skips(name) for name in ("lm_head", "model.layers.0.mlp.up_proj", "model.layers.0.mlp2")] == [1, 1, 0]
    found = quantisation(fp8_config("row") | {"ignore": ["re:.*up_proj$"]})
    assert [found.skips(f"model.layers.0.mlp.{name}") for name in ("up_proj", "up_proj2", "down_proj")] == [1, 0, 0]


def edited(layout: str, *path: str, value: Any) -> dict[str, Any]:
    config = fp8_config(layout)
    inner = config
    for key in path[:-1]:
        inner = inner[key]
    inner[path[-1]] = value
    return config


GROUP = ("config_groups", "group_0")


@pytest.mark.parametrize(
    ("layout", "path", "value", "word"),
    [
        ("block", ("quant_method",), "aqlm", "aqlm"),
        ("block", ("quant_method",), None, "None"),
        ("block", ("quant_method",), ["fp8"], "['fp8']"),
        ("block", ("activation_scheme",), "sometimes", "activation_scheme"),
        ("block", ("fmt",), "e3m4", "fmt"),
        ("block", ("weight_block_size",), [128], "weight_block_size"),
        ("block", ("weight_block_size",), [0, 128], "weight_block_size"),
        ("block", ("expert_dtype",), "fp4", "expert_dtype"),
        ("block", ("modules_to_convert",), ["lm_head"], "modules_to_convert"),
        ("block", ("modules_to_not_convert",), "lm_head", "modules_to_not_convert"),
        ("block", ("strange",), 1, "strange"),
        ("row", ("format",), "marlin-24", "format"),
        ("row", ("format",), "pack-quantized", "type"),
        ("row", ("quantization_status",), "initialized", "quantization_status"),
        ("row", ("kv_cache_scheme",), {"num_bits": 8}, "kv_cache_scheme"),
        ("row", ("sparsity_config",), {"format": "sparse-24-bitmask"}, "sparsity_config"),
        ("row", ("ignore",), ["re:("], "re:("),
        ("row", ("strange",), 1, "strange"),
        ("row", ("config_groups",), {}, "0 groups"),
        ("row", ("config_groups",), [], "config_groups"),
        ("row", (*GROUP, "targets"), ["Embedding"], "targets"),
        ("row", (*GROUP, "output_activations"), {"num_bits": 8}, "output_activations"),
        ("row", (*GROUP, "strange"), 1, "strange"),
        ("row", (*GROUP, "weights"), None, "weights"),
        ("row", (*GROUP, "weights", "num_bits"), 4, "num_bits"),
        ("row", (*GROUP, "weights", "type"), "int", "type"),
        ("row", (*GROUP, "weights", "symmetric"), False, "symmetric"),
        ("row", (*GROUP, "weights", "dynamic"), True, "dynamic"),
        ("row", (*GROUP, "weights", "strategy"), "group", "strategy"),
        ("row", (*GROUP, "weights", "strategy"), "block", "block_structure"),
        ("row", (*GROUP, "weights", "block_structure"), [1, 2], "block_structure"),
        ("row", (*GROUP, "weights", "group_size"), 128, "group_size"),
        ("row", (*GROUP, "weights", "actorder"), "group", "actorder"),
        ("row", (*GROUP, "weights", "strange"), 1, "strange"),
        ("row", (*GROUP, "input_activations", "num_bits"), 6, "num_bits"),
        ("row", (*GROUP, "input_activations", "strange"), 1, "strange"),
        ("row", (*GROUP, "input_activations"), [], "input_activations"),
    ],
)
def test_every_key_is_used_or_refused(layout: str, path: tuple[str, ...], value: Any, word: str) -> None:
    error = refused(LLAMA, quantization_config=edited(layout, *path, value=value))
    assert word in error.what
    assert "quantization_config" in error.what


def test_two_lists_that_differ() -> None:
    for keys, said in (
        (("modules_to_not_convert", "ignored_layers"), {"quant_method": "fp8"}),
        (("ignore", "exclude_modules"), {"quant_method": "modelopt", "quant_algo": "FP8"}),
    ):
        for lists in ((["a"], ["b"]), (["a"], ["a", "b"]), ([], ["b"]), (["a"], [])):
            error = refused(LLAMA, quantization_config=said | dict(zip(keys, lists, strict=True)))
            assert error.code == "config-conflict" and all(key in error.what for key in keys)
        for lists in ((["a", "b"], ["b", "a"]), (None, ["a", "b"]), (["b", "a"], None)):
            config = read(LLAMA, quantization_config=said | dict(zip(keys, lists, strict=True)))
            assert sorted(config.quantisation.skipped) == ["a", "b"]
    assert refused(LLAMA, quantization_config="fp8").code == "config-type"


def test_a_config_alone_plans_with_the_quantised_sizes(source: Path, tmp_path: Path) -> None:
    folder = save_fp8(tmp_path / "q", source, "block")
    whole, alone = (lower(open_checkpoint(path)) for path in (folder, folder / "config.json"))
    assert {name: op.result.type for name, op in weights(alone).items()} == {
        name: op.result.type for name, op in weights(whole).items()
    }


def test_memory_is_counted_as_each_backend_holds_the_weights(source: Path, tmp_path: Path) -> None:
    folder = save_fp8(tmp_path / "q", source, "row")
    checkpoint = open_checkpoint(folder)
    assert checkpoint.weights is not None
    model = profile(lower(checkpoint))
    memory = MemoryModel(model, Workload(), 16, 512)
    held = {
        name: memory.estimate(0, 2, resolve(parse_target(name))[0]).weights_bytes
        for name in ("h100", "mi300", "v5e", "cpu")
    }
    stored = sum(part.nbytes for ref in checkpoint.weights.values() for part in parts(ref))
    wide = sum(2 * int(np.prod(ref.shape)) for ref in checkpoint.weights.values())
    assert held == {"h100": stored, "mi300": stored, "v5e": wide, "cpu": wide}
    # In another dtype only what is not quantised changes.
    other = MemoryModel(at_element_bytes(model, 2.0, "float32"), Workload(), 16, 512)
    plain = sum(ref.nbytes for ref in checkpoint.weights.values() if ref.scale is None)
    assert other.estimate(0, 2, resolve(parse_target("h100"))[0]).weights_bytes == stored + plain
    assert other.estimate(0, 2, resolve(parse_target("cpu"))[0]).weights_bytes == 2 * wide


def test_gguf_blocks_stay_quantised_unless_asked(tmp_path: Path) -> None:
    path = save_gguf(tmp_path / "m.gguf", save(tmp_path / "m", num_hidden_layers=1), "Q4_1")
    checkpoint = open_checkpoint(path)
    plain, kept = lower(checkpoint, keep_blocks=False), lower(checkpoint, "bfloat16")
    assert {dtype_name(op.result.type.element_type) for op in weights(plain).values()} == {"float32"}
    for op in weights(kept).values():
        kind = op.result.type
        wanted = GGUF["Q4_1"] if len(kind.get_shape()) == 2 else None
        assert kind.element_type == wanted if wanted else dtype_name(kind.element_type) == "bfloat16"
