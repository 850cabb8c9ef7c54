"""What each device would do with a model: which ops its backend refuses and why, and how it holds quantised weights."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace

from xdsl.dialects.builtin import ModuleOp
from xdsl.ir import Attribute

from plait.cost_models.catalogue import resolve
from plait.cost_models.memory import keeps_quantised
from plait.cost_models.profile import ModelProfile, profile
from plait.errors import MissingDependencyError, UsageError, UserError
from plait.ir.types import PackedType
from plait.registry import backend_names, load_backend, out_of_tree
from plait.spec import Device, parse_targets

TARGETS = "h100,b200,mi300,mi355,v5e,cpu"
"""Asked where nothing is said: one chip of each backend and generation that answers otherwise."""

AS_STORED = "computed in as stored"
"""How a weight is held that stays quantised."""


@dataclass(frozen=True)
class Answer:
    """What one kind of device would do with a module.

    Attributes:
        device: its name in the catalogue; target: what code is made for; runs_on: where it would run here and now.
        refused: what is refused (an op with its block, or the whole) -> why; empty where all is taken.
        held: format of quantised weights -> how they are held -> how many are.
    """

    device: str
    target: str
    runs_on: str
    refused: dict[str, str] = field(default_factory=dict)
    held: dict[str, dict[str, int]] = field(default_factory=dict)

    @property
    def takes_all(self) -> bool:
        return not self.refused


def support(module: ModuleOp, devices: Iterable[Device]) -> list[Answer]:
    """What each device says, one for each backend and architecture. Asks the backends' own lowerings."""
    model = profile(module)
    different: dict[tuple[str, str], Device] = {}
    for device in devices:
        different.setdefault((device.backend, device.arch), device)
    return [_answer(module, model, device) for device in different.values()]


def support_of(module: ModuleOp, targets: str) -> list[Answer]:
    """`support` of a list of targets. One that nothing can be planned on (its memory is taken, its numbers are not
    published) refuses all, with the reason.

    Raises:
        UsageError: a target that is unknown.
    """
    different: dict[tuple[str, str], Device | Answer] = {}
    for target in parse_targets(targets):
        try:
            for device in resolve(replace(target, count=1), backends=out_of_tree()):
                different.setdefault((device.backend, device.arch), device)
        except UsageError:
            raise
        except UserError as error:
            why = ": ".join(filter(None, (error.what, error.why)))
            different.setdefault(("", target.name), Answer(target.name, str(target), "nowhere", {"all": why}))
    model = profile(module)
    return [held if isinstance(held, Answer) else _answer(module, model, held) for held in different.values()]


def _answer(module: ModuleOp, model: ModelProfile, device: Device) -> Answer:
    target = f"{device.backend}:{device.arch}"
    if device.backend not in backend_names():
        return Answer(device.name, target, "nowhere", {"all": f"there is no backend for {device.backend}"})
    try:
        found = load_backend(device.backend).capability(target, module)
    except MissingDependencyError as error:
        return Answer(device.name, target, "nowhere", {"all": f"{error.what}: {error.why}"})
    refused = dict(found.refused)
    if model.dtype not in found.dtypes:
        refused["all"] = f"it computes in {', '.join(found.dtypes)}, not in {model.dtype}"
    return Answer(device.name, target, found.runs_on, refused, held(model, device))


def held(model: ModelProfile, device: Device) -> dict[str, dict[str, int]]:
    """Format of quantised weights -> how they are held on a device -> how many are."""
    each = {own.name: own for unit in model.units for own in unit.quantised}
    counts: dict[str, Counter[str]] = {}
    for own in each.values():
        kept = keeps_quantised(device, own.kind, own.readers)
        how = AS_STORED if kept else f"dequantised to {model.dtype} when loaded"
        counts.setdefault(format_name(own.kind), Counter())[how] += 1
    return {name: dict(count) for name, count in counts.items()}


def format_name(kind: Attribute) -> str:
    """An element type without what all have: `Q4_K`, `si8, scale f16 group 32`."""
    if isinstance(kind, PackedType):
        return kind.encoding
    return str(kind).partition("<")[2].removesuffix(">")


def by_reason(refused: dict[str, str]) -> dict[tuple[str, str], list[int]]:
    """(op, why) -> the blocks it stands in; none of one outside of blocks."""
    found: dict[tuple[str, str], list[int]] = {}
    for name, why in refused.items():
        match = re.fullmatch(r"(.+) \(block (\d+)\)", name)
        blocks = found.setdefault((match[1] if match else name, why), [])
        if match:
            blocks.append(int(match[2]))
    return found


def takers(answers: Sequence[Answer]) -> list[str]:
    """The devices that take the whole module."""
    return [answer.device for answer in answers if answer.takes_all]
