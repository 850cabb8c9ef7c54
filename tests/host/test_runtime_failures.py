"""Workers that die, hang, lie or refuse: the error names them, comes in time, and nothing is left behind."""

from __future__ import annotations

import errno
import itertools
import os
import signal
import socket
import subprocess
import sys
import threading
import time
import venv
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import psutil
import pytest

from plait.errors import PlaitError, UnsupportedError, UsageError, UserError, WorkerError
from plait.runtime import workers
from plait.runtime.messages import Failure
from plait.runtime.pipeline import Pipeline
from plait.runtime.transport import Channel, Frame, frame, pack, socket_pair
from tests.fakes import EXIT, HANG, NAN, RAISE, REFUSE, SHORT, FakeExecutable, make_artifact, reference

WINDOWS = (None, 8, None)
PROMPT = [5, 6, 7, 8, 9]
ROOT = Path(__file__).resolve().parents[2]


def open_fake(folder: Path, artifact: dict[str, Any] | None = None, **options: Any) -> Pipeline:
    return Pipeline.open(make_artifact(folder, WINDOWS, **artifact or {}), folder, **options)


def names(folder: str) -> set[str]:
    return {path.name for path in Path(folder).iterdir()}


@pytest.fixture(autouse=True)
def nothing_left() -> Iterator[None]:
    """No process, file descriptor, thread or shared-memory file outlives a pipeline, however it ended."""
    fds, files = names("/proc/self/fd"), names("/dev/shm")
    yield
    assert not psutil.Process().children(recursive=True)
    assert names("/proc/self/fd") == fds
    assert names("/dev/shm") <= files
    assert not [thread for thread in threading.enumerate() if thread.name == "plait-engine"]


def pids(pipe: Pipeline) -> list[int]:
    return [part["executable"]["pid"] for part in pipe.stats()["slices"]]


@pytest.mark.parametrize("victim", [0, 1, 2])
@pytest.mark.parametrize("in_flight", [1, 3])
def test_a_killed_worker_ends_its_requests_within_a_second(tmp_path: Path, victim: int, in_flight: int) -> None:
    with open_fake(tmp_path, {"sleep_s": 0.01}, in_flight=in_flight) as pipe:
        targets = pids(pipe)
        requests = [pipe.submit(PROMPT, max_tokens=400) for _ in range(3)]
        assert next(iter(requests[0])) == reference(PROMPT, 1, WINDOWS)[0]
        os.kill(targets[victim], signal.SIGKILL)
        begun = time.monotonic()
        label = ("h100", "mi300", "v5e")[victim]
        for request in requests:
            with pytest.raises(WorkerError, match=rf"{label} \(slice {victim}\) was killed by SIGKILL"):
                request.result(5)
        assert time.monotonic() - begun < 1
        with pytest.raises(WorkerError) as caught:
            requests[0].result()
        assert "memory" in caught.value.hint
        assert not [pid for pid in targets if psutil.pid_exists(pid)]
        with pytest.raises(WorkerError, match="was killed by SIGKILL"):
            pipe.submit(PROMPT)
        assert len(pipe.stats()["slices"]) == 3


def test_a_worker_that_dies_while_idle_is_noticed(tmp_path: Path) -> None:
    with open_fake(tmp_path) as pipe:
        os.kill(pids(pipe)[1], signal.SIGKILL)
        deadline = time.monotonic() + 1
        while psutil.Process().children() and time.monotonic() < deadline:
            time.sleep(0.01)
        with pytest.raises(WorkerError, match=r"mi300 \(slice 1\) was killed by SIGKILL"):
            pipe.submit(PROMPT)


class Corpse:
    """Stands for a worker process that turns out to be dead after a while."""

    label, python = "mi300 (slice 1)", sys.executable

    def __init__(self, after_s: float) -> None:
        self.time, self.popen = time.monotonic() + after_s, self
        self.returncode = -9

    def ended(self) -> bool:
        return time.monotonic() > self.time

    def output(self) -> str:
        return ""

    def epitaph(self) -> str:
        return "was killed by SIGKILL"


