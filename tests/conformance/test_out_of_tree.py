"""A backend in a package of its own: built, installed, found by its name, and held to the suite."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

from plait.backends.conformance import cases

PACKAGE = Path(__file__).parent / "out_of_tree"


def _run(*command: str | Path, cwd: Path, path: Path) -> str:
    environment = {**os.environ, "PYTHONPATH": str(path), "PIP_DISABLE_PIP_VERSION_CHECK": "1"}
    done = subprocess.run(
        [sys.executable, *map(str, command)], cwd=cwd, env=environment, capture_output=True, text=True, timeout=280
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_out_of_tree_backend_conforms(tmp_path: Path) -> None:
    source, site = tmp_path / "source", tmp_path / "site"
    shutil.copytree(PACKAGE, source, ignore=shutil.ignore_patterns("__pycache__", "build", "*.egg-info"))
    install = ("install", "--quiet", "--no-index", "--no-deps", "--no-build-isolation", "--target", site, source)
    _run("-m", "pip", *install, cwd=tmp_path, path=site)
    shutil.move(source / "check_conformance.py", tmp_path / "check_conformance.py")
    shutil.rmtree(source)  # only what was installed is left to be found

    names = _run("-c", "import plait.registry as r; print(*r.backend_names())", cwd=tmp_path, path=site)
    assert "numpy" in names.split()
    said = _run(
        "-m", "pytest", "-q", "-x", "-W", "error", "-p", "no:cacheprovider", "check_conformance.py",
        cwd=tmp_path, path=site,
    )  # fmt: skip
    passed = int(said.rsplit(" passed", 1)[0].split()[-1])
    assert passed == len(cases(("float32",))), said
