"""Machine code without a device: that it is real, right for its chip, reproducible, cached, and that bad code is found.

Numbers read from binaries are held against NVIDIA's own tools and LLVM's comments in the assembly.
"""

from __future__ import annotations

import importlib.metadata
import re
import subprocess
import tempfile
import threading
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from plait.backends.kernels.gpu import choose, facts, loader
from plait.backends.kernels.gpu.archs import ARCHS
from plait.backends.kernels.gpu.build import Binary, BuildError, Job, compile_many, compile_variant
from plait.backends.kernels.gpu.cache import Cache, default_folder
from plait.backends.kernels.gpu.facts import BinaryError, Expectations, check, expectations
from plait.backends.kernels.gpu.kernel import Kernel, Tile, Variant
from plait.cost_models import catalogue
from plait.errors import MissingDependencyError, PlaitError, UnsupportedError, UserError

SOURCE = "tests.host.gpu_examples"

MULTIPLY = Kernel(
    name="multiply",
    source=f"{SOURCE}:multiply",
    pointers=("x", "w", "out"),
    scalars={"rows": "i32", "N": "i32", "K": "i32"},
    constants=(),
    tile=("BLOCK_M", "BLOCK_N", "BLOCK_K"),
    grid=("cdiv(rows, BLOCK_M)", "cdiv(N, BLOCK_N)", "1"),
    nature="multiply",
    written=("out",),
    flops="2 * rows * N * K",
    bytes="rows * K * x_bytes + N * K * w_bytes + rows * N * out_bytes",
)
SCALE = Kernel(
    name="scale",
    source=f"{SOURCE}:scale",
    pointers=("x", "out"),
    scalars={"rows": "i32", "factor": "f32"},
    constants=(),
    tile=("BLOCK",),
    grid=("cdiv(rows, BLOCK)", "1", "1"),
    nature="stream",
    written=("out",),
    flops="rows",
    bytes="rows * (x_bytes + out_bytes)",
)
ALIGNED = frozenset({"x", "w", "out", "N", "K"})
MAIN_ARCHS = ("sm_90a", "sm_100a", "gfx942", "gfx950")


def product(m: int, n: int, k: int, warps: int = 4, stages: int = 3, kind: str = "bf16") -> Variant:
    tile = Tile({"BLOCK_M": m, "BLOCK_N": n, "BLOCK_K": k}, warps, stages)
    return Variant("multiply", {"x": kind, "w": kind, "out": "bf16"}, {}, tile, ALIGNED)


def scaled(block: int, *aligned: str, kind: str = "bf16") -> Variant:
    return Variant("scale", {"x": kind, "out": kind}, {}, Tile({"BLOCK": block}), frozenset(aligned))


#: Everything the tests look at, compiled together.
JOBS: Mapping[str, Job] = {
    **{f"good {arch}": Job(MULTIPLY, product(64, 64, 64, 4, 2), arch) for arch in MAIN_ARCHS},
    **{f"stream {arch}": Job(SCALE, scaled(2048, "x", "out", "rows"), arch) for arch in ("sm_90a", "gfx942")},
    "small gfx942": Job(MULTIPLY, replace(product(64, 64, 64, 4, 2), small=frozenset({"x", "w", "out"})), "gfx942"),
    "narrow": Job(SCALE, scaled(2048), "sm_90a"),
    "fp8 sm_90a": Job(MULTIPLY, product(64, 64, 64, 4, 2, "fp8e4nv"), "sm_90a"),
    "fp8 gfx942": Job(MULTIPLY, product(64, 64, 64, 4, 2, "fp8e4b8"), "gfx942"),
    "spilling": Job(MULTIPLY, product(128, 128, 64, 4, 2), "sm_80"),
    "amd spilling": Job(MULTIPLY, product(128, 128, 64, 4, 2), "gfx1100"),
    "too much shared": Job(MULTIPLY, product(128, 128, 128, 8, 3), "gfx942"),
}


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Cache:
    return Cache(tmp_path_factory.mktemp("kernels"))


@pytest.fixture(scope="module")
def made(cache: Cache) -> Mapping[str, Binary]:
    seen: list[tuple[int, int]] = []
    outcomes = compile_many(list(JOBS.values()), cache=cache, progress=lambda done, of, _: seen.append((done, of)))
    assert seen == [(n + 1, len(JOBS)) for n in range(len(JOBS))]
    assert [o for o in outcomes if isinstance(o, BuildError)] == []
    return dict(zip(JOBS, outcomes, strict=True))  # type: ignore[arg-type]


