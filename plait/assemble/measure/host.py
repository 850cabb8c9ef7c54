"""What lies between slices on one machine: copies of host memory, frames between two processes."""

from __future__ import annotations

import os
import socket
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np

from plait.cost_models.profiles import Hop
from plait.errors import WorkerError
from plait.runtime.transport.channel import Channel, socket_pair
from plait.runtime.transport.frame import Frame

#: A decode step's boundary, and that of a full step of a large model.
SMALL_BYTES, LARGE_BYTES = 8 << 10, 16 << 20

_ANSWER_S = 30.0
_ECHO = "plait.assemble.measure.echo"


def copy_rate(nbytes: int = 256 << 20, repeats: int = 5, clock: Callable[[], float] = time.perf_counter) -> float:
    """Bytes per second of one copy of host memory by one thread, each byte read and written counted once."""
    source = np.ones(nbytes, np.uint8)
    target = np.zeros(nbytes, np.uint8)

    def once() -> float:
        start = clock()
        np.copyto(target, source)
        return clock() - start

    return nbytes / statistics.median(once() for _ in range(repeats))


def hops(repeats: int = 200) -> tuple[Hop, Hop]:
    """Frames to another process and back, as workers send them: through a channel, and through TCP on this host.

    Raises:
        WorkerError: the other process did not answer.
    """
    with _echo() as (channel, stream):
        return _through_channel(channel, repeats), _through_tcp(stream, repeats)


def _through_channel(channel: Channel, repeats: int) -> Hop:
    def once(nbytes: int) -> float:
        frame = Frame("step", tensors={"x": np.zeros(nbytes, np.uint8)})
        start = time.perf_counter()
        channel.send(frame)
        channel.recv()
        return time.perf_counter() - start

    return _hop(once, repeats)


def _through_tcp(stream: socket.socket, repeats: int) -> Hop:
    def once(nbytes: int) -> float:
        data = bytes(nbytes)
        start = time.perf_counter()
        stream.sendall(nbytes.to_bytes(8, "little"))
        stream.sendall(data)
        if stream.recv(1) != b"k":
            raise WorkerError("peer-gone", "the other process closed its socket")
        return time.perf_counter() - start

    return _hop(once, repeats)


def _hop(once: Callable[[int], float], repeats: int) -> Hop:
    """Half of a small message and its small answer; what a large one takes beyond that."""
    for nbytes in (SMALL_BYTES, LARGE_BYTES):
        once(nbytes)
    small = statistics.median(once(SMALL_BYTES) for _ in range(repeats))
    large = statistics.median(once(LARGE_BYTES) for _ in range(max(3, repeats // 20)))
    return Hop(small / 2, (LARGE_BYTES - SMALL_BYTES) / max(large - small, 1e-9))


@contextmanager
def _echo() -> Iterator[tuple[Channel, socket.socket]]:
    """Another process that answers every message, at the other ends of a channel and of a TCP connection."""
    mine, theirs = socket_pair()
    with socket.create_server(("127.0.0.1", 0)) as server:
        server.settimeout(_ANSWER_S)
        process = subprocess.Popen(
            [sys.executable, "-P", "-m", _ECHO, str(theirs.fileno()), str(server.getsockname()[1])],
            pass_fds=[theirs.fileno()],
            stdin=subprocess.DEVNULL,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(path or str(Path.cwd()) for path in sys.path)},
        )
        theirs.close()
        try:
            try:
                stream = server.accept()[0]
            except TimeoutError as err:
                raise WorkerError("peer-timeout", f"the other process did not connect in {_ANSWER_S:g} s") from err
            with stream, Channel(mine, "the other process", timeout_s=_ANSWER_S) as channel:
                stream.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                stream.settimeout(_ANSWER_S)
                yield channel, stream
        finally:
            process.kill()
            process.wait()