def test_a_chain_that_fails_to_close_keeps_nobody_waiting(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def stuck(executable: FakeExecutable) -> None:
        raise ArithmeticError("the device does not let go")

    monkeypatch.setattr(FakeExecutable, "close", stuck)
    seen: list[type[BaseException] | None] = []
    monkeypatch.setattr(threading, "excepthook", lambda args: seen.append(args.exc_type))
    pipe = open_fake(tmp_path, {"faulty": 1}, in_process=True)
    request = pipe.submit([*PROMPT, RAISE])
    with pytest.raises(WorkerError, match="overflowed"):
        request.result(5)
    pipe.close()
    assert seen == [ArithmeticError]


@pytest.mark.parametrize("call", ["memfd_create", "pidfd_open"])
@pytest.mark.parametrize("good", range(3))
def test_file_descriptors_that_run_out_are_said_and_leave_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str, good: int
) -> None:
    real, calls = getattr(os, call), itertools.count()

    def run_out(*arguments: Any) -> Any:
        if next(calls) == good:
            raise OSError(errno.EMFILE, "Too many open files")
        return real(*arguments)

    monkeypatch.setattr(os, call, run_out)
    with pytest.raises(UserError, match="Too many open files") as caught:
        open_fake(tmp_path)
    assert "ulimit -n" in caught.value.hint


FORK = """
import os, sys
from pathlib import Path
from plait.errors import PlaitError
from tests.host.test_runtime_failures import PROMPT, WINDOWS, open_fake, reference

with open_fake(Path(sys.argv[1])) as pipe:
    child = os.fork()
    if not child:
        codes = []
        for use in (lambda: pipe.submit(PROMPT), lambda: pipe.stats(), pipe.close, pipe.close):
            try:
                use()
            except PlaitError as err:
                codes.append(err.code)
        os._exit(codes != ["forked", "forked"])
    assert os.waitpid(child, 0)[1] == 0
    assert pipe.generate_ids([PROMPT], max_tokens=3) == [reference(PROMPT, 3, WINDOWS)]
"""


