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
from plait.backends.kernels.gpu import build, table
from plait.backends.kernels.gpu.archs import Arch
from plait.backends.kernels.gpu.choose import Candidates, Choice, Request, choose_many
from plait.backends.kernels.gpu.draft import Need, Pick, Picked, Scalars
from plait.backends.kernels.gpu.expression import evaluate
from plait.backends.kernels.gpu.kernel import Tile
from plait.backends.kernels.gpu.launch import Binary, LaunchPlan, Step
from plait.backends.kernels.gpu.lower import lower

#: Products have one binary for so many rows and fewer each, and one for more.
BUCKETS = (16, 64)

#: What a launch is predicted for, beside its rows: keys of a sequence.
_KEYS = 2048


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
    """A plan with its code, by file, and why each binary is what it is."""

    plan: LaunchPlan
    code: Mapping[str, build.Binary]
    choices: Sequence[tuple[Use, Choice]]

    @property
    def files(self) -> dict[str, bytes]:
        return {name: binary.code for name, binary in self.code.items()}


@dataclass(frozen=True)
class Asked:
    """A tile to be chosen: what a launch needs, and the rows it is launched with (None: any number)."""

    need: Need
    most: int | None
    request: Request

    @property
    def key(self) -> str:
        return need_key(self.need)


def asked(module: ModuleOp, target: str, arch: Arch, options: CompileOptions) -> list[Asked]:
    """Every tile that a slice's plan asks for. Raises UnsupportedError, naming the op and the attribute."""
    needs: dict[str, Need] = {}
    placeholder = first(arch)

    def learn(need: Need) -> Picked:
        needs.setdefault(need_key(need), need)
        return placeholder(need)

    lower(module, target, arch, options, learn)
    return [Asked(need, most, _request(need, arch, rows)) for need in needs.values() for rows, most in _buckets(need)]


def make(
    module: ModuleOp, target: str, arch: Arch, options: CompileOptions, candidates: Candidates = table.candidates
) -> Made:
    """Lower a slice, compile its kernels, and choose among them.

    Raises:
        UnsupportedError: naming the op and the attribute.
        MissingDependencyError: `triton-missing`.
        BuildError, BinaryError: a fault of ours.
    """
    wanted = asked(module, target, arch, options)
    answers = choose_many([item.request for item in wanted], candidates=candidates, progress=options.progress)
    chosen: dict[str, list[tuple[Binary, int | None]]] = {item.key: [] for item in wanted}
    code = dict[str, build.Binary]()
    for item, choice in zip(wanted, answers, strict=True):
        binary = coded(item.need.binary(choice.variant.tile), choice.binary)
        code[binary.file] = choice.binary
        chosen[item.key].append((binary, item.most))
    plan = lower(module, target, arch, options, lambda need: chosen[need_key(need)])
    ops, uses = dict[str, str](), Counter[str]()
    for step in plan.steps:
        key = key_of(plan, step)
        uses[key] += 1
        ops.setdefault(key, step.op)
    choices = [
        (Use(ops[item.key], uses[item.key], item.most, sizes_of(item.need)), choice)
        for item, choice in zip(wanted, answers, strict=True)
    ]
    return Made(plan, code, choices)


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


def _names(need: Need, rows: int) -> dict[str, int | str]:
    """A launch of so many rows; of attention, of so many decode sequences, or of one prompt."""
    symbols = dict.fromkeys("TSDAR", rows) | {"L": _KEYS, "W": _KEYS}
    integers = (name for name, kind in need.kernel.scalars.items() if kind == "i32")
    scalars = {name: evaluate(str(need.scalars[name]), symbols) for name in integers}
    tiles = {"P": "cdiv(T, BLOCK_M // GROUP)"} if "tiles" in need.kernel.pointers else {}
    return {**symbols, **scalars, **tiles}


def sizes_of(need: Need) -> dict[str, int]:
    """What of a launch does not depend on the batch, strides apart."""
    return {name: value for name, value in need.scalars.items() if isinstance(value, int) and "stride" not in name}


def coded(binary: Binary, made: build.Binary) -> Binary:
    """With the code that was made."""
    return replace(
        binary,
        symbol=made.symbol,
        file=coded_name(binary.kernel, made),
        threads=made.threads,
        shared_bytes=made.shared_bytes,
    )


def coded_name(kernel: str, made: build.Binary) -> str:
    """The name of a binary's file; equal code is one file."""
    digest = hashlib.sha256(made.code).hexdigest()[:16]
    return f"{kernel}-{digest}.{made.suffix}"


def key_of(plan: LaunchPlan, step: Step) -> str:
    """`Asked.key` of what a step launches."""
    return _key_of(plan.binaries[step.choices[0].binary], step.scalars)


def need_key(need: Need) -> str:
    return _key_of(need.binary(Tile({})), need.scalars)


def _key_of(binary: Binary, scalars: Scalars) -> str:
    """Equal for launches that need the same."""
    parts = (binary.kernel, binary.types, binary.constants, binary.aligned, binary.small, scalars)
    return json.dumps(parts, sort_keys=True)
