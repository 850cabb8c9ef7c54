"""`plait explain --op`: times by hand, what would change them, where the numbers come from, refusals."""

from __future__ import annotations

import json
import shlex
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from plait.cli import explain as cli
from plait.cost_models.catalogue import cluster_for, devices
from plait.cost_models.explain import chosen, explain_hop, explain_op, per_token_at_twice, placed_ops
from plait.cost_models.profile import ModelProfile
from plait.cost_models.profiles import Hop, Overheads, Profile, Times, machine
from plait.cost_models.roofline import rates, unit_s
from plait.cost_models.speeds import quantities
from plait.ir.facts import Step
from plait.spec import parse_targets, to_json
from tests.host.command_line import config_file, plait
from tests.planning import cluster, device, llama, toy

DECODE, PREFILL = Step.decode(8, 1024), Step((1024,) * 8, (1024,) * 8, 8)


@pytest.fixture(autouse=True)
def _no_profiles(tmp_path, monkeypatch) -> None:
    """What somebody measured on this machine is not in these tests."""
    monkeypatch.setenv("PLAIT_CACHE", str(tmp_path / "cache"))


@pytest.fixture
def model(tmp_path):
    return config_file(tmp_path / "tiny")


def on(target: str) -> Any:
    return cluster_for(parse_targets(target)).devices[0]


def larger() -> ModelProfile:
    return llama(hidden=1024, heads=8, kv_heads=2, head_dim=128, ffn=4096, vocabulary=32000, dtype="bfloat16")


def test_a_memory_bound_op_by_hand() -> None:
    """A gigabyte at a terabyte a second is a millisecond; a tenth more bandwidth makes it 1 / 1.1 of that."""
    profile = toy([10**9])
    (placed,) = (op for op in placed_ops(profile, DECODE) if op.op.cost(DECODE).weight_bytes == 1e9)
    told = explain_op(placed, DECODE, device("x", 10**12), "float32")
    assert (told.time.seconds, told.time.bound, told.time.bytes) == (pytest.approx(1e-3), "traffic", 1e9)
    by = {change.what: change for change in told.changes}
    assert by["10 % more memory bandwidth"].seconds == pytest.approx(1e-3 / 1.1)
    assert by["10 % fewer weight bytes"].change == pytest.approx(-0.1)
    assert by["10 % more peak of float32"].change == pytest.approx(0, abs=1e-6)
    assert told.changes[0].what == "10 % fewer weight bytes"
    assert per_token_at_twice(placed, DECODE, device("x", 10**12), "float32").change == pytest.approx(-0.5)


def test_a_compute_bound_op_by_hand() -> None:
    """A gigabyte with 1,000 flops for each byte and token, 8 tokens: 8e12 flops at 1e14 a second."""
    profile = toy([10**9], flops_per_byte=1000)
    placed = max(placed_ops(profile, DECODE), key=lambda op: op.op.cost(DECODE).flops)
    told = explain_op(placed, DECODE, device("x", 10**12), "float32")
    assert (told.time.seconds, told.time.bound, told.time.flops) == (pytest.approx(0.08), "arithmetic", 8e12)
    assert told.changes[0].what == "10 % more peak of float32"
    assert told.changes[0].seconds == pytest.approx(0.08 / 1.1)
    assert per_token_at_twice(placed, DECODE, device("x", 10**12), "float32").change == pytest.approx(0)


@pytest.mark.parametrize("target", ["h100", "mi300", "v6e", "cpu", "gaudi3"])
@pytest.mark.parametrize("step", [DECODE, PREFILL], ids=["decode", "prefill"])
def test_all_ops_together_are_the_model(target: str, step: Step) -> None:
    """What the planner counts with, by another way."""
    profile, chip = larger(), on(target)
    at = rates(chip, profile.dtype)
    whole = sum(unit_s(unit.facts, [step], at) for unit in profile.units)
    placed = placed_ops(profile, step)
    parts = sum(op.count * explain_op(op, step, chip, profile.dtype).time.seconds for op in placed)
    assert parts == pytest.approx(whole)


