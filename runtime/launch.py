"""Starting worker processes: command, environment, inherited file descriptors, and what is left of them at the end."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from plait.errors import UsageError, system_error

_TAIL_BYTES = 2000

_PYTHON_VARIABLES = ("PYTHONPATH", "PYTHONHOME", "PYTHONSTARTUP", "__PYVENV_LAUNCHER__", "VIRTUAL_ENV")
_THREAD_VARIABLES = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS")


@dataclass
class Process:
    """A started worker.

    Attributes:
        label: the slices it holds, for messages.
        pidfd: readable once the process has ended.
    """

    label: str
    python: str
    popen: subprocess.Popen[bytes]
    pidfd: int
    output_fd: int

    def ended(self, timeout_s: float = 0.0) -> bool:
        """Whether it has ended, waiting for at most `timeout_s`."""
        try:
            self.popen.wait(timeout_s)
        except subprocess.TimeoutExpired:
            return False
        return True

    def epitaph(self) -> str:
        """How it ended: `was killed by SIGKILL`, `ended with exit code 1`."""
        code = self.popen.returncode
        if code is None:
            return "closed its channel"
        return f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"

    def output(self) -> str:
        """The last lines it printed."""
        size = os.fstat(self.output_fd).st_size
        data = os.pread(self.output_fd, _TAIL_BYTES, max(size - _TAIL_BYTES, 0))
        return data.decode(errors="replace").strip()

    def kill(self) -> None:
        """End it now and take its exit code: no zombie, no open file descriptor stays. Idempotent."""
        if self.output_fd < 0:
            return
        self.popen.kill()
        self.popen.wait()
        os.close(self.pidfd)
        os.close(self.output_fd)
        self.pidfd = self.output_fd = -1


def start(
    label: str, python: str, control_fd: int, inherited: Sequence[int], *, threads: int | None, debug: bool
) -> Process:
    """Start a worker. Call it from a thread that outlives the worker: the kernel ends the worker with that thread.

    Args:
        python: the interpreter. This process's own one sees the same modules as this process; another one sees its own
            and must have plait installed.
        inherited: file descriptors that keep their numbers in the worker.
        threads: host threads for the numeric libraries; None leaves their defaults.
        debug: let the worker write to this process's stderr instead of keeping its last lines for an error.

    Raises:
        UsageError: `interpreter`, when it cannot be run.
        UserError: `system`, when the system has no process or file descriptor left.
    """
    output_fd = os.memfd_create("plait-output", os.MFD_CLOEXEC)
    try:
        popen = subprocess.Popen(
            [python, "-P", "-X", "faulthandler", "-m", "plait.runtime.worker", str(control_fd), str(os.getpid())],
            stdin=subprocess.DEVNULL,
            stdout=output_fd,
            stderr=None if debug else output_fd,
            pass_fds=[control_fd, *inherited],
            env=_environment(python, threads),
            process_group=0,  # Ctrl-C reaches the driver only, which then ends the workers
        )
    except OSError as err:
        os.close(output_fd)
        if not isinstance(err, FileNotFoundError | PermissionError) and (refused := system_error(err)):
            raise refused from err
        raise UsageError("interpreter", f"cannot start {python!r} for {label}", why=str(err)) from err
    try:
        pidfd = os.pidfd_open(popen.pid)
    except OSError:
        popen.kill()
        popen.wait()
        os.close(output_fd)
        raise
    return Process(label, python, popen, pidfd, output_fd)


def _environment(python: str, threads: int | None) -> dict[str, str]:
    environment = dict(os.environ)
    # Workers share the cores: a thread that spins while it waits takes them from the slice that has work.
    environment.setdefault("OMP_WAIT_POLICY", "passive")
    if threads is not None:
        environment |= dict.fromkeys(_THREAD_VARIABLES, str(threads))
    if python == sys.executable:
        environment["PYTHONPATH"] = os.pathsep.join(path or str(Path.cwd()) for path in sys.path)
    else:
        for name in _PYTHON_VARIABLES:
            environment.pop(name, None)
    return environment
