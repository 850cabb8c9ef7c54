"""Tiles measured on the device: what `plait tune` does.

`tune` compiles every candidate of every launch of a slice, has each timed, and keeps the times (`tuned`), so that the
next compile prefers the fastest. Where and how they are timed is a `Stand`'s: `SliceStand` runs the slice's own
launches, on its own weights and pages, with a `Clock` of the device.
"""

from __future__ import annotations

import statistics
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import TracebackType
from typing import Protocol, Self

import numpy as np
from xdsl.dialects.builtin import ModuleOp

from plait.backends.base import Batch, CompileOptions, LoadOptions
from plait.backends.kernels.gpu import build, table
from plait.backends.kernels.gpu.archs import Arch
from plait.backends.kernels.gpu.backend import read_plan
from plait.backends.kernels.gpu.build import arch_named
from plait.backends.kernels.gpu.cache import Cache, default_folder
from plait.backends.kernels.gpu.choose import FATAL, Candidates, variants_of
from plait.backends.kernels.gpu.cupy_clock import CupyClock
from plait.backends.kernels.gpu.cupy_device import CupyDevice
from plait.backends.kernels.gpu.device import Call
from plait.backends.kernels.gpu.draft import Need, Picked
from plait.backends.kernels.gpu.executor import LaunchSlice
from plait.backends.kernels.gpu.facts import BinaryError, check, expectations
from plait.backends.kernels.gpu.here import Devices
from plait.backends.kernels.gpu.kernel import Tile, Variant
from plait.backends.kernels.gpu.launch import LaunchPlan
from plait.backends.kernels.gpu.lower import lower
from plait.backends.kernels.gpu.pick import Asked, asked, coded, coded_name, key_of, need_key
from plait.backends.kernels.gpu.steps import batch
from plait.backends.kernels.gpu.tuned import Store, Timed, Tuned
from plait.errors import ArtifactError
from plait.ir import read_module


@dataclass(frozen=True)
class Candidate:
    """One way to compile what is asked for, compiled."""

    variant: Variant
    binary: build.Binary


Round = Mapping[tuple[str, int | None], Candidate]
"""The candidate to time next of every `Asked`, by its key and rows."""


class Stand(Protocol):
    """Where candidates are timed."""

    device: str

    def take(self, candidates: Round) -> None:
        """What `times_us` times from now on."""

    def times_us(self, asked: Asked) -> Sequence[float]:
        """Times of one launch each, in microseconds; none where no batch within the slice's bounds launches it."""


class Clock(Protocol):
    """A device's clock.

    Attributes:
        device: what the device calls itself.
    """

    device: str

    def times_us(self, call: Call) -> Sequence[float]:
        """Times of the same launch, in microseconds, with nothing of what it reads in a cache."""


Progress = Callable[[str, int, int], None]


def tune(
    wanted: Sequence[Asked],
    stand: Stand,
    *,
    candidates: Candidates = table.candidates,
    cache: Cache | None = None,
    progress: Progress = lambda phase, done, total: None,
) -> list[Tuned | None]:
    """Time the candidates of everything that is asked for, one of each in turn, and keep what was found.

    Returns:
        For each what was found; None where it is never launched.

    Raises:
        MissingDependencyError: `triton-missing`.
        BinaryError: `binary-wrong`: nothing of what is asked for can be launched.
        UserError: `cache-unwritable`.
    """
    cache = cache or Cache(default_folder())
    able = _compiled(wanted, candidates, cache, progress)
    medians: list[list[Timed]] = [[] for _ in wanted]
    done, total = 0, sum(map(len, able))
    for turn in range(max(map(len, able), default=0)):
        pairs = zip(wanted, able, strict=True)
        stand.take({(item.key, item.most): own[min(turn, len(own) - 1)] for item, own in pairs})
        for item, own, found in zip(wanted, able, medians, strict=True):
            if turn < len(own):
                if times := stand.times_us(item):
                    found.append(Timed(own[turn].variant.tile, statistics.median(times)))
                done += 1
                progress("measure", done, total)
    store = Store.beside(cache)
    return [
        store.put(item.request, stand.device, found) if found else None
        for item, found in zip(wanted, medians, strict=True)
    ]


def _compiled(
    wanted: Sequence[Asked], candidates: Candidates, cache: Cache, progress: Progress
) -> list[list[Candidate]]:
    """The candidates of each that compile and can be launched."""
    variants = [variants_of(item.request, candidates) for item in wanted]
    jobs = [
        build.Job(item.request.kernel, variant, item.request.arch)
        for item, own in zip(wanted, variants, strict=True)
        for variant in own
    ]
    made = iter(
        build.compile_many(jobs, cache=cache, progress=lambda done, total, label: progress("kernels", done, total))
    )
    able = [
        [
            Candidate(variant, binary)
            for variant in own
            if not isinstance(binary := next(made), build.BuildError) and _launchable(item, variant, binary)
        ]
        for item, own in zip(wanted, variants, strict=True)
    ]
    for item, own in zip(wanted, able, strict=True):
        if not own:
            raise BinaryError(f"no tile of {item.request.kernel.name} can be launched on {item.request.arch}", ())
    return able


