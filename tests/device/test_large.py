"""Shapes that only a device can afford, with every tile that is shipped.

Matrices hold small integers (and scales powers of two), so every sum is exact in any order and results are compared bit
by bit. The sizes are those of an 8B Llama: hidden 4096, 32 heads and 8 KV heads of 128, FFN 14336, vocabulary 128256.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from plait.backends.kernels.gpu import table
from plait.backends.kernels.gpu.gemm import even_k
from plait.backends.kernels.gpu.interpret import NUMPY_TYPES
from plait.backends.kernels.gpu.kernel import Constant, Kernel, Tile, Variant
from plait.backends.kernels.gpu.pick import BUCKETS
from plait.backends.kernels.gpu.table import KERNELS
from tests import kernels
from tests.device.machine import Machine
from tests.host import test_gpu_streams as streams

pytestmark = [pytest.mark.device, pytest.mark.usefixtures("runner")]

Floats = NDArray[np.float32]
Rng = np.random.Generator

#: Rows by the bucket that a tile is chosen for: the ends of each, and what ends inside a tile.
ROWS: dict[int | None, tuple[int, ...]] = {BUCKETS[0]: (1, 16), BUCKETS[1]: (17, 64), None: (65, 257, 2048)}
SIZES = {"qkv": (6144, 4096), "down": (4096, 14336), "gate": (14336, 4096), "ragged": (5000, 4104)}


@dataclass(frozen=True)
class Matrix:
    """w of a kernel: its pointers with their types, its constants, and the numbers that it stands for, (N, K)."""

    pointers: dict[str, tuple[str, NDArray[Any] | None]]
    constants: dict[str, Constant]
    values: Floats


def _whole(rng: Rng, shape: tuple[int, ...], least: int, most: int) -> NDArray[np.int8]:
    return rng.integers(least, most + 1, shape, np.int8)


def _powers(rng: Rng, shape: tuple[int, ...]) -> Floats:
    """Powers of two from 1/4 to 1."""
    return np.float32(2.0) ** rng.integers(-2, 1, shape).astype(np.float32)


def _spread(scales: Floats, block: tuple[int, int], n: int, k: int) -> Floats:
    return scales.repeat(block[0] or n, 0)[:n].repeat(block[1] or k, 1)[:, :k]


def plain(rng: Rng, dtype: str, n: int, k: int) -> Matrix:
    w = _whole(rng, (n, k), -2, 2)
    return Matrix({"w": (dtype, w.astype(NUMPY_TYPES[dtype]))}, {}, w.astype(np.float32))


def integer(rng: Rng, dtype: str, n: int, k: int, *, four: bool, group: int, zeros: bool) -> Matrix:
    codes = _whole(rng, (n, k), 0, 15) if four else _whole(rng, (n, k), -8, 8)
    stored = (codes[:, ::2] | codes[:, 1::2] << 4).view(np.int8) if four else codes
    parts = (n, -(-k // group) if group else 1)
    scales, zero = _powers(rng, parts), _whole(rng, parts, 6, 9).astype(np.float32)
    offset = _spread(zero, (1, group), n, k) if zeros else np.float32(8 if four else 0)
    given = zero.astype(NUMPY_TYPES["fp16"]) if zeros else None
    pointers = {"w": ("i8", stored), "scales": ("fp16", scales.astype(NUMPY_TYPES["fp16"])), "zeros": ("fp16", given)}
    values = (codes.astype(np.float32) - offset) * _spread(scales, (1, group), n, k)
    return Matrix(pointers, {"GROUP": group, "HAS_ZEROS": zeros}, values)


def fp8(rng: Rng, dtype: str, n: int, k: int, *, block: tuple[int, int], flavour: str, scale: str = "scale") -> Matrix:
    w, scales = _whole(rng, (n, k), -4, 4), _powers(rng, (-(-n // (block[0] or n)), -(-k // (block[1] or k))))
    pointers = {"w": (flavour, w.astype(NUMPY_TYPES[flavour])), scale: ("fp32", scales)}
    return Matrix(
        pointers, {"SCALE_N": block[0], "SCALE_K": block[1]}, w.astype(np.float32) * _spread(scales, block, n, k)
    )


def every_tile(
    gpu: Machine,
    kernel: Kernel,
    types: Mapping[str, str],
    constants: Mapping[str, Constant],
    bucket: int | None,
    launch: Callable[[Variant], NDArray[Any]],
    want: Callable[[], NDArray[Any]],
) -> None:
    """Launch all candidates first, then compare: what is recorded for a compile goes no further."""
    tiles = table.candidates(kernel, types, constants, gpu.arch, bucket)
    results = [(tile, launch(Variant(kernel.name, types, constants, tile))) for tile in tiles]
    if gpu.cupy is None:
        return
    expected = want()
    for tile, got in results:
        assert got.shape == expected.shape and got.dtype == expected.dtype
        wrong = np.argwhere(got != expected)
        assert not len(wrong), f"{tile}: {len(wrong)} of {got.size} differ, the first at {wrong[0].tolist()}"


def _multiply(
    gpu: Machine,
    name: str,
    dtype: str,
    matrix: Matrix,
    bucket: int | None,
    rows: int,
    *,
    out_dtype: str = "",
    x_scales: bool = False,
) -> None:
    """x w^T + bias + residual, by every tile."""
    rng, kernel, out_dtype = np.random.default_rng(rows), KERNELS[name], out_dtype or dtype
    n, k = matrix.values.shape
    flavour = matrix.pointers["w"][0] if x_scales else dtype
    x = _whole(rng, (rows, k + 16), -2, 2)[:, :k]
    bias, residual = _whole(rng, (n,), -9, 9), _whole(rng, (rows, n + 16), -9, 9)[:, :n]
    scale = _powers(rng, (rows, 1)) if x_scales else None
    own = {
        "x": (flavour, np.pad(x, ((0, 0), (0, 16))).astype(NUMPY_TYPES[flavour])[:, :k]),
        "x_scale": ("fp32", scale),
        "bias": (out_dtype, bias.astype(NUMPY_TYPES[out_dtype])),
        "residual": (out_dtype, np.pad(residual, ((0, 0), (0, 16))).astype(NUMPY_TYPES[out_dtype])[:, :n]),
        "out": (out_dtype, None),
    }
    given = {key: {**own, **matrix.pointers}[key] for key in kernel.pointers}
    if not x_scales:
        given["bias"] = (dtype, bias.astype(NUMPY_TYPES[dtype]))
    constants: dict[str, Constant] = {
        **{"HAS_BIAS": True, "HAS_RESIDUAL": True, "ACTIVATION": "none", "EVEN_K": even_k(k), "X_GROUP": 0},
        **matrix.constants,
    }
    strides = {"x_stride": k + 16, "residual_stride": n + 16, "out_stride": n + 16}

    def launch(variant: Variant) -> NDArray[Any]:
        out = np.full((rows, n + 16), np.nan, NUMPY_TYPES[out_dtype])
        pointers = {key: array for key, (_, array) in given.items()} | {"out": out}
        kernels.run(kernel, variant, pointers, {"rows": rows, "N": n, "K": k, **strides, "factor": 1.0})
        assert np.isnan(out[:, n:].astype(np.float32)).all(), "wrote beside the rows"
        return out[:, :n]

    def want() -> NDArray[Any]:
        left = x.astype(np.float32) * (1 if scale is None else scale)
        total = left @ matrix.values.T + bias + residual
        assert np.abs(total).max() < 2**18, "no longer exact"
        return total.astype(NUMPY_TYPES[out_dtype])

    types = {key: kind for key, (kind, _) in given.items()}
    every_tile(gpu, kernel, types, {key: constants[key] for key in kernel.constants}, bucket, launch, want)


@pytest.mark.parametrize("bucket", list(ROWS), ids=str)
@pytest.mark.parametrize(("dtype", "size"), [("bf16", "qkv"), ("bf16", "down"), ("bf16", "ragged"), ("fp16", "qkv")])
def test_gemm(gpu: Machine, dtype: str, size: str, bucket: int | None) -> None:
    matrix = plain(np.random.default_rng(0), dtype, *SIZES[size])
    for rows in ROWS[bucket]:
        _multiply(gpu, "gemm", dtype, matrix, bucket, rows)


@pytest.mark.parametrize("bucket", list(ROWS), ids=str)
def test_gemm_of_float32(gpu: Machine, bucket: int | None) -> None:
    matrix = plain(np.random.default_rng(0), "fp32", 1536, 2048)
    for rows in ROWS[bucket]:
        _multiply(gpu, "gemm", "fp32", matrix, bucket, rows)


def test_logits_of_a_large_vocabulary(gpu: Machine) -> None:
    _multiply(gpu, "gemm", "bf16", plain(np.random.default_rng(0), "bf16", 128256, 1024), 16, 9, out_dtype="fp32")


QUANTISED: dict[str, tuple[str, Callable[..., Matrix], dict[str, Any]]] = {
    "int8-row": ("gemm_int8", integer, {"four": False, "group": 0, "zeros": False}),
    "int8-group-zeros": ("gemm_int8", integer, {"four": False, "group": 128, "zeros": True}),
    "int4-group": ("gemm_int4", integer, {"four": True, "group": 128, "zeros": False}),
    "int4-group-zeros": ("gemm_int4", integer, {"four": True, "group": 32, "zeros": True}),
    "fp8-tensor": ("gemm_fp8", fp8, {"block": (0, 0)}),
    "fp8-row": ("gemm_fp8", fp8, {"block": (1, 0)}),
    "fp8-block": ("gemm_fp8", fp8, {"block": (128, 128)}),
    "fp8-fp8-row": ("gemm_fp8_fp8", fp8, {"block": (1, 0), "scale": "w_scale"}),
    "fp8-fp8-block": ("gemm_fp8_fp8", fp8, {"block": (128, 128), "scale": "w_scale"}),
}


@pytest.mark.parametrize("bucket", list(ROWS), ids=str)
@pytest.mark.parametrize("format", list(QUANTISED))
def test_quantised(gpu: Machine, format: str, bucket: int | None) -> None:
    name, make, options = QUANTISED[format]
    if make is fp8:
        if not gpu.arch.fp8:
            pytest.skip(f"{gpu.arch.name} has no fp8")
        options = {**options, "flavour": gpu.arch.fp8[0]}
    matrix = make(np.random.default_rng(0), "bf16", 3072, 4096, **options)
    for rows in ROWS[bucket][-1:] if bucket else (257,):
        _multiply(gpu, name, "bf16", matrix, bucket, rows, x_scales=name == "gemm_fp8_fp8")


def _silu(x: NDArray[np.float64]) -> NDArray[np.float64]:
    return np.asarray(x * np.exp(-np.logaddexp(0.0, -x)))


@pytest.mark.parametrize("bucket", list(ROWS), ids=str)
def test_gemm_gated(gpu: Machine, bucket: int | None) -> None:
    """Gate and up are exact; the activation is not."""
    kernel, rng, (n, k) = KERNELS["gemm_gated"], np.random.default_rng(0), SIZES["gate"]
    w = _whole(rng, (2 * n, k), -2, 2)
    held = (w.astype(np.float32) / 64).astype(NUMPY_TYPES["bf16"])
    types = dict.fromkeys(kernel.pointers, "bf16")
    constants: dict[str, Constant] = {"ACTIVATION": "silu", "HAS_BIAS": False, "EVEN_K": even_k(k)}
    for rows in ROWS[bucket]:
        x = _whole(rng, (rows, k), -2, 2).astype(np.float32)
        scalars = {"rows": rows, "N": n, "K": k, "x_stride": k, "out_stride": n}
        results: list[tuple[Tile, NDArray[Any]]] = []
        for tile in table.candidates(kernel, types, constants, gpu.arch, bucket):
            out = np.full((rows, n), np.nan, NUMPY_TYPES["bf16"])
            pointers = {"x": x.astype(NUMPY_TYPES["bf16"]), "w": held, "bias": None, "out": out}
            kernels.run(kernel, Variant(kernel.name, types, constants, tile), pointers, scalars)
            results.append((tile, out))
        if gpu.cupy is None:
            continue
        gate, up = np.split((x @ w.T.astype(np.float32) / 64).astype(np.float64), 2, axis=1)
        expected = _silu(gate) * up
        limit = 1.01 * 2.0**-8 * np.abs(expected) + 2.0**-19 * np.abs(gate * up) + 2.0**-126
        for tile, out in results:
            wrong = ~(np.abs(out.astype(np.float64) - expected) <= limit)
            assert not wrong.any(), f"{tile}: {wrong.sum()} of {wrong.size} are wrong"


#: A kernel's case of tests/host/test_gpu_streams.py at the size of a model: its test, and what that takes.
STREAMS: dict[str, tuple[Callable[..., None], tuple[Any, ...]]] = {
    "rms_norm": (streams.test_rms_norm, (2048, 4096)),
    "add_rms_norm": (streams.test_add_rms_norm, (2048, 4096, False)),
    "rms_norm of heads": (streams.test_rms_norm_of_heads, (2048, 32, 128, False)),
    "layer_norm": (streams.test_layer_norm, (2048, 1, 4096, False, True)),
    "layer_norm of heads": (streams.test_layer_norm, (2048, 64, 128, True, False)),
    "embed": (streams.test_embed_and_gather_rows, (2048, 4096)),
    "silu_mul": (streams.test_binary, ("silu_mul", {}, lambda x, y: streams._silu(x) * y, 2048, 14336)),
    "add": (streams.test_binary, ("add", {}, lambda x, y: x + y, 2048, 4096)),
    "gelu": (streams.test_unary, ("gelu", {"APPROXIMATE": False}, {}, streams._gelu, 512, 16384)),
    "softcap": (
        streams.test_unary,
        ("softcap", {}, {"factor": 0.7, "limit": 30.0}, lambda x: 30 * np.tanh(0.7 * x / 30), 8, 256000),
    ),
    "argmax": (streams.test_argmax, (128256,)),
    "rope": (streams.test_rope, (2048, 32, 128, 128)),
    "rope of a part": (streams.test_rope, (2048, 32, 96, 72)),
    "rope_write": (streams.test_rope_write, ("", 2048, 32, 8, 128, 128)),
}


@pytest.mark.parametrize("index", range(4))
@pytest.mark.parametrize("name", list(STREAMS))
def test_streams(gpu: Machine, name: str, index: int) -> None:
    """With the tiles that are shipped."""
    test, arguments = STREAMS[name]
    place = kernels.here()

    def shipped(kernel: Kernel, variant: Variant, *launch: Any) -> None:
        tiles = table.candidates(kernel, variant.types, variant.constants, gpu.arch, None)
        place.run(kernel, replace(variant, tile=tiles[index % len(tiles)]), *launch)

    with kernels.on(replace(place, run=shipped)):
        test(np.random.default_rng(0), "bf16", *arguments)
