"""What quantised element types mean: against ml_dtypes, the `gguf` package, and plain loops over the definition."""

from __future__ import annotations

from statistics import NormalDist

import gguf
import ml_dtypes
import numpy as np
import pytest
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType
from xdsl.dialects.builtin import TensorType

from plait.ir import Builder, weights
from plait.ir.numbers import BOOKS, NUMPY, Packed, Quantised, code_values
from plait.ir.oracle import Oracle
from plait.ir.quant import GGUF, quantise_types
from plait.ir.quant_type import PACKED
from plait.ir.types import CODE_MAX, CODES, SCALES, PackedType, QuantType, dtype_bytes, element, tensor, tensor_bytes

RNG = np.random.default_rng(17)


def test_e2m1_and_e8m0_are_those_of_the_microscaling_formats() -> None:
    every = np.arange(16, dtype=np.uint8)
    theirs = every.view(ml_dtypes.float4_e2m1fn).astype(np.float64)
    ours = code_values(every, "e2m1")
    assert np.array_equal(ours, theirs)
    assert np.array_equal(np.signbit(ours), np.signbit(theirs))
    assert NUMPY["e8m0"] == ml_dtypes.float8_e8m0fnu
    powers = np.arange(255, dtype=np.uint8).view(NUMPY["e8m0"]).astype(np.float64)
    assert np.array_equal(powers, 2.0 ** np.arange(-127, 128))


def test_nf4_has_the_quantiles_of_a_normal_distribution() -> None:
    """QLoRA, appendix E: 8 of the positive half and 7 of the negative one, and 0; bitsandbytes' offset."""
    quantile = NormalDist().inv_cdf
    upper = [quantile(p) for p in np.linspace(0.9677083, 0.5, 9)[:-1]]
    lower = [-quantile(p) for p in np.linspace(0.9677083, 0.5, 8)[:-1]]
    expected = np.sort([*upper, 0.0, *lower])
    assert np.abs(BOOKS["nf4"] - expected / expected.max()).max() < 1e-6
    assert BOOKS["nf4"][7] == 0


@pytest.mark.parametrize("code", CODES)
def test_the_largest_code_is_what_it_says(code: str) -> None:
    bits = {"e2m1": 4, "nf4": 4, "u4": 4}.get(code, 8)
    every = np.arange(2**bits, dtype=np.uint8).view(NUMPY[code])
    values = code_values(every, code)
    assert values[np.isfinite(values)].max() == CODE_MAX[code]


def codes(kind: QuantType, *shape: int) -> np.ndarray:
    most = 16 if kind.code_name in ("e2m1", "nf4", "u4") else 256
    drawn = RNG.integers(0, most, shape).astype(np.uint8)
    if kind.code_name.startswith("e") and most == 256:
        drawn &= 0x77  # neither NaN nor infinity
    return drawn.view(NUMPY[kind.code_name])


def numbers(dtype: str, *shape: int) -> np.ndarray:
    if dtype == "e8m0":
        return RNG.integers(100, 150, shape).astype(np.uint8).view(NUMPY[dtype])
    return RNG.uniform(0.5, 3, shape).astype(NUMPY[dtype])


def made(kind: QuantType, *shape: int) -> Quantised:
    scales = kind.scale_shape(shape)
    groups = scales[-1]
    return Quantised(
        kind,
        codes(kind, *shape),
        numbers(kind.scale_dtype, *scales),
        None if kind.zero_dtype is None else RNG.integers(0, 16, scales).astype(NUMPY[kind.zero_dtype]),
        None if kind.minimum_dtype is None else -numbers(kind.minimum_dtype, *scales),
        numbers("float32", *shape[:-2]) if kind.has_outer else None,
        RNG.integers(0, groups, (*shape[:-2], shape[-1])).astype(np.int32) if kind.is_ordered else None,
    )


KINDS = {
    "nvfp4": QuantType.get("e2m1", "e4m3fn", (1, 8), outer=True),
    "mxfp4": QuantType.get("e2m1", "e8m0", (1, 8)),
    "nf4": QuantType.get("nf4", "float32", (1, 4)),
    "gptq": QuantType.get("u4", "float16", (1, 8), zero="float16"),
    "gptq-order": QuantType.get("u8", "float16", (1, 8), zero="float16", ordered=True),
    "block": QuantType.get("e5m2", "bfloat16", (3, 5), outer=True),
    "minimum": QuantType.get("u4", "float16", (1, 8), minimum="float16"),
    "row": QuantType.get("i8", "float32", (1, 0)),
    "tensor": QuantType.get("e4m3fn"),
}


