"""A plan as rows, bars and text. Pure: the command line and the artifact's report draw what these return."""

from __future__ import annotations

from dataclasses import dataclass

from plait.errors import FitError
from plait.spec import Device, Estimate, Plan, PlannedSlice
from plait.words import bytes_text, count_text, counted, seconds_text

COLUMNS = ("slice", "device", "layers", "weights", "KV", "prefill", "decode", "cause")
FIT_COLUMNS = ("device", "blocks", "needed", "free", "short by")


@dataclass(frozen=True)
class MemoryBar:
    """One device: (name, bytes) parts in order, the last one what is free, and the whole."""

    device: str
    parts: tuple[tuple[str, int], ...]
    capacity_bytes: int


def table_rows(plan: Plan) -> list[tuple[str, ...]]:
    """One row per slice, in the order of `COLUMNS`."""
    return [_row(i, planned) for i, planned in enumerate(plan.slices)]


def memory_bars(plan: Plan) -> list[MemoryBar]:
    bars = []
    for planned in plan.slices:
        memory = planned.memory
        assert memory is not None, "the plan has no predictions yet"
        parts = (
            ("weights", memory.weights_bytes),
            ("KV", memory.kv_bytes),
            ("activations", memory.activations_bytes),
            ("logits", memory.logits_bytes),
            ("reserve", memory.reserve_bytes),
            ("free", memory.free_bytes),
        )
        bars.append(MemoryBar("+".join(planned.devices), parts, memory.capacity_bytes))
    return bars


def summary_rows(plan: Plan) -> list[tuple[str, str]]:
    """What the whole pipeline is predicted to do: (what, number with its range)."""
    found = plan.prediction
    assert found is not None, "the plan has no predictions yet"
    rate = found.output_tokens_per_s
    return [
        ("time to first token", range_text(found.ttft_s)),
        ("time per output token", range_text(found.tpot_s)),
        (
            f"output tokens/s at {plan.workload.concurrency} in flight",
            f"{count_text(rate.value)} ({count_text(rate.low)} to {count_text(rate.high)}, {rate.source})",
        ),
        ("largest context", f"{found.max_context_tokens:,} tokens x {plan.workload.concurrency} requests"),
        *(
            [("largest batch", f"{counted(found.max_requests, 'request')} x {plan.workload.context_tokens:,} tokens")]
            if found.max_requests is not None
            else []
        ),
        ("KV tokens", f"{found.max_kv_tokens:,}"),
    ]


def idle_rows(plan: Plan) -> list[tuple[str, str, str]]:
    """(device, why, runner-up)."""
    return [(idle.device, idle.cause.why, idle.cause.runner_up) for idle in plan.idle]


def fit_rows(error: FitError) -> list[tuple[str, ...]]:
    """The rows of a FitError in the order of `FIT_COLUMNS`."""
    return [
        (
            str(row["device"]),
            str(row["blocks"]) or "-",
            *(bytes_text(float(row[name])) if row[name] else "-" for name in ("needed", "free", "short_by")),
        )
        for row in error.rows
    ]


def markdown(plan: Plan) -> str:
    """The plan as Markdown text."""
    lines = [f"# {plan.model}: {plan.objective}, {plan.dtype}", ""]
    lines += _table(COLUMNS, table_rows(plan))
    lines += ["", *(f"- {name}: {value}" for name, value in summary_rows(plan))]
    if plan.cause:
        lines += ["", f"{plan.cause.why}; {plan.cause.number}. Runner-up: {plan.cause.runner_up or 'none'}."]
    if plan.idle:
        lines += ["", "Idle:", *(f"- {device}: {why}; {other}" for device, why, other in idle_rows(plan))]
    return "\n".join(lines) + "\n"


def range_text(estimate: Estimate) -> str:
    """`12 ms (8 ms to 24 ms, roofline)`."""
    low, high = seconds_text(estimate.low), seconds_text(estimate.high)
    return f"{seconds_text(estimate.value)} ({low} to {high}, {estimate.source})"


def device_rows(devices: tuple[Device, ...]) -> list[tuple[str, ...]]:
    """(id, backend, arch, memory, bandwidth, confidence) of a cluster's devices."""
    return [
        (d.id, d.backend, d.arch, bytes_text(d.memory_bytes), bytes_text(d.bandwidth_bytes_per_s) + "/s", d.confidence)
        for d in devices
    ]


def _row(number: int, planned: PlannedSlice) -> tuple[str, ...]:
    memory, prefill, decode = planned.memory, planned.prefill_s, planned.decode_s
    assert memory is not None and prefill is not None and decode is not None, "the plan has no predictions yet"
    start, end = planned.blocks
    return (
        str(number),
        "+".join(planned.devices),
        f"{start}:{end} ({end - start})",
        bytes_text(memory.weights_bytes),
        bytes_text(memory.kv_bytes),
        seconds_text(prefill.value),
        seconds_text(decode.value),
        planned.cause.why if planned.cause else "",
    )


def _table(columns: tuple[str, ...], rows: list[tuple[str, ...]]) -> list[str]:
    widths = [max(map(len, column)) for column in zip(columns, *rows, strict=True)]

    def line(cells: tuple[str, ...]) -> str:
        return "| " + " | ".join(cell.ljust(width) for cell, width in zip(cells, widths, strict=True)) + " |"

    return [line(columns), line(tuple("-" * width for width in widths)), *map(line, rows)]
