"""Reported failures of other planners, as cases of this one. The issue is named at each."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from plait.cost_models import cluster_for
from plait.cost_models.memory import MemoryModel
from plait.errors import FitError, PlanError, UnsupportedError, UserError
from plait.partitioner import Problem, evaluate, solve
from plait.spec import Capability, Plan, Workload, from_yaml, parse_targets, to_yaml
from tests.planning import GB, cluster, device, llama, toy

ONE = Workload("one", 1, 1, 1)


def layers(plan: Plan) -> dict[str, int]:
    return {s.devices[0]: s.blocks[1] - s.blocks[0] for s in plan.slices}


def test_a_small_node_is_not_given_one_layer_too_many() -> None:
    """exo PR 2227: 128/128/256/24 GB and 60 layers of 8.5 GB: [14, 14, 29, 3] overflows the 24 GB node."""
    sizes = {"a": 128, "b": 128, "c": 256, "d": 24}
    nodes = [device(name, size * GB, bandwidth=1e12) for name, size in sizes.items()]
    problem = Problem(toy([int(8.5 * GB)] * 60, kv_heads=0), cluster(*nodes), ONE)
    found = layers(solve(problem))
    assert found["d.0"] <= 2
    assert sum(found.values()) == 60
    for name, size in sizes.items():
        assert found[f"{name}.0"] * 8.5 <= size
    with pytest.raises(FitError, match=r"d\.0 needs 25\.5 GB"):
        solve(replace(problem, layers=(14, 14, 29, 3)))


def test_free_memory_counts_not_all_of_it() -> None:
    """exo 641."""
    sizes = (("a", 192, 20), ("b", 128, 60), ("c", 64, 60))
    nodes = [device(n, size * GB, free_bytes=free * GB) for n, size, free in sizes]
    plan = solve(Problem(toy([10 * GB - 10**6] * 14, kv_heads=0), cluster(*nodes), ONE))
    assert layers(plan) == {"a.0": 2, "b.0": 6, "c.0": 6}
    for planned in plan.slices:
        assert planned.memory is not None
        assert planned.memory.needed_bytes <= planned.memory.capacity_bytes


def test_a_device_without_a_peak_is_named() -> None:
    """exo 110, 140: unknown accelerators listed as 0 TFLOPS."""
    mali = replace(device("mali", GB), peak_flops_per_s={})
    with pytest.raises(UserError, match=r"mali\.0 cannot be planned on: peak_flops_per_s") as caught:
        solve(Problem(toy([1]), cluster(mali), ONE))
    assert caught.value.code == "device-numbers"


def test_unified_memory_is_not_all_the_devices() -> None:
    """parallax 210: Mac minis and a 4090; the share of unified memory that the system keeps is part of the plan."""
    found = cluster_for(parse_targets("m2-ultra,rtx4090")).devices
    mac, card = found
    assert mac.unified
    assert mac.reserve_bytes > 0.25 * mac.memory_bytes
    assert card.reserve_bytes < 0.1 * card.memory_bytes
    model = llama(blocks=60, hidden=4096, heads=32, kv_heads=8, head_dim=128, ffn=36000, dtype="float16", tied=False)
    assert 55 * GB < model.weight_bytes < 70 * GB
    plan = solve(Problem(model, cluster_for(parse_targets("m2-ultra,rtx4090")), ONE))
    for planned in plan.slices:
        assert planned.memory is not None
        assert planned.memory.free_bytes >= 0
    card_slice = next((s for s in plan.slices if s.devices == ("rtx4090.0",)), None)
    if card_slice is not None and card_slice.memory is not None:
        assert card_slice.memory.weights_bytes < 24 * GB


def test_one_block_much_larger_than_the_others() -> None:
    """accelerate 3041: [90, 5, 5] on two devices; greedy leaves one empty. Compared with every split."""
    model = toy([90, 5, 5], kv_heads=0)
    nodes = [device("a", 10**6, bandwidth=100.0), device("b", 10**6, bandwidth=100.0)]
    problem = Problem(model, cluster(*nodes), ONE)
    plan = solve(problem)
    assert [planned.blocks for planned in plan.slices] == [(0, 1), (1, 3)]

    def busy(split: tuple[int, ...]) -> float:
        found = solve(replace(problem, layers=split)).slices
        return max(s.prefill_s.value + s.decode_s.value for s in found if s.prefill_s and s.decode_s)

    assert min(busy(s) for s in itertools.product(range(4), repeat=2) if sum(s) == 3) == busy((1, 2))


def test_temporaries_and_replicated_tensors_are_counted() -> None:
    """transformers 48756: what the plan says a device holds is the sum of its parts; a tied table is on both ends."""
    model = llama(blocks=4, tied=True)
    table = 4 * 32 * 16
    plan = solve(Problem(model, cluster(device("a", GB), device("b", GB)), ONE, layers=(2, 2)))
    memory = [s.memory for s in plan.slices if s.memory]
    assert sum(m.weights_bytes for m in memory) == model.weight_bytes + table
    assert all(m.activations_bytes > 0 for m in memory)
    assert [m.logits_bytes > 0 for m in memory] == [False, True]


def test_every_tensor_is_in_a_slice() -> None:
    """accelerate 4014: the slices' weights are a cover of the checkpoint's."""
    model = llama(blocks=5, tied=False)
    memory = MemoryModel(model, ONE, 16, 8)
    for cuts in ([(0, 5)], [(0, 1), (1, 5)], [(0, 2), (2, 3), (3, 5)]):
        assert sum(memory.weights[start, end] for start, end in cuts) == model.weight_bytes


def test_30_and_50_gb_are_both_used_and_the_override_is_exact() -> None:
    """vllm 6824: a fixed fraction wastes the larger device."""
    nodes = [device(n, 80 * GB, free_bytes=free * GB) for n, free in (("a", 30), ("b", 50))]
    problem = Problem(toy([10 * GB - 10**6] * 8, kv_heads=0), cluster(*nodes), ONE, max_step_tokens=1)
    assert layers(solve(problem)) == {"a.0": 3, "b.0": 5}
    with pytest.raises(FitError):
        solve(replace(problem, layers=(4, 4)))
    roomy = replace(problem, cluster=cluster(*(replace(n, free_bytes=None) for n in nodes)))
    for split in ((1, 7), (7, 1), (0, 8)):
        expected = {f"{n}.0": k for n, k in zip("ab", split, strict=True) if k}
        assert layers(solve(replace(roomy, layers=split))) == expected
    for wrong, says in (((4, 5), "= 9 layers"), ((8,), "1 number for"), ((-1, 9), "-1")):
        with pytest.raises(PlanError, match=says):
            solve(replace(roomy, layers=wrong))


def test_kv_tokens_are_the_least_of_the_stages() -> None:
    """vllm PR 50735."""
    nodes = [device(n, size) for n, size in (("a", 20_000), ("b", 40_000), ("c", 30_000))]
    model = toy([1000] * 6, kv_heads=2, head_dim=4)
    plan = solve(
        Problem(model, cluster(*nodes), Workload("w", 8, 8, 1), page_tokens=4, max_step_tokens=1, layers=(1, 3, 2))
    )
    assert plan.prediction is not None
    stages = [s.kv_tokens for s in plan.slices if s.kv_tokens is not None]
    assert len(stages) == 3
    assert plan.prediction.max_kv_tokens == min(stages)


def test_fewer_devices_when_more_are_slower() -> None:
    """GPU-Benchmarks 8, llama.cpp 4747: one 4090 at 149 tok/s, six at 38."""
    fast = device("fast", 100 * GB, bandwidth=1e12)
    slow = [device("slow", 100 * GB, index=i, bandwidth=2e11) for i in range(5)]
    model = toy([GB] * 12, kv_heads=0)
    problem = Problem(model, cluster(fast, *slow, rate=1e8, latency_s=1e-3), Workload("w", 64, 64, 1), "latency")
    plan = solve(problem)
    assert layers(plan) == {"fast.0": 12}
    assert {idle.device for idle in plan.idle} == {f"slow.{i}" for i in range(5)}
    for idle in plan.idle:
        assert "does not improve" in idle.cause.why
        assert "per request on fast + slow" in idle.cause.runner_up
    both = solve(replace(problem, objective="throughput"))
    assert len(both.slices) > 1
    assert plan.prediction is not None
    assert both.prediction is not None
    assert plan.prediction.tpot_s.value < both.prediction.tpot_s.value


def test_equal_throughput_takes_fewer_devices() -> None:
    """The bottleneck is one block: a third device would only add KV tokens, and stays out."""
    model = toy([1000, 1, 1, 1], kv_heads=1)
    nodes = [device("a", 100_000, index=i, bandwidth=100.0, host="x") for i in range(3)]
    problem = Problem(model, cluster(*nodes, rate=1e12, latency_s=0.0), ONE, max_step_tokens=1)
    plan, three = solve(problem), solve(replace(problem, layers=(1, 1, 2)))
    assert [s.blocks for s in plan.slices] == [(0, 1), (1, 4)]
    assert plan.slices[0].decode_s == three.slices[0].decode_s
    assert plan.prediction is not None
    assert three.prediction is not None
    assert three.prediction.max_kv_tokens > plan.prediction.max_kv_tokens


def test_does_not_fit_says_needed_free_and_short_by() -> None:
    """unsloth PR 4623: weights fit, 262k tokens of context do not."""
    model = toy([100_000] * 32, kv_heads=8, head_dim=64)
    work = Workload("huge", 262_128, 16, 1)
    card = device("card", 24 * GB)
    with pytest.raises(FitError) as caught:
        solve(Problem(model, cluster(card), work))
    error = caught.value
    assert error.exit_code == 2
    (row,) = error.rows
    assert row["device"] == "card.0"
    assert row["free"] == 24 * GB
    assert row["needed"] == 32 * 2**30 + 32 * 100_000 + (8 * 512) + 16
    assert row["short_by"] == row["needed"] - 24 * GB
    assert "needs 34.4 GB for blocks 0:32, has 24 GB free, is 10.4 GB short" in error.why
    # what would fit, and it does
    assert "a context of 183072 tokens per request" in error.hint
    fits = replace(work, prompt_tokens=183_072 - 16)
    plan = solve(Problem(model, cluster(card), fits))
    assert plan.prediction is not None
    assert plan.prediction.max_context_tokens == 183_072
    with pytest.raises(FitError):
        solve(Problem(model, cluster(card), replace(fits, prompt_tokens=fits.prompt_tokens + 16)))
    assert "1 more card" in error.hint
    solve(Problem(model, cluster(card, device("card", 24 * GB, index=1)), work))


def test_hints_for_what_would_fit() -> None:
    model = toy([1000] * 4, kv_heads=1, head_dim=1)
    with pytest.raises(FitError) as caught:
        solve(Problem(model, cluster(device("a", 100_000)), Workload("w", 500, 500, 8), max_step_tokens=1))
    # 63 pages of 16 tokens of 8 bytes in each of 4 blocks are 32,256 bytes per request; a block with all 8 is 65,512
    assert caught.value.hint == "a context of 368 tokens per request; 2 requests at a time; kv_dtype fp8; 3 more a"
    with pytest.raises(FitError, match="dtype bfloat16"):
        solve(Problem(model, cluster(device("a", 3000)), ONE, max_step_tokens=1))


@pytest.mark.parametrize("blocks", [2, 6, 10, 12])
def test_the_hint_asks_for_no_more_devices_than_needed(blocks: int) -> None:
    """Devices that hold one block each."""
    work = Workload("w", 16, 16, 1)
    with pytest.raises(FitError) as caught:
        solve(
            Problem(toy([1000] * blocks, kv_heads=1, head_dim=1), cluster(device("a", 1800)), work, max_step_tokens=1)
        )
    assert caught.value.hint.split("; ")[-1] == f"{blocks - 1} more a"
    with pytest.raises(FitError) as caught:
        solve(Problem(toy([10**9], kv_heads=1), cluster(device("a", 1000)), ONE))
    assert caught.value.hint == ""  # no number of such devices holds one block


@settings(max_examples=40, deadline=None)
@given(
    st.integers(12_000, 200_000), st.integers(1, 4), st.lists(st.sampled_from([None, None, 16]), min_size=2, max_size=6)
)
def test_largest_context_of_a_plan(memory_bytes: int, requests: int, windows: list[int | None]) -> None:
    """fak 1045: the plan's largest context fits the same placement, one page more does not."""
    model = toy([100] * len(windows), kv_heads=2, head_dim=2, windows=windows)
    nodes = cluster(device("a", memory_bytes), device("b", memory_bytes))
    work = Workload("w", 1, 1, requests)
    problem = Problem(model, nodes, work, max_step_tokens=8, layers=(1, len(windows) - 1))
    try:
        plan = solve(problem)
    except FitError:
        return
    assert plan.prediction is not None
    most = plan.prediction.max_context_tokens
    if not any(window is None for window in windows):
        return

    def with_context(tokens: int) -> Plan:
        return solve(replace(problem, workload=replace(work, prompt_tokens=tokens - 1)))

    with_context(most)
    with pytest.raises(FitError):
        with_context(most + 16)


