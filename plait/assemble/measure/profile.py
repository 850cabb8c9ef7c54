"""From steps of small slices to a profile: which are measured, how often, and what is made of them."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import date
from itertools import product
from typing import Any

import numpy as np

from plait.assemble.measure.slices import (
    BETWEEN,
    MOVING,
    WIDTH,
    attentions,
    batch,
    chain,
    linears,
    op_of,
    rows_of_table,
    tied_logits,
)
from plait.backends.base import Batch, Executable
from plait.cost_models.profiled import DECODE, LINEAR, LOGITS, PREFILL, look_up
from plait.cost_models.profiles import Hop, Machine, Overheads, Profile, Times
from plait.ir.facts import Step
from plait.spec import Device

Clock = Callable[[], float]
Progress = Callable[[str, int, int], None]
Load = Callable[[Any, Sequence[Batch]], Executable]
"""From a module and the batches it will step to a slice that is ready."""

#: Seconds that no op is faster than: differences of two steps may come out negative on a busy machine.
_LEAST_S = 1e-7

#: The width of scores' inputs.
LOGITS_WIDTH = 1024

#: What matrices have to hold together, so that none comes from a cache, and up to how many rows that matters.
_COLD_BYTES, _FEW_ROWS = 256 << 20, 32

#: Repeats in a round of what takes next to no time.
_OFTEN = 4

_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}


@dataclass(frozen=True)
class Budget:
    """What is measured, and for how long.

    Attributes:
        seconds: for repeats, over all dtypes; at least `rounds` of everything are made.
        rows, widths: of products. sequences, lengths: of decode attention; queries, before: of prefill attention.
        tokens: of what moves activations. scores, vocabularies: rows of logits, and of their matrix.
    """

    seconds: float
    rounds: int
    rows: tuple[int, ...]
    widths: tuple[int, ...]
    sequences: tuple[int, ...]
    lengths: tuple[int, ...]
    queries: tuple[int, ...]
    before: tuple[int, ...]
    tokens: tuple[int, ...]
    scores: tuple[int, ...] = (1, 4, 16, 64)
    vocabularies: tuple[int, ...] = (8192, 49152)


QUICK = Budget(
    seconds=20,
    rounds=3,
    rows=(1, 4, 16, 128, 512),
    widths=(512, 1024, 2048),
    sequences=(1, 4, 16),
    lengths=(64, 256, 1024),
    queries=(32, 128, 512),
    before=(0, 512),
    tokens=(1, 16, 128, 512),
)
FULL = Budget(
    seconds=180,
    rounds=5,
    rows=(1, 2, 4, 8, 16, 32, 64, 128, 256, 512),
    widths=(256, 512, 1024, 2048, 4096),
    sequences=(1, 2, 4, 8, 16, 32),
    lengths=(32, 64, 128, 256, 512, 1024, 2048),
    queries=(16, 32, 64, 128, 256, 512),
    before=(0, 256, 1024, 2048),
    tokens=(1, 4, 16, 64, 128, 256, 512),
)


@dataclass
class Case:
    """One point of a table: a slice with `once` of the ops and one with `more` of them on top, stepping one batch. Both
    have `between` products besides."""

    table: str
    at: tuple[float, ...]
    few: Executable
    many: Executable
    once: int
    more: int
    batch: Batch
    between: int = 0
    ops: list[float] = field(default_factory=list)
    rest: list[float] = field(default_factory=list)

    @property
    def is_short(self) -> bool:
        """Its steps take next to no time, and their difference is less than what they vary by."""
        return self.batch.token_count <= _FEW_ROWS and not self.table.startswith((LINEAR, LOGITS))

    def sample(self, clock: Clock, before: Callable[[], object], *, swap: bool = False) -> None:
        """One repeat of both, one soon after the other: what slows the machine down slows both.

        Args:
            before: is called before each, and leaves the caches as something else does.
        """
        taken = []
        for item in (self.many, self.few) if swap else (self.few, self.many):
            before()
            taken.append(_step_s(item, self.batch, clock))
        few, many = reversed(taken) if swap else taken
        op = (many - few) / self.more
        self.ops.append(op)
        self.rest.append(few - op * self.once)


def _step_s(item: Executable, step: Batch, clock: Clock) -> float:
    start = clock()
    item.step(step, {})
    return clock() - start


def cases(dtype: str, budget: Budget, load: Load) -> Iterator[list[Case]]:
    """Everything that is measured in a dtype, in lots that share slices."""
    yield from _products(dtype, budget, load)
    yield _logits(dtype, budget, load)
    for name in MOVING:
        yield _moving(dtype, name, budget, load)
    yield _decodes(dtype, budget, load)
    yield _prefills(dtype, budget, load)


def _products(dtype: str, budget: Budget, load: Load) -> Iterator[list[Case]]:
    steps = {rows: batch([rows], [rows]) for rows in budget.rows}
    for width in budget.widths:
        cold = max(_COLD_BYTES // (width * width * _BYTES[dtype]), 2)
        counts = {rows: cold if rows <= _FEW_ROWS else min(cold, 8) for rows in budget.rows}
        few = load(linears(dtype, width, 1), list(steps.values()))
        many = {
            more: load(linears(dtype, width, 1 + more), [steps[rows] for rows in budget.rows if counts[rows] == more])
            for more in dict.fromkeys(counts.values())
        }
        yield [
            Case(f"{LINEAR} {dtype}", (rows, width * width), few, many[more], 1, more, steps[rows])
            for rows, more in counts.items()
        ]


def _logits(dtype: str, budget: Budget, load: Load) -> list[Case]:
    steps = [batch([rows], [rows], logits=True) for rows in budget.scores]
    out = []
    for vocabulary in budget.vocabularies:
        few = load(rows_of_table(dtype, LOGITS_WIDTH, vocabulary), steps)
        many = load(tied_logits(dtype, LOGITS_WIDTH, vocabulary), steps)
        at = LOGITS_WIDTH * vocabulary
        out += [Case(f"{LOGITS} {dtype}", (case.token_count, at), few, many, 0, 1, case) for case in steps]
    return out


def _moving(dtype: str, name: str, budget: Budget, load: Load) -> list[Case]:
    steps = [batch([tokens], [tokens]) for tokens in budget.tokens]
    modules = [chain(dtype, count, MOVING[name]) for count in (1, BETWEEN)]
    few, many = (load(module, steps) for module in modules)
    op = op_of(modules[0], name)
    return [Case(f"{name} {dtype}", (op.cost(_step(step)).activation_bytes,), few, many, 1, 8, step) for step in steps]


def _decodes(dtype: str, budget: Budget, load: Load) -> list[Case]:
    points = list(product(budget.sequences, budget.lengths))
    return _attentions(dtype, load, f"{DECODE} {dtype}", points, lambda count, kv: batch([1] * count, [kv] * count))


def _prefills(dtype: str, budget: Budget, load: Load) -> list[Case]:
    points = list(product(budget.queries, budget.before))
    return _attentions(dtype, load, f"{PREFILL} {dtype}", points, lambda query, kv: batch([query], [query + kv]))


def _attentions(
    dtype: str, load: Load, table: str, points: list[tuple[int, int]], made: Callable[[int, int], Batch]
) -> list[Case]:
    steps = [made(*point) for point in points]
    modules = [attentions(dtype, count) for count in (1, 5)]
    few, many = (load(module, steps) for module in modules)
    op = op_of(modules[0], "attention")
    out = []
    for point, step in zip(points, steps, strict=True):
        # As `profiled.py` looks up: bytes a sequence reads, or one more than the tokens before.
        at = (point[0], op.cost(_step(step)).kv_bytes / point[0] if table.startswith(DECODE) else point[1] + 1)
        out.append(Case(table, at, few, many, 1, 4, step, BETWEEN))
    return out


def _step(made: Batch) -> Step:
    lens = np.diff(made.query_starts)
    return Step(tuple(map(int, lens)), tuple(map(int, made.kv_lens)), len(made.logit_rows))


def repeat(
    lots: Sequence[Sequence[Case]], seconds: float, rounds: int, clock: Clock, told: Callable[[float], None]
) -> None:
    """Rounds over all cases until the time is over: each point is measured early and late, in fast and slow minutes.

    Args:
        rounds: the fewest.
        told: is told which part of the work is done.
    """
    every = [case for lot in lots for case in lot]
    for case in every:  # shapes compile and caches fill
        for item in (case.few, case.many):
            item.step(case.batch, {})
    largest = max(every, key=lambda case: (case.table.startswith(LINEAR), case.at[-1]))
    row = next(case for case in every if case.few is largest.few)

    def before() -> None:
        largest.few.step(row.batch, {})

    start, done, wanted = clock(), 0, rounds
    while done < wanted:
        for number, case in enumerate(every):
            for once in range(_OFTEN if case.is_short else 1):
                case.sample(clock, before, swap=(done + once) % 2 == 1)
            told((done + number / len(every)) / wanted)
        done += 1
        wanted = max(rounds, int(seconds / max((clock() - start) / done, 1e-9)))


def tables(every: Sequence[Case]) -> dict[str, Times]:
    """Medians, and what 80 % of the repeats lay between, by table."""
    out: dict[str, Times] = {}
    for name in dict.fromkeys(case.table for case in every):
        found = {case.at: _quantiles(case.ops) for case in every if case.table == name}
        axes = tuple(tuple(sorted({at[i] for at in found})) for i in range(len(next(iter(found)))))
        low, middle, high = zip(*(found[at] for at in product(*axes)), strict=True)
        out[name] = Times(axes, middle, low, high)
    return out


def _quantiles(values: Sequence[float]) -> tuple[float, float, float]:
    low, middle, high = (max(float(v), _LEAST_S) for v in np.quantile(values, (0.1, 0.5, 0.9)))
    return low, middle, high


def slice_overheads(every: Sequence[Case], known: Mapping[str, Times]) -> tuple[float, float, float]:
    """(of a slice, more per sequence, more per token) in seconds: what steps of one attention take beside it and the
    products, and what a rope's tables take per token beyond what an `add` has none of. By least squares, where a long
    step's rest counts less: it is the small difference of large times."""
    steps, tables_of_ropes = [], []
    for case in every:
        name, _, dtype = case.table.partition(" ")
        op, rest = statistics.median(case.ops), statistics.median(case.rest)
        tokens, weight = float(case.batch.token_count), 1 / max(rest + op * case.once, _LEAST_S)
        if name in (DECODE, PREFILL):
            products = case.between * look_up(known[f"{LINEAR} {dtype}"], tokens, WIDTH * WIDTH).seconds
            decodes = float(case.batch.sequence_count) if name == DECODE else 0.0
            steps.append((weight, rest - products, 1.0, decodes, tokens))
        elif name == "rope":
            like = next(c for c in every if c.table == f"add {dtype}" and c.batch.token_count == tokens)
            tables_of_ropes.append((weight, rest - statistics.median(like.rest), tokens))
    slice_s, sequence_s, token_s = _fitted(steps)
    return slice_s, sequence_s, token_s + _fitted(tables_of_ropes)[0]


