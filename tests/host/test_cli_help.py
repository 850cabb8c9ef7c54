"""The public commands and options are frozen: a change shows up as a change of a golden file."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any, get_args

import pytest
import typer.main

from plait import __version__
from plait.cli.main import app
from plait.spec import WORKLOADS, Objective
from tests.host.command_line import plait, subprocess_plait

GOLDEN = Path(__file__).parents[1] / "golden" / "cli" / "flags.txt"

COMMANDS = (
    "compile",
    "plan",
    "cost",
    "explain",
    "run",
    "profile",
    "simulate",
    "devices",
    "doctor",
    "inspect",
    "tune",
    "export",
    "pull",
)


def _flags(command: Any) -> list[str]:
    lines = []
    for option in command.params:
        names = ", ".join(option.opts) if option.param_type_name == "option" else option.metavar or option.name
        takes = (
            "" if getattr(option, "is_flag", False) or option.param_type_name == "argument" else f" {option.metavar}"
        )
        silent = option.default is None or option.default is False or callable(option.default)
        default = "" if silent else f" [{option.default}]"
        needed = " (required)" if option.required else ""
        lines.append(f"    {names}{takes}{default}{needed}  {option.help or ''}".rstrip())
    return lines


def test_public_flags_are_the_golden_ones():
    group: Any = typer.main.get_command(app)
    lines = ["plait", *_flags(group)]
    for name, command in group.commands.items():
        lines += ["", f"plait {name}", *_flags(command)]
    assert "\n".join(lines) + "\n" == GOLDEN.read_text()


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_has_help_with_an_example(command):
    result = plait(command, "--help")
    assert result.exit_code == 0
    assert f"Usage: plait {command}" in result.stdout
    assert "Options:" in result.stdout
    assert f"    plait {command} " in result.stdout or command == "doctor"


def test_top_level_help_lists_the_commands_and_the_exit_codes():
    result = plait("--help")
    assert result.exit_code == 0
    assert all(f"\n  {command} " in result.stdout for command in COMMANDS)
    assert "0 fine, 1 a fault in plait, 2 the request cannot be met" in result.stdout


def test_plait_alone_shows_its_help():
    assert plait().stdout == plait("--help").stdout


def test_version():
    result = plait("--version")
    assert (result.exit_code, result.stdout) == (0, f"plait {__version__}\n")


def test_bare_compile_is_plait_compile():
    command = [sys.executable, "-c", "from plait.cli.main import run_compile; run_compile()", "--help"]
    bare = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)
    assert bare.stdout == subprocess_plait("compile", "--help").stdout


def test_help_names_every_workload_and_objective():
    text = " ".join(plait("plan", "--help").stdout.split())
    assert f"What will be asked: {', '.join(WORKLOADS).replace('chat', 'chat (default)')}." in text
    assert all(goal in text for goal in get_args(Objective))
