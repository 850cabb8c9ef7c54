"""Which tile to compile a kernel with, settled without the device: compile the candidates, read the binaries, model the
time, keep the best and say why. Where `plait tune` has measured them on a device (`tuned`), its winner is taken.

The model ranks; it does not promise. One launch takes the longest of what it asks of the matrix units, of memory, of
the L2 cache and of its own chain of loads, after the start of its blocks:

- compute: the unit with the most blocks has `ceil(blocks / units)` of them, each with the work of a whole tile, at the
  unit's peak times how well a tile feeds it: operands come from shared memory, BLOCK_M + BLOCK_N values for every
  BLOCK_M * BLOCK_N products.
- memory: every tensor once, at the bandwidth that the bytes in flight allow (Little's law: bandwidth = bytes in flight
  / latency). Bytes in flight are those of all blocks that run at once: what registers and shared memory leave room for.
  Where some units have no block, the others can draw little more than their share.
- L2: what every block reads of its operands.
- chain: loads that wait for each other, one block after another on a unit.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from plait.backends.kernels.gpu import table
from plait.backends.kernels.gpu.archs import Arch
from plait.backends.kernels.gpu.build import Binary, BuildError, Job, Progress, arch_named, compile_many
from plait.backends.kernels.gpu.cache import Cache, default_folder
from plait.backends.kernels.gpu.expression import evaluate
from plait.backends.kernels.gpu.facts import BinaryError, Facts, Failure, check, expectations
from plait.backends.kernels.gpu.kernel import Constant, Kernel, Tile, Variant
from plait.backends.kernels.gpu.tuned import Store, Tuned

Candidates = Callable[[Kernel, Mapping[str, str], Mapping[str, Constant], Arch, int | None], Sequence[Tile]]

ELEMENT_BITS = {"fp32": 32, "i32": 32, "fp16": 16, "bf16": 16, "i8": 8, "u8": 8, "fp8e4nv": 8, "fp8e4b8": 8, "fp8e5": 8}

#: Failures that make a binary wrong, not only slow.
FATAL = frozenset({"arch", "arguments", "shared-memory", "registers", "occupancy"})

# Assumed, of the right size for every chip of `archs`; only their proportions matter.
_LATENCY_US = 0.8
"""From a load of global memory to its value, under load."""
_L2_LATENCY_US = 0.35
_REACHED = 0.9
"""Share of the peak bandwidth that is reached at most."""
_UNIT_DRAWS = 1.5
"""Bandwidth of one unit alone to its even share."""
_L2_TO_MEMORY = 2.5
"""Bandwidth of L2 to that of memory."""
_LAUNCH_US = 2.0
_FEED = 32
"""A square tile of this side, twice, feeds the matrix units at half their peak."""
_OLD_MATRIX_SHARE = {"wgmma.mma_async": 0.6, "tcgen05.mma": 0.3}
"""What `mma.sync` reaches of a chip that has a newer instruction, by that."""
_MOST_IN_FLIGHT_BYTES = 128
"""That one thread has, of loads into registers."""


@dataclass(frozen=True)
class Request:
    """A kernel, and the launches to choose a tile for.

    Attributes:
        rows: the launches have at most so many rows; None: any number.
        names: values of `i32` scalars and batch symbols, of the launch whose time is predicted. Text is an expression:
            what depends on the tile.
    """

    kernel: Kernel
    types: Mapping[str, str]
    constants: Mapping[str, Constant]
    arch: str
    rows: int | None
    names: Mapping[str, int | str]
    aligned: frozenset[str] = field(default=frozenset())
    small: frozenset[str] = field(default=frozenset())

    def variant(self, tile: Tile) -> Variant:
        return Variant(self.kernel.name, self.types, self.constants, tile, self.aligned, self.small)


@dataclass(frozen=True)
class Prediction:
    """Where the time of one launch goes, in microseconds, and how much it has to do."""

    compute_us: float
    memory_us: float
    l2_us: float
    chain_us: float
    start_us: float
    blocks: int
    flops: int
    nbytes: int

    @property
    def total_us(self) -> float:
        return self.start_us + max(self._parts.values())

    @property
    def bound_by(self) -> str:
        parts = self._parts
        return max(parts, key=lambda name: parts[name])

    @property
    def _parts(self) -> dict[str, float]:
        return {
            "compute": self.compute_us,
            "memory": self.memory_us,
            "L2": self.l2_us,
            "latency": self.chain_us,
        }


@dataclass(frozen=True)
class Choice:
    """The tile that won. `failures` are what is left to complain of (nothing of `FATAL`); `reason` is for people.
    `measured` is there where it won on a device."""

    variant: Variant
    binary: Binary
    prediction: Prediction
    failures: tuple[Failure, ...]
    reason: str
    measured: Tuned | None = None


def choose(request: Request, *, candidates: Candidates | None = None, cache: Cache | None = None) -> Choice:
    """`choose_many` of one request."""
    return choose_many([request], candidates=candidates, cache=cache)[0]


def choose_many(
    requests: Sequence[Request],
    *,
    candidates: Candidates | None = None,
    cache: Cache | None = None,
    workers: int | None = None,
    progress: Progress | None = None,
) -> list[Choice]:
    """The best tile of every request: the one that was measured to be, else the one that is predicted to be. All
    candidates of all requests are compiled together.

    Raises:
        BuildError: `kernel-compile`, `compiler-died`: no candidate compiles.
        BinaryError: `binary-wrong`: none can be launched.
    """
    cache = cache or Cache(default_folder())
    store = Store.beside(cache)
    tuned = [store.get(request) for request in requests]
    variants = [variants_of(r, candidates or table.candidates) for r in requests]
    for index, found in enumerate(tuned):
        if found is not None:
            winner = [variant for variant in variants[index] if variant.tile == found.best.tile]
            variants[index] = winner or variants[index]
            tuned[index] = found if winner else None  # it is no candidate any more
    jobs = [Job(r.kernel, variant, r.arch) for r, own in zip(requests, variants, strict=True) for variant in own]
    made = iter(compile_many(jobs, cache=cache, workers=workers, progress=progress))
    return [
        _best(r, [(variant, next(made)) for variant in own], found)
        for r, own, found in zip(requests, variants, tuned, strict=True)
    ]


def variants_of(request: Request, candidates: Candidates) -> list[Variant]:
    """What is worth compiling for a request."""
    r = request
    return [r.variant(tile) for tile in candidates(r.kernel, r.types, r.constants, arch_named(r.arch), r.rows)]


def predict(request: Request, variant: Variant, facts: Facts) -> Prediction:
    """The time of one launch of a binary."""
    arch, kernel, tile = arch_named(request.arch), request.kernel, variant.tile.constants
    names = _names(request, variant)
    blocks = 1
    for axis in kernel.grid:
        blocks *= max(0, evaluate(axis, names))
    blocks = max(1, blocks)
    at_once = min(blocks, max(1, facts.blocks) * arch.units)
    rounds = -(-blocks // at_once)
    nbytes, flops = evaluate(kernel.bytes, names), evaluate(kernel.flops, names)
    loop = _Loop.of(kernel, variant, names)
    in_flight = min(at_once * _in_flight_bytes(facts, variant, loop), max(1, nbytes))
    bytes_per_us = arch.bandwidth_gb_per_s * 1e3
    reached = min(_REACHED, _UNIT_DRAWS * blocks / arch.units)
    return Prediction(
        compute_us=_compute_us(arch, facts, kernel, tile, names, blocks),
        memory_us=max(nbytes / (reached * bytes_per_us), nbytes * _LATENCY_US / in_flight),
        l2_us=blocks * loop.steps * loop.step_bytes / (_L2_TO_MEMORY * bytes_per_us),
        chain_us=rounds * loop.steps * _L2_LATENCY_US / loop.ahead,
        start_us=_LAUNCH_US + rounds * _LATENCY_US,
        blocks=blocks,
        flops=flops,
        nbytes=nbytes,
    )


@dataclass(frozen=True)
class _Loop:
    """The loop of one block over its operands: steps, bytes of a step, and how many steps are loaded ahead."""

    steps: int = 1
    step_bytes: int = 0
    ahead: int = 1

    @staticmethod
    def of(kernel: Kernel, variant: Variant, names: Mapping[str, int]) -> _Loop:
        tile = variant.tile.constants
        if kernel.nature != "multiply":
            return _Loop()
        weights = names["N"] * names["K"] * ELEMENT_BITS[variant.types["w"]] // 8
        # The kernel's own count of bytes knows how w is packed, and whether there are two of it.
        weights = evaluate(kernel.bytes, {**names, "rows": 0}) or weights
        per_value = weights / (names["N"] * names["K"])
        x_bytes = tile["BLOCK_M"] * ELEMENT_BITS[variant.types["x"]] // 8
        return _Loop(
            steps=-(-names["K"] // tile["BLOCK_K"]),
            step_bytes=tile["BLOCK_K"] * (x_bytes + round(tile["BLOCK_N"] * per_value)),
            ahead=max(1, variant.tile.num_stages - 1),
        )


def _in_flight_bytes(facts: Facts, variant: Variant, loop: _Loop) -> int:
    """Of one block: its pipeline, or what its threads have asked for at once."""
    if loop.step_bytes:
        return loop.step_bytes * min(loop.ahead, loop.steps)
    asked = sum(width * count for width, count in facts.loads.items())
    return facts.threads * max(1, min(asked, _MOST_IN_FLIGHT_BYTES))


def _compute_us(
    arch: Arch, facts: Facts, kernel: Kernel, tile: Mapping[str, int], names: Mapping[str, int], blocks: int
) -> float:
    whole = dict(names)
    for name, side in (("rows", "BLOCK_M"), ("N", "BLOCK_N")):
        if kernel.nature == "multiply":
            whole[name] = -(-names[name] // tile[side]) * tile[side]
    work = evaluate(kernel.flops, whole) / blocks * -(-blocks // arch.units)
    return work / (arch.tera_ops[_width(facts)] * 1e6 / arch.units * _share(arch, facts, tile))


def _width(facts: Facts) -> int:
    """Bits of what the matrix units multiply; 32 where they are not used."""
    if not facts.matrix:
        return 32
    narrow = ("e4m3", "e5m2", "f8f6f4", "fp8", "bf8", "s8", "i8")
    return 8 if any(word in name for name in facts.matrix for word in narrow) else 16


def _share(arch: Arch, facts: Facts, tile: Mapping[str, int]) -> float:
    """Of the unit's peak that a tile of this shape can have."""
    if not facts.matrix:
        return 0.5
    m, n = tile.get("BLOCK_M", 16), tile.get("BLOCK_N", tile.get("BLOCK_KEYS", 64))
    fed = 1 / (1 + _FEED / m + _FEED / n)
    old = not any(name.startswith(arch.matrix[0]) for name in facts.matrix)
    return fed * (_OLD_MATRIX_SHARE.get(arch.matrix[0], 1.0) if old else 1.0)


