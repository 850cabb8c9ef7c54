"""The problem as arrays: kinds of devices; per kind and slice [start, end) its times, its memory and its permission."""

from __future__ import annotations

from collections import Counter, defaultdict
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from plait.cost_models.memory import MemoryModel, capacity_bytes
from plait.cost_models.network import hop_s, link_between
from plait.cost_models.roofline import unit_times
from plait.cost_models.tables import Floats, slice_sums
from plait.partitioner.problem import Problem, pinned_units, refused_units
from plait.spec import Device, Link

Bools = NDArray[np.bool_]


@dataclass(frozen=True)
class Kind:
    """Devices that are the same to the planner: equal numbers, equal links, equal pins."""

    devices: tuple[Device, ...]

    @property
    def first(self) -> Device:
        return self.devices[0]

    @property
    def count(self) -> int:
        return len(self.devices)


@dataclass(frozen=True, eq=False)
class Measure:
    """An additive quantity: of a slice on a kind (kinds, start, end), and of the hop from kind to kind at a cut
    (kinds, kinds, cut)."""

    stage: Floats
    hop: Floats


@dataclass(frozen=True, eq=False)
class Tables:
    """Everything the search needs. Tables hold seconds or bytes; `allowed` leaves memory out, `fits` is memory only.

    Measures:
        prefill, decode: one request's prompt; one decode step at the workload's concurrency.
        busy: what one request keeps a stage busy: its prefill and its share of its decode steps.
        latency: one request from start to end, alone in the prefill, in company in the decode.
    """

    problem: Problem
    kinds: tuple[Kind, ...]
    memory: MemoryModel
    prefill: Measure
    decode: Measure
    needed: Floats
    kv_tokens: Floats
    allowed: Bools

    @cached_property
    def fits(self) -> Bools:
        room = np.array([capacity_bytes(kind.first) for kind in self.kinds])
        return np.asarray(self.needed <= room[:, None, None])

    @cached_property
    def short(self) -> Floats:
        """Bytes that a slice lacks."""
        room = np.array([capacity_bytes(kind.first) for kind in self.kinds])
        return np.asarray(np.maximum(0.0, self.needed - room[:, None, None]))

    @cached_property
    def busy(self) -> Measure:
        work = self.problem.workload
        return self._mixed(work.output_tokens / work.concurrency)

    @cached_property
    def latency(self) -> Measure:
        return self._mixed(float(self.problem.workload.output_tokens))

    def _mixed(self, decodes: float) -> Measure:
        return Measure(self.prefill.stage + decodes * self.decode.stage, self.prefill.hop + decodes * self.decode.hop)


def tables(problem: Problem) -> Tables:
    """Raises UserError where the cluster knows no path between two devices."""
    kinds = kinds_of(problem)
    memory = problem.memory
    size = problem.blocks + 1
    prefill, decode = (np.zeros((len(kinds), size, size)) for _ in range(2))
    for k, kind in enumerate(kinds):
        if not kind.first.peak_flops_per_s.get(problem.profile.dtype):
            continue  # nothing is allowed there, so its times do not matter
        unit = unit_times(problem.profile_on(kind.first), kind.first, problem.workload, problem.max_step_tokens)
        prefill[k] = slice_sums(unit.prefill_s) + unit.prefill_overhead_s
        decode[k] = slice_sums(unit.decode_s) + unit.decode_overhead_s
    return Tables(
        problem=problem,
        kinds=kinds,
        memory=memory,
        prefill=Measure(prefill, _hops(problem, kinds, problem.workload.prompt_tokens)),
        decode=Measure(decode, _hops(problem, kinds, problem.workload.concurrency)),
        needed=np.stack([memory.needed(kind.first) for kind in kinds]),
        kv_tokens=np.stack([memory.kv_tokens(kind.first) for kind in kinds]),
        allowed=allowed_slices(problem, kinds),
    )


def kinds_of(problem: Problem) -> tuple[Kind, ...]:
    """Group equal devices. One that a pin, a capability of its own or a link names stands alone; devices alone on their
    hosts are equal though their hosts differ, since every path between hosts without a named link is the same."""
    pinned = set(pinned_units(problem).values())
    named = {end for link in problem.cluster.links for end in (link.a, link.b)}
    alone = {host for host, count in Counter(device.host for device in problem.devices).items() if count == 1}
    groups: dict[tuple[object, ...], list[Device]] = defaultdict(list)
    for device in problem.devices:
        capability = problem.capabilities.get(device.id)
        groups[
            repr(replace(device, id="", host="")),  # its dicts cannot be hashed
            "" if device.host in alone and device.host not in named else device.host,
            device.id if device.id in pinned or device.id in named else "",
            id(problem.profile_on(device)),
            None if capability is None else (capability.dtypes, tuple(capability.refused.items())),
        ].append(device)
    return tuple(Kind(tuple(group)) for group in groups.values())


def link_of(problem: Problem, a: Kind, b: Kind) -> Link | None:
    """The path between two kinds, or between two devices of one kind; None for a kind of one with itself."""
    if a is not b:
        return link_between(problem.cluster, a.first, b.first)
    return link_between(problem.cluster, a.devices[0], a.devices[1]) if a.count > 1 else None


def _hops(problem: Problem, kinds: tuple[Kind, ...], tokens: int) -> Floats:
    """Seconds from kind to kind at every cut for a boundary of `tokens` tokens."""
    width = np.array([0, *problem.profile.boundary_bytes_per_token, 0], dtype=float)
    out = np.zeros((len(kinds), len(kinds), problem.blocks + 1))
    for i, a in enumerate(kinds):
        for j, b in enumerate(kinds):
            link = link_of(problem, a, b)
            if link is not None:
                out[i, j] = [hop_s(link, tokens * size) for size in width]
    return out


def allowed_slices(problem: Problem, kinds: tuple[Kind, ...]) -> Bools:
    """Slices a kind may hold by cuts, pins and capabilities; memory is another matter."""
    size = problem.blocks + 1
    out = np.repeat(np.triu(np.ones((size, size), dtype=bool), k=1)[None], len(kinds), axis=0)
    for cut in problem.forbidden_cuts:
        out[:, :, cut] = False
        out[:, cut, :] = False
    pins = pinned_units(problem)
    for k, kind in enumerate(kinds):
        barred = set(refused_units(problem, kind.first))
        barred |= {unit for unit, owner in pins.items() if owner != kind.first.id}
        if barred:
            marks = np.isin(np.arange(problem.blocks + 2), sorted(barred)).astype(float)
            out[k] &= slice_sums(marks) == 0
    return out
