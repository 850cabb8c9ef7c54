"""What families bring to XLA: experts, latent rows and norms, split over chips, scanned, and compiled for TPUs."""

from __future__ import annotations

import gzip
from collections.abc import Callable, Sequence
from contextlib import closing
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from xdsl.dialects.builtin import ModuleOp
from xdsl.ir import SSAValue

from plait.backends.base import CompileOptions, LoadOptions
from plait.backends.conformance.families import YARN
from plait.backends.conformance.models import VOCABULARY, random_weights, write_slice
from plait.backends.conformance.script import SCRIPTS, Player, Script, Turn
from plait.backends.xla import BACKEND, XlaBackend
from plait.backends.xla.aot import Built, compile_slice
from plait.backends.xla.program import Program
from plait.backends.xla.split import split_module
from plait.errors import UnsupportedError, UserError
from plait.ir import Builder, kv_classes
from plait.ir.oracle import Oracle
from plait.ir.passes import SLICE_PIPELINE, run_passes
from tests.host.test_xla_aot import play

HIDDEN, HEADS, KV_HEADS, HEAD_DIM, EXPERTS, INNER = 64, 4, 2, 32, 8, 48

Block = Callable[[Builder, SSAValue, str], SSAValue]


def normed(b: Builder, x: SSAValue, at: str) -> SSAValue:
    """Norms over the whole of q and k, and behind attention and MLP instead of before them: as OLMo 2."""

    def project(name: str, heads: int) -> SSAValue:
        y = b.rms_norm(b.linear(x, f"{at}{name}", heads * HEAD_DIM), f"{at}{name}.norm", 1e-6)
        return b.rope(y, HEAD_DIM, YARN)

    q, k = project("q", HEADS), project("k", KV_HEADS)
    sizes = {"heads": HEADS, "kv_heads": KV_HEADS, "head_dim": HEAD_DIM, "scale": 0.2}
    y = b.attention(q, k, b.linear(x, f"{at}v", KV_HEADS * HEAD_DIM), **sizes)  # type: ignore[arg-type]
    x = b.add(x, b.rms_norm(b.linear(y, f"{at}o", HIDDEN), f"{at}after", 1e-6))
    return b.add(x, b.rms_norm(gated(b, x, at), f"{at}last", 1e-6))


def parallel(b: Builder, x: SSAValue, at: str) -> SSAValue:
    """Attention beside an MLP without a gate, layer norms of heads of which a part turns: as StableLM and GPT-NeoX."""
    h = b.layer_norm(x, f"{at}in", f"{at}in.b", 1e-5)

    def project(name: str, heads: int, apart: bool) -> SSAValue:
        y = b.linear(h, f"{at}{name}", heads * HEAD_DIM, f"{at}{name}.b")
        y = b.layer_norm(y, f"{at}{name}.norm", None, 1e-5, group=HEAD_DIM, per_group=apart)
        return b.rope(b.scale(y, 1.25), HEAD_DIM, YARN, 16)

    q, k = project("q", HEADS, True), project("k", KV_HEADS, False)
    sizes = {"heads": HEADS, "kv_heads": KV_HEADS, "head_dim": HEAD_DIM, "scale": 0.2}
    v = b.linear(h, f"{at}v", KV_HEADS * HEAD_DIM, f"{at}v.b")
    y = b.linear(b.attention(q, k, v, **sizes), f"{at}o", HIDDEN)  # type: ignore[arg-type]
    inner = b.gelu(b.linear(h, f"{at}fc", 80, f"{at}fc.b"), "tanh")
    return b.add(b.add(x, y), b.linear(inner, f"{at}proj", HIDDEN, f"{at}proj.b"))


def latent(b: Builder, x: SSAValue, at: str) -> SSAValue:
    """Latent attention of queries that are not compressed: one product makes what is split and what is not."""
    nope, rows, turned = 24, 32, 16
    h = b.rms_norm(x, f"{at}in", 1e-6)
    q = b.head_linear(b.linear(h, f"{at}q_nope", HEADS * nope), f"{at}k_b", (HEADS, nope, rows), transposed=True)
    q_rope = b.rope(b.linear(h, f"{at}q_rope", HEADS * turned), turned, YARN)
    row = b.rms_norm(b.linear(h, f"{at}kv_a", rows), f"{at}kv_norm", 1e-6)
    k_rope = b.rope(b.linear(h, f"{at}k_rope", turned), turned, YARN)
    made = b.latent_attention(q, q_rope, row, k_rope, heads=HEADS, scale=0.2)
    return b.add(x, b.linear(b.head_linear(made, f"{at}v_b", (HEADS, nope, rows)), f"{at}o", HIDDEN))


