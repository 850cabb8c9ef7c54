"""`plait devices`, and how accelerators of this host are found and named."""

from __future__ import annotations

import json

import pytest

from plait.cost_models.catalogue import devices, lookup
from plait.present import Found, accelerators, matches
from tests.host.command_line import plait


def test_the_table_has_a_row_per_chip_and_its_columns():
    result = plait("devices", env={"COLUMNS": "160"})
    assert result.exit_code == 0
    lines = result.stdout.splitlines()
    header = next(line for line in lines if line.startswith(" name"))
    columns = ("name", "also called", "chip", "target", "memory", "bandwidth", "bf16 peak", "numbers", "here")
    at = [header.index(name) for name in columns]
    assert at == sorted(at)
    firsts = [line.split()[0] for line in lines if line.strip()]
    assert [name for name in firsts if name in {entry.label for entry in devices()}] == [e.label for e in devices()]


def test_a_row_says_what_the_catalogue_says():
    lines = plait("devices", env={"COLUMNS": "200"}).stdout.splitlines()
    (row,) = (line for line in lines if line.split()[:1] == ["h100"])
    assert "cuda:sm_90a" in row and "80 GB" in row and "3.35 TB/s" in row and "989 TFLOP/s" in row


def test_names_and_targets_are_never_broken_over_lines():
    text = plait("devices", env={"COLUMNS": "100"}).stdout
    assert all(entry.label in text and f"{entry.backend}:{entry.arch}" in text for entry in devices())


def test_one_device_by_any_of_its_names():
    result = plait("devices", "MI300")
    assert result.exit_code == 0
    assert result.stdout.startswith(lookup("mi300x").title)
    assert "rocm:gfx942" in result.stdout


def test_json_is_the_catalogue():
    data = json.loads(plait("devices", "--json").stdout)
    assert [entry["name"] for entry in data["devices"]] == [entry.name for entry in devices()]
    (one,) = json.loads(plait("devices", "h100", "--json").stdout)["devices"]
    assert one["peak_tflops"]["bfloat16"] == lookup("h100").peak_tflops["bfloat16"]
    assert isinstance(one["here"], int)


def test_an_unknown_device_suggests_near_ones():
    result = plait("devices", "h10")
    assert result.exit_code == 64 and "did you mean 'h100'" in result.stderr


@pytest.mark.parametrize(
    ("model", "label"),
    [
        ("NVIDIA H100 80GB HBM3", "h100"),
        ("NVIDIA A100-SXM4-80GB", "a100"),
        ("NVIDIA A10", "a10"),
        ("NVIDIA A10G", "a10g"),
        ("NVIDIA L40S", "l40s"),
        ("NVIDIA L4", "l4"),
        ("NVIDIA H200", "h200"),
        ("NVIDIA GeForce RTX 4090", "rtx4090"),
        ("Tesla T4", None),
    ],
)
def test_nvidia_names(tmp_path, model, label):
    file = tmp_path / "proc/driver/nvidia/gpus/0000:01:00.0/information"
    file.parent.mkdir(parents=True)
    file.write_text(f"Model: \t\t {model}\nIRQ:   \t\t 42\n")
    (found,) = accelerators(tmp_path)
    named = [entry.label for entry in devices() if matches(entry, found, devices())]
    assert named == ([] if label is None else [label])


@pytest.mark.parametrize(
    ("version", "arch"), [(90402, "gfx942"), (90010, "gfx90a"), (90500, "gfx950"), (110000, "gfx1100")]
)
def test_amd_architectures(tmp_path, version, arch):
    for node, number in enumerate((0, version)):
        file = tmp_path / f"sys/class/kfd/kfd/topology/nodes/{node}/properties"
        file.parent.mkdir(parents=True)
        file.write_text(f"cpu_cores_count 8\ngfx_target_version {number}\n")
    (found,) = accelerators(tmp_path)
    assert (found.backend, found.arch) == ("rocm", arch)
    assert all(entry.arch == arch for entry in devices() if matches(entry, found, devices()))


def test_a_tpu_but_not_a_network_card_of_the_same_vendor(tmp_path):
    for name, kind in (("0000:00:04.0", "0x120000"), ("0000:00:05.0", "0x020000")):
        folder = tmp_path / "sys/bus/pci/devices" / name
        folder.mkdir(parents=True)
        (folder / "vendor").write_text("0x1ae0\n")
        (folder / "class").write_text(kind + "\n")
        (folder / "device").write_text("0x0063\n")
    assert accelerators(tmp_path) == (Found("xla", "TPU (0x0063)"),)


def test_nothing_there(tmp_path):
    assert accelerators(tmp_path) == ()


@pytest.mark.parametrize("columns", ["40", "80", "119", "120"])
def test_every_device_is_one_row_of_whole_numbers_however_narrow(columns):
    lines = plait("devices", env={"COLUMNS": columns}).stdout.splitlines()
    for entry in devices():
        (row,) = (line for line in lines if line.split()[:1] == [entry.label])
        assert f"{entry.memory.capacity:g} {entry.memory.unit}  " in row and f"{entry.backend}:{entry.arch}" in row
    if int(columns) < 120:
        assert len([line for line in lines if line.strip()]) == len(devices()) + 2


@pytest.mark.parametrize("name", ["cpu", "CPU"])
def test_this_host_is_a_device_too(name):
    result = plait("devices", name)
    assert result.exit_code == 0 and "cpu:cpu" in result.stdout and "free" in result.stdout
    (device,) = json.loads(plait("devices", name, "--json").stdout)["devices"]
    assert device["name"] == "cpu" and device["memory_bytes"] >= device["free_bytes"] > 0
