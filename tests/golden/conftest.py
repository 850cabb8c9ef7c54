"""Exact golden texts. `PLAIT_UPDATE_GOLDEN=1 pytest tests/golden` writes them anew; look at the difference."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest

Golden = Callable[[str, str], None]


@pytest.fixture
def golden(request: pytest.FixtureRequest) -> Golden:
    """`golden(name, text)` compares `text` with the file `name` beside the test."""
    folder = request.path.parent

    def check(name: str, text: str) -> None:
        path: Path = folder / name
        if os.environ.get("PLAIT_UPDATE_GOLDEN") == "1":
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text, encoding="utf-8")
        assert path.exists(), f"no golden file {name}: run with PLAIT_UPDATE_GOLDEN=1"
        assert text == path.read_text(encoding="utf-8"), f"differs from {name}; if meant, PLAIT_UPDATE_GOLDEN=1"

    return check
