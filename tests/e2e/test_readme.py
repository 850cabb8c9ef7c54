"""The README's commands, as a newcomer types them, in the README's order. `make` and `pip install` are what set this
test up, so those lines are checked to exist and not run again."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

README = Path(__file__).parents[2] / "README.md"
SETUP = ("make ", "pip install ")


def test_every_command_of_the_readme_runs(smollm2: Path, tmp_path: Path) -> None:
    text = README.read_text()
    blocks = re.findall(r"```(console|python)\n(.*?)```", text, re.DOTALL)
    (tmp_path / "smollm2").symlink_to(smollm2)  # what `plait pull smollm2` makes; it finds it there
    ran = []
    for kind, body in blocks:
        if kind == "python":
            assert _run([sys.executable, "-W", "error", "-c", body], tmp_path).strip()
            ran.append("python")
            continue
        for line in body.splitlines():
            assert line.startswith("$ "), line
            command = line.removeprefix("$ ")
            if not command.startswith(SETUP):
                ran.append(command)
                output = _run(command, tmp_path)
                if " run " in command:
                    assert "Paris" in output
    assert sum(command.startswith("plait ") for command in ran) >= 9
    assert "python" in ran


def _run(command: str | list[str], folder: Path) -> str:
    """Run with this interpreter's scripts first on the path; the output, which must come with exit code 0."""
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    done = subprocess.run(
        command,
        shell=isinstance(command, str),
        cwd=folder,
        env=os.environ | {"PATH": path},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, f"{command}\n{done.stdout}\n{done.stderr}"
    return done.stdout + done.stderr
