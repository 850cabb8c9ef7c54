"""Random modules through `Builder`."""

from __future__ import annotations

from functools import partial
from typing import Any

from hypothesis import strategies as st
from xdsl.dialects.builtin import ModuleOp

from plait.ir import Builder, Rope, print_module, weights
from plait.ir.ops import EmbedOp, ExpertsOp, HeadLinearOp, LinearOp, LogitsOp, WeightOp
from plait.ir.quant import quantise_types
from plait.ir.rope import ROPE_PARAMETERS
from plait.ir.types import CODES, DTYPES, FP8, SCALES, QuantType
from tests.ir_models import Shape

#: Any name that the IR takes: quotes, backslashes and control characters too.
NAMES = st.text(st.characters(max_codepoint=127), min_size=1, max_size=12)
KV_DTYPES = [None, *FP8]
FINITE = st.floats(allow_infinity=False, allow_nan=False)
POSITIVE = st.floats(min_value=0.0, exclude_min=True, allow_infinity=False, allow_nan=False)


@st.composite
def ropes(draw: st.DrawFn, pairs: int) -> Rope:
    kind = draw(st.sampled_from(list(ROPE_PARAMETERS)))
    low, high = sorted(draw(st.lists(POSITIVE, min_size=2, max_size=2, unique=True)))
    slow, fast = sorted(draw(st.lists(st.floats(1e-6, 1e6), min_size=2, max_size=2)))
    given = {
        "low_freq_factor": low,
        "high_freq_factor": high,
        "beta_slow": slow,
        "beta_fast": fast,
        "original_positions": draw(st.integers(1, 1 << 20)),
        "truncate": draw(st.integers(0, 1)),
        "factors": tuple(draw(st.lists(POSITIVE, min_size=pairs, max_size=pairs))),
        "factor": draw(POSITIVE),
        "attention_factor": draw(POSITIVE),
    }
    theta = draw(POSITIVE.filter(lambda value: value != 1))  # with 1 all pairs of YaRN turn alike
    return Rope(theta, kind, **{name: given[name] for name in ROPE_PARAMETERS[kind]})


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
    names = iter(draw(st.lists(NAMES, min_size=80, max_size=80, unique=True)))
    widths = st.sampled_from([8, 16])
    made: list[tuple[Any, int]] = []

    def some() -> tuple[Any, int]:
        return draw(st.sampled_from(made))

    def embed() -> None:
        width, count = draw(widths), draw(st.integers(1, 99))
        made.append((draw(st.sampled_from([b.embed, b.embed_positions]))(next(names), count, width), width))

    def maybe_name() -> str | None:
        return next(names) if draw(st.booleans()) else None

    def norm() -> None:
        x, width = some()
        heads = {"group": draw(st.sampled_from([None, 4, 8])), "per_group": draw(st.booleans())}
        if draw(st.booleans()):
            y = b.layer_norm(x, next(names), maybe_name(), draw(POSITIVE), **heads)
        else:
            y = b.rms_norm(x, next(names), draw(POSITIVE), offset=draw(st.none() | FINITE), **heads)
        made.append((y, width))

    def linear() -> None:
        (x, _), width = some(), draw(widths)
        made.append((b.linear(x, next(names), width, maybe_name()), width))

    def head_linear() -> None:
        (x, inner), width, turned = some(), draw(widths), draw(st.booleans())
        shape = (4, inner // 4, width // 4) if turned else (4, width // 4, inner // 4)
        made.append((b.head_linear(x, next(names), shape, transposed=turned), width))

    def rope() -> None:
        x, width = some()
        head_dim = draw(st.sampled_from([2, 4, 8]))
        part = draw(st.sampled_from([n for n in (2, 4, 8) if n <= head_dim]))
        made.append((b.rope(x, head_dim, draw(ropes(part // 2)), part), width))

    def attention() -> None:
        (q, width), (x, _), window = some(), some(), draw(st.none() | st.integers(1, 1 << 40))
        k, v = b.linear(x, next(names), 4), b.linear(x, next(names), 4)
        softcap = draw(st.none() | POSITIVE)
        shape = {"heads": width // 4, "kv_heads": 1, "head_dim": 4, "window": window, "softcap": softcap}
        shape |= {"sinks": next(names) if draw(st.booleans()) else None, "kv_dtype": draw(st.sampled_from(KV_DTYPES))}
        made.append((b.attention(q, k, v, scale=draw(POSITIVE), **shape), width))
        b.block = (b.block or 0) + 1  # one attention per block: its KV value is named after the block

    def latent_attention() -> None:
        x, _ = some()
        q_latent, q_rope, latent, k_rope = (b.linear(x, next(names), width) for width in (8, 4, 4, 2))
        made.append((b.latent_attention(q_latent, q_rope, latent, k_rope, heads=2, scale=draw(POSITIVE)), 8))
        b.block = (b.block or 0) + 1

    def mixture() -> None:
        x, width = some()
        groups = {"groups": 2, "groups_per_token": draw(st.integers(1, 2))}
        groups |= {"group_score": draw(st.sampled_from(["max", "top2"]))}
        routing = b.router(
            x,
            next(names),
            4,
            bias=maybe_name(),
            selection_bias=maybe_name(),
            experts_per_token=2,
            scoring=draw(st.sampled_from(["softmax", "sigmoid"])),
            normalise=draw(st.none() | st.floats(0, 1, exclude_max=True)),
            scale=draw(st.none() | POSITIVE),
            **(groups if draw(st.booleans()) else {}),
        )
        activation = draw(st.sampled_from(["silu", "gelu", "gelu_tanh", "clamped_swiglu"]))
        own = {"alpha": draw(POSITIVE), "limit": draw(POSITIVE)} if activation == "clamped_swiglu" else {}
        stacks = (next(names), next(names), next(names))
        biases = (next(names), next(names), next(names)) if draw(st.booleans()) else None
        y = b.experts(x, routing, stacks, 8, biases=biases, experts_per_token=2, activation=activation, **own)
        made.append((y, width))

    def unary() -> None:
        x, width = some()
        factor = draw(FINITE.filter(bool))
        tanh = partial(b.gelu, approximate="tanh")
        made.append((draw(st.sampled_from([b.gelu, tanh, partial(b.scale, factor=factor)]))(x), width))

    def binary() -> None:
        x, width = some()
        y = draw(st.sampled_from([value for value, other in made if other == width]))
        tanh = partial(b.gelu_mul, approximate="tanh")
        made.append((draw(st.sampled_from([b.add, b.silu_mul, b.gelu_mul, tanh]))(x, y), width))

    actions = [embed, norm, linear, head_linear, rope, attention, latent_attention, mixture, unary, binary]
    embed()
    b.block = 0
    norm()
    for action in draw(st.lists(st.sampled_from(actions), max_size=9)):
        last = b.block
        action()
        # Blocks are contiguous: the one just begun needs an op of its own.
        if b.block != last:
            norm()
    b.block = None
    outputs = {name: some()[0] for name in draw(st.lists(NAMES, min_size=1, max_size=3, unique=True))}
    if draw(st.booleans()):
        own = {"scale": draw(st.none() | POSITIVE), "softcap": draw(st.none() | POSITIVE)}
        outputs[next(names) + "\n scores"] = b.logits(some()[0], next(names), draw(st.integers(1, 99)), **own)
    module = b.finish(outputs)
    shapes = {name: op.result.type.get_shape() for name, op in weights(module).items() if _may_be_quantised(op)}
    chosen = draw(st.lists(st.sampled_from(sorted(shapes)), unique=True)) if shapes else []
    fitting = {name: quant_types().filter(lambda kind, n=name: kind.problem(shapes[n]) is None) for name in chosen}
    quantise_types(module, {name: draw(kinds) for name, kinds in fitting.items()})
    return Made(module)


def _may_be_quantised(op: WeightOp) -> bool:
    """Whether the op that takes the weight takes it in any format."""
    (use,) = op.result.uses
    return use.index in QUANTISED.get(type(use.operation), ())


#: The operands of ops that may be quantised.
QUANTISED = {EmbedOp: (0,), LinearOp: (1,), HeadLinearOp: (1,), ExpertsOp: (2, 3, 4), LogitsOp: (1,)}


@st.composite
def quant_types(draw: st.DrawFn) -> QuantType:
    """Formats of matrices; groups are of one, two or four."""
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
