"""Every error a user can meet: a code, what happened, why, and what to try.

`UserError` and its kin are `ValueError`s: the user can mend them. A failed `assert` is our own fault. The exit codes
of the command line hang on the class: 64 for usage, 2 for a request that cannot be met, 1 for a fault of ours.
"""

from __future__ import annotations

import copy
import difflib
import errno
from collections.abc import Callable, Iterable
from typing import Any, Self

LONGEST = 4000
"""Characters of one part of an error: a damaged file may hold a name of a million."""


class PlaitError(Exception):
    """Base of all errors that plait raises on purpose.

    Args:
        code: a short kebab-case name that stays stable across versions, e.g. `target-unknown`.
        what: one sentence: what happened, naming the thing.
        why: the facts behind it; numbers with units.
        hint: what to try next.
    """

    exit_code = 1

    def __init__(self, code: str, what: str, *, why: str = "", hint: str = "") -> None:
        self.code = code
        self.what, self.why, self.hint = what, why, hint = _readable(what), _readable(why), _readable(hint)
        super().__init__(code, what, why, hint)

    def __str__(self) -> str:
        lines = [f"{self.what} [{self.code}]"]
        if self.why:
            lines.append(f"  why: {self.why}")
        if self.hint:
            lines.append(f"  try: {self.hint}")
        return "\n".join(lines)

    def to_dict(self) -> dict[str, str]:
        return {"code": self.code, "what": self.what, "why": self.why, "try": self.hint}

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        """Copies and pickles keep every field; a process pool hands errors on that way."""
        return _restored, (type(self), self.args, self.__dict__)

    def again(self) -> Self:
        """The same error to raise once more. One instance that many callers raise collects all their tracebacks."""
        fresh = copy.copy(self)
        fresh.__cause__ = self.__cause__
        return fresh


class UserError(PlaitError, ValueError):
    """The request cannot be met as it stands (does not fit, unsupported, broken file). Exit code 2."""

    exit_code = 2


class UsageError(UserError):
    """The command or call itself is wrong (unknown target, bad option value). Exit code 64."""

    exit_code = 64


class CheckpointError(UserError):
    """A file of the checkpoint is damaged, incomplete, or says something plait does not understand."""


class UnsupportedError(UserError):
    """plait understands the request and refuses it: no implementation gives the right numbers."""


class FitError(UserError):
    """The model does not fit the devices. `rows` holds needed, free and short-by bytes per device."""

    def __init__(
        self, what: str, *, why: str = "", hint: str = "", rows: tuple[dict[str, int | str], ...] = ()
    ) -> None:
        super().__init__("does-not-fit", what, why=why, hint=hint)
        self.rows = rows


class PlanError(UserError):
    """A plan written by hand cannot be honoured exactly."""


class VerifyError(PlaitError, ValueError):
    """A module breaks a rule of the IR. The message shows the op."""

    exit_code = 2


class ArtifactError(UserError):
    """An artifact is damaged, of another format version, or its files no longer match their digests."""


class WorkerError(PlaitError):
    """A worker died, hung or refused a frame. The message names the worker and its device."""


class MissingDependencyError(UserError):
    """An optional wheel is not installed; the hint is the `pip install` line."""


#: What the system refuses for want of something that the user can give, and what that is.
_REFUSALS = {
    errno.ENOSPC: "free some space",
    errno.EDQUOT: "free some space",
    errno.EFBIG: "write to another file system",
    errno.EROFS: "write to another folder",
    errno.EACCES: "look at the permissions",
    errno.EPERM: "look at the permissions",
    errno.EMFILE: "raise the limit of open files: ulimit -n 1024",
    errno.ENFILE: "close other programs",
    errno.ENOMEM: "close other programs, or use a smaller model",
    errno.EAGAIN: "raise the limit of processes: ulimit -u",
    errno.ENAMETOOLONG: "choose a shorter name",
    errno.EIO: "look at the disk",
}


def system_error(error: OSError | MemoryError) -> UserError | None:
    """What the user is told where the system refused something; None where it is no such refusal but a fault."""
    if isinstance(error, MemoryError):
        number, why = errno.ENOMEM, "the memory of this host is used up"
    else:
        number, why = error.errno or 0, error.strerror or str(error)
    if number not in _REFUSALS:
        return None
    where = f": {error.filename}" if isinstance(error, OSError) and error.filename else ""
    return UserError("system", f"the system refused to go on{where}", why=why, hint=_REFUSALS[number])


def _readable(text: str) -> str:
    return text if len(text) <= LONGEST else f"{text[:LONGEST]} ... and {len(text) - LONGEST} characters more"


def _restored(kind: type[PlaitError], args: tuple[Any, ...], fields: dict[str, Any]) -> PlaitError:
    made = kind.__new__(kind, *args)
    made.__dict__.update(fields)
    return made


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """`did you mean 'h100'?` for a near miss among `known`, else an empty string."""
    close = difflib.get_close_matches(word, list(known), n=3, cutoff=0.5)
    return "did you mean " + " or ".join(f"'{c}'" for c in close) + "?" if close else ""
