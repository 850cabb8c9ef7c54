"""Whether a slice's programs fit the memory of a device, said before XLA is asked and after it refused."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from math import prod
from typing import Any

from plait.backends.xla.arrays import arguments
from plait.backends.xla.buckets import Shape
from plait.backends.xla.chips import GIB, Chip
from plait.backends.xla.program import Program
from plait.backends.xla.record import name_of
from plait.backends.xla.split import Split
from plait.errors import FitError

_UNITS = {"K": 1 << 10, "M": 1 << 20, "G": GIB, "T": 1 << 40}
_SIZE = re.compile(r"(\d+(?:\.\d+)?)([KMGT])\b")

_HINT = "use fewer blocks in this slice, a larger group, shorter contexts or fewer requests at once"


def check_fit(program: Program, shapes: Sequence[Shape], pages: Mapping[str, int], chip: Chip) -> None:
    """Raise FitError where weights, KV and what a step holds beside them are more than a program may take.

    Beside them a step holds at least the keys and values that one layer gathers, its scores, and the logits.
    """
    held, kv = device_bytes(program, shapes[0], pages)
    temporary, shape = max(((_temporary_bytes(program, shape), shape) for shape in shapes), key=lambda row: row[0])
    needed = held + kv + temporary
    if needed > chip.hbm_bytes:
        raise FitError(
            f"the slice does not fit {chip.kind}: {_gib(needed)} of {_gib(chip.hbm_bytes)} GiB",
            why=f"weights {_gib(held)} GiB, KV {_gib(kv)} GiB and at least {_gib(temporary)} GiB for {name_of(shape)}, "
            f"on each of {program.split.chips}",
            hint=_HINT,
            rows=(_row(chip, needed),),
        )


def device_bytes(program: Program, shape: Shape, pages: Mapping[str, int]) -> tuple[int, int]:
    """Bytes of weights and of KV on one device, as the memory lays them out."""
    weights, pools, *_ = arguments(program, shape, pages, wide=False)
    split = program.split
    held = sum(
        _tiled_bytes(array) // (split.chips if split.axis(weight.key) is not None else 1)
        for weight, array in zip(program.weights, weights, strict=True)
    )
    return held, sum(_tiled_bytes(pool) // split.chips for pool in pools)


def too_large(chip: Chip, arch: str, message: str) -> FitError:
    """XLA's RESOURCE_EXHAUSTED in our words. A row only where it is the device's memory that is too small."""
    needed = max((int(float(size) * _UNITS[unit]) for size, unit in _SIZE.findall(message)), default=0)
    line = next((line.strip() for line in message.splitlines() if "memory" in line.lower()), message[:200])
    return FitError(
        f"a program of the slice does not fit {arch}: XLA finds no room for it",
        why=line.partition("RESOURCE_EXHAUSTED: ")[2] or line,
        hint=_HINT,
        rows=(_row(chip, needed),) if needed > chip.hbm_bytes else (),
    )


def _row(chip: Chip, needed: int) -> dict[str, int | str]:
    return {
        "device": chip.kind,
        "needed": needed,
        "free": chip.hbm_bytes,
        "short_by": needed - chip.hbm_bytes,
    }


def _temporary_bytes(program: Program, shape: Shape) -> int:
    """The most that one layer or the head surely holds at once, on one device."""
    split: Split = program.split
    layers = [
        shape.sequences
        * shape.pages(pool.window, program.page_tokens)
        * program.page_tokens
        * pool.sides
        * split.kv_heads(pool.kv_heads)
        // split.chips
        * pool.head_dim
        * 2
        for pool in program.pools
    ]
    rows = shape.sequences if shape.queries == 1 else 1
    logits = [
        4 * rows * (kind.shape[-1] or 0) // split.chips for kind, is_logits in program.outputs.values() if is_logits
    ]
    return max([*layers, *logits, 0])


def _tiled_bytes(array: Any) -> int:
    """A TPU's memory holds tiles of 8 x 128 of the last two dimensions."""
    dims = list(array.shape)
    if len(dims) > 1:
        dims[-1], dims[-2] = -(-dims[-1] // 128) * 128, -(-dims[-2] // 8) * 8
    size: int = prod(dims) * array.dtype.itemsize
    return size


def _gib(size: int) -> str:
    return f"{size / GIB:.2f}"
