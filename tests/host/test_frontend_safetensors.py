"""safetensors: the header against the file, the index against the headers."""

from __future__ import annotations

import json
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors import safe_open
from safetensors.numpy import save_file

from plait.errors import CheckpointError, PlaitError, UnsupportedError
from plait.frontend.checkpoint import open_checkpoint
from plait.frontend.safetensors import read_file, read_index
from tests.checkpoints import save

Header = dict[str, Any]


def write(path: Path, header: Header | bytes, data: bytes, length: int | None = None) -> Path:
    raw = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(raw) if length is None else length) + raw + data)
    return path


def entry(begin: int, end: int, shape: list[int], dtype: str = "F32") -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}


def two() -> Header:
    return {"a": entry(0, 24, [2, 3]), "b": entry(24, 32, [2])}


def refused(path: Path, kind: type[PlaitError] = CheckpointError) -> PlaitError:
    with pytest.raises(kind) as caught:
        read_file(path)
    assert str(path) in caught.value.what
    return caught.value


def test_byte_ranges_equal_the_safetensors_package(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    tensors = {f"t{i}": rng.normal(size=(i + 1, 3)).astype([np.float32, np.float16][i % 2]) for i in range(6)}
    tensors["empty"] = np.zeros((0, 4), np.float32)
    path = tmp_path / "m.safetensors"
    save_file(tensors, path, metadata={"format": "pt", "k": "v"})
    found = read_file(path)
    assert found.metadata == {"format": "pt", "k": "v"}
    assert found.files[str(path)][0] == path.stat().st_size
    raw = path.read_bytes()
    with safe_open(path, "np") as theirs:
        assert found.weights.keys() == set(theirs.keys())
        for name, ref in found.weights.items():
            expected = theirs.get_tensor(name)
            assert (ref.shape, ref.encoding) == (expected.shape, expected.dtype.name)
            assert raw[ref.offset : ref.offset + ref.nbytes] == expected.tobytes()


@pytest.mark.parametrize("missing", [1, 8, 20])
def test_a_truncated_file_is_refused_with_numbers(missing: int, tmp_path: Path) -> None:
    """E43: the header promises more than the file has."""
    error = refused(write(tmp_path / "m.safetensors", two(), bytes(32 - missing)))
    assert error.code == "safetensors-truncated"
    assert f"{missing} bytes are missing" in error.what


def test_trailing_bytes_are_refused_with_numbers(tmp_path: Path) -> None:
    error = refused(write(tmp_path / "m.safetensors", two(), bytes(37)))
    assert error.code == "safetensors-trailing"
    assert "5 bytes more" in error.what


LAYOUTS: dict[str, tuple[Header, str, str]] = {
    "gap": ({"a": entry(0, 24, [2, 3]), "b": entry(28, 36, [2])}, "safetensors-layout", "a gap of 4"),
    "overlap": ({"a": entry(0, 24, [2, 3]), "b": entry(20, 28, [2])}, "safetensors-layout", "an overlap of 4"),
    "hole at the start": ({"a": entry(4, 28, [2, 3])}, "safetensors-layout", "a gap of 4"),
    "shape": ({"a": entry(0, 24, [2, 4])}, "safetensors-nbytes", "spans 24"),
    "backwards": ({"a": entry(24, 0, [2, 3])}, "safetensors-offsets", "[24, 0]"),
    "negative": ({"a": entry(-24, 0, [2, 3])}, "safetensors-offsets", "-24"),
    "float shape": ({"a": entry(0, 24, [2, 3.0])}, "safetensors-shape", "3.0"),  # type: ignore[list-item]
    "bool shape": ({"a": entry(0, 4, [True])}, "safetensors-shape", "True"),
    "rank": ({"a": entry(0, 4, [1] * 9)}, "safetensors-shape", "[1, 1"),
    "huge": ({"a": entry(0, 4, [1 << 41])}, "safetensors-shape", str(1 << 41)),
    "no shape": ({"a": {"dtype": "F32", "data_offsets": [0, 4]}}, "safetensors-entry", "'a'"),
    "extra key": ({"a": entry(0, 4, [1]) | {"scale": 2}}, "safetensors-entry", "scale"),
    "no entry": ({"a": 3}, "safetensors-entry", "3"),
    "unknown dtype": ({"a": entry(0, 4, [1], "F31")}, "dtype-unknown", "'F31'"),
    "odd dtype": ({"a": entry(0, 4, [1], ["F32"])}, "dtype-unknown", "F32"),  # type: ignore[arg-type]
    "metadata": ({"__metadata__": {"n": 1}}, "safetensors-metadata", "__metadata__"),
    "metadata list": ({"__metadata__": []}, "safetensors-metadata", "__metadata__"),
}


@pytest.mark.parametrize("case", LAYOUTS)
def test_headers_that_contradict_themselves(case: str, tmp_path: Path) -> None:
    header, code, word = LAYOUTS[case]
    error = refused(write(tmp_path / "m.safetensors", header, bytes(36)))
    assert error.code == code
    assert word in str(error)


HEADERS: dict[str, tuple[bytes, int | None]] = {
    "not JSON": (b"{", None),
    "a list": (b"[]", None),
    "duplicate names": (b'{"a":{"dtype":"F32","shape":[],"data_offsets":[0,4]},"a":{}}', None),
    "NaN": (b'{"a":NaN}', None),
    "not UTF-8": (b'{"\xff":1}', None),
    "deep": (b'{"a":' + b"[" * 100_000 + b"]" * 100_000 + b"}", None),
    "digits": (b'{"a":' + b"9" * 10_000 + b"}", None),
    "length 0": (b"{}", 0),
    "length beyond the file": (b"{}", 1000),
    "length 2**63": (b"{}", 1 << 63),
}


@pytest.mark.parametrize("case", HEADERS)
def test_headers_that_are_none(case: str, tmp_path: Path) -> None:
    raw, length = HEADERS[case]
    refused(write(tmp_path / "m.safetensors", raw, bytes(4), length))


@pytest.mark.parametrize("content", [b"", b"1234567", b"version https://git-lfs.github.com/spec/v1\noid sha256:0\n"])
def test_files_that_are_none(content: bytes, tmp_path: Path) -> None:
    path = tmp_path / "m.safetensors"
    path.write_bytes(content)
    assert refused(path).code == "safetensors-header-length"


@pytest.mark.parametrize("dtype", ["F8_E5M2FNUZ", "F4", "U32", "F64", "BOOL"])
def test_dtypes_that_are_not_read_are_refused_by_name(dtype: str, tmp_path: Path) -> None:
    """Codes are read: see test_frontend_formats for what they need beside them."""
    error = refused(write(tmp_path / "m.safetensors", {"w": entry(0, 4, [4], dtype)}, bytes(4)), UnsupportedError)
    assert error.code == "dtype-unsupported"
    assert "'w'" in error.what
    assert dtype in error.what


@pytest.mark.parametrize("layout", ["flax", "tf"])
def test_transposing_formats_are_refused(layout: str, tmp_path: Path) -> None:
    header = {"__metadata__": {"format": layout}} | two()
    assert layout in refused(write(tmp_path / "m.safetensors", header, bytes(32)), UnsupportedError).what


# --- shards (E44)


@pytest.fixture
def sharded(tmp_path: Path) -> Path:
    folder = save(tmp_path / "m", max_shard_size="150KB")
    assert len(list(folder.glob("*.safetensors"))) >= 3
    return folder


def index(folder: Path) -> Path:
    return folder / "model.safetensors.index.json"


def edit_map(folder: Path, change: Callable[[dict[str, str]], object]) -> None:
    data = json.loads(index(folder).read_text())
    change(data["weight_map"])
    index(folder).write_text(json.dumps(data))


def test_shards_give_all_tensors(sharded: Path, tmp_path: Path) -> None:
    whole = save(tmp_path / "whole")
    by_shards, by_file = open_checkpoint(sharded).weights, open_checkpoint(whole).weights
    assert by_shards is not None
    assert by_file is not None
    assert by_shards.keys() == by_file.keys()
    for name, ref in by_shards.items():
        other = by_file[name]
        raw, raw_other = Path(ref.file).read_bytes(), Path(other.file).read_bytes()
        assert raw[ref.offset : ref.offset + ref.nbytes] == raw_other[other.offset : other.offset + other.nbytes], (
            f"{name} differs"
        )


def test_a_missing_shard_is_named(sharded: Path) -> None:
    victim = sorted(sharded.glob("*.safetensors"))[1]
    victim.unlink()
    with pytest.raises(CheckpointError, match=victim.name) as caught:
        read_index(index(sharded))
    assert caught.value.code == "index-shard-missing"


def test_a_tensor_missing_from_its_shard_is_named(sharded: Path) -> None:
    shard = sorted(path.name for path in sharded.glob("*.safetensors"))[0]
    edit_map(sharded, lambda weight_map: weight_map.update({"model.ghost.weight": shard}))
    with pytest.raises(CheckpointError, match=r"model\.ghost\.weight") as caught:
        read_index(index(sharded))
    assert caught.value.code == "index-tensor-missing"


def test_a_tensor_in_a_shard_that_is_not_listed_is_named(sharded: Path) -> None:
    edit_map(sharded, lambda weight_map: weight_map.pop("model.norm.weight"))
    with pytest.raises(CheckpointError, match=r"model\.norm\.weight") as caught:
        read_index(index(sharded))
    assert caught.value.code == "index-tensor-unlisted"


def test_a_tensor_listed_in_the_wrong_shard_is_named(sharded: Path) -> None:
    first, second, *_ = sorted(path.name for path in sharded.glob("*.safetensors"))

    def swap(weight_map: dict[str, str]) -> None:
        name = next(name for name, shard in weight_map.items() if shard == first)
        weight_map[name] = second

    edit_map(sharded, swap)
    with pytest.raises(CheckpointError, match="index-tensor"):
        read_index(index(sharded))


def test_a_truncated_shard_is_refused(sharded: Path) -> None:
    victim = sorted(sharded.glob("*.safetensors"))[-1]
    victim.write_bytes(victim.read_bytes()[:-100])
    with pytest.raises(CheckpointError, match="100 bytes are missing"):
        open_checkpoint(sharded)


@pytest.mark.parametrize("shard", ["../m/model-00001-of-00004.safetensors", "/etc/passwd", "x.bin", 3, ""])
def test_shards_lie_beside_the_index(shard: Any, sharded: Path) -> None:
    edit_map(sharded, lambda weight_map: weight_map.update({"x": shard}))
    with pytest.raises(CheckpointError) as caught:
        read_index(index(sharded))
    assert caught.value.code == "index-invalid"
