"""Frames and channels: what goes in comes out, and what is wrong is named."""

from __future__ import annotations

import os
import socket
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest

from plait.errors import WorkerError
from plait.runtime.transport import DTYPES, INLINE_BYTES, SLOTS, Channel, Frame, PeerGoneError, pack, socket_pair
from plait.runtime.transport import frame as frames

Pair = tuple[Channel, Channel]
LARGE = INLINE_BYTES * 3


@pytest.fixture
def pair() -> Iterator[Pair]:
    a, b = socket_pair()
    with Channel(a, "mi300 (slice 1)", timeout_s=5) as one, Channel(b, "h100 (slice 0)", timeout_s=5) as two:
        yield one, two


def every_dtype(count: int) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(0)
    raw = rng.integers(0, 2, (count, 8), np.uint8)
    return {name: raw[:, : dtype.itemsize].copy().view(dtype) for name, dtype in DTYPES.items()}


@pytest.mark.parametrize("count", [0, 1, 33, 20_000], ids=["empty", "one", "inline", "shared"])
@pytest.mark.parametrize("debug", [False, True])
def test_every_dtype_arrives_bit_for_bit(count: int, debug: bool) -> None:
    a, b = socket_pair()
    with Channel(a, "two", debug=debug) as one, Channel(b, "one") as two:
        sent = every_dtype(count)
        one.send(Frame("step", 7, "one", sent, pack({"note": [1, None, "x"]})))
        got = two.recv()
        assert (got.kind, got.step, got.sender) == ("step", 7, "one")
        assert got.unpack(dict) == {"note": [1, None, "x"]}
        assert list(got.tensors) == list(sent)
        for name, array in sent.items():
            assert got.tensors[name].dtype == array.dtype
            assert got.tensors[name].shape == array.shape
            assert got.tensors[name].tobytes() == array.tobytes()


@pytest.mark.parametrize("size", [64, 4 * LARGE])
def test_odd_shapes_and_strides(pair: Pair, size: int) -> None:
    one, two = pair
    base = np.arange(size, dtype=np.float32)
    sent = {
        "scalar": np.array(3.5),
        "transposed": base.reshape(8, -1).T,
        "stepped": base[::-2],
        "empty": np.zeros((0, 5), ml_dtypes.bfloat16),
    }
    one.send(Frame("step", tensors=sent))
    got = two.recv().tensors
    for name, array in sent.items():
        np.testing.assert_array_equal(got[name], array)
        assert got[name].flags.aligned


def test_large_frames_in_a_row_are_not_overwritten(pair: Pair) -> None:
    one, two = pair
    total = 5 * SLOTS

    def produce() -> None:
        for i in range(total):
            one.send(Frame("step", i, tensors={"x": np.full(LARGE, i, np.uint8)}))

    producer = threading.Thread(target=produce)
    producer.start()
    for i in range(total):
        frame = two.recv()
        time.sleep(0.002 if i % 3 else 0.02)  # a slow reader: the producer runs into its last slot
        assert frame.step == i
        assert (frame.tensors["x"] == i).all()
    producer.join()


def test_a_sender_waits_for_a_slot_and_names_the_peer() -> None:
    a, b = socket_pair()
    with Channel(a, "mi300 (slice 1)", timeout_s=0.2) as one, Channel(b, "h100 (slice 0)"):
        frame = Frame("step", tensors={"x": np.zeros(LARGE, np.uint8)})
        for _ in range(SLOTS):
            one.send(frame)
        with pytest.raises(WorkerError, match=r"mi300 \(slice 1\) did not answer in 0.2 s") as caught:
            one.send(frame)
        assert caught.value.code == "peer-timeout"


def test_slots_grow_and_a_view_of_an_old_one_stays_valid(pair: Pair) -> None:
    one, two = pair
    one.send(Frame("step", tensors={"x": np.full(LARGE, 1, np.uint8)}))
    old = two.recv().tensors["x"]
    for i, size in enumerate((LARGE, 2 << 20, 9 << 20), start=2):
        one.send(Frame("step", tensors={"x": np.full(size, i, np.uint8)}))
        assert (two.recv().tensors["x"] == i).all()
    assert len(old) == LARGE


