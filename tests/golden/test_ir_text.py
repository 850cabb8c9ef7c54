"""Golden texts: a module, its slices, what the fusions make of them, and every complaint of the verifier."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest
from xdsl.dialects.builtin import ModuleOp
from xdsl.rewriter import Rewriter

import plait.ir
from plait.errors import VerifyError
from plait.ir import Builder, Rope, parse_module, print_module, weights
from plait.ir.passes import SLICE_PIPELINE, parse_passes, run_passes, slice_modules
from plait.ir.quant import quantise_types
from plait.ir.types import PackedType, QuantType, element, tensor
from tests.golden.conftest import Golden
from tests.ir_models import Shape, build

TINY = Shape(blocks=2, windows=(None, 8), softcap=30.0)


def quantised_module() -> ModuleOp:
    """Every way to quantise, FP8 KV, sinks and GELU, in one block."""
    b = Builder("m", "float32")
    x = b.embed("table", 32, 16)
    b.block = 0
    q, k, v = (b.linear(b.rms_norm(x, "norm", 1e-5), f"{n}.w", width) for n, width in (("q", 16), ("k", 8), ("v", 8)))
    shape = {"heads": 4, "kv_heads": 2, "head_dim": 4, "scale": 0.5}
    y = b.attention(q, k, v, sinks="sinks", kv_dtype="e4m3fn", **shape)
    y = b.gelu_mul(b.linear(y, "gate.w", 24), b.linear(y, "up.w", 24), "tanh")
    for name, width in (("nvfp4.w", 32), ("mxfp4.w", 64), ("nf4.w", 64), ("u8.w", 256), ("packed.w", 24)):
        y = b.linear(y, name, width)
    b.block = None
    module = b.finish({"logits": b.logits(b.linear(y, "down.w", 16), "head", 32)})
    kinds = {
        "table": QuantType.get("i8", "float16", (1, 8)),
        "q.w": QuantType.get("e4m3fn", "float32", (8, 12)),
        "k.w": QuantType.get("e4m3fn"),
        "v.w": QuantType.get("e5m2", "bfloat16", (1, 0)),
        "gate.w": QuantType.get("u4", "float16", (1, 4), zero=8),
        "up.w": QuantType.get("u4", "float16", (1, 4), zero="float16"),
        "down.w": QuantType.get("u4", "float16", (1, 24), minimum="float16"),
        "nvfp4.w": QuantType.get("e2m1", "e4m3fn", (1, 8), outer=True),
        "mxfp4.w": QuantType.get("e2m1", "e8m0", (1, 32)),
        "nf4.w": QuantType.get("nf4", "float32", (1, 64)),
        "u8.w": QuantType.get("u8", "float16", (1, 32), zero="float16", ordered=True),
        "packed.w": PackedType.get("Q4_K"),
        "head": QuantType.get("e4m3fnuz"),
    }
    quantise_types(module, kinds)
    return module


def opaque_module() -> ModuleOp:
    """Two StableHLO programs, of 8 and 16 tokens."""
    b = Builder("opaque", "float32")
    b.block = 0
    weights = {"w": ((3, 4), "float32"), "b": ((4,), "bfloat16")}
    programs = ['module {\n  "eight"\n}', "module {}"]
    return b.finish({"logits": b.opaque(weights, programs=programs, lengths=[8, 16], flops=[10, 20], vocabulary=7)})


def families_module() -> ModuleOp:
    """Every op and attribute that some families alone have, in two blocks."""
    b = Builder("m", "float32")
    x = b.scale(b.add(b.embed("table", 32, 16), b.embed_positions("places", 64, 16)), 4.0)
    b.block = 0
    h = b.layer_norm(x, "in", "in.b", 1e-5)
    yarn = Rope(1e4, "yarn", 8.0, None, None, 4096, beta_fast=32.0, beta_slow=1.0, truncate=1, attention_factor=1.25)
    q_latent = b.head_linear(b.linear(h, "q", 16), "k_b", (2, 8, 6), transposed=True)
    q_rope, k_rope = (b.rope(b.linear(h, name, width), 4, yarn) for name, width in (("q_r", 8), ("k_r", 4)))
    y = b.latent_attention(q_latent, q_rope, b.linear(h, "kv_a", 6), k_rope, heads=2, scale=0.5)
    x = b.add(x, b.head_linear(y, "v_b", (2, 8, 6)))
    x = b.add(x, b.linear(b.gelu(b.linear(b.layer_norm(x, "post", None, 1e-5), "fc", 24), "tanh"), "proj", 16))
    b.block = 1
    h = b.rms_norm(x, "in1", 1e-6, offset=1.0)
    q, k = (b.linear(h, name, width) for name, width in (("q1", 16), ("k1", 8)))
    longrope = Rope(1e4, "longrope", factors=(1.0, 2.5), attention_factor=1.5)
    q, k = b.rms_norm(q, "q_n", 1e-6, group=8, offset=1.0), b.layer_norm(k, "k_n", None, 1e-6, group=8, per_group=True)
    q, k = (b.rope(y, 8, longrope, 4) for y in (q, k))
    x = b.add(x, b.attention(q, k, b.linear(h, "v1", 8), heads=2, kv_heads=1, head_dim=8, scale=0.5))
    h = b.rms_norm(x, "post1", 1e-6)
    routing = b.router(
        h,
        "router",
        4,
        bias="router.b",
        selection_bias="selection",
        experts_per_token=2,
        scoring="sigmoid",
        normalise=1e-20,
        scale=2.5,
        groups=2,
        groups_per_token=1,
        group_score="top2",
    )
    stacks = ("gate", "up", "down")
    mixed = b.experts(
        h,
        routing,
        stacks,
        24,
        biases=("gate.b", "up.b", "down.b"),
        experts_per_token=2,
        activation="clamped_swiglu",
        alpha=1.5,
        limit=7.0,
    )
    plain = b.experts(h, routing, ("gate2", "up2", "down2"), 24, experts_per_token=2)
    b.block = None
    module = b.finish({"logits": b.logits(b.add(mixed, plain), "head", 32, scale=0.25, softcap=30.0)})
    quantise_types(module, dict.fromkeys(("gate2", "up2", "down2"), QuantType.get("e2m1", "e8m0", (1, 8))))
    return module


def test_families_module(golden: Golden) -> None:
    golden("ir/families.mlir", print_module(families_module()))


def test_opaque_module(golden: Golden) -> None:
    golden("ir/opaque.mlir", print_module(opaque_module()))


def test_quantised_module(golden: Golden) -> None:
    golden("ir/quantised.mlir", print_module(quantised_module()))


def test_module(golden: Golden) -> None:
    golden("ir/module.mlir", print_module(build(TINY)))


def test_biased_untied_module(golden: Golden) -> None:
    golden("ir/biased.mlir", print_module(build(Shape(blocks=1, bias=True, tied=False, dtype="bfloat16"))))


@pytest.mark.parametrize("passes", ["fuse-linear", "fuse-add-norm", "fuse-linear,fuse-add-norm"])
def test_fusions(golden: Golden, passes: str) -> None:
    module = build(Shape(blocks=1, bias=True))
    run_passes(module, parse_passes(passes))
    golden(f"ir/{passes.replace(',', '+')}.mlir", print_module(module))


def test_slices(golden: Golden) -> None:
    """Two blocks cut in two: the tied embedding is in both, `x0` is all that crosses (case H75)."""
    for index, module in enumerate(slice_modules(build(TINY), [(0, 1), (1, 2)])):
        golden(f"ir/slice{index}.mlir", print_module(module))


def test_slice_after_its_pipeline(golden: Golden) -> None:
    module = slice_modules(build(TINY), [(0, 1), (1, 2)])[1]
    run_passes(module, SLICE_PIPELINE)
    golden("ir/slice1-fused.mlir", print_module(module))


def test_dump_after_each_pass(tmp_path: Path) -> None:
    module = build(TINY)
    run_passes(module, parse_passes("infer,fuse-linear"), dump=tmp_path / "dump", name="tiny")
    assert sorted(p.name for p in (tmp_path / "dump").iterdir()) == ["tiny.0-infer.mlir", "tiny.1-fuse-linear.mlir"]
    assert (tmp_path / "dump/tiny.1-fuse-linear.mlir").read_text() == print_module(module)


# Edits that break a rule: (what, module, regular expression in its text, replacement).
ONE = build(Shape(blocks=1, windows=(8,), softcap=30.0))
FUSED = build(Shape(blocks=1, bias=True, tied=False))
run_passes(FUSED, SLICE_PIPELINE)
CUT = slice_modules(build(Shape(blocks=3)), [(0, 1), (1, 3)])[1]

QUANTISED = quantised_module()
OPAQUE = opaque_module()
FAMILIES = families_module()

EDITS: tuple[tuple[str, ModuleOp, str, str], ...] = (
    ("eps zero", ONE, r"eps = 1\.0*e-05", "eps = 0.0"),
    ("eps infinite", ONE, r"eps = 1\.0*e-05", "eps = 0x7FF0000000000000"),
    ("scale negative", ONE, r"scale = 5\.0*e-01", "scale = -5.0e-01"),
    ("scale missing", ONE, r"scale = 5\.0*e-01 : f64, ", ""),
    ("scale in f32", ONE, r"scale = 5\.0*e-01 : f64", "scale = 5.0e-01 : f32"),
    ("soft-cap zero", ONE, r"softcap = 3\.0*e\+01", "softcap = 0.0"),
    ("misspelt attribute", ONE, r"softcap =", "soft_cap ="),
    ("window of the op", ONE, r"window = 8", "window = 9"),
    ("window of the op missing", ONE, r", window = 8 : i64", ""),
    ("window of the KV zero", ONE, r"window 8", "window 0"),
    ("KV heads zero", ONE, r"!plait\.kv<2x", "!plait.kv<0x"),
    ("KV of integers", ONE, r"2x4xf32, window", "2x4xi32, window"),
    ("KV of another dtype", ONE, r"2x4xf32, window", "2x4xbf16, window"),
    ("heads do not divide", ONE, r"heads = 4", "heads = 3"),
    ("heads in i32", ONE, r"heads = 4 : i64", "heads = 4 : i32"),
    ("no heads", ONE, r"heads = 4", "heads = 0"),
    ("too many heads", ONE, r"heads = 4", "heads = 8"),
    ("k too wide", ONE, r"!plait\.kv<2x4", "!plait.kv<1x4"),
    ("rope kind", ONE, r'kind = "default"', 'kind = "yarn"'),
    ("rope parameter missing", ONE, r'kind = "default"', 'kind = "linear"'),
    ("rope parameter unused", ONE, r'kind = "default"', 'factor = 2.0 : f64, kind = "default"'),
    ("rope parameter zero", ONE, r'kind = "default"', 'factor = 0.0 : f64, kind = "linear"'),
    ("rope theta", ONE, r"theta = 1\.0*e\+04", "theta = -1.0"),
    (
        "rope factors in the wrong order",
        ONE,
        r'kind = "default"',
        "factor = 8.0 : f64, low_freq_factor = 4.0 : f64, high_freq_factor = 1.0 : f64, "
        'original_positions = 8192, kind = "llama3"',
    ),
    ("rope head_dim odd", ONE, r"head_dim = 4", "head_dim = 3"),
    ("rope head_dim", ONE, r"head_dim = 4", "head_dim = 6"),
    ("norm weight too long", ONE, r"tensor<16xf32>", "tensor<17xf32>"),
    ("norm weight in bf16", ONE, r"tensor<16xf32>", "tensor<16xbf16>"),
    ("norm weight of two dimensions", ONE, r"tensor<16xf32>", "tensor<16x1xf32>"),
    ("matrix transposed", ONE, r"tensor<8x16xf32>", "tensor<16x8xf32>"),
    ("matrix in bf16", ONE, r"tensor<24x16xf32>", "tensor<24x16xbf16>"),
    ("matrix larger than its result", ONE, r"tensor<24x16xf32>", "tensor<25x16xf32>"),
    ("bias too long", FUSED, r"tensor<8xf32>", "tensor<9xf32>"),
    ("bias in f16", FUSED, r"tensor<8xf32>", "tensor<8xf16>"),
    ("one bias too few", FUSED, r"biases\(%\d+, (.*) : tensor<16xf32>, ", r"biases(\1 : "),
    (
        "no weights",
        ONE,
        r"    func\.return",
        "    plait.linears %3 weights( : ) : tensor<?x16xf32> ->\n    func.return",
    ),
    ("weight in f64", ONE, r"tensor<32x16xf32>", "tensor<32x16xf64>"),
    ("weight of no size", ONE, r"tensor<32x16xf32>", "tensor<?x16xf32>"),
    ("weight of no name", ONE, r'"model\.norm\.weight"', '""'),
    ("weight of a name not in ASCII", ONE, r'"model\.norm\.weight"', '"модель"'),
    ("argument of a name not in ASCII", ONE, r'"kv\.0"', '"ключи"'),
    ("model of a name not in ASCII", ONE, r'"llama"', '"лама"'),
    (
        "weight is a value",
        ONE,
        r"plait\.logits (%\d+), %\d+, (.*)tensor<32x16xf32>",
        r"plait.logits \1, \1, \2tensor<?x16xf32>",
    ),
    (
        "weight is an argument",
        CUT,
        r"plait\.logits (%\d+), %\d+, (.*)tensor<32x16xf32>",
        r"plait.logits \1, %1, \2tensor<?x16xf32>",
    ),
    ("logits in bf16", ONE, r"tensor<\?x32xf32>", "tensor<?x32xbf16>"),
    ("logits of a narrow table", CUT, r"tensor<32x16xf32>", "tensor<32x15xf32>"),
    ("logits of a bf16 table", CUT, r"tensor<32x16xf32>", "tensor<32x16xbf16>"),
    (
        "add of two widths",
        ONE,
        r"plait\.add %3, %16 (.*)\(tensor<\?x16xf32>, tensor<\?x16xf32>\)",
        r"plait.add %3, %9 \1(tensor<?x16xf32>, tensor<?x8xf32>)",
    ),
    (
        "silu_mul of two widths",
        ONE,
        r"plait\.silu_mul (%\d+), %\d+ (.*)\(tensor<\?x24xf32>, tensor<\?x24xf32>\)",
        r"plait.silu_mul \1, %3 \2(tensor<?x24xf32>, tensor<?x16xf32>)",
    ),
    (
        "add and norm of two widths",
        FUSED,
        r"plait\.add_rms_norm %3, %19, (.*)tensor<\?x16xf32>, tensor<\?x16xf32>, ",
        r"plait.add_rms_norm %3, %13, \1tensor<?x16xf32>, tensor<?x8xf32>, ",
    ),
    ("codes of f32", QUANTISED, r"quant<f8E4M3FN", "quant<f32"),
    ("a block nobody knows", QUANTISED, r"packed<Q4_K>", "packed<Q4_KX>"),
    ("rows of no whole blocks", QUANTISED, r"24x256x!plait.packed", "24x255x!plait.packed"),
    ("a packed vector", QUANTISED, r"tensor<16xf32>", "tensor<16x!plait.packed<Q4_K>>"),
    ("an outer scale in f16", QUANTISED, r"outer f32", "outer f16"),
    ("an order in i64", QUANTISED, r"order i32", "order i64"),
    ("an order of whole rows", QUANTISED, r"group 32, zero f16, order", "per row, zero f16, order"),
    ("a zero in FP8", QUANTISED, r"zero f16, order", "zero f8E4M3FN, order"),
    ("a part of nonsense", QUANTISED, r"outer f32", "inner f32"),
    ("a scale in f64", QUANTISED, r"scale f32 block", "scale f64 block"),
    ("a block of no rows", QUANTISED, r"block 8x12", "block 0x12"),
    ("a group of nothing", QUANTISED, r"group 4", "group 0"),
    ("a group that does not divide", QUANTISED, r"group 4", "group 5"),
    (
        "4 bits in odd rows",
        QUANTISED,
        r"tensor<24x16x(!plait.quant<ui4, scale f16) group 4",
        r"tensor<24x15x\1 per row",
    ),
    ("a zero of FP8", QUANTISED, r"block 8x12", "block 8x12, zero 8"),
    ("a zero beyond the codes", QUANTISED, r"zero 8", "zero 16"),
    ("a zero and a min", QUANTISED, r"zero 8", "zero 8, min f16"),
    ("a layout of nonsense", QUANTISED, r"per tensor", "per column"),
    ("a quantised vector", QUANTISED, r"tensor<16xf32>", "tensor<16x!plait.quant<si8, scale f32 per tensor>>"),
    ("a quantised norm", QUANTISED, r"tensor<16xf32>", "tensor<16x1x!plait.quant<si8, scale f32 per tensor>>"),
    ("sinks of other heads", QUANTISED, r"tensor<4xf32>", "tensor<5xf32>"),
    ("an approximation nobody knows", QUANTISED, r"\"tanh\"", '"erf"'),
    ("groups that do not divide", FAMILIES, r"group = 8", "group = 3"),
    ("an infinite offset", FAMILIES, r"offset = 1\.0*e\+00", "offset = 0x7FF0000000000000"),
    ("a bias of another shape", FAMILIES, r"%9, %10 (.*)tensor<16xf32>\)", r"%9, %5 \1tensor<64x16xf32>)"),
    ("a factor of zero", FAMILIES, r"factor = 4\.0*e\+00", "factor = 0.0"),
    ("rope heads of nothing", FAMILIES, r"head_dim = 8", "head_dim = 0"),
    ("a rope part wider than its head", FAMILIES, r"rotary_dim = 4", "rotary_dim = 10"),
    ("factors for other pairs", FAMILIES, r", 2\.50*e\+00 : f64", ""),
    ("a factor of a pair that is zero", FAMILIES, r"2\.50*e\+00", "0.0"),
    ("a ramp the wrong way", FAMILIES, r"beta_slow = 1\.0", "beta_slow = 64.0"),
    ("half a truncation", FAMILIES, r"truncate = 1", "truncate = 2"),
    ("values wider than keys", FAMILIES, r"values 6", "values 11"),
    ("values of nothing", FAMILIES, r"values 6", "values 0"),
    ("a latent without a rotary part", FAMILIES, r"values 6", "values 10"),
    ("latent rows of nobody", FAMILIES, r", values 6", ""),
    ("latent rows in a window", FAMILIES, r"values 6", "window 8, values 6"),
    ("attention to latent rows", FAMILIES, r"1x8xf32", "1x8xf32, values 6"),
    ("latent rows in bf16", FAMILIES, r"1x10xf32", "1x10xbf16"),
    (
        "latent heads",
        FAMILIES,
        r"heads = 2 : i64, scale = 5\.0*e-01 : f64, block = 0",
        "heads = 1, scale = 0.5, block = 0",
    ),
    ("a stack turned round", FAMILIES, r"transposed", "turned"),
    ("a stack not turned round", FAMILIES, r", transposed", ""),
    ("another input of the router", FAMILIES, r"router %53, (.*) tensor<\?x16xf32>", r"router %23, \1 tensor<?x6xf32>"),
    ("router bias in f16", FAMILIES, r"tensor<4xf32>", "tensor<4xf16>"),
    ("more experts than there are", FAMILIES, r"experts_per_token = 2", "experts_per_token = 5"),
    ("a scoring nobody knows", FAMILIES, r'"sigmoid"', '"entmax"'),
    ("a sum of one", FAMILIES, r"normalise = 1\.0*e-20", "normalise = 1.0"),
    ("a score of groups nobody knows", FAMILIES, r'"top2"', '"top3"'),
    ("groups without a score", FAMILIES, r', group_score = "top2"', ""),
    ("three groups", FAMILIES, r"groups = 2", "groups = 3"),
    ("more groups than there are", FAMILIES, r"groups_per_token = 1", "groups_per_token = 3"),
    ("groups of one", FAMILIES, r"groups = 2 : i64, groups_per_token = 1", "groups = 4 : i64, groups_per_token = 2"),
    ("a group too few", FAMILIES, r"experts_per_token = 2(.*scoring)", r"experts_per_token = 3\1"),
    ("another activation", FAMILIES, r'"silu"', '"swish"'),
    ("alpha without a clamp", FAMILIES, r'activation = "silu"', 'activation = "silu", alpha = 1.0'),
    ("a clamp without a limit", FAMILIES, r", limit = 7\.0*e\+00 : f64", ""),
    ("a stack of other experts", FAMILIES, r"tensor<4x16x24xf32>", "tensor<4x16x25xf32>"),
    ("a stack in bf16", FAMILIES, r"tensor<4x16x24xf32>", "tensor<4x16x24xbf16>"),
    ("a bias of other experts", FAMILIES, r"%63 : (.*), tensor<4x16xf32>\)", r"%62 : \1, tensor<4x24xf32>)"),
    (
        "two biases of three",
        FAMILIES,
        r"plait\.experts (.*) experts\((.*) : (.*)\) biases\((.*), %63 : (.*), .*\) \{(.*)\} : (.*) -> (.*)",
        r'"plait.experts"(\1, \2, \4) <{operandSegmentSizes = array<i32: 1, 1, 1, 1, 1, 1, 1, 0>, \6}> : '
        r"(\7, \3, \5) -> \8",
    ),
    (
        "a routing of other experts",
        FAMILIES,
        r"experts %53, %57 (.*) tensor<\?x4xf32> ->",
        r"experts %53, %23 \1 tensor<?x6xf32> ->",
    ),
    ("logits times nothing", FAMILIES, r"scale = 2\.50*e-01", "scale = 0.0"),
    ("a fixed number of tokens", CUT, r"tensor<\?x16xf32>", "tensor<4x16xf32>"),
    ("a value of no width", CUT, r"tensor<\?x16xf32>", "tensor<?x0xf32>"),
    ("a value of three dimensions", CUT, r"tensor<\?x16xf32>", "tensor<?x16x1xf32>"),
    ("an argument that is no tensor", CUT, r"%0: !plait\.batch", '%0: !plait.batch {plait.name = "b"}, %99: i32'),
    ("no batch", ONE, r"(?s)func\.func @main.*\n  }", "func.func @main() { func.return }"),
    ("two batches", ONE, r"@main\(", '@main(%99: !plait.batch {plait.name = "again"}, '),
    ("an argument without a name", ONE, r' \{plait\.name = "kv\.0"\}', ""),
    ("no names at all", ONE, r' \{plait\.name = "[\w.]*"\}', ""),
    ("an argument with an empty name", ONE, r'"kv\.0"', '""'),
    ("a result without a name", ONE, r' \{plait\.name = "logits"\}', ""),
    ("two arguments of one name", ONE, r'"kv\.0"', '"batch"'),
    (
        "a result that is no tensor",
        ONE,
        r"-> \(tensor<\?x32xf32> (.*)\n((?s:.*))func\.return .*",
        r"-> (!plait.batch \1\n\2func.return %0 : !plait.batch",
    ),
    ("no result", ONE, r"(?s)-> \(tensor<\?x32xf32> .*?\{\n(.*func\.return) [^\n]*", r"{\n\1"),
    ("a KV value for nobody", ONE, r"@main\(", '@main(%99: !plait.kv<2x4xf32> {plait.name = "kv.9"}, '),
    ("a KV value for two", CUT, r"%3, %0 ", "%2, %0 "),
    ("KV values in the wrong order", CUT, r"%2: (!plait\S+ \{.*?\}), %3: ", r"%3: \1, %2: "),
    ("another function", ONE, r"@main", "@other"),
    ("two functions", ONE, r"(?s)(  func\.func @main.*\n  \}\n)", r"\1\1"),
    ("no function", ONE, r"(?s)  func\.func @main.*\n  \}\n", ""),
    ("a declaration", ONE, r"(?s)func\.func @main.*\n  \}\n", "func.func private @main(!plait.batch)\n"),
    ("two MLIR blocks", ONE, r"func\.return (.*)", r"func.return \1\n  ^second:\n    func.return \1"),
    (
        "a call",
        ONE,
        r"    func\.return",
        "    %99 = func.call @main(%0, %1) : (!plait.batch, !plait.kv<2x4xf32, window 8>) -> tensor<?x32xf32>\n"
        "    func.return",
    ),
    ("a value used before it is made", ONE, r"plait\.rms_norm %3, %4 ", "plait.rms_norm %7, %4 "),
    ("a weight referred to twice", ONE, r'"model\.norm\.weight"', '"model.layers.0.input_layernorm.weight"'),
    ("a program too few", OPAQUE, r', "module \{\}"\]', "]"),
    ("an empty program", OPAQUE, r'"module \{\}"', '""'),
    ("lengths that do not ascend", OPAQUE, r"8, 16", "16, 8"),
    ("no programs at all", OPAQUE, r"\[.*\], lengths = array<i64: 8, 16>", "[], lengths = array<i64>"),
    ("flops below zero", OPAQUE, r"10, 20", "10, -20"),
    ("no vocabulary", OPAQUE, r"vocabulary = 7", "vocabulary = 0"),
    ("an opaque op with KV of another kind", OPAQUE, r"kv<1x1xf32>", "kv<2x1xf32>"),
    ("an opaque op without weights", OPAQUE, r"%1, %2, %3 (.*), tensor<3x4xf32>, tensor<4xbf16>\)", r"%1 \1)"),
    ("a block too far", CUT, r"block = 2", "block = 3"),
    ("the wrong first block", ONE, r"block = 0", "block = 1"),
    ("a block that comes back", CUT, r"(?s)(.*)block = 2", r"\1block = 1"),
    ("an op of no block between blocks", ONE, r"(plait\.silu_mul.*) \{block = 0 : i64\}", r"\1"),
    ("blocks that end early", CUT, r"1:3 of 3", "1:4 of 4"),
    ("a slice attribute of nonsense", CUT, r"1:3 of 3", "3:1 of 3"),
    ("a slice attribute that is no text", CUT, r'"1:3 of 3"', "5"),
    ("an unknown op", ONE, r"plait\.add", "plait.addd"),
    ("no text", ONE, r"(?s).*", "\x08"),
    ("broken text", ONE, r"\{eps", "{{eps"),
    ("a quote that does not close", ONE, r'norm\.weight"', "norm.weight"),
    ("an unknown escape", ONE, r'norm\.weight"', r'norm\\weight"'),
    ("half a file", ONE, r"(?s)    func\.return.*", ""),
)


def _complaint(module: ModuleOp, pattern: str, replacement: str) -> str:
    text = print_module(module)
    edited = re.sub(pattern, replacement, text)
    assert edited != text, f"{pattern!r} is not in the text"
    with pytest.raises(VerifyError) as caught:
        parse_module(edited, "edited.mlir")
    assert caught.value.exit_code == 2
    return str(caught.value)


def test_verifier_messages(golden: Golden) -> None:
    shown = [f"# {what}\n{_complaint(*edit)}\n" for what, *edit in EDITS]
    golden("ir/verifier.txt", "\n".join(shown))


def test_every_rule_has_its_message() -> None:
    """Each message that the IR's sources can raise stands in the golden file."""
    seen = (Path(__file__).parent / "ir/verifier.txt").read_text()
    missing = [message for message in sorted(_rules()) if not re.search(message, seen)]
    assert missing == []


