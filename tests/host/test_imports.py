"""Start-up stays cheap: what each quick command may not import."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from tests.host.command_line import config_file

FRAMEWORKS = {"torch", "jax", "jaxlib", "triton", "transformers", "onnx", "torch_mlir", "ray"}

#: Heavy, but no framework: plans need them, help does not.
HEAVY = {"numpy", "xdsl", "tokenizers", "safetensors", "gguf", "jinja2", "yaml", "ml_dtypes"}

PROBE = """
import json, sys
from plait.cli.main import run
try:
    run()
except SystemExit as end:
    print(json.dumps({"code": end.code or 0, "modules": sorted({name.partition(".")[0] for name in sys.modules})}),
          file=sys.stderr)
"""


def imported_by(*words: str) -> set[str]:
    """Top-level modules that are loaded when `plait WORDS` has ended well."""
    done = subprocess.run(
        [sys.executable, "-c", PROBE, *words], capture_output=True, text=True, timeout=120, check=True
    )
    end = json.loads(done.stderr.splitlines()[-1])
    assert end["code"] == 0, done.stderr
    return set(end["modules"])


@pytest.mark.parametrize(
    "words", [("--help",), ("--version",), ("plan", "--help"), ("compile", "--help"), ("run", "--help")]
)
def test_help_imports_nothing_heavy(words):
    loaded = imported_by(*words)
    assert "typer" in loaded, "the probe sees what is loaded"
    assert not loaded & (FRAMEWORKS | HEAVY)


def test_devices_imports_no_framework_and_no_ir():
    loaded = imported_by("devices")
    assert "yaml" in loaded
    assert not loaded & (FRAMEWORKS | {"xdsl", "tokenizers", "jinja2"})


@pytest.mark.parametrize("extra", [(), ("--json",)])
def test_plan_imports_no_framework(tmp_path, extra):
    loaded = imported_by("plan", str(config_file(tmp_path)), "--targets", "h100,mi300", *extra)
    assert "xdsl" in loaded
    assert not loaded & FRAMEWORKS


def test_importing_plait_imports_nothing_heavy():
    code = "import sys, plait; print(*sorted({name.partition('.')[0] for name in sys.modules}))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert not set(done.stdout.split()) & (FRAMEWORKS | HEAVY)
