"""What slicing and fusing must keep, for any cut of any module."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st
from xdsl.dialects.builtin import ModuleOp

from plait.ir import block_count, kv_layouts, print_module, signature, verify, weights
from plait.ir.cover import cover
from plait.ir.module import block_range, boundary
from plait.ir.passes import (
    PASSES,
    SLICE_PIPELINE,
    SlicePass,
    parse_passes,
    print_passes,
    run_passes,
    slice_modules,
)
from tests.ir_models import Shape, build, in_chunks, random_weights, run
from tests.props.ir_strategies import shapes


@st.composite
def cuts(draw: st.DrawFn, blocks: int) -> list[tuple[int, int]]:
    inner = draw(st.sets(st.integers(1, blocks - 1))) if blocks > 1 else set()
    return list(pairwise([0, *sorted(inner), blocks]))


@st.composite
def sliced(draw: st.DrawFn) -> tuple[Shape, list[tuple[int, int]]]:
    shape = draw(shapes())
    return shape, draw(cuts(shape.blocks))


def logits(stages: list[ModuleOp], shape: Shape, seed: int) -> list[np.ndarray]:
    tensors = random_weights(build(shape), seed)
    options = {"page_tokens": 2, "max_step_tokens": 3, "vocabulary": shape.vocabulary, "seed": seed}
    lengths = (7, 4)
    return run(stages, tensors, lengths, in_chunks(lengths, 3), **options)


@given(sliced(), st.integers(0, 99))
@settings(max_examples=40, deadline=None)
def test_slices_compose_to_the_whole_bit_for_bit(drawn: tuple[Shape, list[tuple[int, int]]], seed: int) -> None:
    shape, ranges = drawn
    stages = slice_modules(build(shape), ranges)
    for stage in stages:
        verify(stage)
    whole = logits([build(shape)], shape, seed)
    assert all(np.isfinite(rows).all() and rows.any() for rows in whole)
    for one, other in zip(whole, logits(stages, shape, seed), strict=True):
        np.testing.assert_array_equal(one, other)
    for stage in stages:
        run_passes(stage, SLICE_PIPELINE)
    for one, other in zip(whole, logits(stages, shape, seed), strict=True):
        np.testing.assert_array_equal(one, other)


@given(shapes(), st.integers(0, 99), st.permutations(SLICE_PIPELINE))
@settings(max_examples=30, deadline=None)
def test_fusing_keeps_the_meaning_bit_for_bit(shape: Shape, seed: int, passes: list[object]) -> None:
    fused = build(shape)
    run_passes(fused, passes)  # type: ignore[arg-type]
    assert print_module(fused) != print_module(build(shape))
    for one, other in zip(logits([build(shape)], shape, seed), logits([fused], shape, seed), strict=True):
        np.testing.assert_array_equal(one, other)


@given(sliced())
@settings(max_examples=40, deadline=None)
def test_neighbours_agree_and_everything_is_covered(drawn: tuple[Shape, list[tuple[int, int]]]) -> None:
    shape, ranges = drawn
    module = build(shape)
    before = print_module(module)
    stages = slice_modules(module, ranges)
    assert print_module(module) == before, "slicing leaves the module alone"

    # What a slice returns is what the next one takes, by name, shape and dtype; only the ends differ.
    sides = [signature(stage) for stage in stages]
    for left, right in pairwise(sides):
        leaves = [boundary(name, value) for name, value in left.outputs.items()]
        enters = [boundary(name, value) for name, value in right.inputs.items()]
        assert leaves == enters
        assert [b.shape for b in leaves] == [(None, shape.hidden)]
    assert sides[0].inputs == {}
    assert list(sides[-1].outputs) == ["logits"]

    assert [block_range(stage) for stage in stages] == ranges
    assert sum(block_count(stage) for stage in stages) == shape.blocks
    assert sum((kv_layouts(stage, 16) for stage in stages), ()) == kv_layouts(module, 16)

    names = weights(module)
    found = cover(stages, [*names, "rotary.inv_freq"])
    assert set(found.slices) == set(names)
    assert found.unused == ("rotary.inv_freq",)
    tied = shape.tied and len(ranges) > 1
    assert found.replicated == (("model.embed_tokens.weight",) if tied else ())
    if tied:
        assert found.slices["model.embed_tokens.weight"] == (0, len(ranges) - 1)


@given(st.data())
@settings(max_examples=30, deadline=None)
def test_slicing_twice_is_slicing_once(data: st.DataObject) -> None:
    shape = data.draw(shapes())
    bounds = st.lists(st.integers(0, shape.blocks), min_size=2, max_size=2, unique=True).map(sorted)
    start, end = data.draw(bounds)
    inner = data.draw(st.lists(st.integers(start, end), min_size=2, max_size=2, unique=True).map(sorted))
    once, twice = build(shape), build(shape)
    run_passes(once, [SlicePass(*inner)])
    run_passes(twice, [SlicePass(start, end), SlicePass(*inner), SlicePass(*inner)])
    assert print_module(once) == print_module(twice)


@given(shapes())
@settings(max_examples=20, deadline=None)
def test_every_other_pass_is_idempotent(shape: Shape) -> None:
    once = build(shape)
    run_passes(once, SLICE_PIPELINE)
    twice = once.clone()
    run_passes(twice, SLICE_PIPELINE)
    assert print_module(once) == print_module(twice)


@given(st.lists(st.sampled_from([*SLICE_PIPELINE, SlicePass(0, 1), SlicePass(3, 12)]), max_size=6))
def test_passes_print_back_to_what_made_them(passes: list[object]) -> None:
    text = print_passes(passes)  # type: ignore[arg-type]
    assert list(parse_passes(text)) == passes
    assert print_passes(parse_passes(text)) == text


def test_every_pass_is_in_the_list() -> None:
    assert {type(item) for item in parse_passes("infer,fuse-linear,fuse-add-norm,slice{start=0 end=1}")} == set(
        PASSES.values()
    )
