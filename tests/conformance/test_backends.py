"""Every backend of this repository on every conformance case."""

from __future__ import annotations

from pathlib import Path

import pytest

from plait.backends.conformance import Case, cases, run_case
from plait.registry import IN_TREE, load_backend

TARGETS = {
    "cpu": "cpu",
    "cuda": "cuda:sm_90a",
    "rocm": "rocm:gfx942",
    "xla": "xla:tpu-v5e",
    "null": "null:h100",
}


def test_every_backend_is_held_to_the_suite() -> None:
    assert set(TARGETS) == set(IN_TREE)


@pytest.mark.parametrize(
    ("name", "case"),
    [
        pytest.param(name, case, id=f"{name}-{case}")
        for name, target in TARGETS.items()
        for case in cases(load_backend(name).capability(target).dtypes)
    ],
)
def test_backend(name: str, case: Case, tmp_path: Path) -> None:
    run_case(case, load_backend(name), TARGETS[name], tmp_path, shapes_only=name == "null")
