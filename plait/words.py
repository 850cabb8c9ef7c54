"""Numbers as people read them. Standard library only, so that the quick commands stay quick."""

from __future__ import annotations

_BYTES = ((1e12, "TB"), (1e9, "GB"), (1e6, "MB"), (1e3, "kB"))
_SECONDS = ((1.0, "s"), (1e-3, "ms"), (1e-6, "us"), (1e-9, "ns"))
_RATES = ((1e15, "P"), (1e12, "T"), (1e9, "G"), (1e6, "M"))


def bytes_text(count: float) -> str:
    """`1.25 GB`: decimal units, as device memory is sold."""
    return _scaled(count, _BYTES) or f"{count:.0f} B"


def seconds_text(seconds: float) -> str:
    """`1.2 s`, `35 ms`, `7 us`."""
    return _scaled(seconds, _SECONDS) or "0 s"


def counted(count: int, noun: str, plural: str = "") -> str:
    """`1 tensor`, `3 tensors`, `1,000 tensors`; `plural` where it is not the noun with an s."""
    return f"{count:,} {noun if count == 1 else plural or noun + 's'}"


def count_text(number: float) -> str:
    """`1,234,560`; three digits below a thousand."""
    return f"{number:,.0f}" if abs(number) >= 1000 else f"{number:.3g}"


def rate_text(per_second: float, unit: str) -> str:
    """`3.35 TB/s`, `989 TFLOP/s`; `unit` is `B/s` or `FLOP/s`."""
    return _scaled(per_second, tuple((size, prefix + unit) for size, prefix in _RATES)) or f"{per_second:.3g} {unit}"


def _scaled(number: float, units: tuple[tuple[float, str], ...]) -> str | None:
    """Three significant digits in the largest unit that gives at least one; None below them all."""
    for size, unit in units:
        # What rounds up to 1000 of a unit is written as 1 of the next.
        if abs(number) >= size * 0.9995:
            scaled = number / size
            return f"{scaled:,.0f} {unit}" if abs(scaled) >= 999.5 else f"{scaled:.3g} {unit}"
    return None
