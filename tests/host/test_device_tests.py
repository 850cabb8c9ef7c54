"""The tests of `tests/device`, as far as they go without a GPU: that they skip, and a few of them on a stand-in."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from tests import kernels
from tests.device import machine
from tests.device.machine import GUARD, OnDevice, blocks

ROOT = Path(__file__).parents[2]

#: Every way to a device: kernels alone (all three areas), launch plans, and captured steps.
ON_A_STAND_IN = (
    "test_gemm.py and test_gemm and bf16-True and True-True and not gated or test_rows_of_a_few",
    "test_streams.py and test_argmax and 100-bf16 or test_rms_norm and 1-64 and bf16",
    "test_attention.py and test_decode_is_a_prefill",
    "test_conformance.py and op-add_rms_norm-bfloat16",
    "test_graphs.py and short and float32",
)


def _pytest(*options: str, **environment: str) -> str:
    command = [sys.executable, "-m", "pytest", "-q", "-m", "device", "-p", "no:cacheprovider", "tests/device", *options]
    given = {name: value for name, value in os.environ.items() if not name.startswith("PLAIT_DEVICE")}
    done = subprocess.run(command, cwd=ROOT, env={**given, **environment}, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_without_a_gpu_they_skip_and_say_why() -> None:
    if not isinstance(machine.find(), str):
        pytest.skip("there is a GPU here")
    said = _pytest("-k", "test_argmax or test_captured")
    assert re.search(r"SKIPPED.*there is no GPU here", said)
    assert re.search(r"^\d+ skipped", said.splitlines()[-1])


def test_on_a_stand_in_for_a_gpu() -> None:
    said = _pytest("-k", " or ".join(f"({wanted})" for wanted in ON_A_STAND_IN), PLAIT_DEVICE_DOUBLE="1")
    passed = re.match(r"(\d+) passed", said.splitlines()[-1])
    assert passed and int(passed[1]) >= 8 and "skipped" not in said.splitlines()[-1], said
