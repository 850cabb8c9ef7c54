"""Time of collectives between the devices of one slice, and of hops that are staged through host memory.

Ring all-reduce: every byte is sent 2 (n - 1) / n times (Patarasuk and Yuan 2009, "Bandwidth optimal all-reduce
algorithms"); all-gather and all-to-all half of that. Small messages take the one-shot way, in which all devices send
all they have to all others at once: one latency, n - 1 times the bytes. The faster of both is taken.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from plait.cost_models.tables import Floats


def all_reduce_s(nbytes: Any, devices: Any, bytes_per_s: Any, latency_s: Any) -> Floats:
    """Seconds to sum `nbytes` over `devices`; 0 for one device.

    Args:
        bytes_per_s: one way, of one device to all its peers together.
        latency_s: of one round of messages.
    """
    n = np.asarray(devices, dtype=float)
    one_shot = latency_s + nbytes * (n - 1) / bytes_per_s
    ring = 2 * latency_s + 2 * nbytes * (n - 1) / n / bytes_per_s
    return np.where(n > 1, np.minimum(one_shot, ring), 0.0)


def all_gather_s(nbytes: Any, devices: Any, bytes_per_s: Any, latency_s: Any) -> Floats:
    """Seconds until every device has all `nbytes`, of which each held an equal part."""
    n = np.asarray(devices, dtype=float)
    return np.where(n > 1, latency_s + nbytes * (n - 1) / n / bytes_per_s, 0.0)


def all_to_all_s(nbytes: Any, devices: Any, bytes_per_s: Any, latency_s: Any) -> Floats:
    """Seconds until each device has sent an equal part of its `nbytes` to every other."""
    return all_gather_s(nbytes, devices, bytes_per_s, latency_s)


def staged_hop_s(nbytes: float, stages: tuple[tuple[float, float], ...], chunk_bytes: float | None = None) -> float:
    """Seconds of one message through stages in a row (pack, device to host, wire, host to device), each of
    (bytes per second, latency).

    In one piece the stages add up. In chunks they overlap: the first chunk passes all stages, then the slowest stage
    lets one chunk through at a time.
    """
    if nbytes <= 0:
        return sum(latency for _, latency in stages)
    piece = min(chunk_bytes or nbytes, nbytes)
    first = sum(latency + piece / rate for rate, latency in stages)
    return first + (nbytes - piece) / min(rate for rate, _ in stages)
