"""Reading the HLO text of a compiled program: what libtpu estimates, and how often the chips speak to each other.

A scan is a loop whose body stands in the text once. Its name says how often it runs (`program._scan` puts it there), so
everything inside counts that many times.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field

COLLECTIVES = ("all-reduce", "all-gather", "reduce-scatter", "all-to-all", "collective-permute")

_COMPUTATION = re.compile(r"^(ENTRY )?%?(\S+) \(.*\{$")
_INSTRUCTION = re.compile(r"^\s+(?:ROOT )?%?\S+ = (?P<rest>.*)$")
_OPCODE = re.compile(r"(?:^|[\s)}])(?P<opcode>[a-z][a-z0-9-]*)\(")
_CYCLES = re.compile(r'"estimated_cycles":"(\d+)"')
_REPEATS = re.compile(r"\brepeat(\d+)\b")


@dataclass(frozen=True)
class Instruction:
    """One line: its opcode, libtpu's estimate, and the computations it runs, how often."""

    opcode: str
    cycles: int
    runs: tuple[str, ...]
    times: int


@dataclass(frozen=True)
class Counts:
    """Of one run of a program.

    Attributes:
        cycles: libtpu's estimates, added up. Copies that run beside the compute, and collectives, have none.
        collectives: how often each kind runs.
    """

    cycles: int = 0
    collectives: Counter[str] = field(default_factory=Counter)


def count(text: str) -> Counts:
    """What the program of an `as_text()` adds up to."""
    computations, entry = _parse(text)
    collectives: Counter[str] = Counter()
    cycles = 0
    for instruction, times in _walk(computations, entry, 1):
        cycles += times * instruction.cycles
        name = instruction.opcode.removesuffix("-start")
        if name in COLLECTIVES:
            collectives[name] += times
    return Counts(cycles, collectives)


def _walk(computations: dict[str, list[Instruction]], name: str, times: int) -> Iterator[tuple[Instruction, int]]:
    for instruction in computations[name]:
        yield instruction, times
        for inner in instruction.runs:
            yield from _walk(computations, inner, times * instruction.times)


def _parse(text: str) -> tuple[dict[str, list[Instruction]], str]:
    computations: dict[str, list[Instruction]] = {}
    entry = current = ""
    for line in text.splitlines():
        head = _COMPUTATION.match(line)
        if head:
            current = head[2]
            computations[current] = []
            entry = current if head[1] else entry
        elif current and (match := _INSTRUCTION.match(line)):
            computations[current].append(_instruction(match["rest"]))
    assert entry, "the text has no ENTRY computation"
    return computations, entry


def _instruction(rest: str) -> Instruction:
    found = _OPCODE.search(rest)
    opcode = found["opcode"] if found else ""
    cycles = _CYCLES.search(rest)
    runs: tuple[str, ...] = ()
    times = 1
    if opcode == "while":
        # A loop that is no scan of ours (a sort, a search) runs at least once.
        repeats = _REPEATS.findall(rest)
        times = int(repeats[-1]) if repeats else 1
        runs = _named(rest, "body")
    elif opcode in ("call", "async-start"):
        runs = _named(rest, "to_apply") or _named(rest, "calls")
    return Instruction(opcode, int(cycles[1]) if cycles else 0, runs, times)


def _named(rest: str, attribute: str) -> tuple[str, ...]:
    return tuple(re.findall(rf"\b{attribute}=%?([^\s,}}]+)", rest))
