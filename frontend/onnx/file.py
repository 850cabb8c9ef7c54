"""A `.onnx` file: the graph as onnx-ir knows it, and where its tensors lie. No tensor's data is read.

A file is one protobuf message. Tensors may lie in other files, or as raw bytes inside the message: those are left out
of what is parsed, and point back into the file, so that both kinds are byte ranges. Field numbers are those of
onnx.proto.
"""

from __future__ import annotations

import importlib.util
import logging
import mmap
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from plait.errors import CheckpointError, MissingDependencyError, UnsupportedError
from plait.frontend.files import header_digest, unreadable
from plait.spec import WeightRef
from plait.spec.weight import Encoding

if TYPE_CHECKING:
    import onnx_ir as ir

_GRAPH, _INITIALIZER = 7, 5
_FLOAT_DATA, _RAW_DATA, _EXTERNAL_DATA, _DATA_LOCATION = 4, 9, 13, 14
_VARINT, _BYTES = 0, 2
_FIXED = {1: 8, 5: 4}

ENCODINGS: dict[str, Encoding] = {"FLOAT": "float32", "FLOAT16": "float16", "BFLOAT16": "bfloat16", "UINT8": "u8"}
"""What weights are stored in, by ONNX's name of it."""


def require() -> None:
    """Raises MissingDependencyError where onnx-ir is not installed."""
    if importlib.util.find_spec("onnx_ir") is None:
        raise MissingDependencyError(
            "onnx-missing", "ONNX needs onnx-ir, which is not installed", hint="pip install 'plait[onnx]'"
        )


def damaged(path: Path, why: str) -> CheckpointError:
    return CheckpointError("onnx-damaged", f"{path} is no whole ONNX model", why=why, hint="export or fetch it again")


def refuse(code: str, what: str, why: str = "", hint: str = "") -> NoReturn:
    raise UnsupportedError(f"onnx-{code}", what, why=why, hint=hint)


