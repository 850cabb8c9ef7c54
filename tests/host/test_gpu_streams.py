"""The kernels that are bound by memory, in the interpreter, against float64. Tensors are cut out of wider ones, whose
other values must stay as they are. Legend: T rows, H width, N KV heads, D head_dim."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from plait.backends.kernels.gpu.interpret import NUMPY_TYPES
from plait.backends.kernels.gpu.kernel import Tile, Variant
from plait.backends.kernels.gpu.table import KERNELS
from tests.kernels import run, slack

Floats = NDArray[np.float64]

DTYPES = ("fp32", "bf16", "fp16")
MANY = 257
FP8 = {"fp8e4nv": 448.0, "fp8e4b8": 240.0, "fp8e5": 57344.0}

#: Four units in the last place of float32, where several operations round, and two of the others, relative.
ULPS = {"fp32": 2.0**-21, "bf16": 2.0**-8, "fp16": 2.0**-10}


def shapes(names: str, *values: tuple[Any, ...]) -> pytest.MarkDecorator:
    """Every dtype with every shape; shapes of many rows, which are slow, with one dtype each."""
    found = [(dtype, *v) for v in values for dtype in (DTYPES if v[0] != MANY else DTYPES[1:2])]
    return pytest.mark.parametrize(("dtype", *names.split(", ")), found)


def launch(
    name: str,
    pointers: dict[str, NDArray[Any] | None],
    constants: dict[str, Any] | None = None,
    tile: dict[str, int] | None = None,
    types: dict[str, str] | None = None,
    **scalars: float,
) -> None:
    kernel = KERNELS[name]
    found = {n: _type(array) for n, array in pointers.items() if array is not None}
    variant = Variant(name, {**found, **(types or {})}, constants or {}, Tile(tile or {}))
    run(kernel, variant, pointers, scalars)


def _type(array: NDArray[Any]) -> str:
    return next(name for name, dtype in NUMPY_TYPES.items() if dtype == array.dtype)


def wide(rng: np.random.Generator, rows: int, width: int, dtype: str, spare: int = 24) -> NDArray[Any]:
    """(rows, width) values about 1, `width + spare` apart."""
    return rng.standard_normal((rows, width + spare)).astype(NUMPY_TYPES[dtype])[:, :width]


def empty(rows: int, width: int, dtype: str) -> NDArray[Any]:
    """As `wide`, of NaN."""
    return np.full((rows, width + 40), np.nan, NUMPY_TYPES[dtype])[:, :width]


def stride(array: NDArray[Any]) -> int:
    return array.strides[0] // array.itemsize


def f64(array: NDArray[Any]) -> Floats:
    return array.astype(np.float64)


def close(got: NDArray[Any], expected: Floats, dtype: str, floor: float | Floats = 1.0) -> None:
    """Within two units in the last place (four in float32); below `floor` within those of `floor`."""
    whole = got.base if got.base is not None else got
    if whole.ndim == 2:
        assert np.isnan(f64(whole[:, got.shape[1] :])).all(), "wrote beside the rows"
    error = np.abs(f64(got) - expected) / np.maximum(np.abs(expected), floor)
    limit = ULPS[dtype] * (slack() if dtype == "fp32" else 1.0)
    assert error.max() <= limit, error.max()


@pytest.fixture
def rng() -> np.random.Generator:
    return np.random.default_rng(0)


def normed(x: Floats, eps: float) -> Floats:
    return x / np.sqrt((x**2).mean(axis=-1, keepdims=True) + eps)


@shapes("rows, width", (1, 64), (MANY, 40), (5, 576), (3, 1024))
def test_rms_norm(rng: np.random.Generator, dtype: str, rows: int, width: int) -> None:
    _norm(rng, dtype, rows, 1, width, False, offset=1.0 if rows == 5 else 0.0)


#: Of heads of a row: (rows, groups, width of a group, whether each has weights of its own).
GROUPED = ((1, 3, 64, False), (MANY, 2, 16, True), (5, 9, 80, False), (4, 5, 24, True))


@shapes("rows, groups, width, apart", *GROUPED)
def test_rms_norm_of_heads(
    rng: np.random.Generator, dtype: str, rows: int, groups: int, width: int, apart: bool
) -> None:
    _norm(rng, dtype, rows, groups, width, apart, offset=1.0 if apart else 0.0)


@pytest.mark.parametrize("biased", [False, True])
@shapes("rows, groups, width, apart", (1, 1, 64, False), (5, 1, 576, False), (3, 1, 1024, False), *GROUPED)
def test_layer_norm(
    rng: np.random.Generator, dtype: str, rows: int, groups: int, width: int, apart: bool, biased: bool
) -> None:
    _norm(rng, dtype, rows, groups, width, apart, layer=True, biased=biased)


def _norm(
    rng: np.random.Generator,
    dtype: str,
    rows: int,
    groups: int,
    width: int,
    apart: bool,
    *,
    offset: float = 0.0,
    layer: bool = False,
    biased: bool = False,
) -> None:
    """Groups of a row, each by itself; `apart`: each with weights of its own."""
    whole = groups * width
    x, out = wide(rng, rows, whole, dtype), empty(rows, whole, dtype)
    weight, bias = wide(rng, 2, whole if apart else width, dtype, 0)
    eps = 1e-5
    if layer:
        x += np.asarray(3, x.dtype)  # far from mean zero
    else:
        x[-1] *= np.asarray(1e-4, x.dtype)  # a row whose mean of squares is less than eps
    own = {"bias": bias if biased else None} if layer else {}
    launch(
        "layer_norm" if layer else "rms_norm",
        {"x": x, "weight": weight, **own, "out": out},
        {"GROUPS": groups, **({"HAS_BIAS": biased} if layer else {}), "BLOCK": 1 << (width - 1).bit_length()},
        {"BLOCK_GROUPS": 1 if groups == 1 else 4},
        {"bias": dtype} if layer else None,
        rows=rows,
        H=width,
        x_stride=stride(x),
        out_stride=stride(out),
        weight_stride=width if apart else 0,
        eps=eps,
        **({} if layer else {"offset": offset}),
    )
    values, scale = f64(x).reshape(rows, groups, width), f64(weight).reshape(-1, width) + offset
    if layer:
        values = values - values.mean(axis=-1, keepdims=True)
    expected = normed(values, eps) * scale + (f64(bias).reshape(-1, width) if biased else 0.0)
    # A mean is taken off values that are as large.
    close(out, expected.reshape(rows, -1), dtype, floor=4.0 if layer else 1e-2)


@shapes("rows, width, in_place", (1, 64, False), (MANY, 40, True), (5, 576, False), (4, 64, True))
def test_add_rms_norm(rng: np.random.Generator, dtype: str, rows: int, width: int, in_place: bool) -> None:
    x, y, weight = wide(rng, rows, width, dtype), wide(rng, rows, width, dtype, 8), wide(rng, 1, width, dtype, 0)[0]
    before = f64(x)
    total, out = x if in_place else empty(rows, width, dtype), empty(rows, width, dtype)
    launch(
        "add_rms_norm",
        {"x": x, "y": y, "weight": weight, "total": total, "out": out},
        {"BLOCK": 1 << (width - 1).bit_length()},
        rows=rows,
        H=width,
        x_stride=stride(x),
        y_stride=stride(y),
        total_stride=stride(total),
        out_stride=stride(out),
        eps=1e-6,
        offset=0.5 if in_place else 0.0,
    )
    expected = (before + f64(y)).astype(NUMPY_TYPES[dtype])
    np.testing.assert_array_equal(f64(total), f64(expected))
    # The norm of the rounded sum: that of the sum itself is another number.
    scale = f64(weight) + (0.5 if in_place else 0.0)
    close(out, normed(f64(expected), 1e-6) * scale, dtype, floor=1e-2)


@shapes("rows, width", (1, 8), (MANY, 100), (7, 300))
def test_embed_and_gather_rows(rng: np.random.Generator, dtype: str, rows: int, width: int) -> None:
    table = wide(rng, 50, width, dtype, 0)
    tokens = rng.integers(0, 50, rows).astype(np.int32)
    tokens[-1] = 49
    out = empty(rows, width, dtype)
    launch(
        "embed",
        {"tokens": tokens, "table": table, "out": out},
        tile={"BLOCK": 128},
        rows=rows,
        H=width,
        out_stride=stride(out),
        factor=1.0,
    )
    index, few = np.array([rows - 1, rows // 2, rows // 2], np.int32), empty(3, width, dtype)
    launch(
        "gather_rows",
        {"x": out, "index": index, "out": few},
        tile={"BLOCK": 128},
        rows=3,
        H=width,
        x_stride=stride(out),
        out_stride=stride(few),
    )
    close(out, f64(table[tokens]), dtype)
    np.testing.assert_array_equal(out, table[tokens])
    np.testing.assert_array_equal(few, table[tokens[index]])


@pytest.mark.parametrize("dtype", DTYPES)
def test_embed_times_a_factor(rng: np.random.Generator, dtype: str) -> None:
    table, out, factor = wide(rng, 50, 300, dtype, 0), empty(7, 300, dtype), math.sqrt(300)
    tokens = rng.integers(0, 50, 7).astype(np.int32)
    launch(
        "embed",
        {"tokens": tokens, "table": table, "out": out},
        tile={"BLOCK": 128},
        rows=7,
        H=300,
        out_stride=stride(out),
        factor=factor,
    )
    close(out, f64(table[tokens]) * factor, dtype, floor=1e-3)


def _silu(x: Floats) -> Floats:
    return x / (1 + np.exp(-x))


def _gelu(x: Floats) -> Floats:
    return x / 2 * np.vectorize(math.erfc)(-x / np.sqrt(2))


def _gelu_tanh(x: Floats) -> Floats:
    return x / 2 * (1 + np.tanh(np.sqrt(2 / np.pi) * (x + 0.044715 * x**3)))


@pytest.mark.parametrize(
    ("name", "constants", "formula"),
    [
        ("add", {}, lambda x, y: x + y),
        ("silu_mul", {}, lambda x, y: _silu(x) * y),
        ("gelu_mul", {"APPROXIMATE": False}, lambda x, y: _gelu(x) * y),
        ("gelu_mul", {"APPROXIMATE": True}, lambda x, y: _gelu_tanh(x) * y),
    ],
    ids=["add", "silu", "gelu", "gelu_tanh"],
)
@shapes("rows, width", (1, 40), (MANY, 24), (4, 300))
def test_binary(
    rng: np.random.Generator, dtype: str, name: str, constants: dict[str, Any], formula: Any, rows: int, width: int
) -> None:
    both = wide(rng, rows, 2 * width, dtype)  # gate and up, as one product leaves them
    both *= np.asarray(3, both.dtype)
    x, y, out = both[:, :width], both[:, width:], empty(rows, width, dtype)
    x[0, :8] = [-0.0, 0.0, 30.0, -30.0, 88.0, -200.0, 1e4, -1e4]
    with np.errstate(over="ignore"):
        expected = formula(f64(x), f64(y))
    # 1 + erf cancels far to the left: what is left of it is wrong by a unit of 1.
    floor = np.maximum(np.abs(f64(x) * f64(y)), 1.0) if name == "gelu_mul" else 1.0
    launch(
        name,
        {"x": x, "y": y, "out": out},
        constants,
        {"BLOCK": 128},
        rows=rows,
        N=width,
        x_stride=stride(x),
        y_stride=stride(y),
        out_stride=stride(out),
    )
    close(out, expected, dtype, floor)
    again = x if width != 300 else y  # in place
    launch(
        name,
        {"x": x, "y": y, "out": again},
        constants,
        {"BLOCK": 128},
        rows=rows,
        N=width,
        x_stride=stride(x),
        y_stride=stride(y),
        out_stride=stride(again),
    )
    np.testing.assert_array_equal(again, out)


@pytest.mark.parametrize(
    ("name", "constants", "numbers", "formula"),
    [
        ("gelu", {"APPROXIMATE": False}, {}, _gelu),
        ("gelu", {"APPROXIMATE": True}, {}, _gelu_tanh),
        ("scale", {}, {"factor": -0.3}, lambda x: -0.3 * x),
        ("softcap", {}, {"factor": 0.7, "limit": 30.0}, lambda x: 30 * np.tanh(0.7 * x / 30)),
    ],
    ids=["gelu", "gelu_tanh", "scale", "softcap"],
)
@shapes("rows, width", (1, 40), (MANY, 24), (4, 300))
def test_unary(
    rng: np.random.Generator,
    dtype: str,
    name: str,
    constants: dict[str, Any],
    numbers: dict[str, float],
    formula: Any,
    rows: int,
    width: int,
) -> None:
    x, out = wide(rng, rows, width, dtype), empty(rows, width, dtype)
    x *= np.asarray(10, x.dtype)  # to both sides of where the softcap bends
    x[0, :10] = [-0.0, 0.0, 30.0, -30.0, 88.0, -200.0, 1e4, -1e4, 1e-3, -7.4]
    with np.errstate(over="ignore"):
        expected = formula(f64(x))
    # 1 + erf cancels far to the left; all digits of what is small are kept by the others.
    floor = np.maximum(np.abs(f64(x)), 1.0) if name == "gelu" else 1e-3
    for target in (out, x):  # and in place
        strides = {"x_stride": stride(x), "out_stride": stride(target)}
        launch(name, {"x": x, "out": target}, constants, {"BLOCK": 128}, rows=rows, N=width, **strides, **numbers)
        close(target, expected, dtype, floor) if target is out else np.testing.assert_array_equal(x, out)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("width", [1, 100, 256, 1000])
def test_argmax(rng: np.random.Generator, dtype: str, width: int) -> None:
    logits = wide(rng, 12, width, dtype)
    last = width - 1
    logits[1, [0, last]] = 9.0  # the first of equals, in one lane and in different ones
    logits[2, [last // 2, last]] = 9.0
    logits[3] = -7.0
    logits[4] = -np.inf
    logits[5], logits[5, last] = -np.inf, -1e30 if dtype != "fp16" else -6e4
    logits[6, last] = np.inf
    logits[7, [last // 2, last]] = np.nan
    logits[8, last // 3], logits[8, last] = np.inf, np.nan
    logits[9], logits[9, last] = -0.0, 0.0
    logits[10], logits[10, last // 2] = -5.0, -0.0
    out = np.full(12, -7, np.int32)
    launch("argmax", {"logits": logits, "out": out}, tile={"BLOCK": 128}, rows=12, V=width, stride=stride(logits))
    finite = np.isfinite(f64(logits).max(axis=1))
    np.testing.assert_array_equal(out, np.where(finite, f64(logits).argmax(axis=1), -1))


def _turn(x: Floats, angle: Floats, rotary: int) -> Floats:
    """(T, heads, D) turned by (T, rotary / 2) angles, one complex number per pair."""
    half = rotary // 2
    turned = (x[..., :half] + 1j * x[..., half:rotary]) * np.exp(1j * angle)[:, None, :]
    return np.concatenate([turned.real, turned.imag, x[..., rotary:]], axis=-1)


def _angles(rng: np.random.Generator, rows: int, rotary: int) -> tuple[Floats, Any, Any]:
    angle = rng.uniform(-50, 50, (rows, rotary // 2))
    cos, sin = np.cos(angle).astype(np.float32), np.sin(angle).astype(np.float32)
    return angle, cos if rotary else None, sin if rotary else None


@shapes("rows, heads, head_dim, rotary", (1, 3, 64, 64), (MANY, 2, 16, 8), (3, 9, 80, 80), (4, 5, 80, 32))
def test_rope(rng: np.random.Generator, dtype: str, rows: int, heads: int, head_dim: int, rotary: int) -> None:
    x, out = wide(rng, rows, heads * head_dim, dtype), empty(rows, heads * head_dim, dtype)
    angle, cos, sin = _angles(rng, rows, rotary)
    constants = {"HEADS": heads, "HEAD_DIM": head_dim, "ROTARY_DIM": rotary}
    pointers = {"x": x, "cos": cos, "sin": sin, "out": out}
    launch("rope", pointers, constants, {"BLOCK_HEADS": 4}, rows=rows, x_stride=stride(x), out_stride=stride(out))
    expected = _turn(f64(x).reshape(rows, heads, head_dim), angle, rotary).reshape(rows, -1)
    close(out, expected, dtype)
    launch(
        "rope",
        {**pointers, "out": x},
        constants,
        {"BLOCK_HEADS": 4},
        rows=rows,
        x_stride=stride(x),
        out_stride=stride(x),
    )
    np.testing.assert_array_equal(x, out)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("pages", ["", *FP8])
@pytest.mark.parametrize(
    ("rows", "heads", "kv_heads", "head_dim", "rotary"),
    [(1, 4, 2, 64, 64), (67, 3, 1, 16, 0), (5, 9, 3, 80, 32), (4, 8, 8, 32, 32), (6, 0, 2, 32, 32)],
)
def test_rope_write(
    rng: np.random.Generator,
    dtype: str,
    pages: str,
    rows: int,
    heads: int,
    kv_heads: int,
    head_dim: int,
    rotary: int,
) -> None:
    page_tokens, page_count = 4, rows
    q_width, width = heads * head_dim, kv_heads * head_dim
    qkv = wide(rng, rows, q_width + 2 * width, dtype)
    q, k, v = np.split(qkv, [q_width, q_width + width], axis=1)
    k[0, :2], v[0, :2] = [1000.0, -1000.0], [60000.0, -60000.0]  # more than fp8 holds
    q_out = empty(rows, q_width, dtype)
    kind = NUMPY_TYPES[pages or dtype]
    k_pages, v_pages = (np.full((page_count, page_tokens, kv_heads, head_dim), np.nan, kind) for _ in "kv")
    slots = rng.permutation(page_count * page_tokens)[:rows].astype(np.int32)
    if rows > 3:
        slots[[1, -1]] = -1  # padding of a captured graph
    angle, cos, sin = _angles(rng, rows, rotary)
    k_scale, v_scale = 0.75, 1.5
    launch(
        "rope_write",
        {
            **{"q": q if heads else None, "k": k, "v": v, "cos": cos, "sin": sin, "slots": slots},
            **{"q_out": q_out if heads else None, "k_pages": k_pages, "v_pages": v_pages},
        },
        {"HEADS": heads, "KV_HEADS": kv_heads, "HEAD_DIM": head_dim, "ROTARY_DIM": rotary},
        {"BLOCK_HEADS": 4},
        {"q": dtype, "q_out": dtype, "cos": "fp32", "sin": "fp32"},
        rows=rows,
        q_stride=stride(qkv),
        k_stride=stride(qkv),
        v_stride=stride(qkv),
        q_out_stride=stride(q_out),
        k_scale=k_scale,
        v_scale=v_scale,
    )
    if heads:
        close(q_out, _turn(f64(q).reshape(rows, heads, head_dim), angle, rotary).reshape(rows, -1), dtype)
    written = slots >= 0
    for page, values, scale in (
        (k_pages, _turn(f64(k).reshape(rows, kv_heads, head_dim), angle, rotary), k_scale),
        (v_pages, f64(v).reshape(rows, kv_heads, head_dim), v_scale),
    ):
        flat = f64(page).reshape(-1, kv_heads, head_dim)
        assert np.isnan(np.delete(flat, slots[written], axis=0)).all(), "wrote beside the slots"
        got, expected = flat[slots[written]], values[written]
        if pages:
            expected = np.clip(expected / scale, -FP8[pages], FP8[pages])
            # Half a unit in the last place (3 bits of mantissa, 2 of e5m2), after the rounding to the model's type.
            half = 2.0**-4 if pages != "fp8e5" else 2.0**-3
            assert (np.abs(got - expected) <= np.abs(expected) * (half + ULPS[dtype]) + 2.0**-10).all()
        else:
            assert (np.abs(got - expected) <= np.maximum(np.abs(expected), 1) * ULPS[dtype]).all()


@pytest.mark.parametrize("pages", FP8)
def test_fp8_pages_hold_the_nearest_codes(rng: np.random.Generator, pages: str) -> None:
    """v unturned, scale 1: every 16-bit value becomes the code that lies nearest, bit by bit."""
    v = (rng.standard_normal((4, 256)) * np.exp(rng.uniform(-12, 12, (4, 256)))).astype(NUMPY_TYPES["bf16"])
    k_pages, v_pages = (np.full((1, 4, 1, 256), np.nan, NUMPY_TYPES[pages]) for _ in "kv")
    launch(
        "rope_write",
        {
            **{"q": None, "k": v, "v": v, "cos": None, "sin": None, "slots": np.arange(4, dtype=np.int32)},
            **{"q_out": None, "k_pages": k_pages, "v_pages": v_pages},
        },
        {"HEADS": 0, "KV_HEADS": 1, "HEAD_DIM": 256, "ROTARY_DIM": 0},
        {"BLOCK_HEADS": 1},
        {"q": "bf16", "q_out": "bf16", "cos": "fp32", "sin": "fp32"},
        rows=4,
        **dict.fromkeys(("q_stride", "k_stride", "v_stride", "q_out_stride"), 256),
        k_scale=1.0,
        v_scale=1.0,
    )
    codes = np.arange(256, dtype=np.uint8).view(NUMPY_TYPES[pages]).astype(np.float64)
    codes = codes[np.isfinite(codes)]
    distance = np.abs(f64(v).reshape(-1, 1) - codes).min(axis=1)
    for page in (k_pages, v_pages):
        np.testing.assert_array_equal(np.abs(f64(page).reshape(-1) - f64(v).reshape(-1)), distance)
