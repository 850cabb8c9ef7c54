"""What making code for a TPU needs to know of it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

GIB = 1 << 30


@dataclass(frozen=True)
class Chip:
    """One architecture. A device is what JAX shows as one: a v4 chip (its two cores fused), half a v7x chip.

    Attributes:
        kind: `Device.device_kind` where it is present.
        topologies: devices of a group -> libtpu's name of the smallest part of a pod that holds them, on one host.
        hbm_gib: what XLA lets a program take of one device's memory, as libtpu 0.0.42 says when a program takes more.
        clock_ghz: peak of bf16 in `plait devices` over (MXUs x rows x columns x 2): 4 MXUs of 128 x 128 (v4: 4 in each
            core), from v6e on of 256 x 256. An assumption: no vendor states it.
        gb_per_s: of the memory of one device, as in `plait devices`.
        accelerator: what libtpu calls a host of them (TPU_ACCELERATOR_TYPE).
        options: what else libtpu wants to know.
    """

    kind: str
    topologies: Mapping[int, str]
    hbm_gib: float
    clock_ghz: float
    gb_per_s: float
    accelerator: str
    options: Mapping[str, str] | None = None

    @property
    def hbm_bytes(self) -> int:
        return int(self.hbm_gib * GIB)


_FLAT = {1: "1x1", 2: "1x2", 4: "2x2", 8: "2x4"}
_CUBE = {1: "1x1x1", 2: "1x2x1", 4: "2x2x1", 8: "2x2x2"}
#: Two devices a chip.
_HALVES = {1: "1x1x1", 2: "1x1x1", 4: "1x2x1", 8: "2x2x1"}


def _named(prefix: str, sizes: Mapping[int, str]) -> dict[int, str]:
    return {count: f"{prefix}:{size}" for count, size in sizes.items()}


CHIPS: dict[str, Chip] = {
    "tpu-v4": Chip("TPU v4", _named("v4", _CUBE), 30.75, 1.05, 1200, "v4-8", {"chip_config_name": "megacore"}),
    "tpu-v5e": Chip("TPU v5 lite", _named("v5e", _FLAT), 15.75, 1.5, 819, "v5litepod-4"),
    "tpu-v5p": Chip("TPU v5", _named("v5p", _CUBE), 95.74, 1.75, 2765, "v5p-8"),
    "tpu-v6e": Chip("TPU v6 lite", _named("v6e", _FLAT), 31.25, 1.75, 1638, "v6e-4"),
    "tpu-v7x": Chip("TPU7x", _named("tpu7x", _HALVES), 94.75, 2.2, 3690, "tpu7x-8"),
}

GROUP_SIZES = (1, 2, 4, 8)
