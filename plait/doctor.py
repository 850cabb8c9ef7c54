"""What this machine can do for plait: one check per thing that may be missing, with the reason."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import platform
import re
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from plait.words import bytes_text, counted

Status = Literal["PASS", "WARN", "FAIL"]

#: Each process with torch takes 0.2 GB before it holds a weight (measured); below this little is left for a model.
_ENOUGH_MEMORY_BYTES = 2 * 10**9
#: Frames between workers lie in memory files: what a step of 512 tokens of a large model hands over in bfloat16
#: (512 x 16384 x 2 bytes is 16 MiB), in each of a channel's four slots.
_SHM_BYTES = 64 * 2**20
_OLDEST_PYTHON = (3, 11)


@dataclass(frozen=True)
class Check:
    """PASS, WARN (something is not available here) or FAIL (plait cannot work), and why."""

    name: str
    status: Status
    reason: str


def checks() -> Iterator[Check]:
    """Every check, in order, as it is done. A check that breaks is a FAIL with its error."""
    for name, run in _CHECKS:
        try:
            yield from run()
        except Exception as error:
            yield Check(name, "FAIL", f"{type(error).__name__}: {error}".replace("\n", " "))


def _python() -> Iterator[Check]:
    good = sys.version_info >= _OLDEST_PYTHON
    yield Check("python", "PASS" if good else "FAIL", f"{platform.python_version()} at {sys.executable}")
    linux = sys.platform == "linux"
    reason = (
        platform.platform(terse=True) if linux else f"{sys.platform}: worker processes need Linux; --in-process works"
    )
    yield Check("system", "PASS" if linux else "WARN", reason)


def _wheels() -> Iterator[Check]:
    """The wheels plait's own metadata names: those it always needs, then those of the extras that run slices."""
    for requirement in importlib.metadata.requires("plait") or ():
        name = re.match(r"[\w.-]+", requirement)
        extra = re.search(r"extra == ['\"](\w+)['\"]", requirement)
        if name is None or name[0] == "plait" or (extra is not None and extra[1] not in ("run", "xla")):
            continue
        yield _wheel(name[0], "FAIL" if extra is None else "WARN", extra[1] if extra else "")


#: What each vendor's software is for: the wheels that bring it, the extra that installs one of them.
_TOOLS: tuple[tuple[str, tuple[str, ...], str, str], ...] = (
    ("triton", ("triton",), "gpu", "machine code for GPUs, none of which needs to be here"),
    ("libtpu", ("libtpu",), "tpu", "machine code for TPUs, none of which needs to be here"),
    ("cupy", ("cupy-cuda12x", "cupy-cuda13x", "cupy-rocm-7-0"), "cuda12", "running that code where a GPU is"),
    ("torch-mlir", ("torch-mlir",), "import", "plait export, and models that plait has no ops for"),
)


def _tools() -> Iterator[Check]:
    for name, wheels, extra, use in _TOOLS:
        found = [
            f"{wheel} {version}".removeprefix(f"{name} ")
            for wheel in wheels
            if (version := _version(wheel)) is not None
        ]
        install = f"pip install 'plait[{extra}]'" + ("; or cuda13, rocm7" if name == "cupy" else "")
        reason = f"{found[0]}, for {use}" if found else f"not installed ({install}): for {use}"
        yield Check(name, "PASS" if found else "WARN", reason)


def _version(wheel: str) -> str | None:
    try:
        return importlib.metadata.version(wheel)
    except importlib.metadata.PackageNotFoundError:
        return None


def _cache() -> Iterator[Check]:
    """Where compiled code is kept, so that it is not made twice."""
    from plait.backends.kernels.gpu.cache import DEFAULT_LIMIT_BYTES, default_folder

    folder = default_folder().parent
    sizes = {}
    for part in ("kernels", "xla", "tuned"):
        files = [path.stat().st_size for path in (folder / part).glob("??/*")]
        sizes[part] = f"{part} {bytes_text(sum(files))} in {len(files)}"
    nearest = next(path for path in (folder, *folder.parents) if path.exists())
    writable = os.access(nearest, os.W_OK)
    reason = f"{folder}: {', '.join(sizes.values())}; each at most {bytes_text(DEFAULT_LIMIT_BYTES)}"
    if not writable:
        reason += "; it cannot be written: set PLAIT_CACHE to a folder that can"
    yield Check("cache", "PASS" if writable else "WARN", reason)


def _wheel(name: str, when_missing: Status, extra: str) -> Check:
    version = _version(name)
    if version is not None:
        return Check(f"wheel {name}", "PASS", version)
    package = f"plait[{extra}]" if extra else "plait"
    return Check(f"wheel {name}", when_missing, f"not installed: pip install '{package}'")


def _host() -> Iterator[Check]:
    from plait.cost_models.host import core_count, memory_bytes

    total, available = memory_bytes()
    enough = available >= _ENOUGH_MEMORY_BYTES
    reason = f"{counted(core_count(), 'core')}, {bytes_text(available)} of {bytes_text(total)} memory available"
    yield Check("host", "PASS" if enough else "WARN", reason)


