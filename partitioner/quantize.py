"""What each device holds the linears of its blocks in, where that is not what the checkpoint says."""

from __future__ import annotations

from collections.abc import Mapping

from plait.cost_models.catalogue import devices
from plait.errors import UsageError, did_you_mean
from plait.ir.quantise import GROUP_SIZES, QUANT_KINDS
from plait.spec import Cluster, Device, Plan, QuantKind

#: A kind, and neighbours of a row that share a scale: 0 the whole row, None the kind's own.
Choice = tuple[QuantKind, int | None]


def choices(cluster: Cluster, asked: str | Mapping[str, str] | None, group_size: int | None) -> dict[str, Choice]:
    """By device id; nothing for devices that hold linears as the checkpoint does.

    Args:
        asked: a kind for all devices, or kinds by the id of devices, or by what they are called; an id comes first.

    Raises:
        UsageError: `quantize-kind`, `quantize-device`, `group-size`.
    """
    if asked is None or asked == {}:
        if group_size is not None:
            raise UsageError("group-size", "a group size was given, and nothing is quantised", hint="--quantize int4")
        return {}
    kinds = dict.fromkeys([device.id for device in cluster.devices], asked) if isinstance(asked, str) else asked
    words = {device.id: _words(device) for device in cluster.devices}
    known = {word for of_one in words.values() for word in of_one}
    if strange := sorted(kinds.keys() - known):
        raise UsageError(
            "quantize-device",
            f"no device {strange[0]!r} to quantise for",
            why="there are " + ", ".join(words),
            hint=did_you_mean(strange[0], known),
        )
    checked = {name: _choice(kind, group_size) for name, kind in kinds.items()}
    named = {name: [checked[word] for word in of_one if word in checked] for name, of_one in words.items()}
    return {name: found[0] for name, found in named.items() if found}


def _words(device: Device) -> tuple[str, ...]:
    """Everything a user may call a device, its id first."""
    names = (entry.names for entry in devices() if device.name in entry.names)
    return (device.id, device.name, *next(names, ()))


def planned_choices(plan: Plan) -> dict[str, Choice]:
    """The same, as the slices of a plan say it. Raises UsageError `group-size`."""
    for number, item in enumerate(plan.slices):
        if item.group_size is not None and item.quantize is None:
            raise UsageError("group-size", f"slices[{number}] has a group_size, and nothing is quantised in it")
    return {
        name: _choice(item.quantize, item.group_size) for item in plan.slices if item.quantize for name in item.devices
    }


def _choice(kind: str, group_size: int | None) -> Choice:
    found = next((word for word in QUANT_KINDS if word == kind), None)
    if found is None:
        raise UsageError(
            "quantize-kind",
            f"weights cannot be quantised to {kind!r}",
            why="known: " + ", ".join(QUANT_KINDS),
            hint=did_you_mean(kind, QUANT_KINDS),
        )
    if group_size not in (None, 0, *GROUP_SIZES):
        raise UsageError(
            "group-size",
            f"a scale cannot be shared by {group_size} neighbours",
            why=f"known: {', '.join(map(str, GROUP_SIZES))}, and 0 for the whole row",
        )
    return found, group_size
