"""Who runs the kernels of a test: Triton's interpreter, or what `on` puts in its place: a device, in `tests/device`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Protocol

from numpy.typing import NDArray

from plait.backends.kernels.gpu import interpret
from plait.backends.kernels.gpu.kernel import Kernel, Variant


class Runner(Protocol):
    """As `plait.backends.kernels.gpu.interpret.run`."""

    def __call__(
        self,
        kernel: Kernel,
        variant: Variant,
        pointers: Mapping[str, NDArray[Any] | None],
        scalars: Mapping[str, int | float],
        grid: tuple[int, int, int] | None = None,
    ) -> None: ...


#: Runners, and how many times as wrong as the host's their float32 functions may be (exp, erf, rsqrt, division).
_runners: list[tuple[Runner, float]] = [(interpret.run, 1.0)]


def run(
    kernel: Kernel,
    variant: Variant,
    pointers: Mapping[str, NDArray[Any] | None],
    scalars: Mapping[str, int | float],
    grid: tuple[int, int, int] | None = None,
) -> None:
    """Launch a kernel on arrays of the host; written arrays are changed in place."""
    current()(kernel, variant, pointers, scalars, grid)


def current() -> Runner:
    """What runs them now."""
    return _runners[-1][0]


def slack() -> float:
    """What to multiply the limits of float32 results with."""
    return _runners[-1][1]


@contextmanager
def on(runner: Runner, slack: float) -> Iterator[None]:
    """Kernels run there meanwhile."""
    _runners.append((runner, slack))
    try:
        yield
    finally:
        _runners.pop()
