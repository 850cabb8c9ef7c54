"""The commands `plait` and `compile`."""

from __future__ import annotations

import os
import signal
import sys
from types import FrameType
from typing import Annotated

import typer

from plait.cli import compile, cost, devices, doctor, explain, export, inspect, plan, profile, pull, simulate, tune
from plait.cli import run as run_command
from plait.cli.root import Root

_HELP = """Compile one transformer for several kinds of accelerators at once, and run it.

Start here:

\b
    plait pull smollm2
    plait compile smollm2 --targets h100,mi300
    plait run smollm2.plait "What is the capital of France?"

\b
Exit codes: 0 fine, 1 a fault in plait, 2 the request cannot be met
(does not fit, unsupported, broken file), 64 wrong usage.
"""

_SETTINGS = {"help_option_names": ["-h", "--help"], "max_content_width": 100}

app = typer.Typer(
    cls=Root,
    help=_HELP,
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    context_settings=_SETTINGS,
)

for _command in (
    compile,
    plan,
    cost,
    explain,
    run_command,
    profile,
    simulate,
    devices,
    doctor,
    inspect,
    tune,
    export,
    pull,
):
    app.command(_command.NAME, help=_command.HELP, context_settings=_SETTINGS)(_command.command)


def _version(asked: bool) -> None:
    if asked:
        from plait import __version__

        typer.echo(f"plait {__version__}")
        raise typer.Exit


@app.callback(invoke_without_command=True)
def _root(
    context: typer.Context,
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    if context.invoked_subcommand is None:
        typer.echo(context.get_help())


def run() -> None:
    """The command `plait`."""
    _open_streams()
    for number in (signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(number) is signal.SIG_DFL:  # nohup has SIGHUP ignored
            signal.signal(number, _ended_by)
    for stream in (sys.stdout, sys.stderr):
        stream.reconfigure(errors="replace")  # type: ignore[union-attr]
    app()


def _open_streams() -> None:
    """Give /dev/null to the standard streams that the shell closed (`>&-`): files would get their numbers."""
    for fd, name, mode in ((0, "stdin", "r"), (1, "stdout", "w"), (2, "stderr", "w")):
        try:
            os.fstat(fd)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # the lowest number that is free, which is this one
            setattr(sys, name, os.fdopen(fd, mode, closefd=False))


def _ended_by(number: int, frame: FrameType | None) -> None:
    """Leave like Ctrl-C does: half-written files go, workers end. The exit code is a shell's for this signal."""
    raise SystemExit(128 + number)


def run_compile() -> None:
    """The command `compile`: `plait compile` under its short name."""
    sys.argv[1:1] = ["compile"]
    run()
