"""docs/ir.md is what the registries say."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType

import pytest

from plait.ir.ops import OPS
from plait.ir.passes import PASSES

SCRIPT = Path(__file__).parents[2] / "docs/generate_ir.py"


@pytest.fixture
def script() -> ModuleType:
    spec = importlib.util.spec_from_file_location("generate_ir", SCRIPT)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_page_is_up_to_date(script: ModuleType) -> None:
    assert script.main(["--check"]) == 0, "run python docs/generate_ir.py"


def test_the_page_names_everything(script: ModuleType) -> None:
    text = script.render()
    for op in OPS:
        assert f"### {op.name}\n" in text
        assert op.FORMULA and op.FORMULA in text
        for name in op.get_irdl_definition().properties:
            assert f"`{name}`" in text or name == "operandSegmentSizes"
    assert all(f"| `{name}` |" in text for name in PASSES)


def test_a_drifted_page_is_noticed(
    script: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    page = tmp_path / "ir.md"
    monkeypatch.setattr(script, "TARGET", page)
    assert script.main(["--check"]) == 1, "there is no page yet"
    assert script.main([]) == 0
    assert script.main(["--check"]) == 0
    page.write_text(page.read_text().replace("softcap", "soft_cap"))
    assert script.main(["--check"]) == 1
    assert "ir.md is old: run python docs/generate_ir.py" in capsys.readouterr().err
