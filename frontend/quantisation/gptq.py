"""GPTQ: codes of 4 or 8 bits in int32 words down the columns of (in, out), with zeros and an order of columns."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import numpy as np

from plait.frontend.config_reader import ConfigReader
from plait.frontend.quantisation.base import Block, Parts, Quantisation, group_of, names, refuse
from plait.ir.types import QuantType
from plait.spec import WeightRef
from plait.spec.weight import Encoding

CODES: dict[int, Encoding] = {4: "u4", 8: "u8"}
"""By bits."""

SHIFTS = {"gptq": 1.0, "gptq_v2": 0.0}
"""What is added to a stored zero: the first version of the format stores zeros less one."""


@dataclass(frozen=True)
class Gptq(Quantisation):
    """Attributes:
    bits: of a code.
    block: a group of columns, or the whole row.
    shift: what is added to a stored zero.
    ordered: the columns of a group are no neighbours, if a tensor says so (`desc_act`).
    """

    METHOD: ClassVar[str] = "gptq"
    CODES: ClassVar[str] = ".qweight"
    STORED: ClassVar[tuple[Encoding, ...]] = ("i32",)
    READ: ClassVar[Mapping[str, str]] = {r".+\.g_idx": "the columns of a group are neighbours"}

    bits: int = 4
    block: Block = (1, 128)
    shift: float = 1.0
    ordered: bool = False

    def kind(self) -> QuantType:
        return QuantType.get(CODES[self.bits], "float16", self.block, zero="float16", ordered=self.ordered)

    def join(self, parts: Parts) -> WeightRef:
        words, out = parts.matrix()
        per_word, inner = 32 // self.bits, words * 32 // self.bits
        kind, code = self.kind(), CODES[self.bits]
        parts.fits(kind, (out, inner))
        if out % per_word:
            raise parts.refuse(f"the zeros of {out} rows do not fill int32 words")
        _, groups = kind.scale_shape((out, inner))
        scale, zero = parts.need(".scales"), parts.need(".qzeros")
        parts.check(scale, [(groups, out)], ("float16", "bfloat16", "float32"), "the tensor of scales")
        parts.check(zero, [(groups, out // per_word)], ("i32",), "the tensor of zeros")
        return replace(
            parts.codes,
            encoding=code,
            shape=(out, inner),
            packing="gptq",
            scale=replace(scale, shape=(out, groups), transposed=True),
            block=self.block,
            zero=replace(zero, encoding=code, shape=(out, groups), transposed=True, shift=self.shift),
            group_of=self._order(parts, groups, inner),
        )

    def _order(self, parts: Parts, groups: int, inner: int) -> WeightRef | None:
        """The tensor that says the group of each column, where it says anything else than neighbours."""
        order = parts.need(".g_idx") if self.ordered else parts.find(".g_idx")
        if order is None:
            return None
        parts.check(order, [(inner,)], ("i32",), "the group of each column")
        said = parts.read(order)
        if np.array_equal(said, np.arange(inner) // (self.block[1] or inner)):
            return None
        if not self.ordered:
            raise parts.conflict(order, "puts columns in an order of its own", "the config says desc_act false")
        if said.min() < 0 or said.max() >= groups:
            raise parts.conflict(order, f"names groups {said.min()} to {said.max()}", f"there are {groups}")
        return order


def read(reader: ConfigReader) -> Gptq:
    """The keys of `quant_method` gptq."""
    bits = reader.get("bits", int)
    if bits not in CODES:
        raise refuse(reader, "bits", bits, tuple(CODES))
    version = reader.optional(reader.spelling("checkpoint_format", "format"), str) or "gptq"
    if version not in SHIFTS:
        raise refuse(reader, "checkpoint_format", version, tuple(SHIFTS))
    block, ordered = group_of(reader), reader.flag("desc_act")
    reader.flag("sym")  # a symmetric one has zeros too, all alike
    return Gptq(
        skipped=names(reader, "modules_to_not_convert"),
        bits=bits,
        block=block,
        shift=SHIFTS[version],
        ordered=ordered and block != (1, 0),
    )


_FOUND = "says how codes were found"
NO_EFFECT = {
    **dict.fromkeys(
        [
            "damp_percent",
            "damp_auto_increment",
            "static_groups",
            "true_sequential",
            "act_group_aware",
            "mse",
            "dataset",
            "tokenizer",
            "batch_size",
            "model_seqlen",
            "cache_block_outputs",
            "block_name_to_quantize",
            "module_name_preceding_first_block",
            "modules_in_block_to_quantize",
            "pad_token_id",
            "meta",
            "model_name_or_path",
            "model_file_base_name",
            "quantizer",
        ],
        _FOUND,
    ),
    **dict.fromkeys(
        ["backend", "use_exllama", "exllama_config", "use_cuda_fp16", "max_input_length", "disable_exllama"],
        "chooses another program's kernels",
    ),
}
FIXED: dict[str, tuple[Any, ...]] = {
    "lm_head": (False, None),
    "pack_dtype": ("int32", None),
    "dynamic": (None, {}),
    "adapter": (None,),
    "rotation": (None,),
    "is_marlin_format": (False, None),
}
