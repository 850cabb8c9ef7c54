"""Damaged input gives a named error or the right answer, never another exception and never a range outside the file."""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from safetensors import safe_open
from safetensors.numpy import save

from plait.errors import PlaitError
from plait.frontend.families import read_config
from plait.frontend.files import TensorFiles
from plait.frontend.gguf import read_gguf
from plait.frontend.gguf.tokenizer import tokenizer_config, tokenizer_json
from plait.frontend.safetensors import read_file
from plait.frontend.tokenizer import Tokenizer
from tests.checkpoints import save_tokenizer
from tests.host.test_frontend_config import LLAMA, MISTRAL, QWEN2

FUZZ = settings(max_examples=200, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])

SAFE = save({"a": np.arange(6, dtype=np.float32).reshape(2, 3), "b": np.ones(4, np.float16)}, metadata={"format": "pt"})
SAFE_HEADER = struct.unpack("<Q", SAFE[:8])[0] + 8

values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=6,
)


def edits(size: int) -> st.SearchStrategy[list[tuple[int, int]]]:
    return st.lists(st.tuples(st.integers(0, size - 1), st.integers(0, 255)), min_size=1, max_size=4)


def edited(content: bytes, changes: list[tuple[int, int]], cut: int) -> bytes:
    raw = bytearray(content)
    for place, value in changes:
        raw[place] = value
    return bytes(raw[: len(raw) + cut]) if cut < 0 else bytes(raw) + bytes(cut)


def inside(found: TensorFiles, path: Path) -> None:
    size = path.stat().st_size
    assert all(ref.offset > 0 and ref.offset + ref.nbytes <= size for ref in found.weights.values())


def check_safetensors(path: Path) -> None:
    """If plait takes the file, so does the safetensors package, and both see the same tensors."""
    try:
        found = read_file(path)
    except PlaitError:
        return
    inside(found, path)
    raw = path.read_bytes()
    with safe_open(path, "np") as theirs:
        assert set(theirs.keys()) == found.weights.keys()
        for name, ref in found.weights.items():
            if ref.encoding != "bfloat16":
                assert theirs.get_tensor(name).tobytes() == raw[ref.offset : ref.offset + ref.nbytes]
            assert tuple(theirs.get_slice(name).get_shape()) == ref.shape


@FUZZ
@given(changes=edits(SAFE_HEADER), cut=st.sampled_from([0, 0, 0, -1, -30, 1]))
def test_safetensors_bytes(changes: list[tuple[int, int]], cut: int, tmp_path: Path) -> None:
    path = tmp_path / "m.safetensors"
    path.write_bytes(edited(SAFE, changes, cut))
    check_safetensors(path)


@FUZZ
@given(
    key=st.sampled_from(["a", "b", "c", "__metadata__"]), value=values, inner=st.sampled_from([None, "dtype", "shape"])
)
@example(key="a", value=[3, 2], inner="shape")
@example(key="c", value={"dtype": "F32", "shape": [0], "data_offsets": [32, 32]}, inner=None)
def test_safetensors_header_values(key: str, value: Any, inner: str | None, tmp_path: Path) -> None:
    header = json.loads(SAFE[8:SAFE_HEADER])
    if inner is None or not isinstance(header.get(key), dict):
        header[key] = value
    else:
        header[key][inner] = value
    raw = json.dumps(header).encode()
    path = tmp_path / "m.safetensors"
    path.write_bytes(struct.pack("<Q", len(raw)) + raw + SAFE[SAFE_HEADER:])
    check_safetensors(path)


