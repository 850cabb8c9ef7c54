"""Profiles: the arithmetic of what is measured on a clock that the test turns, the file, and who takes its numbers."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from xdsl.dialects.builtin import ModuleOp

import plait
from plait import api, doctor
from plait.assemble.measure.host import hops
from plait.assemble.measure.profile import QUICK, Budget, engine_overheads, measure
from plait.assemble.measure.slices import Loader, attentions, batch, linears
from plait.backends.base import Batch
from plait.backends.kernels.step import _bucket
from plait.cost_models.activations import gathered_tokens
from plait.cost_models.catalogue import cluster_for, resolve
from plait.cost_models.profile import OpFacts, profile
from plait.cost_models.profiled import look_up, measured_times, peak_flops_per_s, together
from plait.cost_models.profiles import (
    Chosen,
    Hop,
    Profile,
    Times,
    cpu_model,
    default_path,
    foreign,
    given,
    machine,
    read,
    write,
)
from plait.cost_models.roofline import rates, unit_times
from plait.errors import UsageError, UserError
from plait.ir.facts import Step
from plait.ir.module import ops
from plait.ir.ops import WeightOp
from plait.registry import load_backend
from plait.spec import Device, Workload, from_dict, parse_targets, to_dict
from tests.host.command_line import plait as run
from tests.ir_models import Shape, build

CPU = resolve(parse_targets("cpu")[0])[0]

SMALL = Budget(
    seconds=0,
    rounds=3,
    rows=(1, 4, 16, 64),
    widths=(256, 512, 1024),
    sequences=(1, 4),
    lengths=(64, 256),
    queries=(16, 64),
    before=(0, 64),
    tokens=(1, 16, 64),
    scores=(1, 4),
    vocabularies=(1024, 4096),
)


@dataclass
class Clock:
    """Seconds that pass when somebody says so."""

    now: float = 0.0

    def __call__(self) -> float:
        return self.now


def truth(op: Any, step: Step) -> float:
    """A device without waves or caches: what each op takes."""
    cost = op.cost(step)
    return 4e-6 + cost.flops / 5e10 + cost.bytes / 1e10


@dataclass
class Slice:
    """Steps as `truth` says, on a clock."""

    module: ModuleOp
    clock: Clock
    noise: Callable[[], float] = lambda: 1.0
    closed: bool = field(default=False, init=False)

    def step(self, made: Batch, inputs: Mapping[str, Any]) -> dict[str, Any]:
        lens = tuple(map(int, np.diff(made.query_starts)))
        step = Step(lens, tuple(map(int, made.kv_lens)), len(made.logit_rows))
        spent = sum(
            truth(op, step) for op in ops(self.module) if not isinstance(op, WeightOp) and op.name != "plait.embed"
        )
        self.clock.now += (spent + 2e-4 + 1e-6 * sum(lens)) * self.noise()
        return {}

    def close(self) -> None:
        self.closed = True


def fake(clock: Clock, dtypes: Sequence[str] = ("float32",), noise: Callable[[], float] = lambda: 1.0) -> Profile:
    return measure(
        CPU,
        machine("cpu"),
        dtypes,
        SMALL,
        lambda module, batches: Slice(module, clock, noise),
        engine=(1e-3, 1e-4),
        copy_bytes_per_s=8e9,
        hops=(Hop(1e-5, 1e10), Hop(2e-5, 1e9)),
        threads=2,
        clock=clock,
    )


@pytest.fixture(scope="module")
def made() -> Profile:
    return fake(Clock())


@pytest.fixture
def device(made: Profile, tmp_path: Path) -> Device:
    write(made, tmp_path / "p.json")
    return cluster_for(parse_targets("cpu"), profiles=[given(tmp_path / "p.json")]).devices[0]


def test_points_of_the_grid_come_back_as_they_were_measured(made: Profile) -> None:
    times = made.tables["linear float32"]
    assert times.axes == ((1, 4, 16, 64), (256**2, 512**2, 1024**2))
    op = next(op for op in ops(linears("float32", 512, 1)) if op.name == "plait.linear")
    found = look_up(times, 16, 512**2)
    assert found.seconds == pytest.approx(truth(op, Step((16,), (16,), 1)), rel=1e-6)
    assert (found.low, found.high) == pytest.approx((found.seconds, found.seconds))
    assert found.source == "measured"
    assert look_up(times, 17, 512**2).source == "interpolated"


def test_between_points_and_beyond_them(made: Profile) -> None:
    times = made.tables["linear float32"]
    between = look_up(times, 8, 512**2).seconds
    assert look_up(times, 4, 512**2).seconds < between < look_up(times, 16, 512**2).seconds
    assert look_up(times, 1, 10).seconds == look_up(times, 1, 256**2).seconds  # launching is left
    assert look_up(times, 128, 2 * 1024**2).seconds == pytest.approx(4 * look_up(times, 64, 1024**2).seconds)


def test_what_steps_cost_beside_ops_is_found(made: Profile) -> None:
    assert made.overheads.slice_s == pytest.approx(2e-4, rel=0.01)
    assert made.overheads.token_s == pytest.approx(1e-6, rel=0.01)
    assert made.overheads.sequence_s == pytest.approx(0, abs=1e-8)
    assert (made.overheads.engine_s, made.overheads.engine_sequence_s) == (1e-3, 1e-4)


@pytest.mark.parametrize("concurrency", [1, 3])
def test_a_model_takes_what_its_ops_take(device: Device, concurrency: int) -> None:
    """Shapes between the points: a model of a device without steps in its curves is off by what interpolating costs."""
    module = build(Shape(hidden=384, heads=6, kv_heads=3, head_dim=64, ffn=700, vocabulary=1000, tied=False))
    model, work = profile(module), Workload("w", 40, 8, concurrency)
    times = unit_times(model, device, work, 64)
    fused = [op for unit in model.units for op in together(unit.facts.ops) if op.name != "plait.embed"]

    def expected(step: Step) -> float:
        products = {id(op): op for op in fused}
        total = sum(4e-6 + op.cost(step).flops / 5e10 + op.cost(step).bytes / 1e10 for op in products.values())
        for unit in model.units:  # those that `together` left out
            left = [op for op in unit.facts.ops if id(op) not in products and op.name == "plait.linear"]
            kept = {op.input for op in fused}
            total += sum(
                op.cost(step).flops / 5e10 + op.cost(step).weight_bytes / 1e10 for op in left if op.input in kept
            )
        return total + 1e-3 + 1e-4 * len(step.query_lens) + 2e-4 + 1e-6 * step.tokens

    for seconds, overhead, step in (
        (times.prefill_s, times.prefill_overhead_s, Step((40,), (40,), 1)),
        (times.decode_s, times.decode_overhead_s, Step.decode(concurrency, 44)),
    ):
        assert seconds.sum() + overhead == pytest.approx(expected(step), rel=0.12)


def test_products_of_one_input_count_once() -> None:
    block = profile(build(Shape())).blocks[0].facts.ops
    columns = [op.matrix.columns for op in together(block) if op.matrix is not None]
    assert columns == [16 + 8 + 8, 16, 24 + 24, 16]  # q, k, v; o; gate, up; down
    assert [op.name for op in block].count("plait.linear") == 7
    alone = [OpFacts("plait.linear", op.cost, op.matrix) for op in block if op.matrix is not None]
    assert together(alone) == alone  # nothing is known of their inputs


def test_pages_are_gathered_as_the_kernel_rounds_them() -> None:
    for tokens in range(1, 2000):
        assert gathered_tokens(tokens, 16) == 16 * _bucket(-(-tokens // 16))


def test_noise_widens_the_range_and_moves_the_median_little() -> None:
    rng = np.random.default_rng(0)
    made = fake(Clock(), noise=lambda: float(rng.choice([1.0, 1.0, 1.0, 2.5])))
    times = made.tables["linear float32"]
    assert all(low <= value <= high for low, value, high in zip(times.low, times.seconds, times.high, strict=True))
    assert any(high > 1.2 * value for value, high in zip(times.seconds, times.high, strict=True))


def test_the_engine_is_what_a_pipeline_takes_beyond_its_slice() -> None:
    clock = Clock()

    class Pipe:
        def generate_ids(self, prompts: Sequence[Sequence[int]], max_tokens: int) -> list[list[int]]:
            clock.now += 0.5 + max_tokens * (3e-3 + 2e-3 + 1e-4 * len(prompts))
            return [[1] * max_tokens for _ in prompts]

    class Fixed:
        def step(self, made: Batch, inputs: Mapping[str, Any]) -> dict[str, Any]:
            clock.now += 3e-3
            return {}

    found = engine_overheads(Pipe(), Fixed(), (1, 4, 16), 3, clock)  # type: ignore[arg-type]
    assert found == pytest.approx((2e-3, 1e-4), rel=1e-6)


def test_slices_to_measure_run_on_the_cpu(tmp_path: Path) -> None:
    """The real backend takes what is measured; nothing here is timed."""
    load = Loader(load_backend("cpu"), "cpu:cpu", "cpu", tmp_path, threads=1)
    prefill, decode = batch([5, 1], [5, 9]), batch([1, 1], [17, 3])
    for module in (linears("float32", 64, 3), attentions("float32", 2), attentions("bfloat16", 1)):
        made = load(module, [prefill, decode])
        assert [made.step(step, {})["y"].shape[0] for step in (prefill, decode)] == [6, 2]
        made.close()


def test_batches_to_measure_are_sound() -> None:
    for made in (batch([5, 1], [5, 9]), batch([1] * 4, [33] * 4), batch([3], [3], logits=True)):
        made.check()
        table = made.page_tables["full"]
        assert len(set(table[table >= 0])) == (table >= 0).sum()  # no page has two owners


def test_hops_are_measured_between_two_processes() -> None:
    shared, loopback = hops(repeats=3)
    assert min(shared.latency_s, shared.bytes_per_s, loopback.latency_s, loopback.bytes_per_s) > 0


def test_quick_points_are_few() -> None:
    assert QUICK.seconds < 30
    assert len(QUICK.rows) * len(QUICK.widths) <= 20


def test_the_file_comes_back(made: Profile, tmp_path: Path) -> None:
    write(made, tmp_path / "new" / "p.json")
    assert read(tmp_path / "new" / "p.json") == made
    assert [path.name for path in (tmp_path / "new").iterdir()] == ["p.json"]


@pytest.mark.parametrize(
    ("change", "code"),
    [
        (lambda data: data["tables"].pop("decode float32"), "profile-damaged"),
        (lambda data: data["tables"]["linear float32"]["seconds"].pop(), "profile-damaged"),
        (lambda data: data["tables"]["linear float32"]["low"].__setitem__(0, 1.0), "profile-damaged"),
        (lambda data: data["tables"]["linear float32"]["axes"][0].reverse(), "profile-damaged"),
        (lambda data: data["tables"].clear(), "profile-damaged"),
        (lambda data: data["overheads"].update(slice_s=-1.0), "profile-damaged"),
        (lambda data: data.update(copy_bytes_per_s=0.0), "profile-damaged"),
        (lambda data: data.update(schema=2), "spec-field"),
        (lambda data: data.update(colour="red"), "spec-field"),
    ],
)
def test_a_damaged_file_is_refused_by_name(
    made: Profile, tmp_path: Path, change: Callable[[dict[str, Any]], object], code: str
) -> None:
    data = to_dict(made)
    change(data)
    (tmp_path / "p.json").write_text(json.dumps(data))
    with pytest.raises(UserError) as caught:
        read(tmp_path / "p.json")
    assert caught.value.code == code


def test_a_file_that_is_not_there_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="cannot read the profile"):
        given(tmp_path / "none.json")


def test_another_machine_is_refused_with_what_differs(made: Profile, tmp_path: Path) -> None:
    other = replace(made, machine=replace(made.machine, cores=made.machine.cores + 6, software="torch 1.0"))
    write(other, tmp_path / "p.json")
    assert foreign(made) == ""
    with pytest.raises(UserError) as caught:
        given(tmp_path / "p.json")
    assert caught.value.code == "profile-foreign"
    assert "cores was" in caught.value.why and "torch 1.0" in caught.value.why


def test_the_name_of_a_cpu_has_its_family_and_model(tmp_path: Path) -> None:
    file = tmp_path / "cpuinfo"
    file.write_text("processor\t: 0\ncpu family\t: 25\nmodel\t\t: 17\nmodel name\t: AMD EPYC\n\nprocessor\t: 1\n")
    assert cpu_model(file) == "AMD EPYC 25 17"
    assert cpu_model(tmp_path / "none")


def test_a_profile_goes_over_the_catalogue_for_its_device_alone(made: Profile, device: Device, tmp_path: Path) -> None:
    assert device.confidence == "measured"
    assert device.peak_flops_per_s["float32"] == peak_flops_per_s(made, "float32") < 5e10
    assert device.profile == str(tmp_path / "p.json") and device.profile in device.sources[-1]
    assert measured_times(device, "bfloat16") is None  # not measured: the catalogue's
    assert rates(device, "float32").measured is not None
    assert rates(device, "float32", nominal=True).measured is None
    other = cluster_for(parse_targets("h100"), profiles=[Chosen(made, tmp_path)]).devices[0]
    assert other == cluster_for(parse_targets("h100")).devices[0]
    assert from_dict(Device, to_dict(device)) == device


def test_slices_of_one_host_hop_as_measured(made: Profile, tmp_path: Path) -> None:
    write(made, tmp_path / "p.json")
    cluster = cluster_for(parse_targets("2xcpu"), profiles=[given(tmp_path / "p.json")])
    assert [(link.bytes_per_s, link.latency_s, link.source) for link in cluster.links] == [(1e10, 1e-5, "measured")]


@pytest.fixture
def tiny(tmp_path: Path) -> Path:
    from plait.assemble.tiny import write_tiny_llama

    write_tiny_llama(tmp_path / "tiny")
    return tmp_path / "tiny"


def test_plans_take_the_file_they_are_given_and_say_so(made: Profile, tiny: Path, tmp_path: Path) -> None:
    write(made, tmp_path / "p.json")
    before = plait.plan(tiny, "cpu", dtype="float32")
    after = plait.plan(tiny, "cpu", dtype="float32", profile=tmp_path / "p.json")
    assert before.prediction and after.prediction and after.notes
    assert any("measured on" in note and str(tmp_path / "p.json") in note for note in after.notes)
    found = after.slices[0].decode_s
    assert found is not None and found.source == "interpolated" and found.low < found.value < found.high
    assert found.value > 1e-3 > before.prediction.tpot_s.value / 2  # the engine
    with pytest.raises(UsageError, match="of none of the devices"):
        plait.plan(tiny, "h100", profile=tmp_path / "p.json")
    (tmp_path / "p.json").rename(tmp_path / "away.json")
    from plait.cost_models import profiles

    profiles._read_once.cache_clear()
    with pytest.raises(UserError, match="cannot read the profile"):
        plait.plan(tiny, plan=after)


def test_the_default_place_is_looked_in_and_what_is_foreign_is_said(
    made: Profile, tiny: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("PLAIT_CACHE", str(tmp_path / "cache"))
    write(made, default_path("cpu"))
    notes = plait.plan(tiny, "cpu").notes or ()
    assert any("measured on" in note for note in notes)
    assert [(check.name, check.status) for check in doctor._profile()] == [("profile cpu", "PASS")]
    write(replace(made, machine=replace(made.machine, chip="another")), default_path("cpu"))
    assert [check.status for check in doctor._profile()] == ["WARN"]
    plan = plait.plan(tiny, "cpu")
    assert plan.cluster.devices[0].profile is None
    assert any("left aside" in note and "another" in note for note in plan.notes or ())
    assert not any("profile" in note for note in plait.plan(tiny, "h100").notes or ())


def test_rates_of_a_cluster_file_go_over_a_profile(made: Profile, tiny: Path, tmp_path: Path) -> None:
    write(made, tmp_path / "p.json")
    file = tmp_path / "cluster.yaml"
    for text, kept in (("free_bytes: 3 GB", True), ("bandwidth_bytes_per_s: 20 GB", False)):
        file.write_text(f"devices:\n- target: cpu\n  {text}\n")
        cluster = api.request(tiny, cluster=file, profile=tmp_path / "p.json" if kept else None).cluster
        assert (cluster.devices[0].profile is not None) == kept


def test_a_device_that_is_not_here_is_not_measured() -> None:
    with pytest.raises(UsageError) as caught:
        api.profile_device("h100")
    assert caught.value.code == "profile-device"
    result = run("profile", "h100")
    assert (result.exit_code, result.stdout) == (64, "")
    with pytest.raises(UsageError):
        api.profile_device("cpu", threads=0)


def test_times_out_of_order_have_no_logarithm() -> None:
    times = Times(((1.0, 2.0),), (1e-3, 2e-3), (1e-3, 2e-3), (1e-3, 2e-3))
    assert look_up(times, math.sqrt(2)).seconds == pytest.approx(math.sqrt(2) * 1e-3)
