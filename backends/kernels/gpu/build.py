"""Machine code from kernels, for any architecture, on any machine.

Triton works in processes of its own (`worker`), which this process starts with a clean environment and feeds: they use
every core, a crash of a compiler is an error and not the end of us, and nothing that is set outside (TRITON_...)
changes the code. Results go into the cache, so a second compile starts no process and needs no Triton import. The same
input gives the same bytes, in any process and any folder.
"""

from __future__ import annotations

import base64
import contextlib
import functools
import hashlib
import json
import os
import queue
import signal
import subprocess
import sys
import tempfile
import threading
import zlib
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Literal, Self

import msgspec

from plait.backends.kernels.gpu import loader
from plait.backends.kernels.gpu.archs import ARCHS, Arch
from plait.backends.kernels.gpu.cache import Cache, default_folder
from plait.backends.kernels.gpu.facts import Facts
from plait.backends.kernels.gpu.kernel import Kernel, Variant
from plait.errors import PlaitError, UnsupportedError, did_you_mean, system_error

#: Each process of Triton takes some 300 MB; more of them than this gain nothing on one slice.
MOST_WORKERS = 8

#: What steers Triton, LLVM and ptxas from outside.
_STEERING = ("TRITON_", "AMDGCN_", "LLVM_", "MLIR_", "NVPTX_", "PTXAS_", "DISABLE_", "ENABLE_", "USE_IR_LOC")

Progress = Callable[[int, int, str], None]
"""Called with how many are done, of how many, and what was just made."""


@dataclass(frozen=True)
class Binary:
    """What a compile makes.

    Attributes:
        symbol: name of the function in `code`.
        threads: of one block.
        shared_bytes: dynamic shared memory (LDS) to launch it with.
        assembly: PTX, or AMD's assembly.
    """

    code: bytes
    suffix: Literal["cubin", "hsaco"]
    symbol: str
    num_warps: int
    threads: int
    shared_bytes: int
    facts: Facts
    packed_assembly: bytes

    @property
    def assembly(self) -> str:
        return zlib.decompress(self.packed_assembly).decode()


@dataclass(frozen=True)
class Job:
    """A compile to be done. `arch` is a name of `ARCHS`."""

    kernel: Kernel
    variant: Variant
    arch: str

    @property
    def label(self) -> str:
        tile = self.variant.tile
        shape = "x".join(str(value) for name, value in tile.constants.items() if name.startswith("BLOCK"))
        return f"{self.variant.kernel} {shape} for {self.arch}".replace("  ", " ")

    @property
    def key(self) -> str:
        """What the cache files the result under: everything that the result depends on."""
        parts = [loader.require_triton(), _own_digest(), loader.source_digest(self.kernel.source), _plain(self)]
        return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()


class BuildError(PlaitError):
    """A kernel does not compile."""


def arch_named(name: str) -> Arch:
    """The architecture.

    Raises:
        UnsupportedError: `arch-unknown`.
    """
    if name not in ARCHS:
        why = "code is made for " + ", ".join(ARCHS)
        raise UnsupportedError(
            "arch-unknown", f"no GPU code is made for {name!r}", why=why, hint=did_you_mean(name, ARCHS)
        )
    return ARCHS[name]


def compile_variant(kernel: Kernel, variant: Variant, arch: str, cache: Cache | None = None) -> Binary:
    """One binary, from the cache or made now.

    Raises:
        MissingDependencyError: `triton-missing`.
        UnsupportedError: `arch-unknown`.
        BuildError: `kernel-compile`, `compiler-died`.
        UserError: `cache-unwritable`, `cache-unreadable`.
    """
    (outcome,) = compile_many([Job(kernel, variant, arch)], cache=cache)
    if isinstance(outcome, BuildError):
        raise outcome
    return outcome


def compile_many(
    jobs: Sequence[Job], *, cache: Cache | None = None, workers: int | None = None, progress: Progress | None = None
) -> list[Binary | BuildError]:
    """Binaries in the order of the jobs; the error in place of what does not compile. Equal jobs are done once.

    Args:
        workers: processes to work with; by default as many as this process has cores, and no more than 8.
    """
    cache = cache or Cache(default_folder())
    for arch in {job.arch for job in jobs}:
        arch_named(arch)
    keys = [job.key for job in jobs]
    found: dict[str, Binary | BuildError] = {}
    for key in set(keys):
        if (payload := cache.get(key)) is not None:
            found[key] = unpack(payload)
    missing = {key: job for key, job in zip(keys, jobs, strict=True) if key not in found}
    if missing:
        found |= _make(missing, cache, min(len(missing), workers or min(_cores(), MOST_WORKERS)), progress)
        cache.trim()
    return [found[key] for key in keys]


