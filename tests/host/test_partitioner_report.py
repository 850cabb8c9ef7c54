"""Causes, runners-up and the plan as rows and text."""

from __future__ import annotations

from dataclasses import replace

import pytest

from plait.cost_models import cluster_for
from plait.errors import FitError
from plait.partitioner import Problem, evaluate, solve
from plait.partitioner.report import (
    COLUMNS,
    FIT_COLUMNS,
    device_rows,
    fit_rows,
    idle_rows,
    markdown,
    memory_bars,
    summary_rows,
    table_rows,
)
from plait.partitioner.search import MAX_WORK, Space
from plait.partitioner.tables import tables
from plait.spec import Workload, parse_targets
from plait.words import bytes_text, count_text, seconds_text
from tests.planning import GB, cluster, device, llama, toy

ONE = Workload("one", 1, 1, 1)
FAST = device("fast", 12_000, bandwidth=1e6, host="x")
SLOW = device("slow", 6000, bandwidth=2.5e5, host="x")
TINY = device("tiny", 500, host="x")
PROBLEM = Problem(toy([1000] * 8, kv_heads=0), cluster(FAST, SLOW, TINY, latency_s=0.0), ONE, max_step_tokens=1)


def test_causes_name_the_number_and_the_runner_up() -> None:
    plan = solve(PROBLEM)
    causes = {s.devices[0]: s.cause for s in plan.slices}
    assert {d: s.blocks[1] - s.blocks[0] for s in plan.slices for d in s.devices} == {"fast.0": 7, "slow.0": 1}
    fast, slow = causes["fast.0"], causes["slow.0"]
    assert fast is not None
    assert slow is not None
    # seven blocks of 1,000 bytes at 1 MB/s are 7 ms; one request is a prompt and a token
    assert fast.number == "decode 7 ms (memory-bound), prefill 7 ms, busy 14 ms per request"
    assert fast.why == "it is the slowest stage; every other split has a slower one"
    assert slow.why == "one more block would make it the slowest stage (16 ms per request)"
    assert slow.runner_up == "without slow.0: 62.5 tokens/s when kept full on fast (-12.5 %)"
    assert fast.runner_up == "without fast.0: no plan fits"
    (idle,) = plan.idle
    assert idle.device == "tiny.0"
    assert idle.cause.why == "not even one block fits"
    assert idle.cause.number == "508 B short"
    assert plan.cause is not None
    assert plan.cause.why.endswith("any order: 71.4 tokens/s when kept full")
    assert plan.cause.number == "the slowest stage is fast.0, 14 ms per request"
    assert plan.cause.runner_up == "other devices: 62.5 tokens/s when kept full on fast (-12.5 %)"


def test_a_full_memory_is_the_cause() -> None:
    plan = solve(replace(PROBLEM, cluster=cluster(replace(FAST, memory_bytes=4100), device("big", GB, bandwidth=1e3))))
    cause = next(s.cause for s in plan.slices if s.devices == ("fast.0",))
    assert cause is not None
    assert cause.why.startswith("its memory is full: ")
    assert "one more block is" in cause.why


@pytest.mark.parametrize("objective", ["throughput", "latency", "capacity"])
def test_every_decision_has_a_cause(objective: str) -> None:
    problem = replace(PROBLEM, profile=toy([1000] * 8, kv_heads=1), objective=objective)
    for plan in (solve(problem), evaluate(problem, solve(problem))):
        for cause in (plan.cause, *(s.cause for s in plan.slices), *(i.cause for i in plan.idle)):
            assert cause is not None
            assert cause.why


def test_a_pin_between_a_full_memory_and_a_pin() -> None:
    """One neighbour does not fit, the other is pinned away."""
    nodes = cluster(device("a", 1200), device("b", 1200), device("c", 1500), latency_s=0.0)
    model = toy([300, 1000, 1000], kv_heads=0)
    plan = solve(Problem(model, nodes, ONE, max_step_tokens=1, pins={"0": "a.0", "2": "c.0"}))
    middle = plan.slices[1].cause
    assert middle is not None
    assert middle.why.startswith("its memory is full")


def test_rows_and_bars_add_up() -> None:
    plan = solve(PROBLEM)
    rows = table_rows(plan)
    assert all(len(row) == len(COLUMNS) for row in rows)
    assert [row[1] for row in rows] == [s.devices[0] for s in plan.slices]
    assert {row[2] for row in rows} == {
        f"{s.blocks[0]}:{s.blocks[1]} ({s.blocks[1] - s.blocks[0]})" for s in plan.slices
    }
    for bar in memory_bars(plan):
        assert sum(size for _, size in bar.parts) == bar.capacity_bytes
    assert [name for name, _ in summary_rows(plan)][:3] == [
        "time to first token",
        "time per output token",
        f"output tokens/s at {plan.workload.concurrency} in flight",
    ]
    assert idle_rows(plan)[0][0] == "tiny.0"
    assert device_rows(plan.cluster.devices)[0][:2] == ("fast.0", "null")


def test_markdown_holds_every_number() -> None:
    plan = solve(PROBLEM)
    text = markdown(plan)
    for row in table_rows(plan):
        for cell in row:
            assert cell in text
    for _, value in summary_rows(plan):
        assert value in text
    assert "tiny.0: not even one block fits" in text
    lines = [line for line in text.splitlines() if line.startswith("|")]
    assert len({len(line) for line in lines}) == 1


def test_rows_of_what_does_not_fit() -> None:
    with pytest.raises(FitError) as caught:
        solve(replace(PROBLEM, cluster=cluster(SLOW, TINY)))
    rows = fit_rows(caught.value)
    assert all(len(row) == len(FIT_COLUMNS) for row in rows)
    by_device = {row["device"]: row for row in caught.value.rows}
    assert set(by_device) == {"slow.0", "tiny.0"}
    for row in by_device.values():
        assert row["short_by"] == max(0, int(row["needed"]) - int(row["free"]))


def test_texts() -> None:
    assert [bytes_text(v) for v in (0, 999, 1234, 1.5e9, 1.26e12)] == ["0 B", "999 B", "1.23 kB", "1.5 GB", "1.26 TB"]
    assert bytes_text(-2e9) == "-2 GB"
    assert [seconds_text(v) for v in (0, 2e-9, 3.21e-5, 0.0125, 12.5)] == [
        "0 s",
        "2 ns",
        "32.1 us",
        "12.5 ms",
        "12.5 s",
    ]
    assert [count_text(v) for v in (12.345, 1234567)] == ["12.3", "1,234,567"]


def test_405b_on_eight_groups_is_within_the_exact_search() -> None:
    """`benchmarks/plan.py` times it; here the work it takes, a twentieth of what is allowed."""
    shape = {"blocks": 126, "hidden": 16384, "heads": 128, "kv_heads": 8, "head_dim": 128, "ffn": 53248}
    model = llama(**shape, vocabulary=128256, tied=False, dtype="bfloat16")
    kinds = "h100,h200,b200,gh200,mi300x,mi325x,mi355x,tpu-v5p"
    problem = Problem(model, cluster_for(parse_targets(kinds)), Workload())
    found = tables(problem)
    space = Space.of(tuple(kind.count for kind in found.kinds), 126, [found.prefill.hop, found.decode.hop])
    assert len(found.kinds) == 8
    assert space.work < MAX_WORK / 20
    plan = solve(problem)
    assert sum(end - start for start, end in (s.blocks for s in plan.slices)) == 126
    assert len(plan.slices) > 4
