"""Checkpoints in the formats that quantisers write, packed here from each format's definition with torch alone, and
what they mean by that definition: the same checkpoint with dequantised weights."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

Tensor = torch.Tensor
GROUP = 32
#: Codes of 4 bits in an int32, as AWQ orders them.
AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)
E2M1 = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])
#: Table 1 of bitsandbytes' `create_normal_map`, in order.
NF4 = torch.tensor(
    [
        *(-1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635),
        *(-0.18477343022823334, -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725),
        *(0.24611230194568634, 0.33791524171829224, 0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0),
    ]
)


@dataclass(frozen=True)
class Packed:
    """What stands in the file for one linear, by what follows the module's name; and the weight it means, float32."""

    tensors: dict[str, Tensor]
    values: Tensor


@dataclass(frozen=True)
class Format:
    """A format: how a matrix (out, in) is packed, and the `quantization_config` that says so."""

    pack: Callable[[Tensor], Packed]
    config: dict[str, Any]


def save_quantised(folder: Path, wide: Path, source: Path, form: str) -> Path:
    """The checkpoint in `source` with its linears in a format of FORMATS, and in `wide` what that means, without any
    quantisation. Returns the first folder."""
    from safetensors.torch import load_file, save_file

    made: dict[str, Tensor] = {}
    meant: dict[str, Tensor] = {}
    for name, tensor in load_file(source / "model.safetensors").items():
        module = name.removesuffix(".weight")
        if not module.endswith("_proj"):
            made[name] = meant[name] = tensor
            continue
        packed = FORMATS[form].pack(tensor.float())
        made |= {module + suffix: part.contiguous() for suffix, part in packed.tensors.items()}
        meant[name] = packed.values.contiguous()
    config = json.loads((source / "config.json").read_text())
    for path, tensors, more in ((folder, made, {"quantization_config": FORMATS[form].config}), (wide, meant, {})):
        path.mkdir(parents=True)
        save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})
        (path / "config.json").write_text(json.dumps(config | more))
    return folder


def words(codes: Tensor, bits: int = 4, order: tuple[int, ...] | None = None) -> Tensor:
    """(rows, columns) to int32 (rows, columns * bits / 32): code k of a word is shifted by k * bits."""
    per_word = 32 // bits
    runs = codes.to(torch.int64).reshape(len(codes), -1, per_word)
    total = sum(runs[..., (order or range(per_word))[k]] << (bits * k) for k in range(per_word))
    assert isinstance(total, Tensor)
    return torch.where(total >= 1 << 31, total - (1 << 32), total).to(torch.int32)


def halves(codes: Tensor, high_first: bool = False) -> Tensor:
    """(..., columns) 4-bit codes to bytes (..., columns / 2)."""
    first, second = codes[..., ::2].to(torch.uint8), codes[..., 1::2].to(torch.uint8)
    return first << 4 | second if high_first else first | second << 4


def nearest(values: Tensor, book: Tensor) -> Tensor:
    """The index of the number in the book that is nearest."""
    return (values.unsqueeze(-1) - book).abs().argmin(-1)


def e2m1(values: Tensor) -> tuple[Tensor, Tensor]:
    """Codes, whose bit 3 is the sign, and the numbers they stand for."""
    code = nearest(values.abs(), E2M1)
    return code + 8 * (values < 0), E2M1[code] * torch.where(values < 0, -1.0, 1.0)


