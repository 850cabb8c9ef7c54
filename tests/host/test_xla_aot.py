"""Programs made ahead of time: for TPUs, as far as that shows without one, and for this host, where they run."""

from __future__ import annotations

import gzip
import importlib.util
import json
import os
import shutil
import subprocess
import sys
from contextlib import closing
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from xdsl.dialects.builtin import ModuleOp

from plait.backends.base import Batch, CompileOptions, Executable, LoadOptions
from plait.backends.conformance.models import VOCABULARY, Attention, Model, random_weights, write_slice
from plait.backends.conformance.script import SCRIPTS, Player
from plait.backends.xla import BACKEND, XlaBackend, ragged, wanted_attention
from plait.backends.xla.aot import Built, compile_slice, environment
from plait.backends.xla.buckets import split
from plait.backends.xla.chips import CHIPS, GIB, GROUP_SIZES
from plait.backends.xla.fit import too_large
from plait.backends.xla.hlo import count
from plait.backends.xla.record import FILE, Bounds, Record, buckets_of, pages_of, shapes_of
from plait.cost_models.catalogue import devices
from plait.errors import FitError, MissingDependencyError, PlaitError, UnsupportedError, UsageError, UserError
from plait.ir import kv_classes
from plait.ir.passes import SLICE_PIPELINE, run_passes
from plait.runtime.pages import make_pools
from plait.spec import to_json
from tests.ir_models import Shape, build

BLOCKS = 4
#: A slice whose compile takes a TPU's compiler a second or two, with heads that divide over eight chips.
TINY = Shape(blocks=BLOCKS, hidden=256, heads=8, kv_heads=2, head_dim=32, ffn=512, vocabulary=512, dtype="bfloat16")
FEW = CompileOptions(max_sequences=1, max_step_tokens=16, max_context_tokens=128)
DECODE, PREFILL = "decode-8-128", "prefill-16-128"
ROOT = Path(__file__).parents[2]


def fused(module: ModuleOp) -> ModuleOp:
    run_passes(module, SLICE_PIPELINE)
    return module


@cache
def made(arch: str = "tpu-v5e", group_size: int = 1, scan: bool = True) -> Built:
    options = CompileOptions(**{**vars(FEW), "group_size": group_size})
    return compile_slice(fused(build(TINY)), arch, options, scan=scan)


def row(built: Built, program: str = DECODE) -> dict[str, Any]:
    programs = built.report["programs"]
    assert isinstance(programs, dict)
    return dict(programs[program])


def hlo(built: Built, program: str = DECODE) -> str:
    return gzip.decompress(built.files[f"{program}.hlo.gz"]).decode()


def test_a_slice_gets_a_program_a_shape_and_their_hlo() -> None:
    files = made().files
    names = {f"{program}{suffix}" for program in (DECODE, PREFILL) for suffix in (".tpu", ".hlo.gz")}
    assert set(files) == {*names, FILE}
    record = json.loads(files[FILE])
    assert record["device_kind"] == "TPU v5 lite" and set(record["versions"]) == {"jaxlib", "libtpu"}
    assert [program["file"] for program in record["programs"]] == [f"{DECODE}.tpu", f"{PREFILL}.tpu"]
    assert all(str(ROOT).encode() not in data for data in files.values()), "a path of this machine"


def test_equal_blocks_are_one_loop_and_kv_is_written_in_place() -> None:
    text = hlo(made())
    assert text.count(" while(") == 1 and f"repeat{BLOCKS}" in text
    kv_bytes = 2 * BLOCKS * 128 * TINY.kv_heads * TINY.head_dim * 2
    assert row(made())["aliased_bytes"] == kv_bytes
    assert row(made())["argument_bytes"] > kv_bytes + 2 * BLOCKS * 3 * TINY.hidden * TINY.ffn


def test_what_a_loop_holds_counts_as_often_as_it_runs() -> None:
    """The body of the scan stands in the text once; without a scan every block's sums stand there. Cycles can be held
    to each other roughly only: without a loop XLA fetches weights beside the compute, which has no cycles."""
    with_loop, without = made(group_size=2), made(group_size=2, scan=False)
    assert " while(" not in hlo(without)
    assert hlo(with_loop).count(" all-reduce(") == 3 and hlo(without).count(" all-reduce(") == 2 * BLOCKS + 1
    assert row(with_loop)["collectives"] == row(without)["collectives"]
    assert 0.8 < row(with_loop)["estimated_cycles"] / row(without)["estimated_cycles"] < 2.2


