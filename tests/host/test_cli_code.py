"""`plait inspect` of machine code, `--asm`, `plait tune`, and what the report and the doctor say of it.

One tiny model is compiled for a GPU, with few tiles to choose from, and once more for the host.
"""

from __future__ import annotations

import gzip
import json
import re
import shlex
import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from plait import artifact as artifacts
from plait import doctor
from plait.artifact import read_artifact, seal
from plait.backends.base import LoadOptions
from plait.backends.kernels.gpu import attend, backend, gemm, here, loader, streams
from plait.backends.kernels.gpu.backend import read_plan
from plait.backends.kernels.gpu.cupy_device import CupyDevice
from plait.backends.kernels.gpu.executor import LaunchSlice
from plait.backends.kernels.gpu.facts import Expectations, expectations, resources
from plait.backends.kernels.gpu.here import Devices
from plait.backends.kernels.gpu.steps import batch
from plait.cli.inspect import artifact_facts
from plait.cli.tune import next_command
from plait.report.code import code_of, label, matrix_text
from plait.spec import Manifest, from_dict
from tests import checkpoints
from tests.host.command_line import plait
from tests.host.cupy_double import Double

CODE, CACHE = "PLAIT_DEVICE_CODE", "PLAIT_CACHE"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("code")


@pytest.fixture(scope="module", autouse=True)
def few_tiles(folder: Path) -> Iterator[None]:
    """Two candidates of the products for few rows, one of everything else; a cache that the module shares."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(CACHE, str(folder / "cache"))
        for area in (attend, gemm, streams):

            def fewer(*words: Any, every: Any = area.candidates) -> Any:
                return every(*words)[: 2 if words[4] == 16 else 1]

            patch.setattr(area, "candidates", fewer)
        yield


@pytest.fixture(scope="module")
def model(folder: Path) -> Path:
    return checkpoints.save(folder / "tiny", num_hidden_layers=2, dtype="bfloat16")


@pytest.fixture(scope="module")
def artifact(folder: Path, model: Path) -> Path:
    """One layer for an H100, one for the host."""
    made = folder / "tiny.plait"
    words = ("--targets", "h100,cpu", "--layers", "1,1", "--context", "256", "-o", made)
    result = plait("compile", model, *words, env={CODE: "1"})
    assert result.exit_code == 0, result.stderr
    return made


@pytest.fixture
def copy(artifact: Path, tmp_path: Path) -> Iterator[Path]:
    """One to change, beside the other: its way to the weights is the same."""
    made = shutil.copytree(artifact, artifact.parent / f"{tmp_path.name}.plait")
    yield made
    shutil.rmtree(made)


def resealed(folder: Path) -> Path:
    """With the digests of the files as they are now."""
    manifest = from_dict(Manifest, json.loads((folder / artifacts.MANIFEST).read_bytes()), "manifest")
    (folder / artifacts.MANIFEST).unlink()
    seal(folder, manifest)
    return folder


def report_of(folder: Path, slice_folder: str = "0-h100") -> Any:
    return json.loads((folder / "slices" / slice_folder / "report.json").read_bytes())


# The table


def test_inspect_shows_every_kernel_with_what_it_uses(artifact: Path) -> None:
    result = plait("inspect", artifact)
    assert result.exit_code == 0, result.stderr
    text = result.stdout
    title = text.index("machine code of slices/0-h100, cuda:sm_90a")
    assert title < text.index("no machine code in slices/1-cpu, cpu:cpu: torch, op by op")
    header = next(line for line in text.splitlines() if line.split()[:2] == ["kernel", "rows"])
    assert re.split(r"\s{2,}", header.strip().replace("regs spills", "regs  spills")) == [
        "kernel", "rows", "launches", "regs", "spills", "shared", "occupancy", "matrix", "flops", "bytes", "time",
        "bound by",
    ]  # fmt: skip
    assert max(map(len, text.splitlines())) <= 120
    kernels = report_of(artifact)["kernels"]
    lines = text[title:].splitlines()
    for row in kernels:
        name, rows = label(row), row["rows"].replace("up to ", "<= ")
        (line,) = [one for one in lines if re.match(rf" {re.escape(name)} +{re.escape(rows)} ", one)]
        words = line.removeprefix(f" {name}").split()
        assert str(row["registers"]) in words and words[-1] == row["bound_by"]
        assert matrix_text(row["matrix_instruction"]) in words
    assert {"mma.sync", "-"} <= {matrix_text(row["matrix_instruction"]) for row in kernels}
    assert "every binary passed" in text and "made with triton" in text


def test_at_80_columns_nothing_is_cut(artifact: Path) -> None:
    """The table goes on below, with the names of the kernels again; every cell of the wide one is there, unbroken."""
    narrow = plait("inspect", artifact, "--slice", "0", env={"COLUMNS": "80"}).stdout
    lines = narrow[narrow.index("machine code of") :].splitlines()
    assert max(map(len, lines)) <= 80
    code = code_of(report_of(artifact), {})
    heads = [at for at, line in enumerate(lines) if line.split()[:2] == ["kernel", "rows"]]
    assert len(heads) > 1
    said = [word for at in heads for word in re.split(r"\s{2,}", lines[at].strip())]
    assert {name for word in said for name in word.split()} >= {n for name in code.columns for n in name.split()}
    for number, row in enumerate(code.rows):
        parts = [lines[at + 2 + number].split() for at in heads]
        assert all(words[: len(row[0].split())] == row[0].split() for words in parts)
        assert [word for cell in row[2:] for word in cell.split()] == [
            word for words in parts for word in words[len(f"{row[0]} {row[1]}".split()) :]
        ]


def test_json_carries_everything(artifact: Path) -> None:
    data = json.loads(plait("inspect", artifact, "--json").stdout)["artifact"]
    code, host = (item["code"] for item in data["slices"])
    here = artifact / "slices" / "0-h100"
    assert code["report"] == report_of(artifact)
    assert code["files"] == {path.name: path.stat().st_size for path in here.glob("*.cubin")}
    assert code["bytes"] == sum(code["files"].values()) > 0
    assert host["files"] == {} and host["report"]["lowering"] == "torch, op by op"
    for row in code["report"]["kernels"]:
        found = resources((here / row["file"]).read_bytes())
        assert (row["registers"], row["spills"], found.vendor) == (found.registers, found.spills, "nvidia")
        assert row["code_bytes"] == code["files"][row["file"]]


def test_one_slice_and_why(artifact: Path) -> None:
    plain, why = plait("inspect", artifact, "--slice", "0"), plait("inspect", artifact, "--slice", "0", "--why")
    assert "no machine code in" not in plain.stdout
    assert why.stdout.startswith(plain.stdout.rstrip("\n")[:200]) and "why these tiles" not in plain.stdout
    for row in report_of(artifact)["kernels"]:
        assert " ".join(row["why"].split())[:60] in " ".join(why.stdout.split())
    assert len(json.loads(plait("inspect", artifact, "--slice", "1", "--json").stdout)["artifact"]["slices"]) == 1
    wrong = plait("inspect", artifact, "--slice", "2")
    assert wrong.exit_code == 64 and "it has 2, numbered from 0" in wrong.stderr


def test_a_checkpoint_has_no_code(model: Path) -> None:
    for words in (("--why",), ("--asm", "gemm"), ("--slice", "0")):
        result = plait("inspect", model, *words)
        assert result.exit_code == 64 and "no artifact" in result.stderr


def test_without_device_code_it_says_so(model: Path, tmp_path: Path) -> None:
    made = tmp_path / "a.plait"
    assert plait("compile", model, "-t", "h100", "--no-device-code", "-o", made).exit_code == 0
    text = " ".join(plait("inspect", made).stdout.split())
    assert "no machine code in slices/0-h100, cuda:sm_90a: no machine code: it runs emulated" in text
    asked = plait("inspect", made, "--asm", "gemm")
    assert asked.exit_code == 2 and "there is no machine code in slice 0" in asked.stderr
    tuned = plait("tune", made)
    assert tuned.exit_code == 2 and "no GPU code to tune" in tuned.stderr


def test_a_check_that_failed_is_shown(artifact: Path) -> None:
    report = report_of(artifact)
    report["kernels"][0]["checks"]["failed"] = {"spills": "4 registers of each thread are kept in memory"}
    code = code_of(report, {})
    name = f"{label(report['kernels'][0])}, any rows"
    assert code.failed == ((name, "spills: 4 registers of each thread are kept in memory"),)
    assert dict(code.totals)["checks"] == "1 failed"


def test_compile_says_so_where_a_check_failed(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def impossible(*asked: Any) -> Expectations:
        return replace(expectations(*asked), load_bytes=64)

    monkeypatch.setattr("plait.backends.kernels.gpu.choose.expectations", impossible)
    result = plait("compile", model, "-t", "h100", "--json", "-o", tmp_path / "a.plait", env={CODE: "1"})
    assert result.exit_code == 0, result.stderr
    assert "slices/0-h100: a check of its machine code failed: " in result.stderr
    found = json.loads(result.stdout)["checks_failed"]["slices/0-h100"]
    assert all(why.startswith("narrow-loads: ") for _, why in found)


@pytest.mark.parametrize(
    ("instruction", "text"),
    [
        (None, "-"),
        ("wgmma.mma_async.sync.aligned.m64n128k16.f32.bf16.bf16", "wgmma"),
        ("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32", "mma.sync"),
        ("tcgen05.mma.cta_group::1.kind::f16", "tcgen05"),
        ("v_mfma_f32_32x32x8_bf16", "mfma"),
        ("v_wmma_f32_16x16x16_bf16", "wmma"),
    ],
)
def test_matrix_instructions_by_their_family(instruction: str | None, text: str) -> None:
    assert matrix_text(instruction) == text


# What whole steps would take


@pytest.mark.parametrize("number", [0, 1])
def test_a_predicted_step_has_the_launches_that_are_made(number: int, artifact: Path) -> None:
    """On the stand-in for cupy, which counts what reaches the driver."""
    step = report_of(artifact)["steps"][number]
    data, double = read_artifact(artifact), Double(("sm_90",))
    manifest, folder = data.manifest, artifact / "slices" / "0-h100"
    plan = read_plan(folder)
    assert plan is not None
    load = LoadOptions({"full": 8}, manifest.page_tokens, manifest.max_step_tokens, manifest.max_sequences, 1,
                       data.weight_root)  # fmt: skip
    running = LaunchSlice(folder, plan, CupyDevice(double), "gpu", load)
    counts = [step["sequences"], step["tokens"] // step["sequences"], step["keys"]]
    made = batch([counts[1]] * counts[0], [counts[2]] * counts[0])
    calls = [running.single(paged(made, manifest.page_tokens), index) for index in range(len(plan.steps))]
    assert sum(call is not None for call in calls) == step["launches"]
    running.close()


def paged(made: Any, page_tokens: int) -> Any:
    pages = -(-int(made.kv_lens.max()) // page_tokens)
    return replace(made, page_tables={"full": np.zeros((made.sequence_count, pages), np.int32)})


def test_a_predicted_step_is_within_the_chip(artifact: Path) -> None:
    decode, prefill = report_of(artifact)["steps"]
    assert (decode["phase"], decode["tokens"], decode["sequences"], decode["keys"]) == ("decode", 8, 8, 256)
    assert (prefill["phase"], prefill["tokens"], prefill["sequences"]) == ("prefill", 256, 1)
    for step in (decode, prefill):
        assert step["predicted_us"] > step["bytes"] / 3350e3
        assert step["predicted_us"] > step["flops"] / 989e6
        assert step["predicted_us"] > 2 * step["launches"]  # each is launched
        assert step["predicted_us"] < 200 * step["launches"]
    assert prefill["flops"] > 10 * decode["flops"]


# Assembly


def test_asm_prints_ptx_and_holds_it_against_the_binary(artifact: Path) -> None:
    result = plait("inspect", artifact, "--asm", "rope_write")
    assert result.exit_code == 0, result.stderr
    assert ".target sm_90a" in result.stdout and ".entry rope_write" in result.stdout
    assert result.stderr.startswith("rope_write any: the code of 0-h100/rope_write-")
    assert result.stderr.endswith(".cubin, byte for byte\n")
    data = json.loads(plait("inspect", artifact, "--asm", "rope_write", "--json").stdout)["asm"]
    assert data["text"] == result.stdout and data["identical"] is True and data["slice"] == 0
    by_file = plait("inspect", artifact, "--asm", data["file"])
    assert by_file.stdout == result.stdout


def test_asm_says_what_there_is_where_a_name_is_not_enough(artifact: Path) -> None:
    wide = plait("inspect", artifact, "--asm", "gemm")
    assert wide.exit_code == 64 and "more than one kernel is called 'gemm'" in wide.stderr
    names = re.search(r"why: (.*)", wide.stderr)
    assert names is not None
    first = names[1].split(", ")[0]
    assert f"try: say more of it: --asm '{first}'" in wide.stderr
    exact = plait("inspect", artifact, "--asm", first)
    assert exact.exit_code == 0 and ".entry gemm(" in exact.stdout
    assert plait("inspect", artifact, "--asm", first.replace(" ", ":")).stdout == exact.stdout
    unknown = plait("inspect", artifact, "--asm", "rms_nrom")
    assert unknown.exit_code == 64 and "did you mean 'rms_norm'" in unknown.stderr
    rows = plait("inspect", artifact, "--asm", "gemm 17")
    assert rows.exit_code == 64 and first in rows.stderr
    assert plait("inspect", artifact, "--slice", "1", "--asm", "gemm").exit_code == 2


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({}, "what compiles it has changed since"),
        ({"source": "another"}, "the source of rope_write has changed since"),
        ({"triton": "0.0.1"}, "it was made with Triton 0.0.1, this is"),
    ],
)
def test_asm_of_a_binary_that_is_other_code(copy: Path, changed: dict[str, str], said: str) -> None:
    folder = copy / "slices" / "0-h100"
    report = report_of(copy)
    (row,) = (row for row in report["kernels"] if row["kernel"] == "rope_write")
    row["source"] = changed.get("source", row["source"])
    report["versions"]["triton"] = changed.get("triton", report["versions"]["triton"])
    (folder / "report.json").write_text(json.dumps(report))
    binary = folder / row["file"]
    binary.write_bytes(binary.read_bytes() + b"\0")
    result = plait("inspect", resealed(copy), "--asm", "rope_write")
    assert result.exit_code == 0 and ".entry rope_write" in result.stdout
    assert "is not this one, byte for byte: " + said in result.stderr


def test_asm_without_triton_is_a_clear_error(artifact: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import importlib.metadata

    version = importlib.metadata.version

    def missing(name: str) -> str:
        if name == "triton":
            raise importlib.metadata.PackageNotFoundError
        return version(name)

    monkeypatch.setattr(importlib.metadata, "version", missing)
    loader.require_triton.cache_clear()
    try:
        result = plait("inspect", artifact, "--asm", "rope_write")
    finally:
        loader.require_triton.cache_clear()
    assert result.exit_code == 2 and "pip install 'plait[gpu]'" in result.stderr


# TPU programs, as plait.backends.xla.build reports them

PROGRAM = {
    "argument_bytes": 1000, "output_bytes": 300, "aliased_bytes": 200, "temporary_bytes": 30, "code_bytes": 4,
    "flops": 2.5e9, "moved_bytes": 7e6, "collectives": {"all-reduce": 64}, "estimated_cycles": 2_000_000,
    "estimated_ms": 1.25, "bound_by": "compute",
}  # fmt: skip


@pytest.fixture
def tpu(copy: Path) -> Path:
    """The host's slice, with what a TPU's would have."""
    folder = copy / "slices" / "1-cpu"
    report = {
        "arch": "tpu-v5e", "group_size": 4, "lowering": "JAX", "versions": {"libtpu": "1.2"},
        "programs": {"decode-8-1024": PROGRAM, "prefill-512-1024": PROGRAM | {"estimated_ms": 30.0, "collectives": {}}},
    }  # fmt: skip
    (folder / "report.json").write_text(json.dumps(report))
    for name in report["programs"]:  # type: ignore[attr-defined]
        (folder / f"{name}.tpu").write_bytes(b"program")
        (folder / f"{name}.hlo.gz").write_bytes(gzip.compress(f"HloModule {name}\n".encode()))
    return resealed(copy)


def test_inspect_shows_every_program(tpu: Path) -> None:
    text = plait("inspect", tpu, "--slice", "1").stdout
    lines = [line.split() for line in text.splitlines()]
    assert "tpu-v5e, split over 4 devices" in text and "14 B in 2 programs, made with libtpu 1.2" in text
    row = next(words for words in lines if words[:1] == ["decode-8-1024"])
    assert row == ["decode-8-1024", "2", "M", "1.25", "ms", "compute", "1.13", "kB", "30", "B", "4", "B", "2.5", "G",
                   "7", "MB", "64", "all-reduce"]  # fmt: skip
    assert "1.25 ms predicted for decode-8-1024, bound by compute" in text
    assert "30 ms predicted for prefill-512-1024" in text
    data = json.loads(plait("inspect", tpu, "--json").stdout)["artifact"]["slices"][1]["code"]
    assert data["files"] == {"decode-8-1024.tpu": 7, "prefill-512-1024.tpu": 7}


def test_asm_of_a_program_is_its_hlo(tpu: Path) -> None:
    result = plait("inspect", tpu, "--asm", "decode-8-1024")
    assert (result.exit_code, result.stdout) == (0, "HloModule decode-8-1024\n")
    wrong = plait("inspect", tpu, "--asm", "decode-8-1025")
    assert wrong.exit_code == 64 and "did you mean 'decode-8-1024'" in wrong.stderr


# The report


def test_the_report_has_the_kernels(artifact: Path) -> None:
    html = (artifact / "report.html").read_text()
    section = html[html.index("<h2>Machine code</h2>") : html.index("<h2>Memory</h2>")]
    for row in report_of(artifact)["kernels"]:
        assert f">{label(row)}</td>" in section
        assert row["why"].replace("<", "&lt;")[:40] in section
    assert "None: torch, op by op" in section
    assert section.count("<table>") == section.count("</table>") == 1


# Tuning


def test_tune_without_the_device_is_a_clear_error(artifact: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(here, "devices", lambda vendor: None)
    result = plait("tune", artifact)
    assert result.exit_code == 2
    assert "nothing can be measured here: h100 is not here  [no-device]" in result.stderr
    assert "why: h100: this machine has no NVIDIA GPU" in result.stderr and "try: run the same command" in result.stderr
    assert json.loads(plait("tune", artifact, "--json").stdout)["error"]["code"] == "no-device"
    monkeypatch.setattr(here, "devices", lambda vendor: Devices(Double(("sm_80",)), ("sm_80",)))
    other = plait("tune", artifact)
    assert other.exit_code == 2 and "here are sm_80" in other.stderr
    monkeypatch.setenv("PLAIT_EMULATE", "h100")
    assert "h100 is not here" in plait("tune", artifact).stderr
    assert plait("tune", artifact, "--slice", "2").exit_code == 64
    assert plait("tune", artifact, "--slice", "1").exit_code == 2


def test_tune_measures_and_the_compile_it_names_takes_what_was_fastest(
    artifact: Path, copy: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    double = Double(("sm_90",))
    wrong = {row["file"] for row in report_of(artifact)["kernels"]}
    # Everything that the model chose is slow here.
    double._execute = lambda launch: setattr(
        double, "milliseconds", double.milliseconds + (5.0 if launch.file in wrong else 1.0)
    )
    monkeypatch.setattr(here, "devices", lambda vendor: Devices(double, ("sm_90",)))
    monkeypatch.setattr(backend, "devices", lambda vendor: None)  # compiled without
    before = {path: path.read_bytes() for path in copy.rglob("*") if path.is_file()}
    result = plait("tune", copy)
    assert result.exit_code == 0, result.stderr
    assert {path: path.read_bytes() for path in copy.rglob("*") if path.is_file()} == before
    assert "slices/0-h100 on NVIDIA" in result.stdout and "400%" in result.stdout
    command = result.stdout.splitlines()[-1].removeprefix("next: plait ")
    compiled = plait(*shlex.split(command), env={CODE: "1"})
    assert compiled.exit_code == 0, compiled.stderr
    rows = {(label(row), row["rows"]): row for row in report_of(copy)["kernels"]}
    for row in report_of(artifact)["kernels"]:
        now = rows[label(row), row["rows"]]
        two = row["rows"] == "up to 16"
        tile = ("tile", "num_warps", "num_stages")
        assert ([now[name] for name in tile] != [row[name] for name in tile]) == two, label(row)
        if not label(row).startswith("attention_combine"):
            assert now["measured"] == {"us": 1000.0 if two else 5000.0, "on": "NVIDIA"}
    text = plait("inspect", copy, "--why").stdout
    assert "1 ms measured" in text and "1000.0 us measured on NVIDIA" in " ".join(text.split())


def test_the_next_command_names_the_checkpoint(artifact: Path, model: Path) -> None:
    plan = artifact / "plan.yaml"
    words = shlex.split(next_command(read_artifact(artifact), artifact))
    assert words == ["plait", "compile", str(model.resolve()), "--plan", str(plan), "-o", str(artifact)]


# The doctor


def test_the_doctor_says_what_the_tools_are_for_and_where_the_cache_is(
    artifact: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tools = {check.name: check for check in doctor._tools()}
    assert set(tools) == {"triton", "libtpu", "cupy", "torch-mlir"}
    assert tools["triton"].status == "PASS" and "machine code for GPUs" in tools["triton"].reason
    monkeypatch.setattr(doctor, "_version", lambda wheel: None)
    missing = {check.name: check for check in doctor._tools()}
    assert all(check.status == "WARN" and "pip install 'plait[" in check.reason for check in missing.values())
    assert "cuda13, rocm7" in missing["cupy"].reason
    (cache,) = doctor._cache()
    files = [path for path in (artifact.parent / "cache" / "kernels").rglob("*") if path.is_file()]
    assert cache.reason.startswith(str(artifact.parent / "cache") + ": kernels ")
    assert f" in {len(files)}, xla" in cache.reason and len(files) > 10


def test_artifact_facts_read_an_artifact_of_before(copy: Path) -> None:
    """Reports without what is new in them are shown all the same."""
    report = report_of(copy)
    for name in ("steps", "versions"):
        del report[name]
    for row in report["kernels"]:
        del row["measured"]
    (copy / "slices" / "0-h100" / "report.json").write_text(json.dumps(report))
    facts, _ = artifact_facts(resealed(copy))
    assert facts["slices"][0]["code"]["report"] == report
    assert plait("inspect", copy).exit_code == 0
