"""A decoder's config in words: what its blocks have alike is said once, and what differs by ranges of blocks."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from plait.frontend.config import DecoderConfig
from plait.frontend.own import OwnModule
from plait.spec import to_dict
from plait.words import counted

_SHOWN_ELSEWHERE = ("family", "max_positions", "dtype", "names", "layers")

#: What an absent part of a block means where other blocks have it.
_ABSENT = {"window": "full attention", "rope": "no rope", "rotary_dim": "all of a head turns", "softcap": "no softcap"}

#: Longer lists of numbers are counted.
_LISTED = 8


def config_facts(config: DecoderConfig | OwnModule) -> dict[str, Any]:
    """The config in normal form as plain data; `blocks` lists the kinds of blocks, each with the blocks that are so."""
    facts = {name: value for name, value in to_dict(config).items() if name not in _SHOWN_ELSEWHERE and not _off(value)}
    if isinstance(config, DecoderConfig):
        kinds = _grouped([to_dict(layer) for layer in config.layers])
        facts["blocks"] = [{"blocks": numbers, **kind} for numbers, kind in kinds]
        if config.quantisation is not None:
            facts["quantisation"] = {"method": config.quantisation.METHOD, **facts["quantisation"]}
    return facts


def config_lines(config: DecoderConfig | OwnModule) -> list[tuple[str, str]]:
    """(name, value) lines for people: `attention`, `mlp`, and the rest."""
    facts = config_facts(config)
    facts.pop("blocks", None)
    lines = [(words(name), text(value)) for name, value in facts.items()]
    if not isinstance(config, DecoderConfig):
        return lines
    parts: list[tuple[str, str]] = [("blocks", str(config.blocks))]
    for part in ("attention", "mlp"):
        named = [(type(getattr(layer, part)).__name__, to_dict(getattr(layer, part))) for layer in config.layers]
        parts += _part(part, named)
    return parts + lines


def block_ranges(numbers: Iterable[int]) -> str:
    """`block 5`, `blocks 0-4, 6`: ascending numbers."""
    runs: list[list[int]] = []
    for number in numbers:
        if runs and runs[-1][1] == number - 1:
            runs[-1][1] = number
        else:
            runs.append([number, number])
    several = len(runs) > 1 or runs[0][0] != runs[0][1]
    return ("blocks " if several else "block ") + ", ".join(
        str(first) if first == last else f"{first}-{last}" for first, last in runs
    )


def _off(value: Any) -> bool:
    """What is not said. 0 is a number."""
    return value is None or value is False or value == [] or value == {}


def words(name: str) -> str:
    return name.replace("_", " ")


def text(value: Any) -> str:
    """A value as a person writes it: `default, theta 100000`, not a Python dict."""
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float):
        return f"{value:.7g}"  # what float32 holds: files of other formats state 9.999999747378752e-06 for 1e-05
    if isinstance(value, Mapping):
        named = sorted(value.items(), key=lambda entry: entry[0] != "kind")
        return ", ".join(_member(name, item) for name, item in named if not _off(item))
    if isinstance(value, list):
        if len(value) > _LISTED and all(isinstance(item, int | float) for item in value):
            return f"{counted(len(value), 'number')} from {text(min(value))} to {text(max(value))}"
        return ", ".join(map(text, value))
    return "none" if value is None else str(value)


def _member(name: str, value: Any) -> str:
    """`theta 10000`; of a flag its name alone; of a part with parts of its own, these in brackets."""
    if value is True:
        return words(name)
    if name == "kind":
        return text(value)
    return f"{words(name)} ({text(value)})" if isinstance(value, Mapping) else f"{words(name)} {text(value)}"


def _part(part: str, layers: Sequence[tuple[str, dict[str, Any]]]) -> list[tuple[str, str]]:
    """Lines for one part of all blocks: of each class what its blocks have alike, then what they differ in."""
    lines: list[tuple[str, str]] = []
    for numbers, name in _grouped([name for name, _ in layers]):
        own = {number: layers[number][1] for number in numbers}
        first = own[numbers[0]]
        alike = {key: value for key, value in first.items() if all(other.get(key) == value for other in own.values())}
        keys = list(dict.fromkeys(key for other in own.values() for key in other if key not in alike))
        where = "" if len(numbers) == len(layers) else f"{block_ranges(numbers)}: "
        title = _TITLES.get(name, "")
        lines.append((part, where + ", ".join(filter(None, (title, text(alike))))))
        kinds = _grouped([{key: own[number].get(key) for key in keys} for number in numbers]) if keys else []
        for places, differing in kinds:
            said = [_ABSENT.get(key, f"no {words(key)}") if _off(value) else _member(key, value)
                    for key, value in differing.items()]  # fmt: skip
            lines.append(("", f"{block_ranges([numbers[place] for place in places])}: {', '.join(said)}"))
    return lines


_TITLES = {"LatentAttention": "latent", "Experts": "experts"}


def _grouped(items: Sequence[Any]) -> list[tuple[list[int], Any]]:
    """(places, item) of every different item, in the order of their first places."""
    found: list[tuple[list[int], Any]] = []
    for place, item in enumerate(items):
        same = next((places for places, other in found if other == item), None)
        if same is None:
            found.append(([place], item))
        else:
            same.append(place)
    return found
