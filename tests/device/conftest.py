"""Tests that need a GPU: `make test-device`. On a machine without one they are skipped, and say why.

Environment:
    PLAIT_CACHE: where compiled kernels are. `python -m tests.device.compile` fills it beforehand, on any machine;
        where it was made with Triton, none is needed here.
    PLAIT_DEVICE_ALL: 1 runs the whole of every list of parameters, not a share of the longest.
    PLAIT_DEVICE_DOUBLE: 1 takes a stand-in for a GPU (`double`), which is very slow: for the tests of these tests.
"""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Iterator

import pytest

from tests.device import double, prepared
from tests.device.machine import Machine, OnDevice, find
from tests.kernels import Place, Runner, on

LONG, SHARE = 100, 7
"""Of more than so many tests of one list, marked slow, one in so many runs. It shares no factor with the numbers of
values that make up the list, so each of them is there."""


FUNCTIONS = 4.0
"""NVIDIA's ex2, rsqrt, rcp and division without full precision are good to two units in the last place each (PTX ISA,
"Floating Point Instructions"), where the host has half a one."""

FP8_LOSS = 2.0**-10
"""Hopper's matrix units keep about 14 bits of the largest of the fp8 products that they add at once (DeepSeek-V3,
section 3.3.2); the kernels promote what they can to float32."""


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if os.environ.get("PLAIT_DEVICE_ALL") == "1":
        return
    lists: dict[str, list[pytest.Item]] = defaultdict(list)
    for item in items:
        if item.get_closest_marker("device") and item.get_closest_marker("slow"):
            lists[item.nodeid.partition("[")[0]].append(item)
    dropped = {item for long in lists.values() if len(long) > LONG for item in set(long) - set(long[::SHARE])}
    config.hook.pytest_deselected(items=list(dropped))
    items[:] = [item for item in items if item not in dropped]


@pytest.fixture(scope="session")
def gpu() -> Machine:
    """The GPU, or a skip."""
    if prepared.RECORDING is not None:
        return prepared.RECORDING.machine
    if os.environ.get("PLAIT_DEVICE_DOUBLE") == "1":
        double.fit()
    prepared.use()
    found = find()
    if isinstance(found, str):
        pytest.skip(found)
    return found


@pytest.fixture(scope="session")
def _runner(gpu: Machine, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Runner]:
    if prepared.RECORDING is not None:
        yield prepared.RECORDING.run
        return
    device = gpu.device()
    yield OnDevice(device, gpu.arch, tmp_path_factory.mktemp("kernels"))
    device.close()


@pytest.fixture
def runner(_runner: Runner) -> Iterator[None]:
    """Kernels that tests run with `tests.kernels.run` run on the GPU."""
    with on(Place(_runner, FUNCTIONS, FP8_LOSS)):
        yield
