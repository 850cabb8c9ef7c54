"""When the model does not fit: by how much, where, and what would."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace

import numpy as np

from plait.cost_models.memory import capacity_bytes
from plait.cost_models.profile import ModelProfile, at_element_bytes, with_fp8_kv
from plait.errors import FitError, PlanError
from plait.partitioner.predict import Stage
from plait.partitioner.problem import Problem, nobody_holds
from plait.partitioner.search import MAX_WORK, Mask, Space, Table
from plait.partitioner.tables import Measure, Tables, allowed_slices, kinds_of
from plait.spec import Device
from plait.words import bytes_text

#: Extra devices tried of each kind.
_MORE = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32)

#: dtypes of two bytes, for "a smaller dtype".
_HALF = {"float32": ("bfloat16", 0.5)}


def fit_error(found: Tables) -> FitError | PlanError:
    """The error to raise where no plan fits: rows of the least-bad split, and what would fit.

    Raises:
        UnsupportedError: where not memory but a backend refuses every device a unit.
    """
    problem = found.problem
    nobody_holds(problem)
    mask = Mask.of(_space(found), found.allowed)
    short = Table(mask, Measure(found.short, np.zeros_like(found.decode.hop)), bottleneck=False)
    if not np.isfinite(short.best):
        return PlanError(
            "plan-pins",
            "pins, forbidden cuts and refused ops leave no split at all",
            why=f"pins {dict(problem.pins)}, forbidden cuts {list(problem.forbidden_cuts)}",
            hint="loosen one of them",
        )
    _, members = short.best_where(lambda _: True)
    assert members is not None
    unused = [list(kind.devices) for kind in found.kinds]
    stages = [(unused[kind].pop(0), start, end) for kind, start, end in short.trace(members)]
    return error_for(found, stages, hint="; ".join(_would_fit(problem)))


def error_for(found: Tables, stages: list[Stage], hint: str = "") -> FitError:
    """The rows of a given split: needed, free and short-by bytes per device."""
    rows: list[dict[str, int | str]] = []
    for device, start, end in stages:
        memory = found.memory.estimate(start, end, device)
        free = memory.capacity_bytes
        rows.append(
            {
                "device": device.id,
                "blocks": f"{start}:{end}",
                "needed": memory.needed_bytes,
                "free": free,
                "short_by": max(0, memory.needed_bytes - free),
            }
        )
    rows += [
        {"device": d.id, "blocks": "", "needed": 0, "free": capacity_bytes(d), "short_by": 0}
        for d in found.problem.devices
        if d.id not in {stage[0].id for stage in stages}
    ]
    why = "; ".join(
        f"{row['device']} needs {bytes_text(float(row['needed']))} for blocks {row['blocks']}, has "
        f"{bytes_text(float(row['free']))} free, is {bytes_text(float(row['short_by']))} short"
        for row in rows
        if row["short_by"]
    )
    work = found.problem.workload
    what = (
        f"{found.problem.profile.model} in {found.problem.profile.dtype} does not fit with {work.concurrency} requests "
        f"of {work.context_tokens} tokens"
    )
    return FitError(what, why=why, hint=hint, rows=tuple(rows))


def fits(problem: Problem) -> bool:
    """Whether any plan fits the memory; no time is looked at."""
    kinds = kinds_of(problem)
    memory = problem.memory
    room = np.stack([memory.needed(kind.first) <= capacity_bytes(kind.first) for kind in kinds])
    size = problem.blocks + 1
    nothing = Measure(np.zeros(room.shape), np.zeros((len(kinds), len(kinds), size)))
    space = Space.of(tuple(kind.count for kind in kinds), problem.blocks, [nothing.hop])
    if space.work > MAX_WORK:
        return False
    mask = Mask.of(space, room & allowed_slices(problem, kinds))
    return bool(np.isfinite(Table(mask, nothing, bottleneck=False).best))


def _would_fit(problem: Problem) -> Iterator[str]:
    """What would fit, each tried with the whole search."""
    context = _largest_context(problem)
    if context:
        yield f"a context of {context} tokens per request"
    fewer = _most_requests(problem)
    if fewer:
        yield f"{fewer} requests at a time" if fewer > 1 else "one request at a time"
    half = _HALF.get(problem.profile.dtype)
    if half and all(half[0] in d.peak_flops_per_s for d in problem.devices):
        name, ratio = half
        if fits(replace(_changed(problem, lambda model: at_element_bytes(model, ratio, name)), capabilities={})):
            yield f"dtype {name}"
    wide = not any(kv.is_fp8 for unit in problem.profile.blocks for kv in unit.facts.kv)
    if wide and fits(_changed(problem, with_fp8_kv)):
        yield "kv_dtype fp8"
    for kind in {device.name: device for device in problem.devices}.values():
        more = _how_many_more(problem, kind)
        if more:
            yield f"{more} more {kind.name}"


def _changed(problem: Problem, change: Callable[[ModelProfile], ModelProfile]) -> Problem:
    """The problem of a changed model, on every device."""
    changed = {id(model): change(model) for model in problem.held.values()}  # devices alike share one model
    held = {name: changed[id(model)] for name, model in problem.held.items()}
    return replace(problem, profile=change(problem.profile), held=held)


def _largest_context(problem: Problem) -> int:
    """Tokens per request that fit, in whole pages; 0 where none do."""
    page = problem.page_tokens
    pages = _largest(problem.workload.context_tokens // page, lambda n: _with_context(problem, n * page))
    return pages * page


def _with_context(problem: Problem, tokens: int) -> Problem:
    output = min(problem.workload.output_tokens, max(1, tokens // 2))
    work = replace(problem.workload, prompt_tokens=max(1, tokens - output), output_tokens=output)
    return replace(problem, workload=work)


def _most_requests(problem: Problem) -> int:
    return _largest(
        problem.workload.concurrency - 1,
        lambda n: replace(problem, workload=replace(problem.workload, concurrency=n)),
    )


def _largest(most: int, make: Callable[[int], Problem]) -> int:
    """The largest n in 1 .. most whose problem fits, 0 where none does. More never fits where less does not."""
    low, high = 0, most + 1
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(make(middle)) else (low, middle)
    return low


def _how_many_more(problem: Problem, kind: Device) -> int | None:
    """How many more devices like `kind`, on a host each, make it fit."""
    few = 0
    for many in _MORE:
        if len(problem.devices) + many > 64:
            return None
        if fits(_with_more(problem, kind, many)):
            return next(more for more in range(few + 1, many + 1) if fits(_with_more(problem, kind, more)))
        few = many
    return None


def _with_more(problem: Problem, kind: Device, more: int) -> Problem:
    extra = tuple(replace(kind, id=f"more.{i}", host=f"more{i}") for i in range(more))
    cluster = replace(problem.cluster, devices=(*problem.cluster.devices, *extra))
    allowed = None if problem.allowed is None else (*problem.allowed, *(d.id for d in extra))
    held = {**problem.held, **{d.id: problem.profile_on(kind) for d in extra}}
    return replace(problem, cluster=cluster, allowed=allowed, held=held)


def _space(found: Tables) -> Space:
    counts = tuple(kind.count for kind in found.kinds)
    return Space.of(counts, found.problem.blocks, [found.prefill.hop, found.decode.hop])
