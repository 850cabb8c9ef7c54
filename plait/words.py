"""Numbers and names as people read them: the same words in tables, errors and reports. Standard library only."""

from __future__ import annotations

from plait.spec import Cause, Estimate

_BYTES = ((1e12, "TB"), (1e9, "GB"), (1e6, "MB"), (1e3, "kB"))
_SECONDS = ((1.0, "s"), (1e-3, "ms"), (1e-6, "us"), (1e-9, "ns"))
_RATES = ((1e15, "P"), (1e12, "T"), (1e9, "G"), (1e6, "M"))


def bytes_text(count: float) -> str:
    """`1.25 GB`: decimal units, as device memory is sold."""
    return _scaled(count, _BYTES) or f"{count:.0f} B"


def seconds_text(seconds: float) -> str:
    """`1.2 s`, `35 ms`, `7 us`."""
    return _scaled(seconds, _SECONDS) or "0 s"


def rate_text(per_second: float, unit: str) -> str:
    """`3.35 TB/s`, `989 TFLOP/s`; `unit` is `B/s` or `FLOP/s`."""
    return _scaled(per_second, tuple((size, prefix + unit) for size, prefix in _RATES)) or f"{per_second:.3g} {unit}"


def count_text(count: float) -> str:
    """`134,515,008`; three digits below a thousand."""
    return f"{count:,.0f}" if abs(count) >= 1000 else f"{count:.3g}"


def seconds_range(estimate: Estimate) -> str:
    """`12 ms (9 ms to 20 ms, roofline)`."""
    value, low, high = map(seconds_text, (estimate.value, estimate.low, estimate.high))
    return f"{value} ({low} to {high}, {estimate.source})"


def count_range(estimate: Estimate, unit: str) -> str:
    """`1,200 tokens/s (800 to 1,500, roofline)`."""
    value, low, high = map(count_text, (estimate.value, estimate.low, estimate.high))
    return f"{value} {unit} ({low} to {high}, {estimate.source})"


def blocks_text(blocks: tuple[int, int]) -> str:
    """`0-14`, both included; `7` for one block."""
    start, end = blocks
    return str(start) if end - start == 1 else f"{start}-{end - 1}"


def cause_text(cause: Cause | None) -> str:
    """A cause in one line: why, the number behind it, the runner-up. Its source is left to the report."""
    if cause is None:
        return ""
    return "; ".join(part for part in (cause.why, cause.number, cause.runner_up) if part)


def _scaled(number: float, units: tuple[tuple[float, str], ...]) -> str | None:
    """Three significant digits in the largest unit that gives at least one; None below them all."""
    for size, unit in units:
        # What rounds up to 1000 of a unit is written as 1 of the next.
        if abs(number) >= size * 0.9995:
            scaled = number / size
            return f"{scaled:,.0f} {unit}" if abs(scaled) >= 999.5 else f"{scaled:.3g} {unit}"
    return None
