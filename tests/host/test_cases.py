"""docs/cases.md names tests: they must exist, and every row must name one."""

from __future__ import annotations

import ast
import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
ROWS = [line for line in (ROOT / "docs" / "cases.md").read_text().splitlines() if line.startswith("| ")]


def named(row: str) -> list[tuple[str, str]]:
    """(file, function) of every test that a row names."""
    return re.findall(r"`(tests/[\w/]+\.py)::(\w+)`", row)


def test_every_test_that_is_named_exists() -> None:
    tests = {test for row in ROWS for test in named(row)}
    assert len(tests) > 50
    for file in {file for file, _ in tests}:
        tree = ast.parse((ROOT / file).read_text())
        there = {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}
        assert {name for other, name in tests if other == file} <= there, file


def test_every_row_is_whole() -> None:
    width = 0
    for row in ROWS:
        cells = [cell.strip() for cell in row.strip("|").split("|")]
        if cells[-1] == "test":
            width = len(cells)
        elif set(cells[0]) != {"-"}:
            assert len(cells) == width and all(cells), row
            assert named(cells[-1]) and not re.sub(r"`[^`]*`", "", cells[-1]).strip(), row
