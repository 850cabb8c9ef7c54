"""Channels: frames between two processes of one machine.

A channel is one end of a unix socket pair. Small frames travel in one socket message. The payload of a large frame is
copied once, into a slot of shared memory that the sender made, and the socket message is the doorbell: the receiver's
tensors are views of that slot. The receiver gives the slot back with a note at its next `recv`, and the sender writes
a slot again only after that: with `SLOTS` slots this is the back-pressure.

Slots are memfds: they have no name, so a killed process leaves nothing behind. A slot's file descriptor is passed once
(SCM_RIGHTS) and again only when a larger payload makes the sender replace it.
"""

from __future__ import annotations

import array
import contextlib
import mmap
import os
import socket
import struct
from collections import deque
from collections.abc import Sequence
from typing import Any, Self

from plait.errors import WorkerError
from plait.runtime.transport.frame import INLINE, Frame, Incoming, decode, prepare

INLINE_BYTES = 64 << 10
"""Payloads up to this go through the socket. Below it the two copies through the kernel cost less than the note that
gives a slot back; it also leaves room for several messages in the default 208 KiB of a socket buffer."""

SLOTS = 4
"""Large payloads under way at once: one being read, one waiting, and as many for steps in flight on the other side."""

_MESSAGE_BYTES = INLINE_BYTES + (64 << 10)
"""The receive buffer: an inline payload and the largest header (about a thousand tensors)."""

_SLOT_BYTES = 1 << 20
"""Smallest slot. Sizes double from here; pages that are never written cost nothing."""

_RELEASE = struct.Struct("<4sH")
_RELEASE_MAGIC = b"PLok"
_FD_BYTES = array.array("i", [0]).itemsize
_FD_SPACE = socket.CMSG_SPACE(_FD_BYTES)
# Plain ints: arithmetic on the enum members of the socket module costs a microsecond each.
_WAIT = int(socket.MSG_CMSG_CLOEXEC)
_NOWAIT = int(socket.MSG_CMSG_CLOEXEC | socket.MSG_DONTWAIT)
_TRUNCATED = int(socket.MSG_TRUNC)


class PeerGoneError(WorkerError):
    """The other end of the channel is closed: its process ended or died."""


def socket_pair() -> tuple[socket.socket, socket.socket]:
    """Two connected sockets that keep message borders. Neither is inherited by a child unless passed on purpose."""
    return socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)


