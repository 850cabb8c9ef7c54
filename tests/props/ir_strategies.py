"""Random modules through `Builder`."""

from __future__ import annotations

from functools import partial
from typing import Any

from hypothesis import strategies as st
from xdsl.dialects.builtin import ModuleOp

from plait.ir import Builder, Rope, print_module, weights
from plait.ir.quant import quantise_types
from plait.ir.types import CODES, DTYPES, FP8, SCALES, QuantType
from tests.ir_models import Shape

#: Any name that the IR takes: quotes, backslashes and control characters too.
NAMES = st.text(st.characters(max_codepoint=127), min_size=1, max_size=12)
KV_DTYPES = [None, *FP8]
POSITIVE = st.floats(min_value=0.0, exclude_min=True, allow_infinity=False, allow_nan=False)


@st.composite
def ropes(draw: st.DrawFn) -> Rope:
    kind = draw(st.sampled_from(["default", "linear", "llama3"]))
    theta = draw(POSITIVE)
    if kind == "default":
        return Rope(theta)
    if kind == "linear":
        return Rope(theta, "linear", factor=draw(POSITIVE))
    low, high = sorted(draw(st.lists(POSITIVE, min_size=2, max_size=2, unique=True)))
    return Rope(theta, "llama3", draw(POSITIVE), low, high, draw(st.integers(1, 1 << 20)))


class Made:
    """A module that shows itself as its text: xDSL's own repr follows every link between ops."""

    def __init__(self, module: ModuleOp) -> None:
        self.module = module

    def __repr__(self) -> str:
        return print_module(self.module)


@st.composite
def modules(draw: st.DrawFn) -> Made:
    """A module of any ops in any order: sound types, no sense."""
    b = Builder(draw(NAMES), draw(st.sampled_from(["float32", "float16", "bfloat16"])))
    names = iter(draw(st.lists(NAMES, min_size=40, max_size=40, unique=True)))
    widths = st.sampled_from([8, 16])
    made: list[tuple[Any, int]] = []

    def some() -> tuple[Any, int]:
        return draw(st.sampled_from(made))

    def embed() -> None:
        width = draw(widths)
        made.append((b.embed(next(names), draw(st.integers(1, 99)), width), width))

    def norm() -> None:
        x, width = some()
        made.append((b.rms_norm(x, next(names), draw(POSITIVE)), width))

    def linear() -> None:
        (x, _), width = some(), draw(widths)
        made.append((b.linear(x, next(names), width, next(names) if draw(st.booleans()) else None), width))

    def rope() -> None:
        x, width = some()
        made.append((b.rope(x, draw(st.sampled_from([2, 4, 8])), draw(ropes())), width))

    def attention() -> None:
        (q, width), (x, _), window = some(), some(), draw(st.none() | st.integers(1, 1 << 40))
        k, v = b.linear(x, next(names), 4), b.linear(x, next(names), 4)
        softcap = draw(st.none() | POSITIVE)
        shape = {"heads": width // 4, "kv_heads": 1, "head_dim": 4, "window": window, "softcap": softcap}
        shape |= {"sinks": next(names) if draw(st.booleans()) else None, "kv_dtype": draw(st.sampled_from(KV_DTYPES))}
        made.append((b.attention(q, k, v, scale=draw(POSITIVE), **shape), width))
        b.block = (b.block or 0) + 1  # one attention per block: its KV value is named after the block

    def binary() -> None:
        x, width = some()
        y = draw(st.sampled_from([value for value, other in made if other == width]))
        tanh = partial(b.gelu_mul, approximate="tanh")
        made.append((draw(st.sampled_from([b.add, b.silu_mul, b.gelu_mul, tanh]))(x, y), width))

    embed()
    b.block = 0
    norm()
    for action in draw(st.lists(st.sampled_from([embed, norm, linear, rope, attention, binary]), max_size=9)):
        last = b.block
        action()
        # Blocks are contiguous: the one just begun needs an op of its own.
        if b.block != last:
            norm()
    b.block = None
    outputs = {name: some()[0] for name in draw(st.lists(NAMES, min_size=1, max_size=3, unique=True))}
    if draw(st.booleans()):
        outputs[next(names) + "\n scores"] = b.logits(some()[0], next(names), draw(st.integers(1, 99)))
    module = b.finish(outputs)
    matrices = [name for name, op in weights(module).items() if len(op.result.type.get_shape()) == 2]
    chosen = draw(st.lists(st.sampled_from(matrices), unique=True))
    quantise_types(module, {name: draw(quant_types()) for name in chosen})
    return Made(module)


@st.composite
def quant_types(draw: st.DrawFn) -> QuantType:
    """Formats that a matrix with an even number of columns can have; groups are of one, two or four."""
    code, scale = draw(st.sampled_from(list(CODES))), draw(st.sampled_from(list(SCALES)))
    group = st.tuples(st.just(1), st.sampled_from([1, 2, 4]))
    block = st.tuples(st.integers(2, 1 << 40), st.integers(1, 1 << 40))
    layout = draw(st.sampled_from([(0, 0), (1, 0)]) | group | block)
    offset = (
        {}
        if code in (*FP8, "e2m1", "nf4")
        else draw(
            st.fixed_dictionaries({"zero": st.none() | st.integers(1, 15) | st.sampled_from(list(DTYPES))})
            | st.fixed_dictionaries({"minimum": st.sampled_from(list(DTYPES))})
        )
    )
    ordered = layout[1] > 0 and draw(st.booleans())
    return QuantType.get(code, scale, layout, outer=draw(st.booleans()), ordered=ordered, **offset)


@st.composite
def shapes(draw: st.DrawFn, max_blocks: int = 5) -> Shape:
    """Tiny decoders that an oracle runs in milliseconds."""
    kv_heads = draw(st.integers(1, 2))
    window = st.none() | st.integers(1, 6)
    return Shape(
        blocks=draw(st.integers(1, max_blocks)),
        hidden=8,
        heads=kv_heads * draw(st.sampled_from([1, 3])),
        kv_heads=kv_heads,
        head_dim=4,
        ffn=6,
        vocabulary=11,
        windows=tuple(draw(st.lists(window, min_size=1, max_size=3))),
        ropes=(
            draw(st.sampled_from([Rope(100.0), Rope(100.0, "linear", 2.0), Rope(100.0, "llama3", 8.0, 1.0, 4.0, 8)])),
        ),
        softcap=draw(st.sampled_from([None, 5.0])),
        bias=draw(st.booleans()),
        tied=draw(st.booleans()),
        dtype=draw(st.sampled_from(["float32", "float16", "bfloat16"])),
    )