def spread(part: Tensor, like: Tensor) -> Tensor:
    """One number for each group to one for each column."""
    return part.repeat_interleave(like.shape[1] // part.shape[1], 1)


def affine(w: Tensor, bits: int, group: int, order: Tensor | None = None) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Codes, scales (float16) and zeros of groups, and the values; `order` says the group of each column."""
    columns = torch.arange(w.shape[1]) // group if order is None else order
    count, top = int(columns.max()) + 1, 2**bits - 1
    least = torch.stack([w[:, columns == g].amin(1) for g in range(count)], 1).clamp(max=0)
    most = torch.stack([w[:, columns == g].amax(1) for g in range(count)], 1).clamp(min=0)
    scale = ((most - least) / top).half()
    zero = (-least / scale.float()).round().clamp(1, top)
    code = (w / scale.float()[:, columns] + zero[:, columns]).round().clamp(0, top)
    return code, scale, zero, (code - zero[:, columns]) * scale.float()[:, columns]


def gptq(bits: int = 4, group: int = GROUP, less: int = 1, ordered: bool = False) -> Callable[[Tensor], Packed]:
    def pack(w: Tensor) -> Packed:
        size = w.shape[1] if group == -1 else group
        order = torch.arange(w.shape[1]) // size
        if ordered:
            order = order[torch.randperm(w.shape[1], generator=torch.Generator().manual_seed(3))]
        code, scale, zero, values = affine(w, bits, size, order)
        return Packed(
            {
                ".qweight": words(code, bits).T,
                ".qzeros": words((zero - less).T, bits),
                ".scales": scale.T,
                ".g_idx": order.to(torch.int32),
                ".bias": torch.zeros(len(w), dtype=torch.float16),
            },
            values,
        )

    return pack


def awq(w: Tensor) -> Packed:
    code, scale, zero, values = affine(w, 4, GROUP)
    return Packed(
        {".qweight": words(code.T, 4, AWQ_ORDER), ".qzeros": words(zero.T, 4, AWQ_ORDER), ".scales": scale.T}, values
    )


def nf4(nested: bool, block: int = 64) -> Callable[[Tensor], Packed]:
    def pack(w: Tensor) -> Packed:
        flat = w.reshape(-1, block)
        absmax = flat.abs().amax(1)
        code = nearest(flat / absmax[:, None], NF4)
        state: dict[str, Any] = {"quant_type": "nf4", "blocksize": block, "dtype": "float32", "shape": list(w.shape)}
        parts = {".weight": halves(code.reshape(-1), high_first=True)[:, None], ".weight.quant_map": NF4.clone()}
        if nested:
            offset = absmax.mean().item()
            ends = torch.linspace(-1, 1, 256)
            book = ends.abs() * ends  # any table of 256 numbers: the file brings its own
            groups = (absmax - offset).split(256)
            outer = torch.stack([part.abs().amax() for part in groups])
            inner = [nearest(part / most, book) for part, most in zip(groups, outer, strict=True)]
            parts |= {".weight.absmax": torch.cat(inner).to(torch.uint8)}
            parts |= {".weight.nested_absmax": outer, ".weight.nested_quant_map": book}
            state |= {"nested_blocksize": 256, "nested_dtype": "float32", "nested_offset": offset}
            absmax = torch.cat([book[part] * most for part, most in zip(inner, outer, strict=True)]) + offset
        else:
            parts[".weight.absmax"] = absmax
        text = json.dumps(state).encode()
        parts[".weight.quant_state.bitsandbytes__nf4"] = torch.tensor(list(text), dtype=torch.uint8)
        return Packed(parts, (NF4[code] * absmax[:, None]).reshape(w.shape))

    return pack


def bnb8(w: Tensor) -> Packed:
    most = w.abs().amax(1)
    code = (127 * w / most[:, None]).round().to(torch.int8)
    form = torch.zeros((), dtype=torch.uint8)
    return Packed({".weight": code, ".SCB": most, ".weight_format": form}, code.float() * most[:, None] / 127)


def int8(group: int = 0, symmetric: bool = True) -> Callable[[Tensor], Packed]:
    """int-quantized: int8 as it is."""

    def pack(w: Tensor) -> Packed:
        size = group or w.shape[1]
        runs = w.reshape(len(w), -1, size)
        if symmetric:
            scale = runs.abs().amax(2) / 127
            code = (w / spread(scale, w)).round().clamp(-128, 127).to(torch.int8)
            return Packed({".weight": code, ".weight_scale": scale}, code.float() * spread(scale, w))
        scale = ((runs.amax(2) - runs.amin(2)) / 255).bfloat16()
        zero = (-128 - runs.amin(2) / scale.float()).round().clamp(-128, 127)
        code = (w / spread(scale.float(), w) + spread(zero, w)).round().clamp(-128, 127).to(torch.int8)
        values = (code.float() - spread(zero, w)) * spread(scale.float(), w)
        return Packed({".weight": code, ".weight_scale": scale, ".weight_zero_point": zero.to(torch.int8)}, values)

    return pack


def pack_quantized(
    bits: int, group: int = 0, symmetric: bool = True, ordered: bool = False
) -> Callable[[Tensor], Packed]:
    """Codes of a signed range, stored with half of it added."""

    def pack(w: Tensor) -> Packed:
        size, middle = group or w.shape[1], 2 ** (bits - 1)
        order = torch.arange(w.shape[1]) // size
        if ordered:
            order = order[torch.randperm(w.shape[1], generator=torch.Generator().manual_seed(4))]
        code, scale, zero, values = affine(w, bits, size, order)
        if symmetric:
            largest = torch.stack([w[:, order == g].abs().amax(1) for g in range(int(order.max()) + 1)], 1)
            scale = (largest / (middle - 1)).bfloat16()
            code = (w / scale.float()[:, order]).round().clamp(-middle, middle - 1) + middle
            values = (code - middle) * scale.float()[:, order]
        parts = {".weight_packed": words(code, bits), ".weight_scale": scale, ".weight_shape": torch.tensor(w.shape)}
        if not symmetric:
            parts[".weight_zero_point"] = words(zero.T, bits).T
        if ordered:
            parts[".weight_g_idx"] = order.to(torch.int32)
        return Packed(parts, values)

    return pack


def nvfp4(divides: bool) -> Callable[[Tensor], Packed]:
    """Groups of 16; the scale of scales divides them (compressed-tensors) or multiplies them (ModelOpt)."""

    def pack(w: Tensor) -> Packed:
        runs = w.reshape(len(w), -1, 16)
        whole = 448 * 6 / w.abs().amax()
        outer = whole if divides else 1 / whole
        scale = (runs.abs().amax(2) / 6 * whole).to(torch.float8_e4m3fn)
        real = scale.float() / outer if divides else scale.float() * outer
        code, numbers = e2m1(w / spread(real, w))
        names = ("_packed", "_scale", "_global_scale") if divides else ("", "_scale", "_scale_2")
        parts = [halves(code), scale, outer.reshape(1) if divides else outer]
        tensors = {f".weight{name}": part for name, part in zip(names, parts, strict=True)}
        more = {".input_global_scale" if divides else ".input_scale": torch.ones(1)}
        return Packed(tensors | more, numbers * spread(real, w))

    return pack


def mxfp4(w: Tensor) -> Packed:
    """Groups of 32 with powers of two."""
    runs = w.reshape(len(w), -1, 32)
    exponent = runs.abs().amax(2).log2().floor() - 2
    real = 2.0**exponent
    code, numbers = e2m1((w / spread(real, w)).clamp(-6, 6))
    parts = {".weight_packed": halves(code), ".weight_scale": (exponent + 127).to(torch.uint8)}
    return Packed(parts, numbers * spread(real, w))


def modelopt_fp8(w: Tensor) -> Packed:
    scale = w.abs().amax() / 448
    code = (w / scale).to(torch.float8_e4m3fn)
    return Packed({".weight": code, ".weight_scale": scale, ".input_scale": torch.ones(())}, code.float() * scale)


def e5m2(block: tuple[int, int] | None) -> Callable[[Tensor], Packed]:
    def pack(w: Tensor) -> Packed:
        rows, columns = block or tuple(w.shape)
        scale = torch.empty(-(-w.shape[0] // rows), -(-w.shape[1] // columns))
        code, values = torch.empty(w.shape, dtype=torch.float8_e5m2), torch.empty(w.shape)
        for i in range(scale.shape[0]):
            for j in range(scale.shape[1]):
                part = slice(i * rows, (i + 1) * rows), slice(j * columns, (j + 1) * columns)
                scale[i, j] = w[part].abs().amax() / 57344
                code[part] = (w[part] / scale[i, j]).to(torch.float8_e5m2)
                values[part] = code[part].float() * scale[i, j]
        return Packed(
            {".weight": code, f".weight_scale{'_inv' if block else ''}": scale if block else scale[0]}, values
        )

    return pack


def compressed(form: str, activations: dict[str, Any] | None = None, **weights: Any) -> dict[str, Any]:
    """A `quantization_config` of compressed-tensors."""
    whole = {"dynamic": False, "symmetric": True, "group_size": None, "block_structure": None, "actorder": None}
    whole |= {"observer": "minmax", "observer_kwargs": {}} | weights
    group = {"targets": ["Linear"], "weights": whole, "input_activations": activations, "output_activations": None}
    return {
        "quant_method": "compressed-tensors",
        "format": form,
        "config_groups": {"group_0": group},
        "ignore": ["lm_head"],
        "kv_cache_scheme": None,
        "quantization_status": "compressed",
        "global_compression_ratio": None,
        "version": "0.12.2",
    }


def _gptq_config(**changes: Any) -> dict[str, Any]:
    return {
        "quant_method": "gptq",
        "bits": 4,
        "group_size": GROUP,
        "desc_act": False,
        "sym": False,
        "damp_percent": 0.01,
        "true_sequential": True,
        "static_groups": False,
        "lm_head": False,
        "checkpoint_format": "gptq",
        "meta": {"quantizer": ["gptqmodel:2.0.0"]},
    } | changes


_BNB = {
    "quant_method": "bitsandbytes",
    "llm_int8_threshold": 6.0,
    "llm_int8_skip_modules": ["lm_head"],
    "llm_int8_enable_fp32_cpu_offload": False,
    "llm_int8_has_fp16_weight": False,
    "bnb_4bit_compute_dtype": "bfloat16",
    "bnb_4bit_quant_type": "nf4",
    "bnb_4bit_quant_storage": "uint8",
    "bnb_4bit_use_double_quant": False,
}
_BNB4 = _BNB | {"load_in_4bit": True, "load_in_8bit": False, "_load_in_4bit": True, "_load_in_8bit": False}
_BNB8 = _BNB | {"load_in_4bit": False, "load_in_8bit": True, "_load_in_4bit": False, "_load_in_8bit": True}
_MODELOPT = {"quant_method": "modelopt", "ignore": ["lm_head"], "producer": {"name": "modelopt", "version": "0.33.0"}}
_INT = {"type": "int", "strategy": "group", "group_size": GROUP}
_TOKEN = {"num_bits": 8, "type": "int", "strategy": "token", "dynamic": True, "symmetric": True}
_LOCAL = {"num_bits": 4, "type": "float", "strategy": "tensor_group", "group_size": 16, "dynamic": "local"}

FORMATS: dict[str, Format] = {
    "gptq": Format(gptq(), _gptq_config()),
    "gptq-v2": Format(gptq(less=0), _gptq_config(checkpoint_format="gptq_v2", sym=True)),
    "gptq-8": Format(gptq(bits=8), _gptq_config(bits=8)),
    "gptq-rows": Format(gptq(group=-1), _gptq_config(group_size=-1, desc_act=True)),
    "gptq-order": Format(gptq(ordered=True), _gptq_config(desc_act=True)),
    "awq": Format(
        awq,
        {"quant_method": "awq", "bits": 4, "group_size": GROUP, "version": "gemm", "zero_point": True}
        | {"modules_to_not_convert": None},
    ),
    "nf4": Format(nf4(nested=False), _BNB4),
    "nf4-nested": Format(nf4(nested=True), _BNB4 | {"bnb_4bit_use_double_quant": True}),
    "bnb-int8": Format(bnb8, _BNB8),
    "int8-channel": Format(int8(), compressed("int-quantized", _TOKEN, num_bits=8, type="int", strategy="channel")),
    "int8-zeros": Format(
        int8(GROUP, symmetric=False), compressed("int-quantized", num_bits=8, symmetric=False, **_INT)
    ),
    "pack-4": Format(pack_quantized(4, GROUP), compressed("pack-quantized", num_bits=4, **_INT)),
    "pack-8": Format(pack_quantized(8), compressed("pack-quantized", num_bits=8, type="int", strategy="channel")),
    "pack-zeros": Format(
        pack_quantized(4, GROUP, symmetric=False), compressed("pack-quantized", num_bits=4, symmetric=False, **_INT)
    ),
    "pack-order": Format(
        pack_quantized(4, GROUP, ordered=True), compressed("pack-quantized", num_bits=4, actorder="group", **_INT)
    ),
    "nvfp4": Format(
        nvfp4(divides=True),
        compressed("nvfp4-pack-quantized", _LOCAL, num_bits=4, type="float", strategy="tensor_group", group_size=16),
    ),
    "mxfp4": Format(
        mxfp4, compressed("mxfp4-pack-quantized", num_bits=4, type="float", strategy="group", group_size=32)
    ),
    "modelopt-nvfp4": Format(nvfp4(divides=False), _MODELOPT | {"quant_algo": "NVFP4", "group_size": 16}),
    "modelopt-fp8": Format(modelopt_fp8, _MODELOPT | {"quant_algo": "FP8"}),
    "e5m2-tensor": Format(e5m2(None), {"quant_method": "fp8", "fmt": "e5m2", "activation_scheme": "dynamic"}),
    "e5m2-block": Format(e5m2((48, 32)), {"quant_method": "fp8", "fmt": "e5m2", "weight_block_size": [48, 32]}),
}
"""By name, every format but FP8 in e4m3fn, which `tests.checkpoints.save_fp8` writes."""
