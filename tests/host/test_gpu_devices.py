"""Several GPUs in one process, and a driver that does not take the code."""

from __future__ import annotations

from contextlib import closing
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from plait.backends.kernels.gpu.cupy_device import CupyDevice
from plait.backends.kernels.gpu.executor import LaunchSlice
from plait.errors import UnsupportedError
from tests.host import cupy_double
from tests.host.cupy_double import Double
from tests.host.gpu_slices import write


def test_each_slice_stays_on_its_own_device(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whichever was used last: memory, streams, graphs."""
    monkeypatch.setattr(cupy_double.RawKernelDouble, "compile", lambda self: setattr(self, "_loaded", True))
    monkeypatch.setattr(cupy_double.RawKernelDouble, "max_dynamic_shared_size_bytes", 1 << 20, raising=False)
    made, double = write(tmp_path / "slice"), Double(("sm_90", "sm_90"))
    plan = made.plan
    binaries = tuple(
        replace(binary, file=f"{i}.cubin", symbol=binary.kernel, threads=32) for i, binary in enumerate(plan.binaries)
    )
    plan = replace(plan, binaries=binaries)
    loaded = [LaunchSlice(made.folder, plan, CupyDevice(double, i), "gpu", made.options) for i in range(2)]
    with closing(loaded[0]) as first, closing(loaded[1]) as second:
        held = {ordinal: [a for a in double.alive if a.ordinal == ordinal] for ordinal in range(2)}
        sizes = [sorted(a.bytes.nbytes for a in own) for own in held.values()]
        assert sizes[0] == sizes[1]
        players = made.player(), made.player()
        for turn in made.script.turns:
            for executable, player in zip((first, second), players, strict=True):
                executable.step(player.batches(turn)[0], {})
        facts = [sum(a.ordinal == ordinal for a in double.alive) - len(own) for ordinal, own in held.items()]
        assert facts[0] == facts[1] > 0, "facts of the batch, on each device"
        assert first.stats()["graphs"] == second.stats()["graphs"] == 2
        page = np.array([0], np.int32)
        first.import_pages(0, page, *first.export_pages(0, page))


def test_a_driver_that_does_not_take_the_code_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(self: cupy_double.RawKernelDouble) -> None:
        raise cupy_double.CUDADriverError("CUDA_ERROR_INVALID_IMAGE: device kernel image is invalid")

    monkeypatch.setattr(cupy_double.RawKernelDouble, "compile", refuse)
    made = write(tmp_path / "slice", target="cuda:sm_100a")
    with pytest.raises(UnsupportedError, match="driver does not load") as caught:
        LaunchSlice(made.folder, made.plan, CupyDevice(Double(("sm_100",))), "gpu", made.options)
    assert caught.value.code == "device-driver" and "INVALID_IMAGE" in caught.value.why
