"""Compiled kernels on disk, by content: a second compile of the same thing reads a file.

One file per entry, written whole under another name and then moved, so that processes may share the folder. An entry
whose digest is wrong is deleted and is as if it had never been. `trim` keeps the folder under a bound: what was used
longest ago goes first.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import tempfile
from dataclasses import dataclass
from pathlib import Path

from plait.errors import UserError

DEFAULT_LIMIT_BYTES = 2 * 1024**3
_DIGEST_BYTES = hashlib.sha256().digest_size


def default_folder() -> Path:
    """`$PLAIT_CACHE`, else `$XDG_CACHE_HOME/plait`, else `~/.cache/plait`; in it, `kernels`."""
    if own := os.environ.get("PLAIT_CACHE"):
        return Path(own) / "kernels"
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "plait" / "kernels"


@dataclass(frozen=True)
class Cache:
    """Bytes by key (hexadecimal). Opening it touches nothing."""

    folder: Path
    limit_bytes: int = DEFAULT_LIMIT_BYTES

    def get(self, key: str) -> bytes | None:
        """The entry, or None. Reading it counts as use.

        Raises:
            UserError: `cache-unreadable`.
        """
        path = self._path(key)
        try:
            whole = path.read_bytes()
        except FileNotFoundError:
            return None
        except OSError as error:
            raise self._refused("unreadable", "read from", error) from error
        digest, payload = whole[:_DIGEST_BYTES], whole[_DIGEST_BYTES:]
        if hashlib.sha256(payload).digest() != digest:
            self._drop(path)
            return None
        with contextlib.suppress(OSError):  # evicted meanwhile, or not ours to touch: the bytes are good
            os.utime(path)
        return payload

    def put(self, key: str, payload: bytes) -> None:
        """Write an entry.

        Raises:
            UserError: `cache-unwritable`.
        """
        path = self._path(key)
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            with tempfile.NamedTemporaryFile(dir=path.parent, prefix=".", delete=False) as file:
                try:
                    file.write(hashlib.sha256(payload).digest() + payload)
                    file.close()
                    Path(file.name).replace(path)
                except BaseException:
                    Path(file.name).unlink(missing_ok=True)
                    raise
        except OSError as error:
            raise self._refused("unwritable", "kept in", error) from error

    def trim(self) -> None:
        """Delete what was used longest ago, until the folder is within its bound."""
        entries = []
        for path in self.folder.glob("??/*"):
            try:
                status = path.stat()
            except FileNotFoundError:
                continue
            entries.append((status.st_mtime_ns, status.st_size, path))
        total = sum(size for _, size, _ in entries)
        for _, size, path in sorted(entries):
            if total <= self.limit_bytes:
                return
            self._drop(path)
            total -= size

    def _refused(self, how: str, what: str, error: OSError) -> UserError:
        return UserError(
            f"cache-{how}",
            f"compiled kernels cannot be {what} {self.folder}",
            why=str(error),
            hint="set PLAIT_CACHE to a folder of yours with room",
        )

    def _path(self, key: str) -> Path:
        return self.folder / key[:2] / key[2:]

    @staticmethod
    def _drop(path: Path) -> None:
        with contextlib.suppress(OSError):  # a folder that is not ours: leave it
            path.unlink(missing_ok=True)
