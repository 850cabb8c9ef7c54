"""Slices in torch: what conformance does not ask."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import closing, suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from plait.backends.conformance import families
from plait.backends.conformance.models import HIDDEN, Attention, Build, Model, op
from plait.backends.conformance.script import Script, Turn
from plait.backends.cpu import BACKEND as CPU
from plait.backends.kernels import matmul
from plait.backends.kernels.arrays import to_numpy, to_torch
from plait.backends.kernels.matmul import Packer, product
from plait.backends.kernels.step import _bucket
from plait.errors import CheckpointError
from plait.ir import read_module
from tests.host.backend_bench import load

#: Heads as wide as real ones, three to a group: what fits no kernel's tile.
WIDE = Model((Attention(heads=9, kv_heads=3, head_dim=64), Attention(heads=9, kv_heads=3, head_dim=64, window=20)))

#: Activations are of 32 features or whole multiples: of others torch computes the last few in another way.
ALONE: dict[str, Build] = {
    "plain": WIDE,
    "experts": op(lambda b, rows: {"y": families.experts(b, rows("x", HIDDEN), inner=64)}),
    "latent": families.LATENTS["heads16-wide"],
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("inner", "outs"), [(64, 96), (576, 192), (1536, 576), (33, 7)])
def test_rows_of_a_product_do_not_depend_on_their_number(dtype: torch.dtype, inner: int, outs: int) -> None:
    torch.manual_seed(0)
    x, weight = torch.randn(64, inner).to(dtype), torch.randn(outs, inner).to(dtype)
    packed, shared = product(weight, None), product(weight, None, shared=True)
    want = packed(x)
    for rows in (1, 2, 3, 5, 8, 17):
        assert torch.equal(packed(x[:rows]), want[:rows]), rows
        assert torch.equal(shared(x[:rows]), want[:rows]), rows
    assert packed(x[:0]).shape == (0, outs)
    torch.testing.assert_close(want.double(), x.double() @ weight.double().T, rtol=0.02, atol=0.3)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("inner", "outs"), [(2048, 2560), (5632, 256), (576, 3072), (1001, 2003)])
@pytest.mark.parametrize("threads", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_packing_changes_no_bits(dtype: torch.dtype, inner: int, outs: int, threads: int) -> None:
    """So a slice may step while its matrices are packed. One row is computed as two."""
    torch.manual_seed(1)
    x, weight = torch.randn(130, inner).to(dtype), torch.randn(outs, inner).to(dtype)
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        packed, plain = product(weight, None), product(weight, None, shared=True)
        assert all(torch.equal(packed(x[:rows]), plain(x[:rows])) for rows in (1, 2, 8, 33, 130))
    finally:
        torch.set_num_threads(before)


def test_matrices_are_packed_behind_what_was_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps run before, while and after; what was closed before it was packed still computes; a failure is heard of."""
    real, turn, packed = matmul._pack, threading.Event(), list[tuple[int, ...]]()

    def slow(matrix: list[torch.Tensor]) -> None:
        assert turn.wait(30)
        packed.append(tuple(matrix[0].shape))
        real(matrix)

    monkeypatch.setattr(matmul, "_pack", slow)
    x, weights = torch.randn(4, 64), [torch.randn(outs, 64) for outs in (8, 16, 24)]
    want = [product(weight, None, shared=True)(x) for weight in weights]
    packer = Packer()
    with packer.behind():
        runs = [product(weight, None) for weight in weights]
    assert all(map(torch.equal, (run(x) for run in runs), want)) and not packed
    turn.set()
    packer.wait()
    assert packed == [(8, 64), (16, 64), (24, 64)]
    assert all(map(torch.equal, (run(x) for run in runs), want))
    with suppress(RuntimeError), packer.behind():
        runs = [product(weights[0], None)]
        raise RuntimeError("the next one cannot be read")
    packer.wait()
    assert len(packed) == 3, "nothing is packed of a slice that was not read"
    packer.close()

    def fails(matrix: list[torch.Tensor]) -> None:
        raise MemoryError

    monkeypatch.setattr(matmul, "_pack", fails)
    packer = Packer()
    with packer.behind():
        run = product(weights[0], None)
    with pytest.raises(MemoryError):
        packer.wait()
    packer.close()
    assert torch.equal(run(x), want[0])


