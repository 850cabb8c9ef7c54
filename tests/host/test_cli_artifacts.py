"""`plait compile`, `plait run`, `plait inspect`, `plait doctor` on a tiny model that is really computed."""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import yaml

import plait as library
from plait import api, doctor, spec
from plait.artifact import read_artifact
from plait.assemble.tiny import write_tiny_llama
from plait.cli.compile import default_output
from plait.cli.inspect import checkpoint_facts
from plait.errors import UnsupportedError
from tests import checkpoints
from tests.host.command_line import config_file, plait, subprocess_plait

PROMPT = "Why is the sky blue?"


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """Two random layers with a byte tokenizer and a chat template."""
    return checkpoints.save(tmp_path_factory.mktemp("model") / "tiny", num_hidden_layers=2, tokenizer=True)


@pytest.fixture(scope="module")
def artifact(model, tmp_path_factory):
    """The model in two slices on the host's own backend."""
    folder = tmp_path_factory.mktemp("artifact") / "tiny.plait"
    result = plait("compile", model, "--targets", "2xcpu", "--layers", "1,1", "-o", folder)
    assert result.exit_code == 0, result.output
    return folder


def run(artifact: Path, *words: str) -> Any:
    return plait("run", artifact, PROMPT, "--in-process", "--threads", "1", *words)


def test_compile_says_where_each_slice_really_runs(model, tmp_path):
    result = plait("compile", model, "--targets", "h100,mi300", "--layers", "1,1", "-o", tmp_path / "a.plait")
    assert result.exit_code == 0, result.stderr
    text = result.stdout
    order = ("resolved arguments", "plan of", "predicted", "wrote ", "next: plait run")
    assert [text.index(part) for part in order] == sorted(text.index(part) for part in order)
    header = next(line for line in text.splitlines() if line.split()[:2] == ["slice", "device"])
    assert re.split(r"\s{2,}", header.strip()) == [
        "slice", "device", "layers", "weights", "KV", "prefill", "decode", "runs on", "cause",
    ]  # fmt: skip
    for device in ("h100", "mi300x"):
        assert f"{device} (emulated on host)" in text
    phases = [line.split()[0] for line in result.stderr.splitlines()]
    assert phases == ["read", "lower", "plan", "slice", "compile", "write"]
    assert (tmp_path / "a.plait" / "report.html").read_text().count("(emulated on host)") >= 2


def test_compile_json(model, tmp_path):
    folder = tmp_path / "my model.plait"
    result = plait("compile", model, "--targets", "2xcpu", "--layers", "1,1", "-o", folder, "--json")
    data = json.loads(result.stdout)
    assert set(data) == {"artifact", "bytes", "plan", "slices", "checks_failed", "quantized", "next"}
    assert [(s["device"], s["blocks"], s["runs_on"]) for s in data["slices"]] == [
        ("cpu", [0, 1], "cpu"),
        ("cpu", [1, 2], "cpu"),
    ]
    assert data["bytes"] == sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
    assert shlex.split(data["next"])[:3] == ["plait", "run", str(folder)]
    assert read_artifact(folder).plan == spec.from_dict(library.Plan, data["plan"])


