"""Files that are never there in part."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

from plait.errors import UserError


def write_whole(path: Path, text: str) -> None:
    """Write a file so that it is never there in part.

    Raises:
        UserError: `output-unwritable`.
    """
    try:
        handle, scratch = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)
        try:
            with os.fdopen(handle, "w", encoding="utf-8") as file:
                file.write(text)
            Path(scratch).chmod(0o644)
            Path(scratch).replace(path)
        except BaseException:
            Path(scratch).unlink(missing_ok=True)
            raise
    except OSError as err:
        raise UserError("output-unwritable", f"cannot write {path}", why=err.strerror or str(err)) from err
