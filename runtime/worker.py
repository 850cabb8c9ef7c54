"""A worker: one process that holds a run of slices. Started by the driver as `python -m plait.runtime.worker FD PID`.

FD is the control channel to the driver, PID the driver's process. The worker loads its slices, says so, and then takes
frames from the worker before it and hands them to the worker after it. It ends when the channel before it closes, and
dies with the driver: the kernel kills it, whatever it is doing.

Nothing heavy is imported here: what a worker needs of torch or JAX, its backend imports.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import socket
import sys
import time

from plait.runtime import board as boards
from plait.runtime.messages import BOUNDARY, Failure, SliceInfo, StepInfo, WorkerSpec, batch_tensors, read_batch
from plait.runtime.stage import LOGITS, Stage
from plait.runtime.transport import Channel, Frame, PeerGoneError, pack

_PR_SET_PDEATHSIG = 1

_ORDERS_TIMEOUT_S = 60.0
"""How long a new worker waits for its orders. The driver sends them at once."""


def main(arguments: list[str]) -> int:
    """Run one worker; its exit code is 0 when the pipeline was closed, 1 when it failed (and told the driver why)."""
    control_fd, driver_pid = map(int, arguments)
    _die_with(driver_pid)
    control = Channel(socket.socket(fileno=control_fd), "the driver", timeout_s=_ORDERS_TIMEOUT_S)
    label = "a worker"
    try:
        spec = control.recv().unpack(WorkerSpec)
        label = " and ".join(part.label for part in spec.slices)
        _serve(spec, control)
    except Exception as err:
        failure = Failure.of(err, label, "serving")
        with contextlib.suppress(PeerGoneError):
            control.send(Frame("error", sender=label, meta=pack(failure)))
        return 1
    return 0


def _serve(spec: WorkerSpec, control: Channel) -> None:
    me = spec.slices[-1].label
    board = boards.view(spec.board_fd, spec.board_rows)
    os.close(spec.board_fd)
    into, onto = socket.socket(fileno=spec.upstream_fd), socket.socket(fileno=spec.downstream_fd)
    with (
        contextlib.closing(Stage(spec.slices, board)) as stage,
        Channel(into, spec.upstream, debug=spec.debug) as upstream,
        Channel(onto, spec.downstream, timeout_s=spec.timeout_s, debug=spec.debug) as downstream,
        contextlib.suppress(_ClosedError),
    ):
        control.send(Frame("ready", sender=me, meta=pack(stage.info())))
        while True:
            downstream.send(_answer(_next(upstream), stage, spec.last, me))


class _ClosedError(Exception):
    """The channel before this worker is closed: the pipeline ends."""


def _next(upstream: Channel) -> Frame:
    try:
        return upstream.recv()
    except PeerGoneError:
        raise _ClosedError from None


def _answer(frame: Frame, stage: Stage, last: bool, me: str) -> Frame:
    """The frame to send on for the frame that came."""
    if frame.kind == "stats":
        known = frame.unpack(list[SliceInfo])
        return Frame("stats", frame.step, me, meta=pack([*known, *stage.info()]))
    assert frame.kind == "step", frame.kind
    info = frame.unpack(StepInfo)
    batch, boundary = read_batch(frame.tensors)
    values = stage.run(frame.step, batch, boundary, info.sent_ns)
    if last:
        sampled = stage.sample(frame.step, values, info)
        tensors = {"tokens": sampled.tokens, LOGITS: sampled.logits}
        kind = "result"
    else:
        tensors = batch_tensors(batch) | {BOUNDARY + name: array for name, array in values.items()}
        kind = "step"
    onward = StepInfo(info.samples, info.keep_rows, time.monotonic_ns())
    return Frame(kind, frame.step, me, tensors, pack(onward))


def _die_with(driver_pid: int) -> None:
    """Have the kernel kill this process when the driver's thread that started it ends."""
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != driver_pid:
        sys.exit("the driver ended before its worker started")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
