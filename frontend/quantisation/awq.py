"""AWQ: 4-bit codes in int32 words along the rows of (in, out), in an order of their own, with zeros."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, ClassVar

from plait.frontend.config_reader import ConfigReader
from plait.frontend.quantisation.base import Block, Parts, Quantisation, group_of, names, refuse
from plait.ir.types import QuantType
from plait.spec import WeightRef
from plait.spec.weight import Encoding

PER_WORD = 8
"""Codes in an int32."""


@dataclass(frozen=True)
class Awq(Quantisation):
    """Attributes:
    block: a group of columns, or the whole row.
    """

    METHOD: ClassVar[str] = "awq"
    CODES: ClassVar[str] = ".qweight"
    STORED: ClassVar[tuple[Encoding, ...]] = ("i32",)

    block: Block = (1, 128)

    def kind(self) -> QuantType:
        return QuantType.get("u4", "float16", self.block, zero="float16")

    def join(self, parts: Parts) -> WeightRef:
        inner, words = parts.matrix()
        kind, out = self.kind(), words * PER_WORD
        parts.fits(kind, (out, inner))
        _, groups = kind.scale_shape((out, inner))
        scale, zero = parts.need(".scales"), parts.need(".qzeros")
        parts.check(scale, [(groups, out)], ("float16", "bfloat16", "float32"), "the tensor of scales")
        parts.check(zero, [(groups, words)], ("i32",), "the tensor of zeros")
        return replace(
            parts.codes,
            encoding="u4",
            shape=(out, inner),
            packing="awq",
            scale=replace(scale, shape=(out, groups), transposed=True),
            block=self.block,
            zero=replace(zero, encoding="u4", shape=(out, groups), packing="awq"),
        )


def read(reader: ConfigReader) -> Awq:
    """The keys of `quant_method` awq."""
    for key in ("version", "format"):
        layout = reader.optional(key, str) or "gemm"
        if layout.lower() != "gemm":
            raise refuse(reader, key, layout, ("gemm",))
    if reader.optional("zero_point", bool) is False:
        raise refuse(reader, "zero_point", False, (True,))
    return Awq(skipped=names(reader, "modules_to_not_convert"), block=group_of(reader))


NO_EFFECT = dict.fromkeys(
    [
        "backend",
        "do_fuse",
        "modules_to_fuse",
        "fuse_max_seq_len",
        "exllama_config",
        "desc_act",
        "sym",
        "act_group_aware",
    ],
    "chooses another program's kernels, or says how codes were found",
)
FIXED: dict[str, tuple[Any, ...]] = {"bits": (4,), "lm_head": (False, None), "dynamic": (None, {})}
