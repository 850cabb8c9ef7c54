"""MXFP4 as GPT-OSS has it: stacks of experts in `*_blocks` (experts, rows, groups, 16 bytes) and `*_scales`."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, ClassVar

from plait.frontend.config_reader import ConfigReader
from plait.frontend.quantisation.base import Parts, Quantisation, names
from plait.ir.types import QuantType
from plait.spec import WeightRef
from plait.spec.weight import Encoding

GROUP = 32
"""Codes that share a scale."""


@dataclass(frozen=True)
class Mxfp4(Quantisation):
    """Weights (experts, rows, columns), called as they are where they are not quantised."""

    METHOD: ClassVar[str] = "mxfp4"
    CODES: ClassVar[str] = "_blocks"
    STORED: ClassVar[tuple[Encoding, ...]] = ("u8",)
    WEIGHT: ClassVar[str] = ""
    EXPERTS_ALONE: ClassVar[bool] = True

    def kind(self) -> QuantType:
        return QuantType.get("e2m1", "e8m0", (1, GROUP))

    def join(self, parts: Parts) -> WeightRef:
        codes = parts.codes
        if len(codes.shape) != 4 or codes.shape[3] != GROUP // 2:
            raise parts.refuse(f"blocks are (experts, rows, groups, {GROUP // 2})")
        experts, rows, groups, _ = codes.shape
        scale = parts.need("_scales")
        parts.check(scale, [(experts, rows, groups)], ("u8", "e8m0"), "the tensor of scales")
        return replace(
            codes,
            encoding="e2m1",
            shape=(experts, rows, groups * GROUP),
            scale=replace(scale, encoding="e8m0"),
            block=(1, GROUP),
        )


def read(reader: ConfigReader) -> Mxfp4:
    """The keys of `quant_method` mxfp4."""
    return Mxfp4(skipped=names(reader, "modules_to_not_convert"))


NO_EFFECT = {"dequantize": "how transformers holds them"}
FIXED: dict[str, tuple[Any, ...]] = {}
