"""Slices in JAX: shapes, compiles, and names."""

from __future__ import annotations

import importlib.util
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from plait.backends.base import CompileOptions, LoadOptions
from plait.backends.conformance.models import MODELS, VOCABULARY, Attention, Model, random_weights, write_slice
from plait.backends.conformance.script import Player, Script, Turn
from plait.backends.conformance.suite import Bench
from plait.backends.weights import read_weights_json
from plait.backends.xla import BACKEND
from plait.backends.xla.buckets import KEYS, QUERIES, SEQUENCES, Buckets, bucket, split
from plait.backends.xla.program import COMPILER_OPTIONS, Program
from plait.errors import MissingDependencyError
from plait.ir import kv_classes, signature
from plait.ir.passes import SLICE_PIPELINE, run_passes, slice_modules
from tests.host.backend_bench import load

TARGET = "xla:tpu-v5e"


def test_repeated_shapes_compile_nothing(tmp_path: Path) -> None:
    """Prompts of 2 to 16 tokens share a program, and so do one to eight sequences that decode."""
    first = (Turn({0: 3}), Turn({0: 1}), Turn({1: 16}), Turn({0: 1, 1: 1}))
    again = (Turn({2: 2}), Turn({3: 9}), Turn({2: 1}), Turn(dict.fromkeys(range(4), 1)), Turn({0: 1, 3: 1, 1: 1}))
    script = Script((*first, *again), 4)
    executable, player = load(BACKEND, TARGET, tmp_path, script)
    with closing(executable):
        for turn in first:
            executable.step(player.batches(turn)[0], {})
        compiled = executable.stats()["compiled_shapes"]
        assert compiled == 3  # a chunk of up to 16, one sequence, up to eight
        for turn in again:
            executable.step(player.batches(turn)[0], {})
        assert executable.stats()["compiled_shapes"] == compiled
        assert executable.stats()["steps"] == len(first) + len(again)


def test_a_request_gets_the_same_values_whoever_decodes_beside_it(tmp_path: Path) -> None:
    """Padded rows and other sequences change nothing: same program, other company."""
    script = Script((Turn({0: 6}), Turn({1: 9}), Turn({2: 4}), Turn({0: 1, 1: 1, 2: 1})), 4)
    found = []
    for name, company in (("three", {0: 1, 1: 1, 2: 1}), ("two", {0: 1, 1: 1})):
        executable, player = load(BACKEND, TARGET, tmp_path / name, script, MODELS["gqa"])
        with closing(executable):
            for turn in script.turns[:3]:
                executable.step(player.batches(turn)[0], {})
            found.append(executable.step(player.batches(Turn(company))[0], {})["logits"][:2])
    assert np.array_equal(*found)


@given(st.integers(1, 10**6), st.sampled_from([SEQUENCES, QUERIES, KEYS]))
def test_a_bucket_holds_its_count(count: int, sizes: tuple[int, ...]) -> None:
    size = bucket(count, sizes)
    assert size >= count
    assert size in sizes or (size > sizes[-1] and size < 4 * count)
    assert bucket(size, sizes) == size


def test_without_device_code_nothing_is_made() -> None:
    compiled = BACKEND.compile(MODELS["gqa"]("float32"), TARGET, CompileOptions(device_code=False))
    assert compiled.files == {}
    assert compiled.report["device_code"] is False


@pytest.mark.parametrize("device", ["v5e", "v6e"])
def test_it_says_where_it_runs(device: str, tmp_path: Path) -> None:
    from plait.backends.xla.platform import emulated

    script = Script((Turn({0: 3}),), 4)
    executable, _ = load(BACKEND, f"xla:{device.replace('v', 'tpu-v')}", tmp_path, script)
    executable.close()
    executable.close()
    expected = "tpu-" + device
    assert executable.runs_on == (f"{expected} (emulated on host)" if emulated() else expected)


def test_16_bit_arrays_give_the_same_bits_in_two_slices(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a TPU, where arrays are not float32: XLA must leave out no rounding between two ops of one program."""
    import jax

    monkeypatch.setattr(jax, "default_backend", lambda: "tpu")
    script = Script((Turn({0: 13}, "all"),), 4)
    found = []
    for cuts in ([(0, 4)], [(0, 2), (2, 4)]):
        values: dict[str, Any] = {}
        for module in slice_modules(Model(blocks=(Attention(),) * 4)("bfloat16"), cuts):
            run_passes(module, SLICE_PIPELINE)
            player = Player(script, kv_classes(module), VOCABULARY)
            bench = Bench(BACKEND, TARGET, tmp_path / str(cuts), shapes_only=False, device_code=False)
            with closing(bench.load(module, player, str(len(values)))) as executable:
                inputs = {name: values[name] for name in signature(module).inputs}
                values = executable.step(player.batches(script.turns[0])[0], inputs)
        found.append(values["logits"])
    assert np.array_equal(*found)


@pytest.mark.parametrize("dtype", [pytest.param("float32", marks=pytest.mark.slow), "bfloat16"])
def test_a_scan_changes_no_bit(dtype: str, tmp_path: Path) -> None:
    """Blocks that alternate are scanned in pairs; the same program with every block in it gives the same logits."""
    import jax

    from plait.backends.xla.arrays import held_dtype, pool_shape, read
    from plait.backends.xla.executable import facts_of, tables_of

    module = Model((Attention(), Attention(window=8)) * 3, tied=False)(dtype)
    run_passes(module, SLICE_PIPELINE)
    write_slice(tmp_path / "slice", module, random_weights(module), {})
    refs = read_weights_json(tmp_path / "slice" / "weights.json")
    script = Script((Turn({0: 13, 1: 1}),), 4)
    found = []
    for scan in (True, False):
        program = Program(module, 4, scan=scan)
        assert max(segment.repeats for segment in program.segments) == (3 if scan else 1)
        player = Player(script, kv_classes(module), VOCABULARY)
        weights = [read(weight, program, refs, tmp_path / "slice", True) for weight in program.weights]
        shapes = [pool_shape(pool, program, player.pages[pool.kv_class]) for pool in program.pools]
        pools = [np.zeros(shape, held_dtype("float32", True)) for shape in shapes]
        run = jax.jit(program.trace, compiler_options=COMPILER_OPTIONS)
        logits = []
        for turn in script.turns:
            for grid in split(player.batches(turn)[0], Buckets(), program.windows, player.pages, 4):
                out, pools = run(weights, pools, {}, facts_of(grid), tables_of(program, grid), None)
                logits.append(np.asarray(out["logits"])[grid.logit_rows])
        found.append(np.concatenate(logits))
    assert np.array_equal(*found)


def test_without_jax_a_slice_says_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(MissingDependencyError) as error:
        BACKEND.load(tmp_path, "tpu-v5e", LoadOptions({}))
    assert error.value.code == "jax-missing" and "plait[xla]" in error.value.hint
