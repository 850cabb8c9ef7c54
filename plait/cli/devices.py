"""`plait devices`: the catalogue, and which of it is here."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer

from plait.cli.options import Json

if TYPE_CHECKING:
    from plait.cli.screen import Screen
    from plait.cost_models.entries import Entry
    from plait.present import Found

NAME = "devices"

HELP = """List the devices plait can plan for.

The names in the first two columns go after --targets. A narrow terminal shows one name of each.

\b
    plait devices            # all of them
    plait devices mi300      # everything known about one

Peaks are dense, not sparse. "read" numbers were read in the named source, "derived" ones computed from such, "memory"
ones await another reading.
"""

COLUMNS = ("name", "also called", "chip", "target", "memory", "bandwidth", "bf16 peak", "numbers", "here")

#: What a terminal narrower than this has no room for.
WIDE_FROM = 120
WIDE_ONLY = ("also called", "chip", "numbers")


def command(
    name: Annotated[
        str | None, typer.Argument(metavar="[NAME]", show_default=False, help="Show everything about this device.")
    ] = None,
    as_json: Json = False,
) -> None:
    from plait.cli.screen import Screen
    from plait.cli.tables import facts, table
    from plait.cost_models.catalogue import HOST_CPU, devices, lookup
    from plait.present import accelerators
    from plait.registry import backend_names
    from plait.spec import to_dict

    screen = Screen(as_json=as_json)
    if name is not None and name.lower() == HOST_CPU:
        _this_host(screen)
        return
    here = accelerators()
    chosen = devices() if name is None else (lookup(name),)
    counts = [_count(entry, here) for entry in chosen]
    if name is None:
        kept = [i for i, column in enumerate(COLUMNS) if screen.width >= WIDE_FROM or column not in WIDE_ONLY]
        rows = [_row(entry, count) for entry, count in zip(chosen, counts, strict=True)]
        shown = table(
            [COLUMNS[i] for i in kept],
            [[row[i] for i in kept] for row in rows],
            right=("memory", "bandwidth", "bf16 peak", "here"),
        )
        screen.show(shown)
        screen.note(
            f"cpu is this host. There are backends for {', '.join(backend_names())}; other devices can be planned for, "
            "not compiled for. A device that is not here is emulated on the host when its slice runs."
        )
    else:
        screen.show(facts(_everything(chosen[0], counts[0]), title=chosen[0].title))
    screen.result({"devices": [{**to_dict(entry), "here": count} for entry, count in zip(chosen, counts, strict=True)]})


def _this_host(screen: Screen) -> None:
    """`cpu` is no chip of the catalogue: it is whatever this machine has."""
    from plait.cli.tables import facts
    from plait.cost_models.catalogue import cluster_for
    from plait.spec import Target, to_dict
    from plait.words import bytes_text, rate_text

    (device,) = cluster_for([Target("cpu")]).devices
    free = device.memory_bytes if device.free_bytes is None else device.free_bytes
    lines = [
        ("target", f"{device.backend}:{device.arch}"),
        ("memory", f"{bytes_text(device.memory_bytes)}, {bytes_text(free)} of it free"),
        ("bandwidth", rate_text(device.bandwidth_bytes_per_s, "B/s")),
        *((f"{dtype} peak", rate_text(peak, "FLOP/s")) for dtype, peak in device.peak_flops_per_s.items()),
        ("numbers", device.confidence),
        ("source", "; ".join(device.sources)),
    ]
    screen.show(facts(lines, title="this host"))
    screen.result({"devices": [to_dict(device)]})


def _count(entry: Entry, here: tuple[Found, ...]) -> int:
    from plait.cost_models.catalogue import devices
    from plait.present import matches

    return sum(matches(entry, found, devices()) for found in here)


def _row(entry: Entry, count: int) -> list[str]:
    return [
        entry.label,
        ", ".join(entry.names[1:]),
        entry.title,
        f"{entry.backend}:{entry.arch}",
        f"{entry.memory.capacity:g} {entry.memory.unit}",
        _bandwidth(entry),
        _peak(entry, "bfloat16"),
        "announced only" if entry.status == "announced" else entry.confidence,
        str(count) if count else "no",
    ]


def _bandwidth(entry: Entry) -> str:
    from plait.words import rate_text

    rate = entry.memory.bandwidth_gb_per_s
    return "-" if rate is None else rate_text(rate * 1e9, "B/s")


def _peak(entry: Entry, dtype: str) -> str:
    """The dense peak, per chip. A dtype without matrix units that runs in passes of another is not a peak."""
    from plait.words import rate_text

    peak = entry.peak_tflops.get(dtype)
    return "-" if peak is None else rate_text(peak * 1e12, "FLOP/s")


def _everything(entry: Entry, count: int) -> list[tuple[str, str]]:
    from plait.cost_models.entries import sources
    from plait.registry import backend_names

    backend = "there is one" if entry.backend in backend_names() else "none: it can be planned for, not compiled for"
    texts: dict[str, Any] = sources()
    peaks = ((dtype, _peak(entry, dtype)) for dtype in entry.peak_tflops)
    price = entry.price_usd_per_hour
    return [
        ("names", ", ".join(entry.names)),
        ("vendor", entry.vendor),
        ("target", f"{entry.backend}:{entry.arch}"),
        ("status", entry.status),
        ("backend", backend),
        ("here", str(count) if count else "no"),
        ("memory", f"{entry.memory.capacity:g} {entry.memory.unit} {entry.memory.kind}, {_bandwidth(entry)}"),
        *((f"{dtype} peak", text) for dtype, text in peaks),
        *((f"{dtype} emulated", f"{passes} passes of {base}") for dtype, (base, passes) in entry.emulated.items()),
        ("logical devices", f"{entry.logical.count}: {entry.logical.why}" if entry.logical else ""),
        ("peer link", f"{entry.peer.kind}, {entry.peer.total_gb_per_s:g} GB/s one way" if entry.peer else ""),
        ("host link", f"{entry.host.kind}, {entry.host.gb_per_s:g} GB/s one way" if entry.host else ""),
        ("power", f"{entry.tdp_w:g} W" if entry.tdp_w else ""),
        ("price", f"{price.low:g} to {price.high:g} $ an hour, {price.year}" if price else ""),
        ("numbers", entry.confidence),
        *((f"source {name}", texts.get(name, "")) for name in (*entry.sources, *(price.sources if price else ()))),
        ("note", entry.note or ""),
    ]
