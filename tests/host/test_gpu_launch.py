"""Launch plans: what is fused, what is refused, where buffers lie, and the file."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import replace
from itertools import combinations
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from xdsl.dialects.builtin import StringAttr

from plait.backends.base import CompileOptions
from plait.backends.conformance import families
from plait.backends.conformance.models import MODELS, QUANTISED, Attention, Model, attention, op
from plait.backends.kernels.gpu import arena
from plait.backends.kernels.gpu.archs import ARCHS
from plait.backends.kernels.gpu.held import quantised
from plait.backends.kernels.gpu.launch import ALIGNMENT, Activation, LaunchPlan
from plait.backends.kernels.gpu.lower import LOWERING
from plait.backends.kernels.gpu.table import KERNELS
from plait.errors import UnsupportedError, UserError
from plait.ir.module import ops
from plait.ir.ops import OPS, OpaqueOp
from plait.ir.types import QuantType
from plait.spec import from_json, to_json
from tests.host.gpu_slices import SMALL, module, plan


def _kernels(launches: LaunchPlan) -> list[str]:
    return [launches.binaries[step.choices[0].binary].kernel for step in launches.steps]


def _block(kernels: list[str], at: int = 1) -> list[str]:
    """What stands between the norms of one block and the next."""
    starts = [i for i, name in enumerate(kernels) if name == "rms_norm"]
    return kernels[starts[2 * at] : starts[2 * at + 2]]


def test_a_block_is_ten_launches() -> None:
    kernels = _kernels(plan(module(MODELS["gqa"])))
    attention = ["rope_write", "attention_decode", "attention_combine", "attention_prefill"]
    assert _block(kernels) == ["rms_norm", "gemm", *attention, "gemm", "rms_norm", "gemm_gated", "gemm"]
    assert kernels[:1] == ["embed"]
    assert kernels[-3:] == ["gather_rows", "gemm", "argmax"]


def test_a_short_window_needs_no_second_launch() -> None:
    kernels = _kernels(plan(module(Model((Attention(window=8), Attention())))))
    assert Counter(kernels)["attention_decode"] == 2
    assert Counter(kernels)["attention_combine"] == 1


def test_without_passes_the_plan_has_more_launches_and_no_strided_view() -> None:
    made = plan(MODELS["bias"]("float32"))
    kernels = Counter(_kernels(made))
    assert kernels["gemm"] == 2 * 7 + 1
    assert kernels["silu_mul"] == 2
    assert "gemm_gated" not in kernels


def test_q_k_v_are_views_of_one_product() -> None:
    made = plan(module(MODELS["gqa"]))
    step = next(step for step in made.steps if made.binaries[step.choices[0].binary].kernel == "rope_write")
    q, k, v = (step.pointers[name] for name in ("q", "k", "v"))
    assert q is not None and k is not None and v is not None
    assert q.buffer == k.buffer == v.buffer
    assert [q.offset, k.offset, v.offset] == [0, 6 * 16 * 4, (6 + 2) * 16 * 4]
    assert {step.scalars[f"{name}_stride"] for name in "qkv"} == {(6 + 2 + 2) * 16}
    (weight,) = (w for w in made.weights.values() if w.names == ("0.q.w", "0.k.w", "0.v.w"))
    assert weight.nbytes == (6 + 2 + 2) * 16 * 48 * 4


def test_a_residual_goes_into_the_product_before_it() -> None:
    made = plan(module(MODELS["gqa"]))
    added = [
        step
        for step in made.steps
        if made.binaries[step.choices[0].binary].constants.get("HAS_RESIDUAL") and step.pointers["residual"]
    ]
    assert [step.op for step in added] == [f"plait.linear (block {i})" for i in (0, 0, 1, 1)]
    assert "add" not in _kernels(made)


def test_a_product_that_two_read_is_added_apart() -> None:
    def build(b, rows):  # type: ignore[no-untyped-def]
        x = rows("x", 48)
        y = b.linear(x, "w", 48)
        return {"y": b.add(x, y), "z": y}

    made = plan(module(op(build)))
    assert _kernels(made) == ["embed", "gemm", "add"]


def test_ropes_that_differ_are_turned_apart() -> None:
    made = module(MODELS["gqa"])
    rope = next(item for item in ops(made) if item.name == "plait.rope")
    rope.properties["theta"] = type(rope.properties["theta"])(500.0, rope.properties["theta"].type)  # type: ignore[attr-defined]
    kernels = Counter(_kernels(plan(made)))
    assert kernels["rope"] == 2
    assert kernels["rope_write"] == 2


def test_every_kernel_gets_every_argument() -> None:
    for name in MODELS:
        made = plan(module(MODELS[name]))
        for step in made.steps:
            for choice in step.choices:
                binary = made.binaries[choice.binary]
                kernel = KERNELS[binary.kernel]
                assert tuple(binary.types) == kernel.pointers == tuple(step.pointers)
                assert tuple(binary.scalars) == tuple(kernel.scalars) == tuple(step.scalars)
                assert set(binary.constants) == set(kernel.constants)
                assert set(binary.tile) == set(kernel.tile)
            assert [choice.most for choice in step.choices][-1] is None


def test_what_a_binary_is_promised_is_so() -> None:
    """Alignment and reach, from the plan's own numbers."""
    made = plan(module(SMALL), options=CompileOptions(max_step_tokens=512, max_sequences=64))
    assert all(buffer.offset % ALIGNMENT == 0 for buffer in made.activations.values())
    for step in made.steps:
        aligned = set(made.binaries[step.choices[0].binary].aligned)
        small = set(made.binaries[step.choices[0].binary].small)
        for name, pointer in step.pointers.items():
            assert (name in aligned) == (pointer is None or pointer.offset % 16 == 0)
            assert (name in small) == (pointer is None or pointer.buffer not in made.pages)
        for name in aligned & set(step.scalars):
            value = step.scalars[name]
            assert isinstance(value, int) and value % 16 == 0


