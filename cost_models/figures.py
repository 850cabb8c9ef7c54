"""What a chip's figures must not be: the ways in which data sheets mislead, each as a rule that an entry can break.

A peak with 2:4 sparsity stands next to dense ones, a link is counted both ways, a chip of two devices is taken for one,
GeForce's rate with FP16 accumulate for that with FP32, a dtype that is only stored for one that is multiplied. All of
them are off by two or more, and none of them looks wrong.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator

from plait.cost_models.entries import Architecture, Entry, architectures
from plait.errors import UserError

#: Vendors round clocks and rates.
TOLERANCE = 0.03

#: One lane of PCIe, one way: gigatransfers per second times what the line code leaves of a byte.
PCIE_LANE_GB_PER_S = {3: 8 * 128 / 130 / 8, 4: 16 * 128 / 130 / 8, 5: 32 * 128 / 130 / 8, 6: 64 * 242 / 256 / 8}

#: A channel of DDR is 8 bytes wide.
_CHANNEL_BYTES = 8

_PCIE = re.compile(r"PCIe (\d)\.0 x(\d+)")
_DIMMS = re.compile(r"(?:DDR\d|MRDIMM)-(\d+) x(\d+)")

#: Links that a chip has, each to a neighbour of its own; a switch or a bridge gives one neighbour all there is.
_LINKS = {
    "pair": 1,
    "nvswitch": 1,
    "nvl72": 1,
    "quad": 3,
    "mesh of 4": 3,
    "full mesh of 8": 7,
    "2D torus": 4,
    "3D torus": 6,
}

#: Narrow dtypes, and how the formats that are multiplied in them are called.
_FORMATS = {
    "fp8": ("fp8_", "cfp8", "mxfp8"),
    "fp6": ("mxfp6",),
    "fp4": ("mxfp4", "nvfp4"),
    "int8": ("int8", "mxint8"),
    "int4": ("int4", "mxint4"),
}
_ONLY_HELD = ("emulated", "storage")

#: Dtypes that FP32 accumulate does not slow down.
_AT_FULL_RATE = frozenset({"int8", "int4", "fp4", "fp6"})


def faults(entry: Entry) -> tuple[str, ...]:
    """What is wrong with the figures of a chip; empty where no rule is broken."""
    known = architectures().get(entry.arch)
    rules = (_derived, _formats, _geforce, _links, _memory)
    found = [fault for rule in rules for fault in rule(entry)]
    return tuple(found if known is None else [*found, *_architecture(entry, known)])


def checked(entry: Entry) -> Entry:
    """`entry`, if no rule is broken.

    Raises:
        UserError: `catalogue-figures`.
    """
    if found := faults(entry):
        raise UserError(
            "catalogue-figures",
            f"the figures of {entry.name} cannot be right",
            why="; ".join(found),
            hint="dense peaks, one way of a link, bytes as the vendor means them: see cost_models/figures.py",
        )
    return entry


def _derived(entry: Entry) -> Iterator[str]:
    """Units, clock and flops per clock make the dense peak."""
    if entry.derive is None:
        return
    peak = entry.peak_tflops.get(entry.derive.of, math.nan)
    made = entry.derive.units * entry.derive.mhz * entry.derive.flop_per_clock / 1e6
    if not _near(peak, made):
        sparse = " (the sparse peak?)" if _near(peak, 2 * made) else ""
        yield f"a {entry.derive.of} peak of {peak:g}{sparse} where units, clock and flops per clock make {made:.4g}"


def _formats(entry: Entry) -> Iterator[str]:
    """What is emulated has no peak, and what is only stored is multiplied at the rate of bfloat16 at most."""
    wide = entry.peak_tflops.get("bfloat16", math.inf)
    for dtype, peak in entry.peak_tflops.items():
        if dtype in entry.emulated:
            yield f"a peak of {dtype}, which is emulated"
        if dtype in _FORMATS and peak > wide * (1 + TOLERANCE) and not _multiplies(entry, dtype):
            yield f"a {dtype} peak of {peak:g}, above bfloat16's, without a format that is multiplied"


def _multiplies(entry: Entry, dtype: str) -> bool:
    return any(
        text.startswith(_FORMATS[dtype]) and not any(word in text for word in _ONLY_HELD) for text in entry.formats
    )


def _geforce(entry: Entry) -> Iterator[str]:
    """GeForce cards accumulate in FP32 at half the rate that is printed large."""
    if not entry.title.startswith("GeForce"):
        return
    for dtype, full in (("float16", "fp16_acc16"), ("bfloat16", "fp16_acc16"), ("fp8", "fp8_acc16")):
        peak, printed = entry.peak_tflops.get(dtype), entry.peak_tflops.get(full)
        if peak is not None and (printed is None or not _near(peak, printed / 2)):
            yield f"a {dtype} peak of {peak:g} that is not half of {full}"


def _links(entry: Entry) -> Iterator[str]:
    """One way: PCIe by its generation and lanes; the links to neighbours make the total."""
    if entry.host is not None and (found := _PCIE.fullmatch(entry.host.kind)):
        most = PCIE_LANE_GB_PER_S[int(found[1])] * int(found[2])
        if not _near(entry.host.gb_per_s, most):
            yield f"{entry.host.gb_per_s:g} GB/s over {entry.host.kind}, which has {most:.3g} one way"
    if entry.peer is not None and entry.peer.gb_per_s is not None:
        total, one = entry.peer.total_gb_per_s, entry.peer.gb_per_s
        links = _LINKS.get(entry.peer.topology)
        if one > total or (links is not None and not _near(total, links * one)):
            yield f"peers of {one:g} GB/s each, in all {total:g}, in the topology {entry.peer.topology}"


def _memory(entry: Entry) -> Iterator[str]:
    """DIMMs say their rate."""
    if (found := _DIMMS.fullmatch(entry.memory.kind)) and entry.memory.bandwidth_gb_per_s is not None:
        most = int(found[1]) * int(found[2]) * _CHANNEL_BYTES / 1e3
        if not _near(entry.memory.bandwidth_gb_per_s, most):
            yield f"{entry.memory.bandwidth_gb_per_s:g} GB/s from {entry.memory.kind}, which has {most:g}"


def _architecture(entry: Entry, known: Architecture) -> Iterator[str]:
    """What its architecture says of every chip."""
    peaks, parts = entry.peak_tflops, entry.logical.count if entry.logical else 1
    wide = peaks.get("bfloat16", math.nan)
    full = peaks.get("fp16_acc16", wide)
    for dtype, rate in known.rates.items():
        base = full if dtype in _AT_FULL_RATE else wide
        if dtype in peaks and not _near(peaks[dtype], rate * base):
            yield f"a {dtype} peak of {peaks[dtype]:g} where {entry.arch} makes {rate * base:.4g} beside its bfloat16"
    if known.peer_gb_per_s and entry.peer and entry.peer.total_gb_per_s > known.peer_gb_per_s * (1 + TOLERANCE):
        yield f"{entry.peer.total_gb_per_s:g} GB/s to peers, where {entry.arch} has {known.peer_gb_per_s:g} one way"
    if known.logical not in (1, parts):
        yield f"one device, where {entry.arch} shows up as {known.logical}"
    if known.units and entry.derive and entry.derive.units > known.units * parts:
        yield f"{entry.derive.units} units in {parts} device, where {entry.arch} has {known.units} in one"


def _near(value: float, expected: float) -> bool:
    return abs(value - expected) <= TOLERANCE * abs(expected)
