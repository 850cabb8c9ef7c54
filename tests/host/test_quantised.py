"""Quantised weights: what codes and scales mean, what is read of them, and what is refused."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from plait.backends.quantised import pack_u4, read_quantised, to_blocks, to_fnuz
from plait.backends.weights import read_weight, read_weights_json, weights_json
from plait.errors import CheckpointError
from plait.ir.numbers import NUMPY, Quantised, saturate
from plait.ir.quant import GGUF, quant_type
from plait.ir.types import CODE_MAX, CODES, FP8, QuantType, tensor, tensor_bytes
from plait.spec import WeightRef, parts
from plait.spec.weight import Encoding
from tests.checkpoints import pairs

RNG = np.random.default_rng(5)
TORCH = {"e4m3fn": torch.float8_e4m3fn, "e5m2": torch.float8_e5m2, "e4m3fnuz": torch.float8_e4m3fnuz}


def stored(path: Path, name: str, array: NDArray[Any], encoding: Encoding, shape: tuple[int, ...]) -> WeightRef:
    """A range behind whatever the file already holds."""
    raw = array.tobytes()
    offset = path.stat().st_size if path.exists() else 0
    with path.open("ab") as file:
        file.write(raw)
    return WeightRef(name, str(path), offset, len(raw), encoding, shape)


def fp8(
    path: Path, codes: torch.Tensor, scale: NDArray[Any], block: tuple[int, int], encoding: Encoding = "float32"
) -> WeightRef:
    name: Any = next(name for name, kind in TORCH.items() if kind == codes.dtype)
    ref = stored(path, "w", codes.view(torch.uint8).numpy(), name, tuple(codes.shape))
    return replace(ref, scale=stored(path, "w_scale", scale, encoding, scale.shape), block=block)


def codes_of(rows: int, columns: int, kind: torch.dtype = torch.float8_e4m3fn) -> torch.Tensor:
    values = RNG.normal(size=(rows, columns)) * 10.0 ** RNG.integers(-3, 2, (rows, columns))
    return torch.from_numpy(values).float().to(kind)


@pytest.mark.parametrize("kind", TORCH.values(), ids=str)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize(
    ("rows", "columns", "block"), [(1000, 200, (128, 128)), (3, 5, (0, 0)), (700, 96, (1, 0)), (40, 96, (1, 32))]
)
def test_fp8_is_dequantised_as_torch_does_it(
    kind: torch.dtype, dtype: str, rows: int, columns: int, block: tuple[int, int], tmp_path: Path
) -> None:
    """1000 rows in blocks of 128 have 8 scales: 1000 / 8 would be the wrong block. Chunks end inside blocks."""
    codes = codes_of(rows, columns, kind)
    down, across = (part or size for part, size in zip(block, (rows, columns), strict=True))
    scale = RNG.uniform(1e-3, 3, (-(-rows // down), -(-columns // across))).astype(np.float32)
    expected = torch.empty(rows, columns)
    for i, j in np.ndindex(*scale.shape):
        part = slice(i * down, (i + 1) * down), slice(j * across, (j + 1) * across)
        expected[part] = codes[part].float() * torch.tensor(scale[i, j])
    ref = fp8(tmp_path / "w", codes, scale, block)
    got = read_weight(ref, dtype)
    assert np.array_equal(got.astype(np.float32), expected.to(getattr(torch, dtype)).float().numpy())
    held = read_quantised(ref)
    assert np.array_equal(held.codes.view(np.uint8), codes.view(torch.uint8).numpy())
    assert np.array_equal(held.values(np.float32), expected.numpy())
    exact = (
        codes.double().numpy() * np.repeat(np.repeat(scale.astype(np.float64), down, 0)[:rows], across, 1)[:, :columns]
    )
    assert np.array_equal(held.values(), exact)


@pytest.mark.parametrize("encoding", ["float16", "bfloat16"])
def test_a_scale_is_of_any_float_dtype(encoding: Encoding, tmp_path: Path) -> None:
    codes, scale = codes_of(8, 16), torch.rand(8, 1).add(0.1).to(getattr(torch, encoding))
    ref = fp8(tmp_path / "w", codes, scale.view(torch.int16).numpy(), (1, 0), encoding)
    assert np.array_equal(read_weight(ref, "float32"), (codes.float() * scale.float()).numpy())
    assert quant_type(ref) == QuantType.get("e4m3fn", encoding, (1, 0))


@pytest.mark.parametrize("encoding", [name for name, kind in GGUF.items() if isinstance(kind, QuantType)])
@pytest.mark.parametrize(("heads", "rows"), [(None, 6), (3, 96), (None, 3000)])
def test_gguf_blocks_are_codes_and_scales(encoding: Encoding, heads: int | None, rows: int, tmp_path: Path) -> None:
    """Bit-equal to the `gguf` package, and for its blocks of zeros, negative scales and rope pairs too."""
    values = RNG.normal(size=(rows, 64)).astype(np.float32)
    values[0, :32] = 0
    values[1, 40] = -9  # makes the scale of Q4_0 positive, its like negative
    values[2, 40] = 9
    raw = gguf.quants.quantize(values, gguf.GGMLQuantizationType[encoding])
    ref = replace(
        stored(tmp_path / "w", "w", raw, encoding, values.shape), rows=None if heads is None else pairs(heads, len(raw))
    )
    held = read_quantised(ref)
    assert held.kind == quant_type(ref) == GGUF[encoding]
    assert np.array_equal(held.values(np.float32), read_weight(ref, "float32"))
    assert np.array_equal(held.values().astype(np.float32), read_weight(ref, "float32"))
    if heads is None:
        assert np.array_equal(held.values(np.float32), gguf.quants.dequantize(raw, gguf.GGMLQuantizationType[encoding]))
        assert to_blocks(held, encoding).tobytes() == raw.tobytes()
    assert tensor_bytes(tensor(ref.shape, held.kind)) == ref.nbytes


def test_a_gguf_block_that_is_not_finite(tmp_path: Path) -> None:
    raw = gguf.quants.quantize(np.ones((2, 32), np.float32), gguf.GGMLQuantizationType.Q4_1).copy()
    raw[1, 2:4] = np.frombuffer(np.float16(np.inf).tobytes(), np.uint8)
    ref = stored(tmp_path / "w", "w", raw, "Q4_1", (2, 32))
    assert refused(ref, read_quantised).code == refused(ref).code == "weight-not-finite"


@pytest.mark.parametrize("zero", [None, 8, "tensor"])
@pytest.mark.parametrize("heads", [None, 2])
def test_4_bit_codes_with_zeros(zero: Any, heads: int | None, tmp_path: Path) -> None:
    codes = RNG.integers(0, 16, (8, 12)).astype(np.uint8)
    scale = RNG.uniform(0.5, 2, (8, 3)).astype(np.float16)
    zeros = RNG.integers(0, 16, (8, 3)).astype(np.float16)
    file = tmp_path / "w"
    ref = stored(file, "w", pack_u4(codes), "u4", (8, 12))
    ref = replace(
        ref,
        scale=stored(file, "s", scale, "float16", (8, 3)),
        block=(1, 4),
        rows=None if heads is None else pairs(heads, 8),
    )
    ref = replace(ref, zero=stored(file, "z", zeros, "float16", (8, 3)) if zero == "tensor" else zero)
    offset = np.repeat(zeros.astype(float), 4, 1) if zero == "tensor" else float(zero or 0)
    expected = (codes - offset) * np.repeat(scale.astype(float), 4, 1)
    if heads is not None:
        expected = expected.reshape(2, 2, 2, 12).swapaxes(1, 2).reshape(8, 12)
    held = read_quantised(ref)
    assert np.array_equal(held.values(), expected)
    assert np.array_equal(read_weight(ref, "float32"), expected)
    assert sum(part.nbytes for part in parts(ref)) == tensor_bytes(tensor((8, 12), held.kind))


def test_8_bit_codes(tmp_path: Path) -> None:
    codes, scale = np.arange(-128, 128, dtype=np.int8).reshape(2, 128), np.float32([[0.5], [2]])
    ref = stored(tmp_path / "w", "w", codes, "i8", (2, 128))
    ref = replace(ref, scale=stored(tmp_path / "w", "s", scale, "float32", (2,)), block=(1, 0))
    assert np.array_equal(read_weight(ref, "bfloat16").astype(np.float32), codes * scale)


def refused(ref: WeightRef, read: Any = read_weight) -> CheckpointError:
    arguments = ("float32",) if read is read_weight else ()
    with pytest.raises(CheckpointError) as caught:
        read(ref, *arguments)
    assert "'w'" in str(caught.value)
    return caught.value


@pytest.mark.parametrize("read", [read_weight, read_quantised])
@pytest.mark.parametrize("bad", [0.0, -0.0, np.nan, np.inf, -np.inf, -1.0])
@pytest.mark.parametrize("encoding", ["float32", "bfloat16"])
def test_a_scale_that_is_none(bad: float, encoding: Encoding, read: Any, tmp_path: Path) -> None:
    scale = np.ones((4, 1), NUMPY[encoding])
    scale[2] = bad
    error = refused(fp8(tmp_path / "w", codes_of(4, 8), scale, (1, 0), encoding), read)
    assert error.code == "weight-scale"
    assert "'w_scale'" in error.what


@pytest.mark.parametrize("read", [read_weight, read_quantised])
def test_codes_without_a_scale_or_with_another_one(read: Any, tmp_path: Path) -> None:
    ref = fp8(tmp_path / "w", codes_of(4, 8), np.ones((4, 1), np.float32), (1, 0))
    assert refused(replace(ref, scale=None), read).code == "weight-scale"
    assert refused(replace(ref, block=None), read).code == "weight-scale"
    assert refused(replace(ref, block=(1, 4)), read).code == "weight-scale"
    assert refused(replace(ref, nbytes=31), read).code == "weight-range"


@pytest.mark.parametrize("read", [read_weight, read_quantised])
@pytest.mark.parametrize(
    ("kind", "code"), [("e4m3fn", 0x7F), ("e4m3fn", 0xFF), ("e5m2", 0x7C), ("e5m2", 0xFD), ("e4m3fnuz", 0x80)]
)
def test_a_code_that_is_no_number(kind: str, code: int, read: Any, tmp_path: Path) -> None:
    """NaN, and the infinities of e5m2: what a cast without a clamp writes (case H53)."""
    codes = torch.zeros(4, 8, dtype=torch.uint8)
    ref = fp8(tmp_path / "a", codes.view(TORCH[kind]), np.ones(1, np.float32), (0, 0))
    assert not read_weight(ref, "float32").any()
    codes[3, 5] = code
    assert refused(fp8(tmp_path / "b", codes.view(TORCH[kind]), np.ones(1, np.float32), (0, 0)), read).code == (
        "weight-not-finite"
    )


@pytest.mark.parametrize(("scale", "dtype"), [(200.0, "float16"), (1e38, "float32"), (1e38, "bfloat16")])
def test_a_product_that_is_too_large(scale: float, dtype: str, tmp_path: Path) -> None:
    codes = torch.full((2, 2), 448.0).to(torch.float8_e4m3fn)
    with pytest.raises(CheckpointError) as caught:
        read_weight(fp8(tmp_path / "w", codes, np.float32([scale]), (0, 0)), dtype)
    assert caught.value.code == "weight-overflow"


def test_parts_are_written_and_read_back(tmp_path: Path) -> None:
    ref = fp8(tmp_path / "w", codes_of(4, 8), np.ones((4, 1), np.float32), (1, 0))
    refs = [ref, replace(ref, name="a", encoding="u4", zero=8), replace(ref, name="b", zero=ref.scale)]
    path = tmp_path / "weights.json"
    path.write_text(weights_json(refs))
    assert read_weights_json(path) == {item.name: item for item in refs}


def test_fnuz_has_the_same_values_for_all_codes() -> None:
    """H51: read with the other flavour's meaning every value would be off by exactly two."""
    bits = np.array([code for code in range(256) if code & 0x7F != 0x7F], np.uint8).reshape(2, 127)
    weight = Quantised(
        QuantType.get("e4m3fn", "bfloat16", (1, 0)),
        bits.view(NUMPY["e4m3fn"]),
        np.array([[0.5], [3]], NUMPY["bfloat16"]),
    )
    there = to_fnuz(weight)
    assert there.kind == QuantType.get("e4m3fnuz", "float32", (1, 0))
    assert np.array_equal(there.values(), weight.values())
    wrong = torch.from_numpy(bits[:, 1:100]).view(torch.float8_e4m3fnuz).double()
    right = torch.from_numpy(bits[:, 1:100]).view(torch.float8_e4m3fn).double()
    assert torch.equal(right[wrong != 0] / wrong[wrong != 0], torch.full_like(right[wrong != 0], 2))