@pytest.mark.parametrize("name", list(MODELS))
def test_no_two_buffers_that_are_alive_overlap(name: str) -> None:
    made = plan(module(MODELS[name]))
    alive: dict[int, dict[int, str]] = {}
    for buffer, a in made.activations.items():
        assert a.offset + a.nbytes <= made.arena_bytes
        for step in range(a.first, a.last + 1):
            bytes_ = alive.setdefault(step, {})
            for block in range(a.offset // ALIGNMENT, -(-(a.offset + a.nbytes) // ALIGNMENT)):
                assert block not in bytes_, f"{buffer} and {bytes_[block]} share bytes in step {step}"
                bytes_[block] = buffer
    apart = sum(a.nbytes for a in made.activations.values())
    assert made.arena_bytes < apart / 2


@st.composite
def _buffers(draw: st.DrawFn) -> dict[str, Activation]:
    made = {}
    for i in range(draw(st.integers(1, 12))):
        first = draw(st.integers(-1, 9))
        made[f"a{i}"] = Activation("T", draw(st.integers(0, 2000)), "bf16", first, draw(st.integers(first, 10)))
    return made


def _bytes(buffer: Activation) -> set[int]:
    return {*range(buffer.offset, buffer.offset + buffer.nbytes)}


@given(_buffers())
def test_packing_is_sound_and_wastes_nothing_on_one(buffers: dict[str, Activation]) -> None:
    packed, nbytes = arena.pack(buffers, {"T": 3})
    assert list(packed) == list(buffers)
    for a, b in combinations(packed.values(), 2):
        assert not {*range(a.first, a.last + 1)} & {*range(b.first, b.last + 1)} or not _bytes(a) & _bytes(b)
    for name, buffer in packed.items():
        assert buffer.nbytes == 3 * 2 * buffer.width
        assert buffer.offset % ALIGNMENT == 0
        assert buffer.offset + buffer.nbytes <= nbytes
        assert replace(buffer, offset=0, nbytes=0) == buffers[name]
    most = max(
        sum(-(-b.nbytes // ALIGNMENT) * ALIGNMENT for b in packed.values() if b.first <= step <= b.last)
        for step in range(-1, 11)
    )
    assert nbytes <= sum(-(-b.nbytes // ALIGNMENT) * ALIGNMENT for b in packed.values())
    assert nbytes + ALIGNMENT > most


def test_what_the_head_reads_lives_as_long_as_it() -> None:
    """It may run several times."""
    made = plan(module(MODELS["gqa"]))
    step = made.steps[made.head]
    assert step.pointers["x"] is not None
    assert made.activations[step.pointers["x"].buffer].last == len(made.steps)


def test_a_plan_goes_to_json_and_back() -> None:
    made = plan(module(SMALL))
    assert from_json(LaunchPlan, to_json(made)) == made


@pytest.mark.parametrize(
    ("edit", "said"),
    [
        (lambda d: d | {"stepz": []}, "did you mean 'steps'"),
        (lambda d: d | {"schema": 2}, "launchplan.schema"),
        (lambda d: {k: v for k, v in d.items() if k != "arena_bytes"}, "'arena_bytes' is missing"),
        (lambda d: d | {"head": "1"}, "launchplan.head: expected a whole number"),
    ],
)
def test_a_plan_that_is_none_is_refused(edit, said: str) -> None:  # type: ignore[no-untyped-def]
    with pytest.raises(UserError) as caught:
        from_json(LaunchPlan, json.dumps(edit(json.loads(to_json(plan(module(SMALL)))))))
    assert said in str(caught.value)


def test_equal_modules_have_equal_plans() -> None:
    assert to_json(plan(module(SMALL))) == to_json(plan(module(SMALL)))


@pytest.mark.parametrize("kind", [kind for kind in OPS if kind is not OpaqueOp], ids=lambda kind: kind.name)
def test_an_unknown_attribute_is_refused_by_name(kind: type) -> None:
    gelu = op(lambda b, rows: {"y": b.gelu_mul(rows("x", 8), rows("z", 8))})
    models = [MODELS["bias"], MODELS["gqa"], gelu, *families.OPS.values(), *families.LATENTS.values()]
    found = [
        item
        for build in models
        for made in (build("float32"), module(build))
        for item in ops(made)
        if type(item) is kind
    ]
    found[0].attributes["strange_new_factor"] = StringAttr("2")
    with pytest.raises(UnsupportedError, match="strange_new_factor"):
        LOWERING.emit(found[0])


def test_heads_that_no_register_file_holds_are_refused() -> None:
    widest, wider = (
        next(item for item in ops(attention(Attention(head_dim=head_dim))("float32")) if item.name == "plait.attention")
        for head_dim in (256, 320)
    )
    assert LOWERING.supports(widest).ok
    with pytest.raises(UnsupportedError, match="head_dim = 320: heads have at most 256 features"):
        LOWERING.emit(wider)


def test_what_reads_logits_is_refused() -> None:
    def build(b, rows):  # type: ignore[no-untyped-def]
        scores = b.logits(rows("x", 48), "w", 61)
        return {"logits": b.add(scores, scores)}

    with pytest.raises(UnsupportedError, match="it reads logits"):
        plan(op(build)("float32"))


def test_bounds_are_those_of_the_options() -> None:
    made = plan(module(MODELS["gqa"]), options=CompileOptions(max_step_tokens=96, max_sequences=5, page_tokens=8))
    assert (made.bounds.tokens, made.bounds.sequences, made.bounds.page_tokens) == (96, 5, 8)
    assert made.bounds.rows == 8
    assert {layout.page_tokens for layout in made.kv} == {8}
    assert {binary.constants["PAGE_TOKENS"] for binary in made.binaries if "PAGE_TOKENS" in binary.constants} == {8}


def test_archs_get_their_own_tiles() -> None:
    made = module(MODELS["gqa"], "bfloat16")
    tiles = {arch: plan(made, f"x:{arch}").binaries for arch in ("sm_90a", "gfx942")}
    assert tiles["sm_90a"] != tiles["gfx942"]
    assert ARCHS["gfx942"].warp == 64


@pytest.mark.parametrize(
    ("arch", "format", "said"),
    [
        ("sm_90a", "e4m3fn-row", "1 kept as they are stored"),
        ("gfx942", "e4m3fn-row", "1 kept as they are stored"),
        ("sm_80", "e4m3fn-row", "1 of !plait.quant<f8E4M3FN, scale bf16 per row> dequantised when they are loaded"),
        ("sm_90a", "u4-min", "1 of !plait.quant<ui4, scale f16 group 32, min f16> dequantised when they are loaded"),
    ],
)
def test_a_report_says_how_quantised_weights_are_held(arch: str, format: str, said: str) -> None:
    made = module(QUANTISED[f"linear-{format}"], "bfloat16")
    launches = plan(made, f"x:{arch}")
    assert quantised(launches, made) == {"weights": said}
    codes = [weight for weight in launches.weights.values() if weight.part == "codes"]
    assert [weight.dtype for weight in codes] == (["e4m3fnuz" if arch == "gfx942" else "e4m3fn"] if codes else [])
    assert quantised(plan(module(SMALL)), module(SMALL)) == {}


def test_stacks_end_where_a_block_would_reach_over() -> None:
    """Of three matrices in blocks of 32 rows: 80 rows are not whole blocks."""
    kind = QuantType.get("e4m3fn", "float32", (32, 32))

    def build(rows: int) -> Any:
        return op(lambda b, x: _three(b, x("x", 64), rows), dict.fromkeys(("a.w", "b.w", "c.w"), kind))

    assert _kernels(plan(module(build(64), "bfloat16"))) == ["embed", "gemm_fp8"]
    assert _kernels(plan(module(build(80), "bfloat16"))) == ["embed", "gemm_fp8", "gemm_fp8", "gemm_fp8"]


def _three(b: Any, x: Any, rows: int) -> Any:
    return {name: b.linear(x, f"{name}.w", rows) for name in "abc"}
