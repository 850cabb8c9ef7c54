"""Passes: what must not be fused, what infer repairs, what is refused."""

from __future__ import annotations

from collections import Counter

import pytest
from xdsl.dialects.builtin import ModuleOp
from xdsl.dialects.func import FuncOp
from xdsl.ir import BlockArgument, SSAValue
from xdsl.rewriter import Rewriter

from plait.errors import UsageError, VerifyError
from plait.ir import Builder, block_count, ops, print_module, signature, weights
from plait.ir.cover import cover
from plait.ir.module import main
from plait.ir.ops import WeightOp
from plait.ir.passes import SLICE_PIPELINE, parse_passes, run_passes, slice_modules
from plait.ir.types import KVType, element, tensor
from tests.ir_models import Shape, build


def counts(module: ModuleOp) -> Counter[str]:
    return Counter(op.name.removeprefix("plait.") for op in ops(module) if not isinstance(op, WeightOp))


def fused(module: ModuleOp) -> Counter[str]:
    run_passes(module, SLICE_PIPELINE)
    return counts(module)


def test_what_is_fused_in_a_decoder() -> None:
    module = build(Shape(blocks=3))
    assert counts(module) == {
        "embed": 1, "rms_norm": 7, "linear": 21, "rope": 6, "attention": 3, "silu_mul": 3, "add": 6, "logits": 1,
    }  # fmt: skip
    # The first norm follows the embedding, no add; o and down stand alone.
    assert fused(module) == {
        "embed": 1, "rms_norm": 1, "add_rms_norm": 6, "linear": 6, "linears": 6, "rope": 6, "attention": 3,
        "silu_mul": 3, "logits": 1,
    }  # fmt: skip


class Loose:
    """Builder of odd ends: `x` and `y` are two values of width 8."""

    def __init__(self) -> None:
        self.b = Builder("loose", "float32")
        self.x = self.b.embed("x", 4, 8)
        self.y = self.b.embed("y", 4, 8)

    def done(self, *values: SSAValue) -> Counter[str]:
        return fused(self.b.finish({f"out{i}": value for i, value in enumerate(values)}))


def test_linears_of_one_input_are_fused_and_of_two_are_not() -> None:
    one, two = Loose(), Loose()
    assert one.done(one.b.linear(one.x, "a", 8), one.b.linear(one.x, "b", 16))["linears"] == 1
    assert two.done(two.b.linear(two.x, "a", 8), two.b.linear(two.y, "b", 8))["linears"] == 0


def test_linears_with_and_without_bias_stay_apart() -> None:
    mixed = Loose()
    result = mixed.done(mixed.b.linear(mixed.x, "a", 8, "bias"), mixed.b.linear(mixed.x, "b", 8))
    assert (result["linear"], result["linears"]) == (2, 0)
    pairs = Loose()
    outs = [pairs.b.linear(pairs.x, f"w{i}", 8, f"bias{i}" if i % 2 else None) for i in range(4)]
    result = pairs.done(*outs)
    assert (result["linear"], result["linears"]) == (0, 2)


def test_linears_of_two_blocks_stay_apart() -> None:
    """Fused they would drag the weights of one block into the other, across any cut between them."""
    loose = Loose()
    loose.b.block = 0
    first = loose.b.linear(loose.x, "a", 8)
    loose.b.block = 1
    assert loose.done(first, loose.b.linear(loose.x, "b", 8))["linears"] == 0


def test_one_weight_in_two_groups_stays_in_front_of_both() -> None:
    loose = Loose()
    outs = [loose.b.linear(loose.x, "a", 8), loose.b.linear(loose.y, "b", 8)]
    outs += [loose.b.linear(loose.x, "shared", 8), loose.b.linear(loose.y, "shared", 8)]
    assert loose.done(*outs)["linears"] == 2


