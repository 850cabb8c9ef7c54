"""The board: a small piece of shared memory where every slice notes how far it is.

It costs a few stores per step, and it still answers when a slice hangs: that is how the driver knows whom to name. Each
row has one writer.
"""

from __future__ import annotations

import mmap
import os
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

STARTED, FINISHED, BUSY_NS, HOP_NS = range(4)
"""Columns: number of the last step begun, of the last step done, time computing, time of steps between the hand-over by
the slice before and the start here (with several steps in flight this includes waiting in line)."""

_COLUMNS = 8  # one cache line per row, so that two slices do not write to the same one

Board = NDArray[np.int64]


def create(rows: int) -> tuple[int, Board]:
    """A board of zeros: its file descriptor (the caller closes it) and a view of it."""
    fd = os.memfd_create("plait-board", os.MFD_CLOEXEC)
    os.ftruncate(fd, rows * _COLUMNS * 8)
    return fd, view(fd, rows)


def view(fd: int, rows: int) -> Board:
    """[rows, 8] view of the board behind `fd`."""
    return np.ndarray((rows, _COLUMNS), np.int64, _mapped(fd, rows))


def private(rows: int) -> Board:
    """A board for slices of this process."""
    return np.zeros((rows, _COLUMNS), np.int64)


def behind(board: Board, labels: Sequence[str], step: int) -> str:
    """The label of the first slice that has not done `step`; the last one where all have."""
    return next((label for label, row in zip(labels, board, strict=True) if row[FINISHED] < step), labels[-1])


def _mapped(fd: int, rows: int) -> Any:
    return mmap.mmap(fd, rows * _COLUMNS * 8)