def test_counts_of_a_text() -> None:
    cost = 'backend_config={"window_config":{"estimated_cycles":"%d"}}'
    text = f"""HloModule m, entry_computation_layout={{(f32[8]{{0}})->f32[8]{{0}}}}

%inner (p: f32[8]) -> f32[8] {{
  ROOT %dot.1 = f32[8]{{0:T(8)}} fusion(%p), kind=kOutput, calls=%fused, {cost % 5}
}}

%body (p: (s32[], f32[8])) -> (s32[], f32[8]) {{
  %a = f32[8]{{0}} fusion(%p), kind=kLoop, calls=%fused, {cost % 10}
  %r = f32[8]{{0}} all-reduce(%a), replica_groups={{}}, to_apply=%add
  %loop = f32[8]{{0}} while(%r), condition=%more, body=%inner, metadata={{op_name="jit(f)/repeat7/while/repeat3/while"}}
}}

ENTRY %main (x: f32[8]) -> f32[8] {{
  %copy = f32[8]{{0}} copy(%x), {cost % 1000}
  %s = (f32[8]{{0}}, u32[]) all-gather-start(%copy), dimensions={{0}}
  %d = f32[8]{{0}} all-gather-done(%s)
  ROOT %w = (s32[], f32[8]{{0}}) while(%d), condition=%more, body=%body, metadata={{op_name="jit(f)/repeat7/while"}}
}}
"""
    counts = count(text)
    assert counts.cycles == 1000 + 7 * (10 + 3 * 5)
    assert counts.collectives == {"all-gather": 1, "all-reduce": 7}


@pytest.mark.parametrize("chips", [2, 8, pytest.param(4, marks=pytest.mark.slow)])
def test_a_group_sums_twice_a_block(chips: int) -> None:
    """And once for the embedding. With eight chips four hold the same KV head."""
    for program in (DECODE, PREFILL):
        assert row(made(group_size=chips), program)["collectives"] == {"all-reduce": 2 * BLOCKS + 1}
    assert row(made())["collectives"] == {}
    assert row(made(group_size=chips))["argument_bytes"] < row(made())["argument_bytes"]


@pytest.mark.parametrize(
    "arch", ["tpu-v6e", *(pytest.param(a, marks=pytest.mark.slow) for a in CHIPS if "v6" not in a)]
)
def test_every_kind_of_chip_is_compiled_for(arch: str) -> None:
    built = made(arch)
    assert json.loads(built.files[FILE])["device_kind"] == CHIPS[arch].kind
    assert row(built)["estimated_ms"] > 0


def test_what_was_made_is_read_again_and_a_damaged_entry_is_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = made()
    again = compile_slice(fused(build(TINY)), "tpu-v5e", FEW)
    assert again.seconds is None and again.files == first.files and again.report == first.report
    shutil.copytree(Path(os.environ["PLAIT_CACHE"]) / "xla", tmp_path / "xla")
    monkeypatch.setenv("PLAIT_CACHE", str(tmp_path))
    assert compile_slice(fused(build(TINY)), "tpu-v5e", FEW).seconds is None
    for entry in (path for path in (tmp_path / "xla").rglob("*") if path.is_file()):
        entry.write_bytes(entry.read_bytes()[:-1] + b"?")
    told: list[tuple[int, int, str]] = []
    listening = replace(FEW, progress=lambda *made: told.append(made))
    mended = compile_slice(fused(build(TINY)), "tpu-v5e", listening)
    assert mended.seconds is not None
    assert mended.files == first.files, "two compiles give the same bytes"
    assert told == [(1, 2, DECODE), (2, 2, PREFILL)]


def test_what_does_not_fit_is_said_before_xla_is_asked() -> None:
    large = CompileOptions(**{**vars(FEW), "max_kv_tokens": 1 << 25})
    with pytest.raises(FitError, match=r"does not fit TPU v5 lite: 32\.\d+ of 15\.75 GiB") as caught:
        compile_slice(fused(build(TINY)), "tpu-v5e", large)
    assert "KV 32.00 GiB" in caught.value.why
    (fit,) = caught.value.rows
    assert fit["free"] == int(15.75 * GIB)
    assert fit["short_by"] == int(fit["needed"]) - int(fit["free"])


