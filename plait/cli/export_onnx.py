"""`plait export --to onnx`: a slice with its weights, as a model that onnxruntime runs."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

from plait.cli.screen import Screen
from plait.errors import UsageError, UserError
from plait.words import bytes_text

if TYPE_CHECKING:
    from collections.abc import Mapping

    from xdsl.dialects.builtin import ModuleOp

    from plait.backends.kernels.onnx_export import OnnxSlice, Port
    from plait.spec import WeightRef


def export_onnx(
    screen: Screen, module: ModuleOp, refs: Mapping[str, WeightRef] | None, root: Path | None, path: Path, title: str
) -> dict[str, Any]:
    """Write the model, its weights in PATH.data. Returns the facts of the result.

    Raises:
        UsageError: `export-weights`: there are none.
        UnsupportedError: names the op that cannot be written.
    """
    from plait.backends.kernels.lowering import dequantised
    from plait.backends.kernels.onnx_export import to_onnx
    from plait.cli.tables import table

    if refs is None:
        raise UsageError("export-weights", f"{title} is a config alone", why="an ONNX model holds its weights")
    with screen.phases() as progress:
        progress("export", 0, 1)
        made = to_onnx(module, refs, root)
        _write(made, path)
    rows = [
        (word, *_cells(port)) for word, ports in (("input", made.inputs), ("output", made.outputs)) for port in ports
    ]
    screen.show(table(("", "name", "shape", "dtype"), rows, title=title))
    notes = dequantised(module)
    for what, note in notes.items():
        screen.show(f"{what}: {note}")
    files = [file for file in (path, data_file(path)) if file.exists()]
    nbytes = sum(file.stat().st_size for file in files)
    screen.show(f"wrote {' and '.join(map(str, files))}: {bytes_text(nbytes)}, onnx")
    return {
        "output": str(path),
        "data": str(data_file(path)) if data_file(path) in files else None,
        "form": "onnx",
        "bytes": nbytes,
        "arguments": [_fact(port) for port in made.inputs],
        "results": [_fact(port) for port in made.outputs],
        "notes": notes,
    }


def data_file(path: Path) -> Path:
    return path.with_name(f"{path.name}.data")


def _write(made: OnnxSlice, path: Path) -> None:
    """Both files, or none of them."""
    try:
        with tempfile.TemporaryDirectory(prefix=f".{path.name}.", dir=path.parent) as folder:
            made.save(Path(folder) / path.name)
            data_file(path).unlink(missing_ok=True)
            for file in sorted(Path(folder).iterdir(), reverse=True):  # the weights before what points at them
                file.replace(path.parent / file.name)
    except OSError as err:
        raise UserError("output-unwritable", f"cannot write {path}", why=err.strerror or str(err)) from err


def _cells(port: Port) -> tuple[str, str, str]:
    return port.name, " x ".join(map(str, port.shape)), port.dtype


def _fact(port: Port) -> dict[str, Any]:
    return {"name": port.name, "shape": list(port.shape), "dtype": port.dtype}
