"""The catalogue: figures, traps, names, targets, clusters."""

from __future__ import annotations

import statistics
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from plait.cost_models import catalogue, entries, host
from plait.cost_models.catalogue import cluster_for, devices, lookup, resolve
from plait.cost_models.cluster_file import load_cluster
from plait.cost_models.network import hop_s, link_between
from plait.errors import UsageError, UserError
from plait.spec import Target, parse_target, parse_targets

GB, GIB = 10**9, 2**30


def test_every_figure_has_a_source() -> None:
    known = entries.sources()
    for entry in devices():
        assert entry.sources, entry.name
        used = {*entry.sources, *(entry.price_usd_per_hour.sources if entry.price_usd_per_hour else ())}
        assert used <= set(known), entry.name
    assert {e.confidence for e in devices()} == {"read", "derived", "memory"}
    assert lookup("h100-nvl").confidence == "memory"


DERIVED = [entry.name for entry in devices() if entry.derive]


@pytest.mark.parametrize("name", DERIVED)
def test_peaks_follow_from_units_and_clock(name: str) -> None:
    derive = lookup(name).derive
    assert derive is not None
    tflops = derive.units * derive.mhz * 1e6 * derive.flop_per_clock / 1e12
    # vendors round clocks; MI350X is quoted 2309.6 where 2200 MHz make 2306.9
    assert lookup(name).peak_tflops[derive.of] == pytest.approx(tflops, rel=2e-3)


def test_enough_peaks_are_derived() -> None:
    assert len(DERIVED) >= 15


# What the vendors print on the front page with 2:4 sparsity: none of it may be a peak here.
SPARSE = {
    "l4": {"tf32": 120, "bfloat16": 242, "fp8": 485, "int8": 485},
    "l40s": {"bfloat16": 733, "fp8": 1466},
    "h100-sxm": {"tf32": 989, "bfloat16": 1979, "fp8": 3958},
    "h100-pcie": {"bfloat16": 1513, "fp8": 3026},
    "h100-nvl": {"bfloat16": 1671, "fp8": 3341},
    "h200-sxm": {"bfloat16": 1979, "fp8": 3958},
    "b200": {"bfloat16": 4500, "fp8": 9000, "fp4": 18000},
    "gb200": {"bfloat16": 5000, "fp8": 10000, "fp4": 20000},
    "b300": {"bfloat16": 4500, "fp8": 9000, "fp4": 18000},
    "gb300": {"bfloat16": 5000, "fp8": 10000, "fp4": 20000, "int8": 333},
    "mi300x": {"bfloat16": 2614.9, "fp8": 5229.8},
    "mi355x": {"bfloat16": 5033, "fp8": 10066},
    "trainium3": {"bfloat16": 2517},
    "wse3": {"float16": 125000},
}


@pytest.mark.parametrize("name", SPARSE)
def test_no_sparse_peak(name: str) -> None:
    for dtype, sparse in SPARSE[name].items():
        assert lookup(name).peak_tflops[dtype] < 0.8 * sparse, dtype


@pytest.mark.parametrize("entry", devices(), ids=lambda e: e.name)
def test_a_measured_matmul_stays_below_its_peak(entry: entries.Entry) -> None:
    for dtype, tflops in entry.measured_matmul_tflops.items():
        assert 0.4 < tflops / entry.peak_tflops[dtype] < 1.0


def test_traps() -> None:
    assert lookup("b300").peak_tflops["int8"] == 150  # cut by 30 against B200
    assert lookup("b200").peak_tflops["int8"] == 4500
    gaudi = lookup("gaudi3").peak_tflops
    assert gaudi["bfloat16"] == gaudi["fp8"] > 3 * gaudi["float16"]
    assert lookup("tpu-v6e").peak_tflops["fp8"] == lookup("tpu-v6e").peak_tflops["bfloat16"]
    assert lookup("rtx4090").peak_tflops["bfloat16"] == 165.2  # FP32 accumulate; 330 is FP16 accumulate
    assert lookup("l4").memory.bandwidth_gb_per_s == 300


