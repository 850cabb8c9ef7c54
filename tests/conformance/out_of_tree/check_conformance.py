"""What the package's own tests are: plait's conformance suite, on the backend that plait finds by its name."""

from __future__ import annotations

from pathlib import Path

import pytest

from plait.backends.conformance import Case, cases, run_case
from plait.registry import load_backend

BACKEND = load_backend("numpy")
TARGET = "numpy:v1"


@pytest.mark.parametrize("case", cases(BACKEND.capability(TARGET).dtypes), ids=str)
def test_conformance(case: Case, tmp_path: Path) -> None:
    run_case(case, BACKEND, TARGET, tmp_path)