def test_the_artifact_goes_to_the_current_directory_by_default(model, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert plait("compile", model, "--targets", "cpu").exit_code == 0
    assert [path.name for path in tmp_path.iterdir()] == ["tiny.plait"]


def test_default_names(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "smollm2.5").mkdir()
    names = {
        "smollm2.5": "smollm2.5.plait",
        "smollm2.5/": "smollm2.5.plait",
        ".": tmp_path.name + ".plait",
        "smollm2.5/..": tmp_path.name + ".plait",
        "x/model.safetensors": "model.plait",
        "x/model.safetensors.index.json": "model.plait",
        "SmolLM2-135M.Q4_1.gguf": "SmolLM2-135M.Q4_1.plait",
    }
    assert {text: str(default_output(Path(text))) for text in names} == names


def test_dump_ir_and_embed_weights(model, tmp_path):
    out, dump = tmp_path / "a.plait", tmp_path / "ir"
    words = ("--targets", "2xcpu", "--layers", "1,1", "--embed-weights", "--dump-ir", dump)
    result = plait("compile", model, *words, "-o", out)
    assert result.exit_code == 0 and "weights inside" in result.stdout
    assert (dump / "module.mlir").is_file() and len(list(dump.iterdir())) > 2
    moved = shutil.move(out, tmp_path / "b.plait")
    assert run(moved, "--max-tokens", "2").exit_code == 0


def test_an_edited_plan_is_compiled_as_it_stands(model, tmp_path):
    file = tmp_path / "plan.yaml"
    assert plait("plan", model, "--targets", "2xcpu", "--layers", "1,1", "-o", file).exit_code == 0
    data = yaml.safe_load(file.read_text())
    data["slices"] = [data["slices"][0] | {"blocks": [0, 2]}]
    file.write_text(yaml.safe_dump(data))
    result = plait("compile", model, "--plan", file, "-o", tmp_path / "a.plait", "--json")
    assert result.exit_code == 0, result.output
    assert [s["blocks"] for s in json.loads(result.stdout)["slices"]] == [[0, 2]]


@pytest.mark.parametrize(
    ("words", "code"),
    [
        (("--targets", "h1000"), 64),
        (("--targets", "cpu", "--layers", "7"), 2),
        (("--targets", "cpu", "--dtype", "float7"), 2),
        (("--plan", "nowhere.yaml"), 2),
    ],
)
def test_nothing_is_written_when_compile_fails(model, tmp_path, words, code):
    result = plait("compile", model, *words, "-o", tmp_path / "a.plait")
    assert result.exit_code == code, result.stderr
    assert list(tmp_path.iterdir()) == []


def test_nothing_is_left_when_a_backend_fails_halfway(model, tmp_path, monkeypatch):
    from plait.registry import load_backend

    backend, calls = load_backend("cpu"), []
    honest = type(backend).compile

    def second_fails(self, *arguments):
        calls.append(arguments)
        if len(calls) == 2:
            raise UnsupportedError("op", "this op is refused")
        return honest(self, *arguments)

    monkeypatch.setattr(type(backend), "compile", second_fails)
    result = plait("compile", model, "--targets", "2xcpu", "--layers", "1,1", "-o", tmp_path / "new" / "er" / "a.plait")
    assert (result.exit_code, len(calls)) == (2, 2)
    assert list(tmp_path.iterdir()) == []


def test_a_config_alone_cannot_be_compiled(tmp_path):
    result = plait("compile", config_file(tmp_path / "m"), "--targets", "cpu", "-o", tmp_path / "a.plait")
    assert result.exit_code == 2 and "[no-weights]" in result.stderr
    assert [path.name for path in tmp_path.iterdir()] == ["m"]


def test_run_prints_the_text_and_one_line_about_it(artifact):
    result = run(artifact, "--max-tokens", "8")
    assert result.exit_code == 0, result.stderr
    with library.open(artifact, in_process=True, threads=1) as pipe:
        assert result.stdout == pipe.generate(PROMPT, 8, chat=True) + "\n"
    last = result.stderr.splitlines()[-1]
    assert re.fullmatch(
        r"8 tokens, [\d.]+ tokens/s, first text after [\d.]+ \w+; slice 0 on cpu, slice 1 on cpu", last
    ), last


def test_raw_leaves_the_chat_template_out(artifact):
    with library.open(artifact, in_process=True, threads=1) as pipe:
        expected = pipe.generate(PROMPT, 8)
        assert expected != pipe.generate(PROMPT, 8, chat=True), "the template changes the answer"
    assert run(artifact, "--max-tokens", "8", "--raw").stdout == expected + "\n"


def test_sampling_options_reach_the_sampler(artifact):
    words = ("--max-tokens", "8", "--temperature", "1.5", "--top-p", "0.9", "--top-k", "50")
    first, again, other = (run(artifact, *words, "--seed", seed).stdout for seed in ("1", "1", "2"))
    assert first == again != other


def test_run_json(artifact):
    result = run(artifact, "--max-tokens", "4", "--json")
    data = json.loads(result.stdout)
    assert set(data) == {"text", "tokens", "tokens_per_s", "first_text_s", "slices"}
    assert data["text"] + "\n" == run(artifact, "--max-tokens", "4").stdout
    assert data["tokens"] == 4 and [s["runs_on"] for s in data["slices"]] == ["cpu", "cpu"]


@pytest.mark.parametrize(
    ("words", "code"),
    [(("--temperature", "-1"), 64), (("--top-p", "0"), 64), (("--top-k", "0"), 64), (("--max-tokens", "0"), 64)],
)
def test_wrong_sampling_is_a_usage_error(artifact, words, code):
    result = run(artifact, *words)
    assert (result.exit_code, result.stdout) == (code, "")


def test_without_a_tokenizer_no_worker_is_started(tmp_path, monkeypatch):
    write_tiny_llama(tmp_path / "m")
    assert plait("compile", tmp_path / "m", "--targets", "null:h100", "-o", tmp_path / "a.plait").exit_code == 0
    monkeypatch.setattr(api, "open", lambda *_, **__: pytest.fail("a worker was started"))
    result = plait("run", tmp_path / "a.plait", "x")
    assert result.exit_code == 2 and "[tokenizer-missing]" in result.stderr


def test_weights_that_have_moved(model, tmp_path):
    first = shutil.copytree(model, tmp_path / "first")
    assert plait("compile", first, "--targets", "cpu", "-o", tmp_path / "a.plait").exit_code == 0
    first.rename(tmp_path / "second")
    missing = run(tmp_path / "a.plait", "--max-tokens", "2")
    assert missing.exit_code == 2 and "[weights-missing]" in missing.stderr and "--weights" in missing.stderr
    assert run(tmp_path / "a.plait", "--max-tokens", "2", "--weights", str(tmp_path / "second")).exit_code == 0


def test_a_changed_artifact_is_refused(artifact, tmp_path):
    copy = shutil.copytree(artifact, tmp_path / "a.plait")
    (copy / "plan.yaml").write_text((copy / "plan.yaml").read_text() + "\n")
    for result in (run(copy), plait("inspect", copy)):
        assert result.exit_code == 2 and "plan.yaml has changed" in result.stderr


def test_workers_of_two_backends_in_processes_of_their_own(model, tmp_path):
    out = tmp_path / "a.plait"
    assert plait("compile", model, "--targets", "h100,mi300", "--layers", "1,1", "-o", out).exit_code == 0
    done = subprocess_plait("run", out, PROMPT, "--max-tokens", "4", "--threads", "1")
    assert done.returncode == 0, done.stderr
    with library.open(out, in_process=True, threads=1) as pipe:
        assert done.stdout == pipe.generate(PROMPT, 4, chat=True) + "\n"
    assert done.stderr.endswith("slice 0 on h100 (emulated on host), slice 1 on mi300x (emulated on host)\n")


def test_ctrl_c_closes_the_workers(artifact):
    code = (
        "import signal, sys, time\n"
        "from plait import text\n"
        "from plait.cli.main import run\n"
        # Ended by the system where the test was ended before it could: every piece takes memory.
        "signal.alarm(300)\n"
        "def forever(self, request):\n"
        "    print('streaming', file=sys.stderr, flush=True)\n"
        "    while True:\n"
        "        yield ''\n"
        "        time.sleep(0.01)\n"
        "text.Pipeline._pieces = forever\n"
        "run()"
    )
    command = [sys.executable, "-c", code, "run", str(artifact), PROMPT, "--threads", "1"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert process.stderr is not None
    while "streaming" not in (line := process.stderr.readline()):
        assert line, "ended before it streamed"
    workers = _children(process.pid)
    assert len(workers) == 2
    process.send_signal(signal.SIGINT)
    _, rest = process.communicate(timeout=60)
    assert (process.returncode, rest) == (130, "")
    deadline = time.monotonic() + 10
    while any(Path(f"/proc/{worker}").exists() for worker in workers) and time.monotonic() < deadline:
        time.sleep(0.01)
    assert not any(Path(f"/proc/{worker}").exists() for worker in workers)


def _children(pid: int) -> list[int]:
    tasks = Path(f"/proc/{pid}/task").iterdir()
    return [int(child) for task in tasks for child in (task / "children").read_text().split()]


def test_inspect_a_checkpoint(model):
    result = plait("inspect", model)
    assert result.exit_code == 0, result.stderr
    facts = checkpoint_facts(model, None)
    for text in ("family", "llama", f"{facts['parameters']:,}", "stored as", "float32", "max positions"):
        assert text in result.stdout
    assert json.loads(plait("inspect", model, "--json").stdout) == {"checkpoint": facts}


def test_inspected_numbers_against_transformers(model):
    import transformers

    reference = transformers.AutoModelForCausalLM.from_pretrained(model)
    config = reference.config
    facts = checkpoint_facts(model, None)
    assert facts["parameters"] == sum(p.numel() for p in reference.parameters())
    assert facts["weight_bytes"] == 4 * facts["parameters"]
    assert facts["tensors"]["float32"]["tensors"] == len(reference.state_dict())
    # K and V of every layer, four bytes a number.
    heads, size = config.num_key_value_heads, config.head_dim
    assert facts["kv_bytes_per_token"] == 2 * config.num_hidden_layers * heads * size * 4
    assert facts["max_positions"] == config.max_position_embeddings
    assert facts["unused"] == {} and facts["tokenizer"] and facts["chat_template"]


def test_inspect_a_config_alone(tmp_path):
    result = plait("inspect", config_file(tmp_path))
    assert result.exit_code == 0 and "no weights, a config only" in result.stdout


def test_inspect_an_artifact(artifact):
    result = plait("inspect", artifact)
    assert result.exit_code == 0, result.stderr
    assert "every digest right" in result.stdout and "slices/1-cpu" in result.stdout
    data = json.loads(plait("inspect", artifact, "--json").stdout)["artifact"]
    manifest = read_artifact(artifact).manifest
    assert set(data["files"]) == set(manifest.files)
    assert [s["runs_on"] for s in data["slices"]] == ["cpu", "cpu"]
    assert [s["blocks"] for s in data["slices"]] == [[0, 1], [1, 2]]
    assert all(s["memory"]["weights_bytes"] > 0 for s in data["slices"])


def test_inspect_says_that_the_weights_are_gone(model, tmp_path):
    copy = shutil.copytree(model, tmp_path / "m")
    assert plait("compile", copy, "--targets", "cpu", "-o", tmp_path / "a.plait").exit_code == 0
    shutil.rmtree(copy)
    result = plait("inspect", tmp_path / "a.plait")
    assert result.exit_code == 0 and "are not there" in result.stdout


def test_inspect_nothing(tmp_path):
    assert plait("inspect", tmp_path / "nothing").exit_code == 2


def test_doctor_passes_here_and_computes():
    result = plait("doctor", "--json")
    data = json.loads(result.stdout)
    assert result.exit_code == 0 and data["ok"], data
    checks = {check["name"]: check for check in data["checks"]}
    assert checks["self-test"]["status"] == "PASS"
    assert "with the same scores as one" in checks["self-test"]["reason"]
    assert {f"backend {name}" for name in ("cpu", "cuda", "null", "rocm", "xla")} <= set(checks)
    lines = [line for line in result.stderr.splitlines() if line[:4] in ("PASS", "WARN", "FAIL")]
    assert len(lines) == len(checks)


def test_a_failing_check_is_a_line_with_its_reason_and_exit_code_2(monkeypatch):
    def broken():
        raise OSError("no memory files here")
        yield

    def wrong():
        yield doctor.Check("numbers", "FAIL", "two is three")

    monkeypatch.setattr(doctor, "_CHECKS", (("memfd", broken), ("numbers", wrong)))
    result = plait("doctor")
    assert result.exit_code == 2
    assert result.stdout == "FAIL  memfd: OSError: no memory files here\nFAIL  numbers: two is three\n"


def test_doctor_sees_a_split_that_changes_the_scores(monkeypatch):
    honest, calls = doctor._answer, []

    def bent(*arguments):
        (scores, tokens), where = honest(*arguments)
        calls.append(where)
        return (scores[:-1] + bytes([scores[-1] ^ len(calls)]), tokens), where

    monkeypatch.setattr(doctor, "_answer", bent)
    (check,) = doctor._self_test()
    assert check.status == "FAIL" and "wrong numbers" in check.reason


def test_a_missing_backend_wheel_is_a_warning_with_the_line_that_installs_it(monkeypatch):
    import importlib.util

    found = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *rest: None if name == "jax" else found(name, *rest))
    (check,) = (check for check in doctor._backends() if check.name == "backend xla")
    assert check.status == "WARN" and "pip install 'plait[run]'" in check.reason


def test_pull_writes_where_it_is_told_and_says_what_comes_next(tmp_path, monkeypatch):
    from plait import pull as module

    def pull(name, out, progress):
        progress("download", 0, 0)
        (out / "sub").mkdir(parents=True)
        (out / "config.json").write_text("{}")
        return out

    monkeypatch.setattr(module, "pull", pull)
    monkeypatch.chdir(tmp_path)
    result = plait("pull", "smollm2")
    assert result.exit_code == 0, result.output
    assert result.stdout.endswith("\nnext: plait compile smollm2 --targets h100,mi300\n")
    assert "download" in result.stderr
    data = json.loads(plait("pull", "smollm2", "-o", "my models/x", "--json").stdout)
    assert data["files"] == {"config.json": 2}
    assert shlex.split(data["next"]) == ["plait", "compile", "my models/x", "--targets", "h100,mi300"]


def test_pull_knows_its_models(tmp_path):
    result = plait("pull", "smollm", "-o", tmp_path / "m")
    assert result.exit_code == 64 and "did you mean 'smollm2'" in result.stderr
    assert list(tmp_path.iterdir()) == []


def test_a_checkpoint_without_a_tokenizer_is_not_proposed_for_text(tmp_path):
    bare = checkpoints.save(tmp_path / "bare")
    result = plait("compile", bare, "--targets", "cpu", "-o", tmp_path / "a.plait")
    assert result.exit_code == 0 and "no tokenizer.json" in result.stderr
    assert f"next: plait inspect {tmp_path / 'a.plait'}" in result.stdout
    assert plait("run", tmp_path / "a.plait", "hello").exit_code == 2


def test_a_locale_without_utf8_changes_no_file(model, tmp_path):
    """tokenizer.json and report.html hold more than ASCII; an old locale must neither refuse nor recode them."""
    ascii_only = os.environ | {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
    folders = [tmp_path / name / "a.plait" for name in ("plain", "ascii")]
    for folder, env in zip(folders, (os.environ, ascii_only), strict=True):
        plan = folder.parent / "plan.yaml"
        folder.parent.mkdir()
        for words in (
            ("plan", model, "--targets", "h100", "-o", plan),
            ("compile", model, "--plan", plan, "-o", folder),
            ("inspect", folder),
        ):
            done = subprocess_plait(*words, env=env)
            assert done.returncode == 0, done.stderr
    assert any(byte > 127 for byte in (folders[0] / "tokenizer.json").read_bytes())
    first, second = ({p.name: p.read_bytes() for p in folder.rglob("*") if p.is_file()} for folder in folders)
    assert first == second


def test_where_nothing_is_computed_the_artifact_says_so(model, tmp_path):
    result = plait("compile", model, "--targets", "null:h100", "-o", tmp_path / "a.plait", env={"COLUMNS": "200"})
    assert "h100 (null: computes nothing)" in result.stdout and "emulated" not in result.stdout
    said = plait("run", tmp_path / "a.plait", PROMPT, "--in-process").stderr
    assert all("slice 0 computes nothing" in text for text in (result.stderr, said))
    assert read_artifact(tmp_path / "a.plait").manifest.slices[0].runs_on in said
