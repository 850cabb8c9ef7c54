"""Fits what devices and engines reach on measured points.

A quantity of a device (its bandwidth, the speed of its matrices ...) is a default times what its backend, its
architecture and the device itself add, each on a log scale with a normal prior: a device without points takes its
architecture's value, an architecture without points its backend's. Residuals are log ratios under a soft-l1 loss, so
that an outlier counts linearly. scipy's trust-region least squares finds the mode; its curvature there gives the range
of every value.

Points are made elsewhere; nothing here reads files or models.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from plait.cost_models.cases import Point
from plait.cost_models.quantities import DEVICE, ENGINE, GLOBAL, Quantity, device_levels, engine_levels, quantity
from plait.cost_models.sheet import Sheet
from plait.cost_models.speeds import Fitted as Number
from plait.cost_models.speeds import FittedSpeeds, Phase
from plait.cost_models.tables import Floats
from plait.spec import Source


@dataclass(frozen=True, eq=False)
class Names:
    """Which node of the hierarchy each quantity of a device or an engine adds up from.

    Attributes:
        nodes: (quantity, level name) in the order of the vector; levels are `backend/arch/device`, `engine/generation`.
    """

    nodes: tuple[tuple[str, str], ...]

    @staticmethod
    def of(points: Sequence[Point]) -> Names:
        found: dict[tuple[str, str], None] = {}
        for point in points:
            found.update(dict.fromkeys((name, "") for name in GLOBAL))
            for level in device_levels(point):
                found.update(dict.fromkeys((name, level) for name in DEVICE))
            for level in engine_levels(point):
                found.update(dict.fromkeys((name, level) for name in ENGINE))
        return Names(tuple(found))

    def index(self) -> dict[tuple[str, str], int]:
        return {node: i for i, node in enumerate(self.nodes)}

    def strays(self) -> Floats:
        return np.array([quantity(name).strays[level.count("/")] for name, level in self.nodes])

    def independent(self, points: Sequence[Point]) -> list[tuple[list[int], list[Any]]]:
        """Nodes that no point shares, to be moved at once: of one quantity on one level. With the points of each."""
        levels = [("", *device_levels(point), *engine_levels(point)) for point in points]
        rows = {level: np.array([level in mine for mine in levels]) for _, level in self.nodes}
        sets: dict[tuple[str, int], list[int]] = {}
        for j, (name, level) in enumerate(self.nodes):
            sets.setdefault((name, level.count("/")), []).append(j)
        return [(members, [rows[self.nodes[j][1]] for j in members]) for members in sets.values()]


@dataclass(frozen=True, eq=False)
class Fitted:
    """The mode of every node and their covariance, on a log scale."""

    names: Names
    at: Floats
    covariance: Floats

    @property
    def logs(self) -> dict[tuple[str, str], float]:
        return dict(zip(self.names.nodes, self.at.tolist(), strict=True))

    def number(self, name: str, levels: Sequence[str]) -> Number:
        """A quantity as its levels add up, with its range: 80 % of what the fit leaves open, and of how far levels that
        are not given stray."""
        about, index = quantity(name), self.names.index()
        mine = [index[name, level] for level in levels if (name, level) in index]
        prior = sum(stray**2 for stray in about.strays)
        left = float(self.covariance[np.ix_(mine, mine)].sum()) + sum(s**2 for s in about.strays[len(mine) :])
        value = about.default * float(np.exp(self.at[mine].sum()))
        reach = float(np.exp(_EIGHTY * left**0.5))
        known = left < _INFORMED * prior
        source: Source = (
            "assumed" if not known else "measured" if len(levels) > 1 or levels[-1] == "" else "interpolated"
        )
        return Number(_short(value), _short(value / reach), _short(value * reach), source)

    def speeds(self, units: Mapping[str, int], spread: Mapping[str, Mapping[Phase, float]]) -> FittedSpeeds:
        """All numbers as the file holds them."""
        levels = {name for _, name in self.names.nodes if name}
        devices = [name for name in sorted(levels) if ("launch_s", name) in self.names.index()]
        engines = [name for name in sorted(levels) if ("host_s", name) in self.names.index()]

        def path(name: str) -> list[str]:
            parts = name.split("/")
            return ["/".join(parts[: i + 1]) for i in range(len(parts))]

        def table(quantities: Mapping[str, Quantity], name: str, depth: int) -> dict[str, Number]:
            found = {key: self.number(key, path(name)) for key in quantities}
            if name.count("/") == depth:
                return found
            # What holds for all devices of an architecture is a neighbour's number.
            return {
                key: replace(number, source="interpolated" if number.source == "measured" else number.source)
                for key, number in found.items()
            }

        return FittedSpeeds(
            overlap=self.number("overlap", [""]),
            compute_units=dict(units),
            devices={name: table(DEVICE, name, 2) for name in devices},
            engines={name: table(ENGINE, name, 1) for name in engines},
            spread={backend: dict(phases) for backend, phases in spread.items()},
        )


#: Standard deviations on each side that hold 80 % of a normal; the share of the prior's variance below which the points
#: have said something.
_EIGHTY, _INFORMED = 1.28, 0.5


def _short(value: float) -> float:
    return float(f"{value:.4g}")


#: Noise of one log residual, and the size from which points of one group count as fewer than they are: they share what
#: the model has wrong about it.
NOISE, GROUP = 0.12, 40

#: Step of the differences that make the Jacobian, in standard deviations of the prior.
_MOVE = 1e-4


def fit(points: Sequence[Point], *, rounds: int = 40) -> Fitted:
    """The quantities that explain the points best. Deterministic."""
    from scipy.optimize import least_squares  # type: ignore[import-untyped]  # only the fit needs it

    sheet, names = Sheet(points), Names.of(points)
    sizes = Counter((point.group, point.metric) for point in points)
    weight = np.array([min(1.0, (GROUP / sizes[p.group, p.metric]) ** 0.5) for p in points]) / NOISE
    wanted, strays = np.log(sheet.value), names.strays()

    def errors(x: Floats) -> Floats:
        r = (np.log(sheet.predict(dict(zip(names.nodes, x * strays, strict=True)))) - wanted) * weight
        return np.asarray(np.sign(r) * np.sqrt(2 * (np.sqrt(1 + r * r) - 1)))  # soft l1

    def residuals(x: Floats) -> Floats:
        return np.concatenate([errors(x), x])

    together = names.independent(points)

    def jacobian(x: Floats) -> Floats:
        base, out = errors(x), np.zeros((len(points), len(x)))
        for members, mine in together:
            moved = x.copy()
            moved[members] += _MOVE
            slope = (errors(moved) - base) / _MOVE
            for j, rows in zip(members, mine, strict=True):
                out[rows, j] = slope[rows]
        return np.concatenate([out, np.eye(len(x))])

    done = least_squares(residuals, np.zeros(len(names.nodes)), jac=jacobian, max_nfev=rounds, ftol=1e-5)
    covariance = np.linalg.inv(done.jac.T @ done.jac) * np.outer(strays, strays)
    return Fitted(names, done.x * strays, covariance)


def expected(points: Sequence[Point], fitted: Fitted) -> Floats:
    """What the fit says of points, whether it saw them or not."""
    return Sheet(points).predict(fitted.logs)


def left_out(points: Sequence[Point], rounds: int = 15) -> Floats:
    """Of every point, the log ratio of what is expected to what was measured by a fit that saw nothing of its group."""
    out = np.zeros(len(points))
    for group in sorted({point.group for point in points}):
        mine = np.array([point.group == group for point in points])
        others = [point for point in points if point.group != group]
        rest = [point for point in points if point.group == group]
        out[mine] = np.log(expected(rest, fit(others, rounds=rounds)) / [point.value for point in rest])
    return out


def spread_of(points: Sequence[Point], errors: Floats, share: float = 0.8) -> dict[str, dict[Phase, float]]:
    """The |log error| that `share` of points stay below, by backend and phase: the conformal quantile, the
    ceil((n + 1) share)-th smallest (Vovk et al. 2005, "Algorithmic learning in a random world"). Where a backend has
    fewer points than that takes, the widest of all backends stands in."""
    found: dict[tuple[str, Phase], list[float]] = {}
    for point, error in zip(points, np.abs(errors), strict=True):
        found.setdefault((point.device.backend, point.phase), []).append(float(error))
    widest: dict[Phase, float] = {}
    known: dict[tuple[str, Phase], float] = {}
    for (backend, phase), values in found.items():
        rank = int(np.ceil((len(values) + 1) * share))
        if rank <= len(values):
            known[backend, phase] = _short(sorted(values)[rank - 1])
            widest[phase] = max(widest.get(phase, 0.0), known[backend, phase])
    phases: tuple[Phase, ...] = ("prefill", "decode", "throughput")
    backends = sorted({point.device.backend for point in points})
    return {b: {phase: known.get((b, phase), widest.get(phase, 0.7)) for phase in phases} for b in backends}