def failures(made: Mapping[str, Binary], name: str, expected: Expectations | None = None, arch: str = "") -> set[str]:
    job = JOBS[name]
    chip = ARCHS[arch or job.arch]
    expected = expectations(job.kernel, job.variant, chip) if expected is None else expected
    return {f.name for f in check(made[name].facts, chip, job.kernel, job.variant, expected)}


# ---- The code ----


@pytest.mark.parametrize("name", [name for name in JOBS if name.split()[0] in ("good", "stream", "fp8")])
def test_good_code_is_proven(made: Mapping[str, Binary], name: str) -> None:
    assert failures(made, name) == set()
    assert made[name].code[:4] == b"\x7fELF"


@pytest.mark.parametrize(
    ("name", "instruction"),
    [
        ("good sm_90a", "wgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16"),
        ("good sm_100a", "tcgen05.mma.cta_group::1.kind::f16"),
        ("good gfx942", "v_mfma_f32_32x32x8_bf16"),
        ("good gfx950", "v_mfma_f32_32x32x16_bf16"),
        ("fp8 sm_90a", "wgmma.mma_async.sync.aligned.m64n64k32.f32.e4m3.e4m3"),
        ("fp8 gfx942", "v_mfma_f32_32x32x16_fp8_fp8"),
    ],
)
def test_matrix_units_are_used(made: Mapping[str, Binary], name: str, instruction: str) -> None:
    assert set(made[name].facts.matrix) == {instruction}
    assert instruction in made[name].assembly


def _tool(name: str) -> Path:
    import triton

    return Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / name