def gated(b: Builder, x: SSAValue, at: str) -> SSAValue:
    return b.linear(b.silu_mul(b.linear(x, f"{at}gate", 80), b.linear(x, f"{at}up", 80)), f"{at}down", HIDDEN)


def dense(b: Builder, x: SSAValue, at: str) -> SSAValue:
    x = latent(b, x, at)
    return b.add(x, gated(b, b.rms_norm(x, f"{at}post", 1e-6), at))


def mixture(b: Builder, x: SSAValue, at: str, experts: int = EXPERTS, inner: int = INNER) -> SSAValue:
    """Latent attention, experts with biases and a shared one."""
    x = latent(b, x, at)
    h = b.rms_norm(x, f"{at}post", 1e-6)
    routing = b.router(
        h, f"{at}router", experts, selection_bias=f"{at}selection", experts_per_token=3, scoring="sigmoid", scale=2.0
    )
    names = (f"{at}gate", f"{at}up", f"{at}down")
    biases = (f"{at}gate.b", f"{at}up.b", f"{at}down.b")
    y = b.experts(h, routing, names, inner, biases=biases, experts_per_token=3)
    return b.add(x, b.add(y, gated(b, h, f"{at}shared.")))


def model(blocks: Sequence[Block], dtype: str = "float32") -> ModuleOp:
    b = Builder("families", dtype)
    x = b.add(b.scale(b.embed("embed", VOCABULARY, HIDDEN), 1.5), b.embed_positions("positions", 40, HIDDEN))
    for index, block in enumerate(blocks):
        b.block = index
        x = block(b, x, f"{index}.")
    b.block = None
    head = b.logits(b.layer_norm(x, "norm", None, 1e-5), "embed", VOCABULARY, scale=0.5, softcap=3.0)
    module = b.finish({"logits": head})
    run_passes(module, SLICE_PIPELINE)
    return module


#: Layer 1, whose pages the probe moves, keeps latent rows.
EVERY = (normed, mixture, parallel)


@cache
def expected() -> dict[str, Any]:
    """What the oracle gives for the probe's script."""
    module, script = model(EVERY), SCRIPTS["short"]
    player = Player(script, kv_classes(module), VOCABULARY)
    oracle = Oracle(module, random_weights(module), player.plain_pages, script.page_tokens)
    steps: list[Any] = [oracle.step(player.batches(turn)[1])["logits"] for turn in script.turns]
    return {f"step{index}": logits for index, logits in enumerate(steps)}