def _fitted(rows: Sequence[tuple[float, ...]]) -> list[float]:
    """Coefficients, none of them negative, of rows of a weight, a value and the coordinates."""
    table = np.array(rows)
    found = _nonnegative(table[:, 2:] * table[:, :1], table[:, 1] * table[:, 0])
    return [float(value) for value in found]


def _nonnegative(matrix: Any, values: Any) -> Any:
    """Least squares without the columns that would come out negative."""
    kept = list(range(matrix.shape[1]))
    while True:
        part = np.linalg.lstsq(matrix[:, kept], values, rcond=None)[0]
        if (part >= 0).all() or len(kept) == 1:
            out = np.zeros(matrix.shape[1])
            out[kept] = np.maximum(part, 0)
            return out
        kept.remove(kept[int(part.argmin())])


def engine_overheads(
    pipe: Any, item: Executable, sequences: Sequence[int], rounds: int, clock: Clock = time.perf_counter
) -> tuple[float, float]:
    """(of a step, more per sequence) in seconds: what a pipeline's decode steps take beside its one slice's.

    Args:
        pipe: a `plait.Pipeline` of one slice whose model does not end of itself; item: the same slice, loaded here.
    """
    new, prompt = 24, 8
    rows = []
    for count in sequences:
        prompts = [[1 + i % 7] * prompt for i in range(count)]
        step = batch([1] * count, [prompt + new // 2] * count, vocabulary=8)
        rest = []
        for number in range(rounds + 1):
            start = clock()
            pipe.generate_ids(prompts, max_tokens=1)
            between = clock()
            pipe.generate_ids(prompts, max_tokens=1 + new)
            decode_s = ((clock() - between) - (between - start)) / new
            inside = statistics.median(_step_s(item, step, clock) for _ in range(new))
            if number:
                rest.append(decode_s - inside)
        value = max(statistics.median(rest), _LEAST_S)
        rows.append((1 / value, value, 1.0, float(count)))
    of_step, of_sequence = _fitted(rows)
    return of_step, of_sequence


def measure(
    device: Device,
    machine: Machine,
    dtypes: Sequence[str],
    budget: Budget,
    load: Load,
    *,
    engine: tuple[float, float],
    copy_bytes_per_s: float,
    hops: tuple[Hop, Hop],
    threads: int,
    clock: Clock = time.perf_counter,
    progress: Progress = lambda phase, done, total: None,
    today: date | None = None,
) -> Profile:
    """A profile of one device.

    Args:
        load: makes slices of modules: `slices.Loader`.
        engine, copy_bytes_per_s, hops: measured before, by `engine_overheads`, `copy_rate` and `hops`.
        progress: called with a phase, and how much of it is done, out of how much.
    """
    every: list[Case] = []
    for dtype in dtypes:
        lots = []
        for lot in cases(dtype, budget, load):
            lots.append(lot)
            progress(f"{dtype}: load", len(lots), len(budget.widths) + len(MOVING) + 3)

        def told(part: float, dtype: str = dtype) -> None:
            progress(f"{dtype}: measure", min(int(part * 100), 100), 100)

        repeat(lots, budget.seconds / len(dtypes), budget.rounds, clock, told)
        for item in {id(x): x for lot in lots for case in lot for x in (case.few, case.many)}.values():
            item.close()
        every += [case for lot in lots for case in lot]
    made = tables(every)
    slice_s, sequence_s, token_s = slice_overheads(every, made)
    return Profile(
        device=device.name,
        backend=device.backend,
        arch=device.arch,
        machine=machine,
        threads=threads,
        made=(today or date.today()).isoformat(),
        quick=budget is QUICK,
        tables=made,
        overheads=Overheads(slice_s, sequence_s, token_s, *engine),
        copy_bytes_per_s=copy_bytes_per_s,
        shared=hops[0],
        loopback=hops[1],
    )
