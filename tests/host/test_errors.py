"""Errors travel whole: copied, pickled, raised again. What the system refuses is said in its words."""

from __future__ import annotations

import copy
import errno
import pickle
import traceback

import pytest

from plait.errors import FitError, PlaitError, UsageError, WorkerError, system_error

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
