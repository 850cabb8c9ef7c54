"""Devices, the hosts they sit in, and the links between them, in base units: bytes, bytes/s, FLOP/s, seconds."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

Confidence = Literal["read", "derived", "memory", "user", "measured", "assumed"]


@dataclass(frozen=True)
class Device:
    """One accelerator, or one logical half of it, as the planner sees it.

    Attributes:
        id: unique in the cluster, e.g. `h100.0`.
        name: short catalogue name, e.g. `h100`; the slice's folder and every table say it.
        backend: who compiles for it: cuda, rocm, xla, cpu, null, or an out-of-tree name.
        arch: what the code is made for: sm_90a, gfx942, tpu-v5e.
        peak_flops_per_s: dense peak by compute dtype (float32, bfloat16, float16, int8 ...).
        achieved: fraction of the peak that a large matmul reaches, by dtype; measured where a source has it.
        bandwidth_achieved: fraction of the memory bandwidth that a streaming kernel reaches.
        memory_bytes: capacity as the vendor states it, in bytes.
        free_bytes: what is free now; None means all of `memory_bytes`.
        reserve_bytes: what driver, runtime and fragmentation take; never given to slices.
        unified: memory shared with a CPU.
        step_overhead_s: host and launch cost of one step of one slice.
        profile: the file of `plait profile` that times of its ops come from; None where they come from the catalogue.
    """

    id: str
    name: str
    backend: str
    arch: str
    host: str
    memory_bytes: int
    bandwidth_bytes_per_s: float
    peak_flops_per_s: dict[str, float]
    achieved: dict[str, float] = field(default_factory=dict)
    bandwidth_achieved: float = 0.8
    reserve_bytes: int = 0
    free_bytes: int | None = None
    unified: bool = False
    step_overhead_s: float = 0.0
    peer_bytes_per_s: float | None = None
    confidence: Confidence = "assumed"
    sources: tuple[str, ...] = ()
    profile: str | None = None


@dataclass(frozen=True)
class Link:
    """A one-way path between two hosts (or two devices of one host)."""

    a: str
    b: str
    bytes_per_s: float
    latency_s: float
    kind: str = "assumed"
    source: str = ""


@dataclass(frozen=True)
class Cluster:
    """`default_link` is used between two hosts that no `links` entry names; `local_link` inside a host, staged through
    host memory, where the devices have no peer link in common."""

    devices: tuple[Device, ...]
    links: tuple[Link, ...] = ()
    default_link: Link | None = None
    local_link: Link | None = None
    schema: Literal[1] = 1
