"""The commands `plait` and `compile`."""

from __future__ import annotations

import sys
from typing import Annotated

import typer

from plait.cli import compile, devices, doctor, inspect, plan, pull
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

for _command in (compile, plan, run_command, devices, doctor, inspect, pull):
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
    for stream in (sys.stdout, sys.stderr):
        stream.reconfigure(errors="replace")  # type: ignore[union-attr]
    app()


def run_compile() -> None:
    """The command `compile`: `plait compile` under its short name."""
    sys.argv[1:1] = ["compile"]
    run()