def _launchable(item: Asked, variant: Variant, binary: build.Binary) -> bool:
    arch, kernel = arch_named(item.request.arch), item.request.kernel
    failures = check(binary.facts, arch, kernel, variant, expectations(kernel, variant, arch))
    return not FATAL & {failure.name for failure in failures}


class SliceStand:
    """A slice in a device's memory, whose launches are timed one by one. Close it, or use it as a context manager.

    Args:
        pages: pages that were allocated, by KV class.
        options: the bounds that the slice was compiled for.
    """

    def __init__(
        self,
        module: ModuleOp,
        target: str,
        arch: Arch,
        options: CompileOptions,
        running: LaunchSlice,
        pages: Mapping[str, int],
        clock: Clock,
    ) -> None:
        self.device = clock.device
        self._slice = module, target, arch, options
        self._options, self._running, self._pages, self._clock = options, running, pages, clock
        self._steps: dict[str, int] = {}

    def take(self, candidates: Round) -> None:
        def pick(need: Need) -> Picked:
            key = need_key(need)
            return [
                (coded(need.binary(found.variant.tile), found.binary), most)
                for (name, most), found in candidates.items()
                if name == key
            ]

        plan = lower(*self._slice, pick)
        self._steps = {}
        for index, step in enumerate(plan.steps):
            self._steps.setdefault(key_of(plan, step), index)
        with tempfile.TemporaryDirectory(prefix="plait-tune-") as folder:
            for found in candidates.values():
                name = coded_name(found.variant.kernel, found.binary)
                (Path(folder) / name).write_bytes(found.binary.code)
            self._running.replan(plan, Path(folder))

    def times_us(self, asked: Asked) -> Sequence[float]:
        rows = asked.need.most if asked.most is None else asked.most
        for made in (self._prompts(rows), self._decode(rows)):
            call = self._running.single(made, self._steps[asked.key])
            if call is not None:
                return self._clock.times_us(call)
        return ()

    def _prompts(self, tokens: int) -> Batch:
        """So many new tokens, in as few prompts as the longest sequence allows, every token's logits wanted."""
        longest, tokens = self._options.max_context_tokens, min(tokens, self._options.max_step_tokens)
        lens = [longest] * (tokens // longest) + [tokens % longest] * (tokens % longest > 0)
        return self._paged(replace(batch(lens, lens), logit_rows=np.arange(tokens, dtype=np.int32)))

    def _decode(self, sequences: int) -> Batch:
        """One new token of each of so many sequences, all at their longest."""
        count = min(sequences, self._options.max_sequences, self._options.max_step_tokens)
        return self._paged(batch([1] * count, [self._options.max_context_tokens] * count))

    def _paged(self, made: Batch) -> Batch:
        """With page tables: pages in order, again from the first where there are too few."""
        entries = -(-int(made.kv_lens.max()) // self._options.page_tokens)
        places = np.arange(made.sequence_count * entries, dtype=np.int32).reshape(-1, entries)
        return replace(made, page_tables={name: places % np.int32(count) for name, count in self._pages.items()})

    def close(self) -> None:
        self._running.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()


@dataclass(frozen=True)
class Result:
    """What tuning found for one launch: the artifact's tile (None where it has none such), and the times."""

    asked: Asked
    now: Tile | None
    tuned: Tuned | None


def tune_slice(
    folder: Path,
    target: str,
    here: Devices,
    options: CompileOptions,
    load: LoadOptions,
    progress: Progress,
) -> list[Result]:
    """Tune a slice of an artifact on the device here that runs its code. The slice is loaded for that.

    Raises:
        ArtifactError: `no-device-code`: the slice has no launch plan.
        UnsupportedError: `device-arch`: no device here runs its code.
        FitError: the slice does not fit the device, the clock's memory included.
        MissingDependencyError: `triton-missing`.
    """
    plan = read_plan(folder)
    if plan is None:
        why = "it was compiled with --no-device-code"
        raise ArtifactError("no-device-code", f"{folder} has no machine code to tune", why=why, hint="compile it again")
    module, arch = read_module(folder / "slice.mlir"), arch_named(plan.arch)
    ordinals = here.fitting(plan.arch)
    ordinal = ordinals[load.ordinal % len(ordinals)]
    device = CupyDevice(here.cupy, ordinal)
    clock = CupyClock(here.cupy, device, ordinal)
    running = LaunchSlice(folder, plan, device, clock.device, load)
    wanted = asked(module, target, arch, options)
    with SliceStand(module, target, arch, options, running, load.pages, clock) as stand:
        found = tune(wanted, stand, progress=progress)
    now = _tiles(plan)
    return [Result(item, now.get((item.key, item.most)), one) for item, one in zip(wanted, found, strict=True)]


def _tiles(plan: LaunchPlan) -> dict[tuple[str, int | None], Tile]:
    """The tiles of a plan, by what asks for them."""
    return {
        (key_of(plan, step), choice.most): plan.binaries[choice.binary].variant.tile
        for step in plan.steps
        for choice in step.choices
    }