class Channel:
    """One end. Frames go both ways; one thread uses it at a time.

    Args:
        sock: an end of `socket_pair`; the channel owns it from now on.
        peer: name of the other side in every error, e.g. `h100 (slice 0)`.
        timeout_s: how long `recv` and `send` wait for the peer; None waits for ever.
        debug: put a digest of every tensor into the frames sent. A frame that has digests is always checked.
    """

    def __init__(self, sock: socket.socket, peer: str, *, timeout_s: float | None = None, debug: bool = False) -> None:
        self.peer, self.timeout_s, self._debug, self._sock = peer, timeout_s, debug, sock
        seconds = timeout_s or 0.0
        timeval = struct.pack("ll", int(seconds), int(seconds % 1 * 1e6))
        sock.setblocking(True)
        for option in (socket.SO_RCVTIMEO, socket.SO_SNDTIMEO):
            sock.setsockopt(socket.SOL_SOCKET, option, timeval)
        self._inbox = mmap.mmap(-1, _MESSAGE_BYTES)
        self._stash: deque[tuple[bytearray, list[int]]] = deque()
        self._sent_slots: list[mmap.mmap | None] = [None] * SLOTS
        self._free = list(range(SLOTS))
        self._received_slots: dict[int, mmap.mmap] = {}
        self._to_release: int | None = None

    def fileno(self) -> int:
        """For `select`: readable when a frame, a note or the end of the peer is there."""
        return self._sock.fileno()

    def send(self, frame: Frame) -> None:
        """Send one frame; its tensors may be changed as soon as this returns.

        Raises:
            PeerGoneError: the peer ended.
            WorkerError: `peer-timeout`, naming the peer; `frame-dtype`.
        """
        out = prepare(frame, self._debug)
        if out.payload_bytes <= INLINE_BYTES:
            self._send(out.inline())
            return
        slot = self._take_slot()
        fds = self._fit_slot(slot, out.payload_bytes)
        out.write(self._sent_slots[slot])
        try:
            self._send(out.head(slot), fds)
        finally:
            for fd in fds:
                os.close(fd)

    def recv(self) -> Frame:
        """The next frame, waiting for it. Its tensors stay valid until the next `recv` or `try_recv`.

        Raises:
            PeerGoneError: the peer ended.
            WorkerError: `peer-timeout`, naming the peer; any `frame-*` error.
        """
        frame = self._next(_WAIT)
        assert frame is not None
        return frame

    def try_recv(self) -> Frame | None:
        """Like `recv`, but None where no frame is there yet."""
        return self._next(_NOWAIT)

    def close(self) -> None:
        """Close the socket and let go of the shared memory. Idempotent."""
        self._sock.close()
        for _, fds in self._stash:
            for fd in fds:
                os.close(fd)
        self._stash.clear()
        for region in (self._inbox, *self._sent_slots, *self._received_slots.values()):
            # A tensor that still looks at a region keeps it mapped; it goes when the tensor goes.
            with contextlib.suppress(BufferError):
                if region is not None:
                    region.close()
        self._sent_slots = [None] * SLOTS
        self._received_slots.clear()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _next(self, flags: int) -> Frame | None:
        self._release()
        while True:
            if self._stash:
                buffer, fds = self._stash.popleft()
                return self._open(buffer, len(buffer), fds)
            size, fds = self._receive(flags)
            if size == 0:
                return None
            if not self._note(size):
                return self._open(self._inbox, size, fds)

    def _open(self, buffer: Any, size: int, fds: list[int]) -> Frame:
        message = decode(buffer, size, self.peer)
        if message.slot == INLINE:
            return message.frame(buffer, message.payload_start)
        region = self._map(message, fds)
        self._to_release = message.slot
        return message.frame(region, 0)

    def _map(self, message: Incoming, fds: list[int]) -> mmap.mmap:
        """The shared memory of the message's slot; a file descriptor that came along replaces it."""
        for fd in fds:
            self._received_slots[message.slot] = mmap.mmap(fd, os.fstat(fd).st_size)
            os.close(fd)
        region = self._received_slots.get(message.slot)
        size = 0 if region is None else len(region)
        if region is None or size < message.payload_bytes:
            raise WorkerError(
                "frame-length",
                f"{self.peer} announced a payload of {message.payload_bytes} bytes in slot {message.slot}, "
                f"whose shared memory holds {size} bytes",
            )
        return region

    def _take_slot(self) -> int:
        """A slot that the receiver is done with: the one used last, which is still in the caches."""
        flags = _NOWAIT
        while True:
            size, fds = self._receive(flags)
            if size and not self._note(size):
                self._stash.append((bytearray(self._inbox[:size]), fds))
            elif not size and self._free:
                return self._free.pop()
            flags = _NOWAIT if self._free else _WAIT

    def _fit_slot(self, slot: int, nbytes: int) -> list[int]:
        """Make the slot large enough. A new one comes with its file descriptor, to be passed on and closed."""
        region = self._sent_slots[slot]
        if region is not None and len(region) >= nbytes:
            return []
        size = max(_SLOT_BYTES, 1 << (nbytes - 1).bit_length())
        fd = os.memfd_create("plait-slot", os.MFD_CLOEXEC)
        os.ftruncate(fd, size)
        self._sent_slots[slot] = mmap.mmap(fd, size)
        if region is not None:
            region.close()
        return [fd]

    def _release(self) -> None:
        if self._to_release is None:
            return
        slot, self._to_release = self._to_release, None
        # A sender that has ended does not want its slot back; what it sent before can still be read.
        with contextlib.suppress(PeerGoneError):
            self._send(_RELEASE.pack(_RELEASE_MAGIC, slot))

    def _note(self, size: int) -> bool:
        """Whether the message in the inbox gives a slot back; if so, take it."""
        if size != _RELEASE.size or self._inbox[:4] != _RELEASE_MAGIC:
            return False
        slot = _RELEASE.unpack_from(self._inbox)[1]
        if slot >= SLOTS or slot in self._free:
            raise WorkerError("frame-slot", f"{self.peer} gave back slot {slot}, which it did not hold")
        self._free.append(slot)
        return True

    def _send(self, message: bytes, fds: Sequence[int] = ()) -> None:
        try:
            if fds:
                socket.send_fds(self._sock, [message], list(fds))
            else:
                self._sock.send(message)
        except BlockingIOError as err:
            raise self._timeout("did not take a message") from err
        except (BrokenPipeError, ConnectionResetError) as err:
            raise self._gone() from err

    def _receive(self, flags: int) -> tuple[int, list[int]]:
        """Put the next message into the inbox: its size and the file descriptors with it. (0, []): none yet."""
        try:
            size, ancillary, seen, _ = self._sock.recvmsg_into((self._inbox,), _FD_SPACE, flags)
        except BlockingIOError as err:
            if flags == _NOWAIT:
                return 0, []
            raise self._timeout("did not answer") from err
        except ConnectionResetError as err:
            raise self._gone() from err
        if size == 0:
            raise self._gone()
        if seen & _TRUNCATED:
            raise WorkerError("frame-length", f"{self.peer} sent a message of more than {_MESSAGE_BYTES} bytes")
        if not ancillary:
            return size, []
        fds = array.array("i")
        for _, _, data in ancillary:
            fds.frombytes(data[: len(data) - len(data) % _FD_BYTES])
        return size, list(fds)

    def _timeout(self, what: str) -> WorkerError:
        return WorkerError("peer-timeout", f"{self.peer} {what} in {self.timeout_s:g} s")

    def _gone(self) -> PeerGoneError:
        return PeerGoneError("peer-gone", f"{self.peer} ended")
