"""Profile, roofline, memory and network against formulas written here and against the sliced modules themselves."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from plait.cost_models.memory import MemoryModel
from plait.cost_models.network import hop_s, link_between
from plait.cost_models.profile import KVFacts, at_element_bytes, profile
from plait.cost_models.roofline import PESSIMISTIC, decode_step, prefill_steps, rates, unit_times
from plait.cost_models.tables import slice_maxima, slice_sums
from plait.errors import UserError
from plait.ir import weights
from plait.ir.passes.slice import slice_modules
from plait.spec import Link, Workload, ring_pages
from tests.ir_models import Shape, build
from tests.planning import GB, GIB, cluster, device, llama, toy

ONE_BLOCK = {"blocks": 1, "hidden": 64, "heads": 4, "kv_heads": 2, "head_dim": 16, "ffn": 96, "vocabulary": 128}


def test_llama_405b_has_its_published_parameters() -> None:
    model = llama(
        blocks=126,
        hidden=16384,
        heads=128,
        kv_heads=8,
        head_dim=128,
        ffn=53248,
        vocabulary=128256,
        tied=False,
        dtype="bfloat16",
    )
    assert model.weight_bytes == 2 * 405_853_388_800  # parameters of the published checkpoint
    assert len({unit.facts for unit in model.blocks}) == 1  # equal blocks are costed once
    assert set(model.boundary_bytes_per_token) == {16384 * 2}
    assert model.logits_bytes_per_row == 4 * 128256
    assert model.blocks[0].facts.kv == (KVFacts(8, 128, 2),)


def test_blocks_may_differ() -> None:
    model = llama(blocks=4, windows=(None, 8))
    facts = [unit.facts for unit in model.blocks]
    assert facts[0] is facts[2]
    assert facts[1] is facts[3]
    assert facts[0] is not facts[1]
    assert [f.kv[0].window for f in facts] == [None, 8, None, 8]


@pytest.mark.parametrize("tied", [False, True])
def test_weights_of_a_slice_are_those_of_its_module(tied: bool) -> None:
    """Uneven stages [1, 2, 2, 3]: each from its own tensors, against the modules that really are cut."""
    module = build(Shape(blocks=8, tied=tied))
    memory = MemoryModel(profile(module), Workload(), 16, 512)
    cuts = [(0, 1), (1, 3), (3, 5), (5, 8)]
    for (start, end), part in zip(cuts, slice_modules(module, cuts), strict=True):
        held = sum(4 * int(np.prod(op.result.type.get_shape())) for op in weights(part).values())
        assert memory.estimate(start, end, device("x", GB)).weights_bytes == held
    whole = sum(4 * int(np.prod(op.result.type.get_shape())) for op in weights(module).values())
    assert memory.weights[0, 8] == whole  # a tied embedding once on one slice ...
    parts = sum(memory.weights[start, end] for start, end in cuts)
    assert parts == whole + (4 * 32 * 16 if tied else 0)  # ... and twice on two


def test_average_layers_would_underestimate() -> None:
    """Megatron-Bridge PR 5077: the heaviest stage of [1, 2, 2, 3] is more than the average."""
    memory = MemoryModel(llama(blocks=8), Workload(), 16, 512)
    heaviest = max(memory.weights[s, e] for s, e in [(0, 1), (1, 3), (3, 5), (5, 8)])
    assert heaviest > 1.3 * memory.weights[0, 8] / 4


@settings(max_examples=50, deadline=None)
@given(st.lists(st.integers(0, 100), min_size=3, max_size=9))
def test_slice_tables(values: list[int]) -> None:
    blocks = len(values) - 2
    sums, maxima = slice_sums(values), slice_maxima(values)
    for start in range(blocks):
        for end in range(start + 1, blocks + 1):
            units = values[start + 1 : end + 1]
            units += values[:1] if start == 0 else []
            units += values[-1:] if end == blocks else []
            assert sums[start, end] == sum(units)
            assert maxima[start, end] == max(units)


def test_decode_is_weights_over_bandwidth() -> None:
    """One request on a memory-bound device: every op's bytes, counted here by hand."""
    model = llama(**ONE_BLOCK)
    work = Workload("one", prompt_tokens=10, output_tokens=1, concurrency=1)
    slow = device("slow", GB, bandwidth=1e6, peak=1e18)
    times = unit_times(model, slow, work, 512)
    h, wide, narrow, ffn, kv = 64, 64, 32, 96, 11
    linears = [(h, wide), (h, narrow), (h, narrow), (wide, h), (h, ffn), (h, ffn), (ffn, h)]
    values = sum(i * o + i + o for i, o in linears)  # weight, input, output of each product
    values += 2 * (h + 2 * h)  # two norms: weight, in, out
    values += 2 * (wide + narrow)  # rope of q and k: in and out
    values += 2 * wide + 2 * narrow + (kv + 1) * 2 * narrow  # attention: q, out, k, v; KV read and appended
    values += 3 * ffn + 2 * 3 * h  # silu_mul, two adds
    assert times.decode_s[1] == pytest.approx(4 * values / 1e6, rel=0.03)


