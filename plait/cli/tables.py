"""Values as rich tables. Nothing here decides anything."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING

from rich import box
from rich.table import Table

from plait.words import blocks_text, bytes_text, cause_text, count_range, count_text, seconds_range, seconds_text

if TYPE_CHECKING:
    from plait.api import Request
    from plait.spec import Estimate, MemoryEstimate, Plan, PlannedSlice

#: Narrower than this, causes stand below the plan's table and not in it.
CAUSE_COLUMN_FROM = 110


def table(columns: Iterable[str], *, right: Iterable[str] = (), title: str | None = None) -> Table:
    """An empty table; the columns named in `right` hold numbers."""
    made = Table(box=box.SIMPLE_HEAD, title=title, title_justify="left", title_style="bold", pad_edge=False)
    for name in columns:
        made.add_column(name, justify="right" if name in right else "left", overflow="fold")
    return made


def facts(rows: Iterable[tuple[str, str]], title: str | None = None) -> Table:
    """Name and value, one pair per line; pairs without a value are left out."""
    made = Table(box=None, show_header=False, title=title, title_justify="left", title_style="bold", pad_edge=False)
    made.add_column(style="dim", no_wrap=True)
    made.add_column(overflow="fold")
    for name, value in rows:
        if value:
            made.add_row(name, value)
    return made


def request_facts(asked: Request, output: str | None) -> Table:
    """What was understood, with every default filled in."""
    work = asked.workload
    devices = ", ".join(f"{d.id} ({d.backend}:{d.arch} on {d.host})" for d in asked.cluster.devices)
    limits = [f"{name} at most {seconds_text(limit)}" for name, limit in
              (("first token", work.max_ttft_s), ("each token", work.max_tpot_s)) if limit is not None]  # fmt: skip
    asks = f"{work.name}: {work.concurrency} requests of {work.prompt_tokens} + {work.output_tokens} tokens"
    return facts(
        [
            ("model", str(asked.model)),
            ("config", str(asked.config or "")),
            ("devices", devices),
            ("workload", ", ".join([asks, *limits])),
            ("objective", asked.objective),
            ("dtype", asked.dtype or "the checkpoint's"),
            ("layers", ", ".join(map(str, asked.layers or ()))),
            ("pins", ", ".join(f"{unit} on {device}" for unit, device in asked.pins.items())),
            ("no cut before", ", ".join(f"block {cut}" for cut in asked.forbidden_cuts)),
            ("plan", "given by hand, honoured exactly" if asked.plan is not None else ""),
            ("output", output or ""),
        ],
        title="resolved arguments",
    )


def plan_tables(plan: Plan, runs_on: Sequence[str] | None, width: int, *, verbose: bool = False) -> Iterable[Table]:
    """The plan: slices with their causes, what the pipeline is predicted to do, idle devices.

    Args:
        runs_on: where each slice really runs; None where no backend was asked.
        width: columns there are; narrow ones get the causes below the table.
        verbose: also every part of each slice's memory.
    """
    wide = width >= CAUSE_COLUMN_FROM
    numbers = ("slice", "layers", "weights", "KV", "prefill", "decode")
    columns = ["slice", "device", *numbers[1:], *(["runs on"] if runs_on else []), *(["cause"] if wide else [])]
    slices = table(columns, right=numbers, title=f"plan of {plan.model}: {plan.blocks} layers in {plan.dtype}")
    for index, item in enumerate(plan.slices):
        where = [runs_on[index]] if runs_on else []
        slices.add_row(str(index), *_slice_cells(item), *where, *([cause_text(item.cause)] if wide else []))
    yield slices
    if not wide:
        yield facts([(f"slice {i}", cause_text(item.cause)) for i, item in enumerate(plan.slices)], title="causes")
    if verbose:
        yield memory_table(plan)
    yield facts(_whole(plan), title="predicted")


def _slice_cells(item: PlannedSlice) -> list[str]:
    memory = item.memory
    return [
        "+".join(item.devices),
        blocks_text(item.blocks),
        bytes_text(memory.weights_bytes) if memory else "-",
        bytes_text(memory.kv_bytes) if memory else "-",
        _seconds(item.prefill_s),
        _seconds(item.decode_s),
    ]


def _seconds(estimate: Estimate | None) -> str:
    return "-" if estimate is None else seconds_text(estimate.value)


def _whole(plan: Plan) -> Iterable[tuple[str, str]]:
    if plan.prediction is not None:
        yield "time to first token", seconds_range(plan.prediction.ttft_s)
        yield "time per output token", seconds_range(plan.prediction.tpot_s)
        yield "throughput", count_range(plan.prediction.output_tokens_per_s, "tokens/s")
        yield "largest context", f"{count_text(plan.prediction.max_context_tokens)} tokens per request"
        yield "KV capacity", f"{count_text(plan.prediction.max_kv_tokens)} tokens"
    yield "cause", cause_text(plan.cause)
    for idle in plan.idle:
        yield f"{idle.device} idle", cause_text(idle.cause)


def memory_table(plan: Plan) -> Table:
    """Every part of each slice's memory, and what is left."""
    names = ("weights", "KV", "activations", "logits", "reserve", "free", "of")
    made = table(["slice", "device", *names], right=("slice", *names), title="memory")
    for index, item in enumerate(plan.slices):
        if item.memory is not None:
            made.add_row(str(index), "+".join(item.devices), *map(bytes_text, memory_parts(item.memory)))
    return made


def memory_parts(memory: MemoryEstimate) -> tuple[int, ...]:
    return (
        memory.weights_bytes,
        memory.kv_bytes,
        memory.activations_bytes,
        memory.logits_bytes,
        memory.reserve_bytes,
        memory.free_bytes,
        memory.capacity_bytes,
    )


def fit_table(rows: Iterable[Mapping[str, int | str]]) -> Table:
    """Needed, free and short-by per device, of `FitError.rows`. A device that has enough is short by nothing."""
    made = table(["device", "blocks", "needed", "free", "short by"], right=("needed", "free", "short by"))
    for row in rows:
        short = int(row["short_by"])
        needed, free = bytes_text(int(row["needed"])), bytes_text(int(row["free"]))
        made.add_row(str(row["device"]), str(row.get("blocks", "")), needed, free, bytes_text(short) if short else "-")
    return made
