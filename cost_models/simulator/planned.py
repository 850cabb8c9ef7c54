"""From a plan to what is simulated: its slices as stages, its boundaries as hops, its KV memory as pages."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Literal

from plait.cost_models.network import link_between
from plait.cost_models.profile import ModelProfile
from plait.cost_models.roofline import estimate
from plait.cost_models.simulator.batch import ScaledTimes, StageTimes
from plait.cost_models.simulator.op_times import UnitPrices, prices_of, slice_times
from plait.cost_models.simulator.result import StageUse
from plait.cost_models.simulator.setup import Hop, PipelineSpec, Pool, Router, Setup, Stage, Wire
from plait.errors import UserError
from plait.spec import Cluster, Device, Plan, kv_class, ring_pages


@dataclass(frozen=True)
class Limits:
    """What the runtime is told: requests at once, tokens of a step, KV tokens of all requests; steps under way at once
    (None: as many as slices)."""

    max_sequences: int
    max_step_tokens: int
    kv_tokens: int
    in_flight: int | None = None


def setup_of(
    plan: Plan,
    model: ModelProfile,
    limits: Limits,
    *,
    replicas: int = 1,
    router: Router = "least-loaded",
    grow: bool = False,
    times: Mapping[str, StageTimes] | None = None,
) -> Setup:
    """The plan's pipeline, `replicas` times on hardware of its own.

    Args:
        model: the one the plan is of, as its devices hold it.
        grow: KV page by page with pre-emption, instead of plait's own reservation.
        times: by device id, measured ones instead of the cost model's.

    Raises:
        UserError: `device-dtype`, `link-missing`; `kv-pages` where the limits leave no page.
    """
    devices = {device.id: device for device in plan.cluster.devices}
    placed = [(devices[item.devices[0]], *item.blocks) for item in plan.slices]
    known = times or {}
    prices: dict[str, UnitPrices] = {}  # devices that differ in name and place alone share theirs
    stages = []
    for device, start, end in placed:
        kind = repr(replace(device, id="", host=""))
        if device.id not in known and kind not in prices:
            prices[kind] = prices_of(model, device)
        stages.append(known.get(device.id) or slice_times(model, device, start, end, prices[kind]))
    pools = _pools(model, plan.page_tokens, limits)
    pipelines = []
    for number in range(replicas):
        tail = f"#{number}" if replicas > 1 else ""
        pipelines.append(
            PipelineSpec(
                stages=tuple(Stage(p[0].id + tail, own) for p, own in zip(placed, stages, strict=True)),
                hops=tuple(
                    _hop(plan.cluster, a[0], b[0], model.boundary_bytes_per_token[a[2] - 1], tail)
                    for a, b in pairwise(placed)
                ),
                pools=pools,
                max_sequences=limits.max_sequences,
                max_step_tokens=limits.max_step_tokens,
                in_flight=limits.in_flight,
                kv="grow" if grow else "reserve",
            )
        )
    return Setup(tuple(pipelines), router, max_positions=model.max_positions)


def at_end(setup: Setup, plan: Plan, end: Literal["low", "high"]) -> Setup:
    """The same with the time of every stage at one end of its range, all at once: that of the cost model's decode
    steps, and half to twice where its range is only that of a roofline."""
    factors = {device.id: getattr(estimate(1.0, 0.5, device), end) for device in plan.cluster.devices}

    def scaled(stage: Stage) -> Stage:
        return replace(stage, times=ScaledTimes(stage.times, factors[device_of(stage)]))

    pipelines = (replace(pipe, stages=tuple(map(scaled, pipe.stages))) for pipe in setup.pipelines)
    return replace(setup, pipelines=tuple(pipelines))


def device_of(stage: Stage | StageUse) -> str:
    """The id of the device that a stage of a plan, or one of its replicas, is on."""
    return stage.name.partition("#")[0]


def _hop(cluster: Cluster, a: Device, b: Device, bytes_per_token: float, tail: str) -> Hop:
    """Boundaries between the same two hosts share a link, unless the cluster names one for the devices."""
    link = link_between(cluster, a, b)
    ends = (link.a, link.b) if "*" not in (link.a, link.b) else (a.host, b.host) if a.host != b.host else (a.id, b.id)
    return Hop(Wire(f"{ends[0]} > {ends[1]}{tail}", link.bytes_per_s, link.latency_s), bytes_per_token)


def _pools(model: ModelProfile, page_tokens: int, limits: Limits) -> tuple[Pool, ...]:
    """As `plait.runtime.pages.make_pools`: a class that keeps every token, and one for each window."""
    pages = limits.kv_tokens // page_tokens
    if pages < 1:
        raise UserError("kv-pages", "there is no KV page to run with", why=f"{limits.kv_tokens} KV tokens")
    windows = {kv_class(kv.window): kv.window for unit in model.blocks for kv in unit.facts.kv}
    rings = [ring_pages(w, page_tokens, limits.max_step_tokens) for w in windows.values() if w is not None]
    # A model of windows alone has no class that keeps all: its pages then never run out before the rings do.
    full = Pool(pages if kv_class(None) in windows or not windows else 1 << 40, page_tokens)
    return (full, *(Pool(min(pages, limits.max_sequences * ring), page_tokens, ring) for ring in rings))
