"""Times of launches on a GPU, by its own events."""

from __future__ import annotations

from typing import Any

from plait.backends.kernels.gpu.cupy_device import CupyDevice
from plait.backends.kernels.gpu.device import Call

#: Written before each launch: more than any chip's caches hold, and it takes longer than the host needs to launch.
FLUSH_BYTES = 512 << 20

_WARM_UP, _TIMES = 3, 20


class CupyClock:
    """`plait.backends.kernels.gpu.tune.Clock`.

    Args:
        cupy: the module.
        on: where the launches that are timed run.
    """

    def __init__(self, cupy: Any, on: CupyDevice, ordinal: int) -> None:
        self.device = cupy.cuda.runtime.getDeviceProperties(ordinal)["name"].decode()
        self._cupy, self._on = cupy, on
        self._flush = on.allocate(FLUSH_BYTES)

    def times_us(self, call: Call) -> list[float]:
        events, stream = self._cupy.cuda.Event, self._on.stream
        pairs = [(events(), events()) for _ in range(_TIMES)]
        self._on.run([call] * _WARM_UP)
        for begin, end in pairs:
            self._flush.pointer.memset_async(0, FLUSH_BYTES, stream)
            begin.record(stream)
            self._on.run([call])
            end.record(stream)
        stream.synchronize()
        return [1e3 * self._cupy.cuda.get_elapsed_time(begin, end) for begin, end in pairs]
