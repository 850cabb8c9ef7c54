"""The kernels of routers and experts in the interpreter, against what they mean written out in float64.

Legend: T tokens, E experts, k experts per token, H hidden, I inner.
"""

from __future__ import annotations

import math
from contextlib import closing
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from xdsl.dialects.builtin import BFloat16Type

from plait.backends.base import CompileOptions
from plait.backends.conformance import families
from plait.backends.conformance.models import HIDDEN, VOCABULARY, Build, op, random_weights
from plait.backends.conformance.script import Script, Turn
from plait.backends.conformance.suite import OP_TOLERANCE
from plait.backends.kernels.gpu.executor import LaunchSlice
from plait.backends.kernels.gpu.held import quantised
from plait.backends.kernels.gpu.interpret import NUMPY_TYPES
from plait.backends.kernels.gpu.interpret_device import InterpretDevice
from plait.backends.kernels.gpu.kernel import Constant, Tile, Variant
from plait.backends.kernels.gpu.table import KERNELS
from plait.ir.numbers import Quantised, round_to
from plait.ir.oracle import Oracle
from plait.ir.types import QuantType
from tests.host.gpu_slices import module, plan, write
from tests.kernels import run, slack

Array = NDArray[Any]

#: Largest error of a result whose values are about 1. In 16 bits the inner values and the parts are rounded too.
LIMIT = {"fp32": 3e-6, "bf16": 3e-2, "fp16": 4e-3}

PLAIN: dict[str, Constant] = {"CODES": "none", "PACK": 1, "SCALE_N": 0, "GROUP": 0, "HAS_ZEROS": False}

TILES = {"BLOCK_M": 16, "BLOCK_N": 16, "BLOCK_K": 32, "GROUP_M": 2, "XCDS": 1}


def launch(
    name: str, pointers: dict[str, Any], scalars: dict[str, Any], tile: dict[str, int], **given: Constant
) -> None:
    """A kernel with its own pointers, scalars and constants among those that are given."""
    kernel = KERNELS[name]
    names = {dtype: kind for kind, dtype in NUMPY_TYPES.items()}
    variant = Variant(
        name,
        {key: "fp32" if pointers[key] is None else names[pointers[key].dtype] for key in kernel.pointers},
        {key: given[key] for key in kernel.constants},
        Tile({key: tile[key] for key in kernel.tile}),
    )
    run(kernel, variant, {key: pointers[key] for key in kernel.pointers}, {key: scalars[key] for key in kernel.scalars})


# The router.


