"""Why a plan came out as it did: a cause for every slice, every idle device and the plan."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np

from plait.cost_models.memory import capacity_bytes
from plait.cost_models.roofline import decode_step, memory_bound, rates
from plait.partitioner.objectives import Solution
from plait.partitioner.predict import Stage, busy_s, kind_index
from plait.partitioner.problem import refused_units
from plait.partitioner.search import Counts
from plait.partitioner.tables import Tables
from plait.spec import Cause, Device, IdleDevice, Plan
from plait.words import bytes_text, count_text, counted, seconds_text


def explained(tables: Tables, stages: Sequence[Stage], plan: Plan, solution: Solution | None) -> Plan:
    """`plan` with its causes. Without a solution the placement was given by hand and there are no runners-up."""
    busy = busy_s(tables, stages)
    slices = tuple(
        replace(planned, cause=_slice_cause(tables, stages, i, busy, solution)) for i, planned in enumerate(plan.slices)
    )
    used = {device.id for device, _, _ in stages}
    idle = tuple(
        IdleDevice(device.id, _idle_cause(tables, device, stages, solution))
        for device in tables.problem.cluster.devices
        if device.id not in used
    )
    return replace(plan, slices=slices, idle=idle, cause=_plan_cause(tables, stages, busy, solution))


def _slice_cause(
    tables: Tables, stages: Sequence[Stage], i: int, busy: Sequence[float], solution: Solution | None
) -> Cause:
    device, start, end = stages[i]
    kind = kind_index(tables, device)
    runner_up = ""
    if solution is not None:
        runner_up = f"without {device.id}: " + _compared(
            tables, solution, lambda s: s[kind] < _used(tables, stages)[kind]
        )
    if solution is None:
        why = "given by hand"
    elif len(stages) == 1:
        why = "it holds the whole model; a second stage would add a hop and no speed for this objective"
    else:
        why = _why_not_more(tables, stages, i, busy)
    return Cause(why, _dominating(tables, device, start, end, busy[i]), ", ".join(device.sources), runner_up)


def _why_not_more(tables: Tables, stages: Sequence[Stage], i: int, busy: Sequence[float]) -> str:
    """What stops the slice from taking one more block of a neighbour."""
    device, start, end = stages[i]
    kind = kind_index(tables, device)
    wider = [(start - 1, end)] if i > 0 else []
    wider += [(start, end + 1)] if i + 1 < len(stages) else []
    wider = [w for w in wider if w[0] >= 0 and w[1] <= tables.problem.blocks]
    open_ = [w for w in wider if tables.fits[kind][w] and tables.allowed[kind][w]]
    if open_:
        return _OBJECTIVE[tables.problem.objective](tables, (kind, start, end), open_, busy[i], max(busy))
    full = [float(tables.short[kind][w]) for w in wider if not tables.fits[kind][w]]
    if not full:
        return "a pin, a forbidden cut or its backend keeps the neighbouring blocks away"
    free = capacity_bytes(device) - float(tables.needed[kind, start, end])
    return f"its memory is full: {bytes_text(free)} free, one more block is {bytes_text(min(full))} short"


def _throughput(
    tables: Tables, at: tuple[int, int, int], wider: list[tuple[int, int]], mine: float, most: float
) -> str:
    if mine == most:
        return "it is the slowest stage; every other split has a slower one"
    slower = min(float(tables.busy.stage[at[0]][w]) for w in wider)
    if slower > most:
        return f"one more block would make it the slowest stage ({seconds_text(slower)} per request)"
    return "more blocks here would not speed up the slowest stage"


def _latency(tables: Tables, at: tuple[int, int, int], wider: list[tuple[int, int]], mine: float, most: float) -> str:
    more = min(float(tables.latency.stage[at[0]][w]) for w in wider) - float(tables.latency.stage[at])
    return f"one more block costs {seconds_text(more)} per request here, no less than where it is"


def _capacity(tables: Tables, at: tuple[int, int, int], wider: list[tuple[int, int]], mine: float, most: float) -> str:
    has, left = float(tables.kv_tokens[at]), max(float(tables.kv_tokens[at[0]][w]) for w in wider)
    return f"{count_text(has)} KV tokens fit beside its weights; with one more block {count_text(left)}"


_OBJECTIVE = {"throughput": _throughput, "latency": _latency, "capacity": _capacity}


def _dominating(tables: Tables, device: Device, start: int, end: int, busy: float) -> str:
    problem = tables.problem
    at = rates(device, problem.profile.dtype)
    facts = [unit.facts for unit in problem.profile_on(device).blocks[start:end]]
    kind = "memory" if memory_bound(facts[0], (decode_step(problem.workload),), at) else "compute"
    kind_at = (kind_index(tables, device), start, end)
    decode, prefill = float(tables.decode.stage[kind_at]), float(tables.prefill.stage[kind_at])
    times = f"decode {seconds_text(decode)} ({kind}-bound), prefill {seconds_text(prefill)}"
    return f"{times}, busy {seconds_text(busy)} per request"


def _idle_cause(tables: Tables, device: Device, stages: Sequence[Stage], solution: Solution | None) -> Cause:
    problem = tables.problem
    if device not in problem.devices:
        return Cause("not among the devices that may be used")
    if solution is None:
        return Cause("given by hand")
    kind, used = kind_index(tables, device), _used(tables, stages)
    runner_up = f"with {device.id}: " + _compared(tables, solution, lambda s: s[kind] > used[kind])
    refused = refused_units(problem, device)
    if not tables.allowed[kind].any():
        why = next(iter(refused.values()), "pins give every block to other devices")
        return Cause(f"it may not hold any slice: {why}", source="capability of its backend" if refused else "pins")
    if not (tables.allowed[kind] & tables.fits[kind]).any():
        short = float(np.where(tables.allowed[kind], tables.short[kind], np.inf).min())
        return Cause("not even one block fits", f"{bytes_text(short)} short", "memory of the model's own tensors")
    return Cause(
        "using it does not improve the objective",
        f"{problem.objective}: {_value_text(tables, solution.value)} without it",
        ", ".join(device.sources),
        runner_up,
    )


def _plan_cause(tables: Tables, stages: Sequence[Stage], busy: Sequence[float], solution: Solution | None) -> Cause:
    slowest = stages[int(np.argmax(busy))][0].id
    number = f"the slowest stage is {slowest}, {seconds_text(max(busy))} per request"
    if solution is None:
        return Cause("given by hand; numbers predicted, nothing searched", number, "roofline")
    used = _used(tables, stages)
    best = _value_text(tables, solution.value)
    if solution.proven:
        limits = " within the limits" if _limited(tables) else ""
        why = f"the best {tables.problem.objective} of all contiguous splits in any order{limits}: {best}"
    else:
        why = (
            f"the best {tables.problem.objective} found within the limits: {best}; no plan exceeds "
            f"{_value_text(tables, solution.bound)}"
        )
    sets = f"exact search over {counted(len(solution.first.rows), 'set')} of devices; roofline"
    return Cause(why, number, sets, "other devices: " + _compared(tables, solution, lambda s: s != used))


def _used(tables: Tables, stages: Sequence[Stage]) -> Counts:
    found = Counter(kind_index(tables, device) for device, _, _ in stages)
    return tuple(found[k] for k in range(len(tables.kinds)))


def _compared(tables: Tables, solution: Solution, keep: Callable[[Counts], bool]) -> str:
    """The best plan among some sets of devices, and how it compares."""
    value, members = solution.first.best_where(keep)
    if members is None or (not np.isfinite(value) and value > 0):
        return "no plan fits"
    names = " + ".join(
        f"{n}x {kind.first.name}" if n > 1 else kind.first.name
        for n, kind in zip(members, tables.kinds, strict=True)
        if n
    )
    text = f"{_value_text(tables, value)} on {names}"
    mine, theirs = _goodness(tables, solution.value), _goodness(tables, value)
    if np.isfinite(mine) and np.isfinite(theirs) and mine:
        text += f" ({(theirs / mine - 1) * 100:+.1f} %)"
    return text + (", limits on time aside" if _limited(tables) else "")


def _limited(tables: Tables) -> bool:
    work = tables.problem.workload
    return work.max_ttft_s is not None or work.max_tpot_s is not None


def _goodness(tables: Tables, value: float) -> float:
    """More is better: what `_value_text` shows, or one over a time."""
    if tables.problem.objective == "capacity":
        return -value
    return 1 / value if value else np.inf


def _value_text(tables: Tables, value: float) -> str:
    problem = tables.problem
    if problem.objective == "capacity":
        return f"{count_text(-value)} KV tokens"
    if problem.objective == "latency":
        return f"{seconds_text(value)} per request"
    # The objective: many batches in flight. What the workload's own requests get is in the plan's prediction.
    return f"{count_text(problem.workload.output_tokens / value)} tokens/s when kept full"
