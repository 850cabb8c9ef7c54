"""Numbers for people: three digits and a unit."""

from __future__ import annotations


def bytes_text(value: float) -> str:
    """`1.25 GB`: decimal units, as device memory is sold."""
    for unit, size in (("TB", 1e12), ("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if abs(value) >= size:
            return f"{value / size:.3g} {unit}" if abs(value) < 1000 * size else f"{value / size:.0f} {unit}"
    return f"{value:.0f} B"


def seconds_text(value: float) -> str:
    for unit, size in (("s", 1.0), ("ms", 1e-3), ("us", 1e-6)):
        if abs(value) >= size:
            return f"{value / size:.3g} {unit}"
    return f"{value * 1e9:.3g} ns" if value else "0 s"


def count_text(value: float) -> str:
    """`1,234,560`; three digits below a thousand."""
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}"
