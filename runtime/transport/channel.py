"""Channels: frames between two processes of one machine.

A channel is one end of a unix socket pair. Small frames travel in one socket message. The payload of a large frame is
copied once, into a slot of shared memory that the sender made, and the socket message is the doorbell: the receiver's
tensors are views of that slot. The receiver gives the slot back with a note at its next `recv`, and the sender writes
a slot again only after that: with `SLOTS` slots this is the back-pressure.

Slots are memfds: they have no name, so a killed process leaves nothing behind. A slot's file descriptor is passed once
(SCM_RIGHTS), and again only when a larger payload makes the sender replace it. A note announces it, so that all other
messages can be received by a plain `recv`, which is faster than one that looks for file descriptors.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import socket
import struct
from collections import deque
from typing import Any, Self

from plait.errors import WorkerError
from plait.runtime.transport.frame import INLINE, Frame, decode, prepare

INLINE_BYTES = 64 << 10
"""Payloads up to this go through the socket. Below it the two copies through the kernel cost less than the note that
gives a slot back; it also leaves room for several messages in the default 208 KiB of a socket buffer."""

SLOTS = 4
"""Large payloads under way at once: one being read, one waiting, and as many for steps in flight on the other side."""

_MESSAGE_BYTES = INLINE_BYTES + (64 << 10)
"""The receive buffer: an inline payload and the largest header (about a thousand tensors)."""

_SLOT_BYTES = 1 << 20
"""Smallest slot. Sizes double from here; pages that are never written cost nothing."""

_NOTE = struct.Struct("<4sH")  # what, slot
_RELEASED = b"PLok"
_NEW_SLOT = b"PLfd"  # the next message carries its file descriptor

# Plain ints: arithmetic on the enum members of the socket module costs a microsecond each. With MSG_TRUNC the kernel
# tells the length of a message also when it did not fit.
_WAIT = int(socket.MSG_TRUNC)
_NOWAIT = int(socket.MSG_TRUNC | socket.MSG_DONTWAIT)


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
        self._stash: deque[bytearray] = deque()
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
        out.write(self._fitting(slot, out.payload_bytes))
        self._send(out.head(slot))

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
        if self._to_release is not None:
            self._release(self._to_release)
        if self._stash:
            buffer = self._stash.popleft()
            return self._open(buffer, len(buffer))
        while size := self._receive(flags):
            if size != _NOTE.size or not self._take_note():
                return self._open(self._inbox, size)
        return None

    def _open(self, buffer: Any, size: int) -> Frame:
        message = decode(buffer, size, self.peer)
        if message.slot == INLINE:
            return message.frame(buffer, message.payload_start)
        region = self._received_slots.get(message.slot)
        held = 0 if region is None else len(region)
        if region is None or held < message.payload_bytes:
            raise WorkerError(
                "frame-length",
                f"{self.peer} announced a payload of {message.payload_bytes} bytes in slot {message.slot}, "
                f"whose shared memory holds {held} bytes",
            )
        self._to_release = message.slot
        return message.frame(region, 0)

    def _take_slot(self) -> int:
        """A slot that the receiver is done with: the one used last, which is still in the caches."""
        while True:
            size = self._receive(_NOWAIT if self._free else _WAIT)
            if not size:
                return self._free.pop()
            if size != _NOTE.size or not self._take_note():
                self._stash.append(bytearray(self._inbox[:size]))

    def _fitting(self, slot: int, nbytes: int) -> mmap.mmap:
        """The slot's shared memory, made anew where it is too small."""
        region = self._sent_slots[slot]
        if region is not None and len(region) >= nbytes:
            return region
        size = max(_SLOT_BYTES, 1 << (nbytes - 1).bit_length())
        fd = os.memfd_create("plait-slot", os.MFD_CLOEXEC)
        try:
            os.ftruncate(fd, size)
            self._send(_NOTE.pack(_NEW_SLOT, slot))
            self._send(b"fd", fd)
            self._sent_slots[slot] = made = mmap.mmap(fd, size)
        finally:
            os.close(fd)
        if region is not None:
            region.close()
        return made

    def _release(self, slot: int) -> None:
        self._to_release = None
        # A sender that has ended does not want its slot back; what it sent before can still be read.
        with contextlib.suppress(PeerGoneError):
            self._send(_NOTE.pack(_RELEASED, slot))

    def _take_note(self) -> bool:
        """Whether the message in the inbox is a note; if so, act on it."""
        what, slot = _NOTE.unpack_from(self._inbox)
        if what == _RELEASED:
            if slot >= SLOTS or slot in self._free:
                raise WorkerError("frame-slot", f"{self.peer} gave back slot {slot}, which it did not hold")
            self._free.append(slot)
        elif what == _NEW_SLOT:
            self._map(slot)
        return what in (_RELEASED, _NEW_SLOT)

    def _map(self, slot: int) -> None:
        try:
            _, fds, _, _ = socket.recv_fds(self._sock, 16, 1, socket.MSG_CMSG_CLOEXEC)
        except BlockingIOError as err:
            raise self._timeout("did not send a slot") from err
        except ConnectionResetError as err:
            raise self._gone() from err
        for fd in fds:
            self._received_slots[slot] = mmap.mmap(fd, os.fstat(fd).st_size)
            os.close(fd)

    def _send(self, message: bytes, fd: int | None = None) -> None:
        try:
            if fd is None:
                self._sock.send(message)
            else:
                socket.send_fds(self._sock, [message], [fd])
        except BlockingIOError as err:
            raise self._timeout("did not take a message") from err
        except (BrokenPipeError, ConnectionResetError) as err:
            raise self._gone() from err

    def _receive(self, flags: int) -> int:
        """Put the next message into the inbox; its size. 0: there is none yet."""
        try:
            size = self._sock.recv_into(self._inbox, 0, flags)
        except BlockingIOError as err:
            if flags == _NOWAIT:
                return 0
            raise self._timeout("did not answer") from err
        except ConnectionResetError as err:
            raise self._gone() from err
        if size == 0:
            raise self._gone()
        if size > _MESSAGE_BYTES:
            raise WorkerError(
                "frame-length", f"{self.peer} sent a message of {size} bytes, the largest has {_MESSAGE_BYTES} bytes"
            )
        return size

    def _timeout(self, what: str) -> WorkerError:
        return WorkerError("peer-timeout", f"{self.peer} {what} in {self.timeout_s:g} s")

    def _gone(self) -> PeerGoneError:
        return PeerGoneError("peer-gone", f"{self.peer} ended")
