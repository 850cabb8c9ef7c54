"""The whole of `plait profile`: one device of this machine, measured."""

from __future__ import annotations

import os
import sys
import tempfile
import time
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

from plait.assemble.measure.host import copy_rate, hops
from plait.assemble.measure.profile import FULL, QUICK, Clock, Progress, engine_overheads, measure
from plait.assemble.measure.slices import Loader
from plait.assemble.tiny import write_tiny_llama
from plait.backends.base import LoadOptions
from plait.cost_models.host import core_count
from plait.cost_models.profiled import PAGE_TOKENS
from plait.cost_models.profiles import Profile, machine
from plait.errors import UsageError
from plait.registry import load_backend
from plait.spec import Device, kv_class

#: Requests at once, to tell what the engine takes for each.
_REQUESTS = (1, 4, 16)

_KV_PAGES = 512

Opened = Callable[[Path, Path], AbstractContextManager[Any]]
"""From a checkpoint and a folder for its artifact to a running pipeline of one slice."""


def measure_here(
    device: Device,
    opened: Opened,
    *,
    quick: bool = False,
    threads: int | None = None,
    dtypes: Iterable[str] = ("float32", "bfloat16"),
    progress: Progress = lambda phase, done, total: None,
    clock: Clock = time.perf_counter,
) -> Profile:
    """A profile of a device of this machine.

    Args:
        opened: makes the pipeline whose engine is timed.
        threads: of the host; None for all cores this process may use.

    Raises:
        UsageError: `profile-device`: the device is not here, and what is emulated says nothing of it.
        PlaitError: what the backend says.
    """
    if "torch" not in sys.modules:
        # As in workers (`runtime.launch`): a thread that spins while it waits takes a core from another slice.
        os.environ.setdefault("OMP_WAIT_POLICY", "passive")
    backend, target = load_backend(device.backend), f"{device.backend}:{device.arch}"
    known = backend.capability(target)
    if known.emulated:
        raise UsageError(
            "profile-device",
            f"{device.name} is not here: it would run on {known.runs_on}",
            why="a measurement of the host says nothing of the device",
            hint="run plait profile where the device is; cpu measures this host",
        )
    budget, cores = QUICK if quick else FULL, threads or core_count()
    with tempfile.TemporaryDirectory(prefix="plait-profile-") as scratch:
        folder = Path(scratch)
        progress("copies and hops", 0, 2)
        copied = copy_rate()
        between = hops()
        progress("engine", 1, 2)
        engine = _engine(folder, device, opened, cores, 2 * budget.rounds, clock)
        load = Loader(backend, target, device.name, folder / "slices", cores)
        return measure(
            device,
            machine(device.backend, None if device.backend == "cpu" else known.runs_on),
            [dtype for dtype in dtypes if dtype in known.dtypes],
            budget,
            load,
            engine=engine,
            copy_bytes_per_s=copied,
            hops=between,
            threads=cores,
            clock=clock,
            progress=progress,
        )


def _engine(
    folder: Path, device: Device, opened: Opened, threads: int, rounds: int, clock: Clock
) -> tuple[float, float]:
    """See `engine_overheads`: of a model whose ops take next to nothing."""
    write_tiny_llama(folder / "tiny")
    with opened(folder / "tiny", folder / "tiny.plait") as pipe:
        part = pipe.manifest.slices[0]
        options = LoadOptions(
            {kv_class(layout.window): _KV_PAGES for layout in part.kv},
            PAGE_TOKENS,
            threads=threads,
            weight_root=folder / "tiny.plait" / pipe.manifest.weight_root,
        )
        here = load_backend(device.backend).load(folder / "tiny.plait" / part.folder, device.name, options)
        try:
            return engine_overheads(pipe, here, _REQUESTS, rounds, clock)
        finally:
            here.close()
