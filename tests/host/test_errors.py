"""Errors travel whole: copied, pickled, raised again. What the system refuses is said in its words."""

from __future__ import annotations

import copy
import errno
import pickle
import re
import traceback
from pathlib import Path

import pytest

from plait.errors import FitError, PlaitError, UsageError, WorkerError, system_error
from plait.words import counted

ERRORS = (
    PlaitError("a-code", "what", why="why", hint="hint"),
    UsageError("other-code", "what"),
    FitError("too much", why="why", rows=({"device": "h100.0", "short_bytes": 5},)),
)


@pytest.mark.parametrize("error", ERRORS, ids=lambda error: type(error).__name__)
@pytest.mark.parametrize("again", [lambda e: pickle.loads(pickle.dumps(e)), copy.copy, copy.deepcopy, PlaitError.again])
def test_copies_keep_every_field(error, again):
    made = again(error)
    assert made is not error and type(made) is type(error)
    assert (str(made), repr(made), made.args, vars(made)) == (str(error), repr(error), error.args, vars(error))


def test_raising_again_gathers_no_tracebacks():
    kept = WorkerError("worker-died", "h100 was killed")
    kept.__cause__ = OSError("before")
    lengths = set()
    for _ in range(3):
        with pytest.raises(WorkerError) as caught:
            raise kept.again()
        lengths.add(len(traceback.extract_tb(caught.value.__traceback__)))
        assert caught.value.__cause__ is kept.__cause__
    assert lengths == {1} and kept.__traceback__ is None


def test_a_refusal_of_the_system_names_the_file_and_what_to_do():
    full = system_error(OSError(errno.ENOSPC, "No space left on device", "/a/file"))
    assert full is not None and full.exit_code == 2
    assert "/a/file" in full.what and full.why == "No space left on device" and "free" in full.hint
    files = system_error(OSError(errno.EMFILE, "Too many open files"))
    assert files is not None and "ulimit -n" in files.hint
    memory = system_error(MemoryError())
    assert memory is not None and "memory" in memory.why


@pytest.mark.parametrize("error", [OSError("no number"), OSError(errno.EBADF, "Bad file descriptor")])
def test_what_no_user_can_mend_stays_a_fault(error):
    assert system_error(error) is None


def test_counts_are_said_in_the_right_number():
    assert [counted(n, "tensor") for n in (0, 1, 2, 1234)] == ["0 tensors", "1 tensor", "2 tensors", "1,234 tensors"]
    assert [counted(n, "binary", "binaries") for n in (1, 2)] == ["1 binary", "2 binaries"]


def test_no_message_counts_in_the_plural_alone():
    """`lacks 1 tensors`: what is counted with len() is said with `counted`."""
    root = Path(__file__).parents[2]
    files = [file for folder in ("frontend", "plait/cli", "plait/assemble", "plait/report") for file in
             (root / folder).rglob("*.py")]  # fmt: skip
    files += [root / "plait" / "api.py", *(root / "partitioner").glob("*.py")]
    plural = re.compile(r"\{len\([^{}]*\)\} (?!of |bytes beyond)[a-z]+s\b")
    found = {f"{file.name}: {match[0]}" for file in files for match in plural.finditer(file.read_text())}
    assert len(files) > 80 and found == set()
