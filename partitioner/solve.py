"""The one entry: a problem in, a complete plan out."""

from __future__ import annotations

from plait.partitioner.explain import explained
from plait.partitioner.fit import fit_error
from plait.partitioner.manual import by_layers
from plait.partitioner.objectives import best
from plait.partitioner.predict import plan_of
from plait.partitioner.problem import Problem, check
from plait.partitioner.tables import tables
from plait.spec import Plan


def solve(problem: Problem) -> Plan:
    """The best plan for the objective, with predictions and causes; exactly `problem.layers` where they are given.

    Raises:
        FitError: nothing fits; its rows hold needed, free and short-by bytes per device, its hint what would fit.
        PlanError: the question contradicts itself (pins, cuts, devices, layers).
        UnsupportedError: no device can hold some block.
        UserError: `limits` (TTFT or TPOT cannot be met), `plan-too-large`, `device-numbers`, `device-memory`.
    """
    check(problem)
    if problem.layers is not None:
        return by_layers(problem)
    found = tables(problem)
    solution = best(found)
    if solution is None:
        raise fit_error(found)
    unused = [list(kind.devices) for kind in found.kinds]
    stages = [(unused[kind].pop(0), start, end) for kind, start, end in solution.placement]
    return explained(found, stages, plan_of(found, stages), solution)