def test_a_sum_read_before_the_norm_is_not_fused() -> None:
    loose = Loose()
    total = loose.b.add(loose.x, loose.y)
    early = loose.b.silu_mul(total, loose.x)
    result = loose.done(early, loose.b.rms_norm(total, "w", 1e-5))
    assert (result["add"], result["rms_norm"], result["add_rms_norm"]) == (1, 1, 0)


def test_a_sum_read_after_the_norm_is_fused() -> None:
    loose = Loose()
    total = loose.b.add(loose.x, loose.y)
    normed = loose.b.rms_norm(total, "w", 1e-5)
    result = loose.done(normed, loose.b.silu_mul(total, loose.x), total)
    assert (result["add"], result["rms_norm"], result["add_rms_norm"]) == (0, 0, 1)


def test_two_norms_of_one_sum_are_fused_once() -> None:
    loose = Loose()
    total = loose.b.add(loose.x, loose.y)
    result = loose.done(loose.b.rms_norm(total, "w", 1e-5), loose.b.rms_norm(total, "v", 1e-5))
    assert (result["add"], result["rms_norm"], result["add_rms_norm"]) == (0, 1, 1)


def test_a_norm_of_no_sum_is_not_fused() -> None:
    loose = Loose()
    assert loose.done(loose.b.rms_norm(loose.b.silu_mul(loose.x, loose.y), "w", 1e-5))["add_rms_norm"] == 0


def test_infer_repairs_the_types_after_a_change_of_dtype() -> None:
    module = build(Shape(bias=True))
    for op in weights(module).values():
        Rewriter.replace_value_with_new_type(op.result, tensor(op.result.type.get_shape(), element("bfloat16")))
    for arg in main(module).body.block.args:
        if isinstance(arg.type, KVType):
            kind = KVType.get(arg.type.kv_heads.data, arg.type.head_dim.data, element("bfloat16"))
            Rewriter.replace_value_with_new_type(arg, kind)
    run_passes(module, parse_passes("infer"))
    assert print_module(module) == print_module(build(Shape(bias=True, dtype="bfloat16")))


def test_infer_repairs_the_function_of_a_slice() -> None:
    """The boundary's type is the function's too."""
    first = slice_modules(build(Shape(blocks=2)), [(0, 1), (1, 2)])[0]
    other = slice_modules(build(Shape(blocks=2, dtype="float16")), [(0, 1), (1, 2)])[0]
    for op in weights(first).values():
        Rewriter.replace_value_with_new_type(op.result, tensor(op.result.type.get_shape(), element("float16")))
    cache = next(arg for arg in main(first).body.block.args if isinstance(arg.type, KVType))
    Rewriter.replace_value_with_new_type(cache, KVType.get(2, 4, element("float16")))
    run_passes(first, parse_passes("infer"))
    assert print_module(first) == print_module(other)


def test_nothing_crosses_but_declared_boundaries() -> None:
    """Case H75: every value that a slice uses is made in its own body or is a typed argument of its function."""
    for module in slice_modules(build(Shape(blocks=3)), [(0, 1), (1, 2), (2, 3)]):
        function = main(module)
        own = {result for op in function.body.block.ops for result in op.results} | set(function.body.block.args)
        for op in function.body.block.ops:
            assert set(op.operands) <= own
        assert [op for op in module.walk() if isinstance(op, FuncOp)] == [function]
        declared = signature(module)
        args = [arg for arg in function.body.block.args if isinstance(arg, BlockArgument)]
        assert len(args) == 1 + len(declared.inputs) + len(declared.kv)


def test_values_that_skip_a_slice_pass_through_it() -> None:
    """A value made in block 0 and read in block 2 enters and leaves the slice of block 1."""
    b = Builder("skip", "float32")
    b.block = 0
    x = b.embed("table", 4, 8)
    b.block = 1
    y = b.rms_norm(x, "a", 1e-5)
    b.block = 2
    z = b.add(x, y)
    module = b.finish({"z": z, "early": x})
    first, middle, last = (signature(s) for s in slice_modules(module, [(0, 1), (1, 2), (2, 3)]))
    assert list(first.outputs) == list(middle.inputs) == ["x0"]
    assert list(middle.outputs) == list(last.inputs) == ["x0", "x1"]
    assert middle.outputs["x0"] is middle.inputs["x0"]
    assert list(last.outputs) == ["z", "early"]


