"""What devices reach, as fitted: `fitted.yaml`, written by `benchmarks/accuracy.py --fit` and read strictly.

A device takes the numbers fitted on it, else those of its architecture, else those of its backend; each says so
(`measured`, `interpolated`, `assumed`). A backend without measurements reaches what its device states (`achieved`,
`bandwidth_achieved`), with no cost of launches.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from importlib.resources import files
from typing import Literal

import yaml

from plait.cost_models.op_time import ATTENTION, EXPERTS, KINDS, MATMUL
from plait.spec import Device, Source, from_dict

#: The most of its nominal bandwidth that any kernel streams; refresh and row changes take the rest.
MOST_BANDWIDTH = 0.95

#: Where nothing was fitted: the roofline's maximum.
_NO_OVERLAP_LOST = 64.0

Phase = Literal["prefill", "decode", "throughput"]


@dataclass(frozen=True)
class Fitted:
    """A number with the range that the fit leaves it (80 %), and where it comes from."""

    value: float
    low: float
    high: float
    source: Source


@dataclass(frozen=True)
class FittedSpeeds:
    """The file.

    Attributes:
        overlap: p of the norm of arithmetic and traffic.
        compute_units: by architecture, what a tile of a product occupies.
        devices: `backend`, `backend/architecture` or `backend/architecture/name` -> `quantities.DEVICE` -> number.
        engines: `engine` or `engine/generation` -> `quantities.ENGINE` -> number.
        spread: backend -> phase -> |log error| that 80 % of points of groups left out of the fit stay below.
    """

    overlap: Fitted
    compute_units: dict[str, int]
    devices: dict[str, dict[str, Fitted]]
    engines: dict[str, dict[str, Fitted]]
    spread: dict[str, dict[Phase, float]]
    schema: Literal[1] = 1


@functools.cache
def fitted() -> FittedSpeeds:
    text = files("plait.cost_models").joinpath("fitted.yaml").read_text(encoding="utf-8")
    return from_dict(FittedSpeeds, yaml.safe_load(text), path="fitted.yaml")


def quantities(device: Device) -> dict[str, Fitted] | None:
    """What was fitted for a device; None where its backend has no measurements."""
    known = fitted().devices
    path = f"{device.backend}/{device.arch}"
    return known.get(f"{path}/{device.name}") or known.get(path) or known.get(device.backend)


def spread(device: Device, phase: Phase) -> float | None:
    """See `FittedSpeeds.spread`; None where its backend has no measurements."""
    found = fitted().spread.get(device.backend)
    return None if found is None else found[phase]


@dataclass(frozen=True)
class DeviceSpeeds:
    """What a device reaches in one dtype; rates per second.

    Attributes:
        flops: by kind of op (`op_time.KINDS`).
        efficiency: those flops, to the nominal peak.
        sources: of the numbers that ops of a kind are timed with.
    """

    flops: dict[str, float]
    bytes: dict[str, float]
    kv_bytes: float
    idle_rows: float
    launch_s: float
    expert_launch_s: float
    units: int
    overlap: float
    efficiency: dict[str, float]
    sources: dict[str, Source]


#: The share of the achieved peak that each kind of op reaches, and the share of the achieved bandwidth.
_FLOPS = {MATMUL: "matmul", EXPERTS: "experts", ATTENTION: "attention"}
_BYTES = {EXPERTS: "expert_bandwidth"}
_NARROW = {"fp8": "matmul_fp8", "int8": "matmul_fp8", "fp4": "matmul_fp4"}

_RANK: dict[Source, int] = {"measured": 0, "interpolated": 1, "roofline": 2, "assumed": 3}


def device_speeds(device: Device, dtype: str, *, nominal: bool = False) -> DeviceSpeeds:
    """`nominal`: peak and bandwidth as the vendor states them, full overlap, free launches: what nothing beats."""
    peak, bandwidth = device.peak_flops_per_s[dtype], device.bandwidth_bytes_per_s
    known = None if nominal else quantities(device)
    achieved = 1.0 if nominal else device.achieved.get(dtype, 1.0)
    stream = 1.0 if nominal else device.bandwidth_achieved
    if known is None:
        source: Source = "roofline" if nominal else "assumed"
        return DeviceSpeeds(
            flops=dict.fromkeys(KINDS, peak * achieved),
            bytes=dict.fromkeys(KINDS, bandwidth * stream),
            kv_bytes=bandwidth * stream,
            idle_rows=0.0,
            launch_s=0.0,
            expert_launch_s=0.0,
            units=0,
            overlap=_NO_OVERLAP_LOST,
            efficiency=dict.fromkeys(KINDS, achieved),
            sources=dict.fromkeys(KINDS, source),
        )
    flops = {kind: _FLOPS.get(kind, "matmul") for kind in KINDS}
    flops[MATMUL] = _NARROW.get(dtype, "matmul")
    traffic = {kind: _BYTES.get(kind, "bandwidth") for kind in KINDS}
    # `achieved` is what the largest matmul reaches: nothing reaches more.
    efficiency = {kind: achieved * min(1.0, known[name].value) for kind, name in flops.items()}
    streams = {kind: min(MOST_BANDWIDTH, stream * known[name].value) for kind, name in traffic.items()}
    used = {kind: [known[flops[kind]], known[traffic[kind]]] for kind in KINDS}
    used[ATTENTION].append(known["kv_bandwidth"])
    return DeviceSpeeds(
        flops={kind: peak * share for kind, share in efficiency.items()},
        bytes={kind: bandwidth * share for kind, share in streams.items()},
        kv_bytes=bandwidth * min(MOST_BANDWIDTH, stream * known["kv_bandwidth"].value),
        idle_rows=known["idle_rows"].value,
        launch_s=known["launch_s"].value,
        expert_launch_s=known["expert_launch_s"].value,
        units=fitted().compute_units.get(device.arch, 0),
        overlap=fitted().overlap.value,
        efficiency=efficiency,
        sources={
            kind: max((number.source for number in numbers), key=_RANK.__getitem__) for kind, numbers in used.items()
        },
    )
