"""Each class of error: its exit code, its words on stderr, its JSON on stdout, and nothing else there."""

from __future__ import annotations

import errno
import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import typer

from plait import api, errors
from plait.cli import root
from tests.host.command_line import config_file, plait, subprocess_plait

#: Every class a user can meet, as it is raised, and the exit code that scripts rely on.
CASES = [
    (errors.PlaitError("c", "what", why="why", hint="hint"), 1),
    (errors.WorkerError("c", "what", why="why", hint="hint"), 1),
    (errors.UserError("c", "what", why="why", hint="hint"), 2),
    (errors.CheckpointError("c", "what", why="why", hint="hint"), 2),
    (errors.UnsupportedError("c", "what", why="why", hint="hint"), 2),
    (errors.PlanError("c", "what", why="why", hint="hint"), 2),
    (errors.VerifyError("c", "what", why="why", hint="hint"), 2),
    (errors.ArtifactError("c", "what", why="why", hint="hint"), 2),
    (errors.MissingDependencyError("c", "what", why="why", hint="hint"), 2),
    (errors.UsageError("c", "what", why="why", hint="hint"), 64),
]

PLAN = ("plan", "m", "--targets", "h100")


@pytest.fixture
def raising(monkeypatch):
    """Makes `plait plan` raise."""

    def arrange(error):
        def request(*_, **__):
            raise error

        monkeypatch.setattr(api, "request", request)

    return arrange


def test_every_error_class_has_a_case():
    classes = {kind for kind in vars(errors).values() if isinstance(kind, type) and issubclass(kind, errors.PlaitError)}
    assert classes == {type(error) for error, _ in CASES} | {errors.FitError}


@pytest.mark.parametrize(("error", "code"), CASES, ids=[type(error).__name__ for error, _ in CASES])
def test_exit_code_and_words(raising, error, code):
    raising(error)
    result = plait(*PLAN)
    assert result.exit_code == code
    assert result.stdout == ""
    assert result.stderr == "error: what  [c]\n  why: why\n  try: hint\n"


@pytest.mark.parametrize(("error", "code"), CASES, ids=[type(error).__name__ for error, _ in CASES])
def test_json(raising, error, code):
    raising(error)
    result = plait(*PLAN, "--json")
    assert result.exit_code == code
    assert json.loads(result.stdout) == {
        "error": {"code": "c", "what": "what", "why": "why", "try": "hint", "exit_code": code}
    }
    assert result.stderr == ""


def test_an_error_without_reason_or_hint_is_one_line(raising):
    raising(errors.UserError("c", "what"))
    assert plait(*PLAN).stderr == "error: what  [c]\n"


def test_words_of_an_error_are_no_markup(raising):
    raising(errors.UserError("c", "block[0] is [red]odd[/red]"))
    assert plait(*PLAN).stderr == "error: block[0] is [red]odd[/red]  [c]\n"


def test_a_long_line_is_not_broken(raising):
    raising(errors.UserError("c", "word " * 100))
    assert len(plait(*PLAN, env={"COLUMNS": "40"}).stderr.splitlines()) == 1


@pytest.mark.parametrize("words", [(), ("--json",)])
def test_an_unexpected_exception_is_our_fault(raising, words):
    raising(ZeroDivisionError("by nothing"))
    result = plait(*PLAN, *words)
    assert result.exit_code == 1
    text = result.stdout if words else result.stderr
    assert "this is a fault in plait: ZeroDivisionError: by nothing" in text
    assert "-v" in text and "Traceback" not in result.output
    if words:
        assert json.loads(result.stdout)["error"]["code"] == "fault"


@pytest.mark.parametrize("words", [(), ("--json",)])
def test_what_the_system_refuses_is_no_fault(raising, words):
    raising(OSError(errno.ENOSPC, "No space left on device", "somewhere"))
    result = plait(*PLAN, *words)
    assert result.exit_code == 2 and "fault" not in result.output
    assert "No space left on device" in (result.stdout if words else result.stderr)


@pytest.mark.parametrize("words", [("devices",), ("devices", "--json"), ("--version",), ("devices", "h10", "--json")])
def test_a_full_disk_behind_stdout(words):
    with Path("/dev/full").open("w") as full:
        done = subprocess_plait(*words, stdout=full, capture_output=False, stderr=subprocess.PIPE)
    assert done.returncode == (64 if "h10" in words else 2)
    assert "Traceback" not in done.stderr and "Exception ignored" not in done.stderr


@pytest.mark.parametrize("closed", ["<&-", ">&-", "2>&-", "<&- >&- 2>&-"])
def test_closed_standard_streams(closed):
    code = "from plait.cli.main import run; run()"
    done = subprocess.run(["sh", "-c", f'exec "$0" -c "{code}" devices h100 {closed}', sys.executable], timeout=60)
    assert done.returncode == 0


def test_verbose_shows_the_traceback(raising):
    raising(ZeroDivisionError("by nothing"))
    result = plait(*PLAN, "-v", "--json")
    assert "Traceback (most recent call last)" in result.stderr and "in request" in result.stderr
    assert json.loads(result.stdout)["error"]["exit_code"] == 1


