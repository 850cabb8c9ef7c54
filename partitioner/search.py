"""The exact search: contiguous slices over any multiset of kinds in any order.

Let E(S, t)[b] be the best way to place blocks b .. L on exactly the devices S (a count per kind), the slice at b on
kind t. Then

    E({t}, t)[b] = stage(t, b, L)
    E(S, t)[b]   = min over e > b, u in S - t of  stage(t, b, e) + hop(t, u, e)  (+)  E(S - t, u)[e]

where (+) is + or max. The last cut is free, the order is free, and min over t of E(S, t)[0] is the best plan that uses
exactly S: one table answers the best plan, the best without a device and the best with another one. Free order is
NP-hard in general; counts per kind keep the number of S at prod(count + 1).
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from plait.cost_models.tables import Floats
from plait.errors import UserError
from plait.partitioner.tables import Bools, Measure
from plait.words import counted

#: Elementary steps of one table that still take seconds; above it the exact search is refused by name.
MAX_WORK = 3e9

Counts = tuple[int, ...]
Placement = tuple[tuple[int, int, int], ...]  # (kind, start, end) in the order of the blocks


@dataclass(frozen=True, eq=False)
class Space:
    """The sets of devices, and which hops are the same: their minimum is taken once."""

    counts: Counts
    blocks: int
    hop_groups: tuple[tuple[tuple[int, ...], ...], ...]  # per kind: kinds that all its hops lead to alike

    @staticmethod
    def of(counts: Counts, blocks: int, hops: list[Floats]) -> Space:
        kinds = range(len(counts))
        groups = []
        for t in kinds:
            same: dict[bytes, list[int]] = {}
            for u in kinds:
                if u != t or counts[t] > 1:
                    same.setdefault(b"".join(hop[t, u].tobytes() for hop in hops), []).append(u)
            groups.append(tuple(map(tuple, same.values())))
        return Space(counts, blocks, tuple(groups))

    @cached_property
    def work(self) -> float:
        """Elementary steps of one table."""
        per_set = sum(max(1, len(groups)) for groups in self.hop_groups)
        return float(np.prod([float(n + 1) for n in self.counts])) * per_set * (self.blocks + 1) ** 2

    def check(self) -> None:
        if self.work > MAX_WORK:
            raise UserError(
                "plan-too-large",
                f"{sum(self.counts)} devices of {counted(len(self.counts), 'kind')} are too many for the exact search",
                why=f"it would take {self.work:.1e} steps, the limit is {MAX_WORK:.0e}",
                hint="allow fewer devices, put equal ones on one host, or say how many layers each gets",
            )

    def sets(self, most: int | None = None) -> Iterator[Counts]:
        """Every non-empty count vector with at most `most` devices, smaller ones first."""
        limit = min(self.blocks, sum(self.counts)) if most is None else most
        every = itertools.product(*(range(n + 1) for n in self.counts))
        return iter(sorted((s for s in every if 0 < sum(s) <= limit), key=lambda s: (sum(s), s)))


@dataclass(frozen=True, eq=False)
class Mask:
    """Which slices may stand: `inner[t][g]` (start, end) with a hop of group g behind, `last[t]` (start) at the end."""

    space: Space
    inner: tuple[tuple[Bools, ...], ...]
    last: Bools

    @staticmethod
    def of(space: Space, allowed: Bools) -> Mask:
        """`allowed` is (kinds, start, end)."""
        inner = tuple((allowed[t],) * len(groups) for t, groups in enumerate(space.hop_groups))
        return Mask(space, inner, allowed[:, :, -1])

    def within(self, cost: Measure, limit: float) -> Mask:
        """Only slices that cost, with their hop, at most `limit`."""
        whole = _with_hops(self.space, cost)
        return Mask(
            self.space,
            tuple(
                tuple(kept & (cost_ <= limit) for kept, cost_ in zip(*pair, strict=True))
                for pair in zip(self.inner, whole, strict=True)
            ),
            self.last & (cost.stage[:, :, -1] <= limit),
        )

    def costs(self, cost: Measure) -> Floats:
        """The distinct costs of the slices that may stand, ascending."""
        whole = _with_hops(self.space, cost)
        found = [c[kept] for pair in zip(self.inner, whole, strict=True) for kept, c in zip(*pair, strict=True)]
        return np.unique(np.concatenate([*found, cost.stage[:, :, -1][self.last]]))


class Table:
    """E for one cost over the slices that a mask leaves."""

    def __init__(self, mask: Mask, cost: Measure, *, bottleneck: bool, most: int | None = None) -> None:
        space = self.space = mask.space
        self._join: Callable[[Floats, Floats], Floats] = np.maximum if bottleneck else np.add
        self._stage = [
            [(group, np.where(kept, whole, np.inf)) for group, kept, whole in zip(*each, strict=True)]
            for each in zip(space.hop_groups, mask.inner, _with_hops(space, cost), strict=True)
        ]
        self._last = np.where(mask.last, cost.stage[:, :, -1], np.inf)
        self.rows: dict[Counts, Floats] = {}
        for members in space.sets(most):
            self.rows[members] = self._row(members)

    def value(self, members: Counts) -> float:
        """The best plan on exactly these devices; inf where there is none."""
        return float(self.rows[members][:, 0].min())

    @cached_property
    def values(self) -> dict[Counts, float]:
        return {members: self.value(members) for members in self.rows}

    @property
    def best(self) -> float:
        return min(self.values.values(), default=np.inf)

    def best_where(self, keep: Callable[[Counts], bool]) -> tuple[float, Counts | None]:
        """The best value among sets that `keep` takes, and the set."""
        kept = [(value, sum(s), s) for s, value in self.values.items() if keep(s)]
        if not kept:
            return np.inf, None
        value, _, members = min(kept)
        return value, members

    def trace(self, members: Counts) -> Placement:
        """A plan that attains the best value on exactly these devices."""
        start, out = 0, []
        kind = int(self.rows[members][:, 0].argmin())
        while sum(members) > 1:
            rest = _less(members, kind)
            options = [
                (joined.min(), int(joined.argmin()), u)
                for group, stage in self._stage[kind]
                for u in group
                if rest[u]
                for joined in (self._join(stage[start], self.rows[rest][u]),)
            ]
            _, end, following = min(options)
            out.append((kind, start, end))
            members, kind, start = rest, following, end
        out.append((kind, start, self.space.blocks))
        return tuple(out)

    def _row(self, members: Counts) -> Floats:
        """E(members, .)[.]: (kinds, blocks + 1)."""
        out = np.full((len(members), self.space.blocks + 1), np.inf)
        for t, count in enumerate(members):
            if not count:
                continue
            if sum(members) == 1:
                out[t] = self._last[t]
                continue
            rest = _less(members, t)
            for group, stage in self._stage[t]:
                following = [u for u in group if rest[u]]
                if following:
                    suffix = self.rows[rest][following].min(axis=0)
                    np.minimum(out[t], self._join(stage, suffix[None, :]).min(axis=1), out=out[t])
        return out


def _with_hops(space: Space, cost: Measure) -> list[list[Floats]]:
    """Per kind and hop group: the slice's cost with the hop behind it."""
    return [
        [cost.stage[t] + cost.hop[t, group[0]][None, :] for group in groups]
        for t, groups in enumerate(space.hop_groups)
    ]


def _less(members: Counts, kind: int) -> Counts:
    return (*members[:kind], members[kind] - 1, *members[kind + 1 :])