def test_gb_and_gib() -> None:
    assert resolve(parse_target("h100"))[0].memory_bytes == 80 * GB
    assert resolve(parse_target("mi300x"))[0].memory_bytes == 192 * GIB
    assert resolve(parse_target("mi325x"))[0].memory_bytes == 256 * GB
    assert resolve(parse_target("v5e"))[0].memory_bytes == 16 * GIB


def test_a_chip_of_two_is_two_devices() -> None:
    found = resolve(parse_target("mi250x"))
    assert [d.id for d in found] == ["mi250x.0", "mi250x.1"]
    for d in found:
        assert d.memory_bytes == 64 * GIB
        assert d.peak_flops_per_s["bfloat16"] == pytest.approx(191.5e12)
        assert d.bandwidth_bytes_per_s == pytest.approx(1638.5 * GB)
    ironwood = resolve(parse_target("2xtpu-v7x"))
    assert len(ironwood) == 4
    assert ironwood[0].memory_bytes == int(94.75 * GIB)


NAMES = {
    "h100": "h100-sxm",
    "H100": "h100-sxm",
    "a100": "a100-80-sxm",
    "mi300": "mi300x",
    "mi300a": "mi300a",
    "mi355": "mi355x",
    "v5e": "tpu-v5e",
    "tpu_v5e": "tpu-v5e",
    "sm_90": "h100-sxm",
    "sm_90a": "h100-sxm",
    "gfx942": "mi300x",
    "gfx90a": "mi250x",
    "trn2": "trainium2",
}


@pytest.mark.parametrize("name", NAMES)
def test_names(name: str) -> None:
    assert lookup(name).name == NAMES[name]


def test_every_name_means_one_chip() -> None:
    for entry in devices():
        for name in entry.names:
            assert lookup(name) is entry


@pytest.mark.parametrize(
    ("text", "code", "says"),
    [
        ("h1000", "target-unknown", "'h100'"),
        ("mi30x", "target-unknown", "mi300x"),
        ("cpuu", "target-unknown", "'cpu'"),
        ("rocm:h100", "target-backend", "cuda:h100"),
        ("cdua:h100", "target-backend", "'cuda'"),
        ("xla:cpu", "target-backend", "cpu"),
        ("corsair", "device-announced", "announced"),
        ("sohu", "device-announced", "no specification"),
    ],
)
def test_refused_targets(text: str, code: str, says: str) -> None:
    with pytest.raises(UserError, match=says) as caught:
        resolve(parse_target(text))
    assert caught.value.code == code


def test_a_chip_without_numbers_is_refused() -> None:
    sohu = replace(lookup("sohu"), status="ga")
    with pytest.raises(UserError, match="no memory bandwidth and no peaks") as caught:
        catalogue.device_of(sohu)
    assert caught.value.code == "device-numbers"


def test_backends_and_null() -> None:
    kinds = {t: resolve(parse_target(t))[0].backend for t in ("h100", "mi300", "v5e", "cpu", "null:h100", "gaudi3")}
    assert kinds == {"h100": "cuda", "mi300": "rocm", "v5e": "xla", "cpu": "cpu", "null:h100": "null", "gaudi3": "hpu"}
    real, null = resolve(parse_target("h100"))[0], resolve(parse_target("null:h100"))[0]
    assert (null.memory_bytes, null.arch, null.name) == (real.memory_bytes, real.arch, real.name)
    assert resolve(Target("h100", backend="mine"), backends=["mine"])[0].backend == "mine"


def test_achieved_is_measured_or_the_stated_default() -> None:
    h100, v5e = resolve(parse_target("h100"))[0], resolve(parse_target("v5e"))[0]
    assert h100.achieved["bfloat16"] == pytest.approx(794.5 / 989.4)
    assert h100.achieved["float16"] == h100.achieved["bfloat16"]
    default = entries.defaults().achieved
    assert h100.achieved["float32"] == default == v5e.achieved["bfloat16"]
    assert "achieved: bfloat16, fp8 measured, the rest assumed" in h100.sources
    fractions = [
        e.measured_matmul_tflops["bfloat16"] / e.peak_tflops["bfloat16"] for e in devices() if e.measured_matmul_tflops
    ]
    assert abs(statistics.median(fractions) - default) < 0.1