@pytest.mark.parametrize(
    ("words", "what"),
    [
        (("bogus",), "No such command 'bogus'"),
        (("plan",), "Missing argument 'MODEL'"),
        (("plan", "m", "--bogus"), "No such option: --bogus"),
        (("plan", "m", "--context", "many"), "--context"),
        (("plan", "m", "--split", "tensor"), "--split"),
        (("run", "m"), "Missing argument 'PROMPT'"),
    ],
)
def test_wrong_command_lines_are_usage_errors(words, what):
    result = plait(*words)
    assert result.exit_code == 64
    assert what in result.stderr and "--help" in result.stderr
    assert result.stdout == ""
    as_json = plait(*words, "--json")
    assert as_json.exit_code == 64
    assert json.loads(as_json.stdout)["error"]["code"] == "command-line"


@pytest.mark.parametrize(
    ("options", "code", "hint"),
    [
        (("--targets", "h10"), "target-unknown", "did you mean 'h100'"),
        (("--targets", "h100;mi300"), "target-syntax", "for example h100"),
        (("--targets", ","), "target-none", "--targets h100,mi300"),
        (("--targets", "rocm:h100"), "target-backend", "cuda:h100"),
        ((), "devices", "--targets h100,mi300"),
        (("--targets", "h100", "--cluster", "c.yaml"), "devices", "--targets h100,mi300"),
        (("--targets", "h100", "--workload", "chatt"), "workload-unknown", "did you mean 'chat'"),
        (("--targets", "h100", "--objective", "latence"), "objective-unknown", "did you mean 'latency'"),
        (("--targets", "h100", "--layers", "ten"), "layers", "--layers 10,20"),
        (("--targets", "h100", "--pin", "block.3"), "pin", "--pin block.3=h100.0"),
        (("--targets", "h100", "--context", "1"), "context", None),
        (("--targets", "h100", "--concurrency", "0"), "concurrency", None),
    ],
)
def test_values_that_mean_nothing_are_usage_errors(tmp_path, options, code, hint):
    result = plait("plan", config_file(tmp_path), *options)
    assert result.exit_code == 64
    assert f"[{code}]" in result.stderr
    assert hint is None or hint in result.stderr
    assert result.stdout == ""


def test_one_unit_pinned_twice(tmp_path):
    pins = ("--pin", "embed=h100.0", "--pin", "embed=mi300x.0")
    result = plait("plan", config_file(tmp_path), "--targets", "h100,mi300", *pins)
    assert result.exit_code == 64 and "embed is pinned to h100.0 and to mi300x.0" in result.stderr


def test_options_after_two_dashes_are_words():
    result = plait("run", "nowhere.plait", "--", "--json")
    assert result.stdout == "" and "[not-an-artifact]" in result.stderr


def test_ctrl_c_is_quiet(raising):
    raising(KeyboardInterrupt())
    result = plait(*PLAN)
    assert (result.exit_code, result.output) == (130, "")
    raising(typer.Abort())
    assert plait(*PLAN).exit_code == 130


def test_a_signal_ends_the_process_with_130_and_without_words():
    code = (
        "import os, signal; from plait import api; from plait.cli.main import run\n"
        "api.request = lambda *_, **__: os.kill(os.getpid(), signal.SIGINT)\n"
        "run()"
    )
    done = subprocess.run([sys.executable, "-c", code, *PLAN], capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (128 + signal.SIGINT, "", "")


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_a_terminated_command_cleans_up(number, tmp_path):
    """What `timeout`, a closed terminal or a service manager sends."""
    code = (
        "import os, signal, sys; from plait import api, artifact; from pathlib import Path\n"
        "from plait.cli.main import run\n"
        f"signal.signal({int(number)}, signal.SIG_DFL)\n"  # whoever runs the tests may have it ignored
        "def request(*_, **__):\n"
        f"    with artifact.staged(Path({str(tmp_path / 'm.plait')!r})) as folder:\n"
        "        (folder / 'half').write_text('x')\n"
        f"        os.kill(os.getpid(), {int(number)})\n"
        "api.request = request\n"
        "run()"
    )
    done = subprocess.run([sys.executable, "-c", code, *PLAN], capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (128 + number, "", "")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("words", [("devices",), ("devices", "--json"), ("--help",)])
def test_a_closed_pipe_is_quiet(words):
    reading, writing = os.pipe()
    os.close(reading)
    command = [sys.executable, "-c", "from plait.cli.main import run; run()", *words]
    try:
        done = subprocess.run(command, stdout=writing, stderr=subprocess.PIPE, text=True, timeout=60, check=False)
    finally:
        os.close(writing)
    assert done.returncode == root.BROKEN_PIPE
    assert "Traceback" not in done.stderr and "Error" not in done.stderr


def test_standalone_exit_code_reaches_the_shell():
    assert subprocess_plait("plan").returncode == 64
    assert subprocess_plait("devices", "h10").returncode == 64
    assert subprocess_plait("inspect", "/nowhere/at/all").returncode == 2