def test_prefill_is_flops_over_peak() -> None:
    model = llama(**ONE_BLOCK)
    work = Workload("one", prompt_tokens=200, output_tokens=1, concurrency=1)
    times = unit_times(model, device("slow", GB, bandwidth=1e18, peak=1e9), work, 512)
    matmuls = 2 * 200 * (64 * 64 * 2 + 2 * 64 * 32 + 3 * 64 * 96)
    scores = 4 * 64 * (200 * 201 // 2)
    assert times.prefill_s[1] == pytest.approx((matmuls + scores) / 1e9, rel=0.1)
    assert times.prefill_s[2] == pytest.approx((2 * 64 * 128 + 4 * 64 * 200) / 1e9)  # one row of logits, 200 of norm


def test_chunked_prefill_reads_the_weights_once_per_chunk() -> None:
    work = Workload("long", prompt_tokens=1200, output_tokens=1, concurrency=1)
    steps = prefill_steps(work, 512)
    assert [(s.query_lens, s.kv_lens, s.logit_rows) for s in steps] == [
        ((512,), (512,), 0),
        ((512,), (1024,), 0),
        ((176,), (1200,), 1),
    ]
    model = toy([1000, 1000])
    times = unit_times(model, device("x", GB, bandwidth=1000.0, overhead_s=0.5), work, 512)
    assert times.prefill_s[1] == pytest.approx(3.0)
    assert times.prefill_overhead_s == pytest.approx(1.5)
    assert times.decode_s[1] == pytest.approx(1.0)


def test_decode_is_at_the_mean_context() -> None:
    step = decode_step(Workload("w", 100, 50, 4))
    assert step.query_lens == (1,) * 4
    assert step.kv_lens == (125,) * 4


def test_ranges() -> None:
    model, work = llama(), Workload()
    slow = replace(device("x", GB, overhead_s=1e-4), achieved={"float32": 0.5}, bandwidth_achieved=0.5)
    value, nominal = unit_times(model, slow, work, 512), unit_times(model, slow, work, 512, nominal=True)
    assert (nominal.decode_s < value.decode_s).all()
    assert value.decode_s.sum() == pytest.approx(2 * nominal.decode_s.sum())
    assert nominal.decode_overhead_s == 0
    assert PESSIMISTIC > 1


def test_a_dtype_without_a_peak_is_refused() -> None:
    with pytest.raises(UserError, match="no peak for float16") as caught:
        rates(device("x", GB), "float16")
    assert caught.value.code == "device-dtype"


def test_kv_of_32_gib() -> None:
    """unsloth PR 4623: 5.6 GB of weights, 262,144 tokens of context and 32 GiB of KV."""
    model = toy([1] * 32, kv_heads=8, head_dim=64)  # float32 x 2 = 128 KiB per token over all layers
    work = Workload("huge", 262_143 - 15, 16, 1)
    memory = MemoryModel(model, work, 16, 512)
    assert memory.kv[0, 32] == 32 * GIB


def test_kv_of_windows() -> None:
    """Half the layers see a window: half the KV, not all of it (gguf-parser-go 32: 6.0 against 3.0 GiB)."""
    tokens, layers, page = 131072, 24, 16
    work = Workload("long", tokens - 1, 1, 1)
    full = MemoryModel(toy([1] * layers, kv_heads=8, head_dim=32), work, page, 512)
    half = MemoryModel(toy([1] * layers, kv_heads=8, head_dim=32, windows=[None, 128] * (layers // 2)), work, page, 512)
    per_token = 2 * 8 * 32 * 4
    assert full.kv[0, layers] == 6 * GIB
    ring = ring_pages(128, page, 512) * page
    assert half.kv[0, layers] == 3 * GIB + layers // 2 * ring * per_token
    assert ring < 700
    # per stage from its own layers: a stage of window layers only holds rings
    assert half.kv[1, 2] == ring * per_token
    assert half.kv[0, 1] == tokens * per_token


def test_a_short_context_needs_no_whole_ring() -> None:
    facts = KVFacts(1, 1, 4, window=4096)
    assert facts.pages(100, 16, 512) == 7
    assert facts.pages(10**6, 16, 512) == ring_pages(4096, 16, 512)


def test_kv_is_whole_pages() -> None:
    memory = MemoryModel(toy([1]), Workload("w", 16, 1, 3), 16, 512)
    assert memory.kv[0, 1] == 3 * 32 * 8


def test_fit_counts_everything() -> None:
    model = llama(**{**ONE_BLOCK, "blocks": 4})
    work = Workload("w", 100, 28, 4)
    x = device("x", GB)
    parts = MemoryModel(model, work, 16, 64).estimate(0, 4, x)
    assert parts.kv_bytes == 4 * 128 * 4 * (2 * 2 * 16 * 4)
    assert parts.logits_bytes == 4 * 128 * 4
    # the block's results per token: norms, q, k, v, rope, attention, o, adds, gate, up, silu, down
    block = 2 * 64 + (64 + 32 + 32) + (64 + 32) + 64 + 64 + 64 + 3 * 96 + 64 + 64
    assert parts.activations_bytes == 64 * 4 * block
    assert parts.needed_bytes == sum(
        (parts.weights_bytes, parts.kv_bytes, parts.activations_bytes, parts.logits_bytes, parts.reserve_bytes)
    )
    assert parts.free_bytes == GB - parts.needed_bytes


def test_kv_tokens_of_three_stages() -> None:
    """vllm PR 50735: the pipeline's KV tokens are the least of free after weights over the KV bytes of the stage."""
    model = toy([1000, 2000, 3000], kv_heads=2, head_dim=4)
    memory = MemoryModel(model, Workload("w", 8, 8, 1), 4, 1)
    sizes = (10_000, 20_000, 9_000)
    per_token = 2 * 2 * 4 * 4
    for i, size in enumerate(sizes):
        fixed = memory.estimate(i, i + 1, device("x", size))
        room = size - fixed.weights_bytes - fixed.activations_bytes - fixed.logits_bytes
        assert memory.kv_tokens(device("x", size))[i, i + 1] == room // (4 * per_token) * 4


@settings(max_examples=60, deadline=None)
@given(
    windows=st.lists(st.sampled_from([None, None, 4, 40]), min_size=1, max_size=5),
    memory_bytes=st.integers(5_000, 2_000_000),
    requests=st.integers(1, 5),
    page=st.sampled_from([1, 4, 16]),
)
def test_largest_context(windows: list[int | None], memory_bytes: int, requests: int, page: int) -> None:
    """fak 1045: the largest context fits, one page more does not."""
    model = toy([100] * len(windows), kv_heads=2, head_dim=2, windows=windows)
    x, n = device("x", memory_bytes), len(windows)
    found = MemoryModel(model, Workload("w", 1, 1, requests), page, 8).max_context_tokens(0, n, x)

    def fits(tokens: int) -> bool:
        work = Workload("w", tokens - 1, 1, requests)
        return bool(MemoryModel(model, work, page, 8).needed(x)[0, n] <= memory_bytes)

    if found is None:
        assert None not in windows
        assert fits(10**7)
    else:
        assert found % page == 0
        assert found == 0 or fits(found)
        assert not fits(found + page)


def test_half_the_bytes() -> None:
    model = llama(blocks=4)
    half = at_element_bytes(model, 0.5, "bfloat16")
    assert half.weight_bytes * 2 == model.weight_bytes
    assert half.blocks[0].facts is half.blocks[1].facts
    direct = llama(blocks=4, dtype="bfloat16")
    assert half.weight_bytes == direct.weight_bytes
    assert half.blocks[0].facts.kv == direct.blocks[0].facts.kv
    assert half.blocks[0].facts.activation_bytes_per_token == direct.blocks[0].facts.activation_bytes_per_token
    assert half.boundary_bytes_per_token == direct.boundary_bytes_per_token


def test_links_go_one_way_and_devices_before_hosts() -> None:
    a, b = device("a", GB, host="x"), device("b", GB, host="y")
    named = (Link("a.0", "b.0", 5.0, 1.0), Link("x", "y", 7.0, 2.0), Link("y", "x", 9.0, 3.0))
    c = cluster(a, b, links=named)
    assert link_between(c, a, b).bytes_per_s == 5.0
    assert link_between(c, b, a).bytes_per_s == 9.0
    assert hop_s(link_between(c, a, b), 10) == 3.0


def test_equal_chips_of_a_host_are_peers() -> None:
    a, b = (device("a", GB, host="x", index=i, peer=1e11) for i in range(2))
    other = device("b", GB, host="x", peer=1e11)
    c = cluster(a, b, other)
    assert link_between(c, a, b).kind == "peer"
    assert link_between(c, a, other) == c.local_link


def test_no_path_is_refused() -> None:
    a, b = device("a", GB), device("b", GB)
    with pytest.raises(UserError, match="no link leads from a"):
        link_between(replace(cluster(a, b), default_link=None), a, b)
