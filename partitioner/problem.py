"""What is to be planned: the model, the devices, what will be asked, and what the user has fixed."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from plait.cost_models.catalogue import check_device
from plait.cost_models.memory import MemoryModel
from plait.cost_models.profile import ModelProfile
from plait.errors import PlanError, UnsupportedError, UserError, did_you_mean
from plait.spec import Capability, Cluster, Device, Objective, Workload

_UNITS = re.compile(r"(?:block\.)?(?P<start>\d+)(?::(?P<end>\d+))?")
_BLOCK = re.compile(r"block[ .]?(\d+)")


@dataclass(frozen=True)
class Problem:
    """One question to the planner.

    Attributes:
        pins: units -> device id. Units are `embed`, `head`, a block (`block.12` or `12`), or blocks `0:10` (10
            not included). The search obeys them like any other limit.
        forbidden_cuts: no slice may end before one of these blocks.
        allowed: device ids that may be used; None allows all.
        capabilities: device id -> what its backend can do; a device that refuses an op does not get its block.
        layers: exact numbers of blocks for the devices in the cluster's order (0 leaves one out): no search at all.
        held: device id -> the same model as it is quantised for this device; the others hold `profile`.
    """

    profile: ModelProfile
    cluster: Cluster
    workload: Workload = field(default_factory=Workload)
    objective: Objective = "throughput"
    page_tokens: int = 16
    max_step_tokens: int = 512
    pins: Mapping[str, str] = field(default_factory=dict)
    forbidden_cuts: tuple[int, ...] = ()
    allowed: tuple[str, ...] | None = None
    capabilities: Mapping[str, Capability] = field(default_factory=dict)
    layers: tuple[int, ...] | None = None
    held: Mapping[str, ModelProfile] = field(default_factory=dict)

    def profile_on(self, device: Device) -> ModelProfile:
        """The model as the device holds it."""
        return self.held.get(device.id, self.profile)

    @property
    def memory(self) -> MemoryModel:
        """What slices need."""
        return MemoryModel(self.profile, self.workload, self.page_tokens, self.max_step_tokens, self.held)

    @property
    def blocks(self) -> int:
        return len(self.profile.blocks)

    @property
    def devices(self) -> tuple[Device, ...]:
        """The devices that may be used."""
        return tuple(d for d in self.cluster.devices if self.allowed is None or d.id in self.allowed)


def device_by_id(problem: Problem, name: str, where: str) -> Device:
    """Raises PlanError `plan-device`."""
    known = {device.id: device for device in problem.cluster.devices}
    if name not in known:
        raise PlanError(
            "plan-device",
            f"{where} names the device {name!r}, which the cluster does not have",
            hint=did_you_mean(name, known) or "it has " + ", ".join(known),
        )
    return known[name]


def check(problem: Problem) -> None:
    """Refuse a question that contradicts itself.

    Raises:
        PlanError: unknown device, block or cut; a pin to a device that is not allowed; nothing allowed.
        UserError: a device without numbers or memory; a workload of nothing, or beyond the model's positions.
    """
    _check_workload(problem)
    for name in problem.allowed or ():
        device_by_id(problem, name, "allowed")
    if not problem.devices:
        raise PlanError("plan-device", "no device is left to plan on", hint="name at least one target")
    for device in problem.devices:
        check_device(device)
    twice = [name for name, count in Counter(device.id for device in problem.cluster.devices).items() if count > 1]
    if twice:
        raise PlanError("plan-device", f"two devices of the cluster are called {twice[0]}")
    longest, wanted = problem.profile.max_positions, problem.workload.context_tokens
    if longest is not None and wanted > longest:
        raise UserError(
            "workload-positions",
            f"the workload asks for {wanted} tokens of context and the model was made for {longest}",
            hint="choose shorter prompts or outputs",
        )
    for cut in problem.forbidden_cuts:
        if not 0 < cut < problem.blocks:
            raise PlanError("plan-cut", f"cut {cut} is not between two of the {problem.blocks} blocks")
    owners = pinned_units(problem)
    for unit, owner in owners.items():
        if owner not in {device.id for device in problem.devices}:
            raise PlanError("plan-pin", f"unit {unit} is pinned to {owner}, which may not be used")


def _check_workload(problem: Problem) -> None:
    work = problem.workload
    numbers = {
        "prompt_tokens": work.prompt_tokens,
        "output_tokens": work.output_tokens,
        "concurrency": work.concurrency,
        "page_tokens": problem.page_tokens,
        "max_step_tokens": problem.max_step_tokens,
        "max_ttft_s": 1 if work.max_ttft_s is None else work.max_ttft_s,
        "max_tpot_s": 1 if work.max_tpot_s is None else work.max_tpot_s,
    }
    for name, value in numbers.items():
        if not value > 0:
            raise UserError("workload", f"{name} is {value}; it must be positive")


def pinned_units(problem: Problem) -> dict[int, str]:
    """Unit (0 the embedding, 1 .. blocks, blocks + 1 the head) -> device id. Raises PlanError `plan-pin`."""
    out: dict[int, str] = {}
    for text, name in problem.pins.items():
        device = device_by_id(problem, name, f"the pin of {text}")
        for unit in _pin_units(text, problem.blocks):
            if out.setdefault(unit, device.id) != device.id:
                raise PlanError("plan-pin", f"{text!r} is pinned to {name} and to {out[unit]}")
    return out


def _pin_units(text: str, blocks: int) -> Iterable[int]:
    named = {"embed": (0,), "head": (blocks + 1,)}
    if text in named:
        return named[text]
    match = _UNITS.fullmatch(text)
    if match:
        start = int(match["start"])
        end = int(match["end"]) if match["end"] else start + 1
        if 0 <= start < end <= blocks:
            return range(start + 1, end + 1)
    raise PlanError(
        "plan-pin",
        f"cannot pin {text!r}",
        why=f"a pin names embed, head, a block (block.12) or blocks (0:10) of 0 .. {blocks - 1}",
    )


def refused_units(problem: Problem, device: Device) -> dict[int, str]:
    """Units a device must not hold, and why: its backend refuses an op there, or has no right numbers in the dtype."""
    dtype = problem.profile.dtype
    everything = range(problem.blocks + 2)
    if not device.peak_flops_per_s.get(dtype):
        return dict.fromkeys(everything, f"{device.name} has no peak for {dtype}")
    capability = problem.capabilities.get(device.id)
    if capability is None:
        return {}
    if dtype not in capability.dtypes:
        known = ", ".join(capability.dtypes)
        return dict.fromkeys(everything, f"the {capability.backend} backend computes in {known}, not in {dtype}")
    out: dict[int, str] = {}
    for op, why in capability.refused.items():
        cause = f"the {capability.backend} backend refuses {op}: {why}"
        out.update(dict.fromkeys(_refused_by_op(problem, op), cause))
    return out


def _refused_by_op(problem: Problem, op: str) -> Iterable[int]:
    """`plait.attention (block 3)` is unit 4. An op without a block stands before the first or after the last; a name
    that fits neither bars everything, to be safe."""
    match = _BLOCK.search(op)
    if match:
        return (int(match[1]) + 1,)
    outer = {0: problem.profile.embed, problem.blocks + 1: problem.profile.head}
    named = [i for i, unit in outer.items() if any(facts.name == op for facts in unit.facts.ops)]
    return named or range(problem.blocks + 2)


def nobody_holds(problem: Problem) -> None:
    """Raises UnsupportedError `plan-unsupported` where a unit is refused by every device, with each one's reason."""
    refused = {device.id: refused_units(problem, device) for device in problem.devices}
    for unit in range(problem.blocks + 2):
        if all(unit in why for why in refused.values()):
            names = {0: "the embedding", problem.blocks + 1: "the head"}
            raise UnsupportedError(
                "plan-unsupported",
                f"no device can hold {names.get(unit, f'block {unit - 1}')}",
                why="; ".join(f"{device}: {why[unit]}" for device, why in refused.items()),
                hint="choose another dtype or add a device",
            )