def test_nominal_peaks_can_invert_a_plan() -> None:
    h100, mi300x = resolve(parse_target("h100"))[0], resolve(parse_target("mi300x"))[0]
    assert mi300x.peak_flops_per_s["bfloat16"] > h100.peak_flops_per_s["bfloat16"]
    reached = [d.peak_flops_per_s["bfloat16"] * d.achieved["bfloat16"] for d in (h100, mi300x)]
    assert reached[0] > reached[1]


def test_tpu_float32_is_six_passes() -> None:
    v5e = resolve(parse_target("v5e"))[0]
    assert v5e.peak_flops_per_s["float32"] == pytest.approx(v5e.peak_flops_per_s["bfloat16"] / 6)


def test_hosts_and_ids() -> None:
    found = cluster_for(parse_targets("2xh100,h100@rack,mi300@rack,cpu")).devices
    assert [d.id for d in found] == ["h100.0", "h100.1", "h100.2", "mi300x.0", "cpu.0"]
    assert found[0].host == found[1].host != found[2].host
    assert found[2].host == found[3].host == "rack"
    assert found[4].host == "localhost"


def test_links() -> None:
    c = cluster_for(parse_targets("2xh100@a,mi300@a,v5e"))
    h0, h1, mi, v5e = c.devices
    assert link_between(c, h0, h1).bytes_per_s == 450 * GB
    staged = link_between(c, h0, mi)
    assert staged.kind == "host-staged"
    # two copies over the slowest chip's link to its host (v5e: PCIe 3.0), at the read fraction
    assert staged.bytes_per_s == pytest.approx(15.8 * GB * 0.86 / 2)
    assert link_between(c, h0, v5e).kind == "ethernet-100g"
    assert "assumed" in link_between(c, h0, v5e).source
    assert hop_s(staged, 6794) == pytest.approx(2e-5 + 6794 / staged.bytes_per_s)


def test_this_host(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host, "core_count", lambda: 4)
    monkeypatch.setattr(host, "memory_bytes", lambda: (16 * GIB, 12 * GIB))
    one = resolve(parse_target("cpu"))[0]
    assert (one.memory_bytes, one.free_bytes, one.confidence) == (16 * GIB, 12 * GIB, "assumed")
    assert one.peak_flops_per_s["float32"] == pytest.approx(4 * 50e9)
    # several of it share what is there: nothing is counted twice
    parts = cluster_for(parse_targets("cpu,3xcpu")).devices
    assert [d.id for d in parts] == ["cpu.0", "cpu.1", "cpu.2", "cpu.3"]
    assert sum(d.free_bytes or 0 for d in parts) == 12 * GIB
    assert {d.host for d in parts} == {"localhost"}
    monkeypatch.setattr(host, "memory_bytes", lambda: (16 * GIB, 0))
    with pytest.raises(UserError, match="no free memory"):
        resolve(parse_target("cpu"))


def test_host_memory_is_real() -> None:
    total, available = host.memory_bytes()
    assert 2**28 < available <= total
    assert host.core_count() >= 1


CLUSTER = """
devices:
- target: 2xh100@rack1
  free_bytes: 60 GB
- name: npu
  backend: null
  arch: npu1
  host: rack2
  memory_bytes: 32 GiB
  bandwidth_bytes_per_s: 500 GB
  peak_flops_per_s: {bfloat16: 200.0e12}
links:
- {a: rack1, b: rack2, network: ethernet-25g}
- {a: h100.0, b: h100.1, bytes_per_s: 50 GB, latency_s: 1.0e-6, one_way: true}
default_network: ethernet-10g
"""


def _write(tmp_path: Path, text: str) -> Path:
    file = tmp_path / "cluster.yaml"
    file.write_text(text)
    return file


