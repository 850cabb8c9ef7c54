"""The interpreter's bfloat16 and float8 against torch and ml_dtypes, and what it refuses."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest
import torch

from plait.backends.kernels.gpu.interpret import NUMPY_TYPES, KernelError, run
from plait.backends.kernels.gpu.kernel import Kernel, Tile, Variant

HERE = "tests.host.gpu_examples"
FLOATS = ("fp32", "fp16", "bf16", "fp8e4nv", "fp8e4b8", "fp8e5")
BLOCK = 64


def kernel(name: str, pointers: tuple[str, ...], scalars: dict[str, str], tile: tuple[str, ...], *grid: str) -> Kernel:
    x, y = (*grid, "1")[:2]
    return Kernel(name, f"{HERE}:{name}", pointers, scalars, (), tile, (x, y, "1"), "stream", ("out",))  # type: ignore[arg-type]


SCALE = kernel("scale", ("x", "out"), {"rows": "i32", "factor": "f32"}, ("BLOCK",), "cdiv(rows, BLOCK)")
ADD = kernel("add_narrow", ("x", "y", "out"), {"rows": "i32"}, ("BLOCK",), "cdiv(rows, BLOCK)")
SOFTMAX = kernel("row_softmax", ("x", "out"), {"columns": "i32", "stride": "i32"}, ("BLOCK",), "3")
MULTIPLY = kernel(
    "multiply",
    ("x", "w", "out"),
    {"rows": "i32", "N": "i32", "K": "i32"},
    ("BLOCK_M", "BLOCK_N", "BLOCK_K"),
    "cdiv(rows, BLOCK_M)",
    "cdiv(N, BLOCK_N)",
)


def variant(of: Kernel, types: dict[str, str], tile: dict[str, int] | None = None, *aligned: str) -> Variant:
    return Variant(of.name, types, {}, Tile(tile or {"BLOCK": BLOCK}), frozenset(aligned))


def every_bit_pattern(name: str) -> np.ndarray:
    dtype = NUMPY_TYPES[name]
    if dtype.itemsize > 2:
        rng = np.random.default_rng(1)
        wide = rng.integers(0, 2**32, 2**15, dtype=np.uint32).view(np.float32)
        return np.concatenate([wide, rng.normal(size=2**15).astype(np.float32), every_bit_pattern("bf16").astype("f4")])
    return np.arange(2 ** (8 * dtype.itemsize), dtype=f"u{dtype.itemsize}").view(dtype)


def same(a: np.ndarray, b: np.ndarray) -> None:
    """Equal bit by bit, where any NaN equals any other."""
    a, b = np.asarray(a), np.asarray(b)
    nan = np.isnan(a.astype(np.float32))
    np.testing.assert_array_equal(nan, np.isnan(b.astype(np.float32)))
    raw = f"u{a.dtype.itemsize}"
    np.testing.assert_array_equal(a.view(raw)[~nan], b.view(raw)[~nan])


def from_torch(x: torch.Tensor, name: str) -> np.ndarray:
    raw = {1: torch.uint8, 2: torch.int16, 4: torch.int32}[x.element_size()]
    return x.contiguous().view(raw).numpy().view(NUMPY_TYPES[name])


TORCH = {
    "fp32": torch.float32,
    "fp16": torch.float16,
    "bf16": torch.bfloat16,
    "fp8e4nv": torch.float8_e4m3fn,
    "fp8e4b8": torch.float8_e4m3fnuz,
    "fp8e5": torch.float8_e5m2,
}


def to_torch(x: np.ndarray, name: str) -> torch.Tensor:
    raw = {1: np.uint8, 2: np.int16, 4: np.int32}[x.dtype.itemsize]
    return torch.from_numpy(x.view(raw).copy()).view(TORCH[name])


@pytest.mark.parametrize("to", FLOATS)
@pytest.mark.parametrize("source", FLOATS)
def test_casts_are_torchs(source: str, to: str) -> None:
    """Every value of the narrow types, through fp32, into every other type."""
    x = every_bit_pattern(source)
    out = np.zeros(x.shape, NUMPY_TYPES[to])
    block = {"BLOCK": 1 << (len(x) - 1).bit_length()}
    run(SCALE, variant(SCALE, {"x": source, "out": to}, block), {"x": x, "out": out}, {"rows": len(x), "factor": 1.0})
    expected = from_torch(to_torch(x, source).float().to(TORCH[to]), to)
    if to == "fp8e4nv":  # torch saturates; half a step above the largest value, 448, and beyond, ours is NaN
        beyond = np.abs(x.astype(np.float32)) > 464
        assert np.isnan(out[beyond].astype(np.float32)).all()
        out, expected = out[~beyond], expected[~beyond]
    same(out, expected)


@pytest.mark.parametrize("name", ["fp16", "bf16", "fp32"])
def test_arithmetic_rounds_as_torchs(name: str) -> None:
    rng = np.random.default_rng(2)
    x, y = (every_bit_pattern(name)[rng.permutation(2**16)][:4096].copy() for _ in range(2))
    out = np.zeros_like(x)
    types = dict.fromkeys(("x", "y", "out"), name)
    run(ADD, variant(ADD, types, {"BLOCK": 4096}), {"x": x, "y": y, "out": out}, {"rows": 4096})
    same(out, from_torch(to_torch(x, name) + to_torch(y, name), name))


@pytest.mark.parametrize("name", FLOATS)
def test_dot_of_small_integers_is_exact(name: str) -> None:
    """Sums of products of small integers are exact in fp32 in any order, so there is one right answer."""
    rng = np.random.default_rng(3)
    x = rng.integers(-8, 9, (21, 40)).astype(NUMPY_TYPES[name])
    w = rng.integers(-8, 9, (33, 40)).astype(NUMPY_TYPES[name])
    out = np.zeros((21, 33), np.float32)
    tile = {"BLOCK_M": 16, "BLOCK_N": 32, "BLOCK_K": 16}
    run(
        MULTIPLY,
        variant(MULTIPLY, {"x": name, "w": name, "out": "fp32"}, tile),
        {"x": x, "w": w, "out": out},
        {"rows": 21, "N": 33, "K": 40},
    )
    np.testing.assert_array_equal(out, x.astype(np.int64) @ w.astype(np.int64).T)


def test_bf16_multiply_is_torchs() -> None:
    """bfloat16 values with few bits: exact in fp32, one rounding at the store."""
    rng = np.random.default_rng(4)
    x = (rng.integers(-128, 129, (16, 32)) / 64).astype(ml_dtypes.bfloat16)
    w = (rng.integers(-128, 129, (32, 32)) / 64).astype(ml_dtypes.bfloat16)
    out = np.zeros((16, 32), ml_dtypes.bfloat16)
    tile = {"BLOCK_M": 16, "BLOCK_N": 32, "BLOCK_K": 32}
    types = dict.fromkeys(("x", "w", "out"), "bf16")
    run(MULTIPLY, variant(MULTIPLY, types, tile), {"x": x, "w": w, "out": out}, {"rows": 16, "N": 32, "K": 32})
    same(out, from_torch(to_torch(x, "bf16") @ to_torch(w, "bf16").T, "bf16"))


def test_library_functions_and_methods_and_views() -> None:
    """`tl.max`, `x.sum`, i64 offsets, and a view that starts inside an arena with a row stride."""
    rng = np.random.default_rng(5)
    arena = rng.normal(size=400).astype(ml_dtypes.bfloat16)
    x = arena[50:290].reshape(3, 80)[:, :70]
    out = np.zeros((3, 80), np.float32)
    run(SOFTMAX, variant(SOFTMAX, {"x": "bf16", "out": "fp32"}, {"BLOCK": 128}), {"x": x, "out": out},
        {"columns": 70, "stride": 80})  # fmt: skip
    expected = torch.softmax(to_torch(np.ascontiguousarray(x), "bf16").float(), -1).numpy()
    np.testing.assert_allclose(out[:, :70], expected, rtol=1e-6)
    assert not out[:, 70:].any()


def test_leaving_the_arrays_is_a_fault() -> None:
    x, out = np.ones(64, np.float32), np.zeros(64, np.float32)
    of = variant(SCALE, {"x": "fp32", "out": "fp32"})
    with pytest.raises(KernelError, match="reads outside") as reading:
        run(SCALE, of, {"x": x[:63], "out": out}, {"rows": 64, "factor": 2.0})
    assert "1 of 64" in reading.value.why
    with pytest.raises(KernelError, match="writes outside"):
        run(SCALE, of, {"x": x, "out": out[1:]}, {"rows": 64, "factor": 2.0})
    with pytest.raises(KernelError, match="reads outside"):
        run(SCALE, of, {"x": None, "out": out}, {"rows": 64, "factor": 2.0})
    assert out[0] == 0


def test_broken_promises_are_faults() -> None:
    x, out = np.ones(96, np.float32), np.zeros(96, np.float32)
    types = {"x": "fp32", "out": "fp32"}
    of = variant(SCALE, types, None, "x", "rows")
    start = -x.__array_interface__["data"][0] % 16 // 4
    aligned = x[start : start + 64]
    run(SCALE, of, {"x": aligned, "out": out}, {"rows": 48, "factor": 2.0})
    assert out[:48].tolist() == [2.0] * 48
    for pointers, rows, why in (
        ({"x": x[start + 1 :], "out": out}, 48, "x is not a multiple of 16 bytes"),
        ({"x": aligned, "out": out}, 47, "rows = 47 is not a multiple of 16"),
        ({"x": aligned.astype(np.float16), "out": out}, 48, "x is float16, the variant has fp32"),
        ({"x": aligned}, 48, "pointers: got"),
    ):
        with pytest.raises(KernelError) as fault:
            run(SCALE, of, pointers, {"rows": rows, "factor": 2.0})
        assert why in fault.value.why


def test_compiling_still_works_after_interpreting() -> None:
    """Both in one process: the language is as it was, and the function is still the compiler's."""
    import triton.language as tl
    from triton.runtime.jit import JITFunction

    from plait.backends.kernels.gpu import loader

    before = dict(vars(tl)), dict(vars(tl.tensor)), dict(vars(tl.core))
    x, out = np.ones(64, np.float32), np.zeros(64, np.float32)
    run(SCALE, variant(SCALE, {"x": "fp32", "out": "fp32"}), {"x": x, "out": out}, {"rows": 64, "factor": 2.0})
    assert before == (dict(vars(tl)), dict(vars(tl.tensor)), dict(vars(tl.core)))
    assert isinstance(loader.load(SCALE.source), JITFunction)


@pytest.mark.parametrize(("kind", "most"), [("i32", 2**31 - 1), ("i8", 127)])
def test_whole_numbers_that_wrap_around_are_faults(kind: str, most: int) -> None:
    """As an offset beyond 2^31 would."""
    of, dtype = variant(ADD, dict.fromkeys(("x", "y", "out"), kind)), NUMPY_TYPES[kind]
    x, out = np.array([most - 3, -most], dtype), np.zeros(2, dtype)
    run(ADD, of, {"x": x, "y": np.array([3, -1], dtype), "out": out}, {"rows": 2})
    assert out.tolist() == [most, -most - 1]
    for y in ([4, 0], [0, -2]):
        with pytest.raises(KernelError) as fault:
            run(ADD, of, {"x": x, "y": np.array(y, dtype), "out": out}, {"rows": 2})
        assert "overflow" in fault.value.why
