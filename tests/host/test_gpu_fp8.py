"""The way between the float8 flavours, all 256 codes, against ml_dtypes."""

from __future__ import annotations

import ml_dtypes
import numpy as np

from plait.backends.kernels.gpu.fp8 import FNUZ_SCALE, to_fn, to_fnuz

CODES = np.arange(256, dtype=np.uint8)
FN = CODES.view(ml_dtypes.float8_e4m3fn).astype(np.float64)
FNUZ = CODES.view(ml_dtypes.float8_e4m3fnuz).astype(np.float64)


def test_every_code_of_fn_keeps_its_value_in_fnuz() -> None:
    converted = to_fnuz(CODES).view(ml_dtypes.float8_e4m3fnuz).astype(np.float64) * FNUZ_SCALE

    np.testing.assert_array_equal(converted, FN)
    assert np.isnan(FN).sum() == np.isnan(converted).sum() == 2


def test_reading_the_bytes_as_the_other_flavour_is_off_by_two() -> None:
    both = np.isfinite(FN) & np.isfinite(FNUZ) & (FN != 0)

    np.testing.assert_array_equal(FN[both] / FNUZ[both], FNUZ_SCALE)


def test_every_code_of_fnuz_keeps_its_value_in_fn_but_the_largest() -> None:
    back, clamped = to_fn(CODES)
    converted = back.view(ml_dtypes.float8_e4m3fn).astype(np.float64) / FNUZ_SCALE

    largest = np.abs(FNUZ) == 240.0
    np.testing.assert_array_equal(converted[~largest], FNUZ[~largest])
    np.testing.assert_array_equal(converted[largest], np.sign(FNUZ[largest]) * 224.0)
    assert clamped == largest.sum() == 2
    assert np.isnan(FNUZ).sum() == np.isnan(converted).sum() == 1


def test_shapes_and_typed_views() -> None:
    stored = CODES.reshape(4, 64).view(ml_dtypes.float8_e4m3fn)

    there = to_fnuz(stored)
    back, clamped = to_fn(there)

    assert there.shape == back.shape == (4, 64) and clamped == 0
    same = np.isfinite(FN) & (CODES != 0x80)
    np.testing.assert_array_equal(back.reshape(-1)[same], CODES[same])
