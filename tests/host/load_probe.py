"""Load one slice of an artifact and say what that took: `python -m tests.host.load_probe BACKEND WARM BIG SLICE`.

A process of its own, because peaks are counted per process. A small artifact is loaded first, so that the libraries and
what they keep for themselves are there before anything is counted.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from plait.artifact import read_artifact
from plait.backends.base import Executable, LoadOptions
from plait.backends.kernels.torch_slice import TorchSlice
from plait.backends.weights import read_weights_json
from plait.ir import kv_layouts, read_module
from plait.registry import load_backend
from plait.spec import kv_class


def resident(field: str) -> int:
    """Bytes of VmRSS (now) or VmHWM (the peak)."""
    status = Path("/proc/self/status").read_text()
    line = next(line for line in status.splitlines() if line.startswith(field + ":"))
    return int(line.split()[1]) * 1024


def bytes_read() -> int:
    """What this process has asked the kernel to read, from files or the page cache."""
    (count,) = [line.split()[1] for line in Path("/proc/self/io").read_text().splitlines() if line.startswith("rchar:")]
    return int(count)


def load(backend: str, folder: Path, index: int) -> tuple[Executable, Path]:
    artifact = read_artifact(folder)
    part = artifact.manifest.slices[index]
    layouts = kv_layouts(read_module(folder / part.folder / "slice.mlir"), artifact.manifest.page_tokens)
    pages = {kv_class(layout.window): 1 for layout in layouts}
    options = LoadOptions(pages, artifact.manifest.page_tokens, threads=1, weight_root=artifact.weight_root)
    return load_backend(backend).load(folder / part.folder, part.device, options), folder / part.folder


def main(backend: str, warm: str, big: str, index: str) -> dict[str, Any]:
    load(backend, Path(warm), int(index))[0].close()
    Path("/proc/self/clear_refs").write_text("5")  # the peak starts again from what is resident now
    before, read = resident("VmRSS"), bytes_read()
    executable, folder = load(backend, Path(big), int(index))
    if isinstance(executable, TorchSlice):
        executable.wait()
    peak, held, read = resident("VmHWM") - before, resident("VmRSS") - before, bytes_read() - read
    refs = read_weights_json(folder / "weights.json").values()
    return {
        "peak": peak,
        "held": held,
        "read": read,
        "slice": sum(ref.nbytes for ref in refs),
        "largest": max(ref.nbytes for ref in refs),
        "weight_bytes": executable.stats()["weight_bytes"],
    }


if __name__ == "__main__":
    print(json.dumps(main(*sys.argv[1:])))