@pytest.mark.slow
def test_what_only_xla_finds_too_large() -> None:
    """Scores of 512 queries with 262,144 keys, which our own count of a step knows nothing of."""
    wide = Shape(blocks=1, hidden=256, heads=64, kv_heads=2, head_dim=32, ffn=256, vocabulary=512, dtype="bfloat16")
    with pytest.raises(FitError, match="XLA finds no room for it") as caught:
        compile_slice(fused(build(wide)), "tpu-v5e", CompileOptions(max_sequences=1, max_context_tokens=1 << 18))
    assert "exceeds available HBM (15.75G)" in caught.value.why
    assert int(caught.value.rows[0]["short_by"]) > 0


@pytest.mark.slow
def test_the_memory_of_every_chip_is_what_libtpu_says() -> None:
    """And every group of devices can be described."""
    command = [sys.executable, "-m", "tests.host.xla_memory_probe"]
    variables = environment({"platform": "tpu", "arch": "tpu-v5e"})
    done = subprocess.run(command, cwd=ROOT, env=variables, capture_output=True, text=True, check=True, timeout=200)
    said = {
        (arch, int(size)): (int(count), float(gib))
        for arch, size, count, gib in map(str.split, done.stdout.splitlines())
    }
    assert said == {(arch, size): (size, chip.hbm_gib) for arch, chip in CHIPS.items() for size in GROUP_SIZES}


@pytest.mark.parametrize(
    ("said", "needed"),
    [
        (
            "Ran out of memory on HBM, the total memory for temporaries (320.00G) exceeds available HBM (15.75G).",
            320 * GIB,
        ),
        ("Ran out of memory in memory space hbm. Used 1.5T of 15.75G hbm. Exceeded hbm capacity.", 1536 * GIB),
        ("Ran out of memory in memory space vmem. Used 160.00M of 128.00M vmem.", None),
    ],
)
def test_what_xla_finds_too_large_is_said_in_our_words(said: str, needed: int | None) -> None:
    error = too_large(CHIPS["tpu-v5e"], "tpu-v5e", f"RESOURCE_EXHAUSTED: {said}")
    assert error.why == said and "RESOURCE_EXHAUSTED" not in str(error)
    assert [row["needed"] for row in error.rows] == ([] if needed is None else [needed])


def test_the_bandwidth_of_a_chip_is_the_catalogues() -> None:
    for arch, chip in CHIPS.items():
        (entry,) = (entry for entry in devices() if entry.arch == arch)
        parts = 1 if entry.logical is None else entry.logical.count
        assert entry.memory.bandwidth_gb_per_s is not None
        assert chip.gb_per_s == entry.memory.bandwidth_gb_per_s / parts, arch


@pytest.mark.parametrize("missing", ["libtpu", "jax"])
def test_a_missing_compiler_is_named_with_its_wheel(missing: str, monkeypatch: pytest.MonkeyPatch) -> None:
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == missing else find(name))
    with pytest.raises(MissingDependencyError, match=missing) as caught:
        BACKEND.compile(fused(build(TINY)), "xla:tpu-v5e", FEW)
    assert caught.value.hint == "pip install 'plait[tpu]'"


@pytest.mark.parametrize(
    ("shape", "chips", "why"),
    [
        (TINY, 3, "groups have 1, 2, 4, 8"),
        (Shape(heads=6, kv_heads=2, dtype="bfloat16"), 4, "6 heads or columns do not divide over 4 chips"),
        (Shape(heads=12, kv_heads=3, dtype="bfloat16"), 4, "3 heads or columns do not divide over 4 chips"),
        (Shape(ffn=30, dtype="bfloat16"), 4, "30 heads or columns do not divide over 4 chips"),
    ],
)
def test_a_group_that_cannot_hold_the_slice_is_refused(shape: Shape, chips: int, why: str) -> None:
    with pytest.raises(UnsupportedError, match=why):
        compile_slice(fused(build(shape)), "tpu-v5e", CompileOptions(group_size=chips))


