"""FP8 with the scales of DeepSeek (`weight_scale_inv`, a factor in spite of its name), or one for each tensor."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

from plait.frontend.config_reader import ConfigReader
from plait.frontend.quantisation.base import Block, Parts, Quantisation, block_of, names, refuse
from plait.ir.types import QuantType
from plait.spec import WeightRef
from plait.spec.weight import Encoding

SCHEMES = ("dynamic", "static")
FLAVOURS: dict[str | None, tuple[Encoding, ...]] = {
    None: ("e4m3fn", "e4m3fnuz", "e5m2"),
    "e4m3": ("e4m3fn", "e4m3fnuz"),
    "e5m2": ("e5m2",),
}
"""What the key `fmt` says of codes. The tensor itself says which of them they are."""

NO_EFFECT = {"dequantize": "how transformers holds them", "scale_fmt": "of activations; that of weights is stored"}
FIXED = {"modules_to_convert": (None,), "expert_dtype": ("fp8", None), "kv_cache_scheme": (None,)}


@dataclass(frozen=True)
class Fp8(Quantisation):
    """Attributes:
    block: rows and columns of a matrix that share a scale; 0 means all of them.
    fmt: a key of FLAVOURS.
    """

    METHOD: ClassVar[str] = "fp8"
    STORED: ClassVar[tuple[Encoding, ...]] = FLAVOURS[None]

    block: Block = (0, 0)
    fmt: str | None = None

    def kind(self) -> QuantType:
        return QuantType.get(FLAVOURS[self.fmt][0], "float32", self.block)

    def join(self, parts: Parts) -> WeightRef:
        codes = parts.codes
        if codes.encoding not in FLAVOURS[self.fmt]:
            raise parts.refuse(f"{self.METHOD} weights are {' or '.join(FLAVOURS[self.fmt])} here, the config says")
        kind, shape = self.kind(), parts.matrix()
        parts.fits(kind, shape)
        scale = parts.need(".weight_scale_inv", ".weight_scale")
        parts.scale(scale, kind, shape)
        return replace(codes, scale=scale, block=self.block)


def read(reader: ConfigReader) -> Fp8:
    """The keys of `quant_method` fp8."""
    scheme = reader.optional("activation_scheme", str) or "dynamic"
    if scheme not in SCHEMES:
        raise refuse(reader, "activation_scheme", scheme, SCHEMES)
    fmt = reader.optional("fmt", str)
    if fmt not in FLAVOURS:
        raise refuse(reader, "fmt", fmt, [name for name in FLAVOURS if name])
    size = reader.raw("weight_block_size")
    return Fp8(
        skipped=names(reader, "modules_to_not_convert", "ignored_layers"),
        static=scheme == "static",
        block=(0, 0) if size is None else block_of(reader, "weight_block_size", size),
        fmt=fmt,
    )
