"""Ask libtpu for more memory than a TPU has, and print what it has: `python -m tests.host.xla_memory_probe`.

A line per architecture and group size: how many devices were described, and GiB of each.
"""

from __future__ import annotations

import re

import jax
import numpy as np

from plait.backends.base import CompileOptions
from plait.backends.xla.arrays import mesh_of, sharding, spec
from plait.backends.xla.build import Request, devices_of
from plait.backends.xla.chips import CHIPS, GROUP_SIZES
from plait.backends.xla.record import Bounds


def available_gib(arch: str, group_size: int) -> tuple[int, float]:
    devices = devices_of(Request(arch, "gather", Bounds.of(CompileOptions(group_size=group_size))))
    place = sharding(mesh_of(devices), spec())
    kind = jax.ShapeDtypeStruct((1 << 18, 1 << 19), np.float32)
    said = ""
    try:
        jax.jit(lambda x: x + x[:1], in_shardings=place, out_shardings=place).lower(kind).compile()
    except jax.errors.JaxRuntimeError as error:
        said = str(error)
    found = re.search(r"available HBM \(([\d.]+)G\)", said)
    assert found, said or "512 GiB fit"
    return len(devices), float(found[1])


if __name__ == "__main__":
    for arch in CHIPS:
        for group_size in GROUP_SIZES:
            print(arch, group_size, *available_gib(arch, group_size), flush=True)
