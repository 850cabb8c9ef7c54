"""Quantised weights as they are stored: codes, scales, zeros. For backends that compute in the format."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from plait.backends.ranges import chunks, matrix, row_order
from plait.errors import CheckpointError
from plait.ir.numbers import NUMPY, Quantised
from plait.ir.quant import quant_type
from plait.ir.types import FP8, QuantType
from plait.spec import WeightRef

Array = NDArray[Any]

_HALF = np.dtype("<f2")
#: The fields of GGUF's blocks of 32 codes (ggml-common.h). Byte j of 4-bit codes holds code j low and code j + 16 high.
BLOCKS: dict[str, np.dtype[Any]] = {
    "Q8_0": np.dtype([("scale", _HALF), ("codes", "i1", 32)]),
    "Q4_0": np.dtype([("scale", _HALF), ("codes", "u1", 16)]),
    "Q4_1": np.dtype([("scale", _HALF), ("minimum", _HALF), ("codes", "u1", 16)]),
}


def read_quantised(ref: WeightRef, root: Path | None = None) -> Quantised:
    """The codes, scales, zeros and minima of a quantised weight, exactly as stored; rope pairs of rows as halves.

    Raises:
        CheckpointError: as `plait.backends.weights.read_weight` says.
    """
    return _read_blocks(ref, root) if ref.encoding in BLOCKS else _read_codes(ref, root)


def _read_codes(ref: WeightRef, root: Path | None) -> Quantised:
    kind, scale, zero = read_scales(ref, root)
    codes = np.empty(matrix(ref), NUMPY[kind.code_name])
    for first, raw in chunks(ref, root):
        part = to_codes(raw, ref)
        codes[first : first + len(part)] = part
    order = row_order(ref)
    if order is None:
        return Quantised(kind, codes, scale, zero)
    assert kind.block[0] in (0, 1), "rows that share a scale keep their order"
    return Quantised(kind, _ordered(codes, order), _ordered(scale, order), _ordered(zero, order))


def _read_blocks(ref: WeightRef, root: Path | None) -> Quantised:
    kind, (rows, columns), fields = quant_type(ref), matrix(ref), BLOCKS[ref.encoding]
    assert kind is not None
    blocks = np.empty((rows, columns // 32), fields)
    for first, raw in chunks(ref, root):
        part = raw.view(fields).reshape(-1, columns // 32)
        blocks[first : first + len(part)] = part
    order = row_order(ref)
    if order is not None:
        blocks[order] = blocks.copy()
    stored = blocks["codes"]
    codes = stored if ref.encoding == "Q8_0" else np.concatenate([stored & 15, stored >> 4], axis=-1)
    numbers = {name: np.ascontiguousarray(blocks[name]) for name in fields.names or () if name != "codes"}
    if not all(np.isfinite(values).all() for values in numbers.values()):
        raise CheckpointError(
            "weight-not-finite", f"{ref.name!r} in {ref.file} holds NaN or infinity", hint="the checkpoint is damaged"
        )
    return Quantised(kind, np.ascontiguousarray(codes).reshape(rows, columns), **numbers)


def _ordered(part: Any, order: NDArray[np.intp]) -> Any:
    """Rows put where they belong; what is one for all rows stays."""
    if part is None or len(part) != len(order):
        return part
    out = np.empty_like(part)
    out[order] = part
    return out


def read_scales(ref: WeightRef, root: Path | None) -> tuple[QuantType, Array, Array | None]:
    """What a weight of codes is, its scales and its zeros, each as `QuantType.scale_shape` says.

    Raises:
        CheckpointError: `weight-scale`: there is no scale, it has another shape than the weight asks for, or a scale is
            zero, negative, infinite or NaN; all of them tell of a scale that was lost or cast too narrow.
    """
    kind = quant_type(ref)
    if kind is None or ref.scale is None:
        raise CheckpointError(
            "weight-scale",
            f"{ref.name!r} holds {ref.encoding} codes without a scale",
            why="codes mean nothing without their scale",
            hint="compile again",
        )
    scale = _scales(ref, ref.scale, kind, root)
    wide = scale.astype(np.float32)
    good = np.isfinite(wide) & (wide > 0)
    if not good.all():
        raise CheckpointError(
            "weight-scale",
            f"{ref.scale.name!r}, the scale of {ref.name!r}, holds {wide[~good][0]:g}",
            why="a scale is positive and finite",
            hint="the checkpoint is damaged",
        )
    zero = _scales(ref, ref.zero, kind, root) if isinstance(ref.zero, WeightRef) else None
    if zero is not None and not np.isfinite(zero).all():
        raise CheckpointError("weight-scale", f"the zeros of {ref.name!r} hold NaN or infinity")
    return kind, scale, zero


def _scales(ref: WeightRef, part: WeightRef, kind: QuantType, root: Path | None) -> Array:
    shape = kind.scale_shape(matrix(ref))
    if np.prod(shape) != np.prod(part.shape):
        raise CheckpointError(
            "weight-scale",
            f"{part.name!r} has the shape {list(part.shape)}",
            why=f"{ref.name!r} of {list(ref.shape)} in {kind} takes {list(shape)}",
        )
    raw = np.concatenate([np.empty(0, np.uint8), *(chunk for _, chunk in chunks(part, root))])
    return raw.view(NUMPY[part.encoding]).reshape(shape)


def to_codes(raw: NDArray[np.uint8], ref: WeightRef) -> Array:
    """Bytes of whole rows to codes (rows, columns), one in each element.

    Raises CheckpointError `weight-not-finite` where an FP8 code is NaN or infinity.
    """
    _, columns = matrix(ref)
    if ref.encoding == "u4":
        packed = raw.reshape(-1, columns // 2)
        return np.stack([packed & 15, packed >> 4], axis=-1).reshape(-1, columns)
    codes = raw.view(NUMPY[ref.encoding]).reshape(-1, columns)
    if ref.encoding in FP8 and not np.isfinite(codes).all():
        raise CheckpointError(
            "weight-not-finite",
            f"{ref.name!r} in {ref.file} holds FP8 codes that are NaN or infinity",
            why="a cast without a clamp writes them",
            hint="the checkpoint is damaged",
        )
    return codes


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