@pytest.mark.parametrize("chips", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_chips_of_a_group_give_together_what_the_oracle_gives(chips: int, tmp_path: Path) -> None:
    """Experts and heads divide over the chips, latent rows are on each; with four, two hold the same KV head, and a
    norm over all of k counts it as often as the others."""
    module, script = model(EVERY), SCRIPTS["short"]
    options = CompileOptions(
        page_tokens=4,
        max_step_tokens=script.step_tokens,
        max_sequences=script.sequences,
        max_context_tokens=64,
        max_kv_tokens=128,
        group_size=chips,
    )
    built = compile_slice(module, "tpu-v5e", options, platform="cpu")
    write_slice(tmp_path / "slice", module, random_weights(module), built.files)
    found = play(tmp_path / "slice", chips)
    assert found["loaded_programs"] == 2
    for name, want in expected().items():
        np.testing.assert_allclose(found[name], want, atol=3e-5, err_msg=name)
    assert found["k"].shape[2:] == (1, 48) and found["v"].shape[2:] == (1, 0)


def test_what_a_group_holds() -> None:
    """Of a product with parts that are split and parts that are not, each has its own rows."""
    split = split_module(model(EVERY), 2)
    rows = {"0.q.norm": 128, "1.q_nope": 96, "1.kv_a": 32, "1.k_b": HEADS, "1.gate": EXPERTS, "2.q.norm": 128}
    held = {name: split.rows_per_chip(name, count) for name, count in rows.items()}
    assert held == {"0.q.norm": 64, "1.q_nope": 48, "1.kv_a": 32, "1.k_b": 2, "1.gate": 4, "2.q.norm": 64}
    for name in ("1.router", "1.selection", "1.kv_norm", "2.k.norm", "positions"):
        assert split.axis((name,)) is None, name


FEW = CompileOptions(max_sequences=1, max_step_tokens=16, max_context_tokens=128)
DECODE = "decode-8-128"


def built_for(arch: str, chips: int) -> Built:
    """A dense block, and two with a mixture: the latter are a loop."""
    module = model((dense, mixture, mixture), "bfloat16")
    return compile_slice(module, arch, CompileOptions(**{**vars(FEW), "group_size": chips}))


@pytest.mark.parametrize(
    ("arch", "chips"),
    [
        ("tpu-v5e", 1),
        ("tpu-v6e", 2),
        *(pytest.param(arch, 2, marks=pytest.mark.slow) for arch in ("tpu-v4", "tpu-v5e", "tpu-v5p", "tpu-v7x")),
    ],
)
def test_latent_rows_and_experts_are_compiled_for(arch: str, chips: int) -> None:
    """A group adds up twice a block, experts and shared expert together, and once for the embedding."""
    built = built_for(arch, chips)
    programs: Any = built.report["programs"]
    for program in (DECODE, "prefill-16-128"):
        row = programs[program]
        assert row["collectives"] == ({} if chips == 1 else {"all-reduce": 2 * 3 + 1})
        assert row["estimated_ms"] > 0


def test_experts_are_cut_out_of_the_stack_one_at_a_time() -> None:
    """A scan that cut out a layer would copy all its experts; and nobody else's are read."""
    wide = [lambda b, x, at: mixture(b, x, at, 64, 256)] * 3
    built = compile_slice(model(wide, "bfloat16"), "tpu-v5e", FEW)
    programs: Any = built.report["programs"]
    layer_bytes = 3 * 64 * 256 * HIDDEN * 2
    assert programs[DECODE]["temporary_bytes"] < layer_bytes / 3
    text = gzip.decompress(built.files[f"{DECODE}.hlo.gz"]).decode()
    assert "repeat3" in text and "bf16[64,256,64]" not in text


@pytest.mark.parametrize(
    ("blocks", "chips", "why"),
    [
        ((lambda b, x, at: mixture(b, x, at, 6),), 4, "6 experts do not divide over 4 chips"),
        ((dense,), 8, "4 heads or columns do not divide over 8 chips"),
    ],
)
def test_a_group_that_cannot_hold_the_slice_is_refused(blocks: tuple[Block, ...], chips: int, why: str) -> None:
    with pytest.raises(UnsupportedError, match=why):
        split_module(model(blocks), chips)


def test_pallas_attention_refuses_latent_rows() -> None:
    with pytest.raises(UnsupportedError, match=r"plait.latent_attention \(block 0\) is not supported") as caught:
        XlaBackend(attention="pallas").compile(model((dense,), "bfloat16"), "xla:tpu-v5e", FEW)
    assert "a latent row is both" in caught.value.why


def test_layers_that_differ_are_scanned_where_they_are_alike() -> None:
    """A dense layer before the mixtures, and layers that alternate, with one left over."""
    repeats = [segment.repeats for segment in Program(model((dense, mixture, mixture, mixture)), 4).segments]
    assert repeats == [1, 1, 3, 1]  # embedding, dense, mixtures, norm and logits
    repeats = [segment.repeats for segment in Program(model((normed, parallel) * 2 + (normed,)), 4).segments]
    assert repeats == [1, 2, 1, 1]


def test_a_position_beyond_the_table_is_an_error(tmp_path: Path) -> None:
    """XLA would take the table's last row."""
    module, script = model(()), Script((Turn({0: 40}), Turn({0: 1})), 4)
    write_slice(tmp_path / "slice", module, random_weights(module), {})
    player = Player(script, kv_classes(module) or {"full": None}, VOCABULARY)
    options = LoadOptions(player.pages, 4, 64, 1, 1, tmp_path / "slice")
    with closing(BACKEND.load(tmp_path / "slice", "v5e", options)) as executable:
        executable.step(player.batches(script.turns[0])[0], {})
        with pytest.raises(UserError, match="a token stands at position 40, and the model has 40") as caught:
            executable.step(player.batches(script.turns[1])[0], {})
    assert caught.value.code == "positions"
