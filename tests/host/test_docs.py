"""What the documents refer to is there."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGES = sorted([ROOT / "README.md", ROOT / "CONTRIBUTING.md", *(ROOT / "docs").glob("*.md")])


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_somewhere(page: Path) -> None:
    links = re.findall(r"\]\(([^)#\s]+)", page.read_text("utf-8"))
    assert [link for link in links if "://" not in link and not (page.parent / link).exists()] == []


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_paths_of_the_repository_are_there(page: Path) -> None:
    """`frontend/families/`, `tests/checkpoints.py`: words in backquotes that begin with a folder of the repository."""
    folders = {path.name for path in ROOT.iterdir() if path.is_dir() and not path.name.startswith(".")} - {"models"}
    words = re.findall(r"`([\w.*-]+/[\w./*-]*)`", page.read_text("utf-8"))
    named = [word for word in words if word.split("/")[0] in folders]
    assert [word for word in named if not list(ROOT.glob(word.rstrip("/")))] == []
