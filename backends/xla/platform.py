"""Where JAX runs, settled before it is imported: afterwards it no longer asks."""

from __future__ import annotations

import os
from pathlib import Path

#: A host with a TPU shows one of these device files.
_TPU_FILES = ("/dev/accel0", "/dev/vfio/0")


def emulated() -> bool:
    """Whether XLA's CPU backend stands in for a TPU here."""
    return not any(Path(file).exists() for file in _TPU_FILES)


def prepare(threads: int | None) -> None:
    """Choose the platform and the number of host threads of this process, unless JAX already runs in it."""
    if emulated():  # or JAX looks for accelerators, and logs that it found none
        os.environ.setdefault("JAX_PLATFORMS", "cpu")
    if threads is not None:
        os.environ.setdefault("PJRT_NPROC", str(threads))