def test_cluster_file(tmp_path: Path) -> None:
    c = load_cluster(_write(tmp_path, CLUSTER))
    h0, h1, npu = c.devices
    assert (h0.free_bytes, h0.memory_bytes, h0.confidence) == (60 * GB, 80 * GB, "user")
    assert h0.reserve_bytes == GB + 60 * GB * 3 // 100
    assert npu.backend == "null"
    assert (npu.id, npu.memory_bytes, npu.peak_flops_per_s) == ("npu.0", 32 * GIB, {"bfloat16": 200e12})
    assert link_between(c, npu, h0).kind == link_between(c, h1, npu).kind == "ethernet-25g"
    assert link_between(c, h0, h1).bytes_per_s == 50 * GB
    assert link_between(c, h1, h0).kind == "peer"
    assert c.default_link is not None
    assert c.default_link.kind == "ethernet-10g"


def test_the_example_of_a_cluster_file() -> None:
    c = load_cluster(Path(__file__).parents[2] / "examples/cluster.yaml")
    assert [d.id for d in c.devices] == ["h100.0", "h100.1", "mi300x.0", "npu.0"]
    assert c.devices[0].free_bytes == 60 * GB and c.devices[3].backend == "null"
    assert link_between(c, c.devices[0], c.devices[2]).kind == "ethernet-100g"
    assert link_between(c, c.devices[2], c.devices[3]).bytes_per_s == 25 * GB
    assert link_between(c, c.devices[3], c.devices[2]).kind != "user"


BROKEN = {
    "no peak (exo 110)": (
        "  peak_flops_per_s: {bfloat16: 200.0e12}\n",
        "",
        "npu lacks peak_flops_per_s",
        "device-numbers",
    ),
    "zero peak": ("200.0e12", "0", "peak_flops_per_s is missing or not positive", "device-numbers"),
    "unknown field": ("free_bytes: 60 GB", "fre_bytes: 60 GB", "did you mean 'free_bytes'", "spec-field"),
    "no memory": ("free_bytes: 60 GB", "free_bytes: 0", "h100.0 has no free memory", "device-memory"),
    "less than the reserve": ("free_bytes: 60 GB", "free_bytes: 1 GB", "no memory left for a slice", "device-memory"),
    "more free than there is": ("free_bytes: 60 GB", "free_bytes: 90 GB", "free of 80000000000", "device-memory"),
    "not a size": ("free_bytes: 60 GB", "free_bytes: lots", "cannot read the size 'lots'", "spec-field"),
    "unknown host": ("a: rack1", "a: rak1", "neither a host nor a device", "link-end"),
    "unknown network": ("ethernet-25g", "ethernet-26g", "did you mean 'ethernet-25g'", "link-unknown"),
    "unknown target": ("2xh100@rack1", "2xh10@rack1", "did you mean 'h100'", "target-unknown"),
    "a name that is a path": ("- name: npu", "- name: ../npu", "'../npu' cannot be the name", "device-name"),
    "a name with a space": ("- name: npu", "- name: my npu", "'my npu' cannot be the name", "device-name"),
    "both": ("- name: npu", "- name: npu\n  target: h100", "either a target", "spec-field"),
    "schema": ("default_network", "schema: 7\ndefault_network", "schema 7", "spec-schema"),
    "not yaml": ("devices:", "devices: [", "not valid YAML", "spec-yaml"),
}


@pytest.mark.parametrize("case", BROKEN)
def test_broken_cluster_files(case: str, tmp_path: Path) -> None:
    old, new, says, code = BROKEN[case]
    assert old in CLUSTER
    with pytest.raises(UserError, match=says) as caught:
        load_cluster(_write(tmp_path, CLUSTER.replace(old, new, 1)))
    assert caught.value.code == code


def test_missing_cluster_file(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="cannot read"):
        load_cluster(tmp_path / "nowhere.yaml")


def test_usage_errors_exit_64() -> None:
    with pytest.raises(UsageError) as caught:
        lookup("h1000")
    assert caught.value.exit_code == 64


def test_the_catalogue_imports_nothing_heavy() -> None:
    heavy = ("torch", "jax", "triton", "numpy", "xdsl", "transformers")
    code = f"import plait.cost_models as c, sys; c.lookup('h100'); print([m for m in {heavy} if m in sys.modules])"
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert out.stdout.strip() == "[]"