def test_a_weight_of_two_blocks_does_not_count_as_a_block() -> None:
    b = Builder("shared", "float32")
    b.block = 0
    x = b.rms_norm(b.embed("table", 4, 8), "shared", 1e-5)
    b.block = 1
    module = b.finish({"y": b.rms_norm(x, "shared", 1e-5)})
    slices = slice_modules(module, [(0, 1), (1, 2)])
    assert [block_count(item) for item in slices] == [1, 1]
    assert cover(slices, weights(module)).replicated == ("shared",)


@pytest.mark.parametrize("ranges", [[(0, 1)], [(0, 1), (2, 3)], [(0, 2), (1, 3)], [(0, 1), (1, 4)], [(1, 3)], []])
def test_ranges_that_do_not_cover_the_blocks_are_refused(ranges: list[tuple[int, int]]) -> None:
    with pytest.raises(UsageError, match=r"leaves a gap or an overlap in blocks \[0, 3\)"):
        slice_modules(build(Shape(blocks=3)), ranges)


@pytest.mark.parametrize("text", ["slice{start=2 end=2}", "slice{start=1 end=4}", "slice{start=3 end=1}"])
def test_a_slice_of_blocks_that_are_not_there_is_refused(text: str) -> None:
    module = build(Shape(blocks=3))
    before = print_module(module)
    with pytest.raises(UsageError, match=r"no blocks \[\d, \d\) in a module of blocks \[0, 3\)"):
        run_passes(module, parse_passes(text))
    assert print_module(module) == before


@pytest.mark.parametrize(
    ("text", "code", "words"),
    [
        ("fuse-liner", "pass-unknown", "did you mean 'fuse-linear'"),
        ("slise{start=0 end=1}", "pass-unknown", "did you mean 'slice'"),
        ("slice{start=zero end=1}", "pass-option", "zero"),
        ("slice{start=0}", "pass-option", "end"),
        ("fuse-linear{eps=1}", "pass-option", "eps"),
        ("fuse-linear{", "pass-syntax", "argument name"),
        ("infer,,infer", "pass-syntax", "pass"),
    ],
)
def test_bad_passes_are_usage_errors(text: str, code: str, words: str) -> None:
    with pytest.raises(UsageError) as caught:
        parse_passes(text)
    assert caught.value.code == code
    assert caught.value.exit_code == 64
    assert words in str(caught.value)


def test_cover_names_a_missing_tensor() -> None:
    slices = slice_modules(build(Shape(blocks=2)), [(0, 1), (1, 2)])
    names = set(weights(build(Shape(blocks=2)))) - {"model.layers.1.mlp.up_proj.weight"}
    with pytest.raises(VerifyError, match=r"slice 1 needs the tensor 'model\.layers\.1\.mlp\.up_proj\.weight'"):
        cover(slices, names)


def test_a_deep_model_keeps_linear() -> None:
    """Twice the blocks, about twice the work: counted in calls, not in seconds."""
    import cProfile
    import pstats

    def calls(blocks: int) -> int:
        profile = cProfile.Profile()
        profile.enable()
        module = build(Shape(blocks=blocks))
        for stage in slice_modules(module, [(0, blocks // 2), (blocks // 2, blocks)]):
            run_passes(stage, SLICE_PIPELINE)
            print_module(stage)
        profile.disable()
        return int(pstats.Stats(profile).total_calls)  # type: ignore[attr-defined]

    calls(2)
    small, large = calls(16), calls(64)
    assert large < 4.4 * small, f"{small} calls for 16 blocks, {large} for 64"