def test_a_fork_cannot_use_the_pipeline_and_harms_it_not(tmp_path: Path) -> None:
    """In a process of its own: other tests load JAX, which does not like to be forked."""
    done = subprocess.run(
        [sys.executable, "-c", FORK, str(tmp_path)], cwd=ROOT, capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("code", ["peer-gone", "worker-failed"])
def test_the_cause_is_named_not_the_neighbour_who_complains_first(code: str) -> None:
    chain = workers.WorkerChain([], threads=None, timeout_s=1, debug=False)
    ours, theirs = socket_pair()
    chain._controls = [Channel(ours, "h100 (slice 0)")]
    chain._processes = [Corpse(60), Corpse(0.05)]  # type: ignore[list-item]
    with Channel(theirs, "driver") as neighbour:
        complaint = Failure("WorkerError", code, "h100 (slice 0): no answer", "", "")
        neighbour.send(Frame("error", meta=pack(complaint)))
        with pytest.raises(WorkerError, match="was killed" if code == "peer-gone" else "no answer"):
            chain._fail()
    chain._processes.clear()
    chain.close()


@pytest.mark.parametrize("in_process", [True, False])
@pytest.mark.parametrize(
    ("token", "kind", "said"),
    [
        (RAISE, WorkerError, r"mi300 \(slice 1\) failed while running step \d+: ArithmeticError: op plait.linear @up"),
        (REFUSE, UnsupportedError, r"mi300 \(slice 1\): op plait.rope is not implemented"),
        (SHORT, WorkerError, r"mi300 \(slice 1\) returned 'hidden' as float32 \[5, 4\].* \[6, 4\]"),
        (NAN, WorkerError, r"v5e \(slice 2\): the logits for position 6 hold a NaN or an infinity"),
    ],
)
def test_an_error_in_a_step_names_slice_and_op(
    tmp_path: Path, token: int, kind: type[PlaitError], said: str, in_process: bool
) -> None:
    with open_fake(tmp_path, {"faulty": 1}, in_process=in_process) as pipe:
        assert pipe.generate_ids([PROMPT], max_tokens=3) == [reference(PROMPT, 3, WINDOWS)]
        request = pipe.submit([*PROMPT, token])
        with pytest.raises(kind, match=said):
            request.result(10)
        with pytest.raises(kind, match=said):
            list(request)


def test_a_worker_that_exits_is_told_by_its_exit_code(tmp_path: Path) -> None:
    with (
        open_fake(tmp_path, {"faulty": 1}) as pipe,
        pytest.raises(WorkerError, match=r"mi300 \(slice 1\) ended with exit code 7"),
    ):
        pipe.generate_ids([[*PROMPT, EXIT]])


@pytest.mark.parametrize("faulty", [0, 2])
@pytest.mark.parametrize("share_workers", [True, False])
def test_a_hung_step_times_out_and_names_the_slice(
    tmp_path: Path, faulty: int, share_workers: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(workers, "_GRACE_S", 20.0)  # must not be waited for after a failure
    artifact = {"faulty": faulty, "environments": ("a", "a", "a")}
    with open_fake(tmp_path, artifact, timeout_s=0.5, share_workers=share_workers, in_flight=2) as pipe:
        begun = time.monotonic()
        with pytest.raises(WorkerError, match=rf"\(slice {faulty}\) did not answer in 0.5 s") as caught:
            pipe.generate_ids([[*PROMPT, HANG], PROMPT])
        assert caught.value.code == "peer-timeout"
        assert time.monotonic() - begun < 5


def test_a_stopped_process_times_out_too(tmp_path: Path) -> None:
    with open_fake(tmp_path, timeout_s=0.5) as pipe:
        os.kill(pids(pipe)[1], signal.SIGSTOP)
        with pytest.raises(WorkerError, match=r"mi300 \(slice 1\) did not answer in 0.5 s"):
            pipe.generate_ids([PROMPT])


def test_closing_while_a_step_hangs_does_not_hang(tmp_path: Path) -> None:
    pipe = open_fake(tmp_path, {"faulty": 1})
    request = pipe.submit([*PROMPT, HANG])
    time.sleep(0.2)
    begun = time.monotonic()
    pipe.close()
    assert time.monotonic() - begun < 5
    with pytest.raises(WorkerError, match="the pipeline was closed"):
        request.result(1)
    with pytest.raises(WorkerError, match="the pipeline was closed"):
        pipe.submit(PROMPT)
    pipe.close()
    request.cancel()
    assert [part["runs_on"] for part in pipe.stats()["slices"]] == ["h100 (fake)", "mi300 (fake)", "v5e (fake)"]


def test_a_forgotten_pipeline_ends_its_workers(tmp_path: Path) -> None:
    pipe = open_fake(tmp_path)
    processes = psutil.Process().children()
    assert len(processes) == 3
    del pipe
    assert not psutil.wait_procs(processes, 5)[1]


@pytest.mark.parametrize(
    ("device", "kind", "said"),
    [
        ("unloadable", UnsupportedError, r"unloadable \(slice 1\): the fake device says no"),
        ("small", UserError, r"small \(slice 1\): the weights do not fit \[does-not-fit\]\n  why: needed 3, free 2"),
        ("crash", WorkerError, r"crash \(slice 1\) failed while loading: ZeroDivisionError: crash on load"),
        ("sleepy", WorkerError, r"sleepy \(slice 1\) was not ready in 3 s"),
    ],
)
def test_a_slice_that_cannot_be_loaded_is_named(tmp_path: Path, device: str, kind: type[PlaitError], said: str) -> None:
    with pytest.raises(kind, match=said):
        open_fake(tmp_path, {"devices": ("h100", device, "v5e")}, start_timeout_s=3.0 if device == "sleepy" else 60.0)


def test_a_user_s_error_keeps_its_parts_on_the_way(tmp_path: Path) -> None:
    for in_process in (True, False):
        with pytest.raises(UnsupportedError) as caught:
            open_fake(tmp_path, {"devices": ("h100", "unloadable", "v5e")}, in_process=in_process)
        assert caught.value.to_dict() == {
            "code": "fake-refusal",
            "what": "unloadable (slice 1): the fake device says no",
            "why": "it always does",
            "try": "ask another",
        }
        assert caught.value.exit_code == 2


Change = Callable[[bytes], bytes]
Tamper = Callable[..., None]


@pytest.fixture
def tamper(nothing_left: None, monkeypatch: pytest.MonkeyPatch) -> Iterator[Tamper]:
    """Put a relay into connection `link` of the chain (1: from slice 0 to slice 1). It changes the third message."""
    relays: list[threading.Thread] = []

    def relay(into: socket.socket, out: socket.socket, change: Change) -> None:
        seen = 0
        with into, out:
            while data := into.recv(1 << 20):
                seen += 1
                out.send(change(data) if seen == 3 else data)

    def install(change: Change, link: int = 1) -> None:
        made = itertools.count()

        def pair() -> tuple[socket.socket, socket.socket]:
            if next(made) != link:
                return socket_pair()
            (near, into), (out, far) = socket_pair(), socket_pair()
            relays.append(threading.Thread(target=relay, args=(into, out, change)))
            relays[-1].start()
            return near, far

        monkeypatch.setattr(workers, "socket_pair", pair)

    yield install
    for thread in relays:
        thread.join(5)


def flip(data: bytes) -> bytes:
    """Change one bit of the boundary tensor."""
    message = frame.decode(data, len(data), "the sender")
    where = message.payload_start + next(i.offset for i in message.layout.items if i.name == "boundary/hidden")
    return data[:where] + bytes([data[where] ^ 1]) + data[where + 1 :]


def test_a_bit_that_flips_between_two_workers_is_found_and_named(tmp_path: Path, tamper: Tamper) -> None:
    tamper(flip)
    with (
        open_fake(tmp_path, debug=True) as pipe,
        pytest.raises(
            WorkerError, match=r"tensor 'boundary/hidden' from h100 \(slice 0\) changed on the way \(step 3\)"
        ) as caught,
    ):
        pipe.generate_ids([PROMPT])
    assert caught.value.code == "frame-digest"
    assert "mi300 (slice 1)" in caught.value.what


@pytest.mark.parametrize("change", [lambda data: data[:-64], lambda data: data + bytes(64)], ids=["short", "long"])
def test_a_frame_of_a_wrong_length_names_both_sizes(tmp_path: Path, tamper: Tamper, change: Change) -> None:
    tamper(change)
    with (
        open_fake(tmp_path) as pipe,
        pytest.raises(WorkerError, match=r"h100 \(slice 0\) sent a frame of \d+ bytes, but \d+ bytes came") as caught,
    ):
        pipe.generate_ids([PROMPT])
    assert caught.value.code == "frame-length"


def test_a_wrong_result_for_the_driver_names_the_last_slice(tmp_path: Path, tamper: Tamper) -> None:
    tamper(lambda data: data[:-64], link=3)
    with open_fake(tmp_path) as pipe, pytest.raises(WorkerError, match=r"v5e \(slice 2\) sent a frame of"):
        pipe.generate_ids([PROMPT])


SCRIPT = """
import sys, time
from pathlib import Path
from plait.runtime.pipeline import Pipeline
from tests.fakes import HANG, make_artifact

folder = Path(sys.argv[1])
pipe = Pipeline.open(make_artifact(folder, faulty=1), folder)
print(*(part["executable"]["pid"] for part in pipe.stats()["slices"]), flush=True)
"""


def run_script(folder: Path, rest: str) -> tuple[subprocess.Popen[str], list[int]]:
    process = subprocess.Popen(
        [sys.executable, "-W", "error", "-c", SCRIPT + rest, str(folder)],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        cwd=ROOT,
        start_new_session=True,
    )
    assert process.stdout is not None
    return process, [int(pid) for pid in process.stdout.readline().split()]


def alive(pid: int) -> bool:
    """Whether the process runs. An orphan that nobody has reaped yet does not."""
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def gone(targets: list[int], timeout_s: float) -> bool:
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline:
        if not any(map(alive, targets)):
            return True
        time.sleep(0.02)
    return False


def test_workers_die_with_a_killed_driver_even_inside_a_step(tmp_path: Path) -> None:
    process, targets = run_script(tmp_path, "pipe.submit([1, HANG])\ntime.sleep(60)")
    assert len(targets) == 3
    time.sleep(0.3)
    process.kill()
    process.communicate()
    assert gone(targets, 1)


@pytest.mark.parametrize("rest", ["", "print(pipe.generate_ids([[1]], max_tokens=2))", "sys.exit(0)"])
def test_a_driver_that_ends_without_closing_ends_cleanly(tmp_path: Path, rest: str) -> None:
    process, targets = run_script(tmp_path, rest)
    output, _ = process.communicate(timeout=20)
    assert (process.returncode, output.count("Traceback")) == (0, 0), output
    assert len(targets) == 3
    assert gone(targets, 1)


def test_ctrl_c_reaches_the_driver_alone(tmp_path: Path) -> None:
    rest = "try: pipe.submit([1, HANG]).result()\nexcept KeyboardInterrupt: print('stopped')"
    process, targets = run_script(tmp_path, rest)
    time.sleep(0.3)
    os.killpg(process.pid, signal.SIGINT)  # as a terminal does
    output, _ = process.communicate(timeout=20)
    assert (process.returncode, output) == (0, "stopped\n")
    assert gone(targets, 1)


def interpreter(folder: Path, *paths: Path | str, wheel: str | None = None) -> str:
    """A virtual environment of its own that sees `paths` and, where given, a wheel that no other interpreter has."""
    venv.create(folder, symlinks=True, with_pip=False)
    site = next(folder.glob("lib/python*/site-packages"))
    (site / "paths.pth").write_text("\n".join(map(str, paths)))
    if wheel:
        (site / "vendor_wheel.py").write_text(f"NAME = {wheel!r}\n")
    return str(folder / "bin/python")


def test_two_slices_run_in_two_interpreters_with_different_wheels(tmp_path: Path) -> None:
    shared = (ROOT, Path(np.__file__).parents[1], Path(msgspec.__file__).parents[1])
    pythons = {
        "h100": interpreter(tmp_path / "one", *shared, wheel="cuda build"),
        "b": interpreter(tmp_path / "two", *shared, wheel="rocm build"),
    }
    with open_fake(tmp_path / "model", pythons=pythons) as pipe:
        assert pipe.generate_ids([PROMPT], max_tokens=4) == [reference(PROMPT, 4, WINDOWS)]
        seen = [part["executable"]["vendor"] for part in pipe.stats()["slices"]]
    assert seen == ["cuda build", "rocm build", "none"]
    assert "vendor_wheel" not in sys.modules


def test_an_interpreter_without_plait_says_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", str(ROOT))  # this process's own paths are none of its business
    python = interpreter(tmp_path / "bare")
    with pytest.raises(WorkerError, match=r"mi300 \(slice 1\) ended with exit code 1") as caught:
        open_fake(tmp_path / "model", pythons={"mi300": python})
    assert "No module named 'plait'" in caught.value.why
    assert caught.value.hint == f"install this version of plait for {python}"


def test_an_interpreter_that_cannot_start_is_a_usage_error(tmp_path: Path) -> None:
    fake = tmp_path / "python"
    fake.write_text("no program\n")
    fake.chmod(0o755)
    with pytest.raises(UsageError, match=r"cannot start .* for mi300 \(slice 1\)"):
        open_fake(tmp_path / "model", pythons={"mi300": str(fake)})
