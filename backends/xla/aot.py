"""Making TPU programs on a machine without a TPU: a process of its own, and a cache by content in front of it.

libtpu reads its environment once, when it is loaded, and may be in use by somebody else in this process; so `build`
runs in another, with the environment that it needs and nothing of `JAX_`, `XLA_`, `TPU_` or `LIBTPU_` from outside.
"""

from __future__ import annotations

import functools
import hashlib
import importlib.util
import json
import os
import signal
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from plait import errors
from plait.backends.base import CompileOptions, Progress
from plait.backends.kernels.gpu.cache import Cache, default_folder
from plait.backends.xla.chips import CHIPS, GROUP_SIZES
from plait.backends.xla.record import Attention, Bounds
from plait.errors import FitError, MissingDependencyError, PlaitError, UnsupportedError, system_error
from plait.ir import print_module
from plait.spec import to_dict

if TYPE_CHECKING:
    from xdsl.dialects.builtin import ModuleOp

_STEERING = ("JAX_", "XLA_", "TPU_", "LIBTPU_", "PJRT_")

_LAST = 2000
"""Characters of a dead compiler's output that are shown."""


@dataclass(frozen=True)
class Built:
    """The files for the slice's folder, what the report says, and how long it took; None where it came out of the
    cache."""

    files: dict[str, bytes]
    report: dict[str, object]
    seconds: float | None


def compile_slice(
    module: ModuleOp,
    arch: str,
    options: CompileOptions,
    attention: Attention = "gather",
    platform: str = "tpu",
    scan: bool = True,
) -> Built:
    """Programs of a slice for a TPU (or for this host's CPU), from the cache or made now.

    Raises:
        MissingDependencyError: `tpu-missing`: libtpu is not installed.
        UnsupportedError: `group-size`: no such group, or the slice cannot be split so.
        FitError: it does not fit the memory of a device.
        PlaitError: `xla-compile`: the compiler died or failed.
    """
    _check_installed(platform)
    if options.group_size not in GROUP_SIZES:
        raise UnsupportedError(
            "group-size",
            f"a group of {options.group_size} TPUs cannot hold a slice",
            why="groups have " + ", ".join(map(str, GROUP_SIZES)),
        )
    text = print_module(module)
    bounds = to_dict(Bounds.of(options))
    request = {"arch": arch, "attention": attention, "options": bounds, "platform": platform, "scan": scan}
    cache, key = Cache(default_folder().with_name("xla")), _key(text, request)
    packed, seconds = cache.get(key), None
    if packed is None:
        packed, seconds = _make(text, request, options.progress)
        cache.put(key, packed)
        cache.trim()
    files = msgspec.msgpack.decode(packed, type=dict[str, bytes])
    return Built(files, json.loads(files.pop("report.json")), seconds)


def _check_installed(platform: str) -> None:
    for name, extra in (("jax", "tpu"), ("libtpu", "tpu")) if platform == "tpu" else (("jax", "xla"),):
        if importlib.util.find_spec(name) is None:
            raise MissingDependencyError(
                "tpu-missing",
                f"TPU programs cannot be made here: {name} is not installed",
                why="libtpu holds the compiler; no TPU is needed",
                hint=f"pip install 'plait[{extra}]'",
            )


def _key(text: str, request: dict[str, object]) -> str:
    """Everything that the programs depend on."""
    versions = [f"{name} {metadata.version(name)}" for name in ("jax", "jaxlib")]
    if request["platform"] == "tpu":
        versions.append(f"libtpu {metadata.version('libtpu')}")
    parts = [versions, _own_digest(), text, request]
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()


@functools.cache
def _own_digest() -> str:
    """Of the sources that decide what is compiled: this package, what it lowers with, and the IR."""
    here = Path(__file__).parent
    sources = [*here.glob("*.py"), here.parent / "kernels" / "lowering.py", *(here.parent.parent / "ir").rglob("*.py")]
    digest = hashlib.sha256()
    for path in sorted(sources):
        digest.update(path.name.encode() + path.read_bytes())
    return digest.hexdigest()


def _make(text: str, request: dict[str, object], progress: Progress) -> tuple[bytes, float]:
    """Run `build` in a process of its own: its files in one piece, and the seconds it took."""
    with tempfile.TemporaryDirectory(prefix="plait-xla-") as name:
        folder = Path(name)
        (folder / "out").mkdir()
        (folder / "slice.mlir").write_text(text, "utf-8")
        (folder / "request.json").write_text(json.dumps(request), "utf-8")
        status, output = _run(folder, request, progress)
        _raise_error(folder, status, output)
        files = {path.name: path.read_bytes() for path in sorted((folder / "out").iterdir())}
        return msgspec.msgpack.encode(files), float((folder / "seconds").read_text())


def _run(folder: Path, request: dict[str, object], progress: Progress) -> tuple[int, str]:
    """The exit status of `build`, and the end of what it said beside its progress."""
    with (folder / "said").open("wb+") as said:
        try:
            process = subprocess.Popen(
                [sys.executable, "-P", "-m", "plait.backends.xla.build", str(folder)],
                env=environment(request),
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=said,
                text=True,
            )
        except OSError as error:
            raise system_error(error) or error from error
        with process:
            assert process.stdout is not None
            try:
                for line in process.stdout:
                    done, total, label = line.split()
                    progress(int(done), int(total), label)
            except BaseException:
                process.kill()
                raise
        said.seek(max(0, said.tell() - _LAST))
        return process.returncode, said.read().decode(errors="replace").strip()


def environment(request: dict[str, object]) -> dict[str, str]:
    """Of the process that compiles: libtpu asks neither the network nor the host for a TPU, and shares the machine with
    another libtpu."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(_STEERING)}
    kept["PYTHONPATH"] = os.pathsep.join(path or str(Path.cwd()) for path in sys.path)
    kept["JAX_PLATFORMS"] = "cpu"
    if request["platform"] == "cpu":
        options = request["options"]
        assert isinstance(options, dict)
        return kept | {"XLA_FLAGS": f"--xla_force_host_platform_device_count={options['group_size']}"}
    return kept | {
        "TPU_SKIP_MDS_QUERY": "1",
        "TPU_WORKER_HOSTNAMES": "localhost",
        "TPU_ACCELERATOR_TYPE": CHIPS[str(request["arch"])].accelerator,
        "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
    }


def _raise_error(folder: Path, status: int, output: str) -> None:
    """Raise what the process reported, or that it died."""
    report = folder / "error.json"
    if report.is_file():
        said = json.loads(report.read_text("utf-8"))
        texts = {"why": said["why"], "hint": said["try"]}
        if said["kind"] == FitError.__name__:
            raise FitError(said["what"], rows=tuple(said["rows"]), **texts)
        raise getattr(errors, said["kind"])(said["code"], said["what"], **texts)
    if status:
        how = f"exit status {status}" if status > 0 else signal.strsignal(-status) or f"signal {-status}"
        raise PlaitError("xla-compile", "the TPU compiler failed", why=f"{how}\n{output}", hint="report this")