def _rules() -> set[str]:
    """Regular expressions of the messages in `require`, `ConventionError` and `VerifyException`."""
    found = set()
    root = Path(plait.ir.__file__).parent
    for path in root.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
                place = {"require": 1, "ConventionError": 1, "VerifyException": 0}.get(node.func.id)
                if place is not None and (message := _pattern(node.args[place])):
                    found.add(message)
    return found


def _pattern(node: ast.expr) -> str | None:
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return ".*".join(re.escape(part) for part in node.value.split("{}")) if node.value != "{}" else None
    if isinstance(node, ast.JoinedStr):
        return "".join(re.escape(str(p.value)) if isinstance(p, ast.Constant) else ".*" for p in node.values)
    return None


def test_infer_says_what_does_not_fit(golden: Golden) -> None:
    module = build(Shape(blocks=1))
    for name, op in weights(module).items():
        if name == "model.layers.0.mlp.up_proj.weight":
            Rewriter.replace_value_with_new_type(op.result, tensor((24, 16), element("bfloat16")))
    with pytest.raises(VerifyError) as caught:
        run_passes(module, parse_passes("infer"))
    golden("ir/infer.txt", str(caught.value) + "\n")


def test_errors_name_the_passes_before(golden: Golden, monkeypatch: pytest.MonkeyPatch) -> None:
    """A pass that breaks a rule is named, with those before it."""
    from plait.ir.passes import FuseLinearPass

    def spoil(self: FuseLinearPass, ctx: object, op: ModuleOp) -> None:
        for item in plait.ir.ops(op):
            item.attributes["spoilt"] = item.properties.get("block") or op.attributes["plait.model"]
            return

    monkeypatch.setattr(FuseLinearPass, "apply", spoil)
    with pytest.raises(VerifyError) as caught:
        run_passes(build(Shape(blocks=1)), parse_passes("infer,fuse-linear,fuse-add-norm"))
    golden("ir/after-passes.txt", str(caught.value) + "\n")
