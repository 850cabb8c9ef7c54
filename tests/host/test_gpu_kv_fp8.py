"""FP8 in the pages of GPU kernels: what is written and read, bit by bit, in the chip's own types and as codes."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest
from numpy.typing import NDArray

from plait.backends.base import Backend, CompileOptions
from plait.backends.conformance.models import Attention
from plait.backends.conformance.models import attention as conformance_attention
from plait.backends.cuda import BACKEND as CUDA
from plait.backends.kernels.gpu.archs import ARCHS
from plait.backends.kernels.gpu.launch import TYPES
from plait.backends.rocm import BACKEND as ROCM
from plait.errors import UnsupportedError
from plait.ir.numbers import NUMPY, saturate
from plait.ir.types import FP8
from tests.host import gpu_slices
from tests.host.test_gpu_attention import SHORT, Case, Data, check, step
from tests.host.test_gpu_streams import launch

#: Types of pages, and what they hold.
PAGES = {"fp8e4nv": "e4m3fn", "fp8e4b8": "e4m3fnuz", "fp8e5": "e5m2", "u8": "e4m3fn"}
STORED = {name: np.dtype(np.uint8) if name == "u8" else NUMPY[code] for name, code in PAGES.items()}


def written(values: NDArray[np.generic], dtype: str, pages: str) -> NDArray[np.uint8]:
    """The bytes that `rope_write` leaves of (rows, width) values."""
    rows, width = values.shape
    k_pages, v_pages = (np.full((1, rows, 1, width), 0x5A, np.uint8).view(STORED[pages]) for _ in "kv")
    launch(
        "rope_write",
        {
            **{"q": None, "k": values, "v": values, "cos": None, "sin": None, "slots": np.arange(rows, dtype=np.int32)},
            **{"q_out": None, "k_pages": k_pages, "v_pages": v_pages},
        },
        {"HEADS": 0, "KV_HEADS": 1, "HEAD_DIM": width, "ROTARY_DIM": 0},
        {"BLOCK_HEADS": 1},
        {"q": dtype, "q_out": dtype, "cos": "fp32", "sin": "fp32"},
        rows=rows,
        **dict.fromkeys(("q_stride", "k_stride", "v_stride", "q_out_stride"), width),
        k_scale=1.0,
        v_scale=1.0,
    )
    assert np.array_equal(k_pages.view(np.uint8), v_pages.view(np.uint8))
    return k_pages.view(np.uint8).reshape(rows, width)


def edges(code: str) -> NDArray[np.float32]:
    """Every code's value, every middle between neighbours, what lies just beside them, and what is no number."""
    codes = np.arange(256, dtype=np.uint8).view(NUMPY[code]).astype(np.float64)
    codes = np.unique(codes[np.isfinite(codes)])
    marks = np.concatenate([codes, (codes[1:] + codes[:-1]) / 2, codes * 2, [1e-40, 3e38]]).astype(np.float32)
    beside = [np.nextafter(marks, np.float32(end)) for end in (-np.inf, np.inf)]
    strange = np.array([0.0, -0.0, np.inf, -np.inf, np.nan, -np.nan], np.float32)
    values = np.concatenate([marks, *beside, strange])
    return np.resize(values, (-(-len(values) // 128), 128))


@pytest.mark.parametrize("pages", list(PAGES))
def test_what_is_written_is_what_the_ir_says(pages: str) -> None:
    code = PAGES[pages]
    every = np.arange(1 << 16, dtype=np.uint16)[:: 1 if pages == "u8" else 7]
    every = every[every & 0x7FFF <= 0x7F80].view(ml_dtypes.bfloat16)  # no NaN
    sixteen = np.resize(every, (-(-len(every) // 512), 512))
    for dtype, values in {"fp32": edges(code), "bf16": sixteen}.items():
        wanted = saturate(values.astype(np.float64), FP8[code])
        got = written(values, dtype, pages).view(NUMPY[code]).astype(np.float64)
        np.testing.assert_array_equal(got, wanted)
        if code != "e4m3fnuz":  # which has one zero
            np.testing.assert_array_equal(np.signbit(got)[~np.isnan(got)], np.signbit(wanted)[~np.isnan(wanted)])


@pytest.mark.parametrize("dtype", ["fp32", "fp16", "bf16"])
@pytest.mark.parametrize("window", [0, 60])
def test_codes_are_read_as_the_type_is(dtype: str, window: int) -> None:
    """The same pages as e4m3fn, and as bytes: the same bits come out."""
    native, codes = (Data(Case(SHORT, dtype, "fp8e4nv", window=window)) for _ in range(2))
    codes.k_pages, codes.v_pages = (pages.view(np.uint8) for pages in (codes.k_pages, codes.v_pages))
    check(step(codes))
    assert np.array_equal(step(native).result(), codes.result())


@pytest.mark.parametrize("arch", ["sm_80", "sm_90a", "gfx90a", "gfx942", "gfx950", "gfx1100"])
@pytest.mark.parametrize("code", list(FP8))
def test_what_an_architecture_lacks_is_refused_and_e4m3fn_is_everywhere(arch: str, code: str) -> None:
    made = gpu_slices.module(conformance_attention(Attention(kv_dtype=code)), "bfloat16")
    backend: Backend = CUDA if arch.startswith("sm") else ROCM
    target = f"{backend.name}:{arch}"
    native = TYPES[code] in ARCHS[arch].fp8
    if native or code == "e4m3fn":
        assert backend.capability(target, made).refused == {}
        (k,) = {
            binary.types["k_pages"] for binary in gpu_slices.plan(made, target).binaries if "k_pages" in binary.types
        }
        assert k == (TYPES[code] if native else "u8")
        return
    refused = backend.capability(target, made).refused
    assert f"{arch} does not have it" in refused["plait.attention (block 0)"]
    with pytest.raises(UnsupportedError, match=r"plait\.attention \(block 0\) is not supported"):
        backend.compile(made, target, CompileOptions(device_code=False))
