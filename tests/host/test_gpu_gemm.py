"""The matrix products in the interpreter, against float64. Rows are cut out of wider ones, whose other values stay.

Legend: T rows, N columns of out, K columns of x.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from plait.backends.kernels.gpu.gemm import even_k
from plait.backends.kernels.gpu.interpret import NUMPY_TYPES
from plait.backends.kernels.gpu.kernel import Constant, Tile, Variant
from plait.backends.kernels.gpu.table import KERNELS
from plait.backends.quantised import to_fnuz
from plait.errors import PlaitError
from plait.ir.numbers import Quantised
from plait.ir.types import QuantType
from tests.kernels import here, run

Floats = NDArray[np.float64]

DTYPES = ("fp32", "bf16", "fp16")
FP8 = ("fp8e4nv", "fp8e4b8")
#: Half a unit in the last place, relative.
HALF_ULP = {"fp32": 2.0**-24, "bf16": 2.0**-8, "fp16": 2.0**-11}

SMALL = {"BLOCK_M": 16, "BLOCK_N": 16, "BLOCK_K": 32, "GROUP_M": 2, "XCDS": 1}
WIDE = {"BLOCK_M": 64, "BLOCK_N": 32, "BLOCK_K": 64, "GROUP_M": 8, "XCDS": 8}


@dataclass(frozen=True)
class Sizes:
    rows: int = 17
    n: int = 40
    k: int = 96


@pytest.fixture
def rng() -> np.random.Generator:
    return np.random.default_rng(0)


def array(rng: np.random.Generator, rows: int, width: int, dtype: str, spare: int = 0) -> NDArray[Any]:
    """(rows, width) values about 1, `width + spare` apart."""
    return rng.standard_normal((rows, width + spare)).astype(NUMPY_TYPES[dtype])[:, :width]


def f64(values: NDArray[Any]) -> Floats:
    return values.astype(np.float64)


class Run:
    """One launch: x is strided, and so are the residual and out, in which nothing beside the rows may change."""

    def __init__(
        self,
        rng: np.random.Generator,
        dtype: str,
        sizes: Sizes,
        *,
        bias: bool = False,
        residual: bool = False,
        factor: float = 1.0,
    ) -> None:
        self.dtype, self.sizes, self.factor = dtype, sizes, factor
        self.x = array(rng, sizes.rows, sizes.k, dtype, spare=16)
        self.bias = array(rng, 1, sizes.n, dtype)[0] if bias else None
        self.residual = array(rng, sizes.rows, sizes.n, dtype, spare=7) if residual else None

    def go(
        self,
        name: str,
        w: dict[str, tuple[str, NDArray[Any] | None]],
        constants: dict[str, Constant],
        tile: dict[str, int] | None = None,
        out_dtype: str = "",
    ) -> NDArray[Any]:
        """Launch; `w` holds the pointers that only this kernel has, with their types."""
        kernel, sizes, out_dtype = KERNELS[name], self.sizes, out_dtype or self.dtype
        whole = np.full((sizes.rows, sizes.n + 9), np.nan, NUMPY_TYPES[out_dtype])
        own = {
            "x": (self.dtype, self.x),
            "bias": (self.dtype, self.bias),
            "residual": (self.dtype, self.residual),
            "out": (out_dtype, whole),
        }
        pointers = {**own, **w}
        given: dict[str, Constant] = {
            "HAS_BIAS": self.bias is not None,
            "HAS_RESIDUAL": self.residual is not None,
            "ACTIVATION": "none",
            "EVEN_K": even_k(sizes.k),
            **constants,
        }
        scalars = {
            "rows": sizes.rows,
            "N": sizes.n,
            "K": sizes.k,
            "x_stride": _stride(pointers["x"][1]),
            "residual_stride": _stride(self.residual),
            "out_stride": sizes.n + 9,
            "factor": self.factor,
        }
        variant = Variant(
            name,
            {n: pointers[n][0] for n in kernel.pointers},
            {n: given[n] for n in kernel.constants},
            Tile(tile or SMALL),
        )
        run(
            kernel,
            variant,
            {n: pointers[n][1] for n in kernel.pointers},
            {n: v for n, v in scalars.items() if n in kernel.scalars},
        )
        assert np.isnan(f64(whole[:, sizes.n :])).all(), "wrote beside the rows"
        return whole[:, : sizes.n]

    def check(self, got: NDArray[Any], w: Floats, x: Floats | None = None, loss: float = 0.0) -> None:
        """got = x w^T + bias + residual, summed in float32 (or with that `loss`) and rounded once."""
        x = f64(self.x) if x is None else x
        magnitude = np.abs(x) @ np.abs(w).T + self._added(np.abs)
        close(got, x @ w.T + self._added(np.asarray), magnitude, x.shape[1] + loss / HALF_ULP["fp32"])

    def _added(self, of: Any) -> Floats | float:
        parts = [of(f64(part)) for part in (self.bias, self.residual) if part is not None]
        return sum(parts, 0.0)


def _stride(values: NDArray[Any] | None) -> int:
    return 0 if values is None else values.strides[0] // values.itemsize


def close(got: NDArray[Any], expected: Floats, magnitude: Floats | float, terms: float) -> None:
    """Within one rounding of the sum, and what `terms` additions in float32 lose at most (Higham 2002, eq. 4.4)."""
    dtype = next(name for name in DTYPES if NUMPY_TYPES[name] == got.dtype)
    limit = HALF_ULP[dtype] * np.abs(expected) + (terms + 4) * HALF_ULP["fp32"] * magnitude
    excess = np.abs(f64(got) - expected) / np.maximum(limit, 1e-30)
    assert excess.max() <= 1.01, f"{excess.max():.3g} times the limit"


def weight(rng: np.random.Generator, n: int, k: int, dtype: str) -> NDArray[Any]:
    """N rows that end where the next would begin, as the last of a file do."""
    return array(rng, n, k, dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("residual", [False, True])
def test_gemm(rng: np.random.Generator, dtype: str, bias: bool, residual: bool) -> None:
    launch, w = Run(rng, dtype, Sizes(), bias=bias, residual=residual), weight(rng, 40, 96, dtype)

    launch.check(launch.go("gemm", {"w": (dtype, w)}, {}), f64(w))


@pytest.mark.parametrize("tile", [SMALL, WIDE], ids=["small", "wide"])
@pytest.mark.parametrize("rows", [1, 3, 17, 257])
@pytest.mark.parametrize(("n", "k"), [(33, 80), (16, 64), (70, 36)])
def test_gemm_of_ragged_sizes(rng: np.random.Generator, rows: int, n: int, k: int, tile: dict[str, int]) -> None:
    launch, w = Run(rng, "bf16", Sizes(rows, n, k), residual=True), weight(rng, n, k, "bf16")

    launch.check(launch.go("gemm", {"w": ("bf16", w)}, {}, tile), f64(w))


@pytest.mark.parametrize("xcds", [1, 3, 8])
@pytest.mark.parametrize("group", [1, 2, 8])
def test_every_order_of_programs_covers_every_tile(rng: np.random.Generator, xcds: int, group: int) -> None:
    launch, w = Run(rng, "fp32", Sizes(77, 50, 32)), weight(rng, 50, 32, "fp32")

    launch.check(launch.go("gemm", {"w": ("fp32", w)}, {}, {**SMALL, "GROUP_M": group, "XCDS": xcds}), f64(w))


@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
def test_logits_are_float32(rng: np.random.Generator, dtype: str) -> None:
    launch, w = Run(rng, dtype, Sizes()), weight(rng, 40, 96, dtype)

    got = launch.go("gemm", {"w": (dtype, w)}, {}, out_dtype="fp32")

    assert got.dtype == np.float32
    launch.check(got, f64(w))


def test_a_wide_tile_is_finished_in_parts(rng: np.random.Generator) -> None:
    launch = Run(rng, "bf16", Sizes(18, 300, 32), bias=True, residual=True)
    w = weight(rng, 300, 32, "bf16")

    launch.check(launch.go("gemm", {"w": ("bf16", w)}, {}, {**SMALL, "BLOCK_N": 256}), f64(w))


@pytest.mark.parametrize("even", [0, 1, 32, 64])
def test_a_mask_more_than_needed_changes_nothing(rng: np.random.Generator, even: int) -> None:
    launch, w = Run(rng, "fp32", Sizes(5, 20, 64)), weight(rng, 20, 64, "fp32")

    launch.check(launch.go("gemm", {"w": ("fp32", w)}, {"EVEN_K": even}), f64(w))


def test_rows_of_a_few_do_not_depend_on_the_others(rng: np.random.Generator) -> None:
    launch, w = Run(rng, "bf16", Sizes(13)), weight(rng, 40, 96, "bf16")
    many = launch.go("gemm", {"w": ("bf16", w)}, {})
    launch.x, launch.sizes = launch.x[4:5], Sizes(1)

    np.testing.assert_array_equal(launch.go("gemm", {"w": ("bf16", w)}, {})[0], many[4])


def _act(kind: str, z: Floats) -> Floats:
    if kind == "silu":
        return np.asarray(z * np.exp(-np.logaddexp(0.0, -z)))
    if kind == "gelu":
        return np.asarray(0.5 * z * (1 + np.array([math.erf(v) for v in z.ravel() / math.sqrt(2)]).reshape(z.shape)))
    return np.asarray(0.5 * z * (1 + np.tanh(math.sqrt(2 / math.pi) * (z + 0.044715 * z**3))))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("activation", ["silu", "gelu", "gelu_tanh"])
@pytest.mark.parametrize("bias", [False, True])
def test_gemm_gated(rng: np.random.Generator, dtype: str, activation: str, bias: bool) -> None:
    sizes = Sizes(19, 40, 96)
    launch = Run(rng, dtype, sizes)
    launch.bias = array(rng, 1, 80, dtype)[0] if bias else None
    w = weight(rng, 80, 96, dtype) * np.asarray(0.3, NUMPY_TYPES[dtype])
    got = launch.go("gemm_gated", {"w": (dtype, w)}, {"ACTIVATION": activation})

    both = f64(launch.x) @ f64(w).T + (f64(launch.bias) if launch.bias is not None else 0.0)
    gate, up = both[:, :40], both[:, 40:]
    lost = (sizes.k + 4) * HALF_ULP["fp32"] * (np.abs(f64(launch.x)) @ np.abs(f64(w)).T + 4)
    # The slope of every activation is less than 1.2; the activation itself is good to a few units in float32.
    allowed = 1.2 * lost[:, :40] * np.abs(up) + lost[:, 40:] * np.abs(gate) + 2.0**-20 * np.abs(gate * up)
    expected = _act(activation, gate) * up
    assert (np.abs(f64(got) - expected) <= 1.01 * HALF_ULP[dtype] * np.abs(expected) + allowed).all()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("activation", ["scale", "gelu", "gelu_tanh"])
@pytest.mark.parametrize(("name", "bias"), [("gemm", True), ("gemm", False), ("gemm_int8", True), ("gemm_int4", True),
                                            ("gemm_fp8", True)])  # fmt: skip
def test_an_activation_stands_between_bias_and_residual(
    rng: np.random.Generator, dtype: str, activation: str, name: str, bias: bool
) -> None:
    launch = Run(rng, dtype, Sizes(19, 40, 96), bias=bias, residual=True, factor=-0.3)
    w = rng.integers(-7, 8, (40, 96)).astype(np.float64)
    scale = np.full((40, 1), 0.03125, np.float32)
    codes = w.astype(np.int8) + np.int8(8)
    pointers: dict[str, dict[str, tuple[str, NDArray[Any] | None]]] = {
        "gemm": {"w": (dtype, (w * 0.03125).astype(NUMPY_TYPES[dtype]))},
        "gemm_int8": {"w": ("i8", w.astype(np.int8)), "scales": ("fp32", scale), "zeros": ("fp32", None)},
        "gemm_int4": {
            "w": ("i8", codes[:, ::2] | codes[:, 1::2] << 4),
            "scales": ("fp32", scale),
            "zeros": ("fp32", None),
        },
        "gemm_fp8": {"w": ("fp8e4nv", w.astype(NUMPY_TYPES["fp8e4nv"])), "scale": ("fp32", scale)},
    }
    constants = {"ACTIVATION": activation, "GROUP": 0, "HAS_ZEROS": False, "SCALE_N": 1, "SCALE_K": 0}
    got = launch.go(name, pointers[name], constants, {**SMALL, "BLOCK_N": 256} if name == "gemm" else None)

    w = w * 0.03125
    made = f64(launch.x) @ w.T + (0.0 if launch.bias is None else f64(launch.bias))
    expected = made * -0.3 if activation == "scale" else _act(activation, made)
    assert launch.residual is not None
    # The slope of an activation is less than 1.2, and it is good to a few units in float32.
    magnitude = 1.2 * (np.abs(f64(launch.x)) @ np.abs(w).T + 4) + np.abs(f64(launch.residual))
    close(got, expected + f64(launch.residual), magnitude, 96 + 16)


@pytest.mark.parametrize("activation", ["silu", "gelu", "gelu_tanh"])
def test_a_gate_far_from_zero(rng: np.random.Generator, activation: str) -> None:
    launch, sizes = Run(rng, "fp32", Sizes(1, 16, 32)), Sizes(1, 16, 32)
    launch.sizes, launch.x = sizes, np.ones((1, 32), np.float32)
    w = np.zeros((32, 32), np.float32)
    w[:16, 0] = np.linspace(-200, 200, 16)
    w[16:, 0] = 1.0

    got = launch.go("gemm_gated", {"w": ("fp32", w)}, {"ACTIVATION": activation})

    np.testing.assert_allclose(got[0], _act(activation, f64(w[:16, 0])), rtol=1e-6, atol=1e-6)


def _grouped(values: NDArray[Any], group: int, k: int) -> Floats:
    """Scales (N, groups) for every column."""
    return np.repeat(f64(values), group or k, 1)[:, :k]


@pytest.mark.slow
@pytest.mark.parametrize("name", ["gemm_int8", "gemm_int4"])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("zeros", [False, True])
@pytest.mark.parametrize(("group", "k"), [(0, 96), (16, 96), (32, 80), (64, 200), (128, 130)])
def test_integer_weights(rng: np.random.Generator, name: str, dtype: str, zeros: bool, group: int, k: int) -> None:
    sizes = Sizes(17, 35, k)
    launch = Run(rng, dtype, sizes, bias=True, residual=True)
    groups = -(-k // group) if group else 1
    four = name == "gemm_int4"
    codes = rng.integers(0, 16, (35, k)) if four else rng.integers(-128, 128, (35, k))
    stored = (codes[:, ::2] | codes[:, 1::2] << 4).astype(np.uint8).view(np.int8) if four else codes.astype(np.int8)
    kind = "fp16" if dtype == "bf16" else dtype  # scales may be of another type than x
    scales = (rng.uniform(0.5, 1.5, (35, groups)) / (8 if four else 128)).astype(NUMPY_TYPES[kind])
    zero = rng.uniform(0, 15, (35, groups)).astype(NUMPY_TYPES[kind])

    got = launch.go(
        name,
        {"w": ("i8", stored), "scales": (kind, scales), "zeros": (kind, zero if zeros else None)},
        {"GROUP": group, "HAS_ZEROS": zeros},
    )

    offset = _grouped(zero, group, k) if zeros else (8.0 if four else 0.0)
    exact = (codes - offset).astype(np.float32) * _grouped(scales, group, k).astype(np.float32)
    launch.check(got, f64(exact.astype(NUMPY_TYPES[dtype])))


@pytest.mark.parametrize("name", ["gemm_int8", "gemm_int4"])
@pytest.mark.parametrize("block_k", [32, 64, 128])
def test_steps_longer_and_shorter_than_groups(rng: np.random.Generator, name: str, block_k: int) -> None:
    sizes = Sizes(3, 20, 256)
    launch = Run(rng, "bf16", sizes)
    four = name == "gemm_int4"
    codes = rng.integers(0, 16, (20, 256)) if four else rng.integers(-8, 8, (20, 256))
    stored = (codes[:, ::2] | codes[:, 1::2] << 4).astype(np.uint8).view(np.int8) if four else codes.astype(np.int8)
    scales = 2.0 ** rng.integers(-3, 3, (20, 4)).astype(np.float32)

    got = launch.go(
        name,
        {"w": ("i8", stored), "scales": ("fp32", scales), "zeros": ("fp32", None)},
        {"GROUP": 64, "HAS_ZEROS": False},
        {**SMALL, "BLOCK_K": block_k},
    )

    launch.check(got, (codes - 8.0 * four) * _grouped(scales, 64, 256))


def _codes(rng: np.random.Generator, rows: int, width: int, flavour: str) -> NDArray[Any]:
    """Every finite code, at random."""
    kind = NUMPY_TYPES[flavour]
    finite = np.arange(256, dtype=np.uint8)
    finite = finite[np.isfinite(f64(finite.view(kind)))]
    return rng.choice(finite, (rows, width)).view(kind)


#: SCALE_N, SCALE_K: one scale, one per row, one per block, and blocks of another shape.
LAYOUTS = [(0, 0), (1, 0), (32, 32), (16, 64), (128, 128), (24, 96), (1, 32)]


def _blocks(rng: np.random.Generator, layout: tuple[int, int], n: int, k: int) -> tuple[NDArray[np.float32], Floats]:
    """Scales as stored, and for every weight."""
    rows, columns = layout[0] or n, layout[1] or k
    scale = rng.uniform(0.001, 0.01, (-(-n // rows), -(-k // columns))).astype(np.float32)
    return scale, f64(np.repeat(np.repeat(scale, rows, 0), columns, 1)[:n, :k])


@pytest.mark.slow
@pytest.mark.parametrize("flavour", FP8)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_fp8_weights(rng: np.random.Generator, flavour: str, dtype: str, layout: tuple[int, int]) -> None:
    sizes = Sizes(17, 50, 200)
    launch = Run(rng, dtype, sizes, bias=True, residual=True)
    w = _codes(rng, 50, 200, flavour)
    stored, scale = _blocks(rng, layout, 50, 200)

    got = launch.go(
        "gemm_fp8", {"w": (flavour, w), "scale": ("fp32", stored)}, {"SCALE_N": layout[0], "SCALE_K": layout[1]}
    )

    exact = f64(w) * scale
    if layout[1]:
        exact = f64((w.astype(np.float32) * scale.astype(np.float32)).astype(NUMPY_TYPES[dtype]))
    launch.check(got, exact)


def test_a_step_over_two_scales_is_refused(rng: np.random.Generator) -> None:
    launch = Run(rng, "bf16", Sizes(5, 50, 200))
    scale, _ = _blocks(rng, (32, 48), 50, 200)

    with pytest.raises(PlaitError, match="one scale along K"):
        launch.go(
            "gemm_fp8",
            {"w": ("fp8e4nv", _codes(rng, 50, 200, "fp8e4nv")), "scale": ("fp32", scale)},
            {"SCALE_N": 32, "SCALE_K": 48},
        )


@pytest.mark.parametrize("layout", LAYOUTS)
def test_both_flavours_of_one_checkpoint_agree(rng: np.random.Generator, layout: tuple[int, int]) -> None:
    sizes = Sizes(5, 50, 200)
    launch = Run(rng, "bf16", sizes)
    w = _codes(rng, 50, 200, "fp8e4nv")
    scale, _ = _blocks(rng, layout, 50, 200)
    constants: dict[str, Constant] = {"SCALE_N": layout[0], "SCALE_K": layout[1]}

    fn = launch.go("gemm_fp8", {"w": ("fp8e4nv", w), "scale": ("fp32", scale)}, constants)
    there = to_fnuz(Quantised(QuantType.get("e4m3fn", "float32", layout), w, scale))
    fnuz = launch.go("gemm_fp8", {"w": ("fp8e4b8", there.codes), "scale": ("fp32", there.scale)}, constants)

    np.testing.assert_array_equal(fn, fnuz)


@pytest.mark.slow
@pytest.mark.parametrize("flavour", FP8)
@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
@pytest.mark.parametrize("x_group", [0, 32, 128])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_fp8_by_fp8(rng: np.random.Generator, flavour: str, dtype: str, x_group: int, layout: tuple[int, int]) -> None:
    sizes = Sizes(17, 50, 200)
    launch = Run(rng, dtype, sizes, bias=True, residual=True)
    x, w = _codes(rng, 17, 200, flavour), _codes(rng, 50, 200, flavour)
    stored, scale = _blocks(rng, layout, 50, 200)
    x_scale = rng.uniform(0.001, 0.01, (17, -(-200 // x_group) if x_group else 1)).astype(np.float32)

    got = launch.go(
        "gemm_fp8_fp8",
        {"x": (flavour, x), "x_scale": ("fp32", x_scale), "w": (flavour, w), "w_scale": ("fp32", stored)},
        {"X_GROUP": x_group, "SCALE_N": layout[0], "SCALE_K": layout[1]},
    )

    launch.check(got, f64(w) * scale, f64(x) * _grouped(x_scale, x_group, 200), here().fp8_loss)


@pytest.mark.slow
@pytest.mark.parametrize("flavour", FP8)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("group", [0, 32, 128])
@pytest.mark.parametrize("k", [64, 200])
def test_quantize_rows(rng: np.random.Generator, flavour: str, dtype: str, group: int, k: int) -> None:
    rows, largest = 5, {"fp8e4nv": 448.0, "fp8e4b8": 240.0}[flavour]
    x = array(rng, rows, k, dtype, spare=8)
    x[1] *= np.asarray(1000, x.dtype)
    x[2, : k // 2] = 0
    x[3] = 0
    out = np.zeros((rows, k + 4), NUMPY_TYPES[flavour])
    groups = -(-k // group) if group else 1
    scale = np.full((rows, groups), np.nan, np.float32)
    variant = Variant(
        "quantize_rows",
        {"x": dtype, "out": flavour, "scale": "fp32"},
        {"GROUP": group},
        Tile({"BLOCK": 128}),
    )

    run(
        KERNELS["quantize_rows"],
        variant,
        {"x": x, "out": out, "scale": scale},
        {"rows": rows, "K": k, "x_stride": k + 8, "out_stride": k + 4},
    )

    padded = np.pad(f64(x), ((0, 0), (0, groups * (group or k) - k))).reshape(rows, groups, -1)
    expected = np.maximum(np.abs(padded).max(2) / largest, 2.0**-126)
    np.testing.assert_allclose(scale, expected, rtol=2.0**-23)
    ratio = x.astype(np.float32) / np.repeat(scale, group or k, 1)[:, :k]
    codes = np.clip(ratio, -largest, largest).astype(NUMPY_TYPES[flavour])
    np.testing.assert_array_equal(f64(out[:, :k]), f64(codes))
    np.testing.assert_array_equal(f64(out[:, k:]), 0.0)
    assert np.isfinite(f64(out)).all()