@pytest.fixture(scope="module")
def small_gguf(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    """Two tensors and metadata of every type."""
    path = tmp_path_factory.mktemp("g") / "m.gguf"
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_uint32("llama.block_count", 1)
    writer.add_float32("llama.rope.freq_base", 10000.0)
    writer.add_array("tokenizer.ggml.tokens", ["a", "b"])
    writer.add_array("tokenizer.ggml.token_type", [1, 3])
    writer.add_string("tokenizer.ggml.model", "gpt2")
    writer.add_string("tokenizer.ggml.pre", "smollm")
    writer.add_array("tokenizer.ggml.merges", ["a b"])
    writer.add_bool("tokenizer.ggml.add_bos_token", False)
    writer.add_tensor("token_embd.weight", np.ones((2, 32), np.float32))
    q8 = gguf.GGMLQuantizationType.Q8_0
    writer.add_tensor("blk.0.attn_q.weight", gguf.quants.quantize(np.ones((4, 32), np.float32), q8), raw_dtype=q8)
    for write in (
        writer.write_header_to_file,
        writer.write_kv_data_to_file,
        writer.write_tensors_to_file,
        writer.close,
    ):
        write()
    return path.read_bytes()


@FUZZ
@given(data=st.data(), cut=st.sampled_from([0, 0, 0, -1, -200, 1, 64]))
def test_gguf_bytes(data: st.DataObject, cut: int, small_gguf: bytes, tmp_path: Path) -> None:
    """F58. Where plait takes the file, the gguf package does too and finds the same tensors in the same places."""
    header = len(small_gguf) - 256 - 160
    path = tmp_path / "m.gguf"
    path.write_bytes(edited(small_gguf, data.draw(edits(header)), cut))
    try:
        found = read_gguf(path)
    except PlaitError:
        return
    inside(found.tensors, path)
    theirs = {tensor.data_offset: tensor for tensor in gguf.GGUFReader(path).tensors}
    assert theirs.keys() == {ref.offset for ref in found.tensors.weights.values()}
    for ref in found.tensors.weights.values():
        assert tuple(reversed(theirs[ref.offset].shape.tolist())) == ref.shape
    tokenizer_config(found.metadata)
    try:
        tokenizer_json(found.metadata, "m.gguf")
        read_config(found.config, "m.gguf")
    except PlaitError:
        return


@FUZZ
@given(base=st.sampled_from([LLAMA, MISTRAL, QWEN2]), data=st.data())
def test_config_values(base: dict[str, Any], data: st.DataObject) -> None:
    """Any JSON value at any key of a config: refused, or a config whose numbers make sense."""
    more = [
        "rope_scaling",
        "rope_parameters",
        "head_dim",
        "layer_types",
        "tie_word_embeddings",
        "eos_token_id",
        "dtype",
    ]
    changes = data.draw(st.dictionaries(st.sampled_from([*base, *more]), values, min_size=1, max_size=3))
    try:
        config = read_config(base | changes, "config.json")
    except PlaitError:
        return
    config = config.at(config.max_positions)
    assert config.blocks > 0
    for own in {layer.attention for layer in config.layers}:
        assert own.heads % own.kv_heads == 0
        assert own.head_dim % 2 == 0
        assert own.rope.problem() is None


@pytest.fixture(scope="module")
def tokenizers_of_two_kinds(tmp_path_factory: pytest.TempPathFactory) -> list[Tokenizer]:
    """A byte-level one, and one like Llama 2's whose decoder strips the first space and falls back to bytes."""
    import tokenizers

    by_bytes = Tokenizer.open(save_tokenizer(tmp_path_factory.mktemp("t")) / "tokenizer.json")
    names = ["<unk>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁", "h", "e", "l", "o", "▁h", "he", "ll"]
    model = tokenizers.models.BPE(
        vocab={name: index for index, name in enumerate(names)},
        merges=[("▁", "h"), ("h", "e"), ("l", "l")],
        unk_token="<unk>",
        byte_fallback=True,
    )
    other = tokenizers.Tokenizer(model)
    other.normalizer = tokenizers.normalizers.Sequence(
        [tokenizers.normalizers.Prepend("▁"), tokenizers.normalizers.Replace(" ", "▁")]
    )
    other.decoder = tokenizers.decoders.Sequence(
        [
            tokenizers.decoders.Replace("▁", " "),
            tokenizers.decoders.ByteFallback(),
            tokenizers.decoders.Fuse(),
            tokenizers.decoders.Strip(content=" ", left=1),
        ]
    )
    return [by_bytes, Tokenizer(other.to_str())]


@FUZZ
@given(text=st.text(max_size=30), which=st.integers(0, 1))
@example(text="he  hello 😀😀", which=1)
def test_streamed_pieces_join_to_the_text(text: str, which: int, tokenizers_of_two_kinds: list[Tokenizer]) -> None:
    tokenizer = tokenizers_of_two_kinds[which]
    ids = tokenizer.encode(text)
    decoder = tokenizer.stream()
    pieces = [decoder.push(token) for token in ids] + [decoder.finish()]
    assert "".join(pieces) == tokenizer.decode(ids)
    if "\ufffd" not in text:
        assert not any("\ufffd" in piece for piece in pieces)


@FUZZ
@given(ids=st.lists(st.integers(0, 263), max_size=20))
def test_streamed_tokens_join_to_their_text(ids: list[int], tokenizers_of_two_kinds: list[Tokenizer]) -> None:
    """Any ids of the byte-level tokenizer, among them bytes that never make a character. (The other kind replaces a
    whole run of bytes once one of them is wrong, also those that were fine when they came.)"""
    tokenizer = tokenizers_of_two_kinds[0]
    decoder = tokenizer.stream()
    assert "".join([decoder.push(token) for token in ids] + [decoder.finish()]) == tokenizer.decode(ids)
