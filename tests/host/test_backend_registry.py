"""Backends by name: found, refused by name, and not imported before they are asked for."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from importlib.metadata import EntryPoint

import pytest
from xdsl.dialects.builtin import StringAttr

from plait import registry
from plait.api import request
from plait.backends.base import Backend
from plait.backends.conformance.models import MODELS
from plait.errors import MissingDependencyError, UnsupportedError, UsageError
from plait.ir import ops
from plait.ir.ops import RopeOp
from plait.registry import backend_names, entry, load_backend


@pytest.mark.parametrize("name", list(registry.IN_TREE))
def test_every_row_leads_to_its_backend(name: str) -> None:
    backend = load_backend(name)
    assert isinstance(backend, Backend)
    assert backend.name == name
    assert load_backend(entry(name)) is backend
    assert name in backend_names()


def test_unknown_name_is_refused_with_a_suggestion() -> None:
    with pytest.raises(UsageError, match="did you mean 'rocm'") as caught:
        entry("rocmm")
    assert caught.value.code == "backend-unknown"
    assert "cuda" in caught.value.why


def test_a_backend_from_outside_may_compile_for_any_chip(monkeypatch: pytest.MonkeyPatch) -> None:
    """It has no chips of its own in the catalogue, so `--targets` has to let it have those of others."""
    point = EntryPoint("elsewhere", "plait.backends.null:BACKEND", registry.GROUP)
    monkeypatch.setattr(registry, "entry_points", lambda group: [point, EntryPoint("cuda", "x:Y", group)])
    assert registry.out_of_tree() == ("elsewhere",)
    (device,) = request("config.json", "elsewhere:h100").cluster.devices
    assert (device.backend, device.name, device.arch) == ("elsewhere", "h100", "sm_90a")
    with pytest.raises(UsageError, match="does not make code"):
        request("config.json", "rocm:h100")


def test_missing_wheel_says_how_to_get_it(monkeypatch: pytest.MonkeyPatch) -> None:
    original = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "jax" else original(name))
    with pytest.raises(MissingDependencyError) as caught:
        load_backend("xla")
    assert "'jax'" in caught.value.why
    assert caught.value.hint == "pip install 'plait[run]'"
    assert load_backend("cuda").name == "cuda"


def test_missing_module_of_a_package_is_no_traceback() -> None:
    with pytest.raises(MissingDependencyError, match="no_such_package"):
        load_backend("no_such_package:BACKEND")


@pytest.mark.parametrize("path", ["plait.errors:UserError", "plait.errors:NOTHING"])
def test_a_path_to_no_backend_is_refused(path: str) -> None:
    with pytest.raises(UsageError) as caught:
        load_backend(path)
    assert caught.value.code == "backend-broken"


def test_loading_a_backend_imports_no_framework() -> None:
    code = (
        "import sys, plait.registry as r\n"
        "assert not any(m.startswith('plait.backends') for m in sys.modules), 'a backend was imported'\n"
        "for name in r.backend_names(): r.load_backend(name)\n"
        "print([m for m in ('torch', 'jax', 'triton') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


@pytest.mark.parametrize("target", ["cuda:sm_20", "rocm:gfx803", "xla:tpu-v1"])
def test_unknown_architecture_is_refused_by_name(target: str) -> None:
    name, _, arch = target.partition(":")
    with pytest.raises(UnsupportedError, match=arch) as caught:
        load_backend(name).capability(target)
    assert caught.value.code == "arch-unknown"


@pytest.mark.parametrize(
    ("name", "target", "environment"), [("cuda", "cuda:sm_90a", "torch"), ("xla", "xla:tpu-v5e", "jax")]
)
def test_emulation_is_said(name: str, target: str, environment: str) -> None:
    capability = load_backend(name).capability(target)
    assert capability.environment == environment
    assert capability.emulated == capability.runs_on.endswith("(emulated on host)")


def test_the_host_is_itself() -> None:
    capability = load_backend("cpu").capability("cpu")
    assert (capability.runs_on, capability.emulated) == ("cpu", False)


@pytest.mark.parametrize("target", ["cuda:sm_90a", "cpu:cpu", "xla:tpu-v5e"])
def test_a_rope_kind_without_tables_is_refused(target: str) -> None:
    module = MODELS["gqa"]("float32")
    rope = next(op for op in ops(module) if isinstance(op, RopeOp))
    rope.properties["kind"] = StringAttr("spiral")
    answer = load_backend(target.partition(":")[0]).supports(rope, target)
    assert not answer.ok
    assert answer.why.startswith("kind = spiral: implemented are default")
