"""What tells whether a weights file is still the one that was compiled: its size, and a digest of its header."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path


def identity(path: Path) -> tuple[int, str]:
    """Size in bytes and digest of the header; of a file that is nothing but data (ONNX's external data) the size tells.

    Raises CheckpointError where the file is not what its name says.
    """
    return _KINDS.get(path.suffix, _data)(path)


def _safetensors(path: Path) -> tuple[int, str]:
    from plait.frontend import safetensors

    return safetensors.read_file(path).files[str(path)]


def _gguf(path: Path) -> tuple[int, str]:
    from plait.frontend.gguf.header import read_header

    _, _, digest, size = read_header(path)
    return size, digest


def _program(path: Path) -> tuple[int, str]:
    from plait.frontend import pt2

    return pt2.identity(path)


def _onnx(path: Path) -> tuple[int, str]:
    from plait.frontend.onnx import file

    return file.identity(path)


def _data(path: Path) -> tuple[int, str]:
    from plait.frontend.onnx import file

    return file.data_identity(path)


_KINDS: dict[str, Callable[[Path], tuple[int, str]]] = {
    ".safetensors": _safetensors,
    ".gguf": _gguf,
    ".pt2": _program,
    ".onnx": _onnx,
}