@pytest.mark.parametrize("name", ["good sm_90a", "good sm_100a", "spilling", "stream sm_90a"])
def test_registers_and_stack_are_as_nvidias_tool_says(made: Mapping[str, Binary], name: str, tmp_path: Path) -> None:
    (tmp_path / "k.cubin").write_bytes(made[name].code)
    told = subprocess.run(
        [_tool("cuobjdump"), "--dump-resource-usage", tmp_path / "k.cubin"], capture_output=True, text=True, check=True
    ).stdout
    used = dict(re.findall(r"(\w+):(\d+)", told.splitlines()[-1]))
    own = made[name].facts
    assert (own.registers, own.spills) == (int(used["REG"]), int(used["STACK"]) // 4)


@pytest.mark.parametrize(("name", "instruction"), [("good sm_90a", "HGMMA"), ("good sm_100a", "UTCHMMA")])
def test_the_cubin_itself_has_the_instruction(
    made: Mapping[str, Binary], name: str, instruction: str, tmp_path: Path
) -> None:
    (tmp_path / "k.cubin").write_bytes(made[name].code)
    text = subprocess.run([_tool("nvdisasm"), tmp_path / "k.cubin"], capture_output=True, text=True, check=True).stdout
    assert instruction in text


@pytest.mark.parametrize("name", ["good gfx942", "good gfx950", "stream gfx942", "amd spilling"])
def test_registers_and_occupancy_are_as_llvm_says(made: Mapping[str, Binary], name: str) -> None:
    text, own, arch = made[name].assembly, made[name].facts, ARCHS[JOBS[name].arch]

    def comment(word: str) -> int:
        match = re.search(rf"; {word}: (\d+)", text)
        assert match
        return int(match[1])

    assert own.registers == comment("TotalNumVgprs" if "TotalNumVgprs" in text else "NumVgprs")
    assert own.spills * 4 >= comment("ScratchSize")
    # LLVM's occupancy is in waves of a scheduler and knows nothing of the shared memory of the launch.
    unbound = replace(arch, most_blocks=10**6)
    blocks, _ = facts.occupancy(unbound, arch.warp, own.registers, 0)
    assert blocks // arch.simds == comment("Occupancy")


def test_tensors_below_2_gib_get_buffer_loads(made: Mapping[str, Binary]) -> None:
    for name, word, other in (("small gfx942", "buffer", "global"), ("good gfx942", "global", "buffer")):
        assert f"{word}_load_dwordx4" in made[name].assembly and f"{word}_store" in made[name].assembly
        assert f"{other}_load" not in made[name].assembly
    assert failures(made, "small gfx942") == set()


def test_binary_says_how_to_launch_it(made: Mapping[str, Binary]) -> None:
    for name, binary in made.items():
        job, arch = JOBS[name], ARCHS[JOBS[name].arch]
        assert binary.symbol == job.kernel.name and binary.suffix == arch.suffix
        assert binary.threads == job.variant.tile.num_warps * arch.warp == binary.facts.threads
        assert binary.facts.argument_bytes == (8,) * len(job.kernel.pointers) + (4,) * len(job.kernel.scalars) + (8, 8)


# ---- Bad code is found ----


def test_spills_are_found(made: Mapping[str, Binary]) -> None:
    assert "spills" in failures(made, "spilling") and "spills" in failures(made, "amd spilling")


def test_too_much_shared_memory_is_found(made: Mapping[str, Binary]) -> None:
    assert {"shared-memory", "occupancy"} <= failures(made, "too much shared")


def test_narrow_loads_are_found(made: Mapping[str, Binary]) -> None:
    """Nothing is promised of these pointers: two bytes at a time."""
    assert failures(made, "narrow") == set()
    assert failures(made, "narrow", Expectations(load_bytes=16)) == {"narrow-loads"}
    assert made["narrow"].facts.widest_load_bytes == 2


def test_missing_matrix_instructions_are_found(made: Mapping[str, Binary]) -> None:
    assert failures(made, "stream sm_90a", Expectations(matrix=ARCHS["sm_90a"].matrix)) == {"matrix"}
    assert failures(made, "good gfx942", Expectations(matrix=("v_wmma_",))) == {"matrix"}
    assert failures(made, "good gfx942", Expectations(matrix=("v_mfma_",), matrix_type="fp8")) == {"matrix-type"}


def test_code_for_another_chip_is_found(made: Mapping[str, Binary]) -> None:
    assert "arch" in failures(made, "good sm_90a", Expectations(), "sm_100a")
    assert "arch" in failures(made, "good gfx942", Expectations(), "gfx950")
    plain = replace(made["good sm_90a"].facts, specific=False)
    job = JOBS["good sm_90a"]
    found = check(plain, ARCHS["sm_90a"], job.kernel, job.variant, Expectations())
    assert [f.name for f in found] == ["arch"]


def test_an_argument_more_is_found(made: Mapping[str, Binary]) -> None:
    job = JOBS["stream sm_90a"]
    longer = replace(job.kernel, pointers=("x", "y", "out"))
    found = check(made["stream sm_90a"].facts, ARCHS["sm_90a"], longer, job.variant, Expectations())
    assert [f.name for f in found] == ["arguments"]


@pytest.mark.parametrize("cut", [0, 3, 40, 600, -100])
def test_a_damaged_file_is_an_error(made: Mapping[str, Binary], cut: int) -> None:
    with pytest.raises(PlaitError) as error:
        facts.resources(made["good sm_90a"].code[:cut])
    assert error.value.code == "binary-unreadable"


# ---- Reproducible, and cached ----


def test_same_bytes_in_other_processes_folders_and_environments(
    made: Mapping[str, Binary], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONHASHSEED", "7")
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    monkeypatch.setenv("TRITON_DEFAULT_FP_FUSION", "0")
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    names = ["good sm_90a", "good gfx942"]
    again = compile_many([JOBS[name] for name in names], cache=Cache(tmp_path / "other"), workers=1)
    assert again == [made[name] for name in names]


def test_a_second_compile_starts_no_process(
    made: Mapping[str, Binary], cache: Cache, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object, **__: object) -> None:
        raise AssertionError("a process was started")

    monkeypatch.setattr(subprocess, "Popen", fail)
    assert compile_many(list(JOBS.values()), cache=cache) == list(made.values())


def test_the_key_is_everything_that_matters(monkeypatch: pytest.MonkeyPatch) -> None:
    job = JOBS["good sm_90a"]
    others = [
        replace(job, arch="sm_100a"),
        replace(job, variant=product(64, 64, 32, 4, 2)),
        replace(job, variant=product(64, 64, 64, 8, 2)),
        replace(job, variant=replace(job.variant, aligned=frozenset())),
        replace(job, variant=replace(job.variant, small=frozenset({"x"}))),
        replace(job, variant=replace(job.variant, types={**job.variant.types, "out": "fp32"})),
    ]
    assert len({job.key, *(other.key for other in others)}) == len(others) + 1
    assert replace(job, variant=product(64, 64, 64, 4, 2)).key == job.key
    before = job.key
    monkeypatch.setattr(loader, "source_digest", lambda _: "another text")
    assert job.key != before


def test_sources_count_with_what_they_import(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(tmp_path)
    text = "import triton\nfrom plait.backends.kernels.gpu.sources.gemm import origin\n"
    (tmp_path / "one.py").write_text(text)
    (tmp_path / "two.py").write_text(text)
    (tmp_path / "three.py").write_text(text + "# changed\n")
    (tmp_path / "four.py").write_text("import triton\n")
    digests = {name: loader.source_digest(f"{name}:f") for name in ("one", "two", "three", "four")}
    assert digests["one"] == digests["two"] and len(set(digests.values())) == 3


def test_a_damaged_entry_is_made_again(made: Mapping[str, Binary], cache: Cache) -> None:
    job = JOBS["stream sm_90a"]
    path = cache.folder / job.key[:2] / job.key[2:]
    path.write_bytes(path.read_bytes()[:-1] + b"?")
    assert cache.get(job.key) is None and not path.exists()
    assert compile_variant(job.kernel, job.variant, job.arch, cache) == made["stream sm_90a"]


def test_cache_drops_what_was_used_longest_ago(tmp_path: Path) -> None:
    small = Cache(tmp_path, limit_bytes=3 * 132)
    for key in ("aa1", "bb2", "cc3"):
        small.put(key, b"x" * 100)
    for key in ("bb2", "cc3", "aa1"):  # used in this order
        assert small.get(key)
    small.put("dd4", b"y" * 100)
    small.trim()
    assert [small.get(key) is None for key in ("aa1", "bb2", "cc3", "dd4")] == [False, True, False, False]
    assert not list(tmp_path.glob("*/.*"))


def test_cache_is_shared_safely(tmp_path: Path) -> None:
    """Writers of one entry, readers, and one that trims, at once: a reader has all of an entry or nothing."""
    payloads = {bytes([n]) * 50_000 for n in range(4)}
    wrong: list[bytes] = []

    def work(payload: bytes) -> None:
        own = Cache(tmp_path, limit_bytes=60_000)
        for _ in range(40):
            own.put("aa", payload)
            own.put("bb", payload)
            if (got := own.get("aa")) is not None and got not in payloads:
                wrong.append(got)
            own.trim()

    threads = [threading.Thread(target=work, args=(payload,)) for payload in payloads]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []


def test_where_the_cache_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PLAIT_CACHE", str(tmp_path))
    assert default_folder() == tmp_path / "kernels"
    monkeypatch.delenv("PLAIT_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert default_folder() == tmp_path / "plait" / "kernels"


@pytest.mark.parametrize("code", ["cache-unreadable", "cache-unwritable"])
def test_a_folder_that_cannot_be_used_is_an_error(tmp_path: Path, code: str, capfd: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / "here"
    if code == "cache-unreadable":
        folder.write_text("a file")
    else:
        folder.symlink_to(tmp_path / "nowhere" / "else")
    jobs = [Job(SCALE, scaled(block), "sm_90a") for block in (64, 128)]
    with pytest.raises(UserError) as error:
        compile_many(jobs, cache=Cache(folder), workers=1)
    assert error.value.code == code and str(folder) in error.value.what
    assert capfd.readouterr().err == ""


def test_what_is_interrupted_stops_at_once_and_leaves_whole_entries(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (temporary := tmp_path / "tmp").mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(temporary))
    started: list[subprocess.Popen[bytes]] = []

    class Recorded(subprocess.Popen[bytes]):
        def __init__(self, *words: Any, **options: Any) -> None:
            super().__init__(*words, **options)
            started.append(self)

    monkeypatch.setattr(subprocess, "Popen", Recorded)

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    jobs = [Job(SCALE, scaled(block), "sm_90a") for block in (64, 128, 256, 512)]
    cache = Cache(tmp_path / "cache")
    with pytest.raises(KeyboardInterrupt):
        compile_many(jobs, cache=cache, workers=2, progress=interrupt)
    kept = [job for job in jobs if cache.get(job.key) is not None]
    assert 1 <= len(kept) <= 2  # one of each process, at most
    assert len([path for path in cache.folder.rglob("*") if path.is_file()]) == len(kept)
    assert all(process.returncode is not None for process in started) and list(temporary.iterdir()) == []


# ---- What goes wrong ----


def test_triton_missing(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def absent(name: str) -> str:
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(importlib.metadata, "version", absent)
    loader.require_triton.cache_clear()
    with pytest.raises(MissingDependencyError) as error:
        compile_many([JOBS["good sm_90a"]], cache=Cache(tmp_path))
    assert error.value.hint == "pip install 'plait[gpu]'"


def test_unknown_arch(tmp_path: Path) -> None:
    with pytest.raises(UnsupportedError) as error:
        compile_many([replace(JOBS["good sm_90a"], arch="sm_9o")], cache=Cache(tmp_path))
    assert "sm_90" in error.value.hint


def test_errors_of_one_job_leave_the_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "dies.py").write_text("import os\nos.kill(os.getpid(), 9)\n")
    dying = Job(replace(SCALE, source="dies:scale"), scaled(64), "sm_90a")
    reordered = Job(replace(SCALE, pointers=("out", "x")), scaled(64), "sm_90a")
    unknown = Job(SCALE, scaled(64, kind="fp8e4b8"), "sm_80")
    fine = Job(SCALE, scaled(64), "sm_90a")
    died, swapped, refused, good = compile_many(
        [dying, reordered, unknown, fine], cache=Cache(tmp_path / "cache"), workers=1
    )
    assert isinstance(died, BuildError) and died.code == "compiler-died" and "Killed" in died.why
    assert isinstance(swapped, BuildError) and "its row says out, x" in swapped.why
    assert isinstance(refused, BuildError) and refused.code == "kernel-compile" and "fp8e4b8" in refused.why
    assert isinstance(good, Binary)


# ---- Architectures ----


def test_archs_are_as_the_catalogue_says() -> None:
    names = {32: "float32", 16: "bfloat16", 8: "fp8"}
    for arch in ARCHS.values():
        entry = catalogue.lookup(arch.chip)
        assert entry.arch.removesuffix("a") == arch.name.removesuffix("a")
        assert entry.memory.bandwidth_gb_per_s == arch.bandwidth_gb_per_s
        for bits, name in names.items():
            if name in entry.peak_tflops:
                assert entry.peak_tflops[name] == arch.tera_ops[bits], (arch.name, name)
        assert bool(arch.fp8) == ("fp8" in entry.peak_tflops)


# ---- Choice of tiles ----

TILES = (
    Tile({"BLOCK_M": 16, "BLOCK_N": 64, "BLOCK_K": 64}, 4, 3),
    Tile({"BLOCK_M": 64, "BLOCK_N": 64, "BLOCK_K": 64}, 4, 2),
    Tile({"BLOCK_M": 128, "BLOCK_N": 128, "BLOCK_K": 64}, 4, 2),
)


def request(rows: int, arch: str, n: int = 4096) -> choose.Request:
    names = {"rows": rows, "N": n, "K": 4096}
    return choose.Request(MULTIPLY, product(16, 16, 16).types, {}, arch, rows, names, ALIGNED)


@pytest.fixture(scope="module")
def choices(cache: Cache, made: Mapping[str, Binary]) -> Mapping[tuple[str, int], choose.Choice]:
    asked = [request(rows, arch) for arch in ("sm_90a", "sm_80") for rows in (8, 4096)]
    chosen = choose.choose_many(asked, candidates=lambda *_: TILES, cache=cache)
    again = choose.choose_many(asked[::-1], candidates=lambda *_: TILES, cache=cache)
    assert again[::-1] == chosen
    return {(r.arch, r.names["rows"]): c for r, c in zip(asked, chosen, strict=True)}


def test_few_rows_get_a_low_tile_and_many_a_large_one(choices: Mapping[tuple[str, int], choose.Choice]) -> None:
    few, many = choices["sm_90a", 8], choices["sm_90a", 4096]
    assert few.variant.tile == TILES[0] and few.prediction.bound_by == "memory"
    assert many.variant.tile == TILES[2] and many.prediction.bound_by != "memory"
    assert few.failures == many.failures == ()
    assert "next 64x64x64" in many.reason and "128x128x64" in many.reason


def test_a_tile_that_spills_is_left_out_and_said(choices: Mapping[tuple[str, int], choose.Choice]) -> None:
    best = choices["sm_80", 4096]
    assert best.variant.tile == TILES[1]
    assert re.search(r"128x128x64, 4 warps, 2 stages: \d+ registers of each thread are kept in memory", best.reason)


def test_no_prediction_beats_the_roofline(choices: Mapping[tuple[str, int], choose.Choice]) -> None:
    for (name, rows), choice in choices.items():
        arch, p = ARCHS[name], choice.prediction
        assert p.flops == 2 * rows * 4096 * 4096
        assert p.nbytes == 2 * (rows * 4096 + 4096 * 4096 + rows * 4096)
        assert p.total_us > p.flops / (arch.tera_ops[16] * 1e6)
        assert p.total_us > p.nbytes / (arch.bandwidth_gb_per_s * 1e3)
        assert p.total_us < 20 * max(p.flops / (arch.tera_ops[16] * 1e6), p.nbytes / (arch.bandwidth_gb_per_s * 1e3))


def test_nothing_to_launch_is_an_error(cache: Cache, made: Mapping[str, Binary]) -> None:
    tile = JOBS["too much shared"].variant.tile
    with pytest.raises(BinaryError) as error:
        choose.choose(request(512, "gfx942"), candidates=lambda *_: (tile,), cache=cache)
    assert "shared-memory" in error.value.why