def test_the_models_positions_bound_the_context() -> None:
    model = llama(blocks=2, max_positions=4096)
    plan = solve(Problem(model, cluster(device("a", 100 * GB)), ONE))
    assert plan.prediction is not None
    assert plan.prediction.max_context_tokens == 4096
    with pytest.raises(UserError, match="asks for 5000 tokens of context and the model was made for 4096"):
        solve(Problem(model, cluster(device("a", GB)), Workload("w", 4000, 1000, 1)))


def test_kv_of_a_stage_is_that_of_its_own_layers() -> None:
    """gguf-parser-go 32: windows on the second half only; the device with them holds more blocks."""
    windows = (None,) * 4 + (16,) * 4
    model = toy([10] * 8, kv_heads=4, head_dim=4, windows=windows)
    nodes = [device("a", 10**6, host="x"), device("a", 10**6, host="x", index=1)]
    work = Workload("w", 1500, 100, 2)
    plan = solve(Problem(model, cluster(*nodes), work, "capacity", max_step_tokens=8))
    memory = {s.blocks: s.memory.kv_bytes for s in plan.slices if s.memory}
    per_token = 2 * 4 * 4 * 4
    ring = -(-(16 - 1 + 8) // 16) * 16
    for (start, end), kv in memory.items():
        full = sum(window is None for window in windows[start:end])
        assert kv == 2 * per_token * (full * 1600 + (end - start - full) * ring)


def test_a_pin_is_a_constraint_of_the_same_search() -> None:
    """llama.cpp 21801: automatic fitting that gives up when an override is present."""
    nodes = [device("a", 30_000, bandwidth=1e9), device("b", 12_000, bandwidth=1e3)]
    model = toy([1000] * 8, embed_bytes=5000, head_bytes=100, kv_heads=0)
    problem = Problem(model, cluster(*nodes), ONE, max_step_tokens=1)
    assert layers(solve(problem)) == {"a.0": 8}  # the slow one is not worth a hop
    pinned = solve(replace(problem, pins={"embed": "b.0", "block.7": "a.0"}))
    assert [s.devices for s in pinned.slices] == [("b.0",), ("a.0",)]
    assert pinned.slices[0].blocks == (0, 1)
    assert pinned.pins == {"embed": "b.0", "block.7": "a.0"}
    wide = solve(replace(problem, pins={"2:5": "b.0"}))
    start, end = next(s.blocks for s in wide.slices if s.devices == ("b.0",))
    assert start <= 2 < 5 <= end
    with pytest.raises(PlanError, match="pins, forbidden cuts"):
        solve(replace(problem, pins={"0": "a.0", "1": "b.0", "2": "a.0"}))


BAD_PINS = {
    "unknown device": ({"0": "c.0"}, "which the cluster does not have"),
    "unknown block": ({"99": "a.0"}, "cannot pin '99'"),
    "not a unit": ({"tail": "a.0"}, "cannot pin 'tail'"),
    "two places": ({"0": "a.0", "0:2": "b.0"}, "pinned to"),
    "empty range": ({"2:2": "a.0"}, "cannot pin '2:2'"),
}


@pytest.mark.parametrize("case", BAD_PINS)
def test_bad_pins(case: str) -> None:
    pins, says = BAD_PINS[case]
    with pytest.raises(PlanError, match=says):
        solve(Problem(toy([1] * 4), cluster(device("a", GB), device("b", GB)), ONE, pins=pins))


def test_forbidden_cuts_and_allowed_devices() -> None:
    nodes = [device("a", 10**6, index=i, bandwidth=100.0, host="x") for i in range(2)]
    problem = Problem(toy([10] * 4, kv_heads=0), cluster(*nodes, latency_s=0.0), ONE)
    assert [s.blocks for s in solve(problem).slices] == [(0, 2), (2, 4)]
    moved = solve(replace(problem, forbidden_cuts=(2,)))
    assert [s.blocks[1] for s in moved.slices] != [2, 4]
    assert len(solve(replace(problem, forbidden_cuts=(1, 2, 3))).slices) == 1
    alone = solve(replace(problem, allowed=("a.1",)))
    assert layers(alone) == {"a.1": 4}
    assert alone.idle[0].cause.why == "not among the devices that may be used"
    with pytest.raises(PlanError, match="not between two of the 4 blocks"):
        solve(replace(problem, forbidden_cuts=(4,)))
    with pytest.raises(PlanError, match=r"'a\.7', which"):
        solve(replace(problem, allowed=("a.7",)))


def test_weights_and_kv_are_balanced_together() -> None:
    """vllm 32105: the pipeline has the KV of its tightest stage; layers by memory are not the best."""
    nodes = [device("a", 24 * GB), device("b", 80 * GB)]
    model = toy([2 * GB] * 26, embed_bytes=10 * GB, kv_heads=8, head_dim=128)
    problem = Problem(model, cluster(*nodes), ONE, "capacity")
    best = solve(problem).prediction
    tokens = []
    for count in range(1, 26):
        for order in ((0, 1), (1, 0)):
            asked = replace(problem, cluster=cluster(*(nodes[i] for i in order)), layers=(count, 26 - count))
            try:
                found = solve(asked).prediction
            except FitError:
                continue
            assert found is not None
            tokens.append(found.max_kv_tokens)
    by_memory = solve(replace(problem, layers=(6, 20))).prediction
    assert best is not None
    assert by_memory is not None
    assert best.max_kv_tokens == max(tokens)
    assert best.max_kv_tokens > by_memory.max_kv_tokens


def test_a_heavy_embedding_moves_blocks_away() -> None:
    nodes = [device("a", 10_000, index=i, bandwidth=1000.0, host="x") for i in range(2)]
    model = toy([1000] * 6, embed_bytes=4000, kv_heads=0)
    plan = solve(Problem(model, cluster(*nodes, latency_s=0.0), ONE, max_step_tokens=1))
    assert [s.blocks for s in plan.slices] == [(0, 1), (1, 6)]


def _capability(refused: dict[str, str], dtypes: tuple[str, ...] = ("float32",)) -> Capability:
    return Capability("toy", "toy", dtypes, "toy", False, "toy", refused)


def test_a_refused_op_keeps_its_block_away() -> None:
    nodes = [device("a", GB, bandwidth=1e9), device("b", GB, bandwidth=1e6)]
    problem = Problem(toy([1000] * 4, kv_heads=0), cluster(*nodes), ONE)
    refused = {"plait.attention (block 2)": "softcap = 30: not implemented"}
    plan = solve(replace(problem, capabilities={"a.0": _capability(refused)}))
    holder = next(s for s in plan.slices if s.blocks[0] <= 2 < s.blocks[1])
    assert holder.devices == ("b.0",)
    with pytest.raises(UnsupportedError, match=r"(?s)block 2.*a\.0: the toy backend refuses.*softcap = 30") as caught:
        solve(replace(problem, capabilities={d.id: _capability(refused) for d in nodes}))
    assert caught.value.code == "plan-unsupported"
    with pytest.raises(UnsupportedError, match=r"(?s)a\.0 cannot hold block 2.*softcap"):
        solve(replace(problem, capabilities={"a.0": _capability(refused)}, layers=(4, 0)))


def test_a_dtype_the_backend_lacks() -> None:
    nodes = [device("a", GB), device("b", GB)]
    problem = Problem(toy([1000] * 2, kv_heads=0), cluster(*nodes), ONE)
    plan = solve(replace(problem, capabilities={"a.0": _capability({}, ("bfloat16",))}))
    assert layers(plan) == {"b.0": 2}
    assert "computes in bfloat16, not in float32" in plan.idle[0].cause.why
    poor = replace(nodes[0], peak_flops_per_s={"bfloat16": 1.0})
    plan = solve(replace(problem, cluster=cluster(poor, nodes[1])))
    assert "a has no peak for float32" in plan.idle[0].cause.why


def test_limits_are_met_or_refused_with_the_best_that_can() -> None:
    nodes = [device("a", 3000, bandwidth=1e6, index=i, host="x") for i in range(4)]
    problem = Problem(toy([1000] * 4, kv_heads=0), cluster(*nodes, rate=1e5, latency_s=1e-3), ONE, max_step_tokens=1)
    free = solve(problem)
    assert len(free.slices) == 3
    assert free.prediction is not None
    tight = replace(problem, workload=replace(ONE, max_tpot_s=free.prediction.tpot_s.value * 0.9))
    met = solve(tight)
    assert met.prediction is not None
    assert met.prediction.tpot_s.value <= tight.workload.max_tpot_s  # type: ignore[operator]
    assert len(met.slices) == 2
    assert met.cause is not None
    assert "any order within the limits: " in met.cause.why
    assert met.cause.runner_up.endswith("limits on time aside")
    with pytest.raises(UserError, match="the fastest plan that fits takes") as caught:
        solve(replace(problem, workload=replace(ONE, max_ttft_s=1e-6)))
    assert caught.value.code == "limits"


def test_too_many_kinds_are_refused_by_name() -> None:
    nodes = [device(f"d{i}", GB) for i in range(30)]
    with pytest.raises(UserError, match="30 devices of 30 kinds are too many for the exact search") as caught:
        solve(Problem(toy([1000] * 30), cluster(*nodes), ONE))
    assert caught.value.code == "plan-too-large"


def test_many_equal_devices_are_not_too_many() -> None:
    nodes = [device("a", 3000, index=i) for i in range(40)]  # each on a host of its own
    plan = solve(Problem(toy([1000] * 60, kv_heads=0), cluster(*nodes), ONE, max_step_tokens=1))
    assert 30 <= len(plan.slices) <= 40


def _edited(plan: Plan, **changes: object) -> Plan:
    """As a user would: through the file."""
    return replace(from_yaml(Plan, to_yaml(plan)), **changes)  # type: ignore[arg-type]


EDITS = {
    "gap": ([("a.0", (0, 1)), ("b.0", (2, 4))], "leaves out blocks 1:2"),
    "overlap": ([("a.0", (0, 3)), ("b.0", (2, 4))], "holds blocks 2:3 twice"),
    "not from 0": ([("a.0", (1, 4))], "leaves out blocks 0:1"),
    "not to the end": ([("a.0", (0, 3))], "leaves out blocks 3:4"),
    "beyond the end": ([("a.0", (0, 5))], "not a range of the 4 blocks"),
    "empty": ([("a.0", (0, 0)), ("b.0", (0, 4))], "not a range"),
    "unknown device": ([("a.9", (0, 4))], "names the device 'a.9', which the cluster does not have"),
    "twice": ([("a.0", (0, 2)), ("a.0", (2, 4))], "a.0 holds two slices"),
    "nothing": ([], "leaves out blocks 0:4"),
}


@pytest.mark.parametrize("case", EDITS)
def test_edits_that_are_refused(case: str) -> None:
    stages, says = EDITS[case]
    problem = Problem(toy([10] * 4), cluster(device("a", GB), device("b", GB)), ONE)
    plan = solve(problem)
    slices = tuple(replace(plan.slices[0], devices=(name,), blocks=blocks) for name, blocks in stages)
    with pytest.raises(PlanError, match=says):
        evaluate(problem, _edited(plan, slices=slices))


def test_edits_that_are_honoured() -> None:
    problem = Problem(toy([10] * 4), cluster(device("a", GB), device("b", GB, bandwidth=1e3)), ONE)
    plan = solve(problem)
    a_slice = plan.slices[0]
    slices = tuple(replace(a_slice, devices=(d,), blocks=b) for d, b in (("b.0", (0, 3)), ("a.0", (3, 4))))
    again = evaluate(problem, _edited(plan, slices=slices))
    assert [(s.devices, s.blocks) for s in again.slices] == [(("b.0",), (0, 3)), (("a.0",), (3, 4))]
    assert again.prediction is not None
    assert plan.prediction is not None
    assert again.prediction.tpot_s.value > plan.prediction.tpot_s.value
    assert again.slices[0].cause is not None
    assert again.slices[0].cause.why == "given by hand"


def test_edits_that_break_other_rules() -> None:
    two_devices = cluster(device("a", 6000), device("b", 6000))
    problem = Problem(toy([1000] * 4, kv_heads=0), two_devices, ONE, max_step_tokens=1)
    plan = solve(problem)
    group = _edited(plan, slices=(replace(plan.slices[0], devices=("a.0", "b.0"), blocks=(0, 4)),))
    with pytest.raises(PlanError, match=r"(?s)names 2 devices.*the dependable cross-vendor mode"):
        evaluate(problem, group)
    other = {"a.0": "b.0", "b.0": "a.0"}[plan.slices[0].devices[0]]
    with pytest.raises(PlanError, match="holds block 0, which is pinned to"):
        evaluate(problem, _edited(plan, pins={"0": other}))
    two = tuple(replace(plan.slices[0], devices=(d,), blocks=b) for d, b in (("a.0", (0, 2)), ("b.0", (2, 4))))
    with pytest.raises(PlanError, match="where a cut is forbidden"):
        evaluate(problem, _edited(plan, slices=two, forbidden_cuts=(2,)))
    with pytest.raises(PlanError, match="for 4 blocks and the model has 5"):
        evaluate(replace(problem, profile=toy([1] * 5)), plan)
    with pytest.raises(PlanError, match="the plan is for bfloat16"):
        evaluate(problem, _edited(plan, dtype="bfloat16"))
    small = cluster(device("a", 3000), device("b", 3000))
    with pytest.raises(FitError, match=r"a\.0 needs"):
        evaluate(replace(problem, cluster=small), _edited(plan, slices=(replace(two[0], blocks=(0, 4)),)))


@pytest.mark.parametrize("field", ["prompt_tokens", "output_tokens", "concurrency", "max_ttft_s", "max_tpot_s"])
def test_a_workload_of_nothing(field: str) -> None:
    with pytest.raises(UserError, match=f"{field} is 0"):
        solve(Problem(toy([1]), cluster(device("a", GB)), replace(ONE, **{field: 0})))


def test_two_devices_of_one_name() -> None:
    with pytest.raises(PlanError, match="two devices of the cluster are called a"):
        solve(Problem(toy([1]), cluster(device("a", GB), device("a", GB)), ONE))