@pytest.fixture
def two_threads(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Work is divided among threads, whatever a backend is told."""
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    monkeypatch.setattr(torch, "set_num_threads", lambda count: None)
    yield
    monkeypatch.undo()
    torch.set_num_threads(before)


@pytest.mark.usefixtures("two_threads")
@pytest.mark.parametrize("name", ALONE)
def test_a_request_gets_the_same_bits_alone_and_in_a_batch(name: str, tmp_path: Path) -> None:
    """Five requests of different lengths decode together; then each of them alone."""
    model = ALONE[name]
    lengths = {0: 61, 1: 33, 2: 62, 3: 70, 4: 5}  # 0 and 2 attend as one group
    together = Script((*(Turn({s: n}) for s, n in lengths.items()), *(Turn(dict.fromkeys(lengths, 1)),) * 6), 4)
    executable, player = load(CPU, "cpu", tmp_path / "together", together, model)
    with closing(executable):
        steps = [_first(executable.step(player.batches(turn)[0], {})) for turn in together.turns]
    for s, length in lengths.items():
        alone = Script((Turn({s: length}), *(Turn({s: 1}),) * 6), 4)
        # The longest sequence decides how many token ids a script draws.
        executable, player = load(CPU, "cpu", tmp_path / f"alone{s}", alone, model)
        player._ids[s] = _ids(together)[s][: alone.longest]
        with closing(executable):
            logits = [_first(executable.step(player.batches(turn)[0], {}))[0] for turn in alone.turns]
        assert np.array_equal(logits[0], steps[s][0]), f"prefill of {s}"
        for index, row in enumerate(logits[1:]):
            assert np.array_equal(row, steps[5 + index][s]), f"token {index} of {s}"


def _first(outputs: dict[str, Any]) -> Any:
    (values,) = outputs.values()
    return values


def _ids(script: Script) -> np.ndarray[tuple[int, ...], np.dtype[np.int32]]:
    from plait.backends.conformance.script import Player

    return Player(script, {}, 61)._ids


@given(st.integers(1, 100_000))
def test_buckets_hold_their_pages_and_waste_at_most_half(pages: int) -> None:
    size = _bucket(pages)
    assert pages <= size
    assert size <= pages * 1.5 or size == pages + 1
    assert _bucket(size) == size


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_arrays_go_there_and_back(dtype: str) -> None:
    from plait.backends.weights import DTYPES

    array = np.arange(6).reshape(2, 3).astype(DTYPES[dtype])
    array.flags.writeable = False  # as a frame from another process is
    there = to_torch(array)
    there += 1
    assert array[0, 0] == 0
    back = to_numpy(there)
    assert back.dtype == array.dtype
    assert back.tolist() == (np.arange(6).reshape(2, 3) + 1).tolist()


def test_stats_count_what_is_held(tmp_path: Path) -> None:
    script = Script((Turn({0: 5}),), 4)
    executable, player = load(CPU, "cpu", tmp_path, script)
    module = read_module(tmp_path / "slice" / "slice.mlir")
    from plait.backends.weights import read_weights_json

    refs = read_weights_json(tmp_path / "slice" / "weights.json").values()
    with closing(executable):
        executable.step(player.batches(script.turns[0])[0], {})
        stats = executable.stats()
        assert stats["weight_bytes"] == sum(ref.nbytes for ref in refs)
        windows = {layout.window for layout in executable.kv_layouts}
        assert windows == {8, 20, None}
        expected = sum(
            2 * 4 * player.pages["full" if x.window is None else f"window{x.window}"] * 4 * x.kv_heads * x.head_dim
            for x in executable.kv_layouts
        )
        assert stats["kv_bytes"] == expected
        assert stats["steps"] == 1
    assert module.attributes["plait.model"]


def test_weights_of_another_shape_are_refused(tmp_path: Path) -> None:
    script = Script((Turn({0: 5}),), 4)
    load(CPU, "cpu", tmp_path, script)[0].close()
    file = tmp_path / "slice" / "weights.json"
    from plait.backends.base import LoadOptions

    whole = file.read_text()
    options = LoadOptions({"full": 8, "window8": 8, "window20": 8}, 4, weight_root=tmp_path / "slice")
    file.write_text(whole.replace("48", "47", 1))
    with pytest.raises(CheckpointError, match="47"):
        CPU.load(tmp_path / "slice", "cpu", options)