@pytest.mark.parametrize("target", ["h100", "b200", "mi300", "v6e"])
@pytest.mark.parametrize("step", [DECODE, PREFILL], ids=["decode", "prefill"])
def test_a_tenth_of_everything_is_a_tenth(target: str, step: Step) -> None:
    """Time is homogeneous in peak, bandwidth and launches: their changes add up to about a tenth."""
    profile, chip = larger(), on(target)
    for placed in placed_ops(profile, step):
        told = explain_op(placed, step, chip, profile.dtype)
        parts = [c.change for c in told.changes if any(w in c.what for w in ("peak", "bandwidth", "launches"))]
        assert len(parts) == 3 and all(part <= 1e-12 for part in parts)
        assert -0.1001 <= sum(parts) <= -0.085, told.op
        assert told.changes == tuple(sorted(told.changes, key=lambda c: c.change))
        assert told.time.low <= told.time.seconds <= told.time.high


def test_bounds_change_with_the_step() -> None:
    profile, chip = larger(), on("h100")
    (mlp,) = chosen(placed_ops(profile, DECODE), "linear 1024x4096")
    small, large = Step.decode(1, 1024), Step.prefill(8192)
    assert explain_op(mlp, large, chip, profile.dtype).time.bound == "arithmetic"
    few = explain_op(mlp, small, chip, profile.dtype)
    assert few.time.bound in ("traffic", "launch") and few.time.terms["launch"] > few.time.terms["arithmetic"]


def test_counts_are_those_of_the_model() -> None:
    profile = llama(hidden=64, blocks=3, ffn=96)
    placed = {op.label: op.count for op in placed_ops(profile, DECODE)}
    assert placed["linear 96x64"] == 6 and placed["linear 64x96"] == 3  # gate and up; down
    assert placed["attention"] == 3


#: Groq's holds too little to be planned on.
CHIPS = [entry.label for entry in devices() if entry.status != "announced" and entry.memory.capacity > 1]


