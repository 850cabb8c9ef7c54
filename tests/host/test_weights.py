"""Byte ranges to arrays: exact values, one rounding, and never more memory than the tensor."""

from __future__ import annotations

import tracemalloc
from dataclasses import replace
from pathlib import Path
from typing import Any

import gguf
import ml_dtypes
import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from plait.backends.weights import read_weight, read_weights_json, weights_json
from plait.errors import CheckpointError, UserError
from plait.frontend.checkpoint import open_checkpoint
from plait.spec import Rows, WeightRef
from plait.spec.weight import Encoding
from tests.checkpoints import pairs, save

DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}


def stored(path: Path, array: NDArray[Any], encoding: Encoding, shape: tuple[int, ...], lead: int = 13) -> WeightRef:
    raw = array.tobytes()
    path.write_bytes(bytes(lead) + raw + b"\xff" * 7)
    return WeightRef("w", str(path), lead, len(raw), encoding, shape)


def bits(array: NDArray[Any]) -> NDArray[Any]:
    return array.view({4: np.uint32, 2: np.uint16}[array.itemsize])


@pytest.mark.parametrize("source", DTYPES)
@pytest.mark.parametrize("target", DTYPES)
def test_casts_round_as_torch_does(source: str, target: str, tmp_path: Path) -> None:
    """Ties, subnormals and signed zeros among them."""
    rng = np.random.default_rng(0)
    ties = np.array([1 + 2**-8, 1 + 3 * 2**-8, 1 + 2**-11, 1 + 3 * 2**-11, 2**-24, 3 * 2**-25, -0.0, 1e-40])
    values = np.concatenate([ties, rng.normal(size=2000) * 10.0 ** rng.integers(-6, 4, 2000)]).astype(np.float32)
    tensor = torch.from_numpy(values).to(DTYPES[source])
    raw = tensor.view(torch.uint8).numpy()
    ref = stored(tmp_path / "w", raw, source, (8, len(values) // 8))  # type: ignore[arg-type]
    expected = tensor.to(DTYPES[target]).reshape(ref.shape)
    ours = read_weight(ref, target)
    assert ours.shape == ref.shape
    assert ours.dtype == {"bfloat16": np.dtype(ml_dtypes.bfloat16)}.get(target, np.dtype(target))
    kind = torch.int32 if target == "float32" else torch.int16
    np.testing.assert_array_equal(bits(ours), bits(expected.view(kind).numpy()))


@pytest.mark.parametrize("encoding", ["Q4_0", "Q4_1", "Q8_0"])
@pytest.mark.parametrize("shape", [(64, 96), (1, 32), (3000, 128), (64,)])
def test_dequantisation_is_bit_equal_to_the_gguf_package(
    encoding: Encoding, shape: tuple[int, ...], tmp_path: Path
) -> None:
    kind = gguf.GGMLQuantizationType[encoding]
    raw = gguf.quants.quantize(np.random.default_rng(0).normal(size=shape).astype(np.float32), kind)
    ref = stored(tmp_path / "w", raw, encoding, shape)
    np.testing.assert_array_equal(bits(read_weight(ref, "float32")), bits(gguf.quants.dequantize(raw, kind)))


@pytest.mark.parametrize("encoding", ["float32", "Q4_1"])
@pytest.mark.parametrize("rows", [96, 6144])
def test_rows_of_rope_pairs_come_back_as_halves(encoding: Encoding, rows: int, tmp_path: Path) -> None:
    """Read in one chunk and in several: the order is that of the plain formula."""
    heads, columns = 3, 64
    values = np.random.default_rng(0).normal(size=(rows, columns)).astype(np.float32)
    raw = values if encoding == "float32" else gguf.quants.quantize(values, gguf.GGMLQuantizationType.Q4_1)
    ref = replace(stored(tmp_path / "w", raw, encoding, (rows, columns)), rows=pairs(heads, rows))
    plain = read_weight(replace(ref, rows=None), "float32")
    head_dim = rows // heads
    expected = plain.reshape(heads, head_dim // 2, 2, columns).swapaxes(1, 2).reshape(rows, columns)
    np.testing.assert_array_equal(read_weight(ref, "float32"), expected)


def test_a_bias_is_put_in_order_too(tmp_path: Path) -> None:
    values = np.arange(8, dtype=np.float32)
    ref = replace(stored(tmp_path / "w", values, "float32", (8,)), rows=pairs(2, 8))
    assert read_weight(ref, "float32").tolist() == [0, 2, 1, 3, 4, 6, 5, 7]


def test_scalars_and_empty_tensors(tmp_path: Path) -> None:
    assert read_weight(stored(tmp_path / "a", np.float32([5]), "float32", ()), "float32").shape == ()
    assert read_weight(stored(tmp_path / "b", np.zeros(0, np.float32), "float32", (0, 4)), "float16").shape == (0, 4)


def refused(ref: WeightRef, dtype: str = "float32") -> CheckpointError:
    with pytest.raises(CheckpointError) as caught:
        read_weight(ref, dtype)
    assert "'w'" in str(caught.value)
    return caught.value


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_stored_nan_and_infinity_are_errors(value: float, dtype: str, tmp_path: Path) -> None:
    array = np.ones((4, 4), np.float32)
    array[2, 3] = value
    assert refused(stored(tmp_path / "w", array, "float32", (4, 4)), dtype).code == "weight-not-finite"


def test_a_nan_scale_of_a_quantised_block_is_an_error(tmp_path: Path) -> None:
    raw = gguf.quants.quantize(np.ones((2, 32), np.float32), gguf.GGMLQuantizationType.Q8_0).copy()
    raw[1, :2] = np.frombuffer(np.float16(np.nan).tobytes(), np.uint8)
    assert refused(stored(tmp_path / "w", raw, "Q8_0", (2, 32))).code == "weight-not-finite"


def test_overflow_is_an_error_and_what_rounds_down_is_none(tmp_path: Path) -> None:
    array = np.array([[1.0, -65520.0]], np.float32)
    error = refused(stored(tmp_path / "w", array, "float32", (1, 2)), "float16")
    assert error.code == "weight-overflow"
    assert "65520" in error.what
    assert "65504" in error.why
    array[0, 1] = -65519.0
    assert read_weight(stored(tmp_path / "w", array, "float32", (1, 2)), "float16")[0, 1] == -65504
    largest = np.array([[3.4e38]], np.float32)
    assert refused(stored(tmp_path / "w", largest, "float32", (1, 1)), "bfloat16").code == "weight-overflow"


def test_ranges_that_do_not_fit(tmp_path: Path) -> None:
    ref = stored(tmp_path / "w", np.ones((4, 4), np.float32), "float32", (4, 4))
    assert refused(replace(ref, shape=(4, 5))).code == "weight-range"
    assert refused(replace(ref, encoding="Q8_0")).code == "weight-range"
    assert refused(replace(ref, rows=pairs(3, 4))).code == "weight-range"
    assert refused(replace(ref, rows=Rows(0, 4, ()))).code == "weight-range"
    assert refused(replace(ref, file=str(tmp_path / "none"))).code == "weight-file"
    assert refused(replace(ref, offset=ref.offset + 8)).code == "weight-file"


def test_unknown_dtype(tmp_path: Path) -> None:
    ref = stored(tmp_path / "w", np.ones(1, np.float32), "float32", (1,))
    with pytest.raises(UserError, match="float23"):
        read_weight(ref, "float23")


def test_relative_files_and_the_json(tmp_path: Path) -> None:
    array = np.arange(4, dtype=np.float32)
    ref = replace(stored(tmp_path / "w", array, "float32", (4,)), file="w")
    np.testing.assert_array_equal(read_weight(ref, "float32", tmp_path), array)
    refs = [ref, replace(ref, name="a", encoding="Q4_1", rows=pairs(3, 6))]
    path = tmp_path / "weights.json"
    path.write_text(weights_json(refs))
    assert read_weights_json(path) == {item.name: item for item in refs}
    assert weights_json(refs) == weights_json(refs[::-1])
    path.write_text(path.read_text().replace("Q4_1", "Q9_9"))
    with pytest.raises(UserError, match="encoding"):
        read_weights_json(path)


def test_half_a_checkpoint_peaks_at_the_half_and_one_tensor(tmp_path: Path) -> None:
    """A5: a 40 MB checkpoint, slice 1 of 2."""
    folder = save(
        tmp_path / "m", hidden_size=256, intermediate_size=1024, num_hidden_layers=9, num_key_value_heads=4, seed=1
    )
    weights = open_checkpoint(folder).weights
    assert weights is not None
    assert sum(ref.nbytes for ref in weights.values()) > 35e6
    half = [ref for name, ref in weights.items() if any(f"layers.{i}." in name for i in range(4))]
    read_weight(half[0], "float32")
    for dtype in ("float32", "bfloat16"):
        tracemalloc.start()
        loaded = [read_weight(ref, dtype) for ref in half]
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        held = sum(array.nbytes for array in loaded)
        assert held == sum(ref.nbytes for ref in half) // (1 if dtype == "float32" else 2)
        assert peak < held + max(ref.nbytes for ref in half)
