"""Models and devices for the planner's tests."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from plait.cost_models.profile import KVFacts, ModelProfile, OpFacts, Unit, UnitFacts, profile
from plait.ir import Cost, Step
from plait.spec import Cluster, Device, Link
from tests.ir_models import Shape, build

GB, GIB = 10**9, 2**30


def llama(*, max_positions: int | None = None, **shape: Any) -> ModelProfile:
    """A model of the Llama family through the IR (`tests.ir_models.Shape`), as a profile."""
    return profile(build(Shape(**shape)), max_positions=max_positions)


def toy(
    block_bytes: Sequence[int],
    *,
    embed_bytes: int = 0,
    head_bytes: int = 0,
    kv_heads: int = 1,
    head_dim: int = 1,
    windows: Sequence[int | None] | None = None,
    tied: bool = False,
    flops_per_byte: float = 0.0,
) -> ModelProfile:
    """A profile made by hand: blocks of given weight bytes; every unit reads its weights once a step."""

    def unit(name: str, size: int, kv: tuple[KVFacts, ...] = ()) -> Unit:
        def cost(step: Step) -> Cost:
            return Cost(flops=flops_per_byte * size * step.tokens, weight_bytes=float(size))

        return Unit(UnitFacts((OpFacts("plait.linear", cost),), kv, 8), ((name, size),))

    wins = windows or [None] * len(block_bytes)
    kvs = [(KVFacts(kv_heads, head_dim, 4, window),) if kv_heads else () for window in wins]
    return ModelProfile(
        model="toy",
        dtype="float32",
        embed=unit("embed", embed_bytes),
        blocks=tuple(unit(f"b{i}", size, kv) for i, (size, kv) in enumerate(zip(block_bytes, kvs, strict=True))),
        head=unit("embed" if tied else "head", embed_bytes if tied else head_bytes),
        boundary_bytes_per_token=(8,) * (len(block_bytes) - 1),
        logits_bytes_per_row=16,
    )


def device(
    name: str,
    memory_bytes: int,
    *,
    host: str = "",
    index: int = 0,
    bandwidth: float = 1e12,
    peak: float = 1e14,
    overhead_s: float = 0.0,
    free_bytes: int | None = None,
    peer: float | None = None,
) -> Device:
    """A device without reserve, whose achieved fractions are 1."""
    return Device(
        id=f"{name}.{index}",
        name=name,
        backend="null",
        arch=name,
        host=host or f"{name}{index}",
        memory_bytes=memory_bytes,
        bandwidth_bytes_per_s=bandwidth,
        peak_flops_per_s={"float32": peak, "bfloat16": peak},
        bandwidth_achieved=1.0,
        free_bytes=free_bytes,
        step_overhead_s=overhead_s,
        peer_bytes_per_s=peer,
        confidence="user",
    )


def cluster(*devices: Device, rate: float = 1e10, latency_s: float = 1e-5, links: tuple[Link, ...] = ()) -> Cluster:
    return Cluster(devices, links, Link("*", "*", rate, latency_s), Link("*", "*", rate, latency_s))
