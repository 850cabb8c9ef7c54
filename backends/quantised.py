"""Quantised weights as they are stored: codes, scales, zeros. For backends that compute in the format."""

from __future__ import annotations

from dataclasses import fields, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from plait.backends.codes import BLOCKS, check_finite, read_elements
from plait.backends.ranges import members, read_bytes, taken
from plait.backends.scales import read_scales
from plait.errors import CheckpointError
from plait.ir.numbers import NUMPY, Packed, Quantised
from plait.ir.quant import quant_type
from plait.ir.types import PackedType, QuantType
from plait.spec import WeightRef

Array = NDArray[Any]


def read_quantised(ref: WeightRef, root: Path | None = None) -> Quantised | Packed:
    """A quantised weight exactly as it is stored, of `quant_type(ref)`, with the rows that `ref.rows` takes. Of a stack
    (..., rows, columns) of matrices every array has the dimensions in front.

    Raises:
        CheckpointError: as `plait.backends.weights.read_weight` says.
    """
    if ref.stack:
        return _stacked(ref, root)
    return _read_blocks(ref, root) if ref.encoding in BLOCKS else _read_codes(ref, root)


def _stacked(ref: WeightRef, root: Path | None) -> Quantised | Packed:
    if quant_type(ref) is None:
        kinds = sorted({str(quant_type(member)) for member in ref.stack})
        raise CheckpointError("weight-format", f"the matrices of {ref.name!r} are {' and '.join(kinds)}")
    read = [read_quantised(member, root) for member in members(ref)]
    names = [field.name for field in fields(read[0]) if field.name != "kind"]
    parts = {name: [getattr(one, name) for one in read] for name in names}
    whole: dict[str, Any] = {name: None if part[0] is None else np.stack(part) for name, part in parts.items()}
    return replace(read[0], **whole)


def _read_codes(ref: WeightRef, root: Path | None) -> Quantised:
    codes, stored, kind = read_elements(ref, root), read_scales(ref, root), quant_type(ref)
    assert isinstance(kind, QuantType), "it has scales"
    lead, shape = ref.shape[:-2], ref.shape if len(ref.shape) > 1 else (*ref.shape, 1)
    parts = stored.of_rows(taken(ref), kind.block[0])
    numbers: dict[str, Any] = {
        name: None if part is None else part.reshape((*lead, *part.shape[1:])) for name, part in parts.items()
    }
    return Quantised(kind, codes.reshape(shape), **numbers)


def _read_blocks(ref: WeightRef, root: Path | None) -> Quantised | Packed:
    kind, shape = quant_type(ref), ref.shape if len(ref.shape) > 1 else (1, *ref.shape)
    raw = read_bytes(ref, root, taken(ref), partial(check_finite, ref=ref))
    raw = raw.reshape(*shape[:-1], raw.shape[-1])
    if isinstance(kind, PackedType):
        return Packed(kind, raw)
    assert isinstance(kind, QuantType), f"{ref.encoding} is a format of blocks"
    blocks = raw.view(BLOCKS[ref.encoding])
    stored = blocks["codes"]
    codes = stored if ref.encoding == "Q8_0" else np.concatenate([stored & 15, stored >> 4], axis=-1)
    numbers = {name: np.ascontiguousarray(blocks[name]) for name in blocks.dtype.names or () if name != "codes"}
    return Quantised(kind, np.ascontiguousarray(codes).reshape(shape), **numbers)


def pack_u4(codes: Array) -> NDArray[np.uint8]:
    """4-bit codes (rows, columns) to (rows, columns / 2), the low half of a byte first."""
    pairs = codes.reshape(len(codes), -1, 2)
    return np.asarray(pairs[..., 0] | pairs[..., 1] << 4, np.uint8)


def to_blocks(weight: Quantised, encoding: str) -> Array:
    """The inverse of reading GGUF's blocks: (rows, columns / 32) of `BLOCKS[encoding]`."""
    fields = BLOCKS[encoding]
    codes = weight.codes.reshape(len(weight.codes), -1, 32)
    out = np.empty(codes.shape[:2], fields)
    out["codes"] = codes if encoding == "Q8_0" else codes[..., :16] | codes[..., 16:] << 4
    for name in set(fields.names or ()) - {"codes"}:
        out[name] = getattr(weight, name)
    return out


def to_fnuz(weight: Quantised) -> Quantised:
    """An e4m3fn weight as e4m3fnuz, for chips that know no other (gfx942): the same values, scales in float32.

    The same bits mean half as much in e4m3fnuz, so scales double; only -0, whose bits are NaN there, becomes 0. NaN
    codes are not in a weight that was read.
    """
    kind = weight.kind
    assert kind.code_name == "e4m3fn", f"{kind}"
    bits = weight.codes.view(np.uint8)
    codes = np.where(bits == 0x80, np.uint8(0), bits).view(NUMPY["e4m3fnuz"])
    with np.errstate(over="ignore"):
        scale = weight.scale.astype(np.float32) * np.float32(2)
    assert np.isfinite(scale).all(), "a scale beyond 1e38 has no double"
    return Quantised(QuantType.get("e4m3fnuz", "float32", kind.block), codes, scale)