@pytest.mark.parametrize("name", KINDS)
@pytest.mark.parametrize("lead", [(), (3,)])
def test_values_are_those_of_a_loop_over_the_definition(name: str, lead: tuple[int, ...]) -> None:
    """Exact: a code, a scale and an outer scale have 24 bits at most, and a product of them fits float64 here."""
    kind, (rows, columns) = KINDS[name], (7, 16)
    weight = made(kind, *lead, rows, columns)
    values = weight.values()
    down, across = kind.block
    numbers_of = code_values(weight.codes, kind.code_name)
    for at in np.ndindex(*lead, rows, columns):
        *matrix, row, column = at
        group = column // across if across else 0
        if weight.order is not None:
            group = int(weight.order[(*matrix, column)])
        place = (*matrix, row // down if down else 0, group)
        value = float(numbers_of[at]) - (0.0 if weight.zero is None else float(weight.zero[place]))
        scale = float(weight.scale[place]) * (1.0 if weight.outer is None else float(weight.outer[tuple(matrix)]))
        assert values[at] == value * scale + (0.0 if weight.minimum is None else float(weight.minimum[place]))
    parts = (weight.codes, weight.scale, weight.zero, weight.minimum, weight.outer, weight.order)
    size = sum(part.nbytes for part in parts if part is not None)
    if kind.code_name in ("e2m1", "nf4", "u4"):
        size -= weight.codes.nbytes // 2
    assert tensor_bytes(tensor((*lead, rows, columns), kind)) == size
    assert np.allclose(weight.values(np.float32), values, rtol=1e-6)


@pytest.mark.parametrize("name", PACKED)
def test_packed_blocks_are_those_of_gguf(name: str) -> None:
    """Sizes and values of the package; a stack is its matrices."""
    assert PACKED[name] == GGML_QUANT_SIZES[GGMLQuantizationType[name]]
    elements, size = PACKED[name]
    kind = GGUF[name]
    assert isinstance(kind, PackedType)
    raw = RNG.integers(0, 256, (2, 3, 2 * size), np.uint8)
    with np.errstate(all="ignore"):
        expected = gguf.dequantize(raw, GGMLQuantizationType[name])
        assert np.array_equal(Packed(kind, raw).values(), expected.astype(np.float64), equal_nan=True)
    assert expected.shape == (2, 3, 2 * elements)
    assert tensor_bytes(tensor(expected.shape, kind)) == raw.nbytes
    assert kind.problem((3, elements + 1)) == f"rows of {elements + 1} are not whole blocks of {elements}"
    assert kind.problem((elements,)) is not None


@pytest.mark.parametrize("kind", [*KINDS.values(), PackedType.get("Q6_K")], ids=str)
def test_the_oracle_computes_with_the_values(kind: QuantType | PackedType) -> None:
    """An embedding of a quantised table: row by row the values, rounded once."""
    from plait.backends.base import Batch

    columns = 256 if isinstance(kind, PackedType) else 16
    b = Builder("m", "float32")
    x = b.embed("table", 9, columns)
    b.block = 0
    x = b.add(x, x)
    b.block = None
    module = b.finish({"logits": b.logits(x, "head", 5)})
    quantise_types(module, {"table": kind})
    found = weights(module)["table"].result.type
    assert isinstance(found, TensorType) and found.element_type == kind
    if isinstance(kind, PackedType):
        raw = RNG.integers(0, 120, (9, PACKED[kind.encoding][1]), np.uint8)
        table: Quantised | Packed = Packed(kind, raw)
    else:
        table = made(kind, 9, columns)
    head = RNG.normal(size=(5, columns)).astype(np.float32)
    tokens = np.array([8, 0, 3])
    batch = Batch(
        tokens=tokens, positions=np.arange(3), query_starts=np.array([0, 3]), kv_lens=np.array([3]), page_tables={},
        logit_rows=np.arange(3),
    )  # fmt: skip
    out = Oracle(module, {"table": table, "head": head}, {}, 4).step(batch)["logits"]
    rows = table.values()[tokens].astype(np.float32).astype(np.float64)
    assert np.array_equal(
        out, ((rows + rows).astype(np.float32).astype(np.float64) @ head.T.astype(np.float64)).astype(np.float32)
    )


def test_a_scale_takes_the_bytes_of_its_dtype() -> None:
    for name, size in {"float32": 4, "float16": 2, "bfloat16": 2, "e8m0": 1, "e4m3fn": 1}.items():
        assert dtype_bytes(SCALES[name]) == size
    assert element("float32") in SCALES.values()
