"""Kernels compiled before the tests run: all together, on every core, and perhaps on another machine.

`Recording` stands in for the GPU while `tests.device.compile` goes through the tests to see what they need. The folder
that it fills says which Triton made the kernels, and is served where there is no Triton, or another.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from numpy.typing import NDArray

from plait.backends.kernels.gpu import build, choose, loader
from plait.backends.kernels.gpu.archs import Arch
from plait.backends.kernels.gpu.build import Job
from plait.backends.kernels.gpu.cache import default_folder
from plait.backends.kernels.gpu.kernel import Kernel, Variant
from tests.device.machine import Machine, backend_of, job


class RecordedError(Exception):
    """What a compile was asked for is known; there is nothing to go on with."""


class Recording:
    """A machine on which nothing runs."""

    def __init__(self, arch: Arch) -> None:
        self.machine = Machine(backend_of(arch), arch, None)
        self.jobs: dict[str, Job] = {}

    def run(
        self,
        kernel: Kernel,
        variant: Variant,
        pointers: Mapping[str, NDArray[Any] | None],
        scalars: Mapping[str, int | float],
        grid: tuple[int, int, int] | None = None,
    ) -> None:
        """`tests.kernels.Runner`. Arrays stay as they are, so tests see wrong numbers."""
        asked = job(kernel, variant, pointers, scalars, self.machine.arch)
        self.jobs[asked.key] = asked

    def compile_many(self, jobs: Sequence[Job], **options: Any) -> Any:
        self.jobs |= {asked.key: asked for asked in jobs}
        raise RecordedError


RECORDING: Recording | None = None


def record(arch: Arch) -> Recording:
    """From now on the tests of this process run on nothing."""
    global RECORDING
    RECORDING = Recording(arch)
    choose.compile_many = RECORDING.compile_many  # type: ignore[attr-defined]
    return RECORDING


def maker() -> Path:
    """The file that says which Triton made the kernels."""
    return default_folder() / "triton.txt"


def use() -> None:
    """Take kernels that another Triton made, or one that is not here, as what they are."""
    if not maker().is_file():
        return
    version = maker().read_text()
    if importlib.util.find_spec("triton") is None or importlib.metadata.version("triton") != version:
        loader.require_triton = lambda: version  # type: ignore[assignment]
        build._make = _missing


def _missing(missing: Mapping[str, Job], *_: Any) -> Any:
    labels = ", ".join(sorted({asked.label for asked in missing.values()}))
    raise AssertionError(f"not among the kernels in {default_folder()}, which another Triton made: {labels}")