@dataclass(frozen=True)
class Routing:
    """What `route` is asked for."""

    experts: int = 8
    top: int = 2
    scoring: str = "softmax"
    normalise: float | None = None
    scale: float = 1.0
    groups: int = 1
    top_groups: int = 1
    group_score: str = "max"

    def scores(self, raw: Array) -> Array:
        if self.scoring == "sigmoid":
            return 1 / (1 + np.exp(-raw))
        weight = np.exp(raw - raw.max())
        return weight / weight.sum()

    def chosen(self, ranked: list[float]) -> list[int]:
        """One token's experts, the best first; by sorting lists of (-score, place)."""
        size = self.experts // self.groups
        groups = [ranked[g * size : (g + 1) * size] for g in range(self.groups)]
        many = 1 if self.group_score == "max" else 2
        of = [(-sum(sorted(group)[-many:]), g) for g, group in enumerate(groups)]
        kept = {g for _, g in sorted(of)[: self.top_groups]}
        return [e for _, e in sorted((-score, e) for e, score in enumerate(ranked) if e // size in kept)[: self.top]]

    def shares(self, raw: Array, selection: Array | None) -> Array:
        """(T, E) in float64; raw float32."""
        out = np.zeros(raw.shape)
        for row, values in enumerate(raw.astype(np.float64)):
            score = self.scores(values)
            places = self.chosen((score if selection is None else score + selection).tolist())
            out[row, places] = score[places]
            if self.normalise is not None:
                out[row] /= score[places].sum() + self.normalise
        return out * self.scale


def route(asked: Routing, raw: Array, selection: Array | None, dense: bool) -> dict[str, Array]:
    rows, top = len(raw), asked.top
    made = {
        "out": np.full((rows, asked.experts), np.nan, np.float32),
        "choices": np.full((rows, top), -7, np.int32),
        "shares": np.full((rows, top), np.nan, np.float32),
    }
    wide = np.full((rows, asked.experts + 3), np.nan, np.float32)
    wide[:, : asked.experts] = raw
    launch(
        "route",
        {"scores": wide, "selection_bias": selection, **made},
        {
            "rows": rows,
            "scores_stride": wide.shape[1],
            "least": asked.normalise or 0.0,
            "scale": asked.scale,
        },
        {},
        EXPERTS=asked.experts,
        TOP=top,
        SCORING=asked.scoring,
        NORMALISE=asked.normalise is not None,
        HAS_SELECTION=selection is not None,
        GROUPS=asked.groups,
        TOP_GROUPS=asked.top_groups,
        GROUP_SCORE=asked.group_score,
        DENSE=dense,
    )
    return made


ROUTINGS = {
    "two": Routing(),
    "one": Routing(top=1),
    "all": Routing(experts=5, top=5, normalise=0.0),
    "normalised": Routing(experts=60, top=4, normalise=0.0, scale=2.5),
    "sigmoid": Routing(experts=64, top=6, scoring="sigmoid", normalise=1e-20),
    "groups-of-20": Routing(experts=160, top=6, groups=8, top_groups=3, scale=16.0),
    "top2-of-groups": Routing(
        experts=256, top=8, scoring="sigmoid", normalise=1e-20, groups=8, top_groups=4, group_score="top2", scale=2.5
    ),
    "groups-of-two": Routing(experts=6, top=2, groups=3, top_groups=1, group_score="top2"),
}


@pytest.mark.parametrize("selecting", [False, True], ids=["", "selection"])
@pytest.mark.parametrize("asked", ROUTINGS.values(), ids=ROUTINGS)
def test_routes(asked: Routing, selecting: bool) -> None:
    rng = np.random.default_rng(3)
    raw = (2 * rng.standard_normal((9, asked.experts))).astype(np.float32)
    selection = rng.uniform(-0.5, 0.5, asked.experts).astype(np.float32) if selecting else None
    want = asked.shares(raw, selection)
    dense = route(asked, raw, selection, True)["out"]
    np.testing.assert_array_equal(dense != 0, want != 0)
    np.testing.assert_allclose(dense, want, rtol=2e-6 * slack())
    short = route(asked, raw, selection, False)
    for row, (places, shares) in enumerate(zip(short["choices"], short["shares"], strict=True)):
        assert len(set(places)) == asked.top
        np.testing.assert_array_equal(dense[row, places], shares)


@pytest.mark.parametrize("asked", ROUTINGS.values(), ids=ROUTINGS)
def test_of_equal_experts_and_groups_the_first_are_chosen(asked: Routing) -> None:
    """Few different scores, so that most are equal; rows of one score only."""
    raw = np.random.default_rng(4).integers(0, 3, (9, asked.experts)).astype(np.float32)
    raw[::4] = 1.0
    want = asked.shares(raw, None)
    short = route(asked, raw, None, False)["choices"]
    assert [sorted(row) for row in short.tolist()] == [np.flatnonzero(row).tolist() for row in want]
    np.testing.assert_array_equal(route(asked, raw, None, True)["out"] != 0, want != 0)


def test_rows_that_are_no_numbers_choose_experts_that_there_are() -> None:
    """What pads a batch may be anything; nothing is written beside the rows, and real rows do not feel it."""
    asked = ROUTINGS["groups-of-20"]
    raw = np.random.default_rng(5).standard_normal((4, asked.experts)).astype(np.float32)
    bad = raw.copy()
    bad[0], bad[1], bad[3, 7] = np.nan, np.inf, np.nan
    made, plain = route(asked, bad, None, False), route(asked, raw, None, False)
    assert ((made["choices"] >= 0) & (made["choices"] < asked.experts)).all()
    np.testing.assert_array_equal(made["shares"][2], plain["shares"][2])


def test_choices_of_rows_that_are_mostly_zero() -> None:
    routing = np.zeros((5, 12), np.float32)
    routing[0, [3, 11]], routing[1, 0], routing[3, [1, 2, 5]], routing[4, 11] = (0.5, 0.25), 1, (1, 2, -3), 0.125
    choices, shares = np.full((5, 3), -7, np.int32), np.full((5, 3), np.nan, np.float32)
    pointers = {"routing": routing, "choices": choices, "shares": shares}
    launch("choose", pointers, {"rows": 5, "routing_stride": 12}, {}, EXPERTS=12, TOP=3)
    assert choices.tolist() == [[3, 11, -1], [0, -1, -1], [-1, -1, -1], [1, 2, 5], [11, -1, -1]]
    assert [[share for share in row if share == share] for row in shares.tolist()] == [
        [0.5, 0.25], [1], [], [1, 2, -3], [0.125],
    ]  # fmt: skip


# Pairs.


def sort_pairs(choices: Array, experts: int, block_pairs: int = 16, block_experts: int = 4) -> dict[str, Array]:
    count = choices.size
    made = {
        "counts": np.full(experts, -7, np.int32),
        "pairs": np.full(count, -7, np.int32),
        "places": np.full(count, -7, np.int32),
    }
    tile = {"BLOCK_PAIRS": block_pairs, "BLOCK_EXPERTS": block_experts}
    launch("sort_pairs", {"choices": choices, **made}, {"count": count}, tile, EXPERTS=experts)
    return made


@pytest.mark.parametrize("blocks", [(8, 2), (64, 16)], ids=str)
@pytest.mark.parametrize(("rows", "top", "experts"), [(1, 1, 1), (1, 4, 9), (23, 2, 5), (30, 3, 20)])
def test_pairs_stand_in_the_order_of_their_experts(rows: int, top: int, experts: int, blocks: tuple[int, int]) -> None:
    rng = np.random.default_rng(6)
    choices = np.stack([rng.permutation(max(experts, top))[:top] for _ in range(rows)]).astype(np.int32)
    choices[rng.random(choices.shape) < 0.2] = -1
    choices[choices == experts // 2] = 0  # one that nobody has, and one that many have
    made = sort_pairs(choices, experts, *blocks)
    flat = choices.reshape(-1)
    order = [pair for pair in np.argsort(flat, kind="stable").tolist() if flat[pair] >= 0]
    assert made["pairs"][: len(order)].tolist() == order
    assert (made["pairs"][len(order) :] == -7).all()
    assert made["places"][order].tolist() == list(range(len(order)))
    assert made["counts"].tolist() == [(flat == e).sum() for e in range(experts)]


# Products.


@dataclass
class Mixture:
    """Arrays of a mixture. `loads` draws the experts of tokens: the probability of each."""

    rows: int
    dtype: str = "fp32"
    experts: int = 6
    top: int = 2
    hidden: int = 40
    inner: int = 24
    activation: str = "silu"
    biased: bool = False
    loads: tuple[float, ...] | None = None
    arrays: dict[str, Array] = field(default_factory=dict)

    def __post_init__(self) -> None:
        rng, kind = np.random.default_rng(7), NUMPY_TYPES[self.dtype]
        e, i, h = self.experts, self.inner, self.hidden

        def draw(*shape: int, size: float = 1.0) -> Array:
            return (size * rng.standard_normal(shape)).astype(kind)

        self.arrays = {
            "x": draw(self.rows, h + 8),
            "gated": draw(2 * e, i, h, size=h**-0.5),
            "gated_bias": draw(2 * e, i, size=0.5),
            "down": draw(e, h, i, size=i**-0.5),
            "down_bias": draw(e, h, size=0.5),
            "choices": np.stack([rng.choice(e, self.top, False, self.loads) for _ in range(self.rows)]).astype(
                np.int32
            ),
            "shares": rng.uniform(0.2, 1.0, (self.rows, self.top)).astype(np.float32),
        }

    def activate(self, gate: Array, up: Array) -> Array:
        match self.activation:
            case "silu":
                return gate / (1 + np.exp(-gate)) * up
            case "gelu":
                return gate / 2 * (1 + np.vectorize(math.erf)(gate / math.sqrt(2))) * up
            case "gelu_tanh":
                return gate / 2 * (1 + np.tanh(math.sqrt(2 / math.pi) * (gate + 0.044715 * gate**3))) * up
        gate, up = np.minimum(gate, 0.9), np.clip(up, -0.9, 0.9)
        return gate / (1 + np.exp(-1.7 * gate)) * (up + 1)

    def reference(self) -> Array:
        """(T, H) in float64, pair by pair."""
        a = {name: array.astype(np.float64) for name, array in self.arrays.items()}
        gate_bias, up_bias = np.split(a["gated_bias"] * self.biased, 2)
        gates, ups = np.split(a["gated"], 2)
        out = np.zeros((self.rows, self.hidden))
        for t, (choices, shares) in enumerate(zip(self.arrays["choices"], a["shares"], strict=True)):
            x = a["x"][t, : self.hidden]
            for e, share in zip(choices, shares, strict=True):
                if e >= 0:
                    inner = self.activate(gates[e] @ x + gate_bias[e], ups[e] @ x + up_bias[e])
                    out[t] += share * (a["down"][e] @ inner + a["down_bias"][e] * self.biased)
        return out

    def run(self, tile: dict[str, int] = TILES) -> Array:
        """As the launch plan does it. What is not written is NaN, and must not reach the result."""
        kind, pairs = NUMPY_TYPES[self.dtype], self.rows * self.top
        sorted_ = sort_pairs(self.arrays["choices"].reshape(-1), self.experts)
        # `tests.kernels.run` guards what lies beside arrays: rows are further apart than they are wide.
        inner, parts = (np.full((pairs, width + 8), np.nan, kind) for width in (self.inner, self.hidden))
        out = np.full((self.rows, self.hidden + 8), np.nan, kind)
        constants: dict[str, Any] = {
            "EXPERTS": self.experts,
            "TOP": self.top,
            "ACTIVATION": self.activation,
            "ALPHA": 1.7 if self.activation == "clamped_swiglu" else 0.0,
            "LIMIT": 0.9 if self.activation == "clamped_swiglu" else 0.0,
            "HAS_BIAS": self.biased,
        }
        given = {**self.arrays, **sorted_}
        for name, matrix, x, to in (
            ("experts_gated", "gated", given["x"], inner),
            ("experts_down", "down", inner, parts),
        ):
            sizes = {"N": to.shape[1] - 8, "K": x.shape[1] - 8, "x_stride": x.shape[1], "out_stride": to.shape[1]}
            bias = given[f"{matrix}_bias"] if self.biased else None
            even = int(np.gcd(sizes["K"], 256))
            launch(
                name,
                {**given, "x": x, "w": given[matrix], "scales": None, "zeros": None, "bias": bias, "out": to},
                {"rows": self.rows, **sizes},
                tile,
                **constants,
                **PLAIN,
                EVEN_K=even,
            )
        scalars = {"rows": self.rows, "H": self.hidden}
        scalars |= {"parts_stride": parts.shape[1], "out_stride": out.shape[1]}
        launch("experts_sum", {**given, "parts": parts, "out": out}, scalars, {"BLOCK": 32}, TOP=self.top)
        assert np.isnan(out[:, self.hidden :].astype(np.float32)).all(), "wrote beside the rows"
        return out[:, : self.hidden].astype(np.float64)


def check(mixture: Mixture, tile: dict[str, int] = TILES) -> None:
    error = np.abs(mixture.run(tile) - mixture.reference()).max()
    assert error < LIMIT[mixture.dtype] * slack(), error


@pytest.mark.parametrize("dtype", ["fp32", "bf16", "fp16"])
@pytest.mark.parametrize("rows", [1, 7, 50])
def test_mixtures(rows: int, dtype: str) -> None:
    check(Mixture(rows, dtype))


@pytest.mark.parametrize("biased", [False, True], ids=["", "biases"])
@pytest.mark.parametrize("activation", ["silu", "gelu", "gelu_tanh", "clamped_swiglu"])
def test_activations(activation: str, biased: bool) -> None:
    check(Mixture(9, activation=activation, biased=biased))


@pytest.mark.parametrize(
    ("rows", "top", "loads"),
    [
        (40, 1, (0, 0, 1, 0, 0, 0)),
        (40, 2, (0, 0, 0.5, 0, 0, 0.5)),
        (33, 3, (0.9, 0.02, 0.02, 0.02, 0.02, 0.02)),
        (17, 6, None),
    ],
    ids=["all-to-one", "four-that-nobody-has", "ragged", "everyone-has-all"],
)
def test_loads(rows: int, top: int, loads: tuple[float, ...] | None) -> None:
    check(Mixture(rows, top=top, loads=loads, biased=True))


def test_tokens_with_fewer_experts_than_others_or_none() -> None:
    mixture = Mixture(12, top=3)
    mixture.arrays["choices"][::2, 1], mixture.arrays["choices"][5] = -1, -1
    mixture.arrays["shares"][mixture.arrays["choices"] < 0] = np.nan
    check(mixture)
    assert (mixture.run()[5] == 0).all()


@pytest.mark.parametrize(
    "tile",
    [
        {"BLOCK_M": 16, "BLOCK_N": 32, "BLOCK_K": 16, "GROUP_M": 8, "XCDS": 8},
        {"BLOCK_M": 64, "BLOCK_N": 16, "BLOCK_K": 64, "GROUP_M": 1, "XCDS": 1},
    ],
    ids=["chiplets", "large"],
)
def test_tiles(tile: dict[str, int]) -> None:
    check(Mixture(70, experts=9, loads=(0.4, 0.2, 0.1, 0.1, 0.05, 0.05, 0.05, 0.05, 0)), tile)
    check(Mixture(3, hidden=64, inner=33), tile)


def test_a_token_does_not_feel_its_neighbours() -> None:
    """Bit by bit: alone, and among others."""
    whole = Mixture(21, "bf16", biased=True)
    together = whole.run()
    for rows in (slice(0, 1), slice(4, 9), slice(20, 21)):
        part = Mixture(rows.stop - rows.start, "bf16", biased=True)
        part.arrays = {**whole.arrays, **{name: whole.arrays[name][rows] for name in ("x", "choices", "shares")}}
        np.testing.assert_array_equal(part.run(), together[rows])


# Launch plans.


def kernels(build: Build, **options: int) -> list[str]:
    made = plan(module(build), options=CompileOptions(**options))
    return [made.binaries[step.choices[0].binary].kernel for step in made.steps]


MIXED = ["sort_pairs", "experts_gated", "experts_down", "experts_sum"]


def test_a_router_hands_its_choices_to_the_experts() -> None:
    assert kernels(families.OPS["experts-silu"]) == ["embed", "gemm", "route", *MIXED]


def _twice(b: Any, rows: Any) -> dict[str, Any]:
    """Routing that is a result too."""
    x = rows("x", HIDDEN)
    routing = b.router(x, "router", 8, experts_per_token=3)
    return {"y": b.experts(x, routing, families.STACKS, 40, experts_per_token=3), "routing": routing}


def _more(b: Any, rows: Any) -> dict[str, Any]:
    """Experts that may have more per token than the router chooses."""
    x = rows("x", HIDDEN)
    routing = b.router(x, "router", 8, experts_per_token=2)
    return {"y": b.experts(x, routing, families.STACKS, 40, experts_per_token=3)}


@pytest.mark.parametrize("build", [op(_twice), op(_more)], ids=["two-readers", "fewer"])
def test_routing_that_is_read_as_it_is(build: Build, tmp_path: Path) -> None:
    assert kernels(build) == ["embed", "gemm", "route", "choose", *MIXED]
    made = write(tmp_path / "slice", Script((Turn({0: 9, 1: 1}), Turn({0: 1, 1: 1})), 4), build)
    player = made.player()
    oracle = Oracle(made.module, random_weights(made.module), player.plain_pages, 4)
    with closing(LaunchSlice(made.folder, made.plan, InterpretDevice(), "interpreted", made.options)) as executable:
        for turn in made.script.turns:
            batch, plain = player.batches(turn)
            want = oracle.step(plain)  # type: ignore[arg-type]
            for name, values in executable.step(batch, {}).items():
                np.testing.assert_allclose(values, want[name], rtol=0, atol=3e-6 * np.abs(want[name]).max())


def test_a_token_reads_the_matrices_of_its_own_experts_alone() -> None:
    """The blocks of a decode step are as many as one token has experts, times the columns."""
    made = plan(module(families.OPS["experts-silu"]))
    step = next(step for step in made.steps if step.op.startswith("plait.experts") and "N" in step.scalars)
    binary = made.binaries[step.choices[0].binary]
    assert binary.tile["BLOCK_M"] == 16
    assert binary.grid[0].startswith("(min(EXPERTS, rows * TOP) +")
    assert VOCABULARY > binary.constants["EXPERTS"] > binary.constants["TOP"]


def test_a_launch_by_itself_stays_in_its_memory(tmp_path: Path) -> None:
    """As tuning runs it: nobody has made choices before."""
    made = write(tmp_path / "slice", Script((Turn({0: 9, 1: 1}),), 4), families.OPS["experts-silu"])
    with closing(LaunchSlice(made.folder, made.plan, InterpretDevice(), "interpreted", made.options)) as executable:
        batch = made.player().batches(made.script.turns[0])[0]
        for index in range(len(made.plan.steps)):
            executable._arena[:] = 0x3F
            call = executable.single(batch, index)
            assert call is not None
            call()


KEPT: dict[str, QuantType] = {
    "e4m3fn-blocks": QuantType.get("e4m3fn", "float32", (24, 32)),
    "e4m3fn-matrix": QuantType.get("e4m3fn"),
    "e4m3fn-row": QuantType.get("e4m3fn", "bfloat16", (1, 0)),
    "i8-row": QuantType.get("i8", "float32", (1, 0)),
    "u4-group": QuantType.get("u4", "float16", (1, 16), zero=8),
    "u4-zeros": QuantType.get("u4", "float16", (1, 16), zero="float16"),
    "e2m1-e8m0": QuantType.get("e2m1", "e8m0", (1, 32)),
}


def _held(kind: QuantType, names: tuple[str, ...] = families.STACKS) -> Build:
    """A mixture of which these stacks are of a format; 64 wide, and 32 inside."""
    mixture = partial(families.experts, inner=32, biased=True)
    return op(lambda b, rows: {"y": mixture(b, rows("x", 64))}, dict.fromkeys(names, kind))


@pytest.mark.parametrize(
    ("name", "target"),
    [(name, "cuda:sm_90a") for name in KEPT] + [(name, "rocm:gfx942") for name in KEPT if name.startswith("e4m3fn")],
)
def test_stacks_are_held_as_they_are_stored(name: str, target: str, tmp_path: Path) -> None:
    """On gfx942 e4m3fn becomes e4m3fnuz."""
    made = write(tmp_path / "slice", Script((Turn({0: 9, 1: 1}),), 4), _held(KEPT[name]), "bfloat16", target)
    assert quantised(made.plan, made.module) == {"weights": "3 kept as they are stored"}
    player = made.player()
    tensors = {
        key: value if isinstance(value, Quantised) else round_to(value.astype(np.float64), BFloat16Type())
        for key, value in random_weights(made.module).items()
    }
    oracle = Oracle(made.module, tensors, player.plain_pages, 4)
    with closing(LaunchSlice(made.folder, made.plan, InterpretDevice(), "interpreted", made.options)) as executable:
        batch, plain = player.batches(made.script.turns[0])
        want = oracle.step(plain)["y"]  # type: ignore[arg-type]
        error = np.abs(executable.step(batch, {})["y"].astype(np.float64) - want).max() / np.abs(want).max()
        assert error < OP_TOLERANCE["bfloat16"]


@pytest.mark.parametrize(
    ("kind", "names", "arch", "count"),
    [
        (QuantType.get("e4m3fn", "float32", (32, 48)), families.STACKS, "sm_90a", 3),
        (QuantType.get("e2m1", "e4m3fn", (1, 16), outer=True), families.STACKS, "sm_90a", 3),
        (KEPT["e4m3fn-row"], families.STACKS, "sm_80", 3),
        (KEPT["i8-row"], ("gate",), "sm_90a", 1),
    ],
    ids=["no-power-of-two", "scales-of-scales", "no-fp8", "gate-alone"],
)
def test_what_is_dequantised_is_said(kind: QuantType, names: tuple[str, ...], arch: str, count: int) -> None:
    made = module(_held(kind, names), "bfloat16")
    said = quantised(plan(made, f"x:{arch}"), made)["weights"]
    assert said == f"{count} of {kind} dequantised when they are loaded"
