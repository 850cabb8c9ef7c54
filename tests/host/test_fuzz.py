"""The fuzzer finds what it is there to find: other exceptions, deaths, hangs and growth."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from random import Random
from typing import Any

import pytest

from tests.fuzz import mutations, sweep
from tests.fuzz.kinds import KINDS

#: A kind whose check does what the damaged file says.
KIND = """
import os, sys, time
from pathlib import Path
from plait.errors import CheckpointError
from tests.fuzz import kinds, sweep
kinds.KINDS.clear()
kept = []
def check(folder):
    what = (folder / "what").read_text()
    if what == "key": {}["x"]
    if what == "exit": os._exit(9)
    if what == "hang": time.sleep(60)
    if what == "grow": kept.append(bytearray(b"x") * (300 << 20))
    if what == "much": bytearray(64 << 30)
    if what == "named": raise CheckpointError("weight-file", "it is gone")
    if what == "long": raise CheckpointError("weight-file", "")
WORDS = ["fine", "named", "key", "exit", "hang", "grow", "much", "long", "fine"]
kinds.KINDS["x"] = kinds.Kind("what", None, lambda random, content: WORDS[int(content)].encode(), check)
sweep.SECONDS = 1
def damage(kind, seeds, scratch, case):
    made = scratch / "m"
    made.mkdir(exist_ok=True)
    (made / "what").write_text(WORDS[case])
    return made
sweep.damage = damage
"""


def test_every_kind_of_fault_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "seeds" / "a").mkdir(parents=True)
    (tmp_path / "seeds" / "a" / "what").write_text("fine")
    script = tmp_path / "child.py"
    script.write_text(KIND + "raise SystemExit(sweep.main(sys.argv[1:]))\n")
    run, here = subprocess.run, str(Path(__file__).parents[2])

    def started(command: list[str], **options: Any) -> Any:
        return run([sys.executable, str(script), *command[3:]], env={"PYTHONPATH": here}, **options)

    monkeypatch.setattr("tests.fuzz.sweep.subprocess.run", started)
    found = sweep.sweep("x", tmp_path / "seeds", 9)
    assert found.ended == {"fine": 3, "weight-file": 1}, "what grew ended well too"
    assert [(fault.case, re.sub(r":.*| [23]\d\d(?= MB)", "", fault.what)) for fault in found.faults] == [
        (2, "KeyError"),
        (3, "the process ended with 9"),
        (4, "the process ended with 1"),
        (5, "it took MB of memory"),
        (6, "MemoryError"),
        (7, "AssertionError"),
    ]
    assert "Timeout" in found.faults[2].where


def test_a_case_can_be_run_again(tmp_path: Path) -> None:
    kind = KINDS["index"]
    seed = tmp_path / "seeds" / "a"
    seed.mkdir(parents=True)
    (seed / kind.file).write_text(json.dumps({"weight_map": {f"w{index}": "m.safetensors" for index in range(9)}}))
    (seed / "other").write_text("x")
    first = [(sweep.damage(kind, seed.parent, tmp_path, case) / kind.file).read_bytes() for case in range(40)]
    again = [(sweep.damage(kind, seed.parent, tmp_path, case) / kind.file).read_bytes() for case in range(40)]
    assert first == again and len(set(first)) > 30
    assert (tmp_path / "m" / "other").read_text() == "x"


@pytest.mark.parametrize("mutate", [mutations.of_bytes, mutations.of_json, mutations.of_safetensors])
def test_what_is_damaged_differs(mutate: mutations.Mutate) -> None:
    import numpy as np
    from safetensors.numpy import save

    plain = save({"a": np.ones((2, 3), np.float32), "b": np.ones(4, np.float32)})
    content = plain if mutate is not mutations.of_json else b'{"a": [1, 2, {"b": "text"}], "c": true, "d": 1.5}'
    made = {mutate(Random(number), content) for number in range(200)}
    assert len(made) > 100
