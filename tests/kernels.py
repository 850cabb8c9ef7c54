"""Who runs the kernels of a test: Triton's interpreter, or what `on` puts in its place: a device, in `tests/device`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
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


@dataclass(frozen=True)
class Place:
    """Where kernels run, and how exact the arithmetic is there.

    Attributes:
        functions: how many times as wrong as the host's the functions of float32 may be: exp, erf, rsqrt, division.
        fp8_loss: what a sum of products of fp8 may lose, as a part of the sum of their magnitudes.
    """

    run: Runner
    functions: float = 1.0
    fp8_loss: float = 0.0


_places = [Place(interpret.run)]


def run(
    kernel: Kernel,
    variant: Variant,
    pointers: Mapping[str, NDArray[Any] | None],
    scalars: Mapping[str, int | float],
    grid: tuple[int, int, int] | None = None,
) -> None:
    """Launch a kernel on arrays of the host; written arrays are changed in place."""
    here().run(kernel, variant, pointers, scalars, grid)


def here() -> Place:
    """Where they run now."""
    return _places[-1]


def slack() -> float:
    """What to multiply the limits of float32 results with."""
    return here().functions


@contextmanager
def on(place: Place) -> Iterator[None]:
    """Kernels run there meanwhile."""
    _places.append(place)
    try:
        yield
    finally:
        _places.pop()
