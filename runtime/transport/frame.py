"""Frames: one self-describing message between two slices, or between a slice and the driver.

Bytes of a frame, little-endian:

    prefix   magic, version, slot (where the payload lies), flags, bytes of header, payload and metadata, step
    header   msgpack: kind, sender, and (name, dtype, shape, nbytes) of every tensor; padded
    payload  the tensors, the metadata and (in debug mode) their digests, each at a multiple of `ALIGN` bytes

The reader trusts nothing: version, lengths, dtypes, shapes and digests must agree with the bytes that came, or the
frame is refused with a `WorkerError` that names the peer and both values. A hop between two vendors has no other place
where a wrong byte could be seen.

Steps of a pipeline repeat the same shapes, so both sides keep the `Layout` of a header and look it up by its key.
"""

from __future__ import annotations

import functools
import hashlib
import math
import struct
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypeVar

import ml_dtypes
import msgspec
import numpy as np
from numpy.typing import NDArray

from plait.errors import WorkerError

T = TypeVar("T")
Array = NDArray[Any]

VERSION = 2
"""Counts changes of the wire format. Two workers may run different installs of plait: they must agree on this."""

ALIGN = 64
"""Every payload item starts at a multiple of this: one cache line, and enough for any dtype and vector load."""

INLINE = 0xFFFF
"""Value of the prefix's slot when the payload follows the header in the same message."""

METADATA = "(metadata)"
"""The name under which a wrong digest of the metadata is reported."""

DTYPES: dict[str, np.dtype[Any]] = {
    np.dtype(kind).name: np.dtype(kind)
    for kind in (
        *(np.bool_, np.int8, np.int16, np.int32, np.int64, np.uint8, np.uint16, np.uint32, np.uint64),
        *(np.float16, np.float32, np.float64),
        *(ml_dtypes.bfloat16, ml_dtypes.float8_e4m3fn, ml_dtypes.float8_e4m3fnuz, ml_dtypes.float8_e5m2),
    )
}
"""What may cross a boundary, by the name that the frame carries."""

_DTYPE_NAMES = {dtype: name for name, dtype in DTYPES.items()}
_MAGIC = b"PLfr"
_PREFIX = struct.Struct("<4sHHIIQQQ")
_PREFIX_BYTES = _PREFIX.size
_HAS_DIGESTS = 1
_DIGEST_BYTES = 16


@dataclass(slots=True)
class Frame:
    """One message.

    Attributes:
        kind: what it is for: `step`, `result`, `ready`, `error`, `stats` ...
        step: number of the step it belongs to.
        sender: who sent it, e.g. `h100 (slice 0)`.
        tensors: by name. In a received frame they are views that stay valid until the next `recv` of the channel.
        meta: metadata as msgpack bytes; `pack` writes them, `unpack` reads them.
    """

    kind: str
    step: int = 0
    sender: str = ""
    tensors: Mapping[str, Array] = field(default_factory=dict)
    meta: bytes = b""

    def unpack(self, kind: type[T]) -> T:
        """The metadata as a `kind`.

        Raises:
            WorkerError: `frame-metadata`, naming the sender and the field.
        """
        try:
            return msgspec.msgpack.decode(self.meta, type=kind)
        except msgspec.DecodeError as err:
            raise WorkerError(
                "frame-metadata", f"{self.sender} sent a {self.kind!r} frame that cannot be read", why=str(err)
            ) from err


def pack(value: object) -> bytes:
    """Metadata (msgspec structs, plain data) as msgpack bytes."""
    return msgspec.msgpack.encode(value)


class Item(NamedTuple):
    """One tensor of the payload."""

    name: str
    dtype: np.dtype[Any]
    shape: tuple[int, ...]
    offset: int
    nbytes: int


@dataclass(frozen=True, slots=True)
class Layout:
    """What frames of the same kind, sender and shapes have in common.

    `header` is padded, so that the payload is aligned; `tensor_bytes` includes padding too.
    """

    header: bytes
    header_bytes: int
    kind: str
    sender: str
    items: tuple[Item, ...]
    tensor_bytes: int


class _Tensor(msgspec.Struct, array_like=True):
    name: str
    dtype: str
    shape: list[int]
    nbytes: int


class _Header(msgspec.Struct, array_like=True):
    kind: str
    sender: str
    tensors: list[_Tensor]


