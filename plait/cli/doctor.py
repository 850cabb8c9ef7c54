"""`plait doctor`: what works here."""

from __future__ import annotations

from dataclasses import asdict

import typer

from plait.cli.options import Json

NAME = "doctor"

HELP = """Check this machine, and run a tiny model on it.

Python, wheels, backends, devices, memory, and two slices from end to end. One line per check: PASS; WARN, something
is not available here; FAIL, plait cannot work. Exit code 2 when one fails.
"""

_STYLES = {"PASS": "green", "WARN": "yellow", "FAIL": "bold red"}


def command(as_json: Json = False) -> None:
    from rich.text import Text

    from plait.cli.screen import Screen
    from plait.doctor import checks

    screen = Screen(as_json=as_json)
    done = []
    for check in checks():
        done.append(check)
        screen.show(Text.assemble((check.status, _STYLES[check.status]), f"  {check.name}: {check.reason}"))
    failed = [check for check in done if check.status == "FAIL"]
    screen.result({"ok": not failed, "checks": [asdict(check) for check in done]})
    if failed:
        raise typer.Exit(2)
