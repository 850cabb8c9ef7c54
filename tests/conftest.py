"""Which of the long tests run when nobody says."""

from __future__ import annotations

import os
import shutil
import tempfile

import pytest

os.environ.setdefault("PLAIT_DEVICE_CODE", "0")
"""What compiles for GPUs without a word makes no machine code: it is emulated here, and Triton takes seconds a kernel.
Tests of the code itself ask for it."""

SLOW_STEP = 32
"""Without `-m`, one in 32 slow test runs: CI sees each kind of them without paying for all."""


def pytest_configure(config: pytest.Config) -> None:
    """Compiled kernels are shared by the tests of one run, and by nothing else unless PLAIT_CACHE says where."""
    if "PLAIT_CACHE" not in os.environ:
        folder = os.environ["PLAIT_CACHE"] = tempfile.mkdtemp(prefix="plait-kernels-")
        config.add_cleanup(lambda: shutil.rmtree(folder, ignore_errors=True))


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if config.option.markexpr:
        return
    dropped = {item for item in items if item.get_closest_marker("device")}
    slow = [item for item in items if item.get_closest_marker("slow") and item not in dropped]
    dropped |= set(slow) - set(slow[::SLOW_STEP])
    config.hook.pytest_deselected(items=list(dropped))
    items[:] = [item for item in items if item not in dropped]
