"""docs/support.md is what the registries, the backends and the tests' tables say."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path
from types import ModuleType

import pytest

from plait.backends.kernels.torch_eager import LOWERING
from plait.frontend.families import FAMILIES as READ
from plait.frontend.gguf.architectures import ARCHITECTURES
from plait.frontend.gguf.header import ENCODINGS
from plait.frontend.quantisation import METHODS
from plait.spec import Support
from tests.families import FAMILIES

SCRIPT = Path(__file__).parents[2] / "docs/generate_support.py"


@pytest.fixture
def script() -> ModuleType:
    spec = importlib.util.spec_from_file_location("generate_support", SCRIPT)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_page_is_up_to_date(script: ModuleType) -> None:
    assert script.main(["--check"]) == 0, "run python docs/generate_support.py"


def test_the_page_names_everything() -> None:
    text = SCRIPT.with_name("support.md").read_text("utf-8")
    for name in (*READ, *ARCHITECTURES, *ENCODINGS):
        assert f"| `{name}`" in text
    assert all(f"`{name}`" in text for name in METHODS)
    assert all(variant in text for variant in FAMILIES)


def test_every_row_has_as_many_cells_as_its_head() -> None:
    text = SCRIPT.with_name("support.md").read_text("utf-8")
    for lines in re.findall(r"(?:^\|.*\n)+", text, re.MULTILINE):
        counts = {len(re.findall(r"(?<!\\)\|", line)) for line in lines.splitlines()}
        assert len(counts) == 1, lines[:200]


def test_what_a_backend_refuses_is_in_the_page(script: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    """The cells are the lowering's answers, not the tests'."""
    monkeypatch.setattr(LOWERING, "supports", lambda op: Support(op.name != "plait.gelu_mul", "no such function"))
    page = script.render()
    (gemma,) = re.findall(r"^\| `gemma2` \| `Gemma2ForCausalLM` .*", page, re.MULTILINE)
    (llama,) = re.findall(r"^\| `llama` \| `LlamaForCausalLM` .*", page, re.MULTILINE)
    assert "gemma2: refuses plait.gelu_mul: no such function" in gemma
    assert "refuses" not in llama and llama.count("**compared**") == 4


def test_a_family_that_is_not_compared_is_not_said_to_be(script: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    cases = [case for case in script.test_every_family.CASES if case.values != ("qwen3", "rocm")]
    monkeypatch.setattr(script.test_every_family, "CASES", cases)
    (row,) = re.findall(r"^\| `qwen3` \| `Qwen3ForCausalLM` .*", script.render(), re.MULTILINE)
    assert row.count("**compared**") == 3 and row.count(" taken ") == 1
