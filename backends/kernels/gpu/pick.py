"""The binaries of a launch plan: chosen by compiling (`Chosen`), or the first candidate as it is (`first`).

A plan is lowered twice: once to learn what its launches need, so that everything is compiled together, and once with
what was chosen.
"""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from xdsl.dialects.builtin import ModuleOp

from plait.backends.base import CompileOptions
from plait.backends.kernels.gpu import table
from plait.backends.kernels.gpu.archs import Arch
from plait.backends.kernels.gpu.choose import Candidates, Choice, Request, choose_many
from plait.backends.kernels.gpu.draft import Need, Pick, Picked, Scalars
from plait.backends.kernels.gpu.expression import evaluate
from plait.backends.kernels.gpu.kernel import Tile
from plait.backends.kernels.gpu.launch import Binary, LaunchPlan
from plait.backends.kernels.gpu.lower import lower

#: Products have one binary for so many rows and fewer each, and one for more.
BUCKETS = (16, 64)

#: What a launch is predicted for, beside its rows: keys of a sequence, and tokens of a prefill tile.
_KEYS, _TILE_TOKENS = 2048, 32


def first(arch: Arch) -> Pick:
    """No compiler: the first candidate of every bucket."""

    def pick(need: Need) -> Picked:
        return [
            (need.binary(table.candidates(need.kernel, need.types, need.constants, arch, rows)[0]), most)
            for rows, most in _buckets(need)
        ]

    return pick


@dataclass(frozen=True)
class Use:
    """What a binary was chosen for: launches of at most `most` rows (None: any number) with these sizes.

    Attributes:
        op: the first op that is launched so; launches: how many are, in a step.
    """

    op: str
    launches: int
    most: int | None
    sizes: Mapping[str, int]


@dataclass(frozen=True)
class Made:
    """A plan with its code: `files` by name, and why each binary is what it is."""

    plan: LaunchPlan
    files: Mapping[str, bytes]
    choices: Sequence[tuple[Use, Choice]]


def make(
    module: ModuleOp, target: str, arch: Arch, options: CompileOptions, candidates: Candidates = table.candidates
) -> Made:
    """Lower a slice, compile its kernels, and choose among them.

    Raises:
        UnsupportedError: naming the op and the attribute.
        MissingDependencyError: `triton-missing`.
        BuildError, BinaryError: a fault of ours.
    """
    needs: dict[str, Need] = {}
    placeholder = first(arch)

    def learn(need: Need) -> Picked:
        needs.setdefault(_key(need), need)
        return placeholder(need)

    lower(module, target, arch, options, learn)
    asked = [(key, most, _request(need, arch, rows)) for key, need in needs.items() for rows, most in _buckets(need)]
    requests = [request for _, _, request in asked]
    answers = choose_many(requests, candidates=candidates, progress=options.progress)
    chosen: dict[str, list[tuple[Binary, int | None]]] = {key: [] for key in needs}
    files, choices, uses = dict[str, bytes](), list[tuple[str, int | None, Choice]](), Counter[str]()
    for (key, most, _), choice in zip(asked, answers, strict=True):
        binary = _coded(needs[key].binary(choice.variant.tile), choice)
        files[binary.file] = choice.binary.code
        chosen[key].append((binary, most))
        choices.append((key, most, choice))
    ops: dict[str, str] = {}

    def pick(need: Need) -> Picked:
        return chosen[_key(need)]

    plan = lower(module, target, arch, options, pick)
    for step in plan.steps:
        key = _key_of(plan.binaries[step.choices[0].binary], step.scalars)
        uses[key] += 1
        ops.setdefault(key, step.op)
    made = [(Use(ops[key], uses[key], most, _sizes(needs[key])), choice) for key, most, choice in choices]
    return Made(plan, files, made)


def _buckets(need: Need) -> Iterator[tuple[int | None, int | None]]:
    """(rows that a tile is chosen for, rows that it is launched with): None is any number."""
    if need.kernel.nature == "multiply":
        for rows in BUCKETS:
            if rows < need.most:
                yield rows, rows
            else:
                yield rows, None
                return
    yield None, None


def _request(need: Need, arch: Arch, rows: int | None) -> Request:
    return Request(
        need.kernel,
        need.types,
        need.constants,
        arch.name,
        rows,
        _names(need, rows or need.most),
        need.aligned,
        need.small,
    )


def _names(need: Need, rows: int) -> dict[str, int]:
    """A launch of so many rows; of attention, of so many decode sequences, or of one prompt."""
    symbols = dict.fromkeys("TSDAR", rows) | {"L": _KEYS, "W": _KEYS, "P": -(-rows // _TILE_TOKENS)}
    scalars = {
        name: evaluate(str(need.scalars[name]), symbols) for name, kind in need.kernel.scalars.items() if kind == "i32"
    }
    return symbols | scalars


def _sizes(need: Need) -> dict[str, int]:
    """What of a launch does not depend on the batch, strides apart."""
    return {name: value for name, value in need.scalars.items() if isinstance(value, int) and "stride" not in name}


def _coded(binary: Binary, choice: Choice) -> Binary:
    """With the code that was made; equal code is one file."""
    made = choice.binary
    digest = hashlib.sha256(made.code).hexdigest()[:16]
    return replace(
        binary,
        symbol=made.symbol,
        file=f"{binary.kernel}-{digest}.{made.suffix}",
        threads=made.threads,
        shared_bytes=made.shared_bytes,
    )


def _key(need: Need) -> str:
    return _key_of(need.binary(Tile({})), need.scalars)


def _key_of(binary: Binary, scalars: Scalars) -> str:
    """Equal for launches that need the same."""
    parts = (binary.kernel, binary.types, binary.constants, binary.aligned, binary.small, scalars)
    return json.dumps(parts, sort_keys=True)