@pytest.mark.parametrize("target", [*CHIPS, "cpu"])
def test_what_is_assumed_is_said(target: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A device of whose numbers none was fitted says so, on the screen and in JSON; the others say what they are."""
    chip = on(target)
    dtype = next(name for name in ("bfloat16", "float16", "int8") if name in chip.peak_flops_per_s)
    profile = replace(llama(hidden=64, ffn=96), dtype=dtype)
    monkeypatch.setattr(cli, "_profile", lambda *_: profile)
    words = ("explain", "config.json", "--target", target, "--op", "linear 96x64")
    shown = plait(*words, env={"COLUMNS": "80"})
    assert shown.exit_code == 0, shown.stderr
    (told,) = json.loads(plait(*words, "--json").stdout)["ops"]
    known = quantities(chip)
    sources = {item["source"] for item in told["reached"]}
    if known is None:
        assert told["time"]["source"] == "assumed" and sources == {"assumed"}
        assert told["assumed"] == ["share of the peak", "share of the bandwidth", "one launch"]
        assert "), assumed" in shown.stdout and "\nassumed " in shown.stdout
    else:
        assert sources == {known[name].source for name in ("matmul", "bandwidth", "launch_s")}
        assert (told["assumed"] == []) == ("assumed" not in sources)
    assert max(map(len, shown.stdout.partition("\nnext:")[0].splitlines())) <= 80


def test_some_devices_are_fitted_and_some_are_not() -> None:
    fitted = {target for target in CHIPS if quantities(on(target)) is not None}
    assert {"h100", "b200", "mi300x"} <= fitted
    assert {"gaudi3", "trainium2", "m3-ultra", "wse3"} <= set(CHIPS) - fitted


def measured(folder: Path) -> Path:
    """A profile of this host: every product takes a second, everything else a millisecond."""

    def times(coordinates: int, seconds: float) -> Times:
        axes = ((1.0, 1e9),) * coordinates
        return Times(axes, *((seconds * factor,) * 2**coordinates for factor in (1.0, 0.9, 1.2)))

    tables = {"linear": (2, 1.0), "logits": (2, 1.0), "decode": (2, 1e-3), "prefill": (2, 1e-3), "silu_mul": (1, 1e-3)}
    found = Profile(
        "cpu", "cpu", "cpu", machine("cpu"), 1, "2026-11-01", True,
        {f"{name} float32": times(*shape) for name, shape in tables.items()},
        Overheads(1e-4, 0.0, 0.0, 0.0, 0.0), 1e10, Hop(1e-5, 1e9), Hop(1e-5, 1e9),
    )  # fmt: skip
    path = folder / "cache" / "profiles" / "cpu.json"
    path.parent.mkdir(parents=True)
    path.write_text(to_json(found))
    return path


def test_what_was_measured_is_what_it_is_explained_with(model, tmp_path) -> None:
    words = ("explain", model, "--target", "cpu", "--dtype", "float32", "--op", "linear 96x64")
    (assumed,) = json.loads(plait(*words, "--json").stdout)["ops"]
    path = measured(tmp_path)
    (told,) = json.loads(plait(*words, "--json").stdout)["ops"]
    assert told["time"]["seconds"] == pytest.approx(1.0) and assumed["time"]["seconds"] < 0.01
    assert [item["what"] for item in told["reached"]] == [f"the profile {path}"]
    assert told["assumed"] == [] and assumed["assumed"]
    changes = [{change["what"]: change["change"] for change in one["changes"]} for one in (told, assumed)]
    assert changes[0] == pytest.approx(changes[1], abs=1e-3)
    assert str(path) in "".join(plait(*words).stdout.split())


def test_a_hop_by_hand() -> None:
    """8 tokens of 8 bytes over 10 GB/s, and 10 us before."""
    a, b = device("a", 10**12), device("b", 10**12)
    told = explain_hop(toy([1, 1]), DECODE, cluster(a, b))
    assert told.time.seconds == pytest.approx(1e-5 + 64e-10)
    assert (told.time.bound, told.changes[0].what, told.assumed[-1]) == ("launch", "10 % less latency", "latency")
    large = explain_hop(toy([1, 1]), Step.prefill(10**6), cluster(a, b))
    assert large.time.bound == "wire" and large.changes[0].what == "10 % fewer bytes"


def test_json_and_screen(model) -> None:
    words = ("explain", model, "--target", "h100", "--op", "linear", "--batch", "4", "--context", "256")
    found = json.loads(plait(*words, "--json").stdout)
    assert set(found) == {"model", "target", "phase", "batch", "context", "dtype", "ops", "next"}
    totals = [op["time"]["seconds"] * op["count"] for op in found["ops"]]
    assert totals == sorted(totals, reverse=True) and len(totals) == 4
    shown = plait(*words).stdout
    for part in (
        "explained",
        "takes ",
        "bound ",
        "share of the peak",
        "what would change it most",
        "twice the requests",
    ):
        assert part in shown
    assert shown.partition("\nnext: ")[2].strip() == found["next"]
    assert "--batch 32" in found["next"]
    again = plait(*shlex.split(found["next"])[1:])
    assert again.exit_code == 0 and "explained" in again.stdout


def test_without_an_op_all_are_listed_and_the_dearest_comes_next(model) -> None:
    result = plait("explain", model, "--target", "mi300", "--phase", "prefill", env={"COLUMNS": "80"})
    assert result.exit_code == 0, result.stderr
    assert all(f" {name}" in result.stdout for name in ("linear", "attention", "logits", "rms_norm"))
    assert max(map(len, result.stdout.partition("\nnext:")[0].splitlines())) <= 80
    following = result.stdout.partition("\nnext: ")[2].strip()
    assert plait(*shlex.split(following)[1:]).exit_code == 0
    hop = plait("explain", model, "--target", "h100,mi300", "--op", "hop")
    assert hop.exit_code == 0 and "wire" in hop.stdout


@pytest.mark.parametrize(
    ("words", "code", "exit_code"),
    [
        (("--target", "h100", "--op", "linaer"), "op-unknown", 64),
        (("--target", "h100", "--op", "hop"), "op-hop", 64),
        (("--target", "h1000",), "target-unknown", 64),
        (("--target", "h100", "--phase", "train"), "phase-unknown", 64),
        (("--target", "h100", "--batch", "0"), "batch", 64),
        (("--target", "h100", "--context", "0"), "context", 64),
        (("--target", "h100", "--context", "5000"), "context", 64),
        (("--target", "m3-ultra", "--op", "linear"), "device-dtype", 2),
        (("--target", "sohu", "--op", "linear"), "device-announced", 2),
        ((), "command-line", 64),
    ],
)  # fmt: skip
def test_refusals(model, words, code, exit_code) -> None:
    result = plait("explain", model, *words)
    assert result.exit_code == exit_code and f"[{code}]" in result.stderr and result.stdout == ""