@dataclass(frozen=True)
class OnnxFile:
    """A model whose tensors are all external, and the files they lie in: size in bytes and digest of the header."""

    path: Path
    model: ir.Model
    files: dict[str, tuple[int, str]]

    def place(self, tensor: Any) -> tuple[Path, int, int]:
        """The file that holds a tensor, its first byte there and its length.

        Raises:
            UnsupportedError: `onnx-tensor`: its numbers are not stored as bytes.
            CheckpointError: `onnx-damaged`: it points outside of the model's folder, or beyond the file's end.
        """
        import onnx_ir as ir

        if not isinstance(tensor, ir.ExternalTensor):
            refuse(
                "tensor",
                f"{self.path}: the tensor {tensor.name!r} is not stored as bytes",
                f"it is a {type(tensor).__name__} of {tensor.dtype.name}, whose numbers the message spells out",
                "save the model with raw or external data",
            )
        if not isinstance(tensor.location, str) or "\0" in tensor.location:
            raise damaged(self.path, f"the tensor {tensor.name!r} lies in {tensor.location!r}, which is no name")
        location = Path(tensor.location)
        if location.is_absolute() or ".." in location.parts:
            raise damaged(self.path, f"the tensor {tensor.name!r} lies in {str(location)!r}, outside of its folder")
        shape = dimensions(tensor)
        path, offset = self.path.parent / location, tensor.offset or 0
        nbytes = -(-prod(shape) * tensor.dtype.bitwidth // 8)
        if tensor.length not in (None, nbytes):
            raise damaged(self.path, f"{tensor.name!r} is {list(shape)} {tensor.dtype.name} in {tensor.length} bytes")
        size = _size(path)
        if offset < 0 or offset + nbytes > size:
            raise damaged(
                self.path,
                f"the tensor {tensor.name!r} takes bytes {offset} to {offset + nbytes} of {location}, which has {size}",
            )
        self.files.setdefault(str(path), _data_identity(path))
        return path, offset, nbytes

    def ref(self, value: ir.Value) -> WeightRef:
        """The byte range of an initializer, under its own name.

        Raises: as `place` says; UnsupportedError `onnx-tensor` where it has another dtype than `ENCODINGS` lists.
        """
        tensor = value.const_value
        assert tensor is not None
        if tensor.dtype.name not in ENCODINGS:
            refuse(
                "tensor",
                f"{self.path}: the weight {value.name!r} is stored as {tensor.dtype.name}",
                f"read are {', '.join(ENCODINGS)}",
            )
        path, offset, nbytes = self.place(tensor)
        return WeightRef(value.name or "", str(path), offset, nbytes, ENCODINGS[tensor.dtype.name], dimensions(tensor))


def dimensions(tensor: Any) -> tuple[int, ...]:
    return tuple(int(dim) for dim in tensor.shape)


def read_onnx_file(path: Path) -> OnnxFile:
    """Raises:
    MissingDependencyError: onnx-ir is not installed.
    CheckpointError: `onnx-damaged`, `checkpoint-unreadable`.
    """
    require()
    import onnx
    import onnx_ir as ir

    header = _header(path)
    try:
        with _quiet() as warned:
            model = ir.from_proto(onnx.ModelProto.FromString(header))
    except Exception as err:  # protobuf has errors of its own
        raise damaged(path, f"{type(err).__name__}: {err}"[:300]) from err
    if warned:  # of a range that it does not understand
        raise damaged(path, str(warned[0].message))
    if not isinstance(model, ir.Model):
        raise damaged(path, "it holds no graph")
    if strange := [name for name in _names(model) if not isinstance(name, str | None)]:
        raise damaged(path, f"the name {strange[0]!r} is not UTF-8")
    for name, value in model.graph.initializers.items():
        if isinstance(value.const_value, ir.ExternalTensor):
            value.const_value.base_dir = path.parent
        elif value.const_value is None:
            raise damaged(path, f"the tensor {name!r} has no data")
    return OnnxFile(path, model, {str(path): (_size(path), header_digest(header))})


@contextmanager
def _quiet() -> Iterator[list[warnings.WarningMessage]]:
    """The warnings of onnx. What onnx-ir logs (a value that nothing makes) is refused where it is used."""
    logger = logging.getLogger("onnx_ir")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings(record=True, category=UserWarning) as warned:
            warnings.simplefilter("always", UserWarning)
            yield warned
    finally:
        logger.setLevel(level)


def _names(model: ir.Model) -> Iterator[Any]:
    values = [*model.graph.inputs, *model.graph.outputs, *model.graph.initializers.values()]
    for node in model.graph:
        yield from (node.name, node.op_type, node.domain, *node.attributes)
        values += [*(value for value in node.inputs if value is not None), *node.outputs]
    yield from (value.name for value in values)


def identity(path: Path) -> tuple[int, str]:
    """Size in bytes and digest of all that the file says beside its tensors' data."""
    return _size(path), header_digest(_header(path))


def data_identity(path: Path) -> tuple[int, str]:
    """The same of a file that holds nothing but tensors' data: there is no header to digest."""
    return _size(path), header_digest(b"")


def _data_identity(path: Path) -> tuple[int, str]:
    from plait.frontend.identity import identity as of

    return of(path)


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except OSError as err:
        raise unreadable(path, err) from err


def _header(path: Path) -> bytes:
    """The message, with the raw data of the graph's initializers as external data of the file itself."""
    try:
        with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
            return b"".join(_model(data, path))
    except OSError as err:
        raise unreadable(path, err) from err
    except ValueError as err:  # an empty file cannot be mapped
        raise damaged(path, str(err)) from err


@dataclass(frozen=True)
class _Field:
    number: int
    wire: int
    start: int
    """Of its tag."""
    content: int
    """First byte behind tag and length."""
    end: int


def _fields(data: mmap.mmap, at: int, end: int) -> Iterator[_Field]:
    """The fields of the message in [at, end). Raises ValueError where they do not fill it."""
    while at < end:
        start = at
        tag, at = _varint(data, at, end)
        number, wire = tag >> 3, tag & 7
        content = at
        if wire == _VARINT:
            _, at = _varint(data, at, end)
        elif wire == _BYTES:
            length, content = _varint(data, at, end)
            at = content + length
        elif wire in _FIXED:
            at += _FIXED[wire]
        else:
            raise ValueError(f"byte {start} starts a field of the unknown kind {wire}")
        if at > end:
            raise ValueError(f"the field at byte {start} goes on beyond the end of its message, {end}")
        yield _Field(number, wire, start, content, at)


def _varint(data: mmap.mmap, at: int, end: int) -> tuple[int, int]:
    value = shift = 0
    while at < end and shift < 64:
        byte = data[at]
        value |= (byte & 127) << shift
        at, shift = at + 1, shift + 7
        if byte < 128:
            return value, at
    raise ValueError(f"the number at byte {at} does not end")


def _model(data: mmap.mmap, path: Path) -> Iterator[bytes]:
    for field in _fields(data, 0, len(data)):
        whole = field.number != _GRAPH or field.wire != _BYTES
        yield data[field.start : field.end] if whole else _message(_GRAPH, b"".join(_graph(data, field, path)))


def _graph(data: mmap.mmap, graph: _Field, path: Path) -> Iterator[bytes]:
    for field in _fields(data, graph.content, graph.end):
        whole = field.number != _INITIALIZER or field.wire != _BYTES
        yield data[field.start : field.end] if whole else _message(_INITIALIZER, _tensor(data, field, path))


def _tensor(data: mmap.mmap, tensor: _Field, path: Path) -> bytes:
    """The tensor, with its data as a range of the file. Packed floats are raw data too."""
    fields = list(_fields(data, tensor.content, tensor.end))
    held = [f for f in fields if f.number in (_RAW_DATA, _FLOAT_DATA) and f.wire == _BYTES and f.end > f.content]
    kept = b"".join(data[f.start : f.end] for f in fields if len(held) != 1 or f is not held[0])
    if len(held) != 1:
        return kept
    (raw,) = held
    entries = {"location": path.name, "offset": str(raw.content), "length": str(raw.end - raw.content)}
    pairs = (_message(1, key.encode()) + _message(2, value.encode()) for key, value in entries.items())
    return kept + b"".join(_message(_EXTERNAL_DATA, pair) for pair in pairs) + _number(_DATA_LOCATION << 3) + _number(1)


def _message(number: int, content: bytes) -> bytes:
    return _number(number << 3 | _BYTES) + _number(len(content)) + content


def _number(value: int) -> bytes:
    out = bytearray()
    while value > 127:
        out.append(value & 127 | 128)
        value >>= 7
    out.append(value)
    return bytes(out)
