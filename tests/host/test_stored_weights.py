"""Every way that a weight can lie in a file: blocks of GGUF, chosen rows, transposed and stacked matrices, packed
words, scales that have scales. Held against packings and formulas written down here again, and the `gguf` package."""

from __future__ import annotations

import os
import tracemalloc
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import gguf
import ml_dtypes
import numpy as np
import pytest
from numpy.typing import NDArray

from plait.backends.quantised import read_quantised
from plait.backends.weights import (
    is_interleaved,
    read_stacked,
    read_together,
    read_weight,
    read_weights_json,
    weights_json,
)
from plait.errors import CheckpointError
from plait.ir.numbers import NUMPY
from plait.ir.quant import GGUF, quant_type
from plait.spec import Piece, Rows, WeightRef, parts
from plait.spec.weight import Encoding

Array = NDArray[Any]

#: Where each block holds its 16-bit scales and minima (ggml-common.h), and MXFP4 its exponent.
HALVES = {
    "Q4_0": (0,), "Q4_1": (0, 2), "Q5_0": (0,), "Q5_1": (0, 2), "Q8_0": (0,), "Q2_K": (80, 82), "Q3_K": (108,),
    "Q4_K": (0, 2), "Q5_K": (0, 2), "Q6_K": (208,), "IQ4_NL": (0,), "IQ4_XS": (0,), "MXFP4": (),
}  # fmt: skip


@pytest.fixture
def rng() -> np.random.Generator:
    return np.random.default_rng(3)


class Files:
    """Tensors one behind the other in one file."""

    def __init__(self, path: Path) -> None:
        self.path = path
        path.write_bytes(b"head")

    def put(
        self, name: str, array: Array, encoding: str, shape: tuple[int, ...] | None = None, **more: Any
    ) -> WeightRef:
        raw, offset = array.tobytes(), self.path.stat().st_size
        with self.path.open("ab") as file:
            file.write(raw)
        kind: Any = encoding
        return WeightRef(name, str(self.path), offset, len(raw), kind, array.shape if shape is None else shape, **more)


@pytest.fixture
def files(tmp_path: Path) -> Files:
    return Files(tmp_path / "w")