def _shared_memory() -> Iterator[Check]:
    """What tensors cross between workers in."""
    handle = os.memfd_create("plait-doctor", os.MFD_CLOEXEC)
    try:
        os.ftruncate(handle, _SHM_BYTES)
        os.pwrite(handle, b"x", _SHM_BYTES - 1)
    finally:
        os.close(handle)
    yield Check("memfd", "PASS", f"{bytes_text(_SHM_BYTES)} made and written")
    folder = Path("/dev/shm")
    if not folder.is_dir():
        yield Check("/dev/shm", "WARN", "not there")
        return
    free = shutil.disk_usage(folder).free
    good = os.access(folder, os.W_OK) and free >= _SHM_BYTES
    reason = f"{bytes_text(free)} free" + ("" if good else "; frameworks that share memory through it need more")
    yield Check("/dev/shm", "PASS" if good else "WARN", reason)


def _profile() -> Iterator[Check]:
    """Whether times of this host come from measurements."""
    from plait.cost_models.profiles import default

    chosen, notes = default()
    for one in chosen:
        yield Check(f"profile {one.profile.device}", "PASS", one.said)
    for note in notes:
        yield Check("profile", "WARN", note)
    if not chosen and not notes:
        yield Check("profile", "WARN", "none: times on this host are assumed; plait profile measures it")


def _devices() -> Iterator[Check]:
    from plait.present import accelerators

    found = accelerators()
    if not found:
        yield Check("accelerators", "WARN", "none here: every slice for one is emulated on the host")
    for number, item in enumerate(found):
        yield Check(f"accelerator {number}", "PASS", f"{item.name} ({item.backend})")


def _backends() -> Iterator[Check]:
    from plait.errors import PlaitError
    from plait.registry import backend_names, load_backend

    targets = _sample_targets()
    for name in backend_names():
        try:
            backend = load_backend(name)
            if name not in targets:
                yield Check(f"backend {name}", "PASS", "loads; not in the catalogue, so not asked about a target")
                continue
            answer = backend.capability(targets[name])
        except PlaitError as error:
            yield Check(
                f"backend {name}", "WARN", "; ".join(part for part in (error.what, error.why, error.hint) if part)
            )
            continue
        except Exception as error:
            # The vendor's software lies underneath, and anything may be wrong with it.
            yield Check(f"backend {name}", "FAIL", f"{type(error).__name__}: {error}".replace("\n", " "))
            continue
        status: Status = "WARN" if answer.emulated and name != "null" else "PASS"
        yield Check(f"backend {name}", status, f"a slice for {targets[name]} runs on {answer.runs_on}")


def _sample_targets() -> dict[str, str]:
    """One target per backend: that of an accelerator that is here, else the first of the catalogue."""
    from plait.cost_models.catalogue import devices
    from plait.present import accelerators, matches

    found = accelerators()
    here = [entry for entry in devices() if any(matches(entry, item, devices()) for item in found)]
    targets = {"cpu": "cpu:cpu"}
    for entry in (*here, *devices()):
        if entry.status != "announced":
            targets.setdefault(entry.backend, f"{entry.backend}:{entry.arch}")
    targets["null"] = "null:" + targets["cuda"].partition(":")[2]
    return targets


def _self_test() -> Iterator[Check]:
    """A tiny random Llama, whole and cut in two: the same scores bit for bit. Without PyTorch, only that it runs."""
    from plait.assemble.tiny import write_tiny_llama
    from plait.registry import IN_TREE

    wheel = IN_TREE["cpu"].wheel
    computes = wheel is None or importlib.util.find_spec(wheel) is not None
    target = "cpu" if computes else "null:h100"
    with tempfile.TemporaryDirectory(prefix="plait-doctor-") as scratch:
        folder = Path(scratch)
        write_tiny_llama(folder / "tiny")
        whole, _ = _answer(folder, target, (2,))
        split, runs_on = _answer(folder, f"2x{target}", (1, 1))
    same = whole == split
    compared = "with the same scores as one" if same else "but with other scores than one: wrong numbers"
    reason = f"two slices on {runs_on} gave {counted(len(split[1]), 'token')}, {compared}"
    yield Check(
        "self-test",
        ("PASS" if computes else "WARN") if same else "FAIL",
        reason if computes else f"{reason}; nothing was computed",
    )


def _answer(folder: Path, target: str, layers: tuple[int, ...]) -> tuple[tuple[bytes, list[int]], str]:
    """(scores of a prompt, tokens after it) of the tiny model cut into `layers`, and where it ran."""
    from plait import api

    prompt = [1, 2, 3, 5, 8, 13]
    made = api.compile_artifact(folder / "tiny", target, output=folder / f"{len(layers)}.plait", layers=layers)
    with api.open(made.folder, in_process=True, threads=1) as pipe:
        scores, tokens = pipe.logits(prompt), pipe.generate_ids([prompt], max_tokens=8)[0]
        return (scores.tobytes(), tokens), " and ".join(dict.fromkeys(s.runs_on for s in pipe.manifest.slices))


_CHECKS: tuple[tuple[str, Callable[[], Iterator[Check]]], ...] = (
    ("python", _python),
    ("wheels", _wheels),
    ("tools", _tools),
    ("cache", _cache),
    ("host", _host),
    ("memfd", _shared_memory),
    ("profile", _profile),
    ("accelerators", _devices),
    ("backends", _backends),
    ("self-test", _self_test),
)
