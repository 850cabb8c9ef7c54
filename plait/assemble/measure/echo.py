"""The other process of `host.hops`: answers every frame of a channel and every message of a TCP connection."""

from __future__ import annotations

import contextlib
import socket
import sys
import threading

from plait.runtime.transport.channel import Channel, PeerGoneError
from plait.runtime.transport.frame import Frame

_CHUNK = 1 << 20


def main(fd: int, port: int) -> None:
    """Until the other side closes the channel.

    Args:
        fd: this end of the channel. port: where to connect to.
    """
    threading.Thread(target=_tcp, args=(port,), daemon=True).start()
    with Channel(socket.socket(fileno=fd), "plait profile") as channel, contextlib.suppress(PeerGoneError):
        while True:
            channel.recv()
            channel.send(Frame("result"))


def _tcp(port: int) -> None:
    """A message is its length in 8 bytes and itself; the answer is one byte."""
    stream = socket.create_connection(("127.0.0.1", port))
    stream.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    buffer = memoryview(bytearray(_CHUNK))
    while head := stream.recv(8, socket.MSG_WAITALL):
        left = int.from_bytes(head, "little")
        while left:
            left -= stream.recv_into(buffer, min(left, _CHUNK))
        stream.sendall(b"k")


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]))
