"""Spec values as YAML and JSON, both ways and strictly; digests; error texts."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from plait.cost_models import cluster_for
from plait.errors import UserError, did_you_mean
from plait.partitioner import Problem, solve
from plait.spec import (
    WORKLOADS,
    Cluster,
    Device,
    Estimate,
    KVLayout,
    Link,
    Manifest,
    ManifestSlice,
    MemoryEstimate,
    Plan,
    PlannedSlice,
    Workload,
    digest,
    from_dict,
    from_json,
    from_yaml,
    kv_class,
    parse_targets,
    ring_pages,
    to_dict,
    to_json,
    to_yaml,
)
from tests.planning import llama

CLUSTER = cluster_for(parse_targets("2xh100@a,mi300@a,v5e"))
PLAN = solve(Problem(llama(blocks=3), CLUSTER, WORKLOADS["chat"], pins={"0": "h100.0"}, forbidden_cuts=(1,)))
MANIFEST = Manifest(
    "m",
    "llama",
    "0.1.0",
    128,
    4096,
    "float32",
    16,
    8,
    512,
    4096,
    "sha256:0",
    "sha256:1",
    (
        ManifestSlice(
            "0-h100",
            "h100.0",
            "cuda",
            "x:y",
            "cuda:sm_90a",
            "torch",
            "h100",
            (0, 3),
            (),
            (),
            (KVLayout(1, 4, "float32", 16),),
            "float32",
        ),
    ),
    weights={"model.safetensors": (12, "sha256:2")},
)


@pytest.mark.parametrize("value", [CLUSTER, PLAN, MANIFEST, *WORKLOADS.values()], ids=lambda v: type(v).__name__)
def test_round_trip(value: Any) -> None:
    assert from_yaml(type(value), to_yaml(value)) == value
    assert from_json(type(value), to_json(value)) == value
    assert digest(from_yaml(type(value), to_yaml(value))) == digest(value)


finite = st.floats(allow_nan=False, allow_infinity=False, width=32)
names = st.text(st.characters(codec="utf-8", exclude_categories=("Cc", "Cs")), max_size=8)


@given(
    st.builds(
        Device,
        id=names,
        name=names,
        backend=names,
        arch=names,
        host=names,
        memory_bytes=st.integers(0, 2**62),
        bandwidth_bytes_per_s=finite,
        peak_flops_per_s=st.dictionaries(names, finite, max_size=3),
        achieved=st.dictionaries(names, finite, max_size=2),
        free_bytes=st.none() | st.integers(0, 2**62),
        peer_bytes_per_s=st.none() | finite,
        sources=st.lists(names, max_size=2).map(tuple),
    )
)
def test_any_device_round_trips(value: Device) -> None:
    cluster = Cluster((value,), (Link(value.id, value.host, 1.0, 0.5),), default_link=None)
    assert from_yaml(Cluster, to_yaml(cluster)) == cluster
    assert from_json(Cluster, to_json(cluster)) == cluster


@given(
    st.builds(
        PlannedSlice,
        devices=st.lists(names, min_size=1, max_size=2).map(tuple),
        blocks=st.tuples(st.integers(0, 99), st.integers(0, 99)),
        prefill_s=st.none() | st.builds(Estimate, finite, finite, finite, st.sampled_from(["measured", "roofline"])),
        kv_tokens=st.none() | st.integers(0, 10**9),
    )
)
def test_any_slice_round_trips(value: PlannedSlice) -> None:
    plan = replace(PLAN, slices=(value,))
    assert from_yaml(Plan, to_yaml(plan)) == plan


def test_a_plan_is_for_people() -> None:
    text = to_yaml(PLAN)
    (start, end), (device,) = PLAN.slices[0].blocks, PLAN.slices[0].devices
    assert f"blocks: [{start}, {end}]" in text
    assert f"devices: [{device}]" in text
    assert "!!" not in text


BROKEN = {
    "unknown field": ({"prompt_toknes": 3}, "unknown field 'prompt_toknes'.*did you mean 'prompt_tokens'"),
    "wrong type": ({"prompt_tokens": "many"}, "workload.prompt_tokens: expected a whole number, got 'many'"),
    "bool is no number": ({"prompt_tokens": True}, "expected a whole number, got True"),
    "not a mapping": ([1], "expected a mapping of Workload fields"),
    "not finite": ({"max_ttft_s": float("inf")}, "expected a finite number"),
    "another schema": ({"schema": 2}, "workload.schema: expected one of 1, got 2"),
}


@pytest.mark.parametrize("case", BROKEN)
def test_the_reader_is_strict(case: str) -> None:
    data, says = BROKEN[case]
    with pytest.raises(UserError, match=f"(?s){says}") as caught:
        from_dict(Workload, data)
    assert caught.value.code == "spec-field"


def test_paths_name_the_field() -> None:
    data = to_dict(PLAN)
    data["slices"][0]["blocks"] = [0]
    with pytest.raises(UserError, match=r"plan\.slices\[0\]\.blocks: expected a list of 2 items"):
        from_dict(Plan, data)
    data = to_dict(PLAN)
    del data["dtype"]
    with pytest.raises(UserError, match="field 'dtype' is missing"):
        from_dict(Plan, data)
    data = to_dict(PLAN)
    data["objective"] = "speed"
    with pytest.raises(UserError, match="expected one of 'throughput', 'latency', 'capacity'"):
        from_dict(Plan, data)


@pytest.mark.parametrize(("reader", "text"), [(from_yaml, "a: ["), (from_json, "{")])
def test_broken_text(reader: Any, text: str) -> None:
    with pytest.raises(UserError, match="not valid"):
        reader(Plan, text)


def test_yaml_is_read_strictly_too() -> None:
    with pytest.raises(UserError, match="the key 'prompt_tokens' stands twice"):
        from_yaml(Workload, "prompt_tokens: 3\noutput_tokens: 2\nprompt_tokens: 4\n")
    assert from_yaml(Workload, "max_ttft_s: 3e-05\n").max_ttft_s == 3e-05
    assert from_yaml(Workload, to_yaml(Workload("2e5"))).name == "2e5"


def test_digest_sees_every_field_and_no_order() -> None:
    assert digest({"a": 1, "b": 2}) == digest({"b": 2, "a": 1})
    assert digest(replace(PLAN, page_tokens=32)) != digest(PLAN)
    assert digest(Workload()) == digest(Workload())


def test_did_you_mean() -> None:
    assert did_you_mean("h10", ["h100", "mi300x"]) == "did you mean 'h100'?"
    assert did_you_mean("zzz", ["h100"]) == ""


def test_memory_sums() -> None:
    memory = MemoryEstimate(1, 2, 3, 4, 5, 20)
    assert (memory.needed_bytes, memory.free_bytes) == (15, 5)


def test_kv_classes_and_rings() -> None:
    assert kv_class(None) == "full"
    assert kv_class(4096) == "window4096"


@given(st.integers(1, 40), st.integers(1, 8), st.integers(1, 12))
def test_a_ring_holds_every_key_that_is_still_needed(window: int, page: int, step: int) -> None:
    """Positions from the oldest key that the first new token sees to the last new token, wherever they start, lie in
    different slots of the ring."""
    pages = ring_pages(window, page, step)
    for start in range(3 * page):
        needed = range(start, start + window - 1 + step)
        slots = {(p // page % pages, p % page) for p in needed}
        assert len(slots) == len(needed)
    assert (pages - 1) * page < window - 1 + step  # one page less would be too few
