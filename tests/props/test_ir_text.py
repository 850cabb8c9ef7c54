"""Text and back: every op, type and attribute, and what happens to damaged text."""

from __future__ import annotations

import struct
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from xdsl.dialects.builtin import FloatAttr, ModuleOp, StringAttr

from plait.errors import VerifyError
from plait.ir import Builder, ops, parse_module, print_module, read_module, signature, verify, weights
from plait.ir.ops import OPS
from plait.ir.passes import SLICE_PIPELINE, run_passes
from tests.golden.test_ir_text import families_module
from tests.ir_models import Shape, build
from tests.props.ir_strategies import NAMES, POSITIVE, Made, modules


def check_round_trip(module: ModuleOp) -> ModuleOp:
    text = print_module(module)
    again = parse_module(text)
    assert print_module(again) == text
    assert again.is_structurally_equivalent(module)
    return again


@given(modules())
@settings(max_examples=60, deadline=None)
def test_round_trip(made: Made) -> None:
    check_round_trip(made.module)


@given(modules())
@settings(max_examples=40, deadline=None)
def test_round_trip_after_the_passes(made: Made) -> None:
    run_passes(made.module, SLICE_PIPELINE)
    check_round_trip(made.module)


def test_every_op_makes_the_trip() -> None:
    plain, fused, b = build(Shape(bias=True)), build(Shape(bias=True)), Builder("m", "float32")
    run_passes(fused, SLICE_PIPELINE)
    families = families_module()
    x = b.embed("table", 4, 8)
    gelu, b = b.finish({"y": b.gelu_mul(x, x)}), Builder("m", "float32")
    b.block = 0
    program = {"programs": ["module {}"], "lengths": [8], "flops": [1], "vocabulary": 7}
    opaque = b.finish({"logits": b.opaque({"w": ((3, 4), "float32")}, **program)})
    seen = {type(op) for module in (plain, fused, gelu, families, opaque) for op in ops(check_round_trip(module))}
    assert seen == set(OPS)


@given(POSITIVE)
@settings(deadline=None)
def test_float_attributes_keep_every_bit(value: float) -> None:
    b = Builder("m", "float32")
    module = b.finish({"y": b.rms_norm(b.embed("table", 4, 8), "w", value)})
    again = [op.properties["eps"] for op in ops(parse_module(print_module(module))) if "eps" in op.properties]
    assert isinstance(again[0], FloatAttr)
    assert struct.pack("<d", again[0].value.data) == struct.pack("<d", value)


@given(st.lists(NAMES, min_size=4, max_size=4, unique=True))
@settings(deadline=None)
def test_names_keep_every_character(names: list[str]) -> None:
    model, table, weight, output = names
    b = Builder(model, "float32")
    again = parse_module(print_module(b.finish({output: b.rms_norm(b.embed(table, 4, 8), weight, 1e-5)})))
    assert list(weights(again)) == [table, weight]
    assert list(signature(again).outputs) == [output]
    assert again.attributes["plait.model"] == StringAttr(model)


TEXTS = (print_module(build(Shape(blocks=2, windows=(None, 8)))), print_module(families_module()))


@given(st.data())
@settings(max_examples=150, deadline=None)
def test_damaged_text_is_refused_or_read_soundly(data: st.DataObject) -> None:
    """Whatever is done to the text: a VerifyError, or a module that holds every rule. Never another exception."""
    text = data.draw(st.sampled_from(TEXTS))
    for _ in range(data.draw(st.integers(1, 3))):
        start = data.draw(st.integers(0, len(text) - 1))
        end = data.draw(st.integers(start, min(start + 40, len(text))))
        filler = st.text(max_size=4) | st.sampled_from(
            ["%1", "%5", "{", "}", "tensor<?x16xf32>", "-1", "9" * 30, '"', "()"]
        )
        text = text[:start] + data.draw(filler) + text[end:]
    try:
        module = parse_module(text)
    except VerifyError:
        return
    verify(module)
    signature(module)
    print_module(module)


@given(st.data())
@settings(max_examples=150, deadline=None)
def test_damaged_tokens_are_refused_or_read_soundly(data: st.DataObject) -> None:
    """The same with whole words swapped for other words of the text, which gets past the parser more often."""
    words = data.draw(st.sampled_from(TEXTS)).split(" ")
    for _ in range(data.draw(st.integers(1, 3))):
        words[data.draw(st.integers(0, len(words) - 1))] = data.draw(st.sampled_from(words))
    try:
        module = parse_module(" ".join(words))
    except VerifyError:
        return
    signature(module)
    print_module(module)


def test_a_file_that_is_no_text(tmp_path: Path) -> None:
    path = tmp_path / "slice.mlir"
    path.write_bytes(b"\xff\xfe\x00module")
    with pytest.raises(VerifyError, match=r"slice\.mlir is not a plait module"):
        read_module(path)
    path.write_text(TEXTS[0], encoding="utf-8")
    assert print_module(read_module(path)) == TEXTS[0]
