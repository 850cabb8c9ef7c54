"""The two flavours of e4m3 float8, and the way between them.

e4m3fn (NVIDIA, gfx950) and e4m3fnuz (gfx942) have the same fields; the exponent bias of fnuz is one more, so that equal
bytes mean half as much. fnuz has no negative zero, whose byte 0x80 is its only NaN; fn has NaN at 0x7f and 0xff, where
fnuz still has numbers (+-240). (OCP 8-bit floating point specification; Noune et al. 2022.)
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

Codes = NDArray[np.uint8]

#: What a scale is multiplied with when its codes go from e4m3fn to e4m3fnuz; divided by on the way back.
FNUZ_SCALE = 2.0

_TO_FNUZ: Codes = np.arange(256, dtype=np.uint8)
_TO_FNUZ[0x80] = 0x00
_TO_FNUZ[[0x7F, 0xFF]] = 0x80

_TO_FN: Codes = np.arange(256, dtype=np.uint8)
_TO_FN[[0x7F, 0xFF]] = [0x7E, 0xFE]
_TO_FN[0x80] = 0x7F


def to_fnuz(codes: NDArray[Any]) -> Codes:
    """e4m3fn bytes as e4m3fnuz bytes that mean half: exact, except that negative zero loses its sign.

    Args:
        codes: bytes, any shape: uint8, or an 8-bit type whose bytes are meant.
    """
    return _TO_FNUZ[codes.view(np.uint8)]


def to_fn(codes: NDArray[Any]) -> tuple[Codes, int]:
    """e4m3fnuz bytes as e4m3fn bytes that mean twice as much, and how many do not quite.

    Those are +-240, which would be +-480: they become the largest of e4m3fn, +-448. All others are exact.
    """
    stored = codes.view(np.uint8)
    return _TO_FN[stored], int(np.count_nonzero(stored & 0x7F == 0x7F))