def test_both_ways_at_once(pair: Pair) -> None:
    one, two = pair
    data = np.arange(LARGE, dtype=np.int32)
    for i in range(2 * SLOTS):
        one.send(Frame("there", i, tensors={"x": data + i}))
        two.send(Frame("back", i, tensors={"x": data - i}))  # finds `there` while it looks for a free slot
        np.testing.assert_array_equal(two.recv().tensors["x"], data + i)
        np.testing.assert_array_equal(one.recv().tensors["x"], data - i)


def test_a_silent_peer_is_named_in_time() -> None:
    a, b = socket_pair()
    with Channel(a, "h100 (slice 0)", timeout_s=0.1) as one, Channel(b, "x"):
        begun = time.monotonic()
        with pytest.raises(WorkerError, match=r"h100 \(slice 0\) did not answer in 0.1 s"):
            one.recv()
        assert time.monotonic() - begun < 2
        assert one.try_recv() is None


def test_what_was_sent_before_the_end_still_arrives() -> None:
    a, b = socket_pair()
    with Channel(a, "h100 (slice 0)") as one:
        with Channel(b, "x") as two:
            two.send(Frame("step", 1, tensors={"x": np.ones(LARGE, np.uint8)}))
            two.send(Frame("step", 2))
        assert one.recv().tensors["x"].all()
        assert one.recv().step == 2
        with pytest.raises(PeerGoneError, match=r"h100 \(slice 0\) ended"):
            one.recv()
        with pytest.raises(PeerGoneError, match=r"h100 \(slice 0\) ended"):
            one.send(Frame("step", 3))


def message(debug: bool = False) -> bytearray:
    tensors = {"x": np.arange(10, dtype=np.float32), "y": np.arange(3, dtype=np.int8)}
    return bytearray(frames.prepare(Frame("step", 4, "s", tensors, b"meta"), debug).inline())


def received(data: bytes) -> Frame:
    a, b = socket_pair()
    with a, Channel(b, "h100 (slice 0)") as channel:
        a.send(data)
        return channel.recv()


@pytest.mark.parametrize("change", [-64, -1, 1, 64])
def test_a_wrong_length_names_both_sizes(change: int) -> None:
    data = message()
    wrong = data[:change] if change < 0 else data + bytes(change)
    with pytest.raises(WorkerError) as caught:
        received(wrong)
    assert caught.value.code == "frame-length"
    assert "h100 (slice 0)" in caught.value.what
    assert f"{len(data)} bytes" in caught.value.what
    assert f"{len(wrong)} bytes came" in caught.value.what


def test_a_shape_that_contradicts_its_bytes_names_both_sizes() -> None:
    data = bytes(message()).replace(b"\x91\x0a\x28", b"\x91\x0b\x28")  # msgpack: shape [10], 40 bytes -> shape [11]
    with pytest.raises(WorkerError, match=r"tensor 'x' \(float32 \[11\]\) of 44 bytes, but 40 bytes came"):
        received(data)


def test_a_payload_that_is_not_the_sum_of_its_tensors_names_both_sizes() -> None:
    data = message()
    (payload,) = struct.unpack_from("<Q", data, 16)
    struct.pack_into("<Q", data, 16, payload + 64)
    with pytest.raises(WorkerError, match=f"payload of {payload} bytes, but {payload + 64} bytes came"):
        received(data + bytes(64))


def test_another_version_and_other_bytes_are_refused() -> None:
    data = message()
    struct.pack_into("<H", data, 4, frames.VERSION + 1)
    with pytest.raises(WorkerError, match=f"version {frames.VERSION + 1}, this side {frames.VERSION}"):
        received(data)
    with pytest.raises(WorkerError, match="not a frame"):
        received(b"GET / HTTP/1.1\r\n".ljust(200))
    with pytest.raises(WorkerError, match="a prefix of 40 bytes, but 3 bytes came"):
        received(b"abc")


def test_a_message_larger_than_any_frame_is_refused() -> None:
    with pytest.raises(WorkerError, match=r"sent a message of 150000 bytes, the largest has 131072 bytes"):
        received(bytes(150_000))


def test_giving_back_a_slot_that_was_not_lent_is_refused(pair: Pair) -> None:
    one, two = pair
    two._send(b"PLok\3\0")
    with pytest.raises(WorkerError, match=r"mi300 \(slice 1\) gave back slot 3"):
        one.send(Frame("step", tensors={"x": np.zeros(LARGE, np.uint8)}))


