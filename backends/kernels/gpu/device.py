"""What the executor asks of a device. Two answer: `cupy_device`, a GPU; `interpret_device`, Triton's interpreter."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from numpy.typing import NDArray

from plait.backends.kernels.gpu.launch import Binary

Call = Callable[[], None]
"""A launch with everything settled."""


class Memory(Protocol):
    """Bytes of a device. Each device has its own kind, and is handed back no other."""

    @property
    def nbytes(self) -> int: ...


class Region(NamedTuple):
    """Where a pointer argument points, and how many bytes its buffer has from there on."""

    memory: Any
    offset: int
    nbytes: int


class Device(Protocol):
    """Work goes in order: what is written before a launch is there when it runs.

    Attributes:
        graphs: whether `capture` records launches to be repeated at once.
    """

    graphs: bool

    def allocate(self, nbytes: int) -> Memory:
        """Raises FitError where the device has no room."""

    def host(self, nbytes: int) -> NDArray[Any]:
        """Bytes of the host that `send` may read from."""

    def write(self, memory: Any, offset: int, array: NDArray[Any]) -> None:
        """Copy a contiguous array to the device. It may be changed afterwards."""

    def send(self, memory: Any, array: NDArray[Any]) -> None:
        """Copy the beginning of a `host` array to the beginning of `memory`; it must stay as it is until `read`."""

    def read(self, memory: Any, offset: int, array: NDArray[Any]) -> None:
        """Fill a contiguous array from the device, after everything before it is done."""

    def load(self, binary: Binary, folder: Path) -> Any:
        """What `bind` launches."""

    def bind(
        self,
        function: Any,
        grid: tuple[int, int, int],
        regions: Sequence[Region | None],
        scalars: Sequence[int | float],
    ) -> Call:
        """One launch. Regions stand in the order of `Binary.types`, scalars in that of `Binary.scalars`."""

    def run(self, calls: Sequence[Call]) -> None:
        """Launch one after the other."""

    def capture(self, calls: Sequence[Call]) -> Call:
        """The same as one call. Runs nothing."""

    def close(self) -> None:
        """Free everything that was allocated. Idempotent."""