def test_a_compiler_that_dies_is_an_error_of_ours(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", "/bin/false")
    with pytest.raises(PlaitError, match="the TPU compiler failed") as caught:
        compile_slice(fused(build(TINY)), "tpu-v5e", CompileOptions(max_sequences=2))
    assert caught.value.code == "xla-compile" and caught.value.exit_code == 1


@given(st.data(), st.integers(1, 80), st.integers(1, 600), st.integers(1, 5000))
def test_every_step_within_the_bounds_has_its_program(
    data: st.DataObject, max_sequences: int, max_step_tokens: int, max_context: int
) -> None:
    bounds = Bounds.of(CompileOptions(max_step_tokens, max_sequences, 16, max_context))
    buckets = buckets_of(bounds)
    decodes = data.draw(st.integers(0, max_sequences))
    chunk = data.draw(st.integers(2, max(2, min(max_step_tokens, max_context))))
    lens = [1] * decodes + [chunk] * (decodes < max_sequences and chunk <= min(max_step_tokens, max_context))
    if not lens:
        return
    kv = np.array([data.draw(st.integers(n, max_context)) for n in lens], np.int32)
    starts = np.concatenate(([0], np.cumsum(lens))).astype(np.int32)
    positions = np.concatenate([np.arange(k - n, k) for n, k in zip(lens, kv, strict=True)]).astype(np.int32)
    table = np.zeros((len(lens), -(-max_context // 16)), np.int32)
    batch = Batch(np.zeros_like(positions), positions, starts, kv, {"full": table}, starts[1:] - 1)
    shapes = shapes_of(buckets, has_logits=True)
    assert len(shapes) <= 8
    for grid in split(batch, buckets, {"full": None}, {"full": 1}, 16):
        assert grid.shape in shapes


@pytest.mark.parametrize("window", [None, 40])
def test_programs_have_the_pages_that_the_runtime_hands_out(window: int | None) -> None:
    name = "full" if window is None else f"window{window}"
    options = CompileOptions(max_step_tokens=64, max_sequences=3, max_context_tokens=900, max_kv_tokens=2736)
    pools = make_pools({name: window}, 2736, 16, 64, 3)
    assert pages_of({name: window}, Bounds.of(options)) == {name: pools[name].pages}


ONE_KIND = Model((Attention(heads=8, kv_heads=2),) * 3, rope="llama3", bias=True)


def play(folder: Path, devices: int = 1, ordinal: int = 0) -> dict[str, Any]:
    """What `xla_probe` finds of the slice in the folder."""
    flags = {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": f"--xla_force_host_platform_device_count={devices}"}
    command = [sys.executable, "-m", "tests.host.xla_probe", str(folder), str(folder / "found.npz"), str(ordinal)]
    subprocess.run(command, cwd=ROOT, env=os.environ | flags, check=True, timeout=120)
    with np.load(folder / "found.npz") as found:
        return dict(found)


def for_this_host(chips: int) -> tuple[ModuleOp, Built]:
    """A slice and its programs for XLA:CPU."""
    module, script = fused(ONE_KIND("float32")), SCRIPTS["short"]
    options = CompileOptions(
        page_tokens=4,
        max_step_tokens=script.step_tokens,
        max_sequences=script.sequences,
        max_context_tokens=64,
        max_kv_tokens=128,
        group_size=chips,
    )
    return module, compile_slice(module, "tpu-v5e", options, platform="cpu")


@pytest.fixture(scope="module")
def here(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What the slice gives without programs."""
    module, folder = fused(ONE_KIND("float32")), tmp_path_factory.mktemp("here") / "slice"
    write_slice(folder, module, random_weights(module), {})
    return play(folder)


@pytest.mark.parametrize("chips", [1, 4])
def test_programs_run_as_loaded_and_agree_with_what_xla_compiles_here(
    chips: int, here: dict[str, Any], tmp_path: Path
) -> None:
    """The loader that a TPU host uses, on programs that were made for this host. With four chips two hold the same KV
    head."""
    module, built = for_this_host(chips)
    write_slice(tmp_path / "ahead", module, random_weights(module), built.files)
    ahead = play(tmp_path / "ahead", 2 * chips, ordinal=1)
    assert list(ahead["used"]) == list(range(chips, 2 * chips)), "the second group of this host's devices"
    assert ahead["loaded_programs"] == 2 and here["loaded_programs"] == 0
    assert ahead["compiled_shapes"] < here["compiled_shapes"]
    for name in (*(f"step{i}" for i in range(len(SCRIPTS["short"].turns))), "k", "v"):
        assert ahead[name].shape == here[name].shape
        np.testing.assert_allclose(ahead[name], here[name], atol=3e-5, err_msg=name)


NOT_A_PROGRAM = {"file": FILE, "sequences": 1, "queries": 1, "keys": 128, "every_row": True}


def load(folder: Path, changes: dict[str, Any]) -> Executable:
    """The slice for this host with another `programs.json`."""
    module, built = for_this_host(1)
    record = json.dumps(json.loads(built.files[FILE]) | changes).encode()
    write_slice(folder / "slice", module, random_weights(module), built.files | {FILE: record})
    return BACKEND.load(folder / "slice", "v5e", LoadOptions({"full": 8}, 4, weight_root=folder / "slice"))


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"versions": {"jaxlib": "0.0.1"}}, "made by jaxlib 0.0.1; here is jaxlib"),
        ({"page_tokens": 8}, "made for pages of 8 tokens"),
        ({"pages": {"full": 7}}, "made for fewer pages of full"),
    ],
)
def test_programs_that_cannot_be_used_are_left_and_it_says_why(
    changes: dict[str, Any], why: str, tmp_path: Path
) -> None:
    with closing(load(tmp_path, changes)) as executable:
        stats = executable.stats()
    assert stats["loaded_programs"] == 0 and why in str(stats["programs_unused"])


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"device_kind": "TPU v4"}, "compiled for TPU v4, and this host has cpu"),
        ({"group_size": 4096}, "compiled for 4096 devices, and this host has"),
        ({"weights": []}, "programs.json lists other weights"),
        ({"programs": [NOT_A_PROGRAM]}, "cannot be loaded"),
    ],
)
def test_programs_of_something_else_are_refused(changes: dict[str, Any], why: str, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=why):
        load(tmp_path, changes)


PALLAS = Shape(blocks=2, hidden=256, heads=4, kv_heads=2, head_dim=128, ffn=256, vocabulary=512, dtype="bfloat16")


@pytest.mark.parametrize("arch", ["tpu-v5e", pytest.param("tpu-v6e", marks=pytest.mark.slow)])
def test_ragged_paged_attention_is_compiled_in_where_asked_for(arch: str) -> None:
    compiled = XlaBackend(attention="pallas").compile(fused(build(PALLAS)), f"xla:{arch}", FEW)
    assert compiled.report["attention"] == "pallas"
    for program in (DECODE, PREFILL):
        text = gzip.decompress(compiled.files[f"{program}.hlo.gz"]).decode()
        assert "ragged_paged_attention_kernel" in text and "tpu_custom_call" in text


def test_the_environment_says_which_attention(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PLAIT_XLA_ATTENTION", "pallas")
    assert wanted_attention() == "pallas"
    monkeypatch.setenv("PLAIT_XLA_ATTENTION", "ragged")
    with pytest.raises(UsageError, match="it is gather or pallas"):
        BACKEND.compile(fused(build(TINY)), "xla:tpu-v5e", FEW)


def test_ragged_paged_attention_refuses_what_it_does_not_do() -> None:
    with pytest.raises(UnsupportedError, match="head_dim = 32: Pallas attention takes multiples of 128"):
        XlaBackend(attention="pallas").compile(fused(build(TINY)), "xla:tpu-v5e", FEW)


def test_ragged_paged_attention_gives_what_ours_gives(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In JAX's interpreter of TPU kernels; prefill chunks and decode, pages and the way out of them."""
    from jax.experimental.pallas import tpu as pltpu
    from jax.experimental.pallas.ops.tpu.ragged_paged_attention import kernel

    # The interpreter of JAX 0.10 reshapes values, not references, and takes a mask with more rows than columns for one
    # that reaches out of bounds: the kernel gets its block of keys as a value, and few queries a block.
    copies = kernel.MultiPageAsyncCopyDescriptor
    wait = copies.wait
    monkeypatch.setattr(copies, "wait", lambda self: wait(self)[...])
    monkeypatch.setattr(ragged, "BLOCK_QUERIES", 4)
    script = SCRIPTS["short"]
    plain = Attention(heads=8, kv_heads=2, head_dim=128, scale=0.1)
    module = fused(Model((plain, replace(plain, window=8, softcap=2.0)))("float32"))
    found = {}
    for attention in ("gather", "pallas"):
        # Of no version: its programs, which it has not, are left, and XLA compiles with its attention.
        record = Record("cpu", "cpu", {}, 1, attention, 4, {}, (2,), (16,), (32,), (), ())
        write_slice(tmp_path / attention, module, random_weights(module), {FILE: to_json(record).encode()})
        player = Player(script, kv_classes(module), VOCABULARY)
        options = LoadOptions(player.pages, 4, script.step_tokens, 2, 1, tmp_path / attention)
        with closing(BACKEND.load(tmp_path / attention, "v5e", options)) as executable:
            with pltpu.force_tpu_interpret_mode():
                steps = [executable.step(player.batches(turn)[0], {})["logits"] for turn in script.turns]
            pages = executable.export_pages(1, player.physical("window8", 0))
        found[attention] = [*steps, *pages]
    for ours, theirs in zip(found["gather"], found["pallas"], strict=True):
        np.testing.assert_allclose(theirs, ours, atol=1e-5 * np.abs(ours).max())