def test_an_unknown_dtype_is_refused_on_both_sides() -> None:
    with pytest.raises(WorkerError, match="tensor 'z' has dtype complex64"):
        frames.prepare(Frame("step", tensors={"z": np.zeros(2, np.complex64)}))
    with pytest.raises(WorkerError, match=r"h100 \(slice 0\) sent tensor 'x' with the unknown dtype 'float23'"):
        received(bytes(message()).replace(b"float32", b"float23"))


def test_a_flipped_bit_is_found_wherever_it_is() -> None:
    clean = message(debug=True)
    assert received(clean).meta == b"meta"
    head = len(clean) - 3 * 64 - 3 * 16
    named = {head + 5: "'x'", head + 64 + 2: "'y'", head + 128 + 1: "metadata"}
    for position, name in named.items():
        data = clean.copy()
        data[position] ^= 4
        with pytest.raises(
            WorkerError, match=rf"{name}.* from h100 \(slice 0\) changed on the way \(step 4\)"
        ) as caught:
            received(data)
        assert caught.value.code == "frame-digest"


def test_a_flipped_bit_in_shared_memory_is_found() -> None:
    a, b = socket_pair()
    with Channel(a, "two", debug=True) as one, Channel(b, "h100 (slice 0)") as two:
        one.send(Frame("step", 9, tensors={"hidden": np.zeros(LARGE, np.uint8)}))
        slot = next(region for region in one._sent_slots if region is not None)
        slot[LARGE // 2] = 1
        with pytest.raises(WorkerError, match=r"tensor 'hidden' from h100 \(slice 0\) changed on the way"):
            two.recv()


def test_a_payload_without_its_shared_memory_is_refused() -> None:
    out = frames.prepare(Frame("step", tensors={"x": np.zeros(LARGE, np.uint8)}))
    with pytest.raises(WorkerError, match=f"a payload of {LARGE} bytes in slot 2, whose shared memory holds 0 bytes"):
        received(out.head(2))
    fd = os.memfd_create("short")
    os.ftruncate(fd, 4096)
    a, b = socket_pair()
    with a, Channel(b, "h100 (slice 0)") as channel:
        a.send(b"PLfd\0\0")
        socket.send_fds(a, [b"fd"], [fd])
        a.send(out.head(0))
        os.close(fd)
        with pytest.raises(WorkerError, match=f"a payload of {LARGE} bytes in slot 0, whose shared memory holds 4096"):
            channel.recv()


def names(folder: str) -> set[str]:
    return {path.name for path in Path(folder).iterdir()}


def test_a_sender_that_dies_between_a_slot_and_its_memory_is_named() -> None:
    ours, theirs = socket_pair()
    with Channel(ours, "h100 (slice 0)") as channel:
        channel.send(Frame("step"))  # unread when the other end closes, which makes the kernel say "reset"
        theirs.close()
        with pytest.raises(PeerGoneError, match=r"h100 \(slice 0\) ended"):
            channel._map(0)  # the note came, its memory does not


def test_closing_leaves_no_file_descriptor_and_no_file() -> None:
    before, files = names("/proc/self/fd"), names("/dev/shm")
    a, b = socket_pair()
    with Channel(a, "b") as one, Channel(b, "a") as two:
        for i in range(2 * SLOTS):
            one.send(Frame("step", i, tensors={"x": np.zeros(LARGE << i, np.uint8)}))
            two.recv()
        assert len(names("/proc/self/fd")) > len(before)
    assert names("/proc/self/fd") == before
    assert names("/dev/shm") <= files


SENDER = """
import signal, socket, sys
import numpy as np
from plait.runtime.transport import Channel, Frame
channel = Channel(socket.socket(fileno=int(sys.argv[1])), "parent")
channel.send(Frame("step", tensors={"x": np.ones(int(sys.argv[2]), np.uint8)}))
signal.pause()
"""


def test_a_killed_sender_leaves_no_file() -> None:
    files = names("/dev/shm")
    a, b = socket_pair()
    with a:
        sender = subprocess.Popen([sys.executable, "-c", SENDER, str(a.fileno()), str(LARGE)], pass_fds=[a.fileno()])
    with Channel(b, "child", timeout_s=20) as channel:
        frame = channel.recv()
        sender.kill()
        sender.wait()
        assert frame.tensors["x"].all()  # what came stays readable
        with pytest.raises(PeerGoneError, match="child ended"):
            channel.recv()
    assert names("/dev/shm") <= files
