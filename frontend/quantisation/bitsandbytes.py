"""bitsandbytes: nf4 in blocks of a flattened matrix, perhaps with quantised scales; and int8 with a scale per row."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from math import prod
from typing import Any, ClassVar

import numpy as np

from plait.frontend.config_reader import ConfigReader
from plait.frontend.files import parse_json
from plait.frontend.quantisation.base import Parts, Quantisation, block_of, names, refuse
from plait.ir.numbers import BOOKS
from plait.ir.types import QuantType
from plait.spec import WeightRef
from plait.spec.weight import Encoding

STATE = ".weight.quant_state.bitsandbytes__nf4"
BLOCK = 64
"""Of codes, where a config stands alone; a file says its own."""

ROW_MAJOR = 0
"""`weight_format` of int8 codes that stand as they are; others are layouts of one chip's kernels."""


@dataclass(frozen=True)
class Bnb4(Quantisation):
    """nf4."""

    METHOD: ClassVar[str] = "bitsandbytes"
    STORED: ClassVar[tuple[Encoding, ...]] = ("u8",)
    READ: ClassVar[Mapping[str, str]] = {
        r".+\.quant_map": "the table of nf4",
        r".+\.quant_state\.bitsandbytes__nf4": "shape and blocks, which the weight has",
    }

    def kind(self) -> QuantType:
        return QuantType.get("nf4", "float32", (1, BLOCK))

    def join(self, parts: Parts) -> WeightRef:
        state = _state(parts)
        rows, columns = state["shape"]
        block = (1, state["blocksize"])
        kind = QuantType.get("nf4", "float32", block)
        if parts.codes.shape not in ((rows * columns // 2, 1), (1, rows * columns // 2)):
            raise parts.refuse(f"its state says a matrix of {[rows, columns]}")
        parts.fits(kind, (rows, columns))
        book = parts.need(".weight.quant_map")
        parts.check(book, [(16,)], ("float32",), "the table of codes")
        if not np.array_equal(parts.read(book), BOOKS["nf4"]):
            raise parts.conflict(book, "is not the table of nf4", "its state says quant_type nf4")
        shape = kind.scale_shape((rows, columns))
        scale = _nested(parts, state, prod(shape)) if "nested_offset" in state else parts.need(".weight.absmax")
        if scale.scale is None:
            parts.check(scale, [(prod(shape),)], ("float32",), f"the scale of {[rows, columns]}")
        return replace(
            parts.codes,
            encoding="nf4",
            shape=(rows, columns),
            packing="high",
            scale=replace(scale, shape=shape),
            block=block,
        )


def _nested(parts: Parts, state: dict[str, Any], count: int) -> WeightRef:
    """Scales that are codes themselves: book[code] * absmax of the block + offset."""
    codes, book = parts.need(".weight.absmax"), parts.need(".weight.nested_quant_map")
    outer, size = parts.need(".weight.nested_absmax"), state["nested_blocksize"]
    parts.check(codes, [(count,)], ("u8",), "the tensor of scales' codes")
    parts.check(book, [(256,)], ("float32",), "the table of scales' codes")
    parts.check(outer, [(-(-count // size),)], ("float32",), "the scale of scales")
    return replace(codes, scale=outer, block=(1, size), book=book, shift=state["nested_offset"])


def _state(parts: Parts) -> dict[str, Any]:
    """The JSON that stands as bytes beside a weight, with its keys checked."""
    ref = parts.need(STATE)
    if ref.encoding != "u8" or len(ref.shape) != 1:
        raise parts.conflict(ref, f"is {ref.encoding} of {list(ref.shape)}", "a state is a text in bytes")
    source = f"{ref.name!r} in {ref.file}"
    fixed = {"quant_type": ("nf4",), "nested_dtype": ("float32",)}
    reader = ConfigReader(parse_json(parts.read(ref).tobytes(), source), source, no_effect=("dtype",), fixed=fixed)
    reader.need(("quant_type",))
    shape = block_of(reader, "shape", reader.raw("shape"))
    state: dict[str, Any] = {"blocksize": reader.positive("blocksize"), "shape": shape}
    if reader.has("nested_offset"):
        state["nested_offset"] = reader.get("nested_offset", float)
        state["nested_blocksize"] = reader.positive("nested_blocksize")
        reader.need(("nested_dtype",))
    reader.finish()
    return state


@dataclass(frozen=True)
class Bnb8(Quantisation):
    """int8: code * SCB / 127, with SCB the largest number of a row."""

    METHOD: ClassVar[str] = "bitsandbytes"
    STORED: ClassVar[tuple[Encoding, ...]] = ("i8",)
    READ: ClassVar[Mapping[str, str]] = {r".+\.weight_format": "codes are row-major"}

    def kind(self) -> QuantType:
        return QuantType.get("i8", "float32", (1, 0))

    def join(self, parts: Parts) -> WeightRef:
        shape, kind = parts.matrix(), self.kind()
        scale = parts.need(".SCB")
        parts.scale(scale, kind, shape, ("float32",))
        form = parts.find(".weight_format")
        if form is not None:
            parts.check(form, [(), (1,)], ("u8",), "the layout of codes")
            if parts.read(form).item() != ROW_MAJOR:
                raise parts.conflict(form, f"is {parts.read(form).item()}", "only row-major codes are read")
        return replace(parts.codes, scale=replace(scale, factor=1 / 127), block=(1, 0))


def read(reader: ConfigReader) -> Bnb4 | Bnb8:
    """The keys of `quant_method` bitsandbytes."""
    said = {bits: (reader.flag(f"load_in_{bits}bit"), reader.flag(f"_load_in_{bits}bit")) for bits in (4, 8)}
    wanted = [bits for bits, flags in said.items() if any(flags)]
    if len(wanted) != 1:
        raise reader.error("config-conflict", "one of 'load_in_4bit' and 'load_in_8bit' is true")
    skipped = names(reader, "llm_int8_skip_modules")
    kind, storage = reader.raw("bnb_4bit_quant_type"), reader.raw("bnb_4bit_quant_storage")
    if wanted == [8]:
        return Bnb8(skipped=skipped)
    for key, value, allowed in (
        ("bnb_4bit_quant_type", kind, ("nf4",)),
        ("bnb_4bit_quant_storage", storage, ("uint8", None)),
    ):
        if value not in allowed:
            raise refuse(reader, key, value, allowed)
    return Bnb4(skipped=skipped)


NO_EFFECT = {
    "bnb_4bit_compute_dtype": "plait computes in the model's dtype, or the one asked for",
    "bnb_4bit_use_double_quant": "the tensors themselves say it",
    "llm_int8_threshold": "of activations, which plait does not quantise",
    "llm_int8_enable_fp32_cpu_offload": "where another program computes",
}
FIXED: dict[str, tuple[Any, ...]] = {"llm_int8_has_fp16_weight": (False, None)}