def _names(request: Request, variant: Variant) -> dict[str, int]:
    sizes = {f"{name}_bytes": ELEMENT_BITS[kind] // 8 for name, kind in variant.types.items()}
    settled = {**variant.constants, **variant.tile.constants}
    known = {**sizes, **{n: int(v) for n, v in settled.items() if isinstance(v, int)}}
    known |= {name: value for name, value in request.names.items() if isinstance(value, int)}
    return known | {name: evaluate(text, known) for name, text in request.names.items() if isinstance(text, str)}


@dataclass(frozen=True)
class _Tried:
    variant: Variant
    binary: Binary
    prediction: Prediction
    failures: tuple[Failure, ...]

    @property
    def rank(self) -> tuple[int, float]:
        """Good code first, then fast code."""
        return len(self.failures), self.prediction.total_us


def _best(
    request: Request, made: Sequence[tuple[Variant, Binary | BuildError]], measured: Tuned | None = None
) -> Choice:
    arch = arch_named(request.arch)
    tried: list[_Tried] = []
    errors: list[BuildError] = []
    for variant, binary in made:
        if isinstance(binary, BuildError):
            errors.append(binary)
            continue
        failures = check(binary.facts, arch, request.kernel, variant, expectations(request.kernel, variant, arch))
        tried.append(_Tried(variant, binary, predict(request, variant, binary.facts), failures))
    usable = sorted((t for t in tried if not FATAL & {f.name for f in t.failures}), key=lambda t: t.rank)
    if not usable:
        if not tried:
            raise errors[0]
        what = f"no tile of {request.kernel.name} can be launched on {arch.name}"
        raise BinaryError(what, tuple(failure for t in tried for failure in t.failures))
    best = usable[0]
    reason = _reason(request, usable, tried, errors) if measured is None else _measured_reason(request, measured)
    return Choice(best.variant, best.binary, best.prediction, best.failures, reason, measured)


def _reason(request: Request, usable: Sequence[_Tried], tried: Sequence[_Tried], errors: Sequence[BuildError]) -> str:
    best = usable[0]
    p, facts = best.prediction, best.binary.facts
    text = [
        f"{shape(best.variant.tile)} for {_rows(request)}: {p.total_us:.1f} us predicted, bound by {p.bound_by}; "
        f"{p.blocks} blocks, {facts.blocks} at once on a unit ({facts.limit})"
    ]
    if len(usable) > 1:
        text.append(f"next {shape(usable[1].variant.tile)} with {usable[1].prediction.total_us:.1f} us")
    text += [f"{shape(t.variant.tile)}: {failure.why}" for t in tried for failure in t.failures[:1] if t is not best]
    text += [f"{error.what}" for error in errors]
    return "; ".join(text)


def _measured_reason(request: Request, measured: Tuned) -> str:
    best, *others = measured.times
    text = [f"{shape(best.tile)} for {_rows(request)}: {best.us:.1f} us measured on {measured.device}"]
    text += [f"next {shape(timed.tile)} with {timed.us:.1f} us" for timed in others[:1]]
    return "; ".join(text)


def _rows(request: Request) -> str:
    return "any number of rows" if request.rows is None else f"up to {request.rows} rows"


def shape(tile: Tile) -> str:
    """`128x256x64, 8 warps, 3 stages`."""
    sides = "x".join(str(value) for name, value in tile.constants.items() if name.startswith("BLOCK"))
    return ", ".join(filter(None, (sides, f"{tile.num_warps} warps", f"{tile.num_stages} stages")))
