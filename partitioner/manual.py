"""Plans that somebody else decided: a hand-edited plan.yaml, or exact numbers of layers. Honoured exactly or refused by
name; only the predictions are computed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from plait.errors import PlanError, UnsupportedError
from plait.partitioner.explain import explained
from plait.partitioner.fit import error_for
from plait.partitioner.predict import Stage, plan_of
from plait.partitioner.problem import Problem, check, device_by_id, pinned_units, refused_units
from plait.partitioner.tables import tables
from plait.spec import Plan
from plait.words import counted


def evaluate(problem: Problem, plan: Plan) -> Plan:
    """The plan with its predictions computed again: same devices, same blocks, same order.

    What the file decides wins over `problem`: workload, page size, objective, pins and forbidden cuts are the plan's.

    Raises:
        PlanError: not the model's number of blocks or dtype, a gap or an overlap, an unknown device, a device used
            twice, a broken pin or cut, tensor parallelism.
        UnsupportedError: a backend refuses an op of a slice.
        FitError: a slice does not fit.
    """
    profile = problem.profile
    if plan.schema != 1:
        raise PlanError("plan-schema", f"the plan has schema {plan.schema}; this plait reads schema 1")
    if plan.blocks != problem.blocks:
        raise PlanError("plan-model", f"the plan is for {plan.blocks} blocks and the model has {problem.blocks}")
    if plan.dtype != profile.dtype:
        raise PlanError("plan-model", f"the plan is for {plan.dtype} and the model is compiled in {profile.dtype}")
    problem = replace(
        problem,
        workload=plan.workload,
        page_tokens=plan.page_tokens,
        objective=plan.objective,
        pins=plan.pins or {},
        forbidden_cuts=plan.forbidden_cuts,
    )
    stages = []
    for number, planned in enumerate(plan.slices):
        where = f"slices[{number}]"
        if len(planned.devices) != 1:
            raise PlanError(
                "plan-group",
                f"{where} names {counted(len(planned.devices), 'device')}",
                why="layer (pipeline) split is the dependable cross-vendor mode; tensors of a slice are not split",
                hint="give each device its own slice",
            )
        stages.append((device_by_id(problem, planned.devices[0], where), *planned.blocks))
    return _judged(problem, stages)


def by_layers(problem: Problem) -> Plan:
    """The plan that `problem.layers` asks for. Raises as `evaluate`."""
    layers, devices = problem.layers, problem.cluster.devices
    assert layers is not None
    if len(layers) != len(devices):
        raise PlanError(
            "plan-layers", f"layers gives {counted(len(layers), 'number')} for {counted(len(devices), 'device')}"
        )
    if min(layers) < 0 or sum(layers) != problem.blocks:
        text = " + ".join(map(str, layers))
        raise PlanError("plan-layers", f"{text} = {sum(layers)} layers, the model has {problem.blocks}")
    stages, start = [], 0
    for device, count in zip(devices, layers, strict=True):
        if count:
            stages.append((device, start, start + count))
        start += count
    return _judged(problem, stages)


def _judged(problem: Problem, stages: Sequence[Stage]) -> Plan:
    check(problem)
    _cover(problem, stages)
    found = tables(problem)
    _permitted(problem, stages)
    memory = [found.memory.estimate(start, end, device) for device, start, end in stages]
    if any(m.free_bytes < 0 for m in memory):
        raise error_for(
            found, list(stages), hint="move blocks to a device with room; `plait plan` finds a split that fits"
        )
    return explained(found, stages, plan_of(found, stages), None)


def _cover(problem: Problem, stages: Sequence[Stage]) -> None:
    """Every block once, in order, every device once."""
    at, seen = 0, set()
    for device, start, end in stages:
        if device.id in seen:
            raise PlanError("plan-device-twice", f"{device.id} holds two slices", why="one slice per device")
        if device not in problem.devices:
            raise PlanError("plan-device", f"{device.id} may not be used", why="it is not among the allowed devices")
        if not 0 <= start < end <= problem.blocks:
            raise PlanError(
                "plan-blocks", f"{device.id}: [{start}, {end}) is not a range of the {problem.blocks} blocks"
            )
        if start != at:
            what = f"leaves out blocks {at}:{start}" if start > at else f"holds blocks {start}:{at} twice"
            raise PlanError("plan-blocks", f"the plan {what}", why=f"{device.id} starts at block {start}")
        seen.add(device.id)
        at = end
    if at != problem.blocks:
        raise PlanError("plan-blocks", f"the plan leaves out blocks {at}:{problem.blocks}")


def _permitted(problem: Problem, stages: Sequence[Stage]) -> None:
    """Pins, cuts and backends."""
    pins = pinned_units(problem)
    for device, start, end in stages:
        if end in problem.forbidden_cuts:
            raise PlanError("plan-cut", f"{device.id} ends before block {end}, where a cut is forbidden")
        held = (
            {*range(start + 1, end + 1)}
            | ({0} if start == 0 else set())
            | ({end + 1} if end == problem.blocks else set())
        )
        for unit in sorted(held):
            if pins.get(unit, device.id) != device.id:
                raise PlanError(
                    "plan-pin", f"{device.id} holds {_unit(unit, problem)}, which is pinned to {pins[unit]}"
                )
        refused = refused_units(problem, device)
        for unit in sorted(held & set(refused)):
            raise UnsupportedError(
                "plan-unsupported", f"{device.id} cannot hold {_unit(unit, problem)}", why=refused[unit]
            )


def _unit(unit: int, problem: Problem) -> str:
    return {0: "the embedding", problem.blocks + 1: "the head"}.get(unit, f"block {unit - 1}")
