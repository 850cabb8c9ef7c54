"""What quantisers write: every key of a config used or refused, every tensor with its weight, contradictions named.

FP8 in e4m3fn is in test_frontend_quantisation.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from copy import deepcopy
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

import plait
from plait.assemble.scales import check_scales
from plait.backends.quantised import read_quantised
from plait.backends.weights import read_weight
from plait.errors import CheckpointError, PlaitError, UnsupportedError
from plait.frontend.checkpoint import open_checkpoint
from plait.frontend.lower import lower, unused_tensors
from plait.frontend.quantisation import METHODS, join_scales
from plait.frontend.quantisation.mxfp4 import Mxfp4
from plait.frontend.safetensors import read_file
from plait.frontend.views import View, apply
from plait.ir import weights
from plait.ir.quant import quant_type
from plait.ir.types import QuantType
from plait.spec import Piece, Rows, parts
from tests.checkpoints import edit_config, save
from tests.host.test_frontend_config import LLAMA, read, refused
from tests.quantised_checkpoints import FORMATS, e2m1, halves, save_quantised

Folders = dict[str, tuple[Path, Path]]
"""Each format, and what it means."""

MODULE = "model.layers.0.mlp.down_proj"
TYPES = {
    "gptq": QuantType.get("u4", "float16", (1, 32), zero="float16"),
    "gptq-v2": QuantType.get("u4", "float16", (1, 32), zero="float16"),
    "gptq-8": QuantType.get("u8", "float16", (1, 32), zero="float16"),
    "gptq-rows": QuantType.get("u4", "float16", (1, 0), zero="float16"),
    "gptq-order": QuantType.get("u4", "float16", (1, 32), zero="float16", ordered=True),
    "awq": QuantType.get("u4", "float16", (1, 32), zero="float16"),
    "nf4": QuantType.get("nf4", "float32", (1, 64)),
    "nf4-nested": QuantType.get("nf4", "float32", (1, 64)),
    "bnb-int8": QuantType.get("i8", "float32", (1, 0)),
    "int8-channel": QuantType.get("i8", "float32", (1, 0)),
    "int8-zeros": QuantType.get("i8", "bfloat16", (1, 32), zero="float16"),
    "pack-4": QuantType.get("u4", "bfloat16", (1, 32), zero=8),
    "pack-8": QuantType.get("u8", "bfloat16", (1, 0), zero=128),
    "pack-zeros": QuantType.get("u4", "float16", (1, 32), zero="float16"),
    "pack-order": QuantType.get("u4", "bfloat16", (1, 32), zero=8, ordered=True),
    "nvfp4": QuantType.get("e2m1", "e4m3fn", (1, 16), outer=True),
    "mxfp4": QuantType.get("e2m1", "e8m0", (1, 32)),
    "modelopt-nvfp4": QuantType.get("e2m1", "e4m3fn", (1, 16), outer=True),
    "modelopt-fp8": QuantType.get("e4m3fn"),
    "e5m2-tensor": QuantType.get("e5m2"),
    "e5m2-block": QuantType.get("e5m2", "float32", (48, 32)),
}


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Folders:
    """Each format, and what it means."""
    root = tmp_path_factory.mktemp("formats")
    source = save(root / "m", num_hidden_layers=1, head_dim=16, intermediate_size=128)
    made = {}
    for form in FORMATS:
        wide = root / f"{form}-wide"
        made[form] = save_quantised(root / form, wide, source, form), wide
    return made


def tensors_of(folder: Path) -> dict[str, torch.Tensor]:
    found: dict[str, torch.Tensor] = load_file(folder / "model.safetensors")
    return found


def changed(folders: Folders, form: str, at: Path, change: Callable[[dict[str, torch.Tensor]], object]) -> Path:
    """A copy whose tensors are changed."""
    tensors = tensors_of(folders[form][0])
    change(tensors)
    at.mkdir()
    save_file(tensors, at / "model.safetensors", metadata={"format": "pt"})
    (at / "config.json").write_text((folders[form][0] / "config.json").read_text())
    return at


def error_of(folder: Path, kind: type[PlaitError]) -> PlaitError:
    with pytest.raises(kind) as caught:
        lower(open_checkpoint(folder))
    return caught.value


@pytest.mark.parametrize("form", FORMATS)
def test_weights_are_what_the_definition_says(form: str, folders: Folders) -> None:
    """Values, types in the module, and every byte of the file in a part of a weight, or unused with a reason."""
    folder, wide = folders[form]
    checkpoint = open_checkpoint(folder)
    assert checkpoint.weights is not None
    module = lower(checkpoint)
    types = {name: op.result.type.element_type for name, op in weights(module).items()}
    for name, tensor in tensors_of(wide).items():
        ref = checkpoint.weights[name]
        got, expected = read_weight(ref, "float32"), tensor.numpy()
        assert np.abs(got - expected).max() <= 2e-6 * np.abs(expected).max()
        if "_proj" in name:
            assert types[name] == quant_type(ref) == TYPES[form]
            held = read_quantised(ref)
            assert held.kind == TYPES[form]
            assert np.abs(held.values() - expected).max() <= 2e-6 * np.abs(expected).max()
    unused = unused_tensors(checkpoint, module)
    stored = read_file(folder / "model.safetensors").weights
    taken = {part.offset for name in types for part in parts(checkpoint.weights[name])}
    assert {name for name, ref in stored.items() if ref.offset not in taken} == unused.keys()
    assert all(unused.values())


@pytest.mark.parametrize("form", FORMATS)
def test_a_config_alone_says_the_types(form: str, folders: Folders) -> None:
    """But the dtype of scales, which is taken to be the largest there is."""
    module = lower(open_checkpoint(folders[form][0] / "config.json"))
    kinds = {name: op.result.type.element_type for name, op in weights(module).items() if "_proj" in name}
    (kind,) = set(kinds.values())
    assert isinstance(kind, QuantType)
    wanted = TYPES[form]
    assert (kind.code, kind.block, kind.has_outer, kind.is_ordered) == (
        (wanted.code, wanted.block, wanted.has_outer, wanted.is_ordered)
    )
    assert kind.zero == wanted.zero
    for shape in ((64, 64), (32, 128)):
        assert kind.bytes_of(shape) >= wanted.bytes_of(shape)


#: For each format: the tensor without which codes mean nothing.
SCALES = {
    "gptq": "scales",
    "gptq-8": "qzeros",
    "gptq-order": "g_idx",
    "awq": "qzeros",
    "nf4": "weight.absmax",
    "nf4-nested": "weight.nested_absmax",
    "bnb-int8": "SCB",
    "int8-channel": "weight_scale",
    "int8-zeros": "weight_zero_point",
    "pack-4": "weight_scale",
    "pack-zeros": "weight_zero_point",
    "pack-order": "weight_g_idx",
    "nvfp4": "weight_global_scale",
    "mxfp4": "weight_scale",
    "modelopt-nvfp4": "weight_scale_2",
    "modelopt-fp8": "weight_scale",
    "e5m2-tensor": "weight_scale",
    "e5m2-block": "weight_scale_inv",
}


@pytest.mark.parametrize(("form", "suffix"), SCALES.items())
def test_codes_without_their_scale(form: str, suffix: str, folders: Folders, tmp_path: Path) -> None:
    name = f"{MODULE}.{suffix}"
    error = error_of(changed(folders, form, tmp_path / "q", lambda t: t.pop(name)), CheckpointError)
    assert error.code == "scale-missing"
    assert MODULE in error.what
    assert name in (error.why or "")


@pytest.mark.parametrize(("form", "suffix"), SCALES.items())
def test_a_scale_of_another_shape(form: str, suffix: str, folders: Folders, tmp_path: Path) -> None:
    name = f"{MODULE}.{suffix}"
    longer = changed(
        folders, form, tmp_path / "q", lambda t: t.update({name: torch.cat([t[name].reshape(-1)] * 3)[None].clone()})
    )
    error = error_of(longer, CheckpointError)
    assert error.code == "scale-shape"
    assert name in error.what


#: For each format: the floats that codes are multiplied by.
FACTORS = {
    "gptq": "scales",
    "awq": "scales",
    "nf4": "weight.absmax",
    "nf4-nested": "weight.nested_absmax",
    "bnb-int8": "SCB",
    "int8-channel": "weight_scale",
    "pack-4": "weight_scale",
    "nvfp4": "weight_global_scale",
    "modelopt-nvfp4": "weight_scale_2",
    "modelopt-fp8": "weight_scale",
    "e5m2-block": "weight_scale_inv",
}


@pytest.mark.parametrize("bad", [0.0, float("nan"), float("inf")])
@pytest.mark.parametrize(("form", "suffix"), [*FACTORS.items(), ("nvfp4", "weight_scale"), ("mxfp4", "weight_scale")])
def test_a_scale_that_is_zero_or_no_number(
    form: str, suffix: str, bad: float, folders: Folders, tmp_path: Path
) -> None:
    """Found at compile, and when the weight is read. A power of two is never 0, and FP8 has no infinity."""
    name = f"{MODULE}.{suffix}"

    def damage(tensors: dict[str, torch.Tensor]) -> None:
        if tensors[name].dtype == torch.uint8:
            tensors[name].view(-1)[-1] = 255
        else:
            tensors[name].view(-1)[-1] = bad
            if bad == float("inf") and tensors[name].dtype == torch.float8_e4m3fn:
                tensors[name].view(torch.uint8).view(-1)[-1] = 0x7F  # torch saturates

    checkpoint = open_checkpoint(changed(folders, form, tmp_path / "q", damage))
    assert checkpoint.weights is not None
    ref = checkpoint.weights[f"{MODULE}.weight"]
    stored = checkpoint.weights.values()
    for reader in (lambda: check_scales(stored), lambda: read_weight(ref, "float32"), lambda: read_quantised(ref)):
        with pytest.raises(CheckpointError) as caught:
            reader()
        assert caught.value.code == "weight-scale"
        assert name in caught.value.what


def test_compile_reads_scales_and_leaves_nothing(folders: Folders, tmp_path: Path) -> None:
    """Up to a bound, the smallest first; what is beyond it is said in the plan. A plan alone reads none."""
    name = f"{MODULE}.scales"
    bad = changed(folders, "gptq", tmp_path / "q", lambda t: t[name].view(-1).__setitem__(-1, float("nan")))
    with pytest.raises(CheckpointError, match=rf"{name}.* holds nan"):
        plait.compile_artifact(bad, "cpu", output=tmp_path / "a.plait")
    assert not (tmp_path / "a.plait").exists() and plait.plan(bad, "cpu", context=64).notes is None


def test_scales_beyond_the_bound_are_named_in_the_plan(
    folders: Folders, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    good = folders["gptq"][0]
    assert plait.compile_artifact(good, "cpu", output=tmp_path / "a.plait", context=64).plan.notes is None
    monkeypatch.setattr("plait.assemble.scales.MOST_BYTES", 1000)
    (note,) = plait.compile_artifact(good, "cpu", output=tmp_path / "b.plait", context=64).plan.notes or ()
    assert re.fullmatch(
        r"the scales of \d tensors \(.* kB\) are checked when they are loaded; the others were .*", note
    )


@pytest.mark.parametrize(
    ("form", "suffix", "change", "code"),
    [
        ("gptq-order", "g_idx", lambda t: t + 1, "quantisation-conflict"),
        ("gptq-order", "g_idx", lambda t: t - 1, "quantisation-conflict"),
        ("gptq", "g_idx", lambda t: t.flip(0).clone(), "quantisation-conflict"),
        ("gptq", "bias", lambda t: t + 1, "tensor-unused"),
        ("pack-4", "weight_shape", lambda t: t - 1, "dtype-unsupported"),
        ("nf4", "weight.quant_map", lambda t: t / 2, "quantisation-conflict"),
        ("bnb-int8", "weight_format", lambda t: t + 1, "quantisation-conflict"),
        ("awq", "qweight", lambda t: t[:-1].clone(), "dtype-unsupported"),
        ("awq", "qweight", lambda t: t[None].clone(), "dtype-unsupported"),
        ("pack-4", "weight_packed", lambda t: t.to(torch.int64), "tensor-missing"),
        ("nf4", "weight", lambda t: t[:-1].clone(), "dtype-unsupported"),
        ("e5m2-tensor", "weight", lambda t: t.float().to(torch.float8_e4m3fn), "dtype-unsupported"),
    ],
)
def test_tensors_that_contradict_the_config(
    form: str,
    suffix: str,
    change: Callable[[torch.Tensor], torch.Tensor],
    code: str,
    folders: Folders,
    tmp_path: Path,
) -> None:
    name = f"{MODULE}.{suffix}"
    error = error_of(changed(folders, form, tmp_path / "q", lambda t: t.update({name: change(t[name])})), PlaitError)
    assert error.code == code
    assert MODULE in error.what


def test_a_zero_of_gptq_that_has_two_readings(folders: Folders, tmp_path: Path) -> None:
    """The first version stores zeros less one: 15 would be 16 for some readers, and 0 for others."""
    name = f"{MODULE}.qzeros"
    folder = changed(folders, "gptq", tmp_path / "q", lambda t: t[name].view(-1).__setitem__(0, -1))
    checkpoint = open_checkpoint(folder)
    assert checkpoint.weights is not None
    with pytest.raises(CheckpointError) as caught:
        read_weight(checkpoint.weights[f"{MODULE}.weight"], "float32")
    assert caught.value.code == "weight-scale"
    assert name in caught.value.what
    assert "holds 15" in caught.value.what


@pytest.mark.parametrize(
    ("state", "kind", "word"),
    [
        ({"quant_type": "fp4"}, UnsupportedError, "fp4"),
        ({"blocksize": 0}, CheckpointError, "blocks"),
        ({"blocksize": "64"}, CheckpointError, "blocksize"),
        ({"blocksize": 128}, UnsupportedError, "weight"),
        ({"shape": [64]}, CheckpointError, "shape"),
        ({"shape": [128, 128]}, UnsupportedError, "weight"),
        ({"nested_offset": 0.5}, CheckpointError, "nested_blocksize"),
        ({"strange": 1}, UnsupportedError, "strange"),
    ],
)
def test_states_of_bitsandbytes(
    state: dict[str, Any],
    kind: type[PlaitError],
    word: str,
    folders: Folders,
    tmp_path: Path,
) -> None:
    name = "model.layers.0.self_attn.o_proj.weight.quant_state.bitsandbytes__nf4"

    def edit(tensors: dict[str, torch.Tensor]) -> None:
        text = json.dumps(json.loads(bytes(tensors[name].tolist())) | state)
        tensors[name] = torch.tensor(list(text.encode()), dtype=torch.uint8)

    error = error_of(changed(folders, "nf4", tmp_path / "q", edit), kind)
    assert word in error.what


def with_value(form: str, path: tuple[str, ...], value: Any) -> dict[str, Any]:
    config = deepcopy(FORMATS[form].config)
    inner = config
    for key in path[:-1]:
        inner = inner[key]
    inner[path[-1]] = value
    return config


WEIGHTS = ("config_groups", "group_0", "weights")


@pytest.mark.parametrize("form", FORMATS)
def test_an_unknown_key_is_refused_by_name(form: str) -> None:
    error = refused(LLAMA, quantization_config=with_value(form, ("strange_key",), 1))
    assert error.code == "config-key-unknown"
    assert "strange_key" in error.what
    assert "quantization_config" in error.what


@pytest.mark.parametrize(
    ("form", "path", "value", "word"),
    [
        ("gptq", ("bits",), 3, "bits"),
        ("gptq", ("bits",), "4", "bits"),
        ("gptq", ("group_size",), 0, "group_size"),
        ("gptq", ("group_size",), None, "group_size"),
        ("gptq", ("checkpoint_format",), "marlin", "checkpoint_format"),
        ("gptq", ("dynamic",), {"-:.*": {}}, "dynamic"),
        ("gptq", ("lm_head",), True, "lm_head"),
        ("gptq", ("pack_dtype",), "int16", "pack_dtype"),
        ("gptq", ("desc_act",), "yes", "desc_act"),
        ("awq", ("bits",), 8, "bits"),
        ("awq", ("version",), "gemv", "version"),
        ("awq", ("zero_point",), False, "zero_point"),
        ("awq", ("group_size",), -2, "group_size"),
        ("nf4", ("bnb_4bit_quant_type",), "fp4", "bnb_4bit_quant_type"),
        ("nf4", ("bnb_4bit_quant_storage",), "bfloat16", "bnb_4bit_quant_storage"),
        ("nf4", ("load_in_8bit",), True, "load_in"),
        ("bnb-int8", ("llm_int8_has_fp16_weight",), True, "llm_int8_has_fp16_weight"),
        ("pack-4", ("kv_cache_scheme",), {"num_bits": 8, "type": "float"}, "kv_cache_scheme"),
        ("pack-4", (*WEIGHTS, "num_bits"), 3, "num_bits"),
        ("pack-4", (*WEIGHTS, "strategy"), "tensor", "strategy"),
        ("pack-4", (*WEIGHTS, "group_size"), None, "group_size"),
        ("pack-4", (*WEIGHTS, "actorder"), "sometimes", "actorder"),
        ("pack-8", (*WEIGHTS, "actorder"), "group", "actorder"),
        ("nvfp4", (*WEIGHTS, "symmetric"), False, "symmetric"),
        ("nvfp4", (*WEIGHTS, "num_bits"), 8, "num_bits"),
        ("int8-channel", ("config_groups", "group_0", "format"), "pack-quantized", "format"),
        ("int8-channel", ("config_groups", "group_0", "input_activations", "dynamic"), "never", "dynamic"),
        ("modelopt-nvfp4", ("quant_algo",), "W4A8_AWQ", "quant_algo"),
        ("modelopt-nvfp4", ("group_size",), 32, "group_size"),
        ("modelopt-nvfp4", ("kv_cache_scheme",), {"num_bits": 8}, "kv_cache_scheme"),
        ("modelopt-fp8", ("config_groups",), {"group_0": {"weights": {"num_bits": 4}}}, "num_bits"),
        ("modelopt-fp8", ("config_groups",), {"group_0": {"weights": None}}, "weights"),
        ("modelopt-fp8", ("config_groups",), [], "config_groups"),
        ("modelopt-fp8", ("quantized_layers",), {"a": {"quant_algo": "NVFP4"}}, "quantized_layers"),
        ("e5m2-block", ("fmt",), "e3m4", "fmt"),
        ("e5m2-block", ("kv_cache_scheme",), {"type": "float"}, "kv_cache_scheme"),
    ],
)
def test_values_that_are_not_implemented_are_refused_by_name(
    form: str, path: tuple[str, ...], value: Any, word: str
) -> None:
    error = refused(LLAMA, quantization_config=with_value(form, path, value))
    assert word in error.what
    assert "quantization_config" in error.what


def test_methods_are_known_by_name() -> None:
    said = [read(LLAMA, quantization_config=form.config).quantisation for form in FORMATS.values()]
    assert {found.METHOD for found in said if found is not None} | {"mxfp4"} == METHODS.keys()
    assert "bitnet" in refused(LLAMA, quantization_config={"quant_method": "bitnet"}).what


@pytest.mark.parametrize("form", ["modelopt-fp8", "modelopt-nvfp4"])
def test_the_file_that_older_exports_of_modelopt_have(form: str, folders: Folders, tmp_path: Path) -> None:
    folder = changed(folders, form, tmp_path / "q", lambda t: None)
    edit_config(folder, quantization_config=...)
    said = {"quant_algo": FORMATS[form].config["quant_algo"], "kv_cache_quant_algo": None, "group_size": None}
    said |= {"exclude_modules": ["lm_head"]} | ({"group_size": 16} if form.endswith("nvfp4") else {})
    file = folder / "hf_quant_config.json"
    whole = {"producer": {"name": "modelopt", "version": "0.23.0"}, "quantization": said}
    file.write_text(json.dumps(whole))
    checkpoint = open_checkpoint(folder)
    assert checkpoint.weights is not None
    assert quant_type(checkpoint.weights[f"{MODULE}.weight"]) == TYPES[form]
    # Said twice it must be said alike.
    edit_config(folder, quantization_config=FORMATS[form].config)
    lower(open_checkpoint(folder))
    edit_config(folder, quantization_config=FORMATS["gptq"].config)
    assert error_of(folder, CheckpointError).code == "config-conflict"
    edit_config(folder, quantization_config=...)
    file.write_text(json.dumps(whole | {"quantization": said | {"kv_cache_quant_algo": "FP8"}}))
    assert "kv_cache_quant_algo" in error_of(folder, UnsupportedError).what
    file.write_text(json.dumps({"quantization": "FP8"}))
    assert error_of(folder, CheckpointError).code == "config-type"


def test_names_of_modules_that_are_not_quantised() -> None:
    found = read(LLAMA, quantization_config=with_value("modelopt-fp8", ("ignore",), ["model.layers.*.mlp*", "lm_head"]))
    assert found.quantisation is not None
    names = ("model.layers.3.mlp.up_proj", "model.layers.3.self_attn.q_proj", "lm_head", "lm_head2")
    assert [found.quantisation.skips(name) for name in names] == [True, False, True, False]


@pytest.mark.parametrize("form", ["gptq", "nf4", "pack-4"])
def test_a_module_that_is_quantised_although_it_is_listed(form: str, folders: Folders, tmp_path: Path) -> None:
    keys = {"gptq": "modules_to_not_convert", "nf4": "llm_int8_skip_modules", "pack-4": "ignore"}
    folder = changed(folders, form, tmp_path / "q", lambda t: None)
    edit_config(folder, quantization_config=FORMATS[form].config | {keys[form]: ["model.layers.0.mlp"]})
    error = error_of(folder, CheckpointError)
    assert error.code == "quantisation-conflict"
    assert "model.layers.0.mlp" in error.what


def test_whole_numbers_that_no_config_explains(folders: Folders, tmp_path: Path) -> None:
    folder = changed(folders, "bnb-int8", tmp_path / "q", lambda t: None)
    edit_config(folder, quantization_config=...)
    error = error_of(folder, PlaitError)
    assert error.code in ("dtype-unsupported", "tensor-unused")
    assert "_proj" in error.what
    codes = changed(
        folders,
        "bnb-int8",
        tmp_path / "codes",
        lambda t: [t.pop(name) for name in list(t) if name.endswith(("SCB", "weight_format"))],
    )
    edit_config(codes, quantization_config=...)
    error = error_of(codes, UnsupportedError)
    assert error.code == "dtype-unsupported"
    assert "I8" in error.what


def test_experts_of_gpt_oss_are_what_transformers_makes_of_them(tmp_path: Path) -> None:
    """Stacks in MXFP4 against transformers' own unpacking; it gives them as (experts, in, out)."""
    from transformers.integrations.mxfp4 import convert_moe_packed_tensors

    generator = torch.Generator().manual_seed(2)
    values = torch.randn(3, 10, 2, 32, generator=generator)
    codes = halves(e2m1(values.clamp(-6, 6))[0])
    scales = torch.randint(115, 135, (3, 10, 2), generator=generator).to(torch.uint8)
    name = "model.layers.0.mlp.experts.gate_up_proj"
    file = tmp_path / "m.safetensors"
    save_file({f"{name}_blocks": codes, f"{name}_scales": scales, f"{name}_bias": torch.zeros(3, 10)}, file)
    stored = read_file(file).weights
    joined = join_scales(stored, Mxfp4(), file)
    assert joined.keys() == {name, f"{name}_bias"}
    ref = joined[name]
    assert ref.shape == (3, 10, 64)
    assert quant_type(ref) == TYPES["mxfp4"]
    theirs = convert_moe_packed_tensors(codes, scales, dtype=torch.float32).transpose(1, 2).numpy()
    assert np.array_equal(read_weight(ref, "float32"), theirs)
    assert np.array_equal(read_quantised(ref).values(), theirs)
    # Gate and up stand row by row. Where they are not quantised, transformers has them as (experts, in, out).
    for at, side in enumerate(("gate", "up")):
        view = View((name,), Rows(3 * 5, 2, (Piece(at, 1),)), transposed=True)
        part = apply(joined, {side: view}, "m")[side]
        assert np.array_equal(read_weight(part, "float32"), theirs[:, at::2])
        assert np.array_equal(read_quantised(part).values(), theirs[:, at::2])
    for change in (
        {f"{name}_scales": None},
        {f"{name}_scales": scales[:2].clone()},
        {f"{name}_blocks": codes[..., :8]},
    ):
        tensors = {f"{name}_blocks": codes, f"{name}_scales": scales} | change
        save_file({key: part.contiguous() for key, part in tensors.items() if part is not None}, file)
        with pytest.raises(PlaitError) as caught:
            join_scales(read_file(file).weights, Mxfp4(), file)
        assert name in caught.value.what
