"""Joules and dollars of a simulated run. Power and price are ranges; so is what comes out.

A device draws `idle_w` while it waits and `busy_w` while it works; see `plait.cost_models.prices`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from plait.cost_models.prices import Rate
from plait.cost_models.simulator.result import Result
from plait.spec import Estimate

_HOUR_S, _MILLION = 3600.0, 1e6


@dataclass(frozen=True)
class Costs:
    """Of all devices over the run. `unknown`: devices whose power or price nobody knows; then the sum is None.

    Attributes:
        utilisation: mean busy share of the devices: dollars per token are as good as this is high.
    """

    energy_j: Estimate | None
    joules_per_output_token: Estimate | None
    usd: Estimate | None
    usd_per_million_output_tokens: Estimate | None
    usd_per_million_tokens: Estimate | None
    utilisation: float
    unknown: tuple[str, ...]


def costs(result: Result, rates: Mapping[str, Rate]) -> Costs:
    """What a run took. `rates` is by name of the stage; a stage that is not in it has none."""
    span = result.summary.makespan_s
    output = sum(r.output_tokens for r in result.requests)
    every = output + sum(r.prompt_tokens for r in result.requests)
    energies, prices, unknown = list[Estimate](), list[Estimate](), list[str]()
    for stage in result.stages:
        rate = rates.get(stage.name, Rate())
        if rate.busy_w is not None and rate.idle_w is not None:
            idle_s = max(span - stage.busy_s, 0.0)
            energies.append(_sum([_scaled(rate.busy_w, stage.busy_s), _scaled(rate.idle_w, idle_s)]))
        else:
            unknown.append(f"power of {stage.name}")
        if rate.usd_per_hour is not None:
            prices.append(_scaled(rate.usd_per_hour, span / _HOUR_S))
        else:
            unknown.append(f"price of {stage.name}")
    count = len(result.stages)
    energy = _sum(energies) if len(energies) == count else None
    usd = _sum(prices) if len(prices) == count else None
    return Costs(
        energy_j=energy,
        joules_per_output_token=energy and _scaled(energy, 1 / output),
        usd=usd,
        usd_per_million_output_tokens=usd and _scaled(usd, _MILLION / output),
        usd_per_million_tokens=usd and _scaled(usd, _MILLION / every),
        utilisation=sum(stage.utilisation for stage in result.stages) / count,
        unknown=tuple(unknown),
    )


def _scaled(x: Estimate, factor: float) -> Estimate:
    return Estimate(x.value * factor, x.low * factor, x.high * factor, x.source)


def _sum(parts: Sequence[Estimate]) -> Estimate:
    return Estimate(sum(p.value for p in parts), sum(p.low for p in parts), sum(p.high for p in parts), parts[0].source)