@pytest.mark.parametrize("name", FP8)
def test_saturating_is_the_nearest_of_all_codes(name: str) -> None:
    """Against a search of the whole table; ties to the code whose last bit is 0."""
    every = np.arange(256, dtype=np.uint8)
    values = every.view(NUMPY[name]).astype(np.float64)
    every, values = every[np.isfinite(values)], values[np.isfinite(values)]
    assert values.max() == CODE_MAX[name] == torch.finfo(TORCH[name]).max
    grid = np.unique(values).astype(np.float32)
    ties = (grid[1:] + grid[:-1]) / 2
    beside = [np.nextafter(ties, np.float32(way)) for way in (-np.inf, np.inf)]
    edges = np.float32([0, -0.0, 1e30, -1e30, np.inf, -np.inf, 1e-30])
    x = np.concatenate([grid, ties, *beside, edges, RNG.normal(size=500).astype(np.float32) * 100]).astype(np.float64)
    distance = np.abs(np.clip(x, -CODE_MAX[name], CODE_MAX[name])[:, None] - values)
    best = [np.flatnonzero(row == row.min()) for row in distance]
    expected = [values[i[np.argmin(every[i] & 1)]] for i in best]
    assert np.array_equal(saturate(x, FP8[name]), expected)
    assert np.isnan(saturate(np.array([np.nan]), FP8[name])).all()


@pytest.mark.parametrize("code", CODES)
@pytest.mark.parametrize("block", [(0, 0), (1, 0), (1, 4), (3, 5)])
def test_bytes_are_those_of_the_parts(code: str, block: tuple[int, int]) -> None:
    shape = (7, 8)
    kind = QuantType.get(code, "float16", block, minimum="float32")
    rows, columns = (
        {0: 1}.get(part, len(range(0, size, part or size))) for part, size in zip(block, shape, strict=True)
    )
    assert kind.scale_shape(shape) == (rows, columns)
    assert (
        tensor_bytes(tensor(shape, kind)) == 7 * 8 * (0.5 if code in ("u4", "e2m1", "nf4") else 1) + rows * columns * 6
    )
