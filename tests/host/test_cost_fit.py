"""The fit: it finds the numbers that made its points, sees nothing that is held out; the page says what it gives."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from dataclasses import replace
from hashlib import sha256
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from plait.cost_models.cases import Point, case_of, kv_room
from plait.cost_models.catalogue import device_of, lookup
from plait.cost_models.fit import Names, fit, spread_of
from plait.cost_models.op_time import Shard
from plait.cost_models.quantities import DEVICE, device_levels, engine_levels, value_of
from plait.cost_models.roofline import rates, unit_s
from plait.cost_models.sheet import Sheet
from plait.cost_models.speeds import fitted
from plait.ir import Step
from tests.planning import llama

ROOT = Path(__file__).parents[2]
MODEL = llama(blocks=16, hidden=4096, heads=32, kv_heads=8, head_dim=128, ffn=14336, vocabulary=32000, dtype="bfloat16")


@pytest.fixture(scope="module")
def benchmark() -> Iterator[Any]:
    """benchmarks/accuracy.py and what it imports."""
    sys.path.insert(0, str(ROOT / "benchmarks"))
    try:
        yield importlib.import_module("accuracy")
    finally:
        sys.path.remove(str(ROOT / "benchmarks"))


def point(chip: str = "h100", **changes: Any) -> Point:
    device = device_of(lookup(chip))
    base = Point(
        id="x",
        profile=MODEL,
        device=device,
        device_label=device.name,
        link_bytes_per_s=450e9,
        units=0,
        engine="vllm",
        generation="1",
        shard=Shard(),
        stages=1,
        matmul_dtype="bfloat16",
        expert_dtype="bfloat16",
        prompt_tokens=512,
        output_tokens=128,
        concurrency=8,
        scenario="serving",
        metric="tpot",
        value=1.0,
        group=("m", device.name),
    )
    return replace(base, **changes)


def many() -> list[Point]:
    """Static batches and streams on two chips, from bound by traffic to bound by arithmetic; and with a slow host."""
    out = []
    for chip, engine in (("h100", "vllm"), ("a100", "vllm"), ("h100", "slow")):
        for devices in (1, 4):
            shard = Shard(devices)
            for batch in (1, 8, 64):
                for prompt in (128, 2048):
                    shape = {"engine": engine, "shard": shard, "concurrency": batch, "prompt_tokens": prompt}
                    out += [point(chip, scenario="static", metric=metric, **shape) for metric in ("prompt", "token")]
                    out += [point(chip, metric=metric, **shape) for metric in ("ttft", "tpot")]
    return [replace(p, id=str(i)) for i, p in enumerate(out)]


def test_the_fit_finds_the_numbers_that_made_its_points() -> None:
    points = many()
    names = Names.of(points)
    truth = {
        ("bandwidth", "cuda"): -0.2,
        ("bandwidth", "cuda/sm_80"): -0.15,
        ("matmul", "cuda/sm_90a"): -0.25,
        ("launch_s", "cuda"): 0.6,
        ("reduce_latency_s", "cuda"): 0.5,
        ("host_s", "slow"): 1.5,
        ("queue", "vllm"): -0.5,
    }
    assert set(truth) <= set(names.nodes)
    made = Sheet(points).predict(truth)
    seen = [replace(p, value=float(v)) for p, v in zip(points, made, strict=True)]
    found = fit(seen)
    again = Sheet(points).predict(found.logs)
    assert np.median(np.abs(again / made - 1)) < 0.005
    for name, chip in (("bandwidth", "h100"), ("bandwidth", "a100"), ("matmul", "h100")):
        levels = device_levels(point(chip))
        assert value_of(name, levels, found.logs) == pytest.approx(value_of(name, levels, truth), rel=0.1)
    slow = engine_levels(point(engine="slow"))
    assert value_of("host_s", slow, found.logs) == pytest.approx(value_of("host_s", slow, truth), rel=0.1)
    # Of what no point shows, it says so: nothing has experts.
    number = found.number("experts", device_levels(point()))
    assert number.source == "assumed" and number.value == pytest.approx(DEVICE["experts"].default, rel=0.05)
    assert found.number("bandwidth", device_levels(point())).source == "measured"


def test_outliers_do_not_pull_the_fit() -> None:
    points = many()
    made = Sheet(points).predict({("bandwidth", "cuda"): -0.2})
    values = made.copy()
    values[::10] *= 10
    found = fit([replace(p, value=float(v)) for p, v in zip(points, values, strict=True)])
    again = Sheet(points).predict(found.logs)
    assert np.median(np.abs(again / made - 1)) < 0.03


def test_a_step_of_the_fit_is_the_sum_of_the_units_that_are_planned() -> None:
    """The planner's times of units and the fit's times of steps are one model: here without host work."""
    for chip in ("h100", "mi300x"):
        asked = replace(point(chip), scenario="static", metric="token", concurrency=16)
        sheet = Sheet([asked])
        sheet.units = np.array([fitted().compute_units[asked.device.arch]])
        quiet = dict.fromkeys(("host_s", "host_request_s"), 1e-15)

        def value(name: str, levels: Any, known: dict[str, Any], quiet: dict[str, float] = quiet) -> float:
            return fitted().overlap.value if name == "overlap" else quiet.get(name) or known.get(name, 1.0)

        table = {name: number.value for name, number in fitted().devices[device_levels(asked)[-1]].items()}
        got = sheet._expected(lambda name, levels, t=table: value(name, levels, t))[0]
        step = Step.decode(16, 512 + 64)
        at = rates(asked.device, "bfloat16")
        assert got == pytest.approx(sum(unit_s(unit.facts, (step,), at) for unit in MODEL.units), rel=1e-6)


def test_more_pipeline_stages_hold_more_requests() -> None:
    offline = point("rtxpro6000", scenario="offline", metric="throughput", concurrency=None)
    rooms = [kv_room(replace(offline, stages=stages)) for stages in (1, 2, 4)]
    assert rooms == sorted(rooms) and rooms[2] > 4 * rooms[0]
    assert case_of(replace(offline, concurrency=3), {}).running == 3


def test_the_range_holds_its_share() -> None:
    """Of 99 points the 80th largest error, (99 + 1) * 0.8; of too few, the widest that is known."""
    points = [point(metric="tpot") for _ in range(99)] + [point("mi300x", metric="tpot")]
    errors = np.array([(-1) ** i * i / 100 for i in range(1, 100)] + [3.0])
    found = spread_of(points, errors)
    assert found["cuda"]["decode"] == 0.8
    assert found["rocm"]["decode"] == 0.8  # one point says nothing of a share


def test_what_is_held_out_touches_no_number(benchmark: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Other values of held-out rows: what the fit is given is the same."""
    rows = benchmark.rows()
    given: list[list[tuple[str, float]]] = []

    def caught(points: Any) -> Any:
        given.append([(p.id, p.value) for p in points])
        raise InterruptedError

    monkeypatch.setattr(benchmark, "points", lambda chosen: chosen)
    monkeypatch.setattr(benchmark, "left_out", caught)
    monkeypatch.setattr(benchmark, "LEFT_OUT", tmp_path / "left_out.csv")
    for factor in (1.0, 7.0):
        changed = [replace(row, value=row.value * factor) if row.held_out else row for row in rows]
        monkeypatch.setattr(benchmark, "rows", lambda changed=changed: changed)
        with pytest.raises(InterruptedError):
            benchmark.refit()
    assert given[0] == given[1] and 0 < len(given[0]) < len(rows)


def test_the_split_is_by_group_and_by_rule(benchmark: Any) -> None:
    rows = benchmark.rows()
    groups = {row.group for row in rows}
    held = {row.group for row in rows if row.held_out}
    assert not held & {row.group for row in rows if not row.held_out}
    groups.add(("llama-4-scout", "h100"))  # of which all rows are left out
    for device in {device for _, device in groups}:
        models = sorted(
            (m for m, d in groups if d == device), key=lambda m: sha256(f"{m}|{device}".encode()).hexdigest()
        )
        assert {m for m, d in held if d == device} == set(models[1::3])


def test_every_row_is_used_or_left_out_for_a_reason(benchmark: Any) -> None:
    points = importlib.import_module("points")
    rows = benchmark.rows()
    out = [row for ids in points.excluded().values() for row in ids]
    assert len({row.id for row in rows} | set(out)) == len(rows) + len(out) == 2395
    assert all(row.source and row.value > 0 for row in rows)


def test_the_page_says_what_the_code_gives(benchmark: Any) -> None:
    """Peers' answers are those of their last run; everything else is computed here."""
    page = importlib.import_module("accuracy_page").page(benchmark.judged())
    assert page == (ROOT / "docs" / "accuracy.md").read_text(encoding="utf-8")