_decode = msgspec.msgpack.Decoder(_Header).decode


def aligned(nbytes: int) -> int:
    """`nbytes` rounded up to `ALIGN`."""
    return -(-nbytes // ALIGN) * ALIGN


@dataclass(slots=True)
class Outgoing:
    """A frame about to be sent. `payload_bytes` decides whether it goes inline or through a slot."""

    frame: Frame
    layout: Layout
    payload_bytes: int
    digests: bytes | None

    def head(self, slot: int) -> bytes:
        """Prefix and header, padded to `ALIGN`."""
        layout, frame = self.layout, self.frame
        flags = 0 if self.digests is None else _HAS_DIGESTS
        header_bytes, meta_bytes = layout.header_bytes, len(frame.meta)
        prefix = _PREFIX.pack(_MAGIC, VERSION, slot, flags, header_bytes, self.payload_bytes, meta_bytes, frame.step)
        return prefix + layout.header

    def inline(self) -> bytes:
        """The whole message, payload included."""
        parts = [self.head(INLINE)]
        for array in self.frame.tensors.values():
            parts.append(array.tobytes())
            if padding := -array.nbytes % ALIGN:
                parts.append(bytes(padding))
        if self.frame.meta or self.digests:
            parts.append(self.frame.meta.ljust(aligned(len(self.frame.meta)), b"\0"))
            parts.append(self.digests or b"")
        return b"".join(parts)

    def write(self, buffer: Any) -> None:
        """Copy the payload into `buffer`: the one copy that a large tensor makes, contiguous or not."""
        for item, array in zip(self.layout.items, self.frame.tensors.values(), strict=True):
            np.ndarray(item.shape, item.dtype, buffer, item.offset)[...] = array
        offset = self.layout.tensor_bytes
        for data in (self.frame.meta, self.digests or b""):
            buffer[offset : offset + len(data)] = data
            offset += aligned(len(data))


def prepare(frame: Frame, debug: bool = False) -> Outgoing:
    """Lay `frame` out. `debug` adds a digest of every tensor and of the metadata.

    Raises:
        WorkerError: `frame-dtype`, naming the tensor.
    """
    spec = tuple([(name, array.dtype, array.shape) for name, array in frame.tensors.items()])
    layout = _layout(frame.kind, frame.sender, spec)
    digests = None
    nbytes = layout.tensor_bytes + aligned(len(frame.meta))
    if debug:
        digests = b"".join(_digest(data) for data in (*map(_as_bytes, frame.tensors.values()), frame.meta))
        nbytes += len(digests)
    return Outgoing(frame, layout, nbytes, digests)


@dataclass(slots=True)
class Incoming:
    """A message whose prefix and header agree with its length; `frame` reads the payload."""

    peer: str
    layout: Layout
    slot: int
    step: int
    payload_start: int
    payload_bytes: int
    meta_bytes: int
    has_digests: bool

    def frame(self, buffer: Any, start: int) -> Frame:
        """The frame, its tensors views of `buffer`, in which the payload starts at `start`.

        Raises:
            WorkerError: `frame-digest`, naming the tensor and the peer.
        """
        layout = self.layout
        tensors = {
            name: np.ndarray(shape, dtype, buffer, start + offset) for name, dtype, shape, offset, _ in layout.items
        }
        end = start + layout.tensor_bytes
        meta = bytes(buffer[end : end + self.meta_bytes]) if self.meta_bytes else b""
        if self.has_digests:
            end += aligned(self.meta_bytes)
            digests = bytes(buffer[end : start + self.payload_bytes])
            self._check([*(_as_bytes(array) for array in tensors.values()), meta], digests)
        return Frame(layout.kind, self.step, layout.sender, tensors, meta)

    def _check(self, items: list[Any], digests: bytes) -> None:
        names = [*(item.name for item in self.layout.items), METADATA]
        for i, (name, data) in enumerate(zip(names, items, strict=True)):
            sent, received = digests[i * _DIGEST_BYTES : (i + 1) * _DIGEST_BYTES], _digest(data)
            if sent != received:
                raise WorkerError(
                    "frame-digest",
                    f"tensor {name!r} from {self.peer} changed on the way (step {self.step})",
                    why=f"digest sent {sent.hex()}, received {received.hex()}",
                    hint="the bytes were damaged between the two workers: check memory and link of both",
                )


def decode(message: Any, received: int, peer: str) -> Incoming:
    """Read prefix and header of a message from `peer`: the first `received` bytes of `message`.

    Raises:
        WorkerError: `frame-magic`, `frame-version`, `frame-length` (both sizes named), `frame-header`, `frame-dtype`.
    """
    if received < _PREFIX_BYTES:
        raise _wrong_length(peer, "a prefix", _PREFIX_BYTES, received)
    magic, version, slot, flags, header_bytes, payload_bytes, meta_bytes, step = _PREFIX.unpack_from(message)
    if magic != _MAGIC:
        raise WorkerError("frame-magic", f"{peer} sent something that is not a frame", why=f"it starts with {magic!r}")
    if version != VERSION:
        raise WorkerError(
            "frame-version",
            f"{peer} speaks frame version {version}, this side {VERSION}",
            hint="install the same version of plait in both interpreters",
        )
    start = aligned(_PREFIX_BYTES + header_bytes)
    expected = start + (payload_bytes if slot == INLINE else 0)
    if received != expected:
        raise _wrong_length(peer, "a frame", expected, received)
    layout = _parse(peer, bytes(message[_PREFIX_BYTES : _PREFIX_BYTES + header_bytes]))
    has_digests = flags == _HAS_DIGESTS
    stated = layout.tensor_bytes + aligned(meta_bytes)
    if has_digests:
        stated += _DIGEST_BYTES * (len(layout.items) + 1)
    if stated != payload_bytes:
        raise _wrong_length(peer, f"a {layout.kind!r} frame with a payload", stated, payload_bytes)
    return Incoming(peer, layout, slot, step, start, payload_bytes, meta_bytes, has_digests)


@functools.lru_cache(maxsize=1024)
def _layout(kind: str, sender: str, spec: tuple[tuple[str, np.dtype[Any], tuple[int, ...]], ...]) -> Layout:
    """The layout of a frame to send."""
    tensors = []
    for name, dtype, shape in spec:
        if dtype not in _DTYPE_NAMES:
            raise WorkerError(
                "frame-dtype", f"tensor {name!r} has dtype {dtype}, which a frame cannot carry", why=_known_dtypes()
            )
        tensors.append(_Tensor(name, _DTYPE_NAMES[dtype], list(shape), math.prod(shape) * dtype.itemsize))
    header = _Header(kind, sender, tensors)
    return _place(header, pack(header))


@functools.lru_cache(maxsize=1024)
def _parse(peer: str, data: bytes) -> Layout:
    """The layout of a frame that came, checked."""
    try:
        header = _decode(data)
    except msgspec.DecodeError as err:
        raise WorkerError("frame-header", f"{peer} sent a frame whose header cannot be read", why=str(err)) from err
    for item in header.tensors:
        dtype = DTYPES.get(item.dtype)
        if dtype is None:
            raise WorkerError(
                "frame-dtype",
                f"{peer} sent tensor {item.name!r} with the unknown dtype {item.dtype!r}",
                why=_known_dtypes(),
            )
        stated = math.prod(item.shape) * dtype.itemsize
        if stated != item.nbytes or min(item.shape, default=0) < 0:
            raise _wrong_length(peer, f"tensor {item.name!r} ({item.dtype} {item.shape})", stated, item.nbytes)
    return _place(header, data)


def _place(header: _Header, data: bytes) -> Layout:
    items, offset = [], 0
    for tensor in header.tensors:
        items.append(Item(tensor.name, DTYPES[tensor.dtype], tuple(tensor.shape), offset, tensor.nbytes))
        offset += aligned(tensor.nbytes)
    padded = data.ljust(aligned(_PREFIX_BYTES + len(data)) - _PREFIX_BYTES, b"\0")
    return Layout(padded, len(data), header.kind, header.sender, tuple(items), offset)


def _as_bytes(array: Array) -> Array:
    return np.ascontiguousarray(array).reshape(-1).view(np.uint8)


def _digest(data: Any) -> bytes:
    return hashlib.blake2b(data, digest_size=_DIGEST_BYTES).digest()


def _known_dtypes() -> str:
    return "known: " + ", ".join(DTYPES)


def _wrong_length(peer: str, what: str, stated: int, received: int) -> WorkerError:
    return WorkerError("frame-length", f"{peer} sent {what} of {stated} bytes, but {received} bytes came")