def pack(binary: Binary) -> bytes:
    return msgspec.msgpack.encode(binary)


def unpack(payload: bytes) -> Binary:
    return msgspec.msgpack.decode(payload, type=Binary)


def _make(
    missing: Mapping[str, Job], cache: Cache, workers: int, progress: Progress | None
) -> dict[str, Binary | BuildError]:
    """Compile and keep. What ends it early (Ctrl-C, a full disk) ends the processes, and leaves nothing but whole
    entries."""
    waiting: queue.SimpleQueue[tuple[str, Job]] = queue.SimpleQueue()
    for item in missing.items():
        waiting.put(item)
    made: dict[str, Binary | BuildError] = {}
    lock = threading.Lock()

    def serve(worker: _Worker) -> None:
        with worker:
            while True:
                try:
                    key, job = waiting.get_nowait()
                except queue.Empty:
                    return
                outcome = worker.make(job)
                if isinstance(outcome, Binary):
                    cache.put(key, pack(outcome))
                with lock:
                    made[key] = outcome
                    if progress:
                        progress(len(made), len(missing), job.label)

    with tempfile.TemporaryDirectory(prefix="plait-") as scratch, ThreadPoolExecutor(workers) as pool:
        working = [_Worker(Path(scratch)) for _ in range(workers)]
        try:
            for served in as_completed([pool.submit(serve, worker) for worker in working]):
                served.result()
        except BaseException:
            with contextlib.suppress(queue.Empty):
                while True:
                    waiting.get_nowait()
            for worker in working:
                worker.kill()
            raise
    return made


class _Worker:
    """A process that runs `plait.backends.kernels.gpu.worker`. Started when first needed, and again if it died."""

    def __init__(self, scratch: Path) -> None:
        self._scratch = scratch
        self._popen: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._end()

    def make(self, job: Job) -> Binary | BuildError:
        popen = self._popen = self._popen or self._start()
        assert popen.stdin is not None and popen.stdout is not None
        try:
            popen.stdin.write(json.dumps(_plain(job)).encode() + b"\n")
            popen.stdin.flush()
        except BrokenPipeError:
            pass
        answer = popen.stdout.readline()
        if not answer.endswith(b"\n"):
            return self._died(job)
        fields = json.loads(answer)
        return BuildError(**fields["error"]) if fields["error"] else unpack(base64.b64decode(fields["made"]))

    def kill(self) -> None:
        """At once, with what it has started (ptxas)."""
        popen = self._popen
        if popen is not None and popen.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(popen.pid, signal.SIGKILL)

    def _start(self) -> subprocess.Popen[bytes]:
        environment = {name: value for name, value in os.environ.items() if not name.startswith(_STEERING)}
        environment["PYTHONPATH"] = os.pathsep.join(path or str(Path.cwd()) for path in sys.path)
        environment["TMPDIR"] = str(self._scratch)
        try:
            return subprocess.Popen(
                [sys.executable, "-P", "-m", "plait.backends.kernels.gpu.worker"],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                env=environment,
                process_group=0,  # Ctrl-C is for us: we end it
            )
        except OSError as error:
            raise system_error(error) or error from error

    def _died(self, job: Job) -> BuildError:
        status = self._end()
        why = signal.strsignal(-status) if status < 0 else f"exit status {status}"
        return BuildError("compiler-died", f"the compiler of {job.label} died", why=why or f"signal {-status}")

    def _end(self) -> int:
        popen, self._popen = self._popen, None
        if popen is None:
            return 0
        assert popen.stdin is not None and popen.stdout is not None
        with contextlib.suppress(BrokenPipeError):
            popen.stdin.close()  # at the end of its input it exits
        status = popen.wait()
        popen.stdout.close()
        return status


def job_from(plain: Mapping[str, object]) -> Job:
    """The inverse of what is sent to a worker."""
    return msgspec.convert(plain, Job)


def _plain(job: Job) -> dict[str, object]:
    """As JSON can hold it, the same for equal jobs."""
    plain = msgspec.to_builtins(job)
    for name in ("aligned", "small"):
        plain["variant"][name] = sorted(plain["variant"][name])
    return plain  # type: ignore[no-any-return]


def _cores() -> int:
    return len(os.sched_getaffinity(0))


@functools.cache
def _own_digest() -> str:
    """Of the files that decide what is made of a job: a change in one of them starts the cache anew."""
    names = ("archs.py", "build.py", "facts.py", "kernel.py", "worker.py")
    return hashlib.sha256(b"\0".join((Path(__file__).parent / name).read_bytes() for name in names)).hexdigest()
