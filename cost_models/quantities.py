"""The numbers that are fitted: of devices, of engines, of all; and how levels add up to one."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from plait.cost_models.cases import Point


@dataclass(frozen=True)
class Quantity:
    """A number to fit: its default, and how far (as a log ratio) backends, architectures and devices stray from it."""

    default: float
    strays: tuple[float, float, float] = (0.4, 0.2, 0.15)
    unit: str = ""
    what: str = ""


#: Shares are of what a large matmul or a streaming kernel reaches (`achieved`, `bandwidth_achieved`).
DEVICE: dict[str, Quantity] = {
    "bandwidth": Quantity(1.0, what="share of the achieved bandwidth: weights and activations"),
    "expert_bandwidth": Quantity(0.8, what="share of the achieved bandwidth: weights of experts"),
    "kv_bandwidth": Quantity(0.7, what="share of the achieved bandwidth: KV in attention"),
    "matmul": Quantity(0.85, what="share of the achieved peak: matrices in 16 bits"),
    "matmul_fp8": Quantity(0.75, what="the same in FP8"),
    "matmul_fp4": Quantity(0.5, what="the same in FP4"),
    "experts": Quantity(0.4, what="share of the achieved peak of their dtype: experts"),
    "attention": Quantity(0.5, what="share of the achieved 16-bit peak: attention"),
    "idle_rows": Quantity(32.0, (0.7, 0.4, 0.2), "rows", "what a product costs more than its rows"),
    "launch_s": Quantity(3e-6, (0.7, 0.3, 0.2), "s", "one kernel"),
    "expert_launch_s": Quantity(2e-5, (0.7, 0.3, 0.2), "s", "what sorts tokens by expert and sums what experts give"),
    "reduce_latency_s": Quantity(8e-6, (0.7, 0.3, 0.2), "s", "one round of an all-reduce"),
    "link": Quantity(0.6, what="share of the nominal bandwidth to all peers"),
}

#: Strays: of an engine, of one of its generations.
ENGINE: dict[str, Quantity] = {
    "launches": Quantity(1.0, (0.3, 0.3, 0.0), what="times the launches of a device: what is fused, graphs"),
    "prefill": Quantity(1.2, (0.1, 0.15, 0.0), what="times the device's time for prompts, at least once"),
    "host_s": Quantity(2e-3, (1.0, 0.7, 0.0), "s", "host work of a step"),
    "host_request_s": Quantity(1e-5, (1.0, 1.0, 0.0), "s", "host work of a step for each request"),
    "first_s": Quantity(0.03, (0.7, 0.7, 0.0), "s", "before a prompt is run and after its token is made"),
    "stretch": Quantity(
        1.2, (0.4, 0.4, 0.0), what="times its own time until a prompt is done, beside others, at least once"
    ),
    "stage_s": Quantity(4e-3, (1.0, 1.0, 0.0), "s", "what a step of one batch costs each further stage of a pipeline"),
    "queue": Quantity(1.0, (0.7, 0.5, 0.0), what="times the wait of an M/D/1 queue"),
    "burst": Quantity(0.1, (1.0, 1.0, 0.0), what="share of requests that the benchmark starts together"),
}

GLOBAL: dict[str, Quantity] = {
    "overlap": Quantity(3.0, (0.3, 0.0, 0.0), what="p of the norm of arithmetic and traffic")
}


def quantity(name: str) -> Quantity:
    return (GLOBAL | DEVICE | ENGINE)[name]


def device_levels(point: Point) -> tuple[str, ...]:
    backend, arch = point.device.backend, point.device.arch
    return backend, f"{backend}/{arch}", f"{backend}/{arch}/{point.device_label}"


def engine_levels(point: Point) -> tuple[str, ...]:
    return point.engine, f"{point.engine}/{point.generation}"


def value_of(name: str, levels: Sequence[str], logs: Mapping[tuple[str, str], float]) -> float:
    """A quantity with what all its levels add; levels that were not fitted add nothing."""
    return float(quantity(name).default * np.exp(sum(logs.get((name, level), 0.0) for level in levels)))
