"""Nominal figures that lie: what the catalogue holds for each known trap; an entry that falls in is refused."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from plait.cost_models.catalogue import device_of, devices, lookup
from plait.cost_models.entries import Derive, Entry, HostLink, Logical, Memory, architectures, sources
from plait.cost_models.figures import checked, faults
from plait.errors import UserError

GB, GIB, MIB = 10**9, 2**30, 2**20

# Bits of the memory bus, and gigabits per second of a pin (data sheets of the memory, not of the bandwidth).
BUS: dict[str, tuple[int, float]] = {
    "a100-40-sxm": (5120, 2.43),
    "a100-80-sxm": (5120, 3.186),
    "a10": (384, 12.5),
    "l4": (192, 12.5),
    "l40s": (384, 18),
    "h100-sxm": (5120, 5.234),
    "h100-pcie": (5120, 3.2),
    "h200-sxm": (6144, 6.25),
    "b200": (8192, 8),
    "gb300": (8192, 8),
    "rtx3090": (384, 19.5),
    "rtx4090": (384, 21),
    "rtx5090": (512, 28),
    "rtxpro6000": (512, 28),
    "mi210": (4096, 3.2),
    "mi250x": (8192, 3.2),
    "mi300x": (8192, 5.2),
    "mi325x": (8192, 6),
    "mi355x": (8192, 8),
    "rx7900xtx": (384, 20),
    "w7900": (384, 18),
    "tpu-v4": (4096, 2.4),
    "tpu-v5e": (2048, 3.2),
    "tpu-v5p": (6144, 3.6),
    "tpu-v6e": (4096, 3.2),
    "tpu-v7x": (8192, 7.2),
    "gaudi2": (6144, 3.2),
    "gaudi3": (8192, 3.6),
    "max1550": (8192, 3.2),
    "arc-b60": (192, 19),
    "m2-ultra": (1024, 6.4),
    "m3-ultra": (1024, 6.4),
}


@pytest.mark.parametrize("name", BUS)
def test_bandwidth_is_bus_times_rate(name: str) -> None:
    """GB, not GiB, not both ways: 7 % and a factor of two would show."""
    bits, rate = BUS[name]
    assert lookup(name).memory.bandwidth_gb_per_s == pytest.approx(bits * rate / 8, rel=0.03)


# Compute units, MHz, flops per unit and clock with FP32 accumulate, of the white papers. The other chips have theirs in
# the catalogue (`derive`).
PEAKS: dict[str, tuple[str, int, float, int]] = {
    "a100-40-pcie": ("bfloat16", 108, 1410, 2048),
    "a10g": ("bfloat16", 80, 1710, 512),
    "l40s": ("bfloat16", 142, 2490, 1024),
    "h100-pcie": ("bfloat16", 114, 1620, 4096),
    "h100-nvl": ("bfloat16", 132, 1545, 4096),
    "h200-nvl": ("bfloat16", 132, 1545, 4096),
    "rtx3090": ("bfloat16", 82, 1695, 512),
    "m1-ultra": ("float32", 64, 1296, 256),
    "m2-ultra": ("float32", 76, 1398, 256),
    "m3-ultra": ("float32", 80, 1380, 256),
}


@pytest.mark.parametrize("name", PEAKS)
def test_peaks_that_the_catalogue_does_not_derive(name: str) -> None:
    dtype, units, mhz, flop = PEAKS[name]
    assert lookup(name).derive is None
    assert lookup(name).peak_tflops[dtype] == pytest.approx(units * mhz * flop / 1e6, rel=0.02)


# What the tools of the vendors report of a chip's memory (nvidia-smi, JAX's out-of-memory errors), in bytes.
REPORTED = {
    "h100-sxm": 81559 * MIB,
    "h200-sxm": 143771 * MIB,
    "b200": 183359 * MIB,
    "tpu-v5e": 15.75 * GIB,
    "tpu-v6e": 31.25 * GIB,
    "tpu-v7x": 94.75 * GIB,
}


@pytest.mark.parametrize("name", REPORTED)
def test_no_more_memory_is_planned_than_is_there(name: str) -> None:
    device = device_of(lookup(name))
    usable = device.memory_bytes - device.reserve_bytes
    assert 0.85 * REPORTED[name] < usable < REPORTED[name]


def test_units_of_memory_are_the_vendors() -> None:
    gib = {entry.name for entry in devices() if entry.memory.unit == "GiB"}
    assert {"mi300x", "mi250x", "tpu-v5e", "tpu-v5p", "tpu-v7x", "trainium2"} <= gib
    assert not gib & {"h100-sxm", "h200-sxm", "b200", "mi325x", "mi355x", "rtx4090", "gaudi3"}
    assert device_of(lookup("mi300x")).memory_bytes - 192 * GB > 14 * GB  # 7 %


def test_int8_of_b300_is_cut() -> None:
    assert lookup("b300").peak_tflops["int8"] == pytest.approx(lookup("b200").peak_tflops["int8"] / 30)
    assert lookup("gb300").peak_tflops["int8"] == pytest.approx(24e3 / 2 / 72, rel=0.02)  # POPS of a rack, sparse
    for name in ("b300", "gb300"):
        peaks = lookup(name).peak_tflops
        assert peaks["int8"] < peaks["tf32"] < peaks["fp8"]


@pytest.mark.parametrize(("name", "units"), [("mi250x", 220), ("max1550", 128), ("tpu-v7x", None)])
def test_chips_of_two_devices_are_halves(name: str, units: int | None) -> None:
    entry, device = lookup(name), device_of(lookup(name))
    assert entry.logical is not None and entry.logical.count == 2
    assert entry.derive is None or entry.derive.units == units
    assert device.peak_flops_per_s["bfloat16"] == pytest.approx(entry.peak_tflops["bfloat16"] * 1e12 / 2)
    assert device.bandwidth_bytes_per_s == pytest.approx(entry.memory.bandwidth_gb_per_s * GB / 2)
    assert device.memory_bytes <= entry.memory.capacity * {"GB": GB, "GiB": GIB}[entry.memory.unit] / 2


def test_half_of_an_mi250x_is_about_an_mi210() -> None:
    half, whole = device_of(lookup("mi250x")), device_of(lookup("mi210"))
    assert half.memory_bytes == whole.memory_bytes
    assert half.peak_flops_per_s["bfloat16"] == pytest.approx(whole.peak_flops_per_s["bfloat16"] * 110 / 104, rel=0.01)


@pytest.mark.parametrize("name", ["rtx3090", "rtx4090", "rtx5090"])
def test_geforce_accumulates_in_fp32_at_half_rate(name: str) -> None:
    peaks = lookup(name).peak_tflops
    assert peaks["bfloat16"] == pytest.approx(2 * peaks["float32"], rel=0.01)  # of a professional card: 4 times
    assert peaks["fp16_acc16"] == pytest.approx(2 * peaks["float16"], rel=0.01)
    professional = {"rtx3090": "a10", "rtx4090": "l40s", "rtx5090": "rtxpro6000"}[name]
    twin = lookup(professional).peak_tflops
    assert twin["bfloat16"] == pytest.approx(4 * twin["float32"], rel=0.02)


@pytest.mark.parametrize("name", ["tpu-v5p", "tpu-v6e", "gaudi3", "inferentia2", "trainium1"])
def test_fp8_without_its_own_rate_is_no_faster(name: str) -> None:
    peaks = lookup(name).peak_tflops
    assert peaks["fp8"] == peaks["bfloat16"]


def test_float16_of_gaudi3_is_slower_than_bfloat16() -> None:
    peaks = lookup("gaudi3").peak_tflops
    assert peaks["bfloat16"] / peaks["float16"] == pytest.approx(3.65, rel=0.01)


def test_fp8_that_is_only_stored_is_no_peak() -> None:
    assert "fp8" not in lookup("tpu-v5e").peak_tflops
    for entry in devices():
        if "fp8" in entry.peak_tflops and not any(f.startswith(("fp8_", "cfp8", "mxfp8")) for f in entry.formats):
            assert entry.peak_tflops["fp8"] <= entry.peak_tflops["bfloat16"], entry.name


# Links as counted by their makers: number, gigabits or gigabytes per second and way of one.
ONE_WAY = {
    "a100-80-sxm": 12 * 25,
    "h100-sxm": 18 * 25,
    "b200": 18 * 50,
    "mi300x": 7 * 64,
    "mi355x": 7 * 76.8,
    "gaudi2": 21 * 100 / 8,
    "gaudi3": 21 * 200 / 8,
    "tpu-v5e": 400 / 2,  # the docs count both ways
    "trainium2": 1280 / 2,
    "trainium3": 2560 / 2,
}


@pytest.mark.parametrize("name", ONE_WAY)
def test_links_count_one_way(name: str) -> None:
    peer = lookup(name).peer
    assert peer is not None
    assert peer.total_gb_per_s == pytest.approx(ONE_WAY[name], rel=0.01)


def test_every_host_link_is_one_way() -> None:
    for entry in devices():
        if entry.host is not None and entry.host.kind.startswith("PCIe"):
            assert entry.host.gb_per_s <= 126, entry.name
    assert lookup("h100").host == HostLink("PCIe 5.0 x16", 63)


def test_every_architecture_has_a_source_and_chips() -> None:
    used = {entry.arch for entry in devices()}
    assert set(architectures()) <= used
    assert {known.source for known in architectures().values()} <= set(sources())
    # chips whose peaks no rule of their architecture holds
    assert used - set(architectures()) == {"apple7", "apple8", "apple9", "tsp", "wse", "rdu", "dimc", "sohu"}


@pytest.mark.parametrize("entry", devices(), ids=lambda entry: entry.name)
def test_no_chip_breaks_a_rule(entry: Entry) -> None:
    assert faults(entry) == ()


def peak(**changed: float) -> Callable[[Entry], Entry]:
    return lambda entry: replace(entry, peak_tflops=entry.peak_tflops | changed)


def field(**changed: Any) -> Callable[[Entry], Entry]:
    return lambda entry: replace(entry, **changed)


def both_ways(entry: Entry) -> Entry:
    assert entry.peer is not None and entry.peer.gb_per_s is not None
    twice = replace(entry.peer, total_gb_per_s=2 * entry.peer.total_gb_per_s, gb_per_s=2 * entry.peer.gb_per_s)
    return replace(entry, peer=twice)


def one_both_ways(entry: Entry) -> Entry:
    assert entry.peer is not None and entry.peer.gb_per_s is not None
    return replace(entry, peer=replace(entry.peer, gb_per_s=2 * entry.peer.gb_per_s))


TRAPS: dict[str, tuple[str, Callable[[Entry], Entry], str]] = {
    "sparse, all of them": (
        "h100",
        peak(tf32=989, bfloat16=1979, float16=1979, fp8=3958, int8=3958),
        r"bfloat16 peak of 1979 \(the sparse peak\?\)",
    ),
    "sparse, one row of the table": ("b200", peak(fp4=18000), "fp4 peak of 18000 where sm_100a makes 9000"),
    "sparse beside dense": ("h100-pcie", peak(fp8=3026), "fp8 peak of 3026 where sm_90a makes 1512"),
    "sparse on AMD": ("mi300x", peak(fp8=5229.8), "fp8 peak of 5229.8 where gfx942 makes 2615"),
    "int8 of B200 on B300": ("b300", peak(int8=4500), "int8 peak of 4500 where sm_103a makes 150"),
    "two devices as one": ("mi250x", field(logical=None), "220 units in 1 device, where gfx90a has 110"),
    "two chiplets as one": ("tpu-v7x", field(logical=None), "one device, where tpu-v7x shows up as 2"),
    "three of two": ("tpu-v7x", field(logical=Logical(3, "?")), "where tpu-v7x shows up as 2"),
    "geforce, the printed rate": ("rtx4090", peak(bfloat16=330.3, float16=330.3), "not half of fp16_acc16"),
    "geforce without it": (
        "rtx3090",
        lambda e: replace(e, peak_tflops={"float32": 35.6, "float16": 142.0}),
        "float16 peak of 142 that is not half of fp16_acc16",
    ),
    "geforce fp8": ("rtx5090", peak(fp8=838), "fp8 peak of 838 that is not half of fp8_acc16"),
    "fp8 twice bfloat16 on v6e": ("tpu-v6e", peak(fp8=1836), "above bfloat16's, without a format that is multiplied"),
    "fp8 twice bfloat16 on v5p": ("tpu-v5p", peak(fp8=918), "where tpu-v5p makes 459"),
    "fp8 twice bfloat16 on gaudi3": ("gaudi3", peak(fp8=3354), "where gaudi3 makes 1677"),
    "fp8 on what has none": ("mi210", peak(fp8=362), "fp8 peak of 362, above bfloat16's"),
    "int8 that is emulated": ("m3-ultra", peak(bfloat16=28.4, int8=56.8), "int8 peak of 56.8, above bfloat16's"),
    "a peak of what is emulated": ("tpu-v5e", peak(float32=197), "a peak of float32, which is emulated"),
    "all links both ways": ("h100", both_ways, "900 GB/s to peers, where sm_90a has 450 one way"),
    "ICI both ways": ("tpu-v5e", both_ways, "400 GB/s to peers, where tpu-v5e has 200 one way"),
    "one link both ways": ("mi300x", one_both_ways, "peers of 128 GB/s each, in all 448"),
    "more to one than to all": ("groq", field(peer=replace(lookup("groq").peer, gb_per_s=330)), "in all 165"),
    "PCIe both ways": ("h100", field(host=HostLink("PCIe 5.0 x16", 126)), "126 GB/s over PCIe 5.0 x16, which has 63"),
    "PCIe, half of the lanes": ("arc-b60", field(host=HostLink("PCIe 5.0 x8", 63)), "which has 31.5 one way"),
    "a clock of another card": ("a10", field(derive=Derive("bfloat16", 72, 2520, 1024)), "make 185.8"),
    "DIMMs": ("grace", field(memory=Memory(480, "GB", "DDR5-4800 x12", 921.6)), "which has 460.8"),
}


@pytest.mark.parametrize("trap", TRAPS)
def test_an_entry_that_falls_into_a_trap_is_refused(trap: str) -> None:
    name, change, says = TRAPS[trap]
    with pytest.raises(UserError, match=says) as caught:
        checked(change(lookup(name)))
    assert caught.value.code == "catalogue-figures"
    assert lookup(name).name in caught.value.what