def blocks(encoding: str, shape: tuple[int, ...], rng: np.random.Generator) -> Array:
    """Random bytes with finite scales."""
    size, block_bytes = gguf.constants.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[encoding]]
    raw = rng.integers(0, 256, (*shape[:-1], shape[-1] // size, block_bytes), np.uint8)
    for at in HALVES[encoding]:
        numbers = rng.normal(size=raw.shape[:-1]).astype(np.float16)
        raw[..., at : at + 2] = numbers[..., None].view(np.uint8)
    if encoding == "MXFP4":
        raw[..., 0] = rng.integers(0, 200, raw.shape[:-1])
    return raw.reshape(*shape[:-1], -1)


def of_package(raw: Array, encoding: str) -> Array:
    return np.asarray(gguf.quants.dequantize(raw, gguf.GGMLQuantizationType[encoding]))


@pytest.mark.parametrize("encoding", HALVES)
@pytest.mark.parametrize("shape", [(7, 512), (3, 5, 256), (300, 768), (512,)])
def test_every_block_of_gguf_is_bit_equal_to_the_package(
    encoding: Encoding, shape: tuple[int, ...], files: Files, rng: np.random.Generator
) -> None:
    raw = blocks(encoding, shape, rng)
    ref = files.put("w", raw, encoding, shape)
    got = read_weight(ref, "float32")
    assert np.array_equal(got.view(np.uint32), of_package(raw, encoding).view(np.uint32))
    held = read_quantised(ref)
    assert held.kind == quant_type(ref) == GGUF[encoding]
    assert np.array_equal(held.values(np.float32).reshape(shape), got)
    narrow = read_weight(ref, "bfloat16")
    assert np.array_equal(narrow, of_package(raw, encoding).astype(ml_dtypes.bfloat16))


@pytest.mark.parametrize("encoding", ["Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "MXFP4"])
def test_blocks_that_the_package_quantises(encoding: Encoding, files: Files, rng: np.random.Generator) -> None:
    values = rng.normal(size=(40, 256)).astype(np.float32)
    raw = gguf.quants.quantize(values, gguf.GGMLQuantizationType[encoding])
    got = read_weight(files.put("w", raw, encoding, values.shape), "float32")
    assert np.array_equal(got, of_package(raw, encoding))
    assert np.abs(got - values).max() < 1, "the same numbers, about"


def test_16_bit_tensors_of_gguf(files: Files, rng: np.random.Generator) -> None:
    values = rng.normal(size=(8, 64)).astype(np.float32)
    for encoding, name in (("float16", "F16"), ("bfloat16", "BF16")):
        raw = values.astype(NUMPY[encoding])
        got = read_weight(files.put("w", raw, encoding), "float32")
        assert np.array_equal(got, of_package(raw.view(np.uint8), name).reshape(values.shape))


@pytest.mark.parametrize(("encoding", "at"), [(name, at) for name, places in HALVES.items() for at in places])
@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_a_block_whose_scale_is_no_number(
    encoding: Encoding, at: int, bad: float, files: Files, rng: np.random.Generator
) -> None:
    raw = blocks(encoding, (3, 512), rng)
    block_bytes = gguf.constants.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[encoding]][1]
    raw[2, block_bytes + at : block_bytes + at + 2] = np.frombuffer(np.float16(bad).tobytes(), np.uint8)
    refused(files.put("w", raw, encoding, (3, 512)), "weight-not-finite")


def test_an_exponent_that_is_nan(files: Files, rng: np.random.Generator) -> None:
    raw = blocks("MXFP4", (3, 64), rng)
    raw[1, 17] = 255
    refused(files.put("w", raw, "MXFP4", (3, 64)), "weight-not-finite")


# Rows


def chosen(rows: Rows) -> list[int]:
    """The stored rows of a weight, as the docstring of `Rows` says it."""
    out = []
    for group in range(rows.groups):
        for piece in rows.pieces:
            run = [group * rows.stride + piece.start + i for i in range(piece.count)]
            out += [*run[::2], *run[1::2]] if piece.pairs else run
    return out


ROWS = {
    "fused q of Phi-3": Rows(1, 96, (Piece(0, 48),)),
    "fused v of Phi-3": Rows(1, 96, (Piece(72, 24),)),
    "k of GPT-NeoX": Rows(4, 24, (Piece(8, 8),)),
    "up of GPT-OSS": Rows(48, 2, (Piece(1, 1),)),
    "q of GGUF": Rows(6, 16, (Piece(0, 16, True),)),
    "q of DeepSeek": Rows(4, 24, (Piece(0, 16), Piece(16, 8, True))),
    "the other way round": Rows(2, 48, (Piece(24, 24), Piece(0, 24))),
}


@pytest.mark.parametrize("rows", ROWS.values(), ids=list(ROWS))
@pytest.mark.parametrize("lead", [(), (3,)])
@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize(("stored", "dtype"), [("float32", "float32"), ("float32", "bfloat16"), ("float16", "float32")])
@pytest.mark.parametrize("columns", [5, 4096])
def test_rows_are_what_indexing_takes(
    rows: Rows,
    lead: tuple[int, ...],
    transposed: bool,
    stored: str,
    dtype: str,
    columns: int,
    files: Files,
    rng: np.random.Generator,
) -> None:
    """5 columns are read through, 4096 in runs; transposed, in several chunks."""
    values = rng.normal(size=(*lead, 96, columns)).astype(NUMPY[stored])
    expected = values[..., chosen(rows), :].astype(NUMPY[dtype])
    held = np.ascontiguousarray(values.swapaxes(-1, -2)) if transposed else values
    ref = files.put("w", held, stored, expected.shape, rows=rows, transposed=transposed)
    assert np.array_equal(read_weight(ref, dtype), expected)
    out = np.full(expected.shape, 7, expected.dtype)
    assert read_weight(ref, dtype, out=out) is out
    assert np.array_equal(out, expected)


@pytest.mark.parametrize("rows", ROWS.values(), ids=list(ROWS))
@pytest.mark.parametrize("encoding", ["Q8_0", "Q6_K"])
def test_rows_of_blocks(rows: Rows, encoding: Encoding, files: Files, rng: np.random.Generator) -> None:
    for lead in ((), (2,)):
        raw = blocks(encoding, (*lead, 96, 512), rng)
        expected = of_package(raw, encoding)[..., chosen(rows), :]
        ref = files.put("w", raw, encoding, expected.shape, rows=rows)
        assert np.array_equal(read_weight(ref, "float32"), expected)
        assert np.array_equal(read_quantised(ref).values(np.float32), expected)


@pytest.mark.parametrize("encoding", ["float32", "bfloat16"])
def test_rows_of_a_vector(encoding: str, files: Files) -> None:
    values = np.arange(96).astype(NUMPY[encoding])
    for rows in ROWS.values():
        ref = files.put("w", values, encoding, (rows.count,), rows=rows)
        assert np.array_equal(read_weight(ref, "float32"), np.array(chosen(rows), np.float32))


def test_matrices_as_they_stand_and_transposed(files: Files, rng: np.random.Generator) -> None:
    values = rng.normal(size=(3, 300, 500)).astype(np.float32)
    assert np.array_equal(read_weight(files.put("w", values, "float32"), "float32"), values)
    ref = files.put("w", values, "float32", (3, 500, 300), transposed=True)
    assert np.array_equal(read_weight(ref, "float32"), values.swapaxes(1, 2))
    one = files.put("w", values[0], "float32", (500, 300), transposed=True)
    narrow = read_weight(one, "float16")
    assert np.array_equal(narrow, values[0].T.astype(np.float16))
    assert narrow.flags.c_contiguous


# What is read


@pytest.fixture
def ranges(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int]]:
    """(offset, bytes) of every read."""
    made: list[tuple[int, int]] = []
    real = os.preadv

    def counted(descriptor: int, buffers: list[memoryview], offset: int) -> int:
        got = real(descriptor, buffers, offset)
        made.append((offset, got))
        return got

    monkeypatch.setattr(os, "preadv", counted)
    return made


def read_once(ranges: list[tuple[int, int]], ref: WeightRef, start: int = 0, end: int | None = None) -> None:
    """Every byte of this part of the range was read once, and no other."""
    at = ref.offset + start
    for offset, got in sorted(ranges):
        assert offset == at
        at += got
    assert at == ref.offset + (ref.nbytes if end is None else end)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("transposed", [False, True])
def test_each_byte_is_read_once(
    dtype: str, transposed: bool, ranges: list[tuple[int, int]], files: Files, rng: np.random.Generator
) -> None:
    ref = files.put("w", rng.normal(size=(600, 1100)).astype(np.float32), "float32")
    read_weight(replace(ref, transposed=transposed, shape=(1100, 600) if transposed else ref.shape), dtype)
    read_once(ranges, ref)
    assert len(ranges) > 1, "in chunks"


@pytest.mark.parametrize("encoding", ["Q4_0", "Q4_K", "MXFP4"])
@pytest.mark.parametrize("read", [lambda ref: read_weight(ref, "float32"), read_quantised])
def test_each_byte_of_blocks_is_read_once(
    encoding: Encoding, read: Any, ranges: list[tuple[int, int]], files: Files, rng: np.random.Generator
) -> None:
    ref = files.put("w", blocks(encoding, (3000, 1024), rng), encoding, (3000, 1024))
    read(ref)
    read_once(ranges, ref)
    assert len(ranges) > 1


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_of_one_piece_only_its_bytes_are_read(
    dtype: str, ranges: list[tuple[int, int]], files: Files, rng: np.random.Generator
) -> None:
    ref = files.put("w", rng.normal(size=(96, 300)).astype(np.float32), "float32")
    read_weight(replace(ref, shape=(24, 300), rows=Rows(1, 96, (Piece(48, 24),))), dtype)
    read_once(ranges, ref, 48 * 1200, 72 * 1200)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_long_runs_are_read_alone_and_short_ones_with_what_lies_between(
    dtype: str, ranges: list[tuple[int, int]], files: Files, rng: np.random.Generator
) -> None:
    rows = Rows(4, 24, (Piece(8, 8),))
    wide = files.put("w", rng.normal(size=(96, 2000)).astype(np.float32), "float32")
    read_weight(replace(wide, shape=(32, 2000), rows=rows), dtype)
    assert sum(got for _, got in ranges) == 32 * 8000
    ranges.clear()
    narrow = files.put("w", rng.normal(size=(96, 20)).astype(np.float32), "float32")
    read_weight(replace(narrow, shape=(32, 20), rows=rows), dtype)
    read_once(ranges, narrow, 8 * 80, 88 * 80)


@pytest.mark.parametrize("columns", [5, 3000])
@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_fused_q_k_and_v_are_read_together(
    columns: int, transposed: bool, dtype: str, ranges: list[tuple[int, int]], files: Files, rng: np.random.Generator
) -> None:
    """GPT-NeoX's and GPT-2's: three weights of one tensor, each byte of which is read once."""
    values = rng.normal(size=(96, columns)).astype(np.float32)
    ref = files.put("w", np.ascontiguousarray(values.T) if transposed else values, "float32", transposed=transposed)
    other = files.put("o", values[:7], "float32")
    names = [Rows(4, 24, (Piece(at, 8),)) for at in (0, 8, 16)]
    refs = [replace(ref, name=f"w{i}", shape=(32, columns), rows=rows) for i, rows in enumerate(names)]
    expected = np.concatenate([values[chosen(rows)] for rows in names])
    assert np.array_equal(read_stacked(refs, dtype), expected.astype(NUMPY[dtype]))
    read_once(ranges, ref)
    mixed = [other, *refs[:2], other, replace(refs[2], name="x")]
    expected = np.concatenate([values[:7], *(values[chosen(rows)] for rows in names[:2]), values[:7], expected[64:]])
    out = np.empty(expected.shape, NUMPY[dtype])
    assert read_stacked(mixed, dtype, out=out) is out
    assert np.array_equal(out, expected.astype(NUMPY[dtype]))


@pytest.mark.parametrize(("stored", "dtype"), [("float32", "float32"), ("float32", "bfloat16"), ("Q8_0", "float32")])
def test_gate_and_up_in_turn_are_read_together(
    stored: str, dtype: str, ranges: list[tuple[int, int]], files: Files, rng: np.random.Generator
) -> None:
    """GPT-OSS's: two weights of (experts, rows, columns) whose rows alternate."""
    values = rng.normal(size=(3, 96, 64)).astype(np.float32)
    if stored != "float32":
        raw = gguf.quants.quantize(values, gguf.GGMLQuantizationType[stored])
        ref, values = files.put("w", raw, stored, values.shape), of_package(raw, stored)
    else:
        ref = files.put("w", values, stored)
    refs = [replace(ref, name=f"w{at}", shape=(3, 48, 64), rows=Rows(48, 2, (Piece(at, 1),))) for at in (0, 1)]
    assert all(is_interleaved(one) for one in refs)
    gate, up = read_together(refs, dtype)
    assert np.array_equal(gate, values[:, ::2].astype(NUMPY[dtype]))
    assert np.array_equal(up, values[:, 1::2].astype(NUMPY[dtype]))
    read_once(ranges, ref)
    assert not is_interleaved(ref)
    assert not is_interleaved(replace(ref, shape=(3, 48, 64), rows=Rows(1, 96, (Piece(48, 48),))))


def test_fused_biases_are_read_together_too(files: Files) -> None:
    ref = files.put("b", np.arange(12, dtype=np.float32), "float32")
    refs = [replace(ref, name=str(at), shape=(4,), rows=Rows(2, 6, (Piece(at, 2),))) for at in (0, 2, 4)]
    assert read_stacked(refs, "float32").tolist() == [0, 1, 6, 7, 2, 3, 8, 9, 4, 5, 10, 11]


# Packed words


def gptq_words(codes: Array, bits: int) -> Array:
    """int32 (in / n, out) of codes (in, out): word i holds codes i n, i n + 1 ... of a column, the lowest first."""
    count = 32 // bits
    words = np.zeros((len(codes) // count, codes.shape[1]), np.uint32)
    for i, row in enumerate(codes.astype(np.uint32)):
        words[i // count] |= row << np.uint32(bits * (i % count))
    return words.view(np.int32)


def awq_words(codes: Array) -> Array:
    """int32 (in, out / 8) of codes (in, out): bits 4 i of a word hold column `order[i]` of its eight."""
    order = [0, 2, 4, 6, 1, 3, 5, 7]
    words = np.zeros((len(codes), codes.shape[1] // 8), np.uint32)
    for word in range(words.shape[1]):
        for i, column in enumerate(order):
            words[:, word] |= codes[:, word * 8 + column].astype(np.uint32) << np.uint32(4 * i)
    return words.view(np.int32)


def row_words(codes: Array) -> Array:
    """int32 (rows, columns / 8): the eight codes of a row in their order, as GPTQ keeps zeros."""
    words = np.zeros((len(codes), codes.shape[1] // 8), np.uint32)
    for column in range(codes.shape[1]):
        words[:, column // 8] |= codes[:, column].astype(np.uint32) << np.uint32(4 * (column % 8))
    return words.view(np.int32)


@pytest.mark.parametrize("style", ["gptq", "awq"])
@pytest.mark.parametrize(("inputs", "outputs"), [(64, 24), (4096, 40), (256, 3000)])
@pytest.mark.parametrize("rows", [None, Rows(2, 8, (Piece(1, 6, True),))])
def test_packed_words_are_unpacked_as_they_were_packed(
    style: str, inputs: int, outputs: int, rows: Rows | None, files: Files, rng: np.random.Generator
) -> None:
    if rows is not None:
        rows = replace(rows, groups=outputs // 8)
    group = 32
    codes = rng.integers(0, 16, (inputs, outputs))
    zeros = rng.integers(0, 15, (inputs // group, outputs))
    scale = rng.uniform(0.5, 2, zeros.shape).astype(np.float16)
    shape = (outputs, inputs // group)
    pack = awq_words if style == "awq" else row_words
    zero = files.put(
        "z", pack(zeros), "u4", shape, shift=1.0, **({"packing": "awq"} if style == "awq" else {"transposed": True})
    )
    ref = files.put(
        "w",
        awq_words(codes) if style == "awq" else gptq_words(codes, 4),
        "u4",
        (outputs if rows is None else rows.count, inputs),
        packing=style,
        rows=rows,
        scale=files.put("s", scale, "float16", shape, transposed=True),
        block=(1, group),
        zero=zero,
    )
    expected = ((codes - (zeros + 1).repeat(group, 0)) * scale.astype(float).repeat(group, 0)).T
    expected = expected if rows is None else expected[chosen(rows)]
    assert np.array_equal(read_weight(ref, "float32"), expected)
    held = read_quantised(ref)
    assert np.array_equal(held.values(), expected)
    assert held.kind.block == (1, group)


def test_8_bit_words_and_groups_in_the_order_of_activations(files: Files, rng: np.random.Generator) -> None:
    inputs, outputs, groups = 512, 24, 4
    codes, order = rng.integers(0, 256, (inputs, outputs)), rng.integers(0, groups, inputs).astype(np.int32)
    scale = rng.uniform(0.5, 2, (groups, outputs)).astype(np.float16)
    ref = files.put(
        "w",
        gptq_words(codes, 8),
        "u8",
        (outputs, inputs),
        packing="gptq",
        scale=files.put("s", scale, "float16", (outputs, groups), transposed=True),
        block=(1, inputs // groups),
        zero=128,
        group_of=files.put("g", order, "i32"),
    )
    expected = ((codes - 128) * scale.astype(float)[order]).T
    assert np.array_equal(read_weight(ref, "float32"), expected)
    held = read_quantised(ref)
    assert held.kind.is_ordered
    assert np.array_equal(held.values(), expected)
    bad = order.copy()
    bad[7] = groups
    refused(replace(ref, group_of=files.put("g", bad, "i32")), "weight-scale")
    bad[7] = -1
    refused(replace(ref, group_of=files.put("g", bad, "i32")), "weight-scale")


@pytest.mark.parametrize("columns", [64, 7])
def test_4_bit_codes_with_the_high_half_first_and_rows_of_odd_length(
    columns: int, files: Files, rng: np.random.Generator
) -> None:
    """A row of 7 codes takes 4 bytes, as ONNX keeps zeros."""
    codes = rng.integers(0, 16, (6, columns)).astype(np.uint8)
    padded = np.pad(codes, ((0, 0), (0, columns % 2)))
    scale = files.put("s", np.ones(6, np.float32), "float32")
    for packing, packed in (
        ("plain", padded[:, ::2] | padded[:, 1::2] << 4),
        ("high", padded[:, ::2] << 4 | padded[:, 1::2]),
    ):
        ref = files.put("w", packed, "u4", codes.shape, packing=packing, scale=scale, block=(1, 0))
        assert np.array_equal(read_weight(ref, "float32"), codes)
        assert np.array_equal(read_quantised(ref).codes, codes)


# Scales


E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, 0, -0.5, -1, -1.5, -2, -3, -4, -6])


def test_mxfp4_of_experts(files: Files, rng: np.random.Generator) -> None:
    """GPT-OSS: (experts, rows, columns) of codes, exponents of 32 neighbours, rows of gate and up in turn."""
    codes, exponents = rng.integers(0, 16, (3, 8, 96)), rng.integers(100, 150, (3, 8, 3)).astype(np.uint8)
    values = E2M1[codes] * 2.0 ** (exponents.astype(int) - 127).repeat(32, -1)
    packed = (codes[..., ::2] | codes[..., 1::2] << 4).astype(np.uint8)
    whole = files.put("w", packed, "e2m1", codes.shape, scale=files.put("s", exponents, "e8m0"), block=(1, 32))
    up = replace(whole, shape=(3, 4, 96), rows=Rows(4, 2, (Piece(1, 1),)))
    for ref, expected in ((whole, values), (up, values[:, 1::2])):
        assert np.array_equal(read_weight(ref, "float32"), expected)
        held = read_quantised(ref)
        assert held.kind == quant_type(ref)
        assert held.codes.shape == ref.shape
        assert np.array_equal(held.values(), expected)
    exponents[1, 2, 0] = 255
    refused(replace(whole, scale=files.put("s", exponents, "e8m0")), "weight-scale")


@pytest.mark.parametrize("reciprocal", [False, True])
def test_nvfp4(reciprocal: bool, files: Files, rng: np.random.Generator) -> None:
    codes = rng.integers(0, 16, (8, 64))
    scale = rng.uniform(1, 400, (8, 4)).astype(ml_dtypes.float8_e4m3fn)
    outer = np.float32([0.37])
    stored = 1 / outer if reciprocal else outer
    ref = files.put(
        "w",
        (codes[:, ::2] | codes[:, 1::2] << 4).astype(np.uint8),
        "e2m1",
        codes.shape,
        scale=files.put("s", scale, "e4m3fn"),
        block=(1, 16),
        outer=files.put("o", stored, "float32", reciprocal=reciprocal),
    )
    factor = 1 / stored if reciprocal else outer
    expected = E2M1[codes].astype(np.float32) * (scale.astype(np.float32) * factor).repeat(16, 1)
    assert np.array_equal(read_weight(ref, "float32"), expected)
    held = read_quantised(ref)
    assert (held.kind.scale_dtype, held.kind.has_outer) == ("e4m3fn", True)
    assert np.array_equal(held.values(np.float32), expected)
    for bad in (0.0, -1.0, np.nan, np.inf):
        outer = files.put("o", np.float32([bad]), "float32", reciprocal=reciprocal)
        refused(replace(ref, outer=outer), "weight-scale")
    for bits in (0x00, 0x7F, 0xFF, 0x80, 0xB8):
        raw = scale.view(np.uint8).copy()
        raw[3, 2] = bits
        refused(replace(ref, scale=files.put("s", raw, "e4m3fn")), "weight-scale")


NF4 = np.float32(
    [-1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635, -0.18477343022823334,
     -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224,
     0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0]
)  # fmt: skip


def test_nf4_whose_scales_are_codes_of_a_book(files: Files, rng: np.random.Generator) -> None:
    """bitsandbytes' double quantisation: a scale is its code's number in a book, times a scale, and a shift."""
    rows, columns = 40, 1024
    codes = rng.integers(0, 16, (rows, columns)).astype(np.uint8)
    scales = rng.integers(0, 256, rows * columns // 64).astype(np.uint8)
    book = np.sort(rng.uniform(-1, 1, 256)).astype(np.float32)
    inner = rng.uniform(0.1, 0.2, -(-len(scales) // 256)).astype(np.float32)
    shift = 0.75
    scale = files.put(
        "s",
        scales,
        "u8",
        scale=files.put("inner", inner, "float32"),
        block=(1, 256),
        book=files.put("book", book, "float32"),
        shift=shift,
    )
    packed = (codes[:, ::2] << 4 | codes[:, 1::2]).reshape(-1, 1)
    ref = files.put("w", packed, "nf4", codes.shape, packing="high", scale=scale, block=(1, 64))
    absmax = book[scales] * inner.repeat(256)[: len(scales)] + np.float32(shift)
    expected = NF4[codes] * absmax.reshape(rows, -1).repeat(64, 1)
    assert absmax.dtype == expected.dtype == np.float32
    assert np.array_equal(read_weight(ref, "float32"), expected)
    held = read_quantised(ref)
    assert held.kind.scale_dtype == "float32"
    assert np.array_equal(held.values(np.float32), expected)
    assert {part.name for part in parts(ref)} == {"w", "s", "inner", "book"}
    assert scale.scale is not None
    bad = files.put("inner", inner * np.float32([1, 0, 1]), "float32")
    refused(replace(ref, scale=replace(scale, scale=bad)), "weight-scale")


def test_8_bit_rows_with_a_factor(files: Files, rng: np.random.Generator) -> None:
    """bitsandbytes' int8: the scale of a row is its largest number, of 127."""
    codes, largest = rng.integers(-127, 128, (6, 32)).astype(np.int8), rng.uniform(1, 2, 6).astype(np.float32)
    factor = 1 / 127
    ref = files.put("w", codes, "i8", scale=files.put("s", largest, "float32", factor=factor), block=(1, 0))
    expected = codes.astype(np.float32) * (np.float32(factor) * largest)[:, None]
    assert np.array_equal(read_weight(ref, "float32"), expected)
    assert np.array_equal(read_quantised(ref).values(np.float32), expected)


@pytest.mark.parametrize("rows", [None, *ROWS.values()], ids=["all", *ROWS])
@pytest.mark.parametrize("block", [(16, 32), (12, 32), (24, 24), (5, 7), (0, 0), (1, 0)])
def test_the_scale_of_a_row_moves_with_it(
    rows: Rows | None, block: tuple[int, int], files: Files, rng: np.random.Generator
) -> None:
    """Blocks of rows that stay together are kept; torn apart each row has the scales of its block."""
    codes = rng.normal(size=(96, 96)).astype(ml_dtypes.float8_e4m3fn)
    down, across = block[0] or 96, block[1] or 96
    scale = rng.uniform(0.5, 2, (-(-96 // down), -(-96 // across))).astype(np.float32)
    values = codes.astype(float) * scale.astype(float).repeat(down, 0)[:96].repeat(across, 1)[:, :96]
    expected = values if rows is None else values[chosen(rows)]
    ref = files.put(
        "w", codes, "e4m3fn", expected.shape, rows=rows, scale=files.put("s", scale, "float32"), block=block
    )
    assert np.array_equal(read_weight(ref, "float32"), expected.astype(np.float32))
    held = read_quantised(ref)
    assert held.kind == quant_type(ref)
    assert held.kind.block in (block, (1, block[1]))
    assert np.array_equal(held.values(), expected)


def test_whole_blocks_of_rows_stay_blocks(files: Files) -> None:
    codes = np.ones((96, 64), ml_dtypes.float8_e4m3fn)
    scale = files.put("s", np.arange(1, 13, dtype=np.float32).reshape(6, 2), "float32")
    ref = files.put("w", codes, "e4m3fn", (32, 64), rows=Rows(1, 96, (Piece(64, 32),)), scale=scale, block=(16, 32))
    held = read_quantised(ref)
    assert held.kind.block == (16, 32)
    assert held.scale.tolist() == [[9, 10], [11, 12]]  # type: ignore[union-attr]


def test_integers_may_have_negative_scales_and_no_others(files: Files) -> None:
    """onnxruntime gives the largest number of a group the code -8, whatever its sign."""
    codes, scale = np.arange(8, dtype=np.int8).reshape(2, 4), np.float32([-0.5, 2])
    ref = files.put("w", codes, "i8", scale=files.put("s", scale, "float32"), block=(1, 0))
    assert read_weight(ref, "float32").tolist() == [[0, -0.5, -1, -1.5], [8, 10, 12, 14]]
    refused(replace(ref, encoding="e4m3fn"), "weight-scale")
    refused(replace(ref, encoding="nf4", nbytes=4), "weight-scale")


# Stacks


def test_a_stack_of_matrices_that_are_stored_one_by_one(files: Files, rng: np.random.Generator) -> None:
    values = rng.normal(size=(3, 20, 30)).astype(np.float32)
    members = tuple(files.put(f"w{i}", np.ascontiguousarray(one.T), "float32", (20, 30), transposed=True)
                    for i, one in enumerate(values))  # fmt: skip
    ref = replace(members[0], name="w", offset=0, nbytes=0, shape=(3, 20, 30), transposed=False, stack=members)
    assert np.array_equal(read_weight(ref, "bfloat16"), values.astype(ml_dtypes.bfloat16))
    refused(replace(ref, shape=(2, 20, 30)), "weight-range", READERS[:1])
    refused(replace(ref, shape=(3, 30, 20)), "weight-range", READERS[:1])


def test_a_stack_of_quantised_matrices(files: Files, rng: np.random.Generator) -> None:
    values, members = [], []
    for i in range(3):
        codes = rng.normal(size=(32, 48)).astype(ml_dtypes.float8_e4m3fn)
        scale = rng.uniform(0.5, 2, (2, 3)).astype(np.float32)
        values.append(codes.astype(float) * scale.astype(float).repeat(16, 0).repeat(16, 1))
        members.append(files.put(f"w{i}", codes, "e4m3fn", scale=files.put(f"s{i}", scale, "float32"), block=(16, 16)))
    ref = replace(members[0], name="w", offset=0, nbytes=0, shape=(3, 32, 48), stack=tuple(members), scale=None)
    assert np.array_equal(read_weight(ref, "float32"), np.float32(values))
    held = read_quantised(ref)
    assert held.kind == quant_type(ref)
    assert np.array_equal(held.values(), np.array(values))
    other = replace(members[2], encoding="e5m2")
    refused(replace(ref, stack=(*members[:2], other)), "weight-format", READERS[1:])
    refused(replace(ref, shape=(3, 48, 32)), "weight-range")


# What is refused


READERS: tuple[Callable[[WeightRef], Any], ...] = (lambda ref: read_weight(ref, "float32"), read_quantised)


def refused(ref: WeightRef, code: str, readers: tuple[Callable[[WeightRef], Any], ...] = READERS) -> None:
    """Naming the weight, or its scale."""
    for read in readers:
        with pytest.raises(CheckpointError, match=r"'w'|'s'") as caught:
            read(ref)
        assert caught.value.code == code


@pytest.mark.parametrize(
    ("encoding", "shape", "more"),
    [
        ("e2m1", (4, 64), {"block": (1, 32), "scale": ("e8m0", (4, 2))}),
        ("nf4", (4, 64), {"block": (1, 64), "scale": ("float32", (4,)), "packing": "high"}),
        ("u8", (4, 64), {"block": (1, 64), "scale": ("float32", (4,)), "zero": 128}),
        ("u4", (8, 64), {"block": (1, 64), "scale": ("float16", (8,)), "zero": 8, "packing": "gptq"}),
        ("u4", (8, 64), {"block": (1, 64), "scale": ("float16", (8,)), "zero": 8, "packing": "awq"}),
        ("Q4_K", (4, 256), {}),
        ("IQ4_XS", (4, 256), {}),
        ("MXFP4", (4, 64), {}),
    ],
)
def test_ranges_that_do_not_fit_and_files_that_end_early(
    encoding: Encoding, shape: tuple[int, ...], more: dict[str, Any], files: Files, rng: np.random.Generator
) -> None:
    if encoding in HALVES:
        raw = blocks(encoding, shape, rng)
    else:
        raw = np.zeros(shape[0] * shape[1] // (1 if encoding == "u8" else 2), np.uint8)
    if "scale" in more:
        kind, size = more["scale"]
        more = more | {"scale": files.put("s", np.ones(size, NUMPY[kind]), kind)}
    ref = files.put("w", raw, encoding, shape, **more)
    read_weight(ref, "float32")
    read_quantised(ref)
    refused(replace(ref, shape=(shape[0] * 2, shape[1])), "weight-range")
    refused(replace(ref, rows=Rows(1, shape[0], (Piece(1, shape[0]),))), "weight-range")
    refused(replace(ref, offset=ref.offset + 1), "weight-file")
    refused(replace(ref, file=str(files.path) + "-"), "weight-file")
    if encoding in HALVES:
        refused(replace(ref, transposed=True), "weight-range")
        refused(replace(ref, shape=(shape[0], shape[1] + 8)), "weight-range")
    else:
        refused(replace(ref, scale=None), "weight-scale")
        refused(replace(ref, block=None), "weight-scale")
        refused(replace(ref, block=(1, 16)), "weight-scale")
        assert ref.scale is not None
        refused(replace(ref, scale=replace(ref.scale, offset=ref.offset + ref.nbytes)), "weight-file")
        refused(replace(ref, scale=replace(ref.scale, nbytes=1)), "weight-range")


def test_words_that_are_not_whole(files: Files) -> None:
    scale = files.put("s", np.ones(8, np.float16), "float16")
    ref = files.put("w", np.zeros(32, np.uint8), "u4", (8, 8), packing="gptq", scale=scale, block=(1, 0), zero=8)
    read_weight(ref, "float32")
    refused(replace(ref, shape=(8, 7)), "weight-range")
    refused(replace(ref, shape=(7, 8), packing="awq"), "weight-range")


def test_zeros_that_are_no_numbers(files: Files) -> None:
    scale, zero = (files.put(name, np.ones(8, np.float16), "float16") for name in "sz")
    ref = files.put("w", np.zeros(32, np.uint8), "u4", (8, 8), scale=scale, zero=zero, block=(1, 0))
    assert (read_weight(ref, "float32") == -1).all()
    bad = files.put("z", np.float16([1, 1, 1, np.nan, 1, 1, 1, 1]), "float16")
    refused(replace(ref, zero=bad), "weight-scale")
    refused(replace(ref, zero=files.put("z", np.ones(4, np.float16), "float16")), "weight-scale")


def test_all_of_it_is_written_and_read_back(files: Files, tmp_path: Path) -> None:
    inner = files.put("i", np.ones(1, np.float32), "float32")
    scale = files.put("s", np.ones(8, np.uint8), "u8", scale=inner, block=(1, 256), book=inner, shift=0.5)
    member = files.put("m", np.ones(8, np.uint8), "u4", (2, 8), packing="gptq", scale=scale, group_of=inner, zero=inner)
    refs = [replace(member, name="w", stack=(member, member)), replace(member, name="x", outer=inner, factor=2.0)]
    path = tmp_path / "weights.json"
    path.write_text(weights_json(refs))
    assert read_weights_json(path) == {ref.name: ref for ref in refs}


# Memory


@pytest.mark.parametrize("form", ["plain", "rows", "transposed", "stack", "Q4_0", "Q4_K", "gptq"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_weight_takes_itself_and_a_few_chunks(form: str, dtype: str, files: Files, rng: np.random.Generator) -> None:
    rows, columns = 2048, 2048
    values = (
        rng.normal(size=(rows, columns)).astype(np.float32)
        if form in ("plain", "rows", "transposed", "stack")
        else None
    )
    if form in HALVES:
        ref = files.put("w", blocks(form, (rows, columns), rng), form, (rows, columns))
    elif form == "gptq":
        scale = files.put(
            "s", np.ones((columns // 128, rows), np.float16), "float16", (rows, columns // 128), transposed=True
        )
        words = np.zeros((columns // 8, rows), np.int32)
        ref = files.put("w", words, "u4", (rows, columns), packing="gptq", scale=scale, block=(1, 128), zero=8)
    else:
        assert values is not None
        ref = files.put("w", values, "float32", transposed=form == "transposed")
        if form == "rows":
            ref = replace(ref, rows=Rows(8, 256, (Piece(0, 128), Piece(128, 128, True))))
        if form == "stack":
            part = replace(ref, nbytes=ref.nbytes // 4, shape=(512, 2048))
            members = tuple(replace(part, offset=ref.offset + i * part.nbytes) for i in range(4))
            ref = replace(ref, offset=0, nbytes=0, shape=(4, 512, 2048), stack=members)
    del values
    read_weight(ref, dtype)
    tracemalloc.start()
    held = read_weight(ref, dtype)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert held.nbytes == rows * columns * NUMPY[dtype].itemsize
    assert peak < held.nbytes + 4e6
