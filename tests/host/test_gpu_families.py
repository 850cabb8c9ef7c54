"""What single families are made of, as launch plans in the interpreter against the oracle, and what is fused of it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from xdsl.dialects.builtin import ModuleOp
from xdsl.ir import SSAValue

from plait.backends.base import CompileOptions, best_tokens
from plait.backends.conformance import families
from plait.backends.conformance.families import LONGROPE, YARN
from plait.backends.conformance.models import HIDDEN, ROPES, VOCABULARY, Attention, Build, attention, op, random_weights
from plait.backends.conformance.script import SCRIPTS
from plait.backends.conformance.suite import MODEL_TOLERANCE, OP_TOLERANCE, Bench, _against_oracle, _Reference
from plait.backends.cuda import BACKEND as CUDA
from plait.backends.kernels.gpu import table
from plait.backends.kernels.gpu.archs import ARCHS
from plait.backends.kernels.gpu.interpreted import Interpreted
from plait.backends.kernels.gpu.launch import LaunchPlan
from plait.backends.kernels.gpu.pick import make
from plait.backends.rocm import BACKEND as ROCM
from plait.ir import Builder, Rope
from plait.spec import from_json, to_json
from tests.host.gpu_slices import module, plan

SUBJECTS = {"cuda": (Interpreted(CUDA), "cuda:sm_90a"), "rocm": (Interpreted(ROCM), "rocm:gfx942")}

OPS: dict[str, Build] = {
    "linear-gelu": op(lambda b, rows: {"y": b.gelu(b.linear(rows("x", HIDDEN), "w", 80, "b"), "tanh")}),
    "linear-scale": op(lambda b, rows: {"y": b.scale(b.linear(rows("x", HIDDEN), "w", 80, "b"), -0.3)}),
    "embed-scale": op(lambda b, rows: {"y": b.scale(rows("x", HIDDEN), HIDDEN**0.5)}),
    "embed-scale-twice-read": op(lambda b, rows: _twice(b, rows("x", HIDDEN))),
    "logits-large-softcap": op(lambda b, rows: {"logits": b.logits(rows("x", HIDDEN), "w", 97, softcap=50.0)}),
}
"""What the launches of single ops make together; conformance has every op alone."""


def _twice(b: Builder, x: SSAValue) -> dict[str, SSAValue]:
    return {"y": b.scale(x, 3.0), "z": x}


def _stack(
    model: Callable[[Builder], SSAValue], *blocks: Callable[[Builder, SSAValue, str], SSAValue], **end: float
) -> Build:
    """Embedding, blocks, norm and logits of a model."""

    def build(dtype: str) -> ModuleOp:
        b = Builder("model", dtype)
        x = model(b)
        for index, block in enumerate(blocks):
            b.block = index
            x = block(b, x, f"{index}")
        b.block = None
        return b.finish({"logits": b.logits(b.rms_norm(x, "norm", 1e-6), "embed", VOCABULARY, **end)})

    return build


def _heads(
    b: Builder, h: SSAValue, at: str, a: Attention, turn: Callable[[str, SSAValue], SSAValue], bias: bool = False
) -> SSAValue:
    """An attention of `h`, whose q and k go through `turn`, and its output product."""

    def project(name: str, count: int) -> SSAValue:
        y = b.linear(h, f"{at}.{name}", count * a.head_dim, f"{at}.{name}.b" if bias else None)
        return y if name == "v" else turn(name, y)

    q, k, v = (project(name, count) for name, count in (("q", a.heads), ("k", a.kv_heads), ("v", a.kv_heads)))
    made = b.attention(
        q,
        k,
        v,
        heads=a.heads,
        kv_heads=a.kv_heads,
        head_dim=a.head_dim,
        scale=a.scale,
        window=a.window,
        softcap=a.softcap,
    )
    return b.linear(made, f"{at}.o", HIDDEN, f"{at}.o.b" if bias else None)


def _gated(b: Builder, h: SSAValue, at: str, gelu: bool = False) -> SSAValue:
    gate, up = b.linear(h, f"{at}.gate", 80), b.linear(h, f"{at}.up", 80)
    return b.linear(b.gelu_mul(gate, up, "tanh") if gelu else b.silu_mul(gate, up), f"{at}.down", HIDDEN)


def _embed(b: Builder) -> SSAValue:
    return b.embed("embed", VOCABULARY, HIDDEN)


def _gemma(a: Attention, rope: Rope) -> Callable[[Builder, SSAValue, str], SSAValue]:
    """Norms before and after, of heads too; a softcap."""

    def block(b: Builder, x: SSAValue, at: str) -> SSAValue:
        def norm(y: SSAValue, name: str, group: int | None = None) -> SSAValue:
            return b.rms_norm(y, f"{at}.{name}", 1e-6, group=group, offset=1.0)

        def turn(name: str, y: SSAValue) -> SSAValue:
            return b.rope(norm(y, f"{name}.norm", a.head_dim), a.head_dim, rope)

        x = b.add(x, norm(_heads(b, norm(x, "in"), at, a, turn), "attended"))
        return b.add(x, norm(_gated(b, norm(x, "mlp.in"), at, gelu=True), "mlp.out"))

    return block


def _cohere(b: Builder, x: SSAValue, at: str) -> SSAValue:
    """Attention and MLP side by side of one layer norm, so that five products share their input."""
    a = Attention()
    h = b.layer_norm(x, f"{at}.in", None, 1e-5)

    def turn(name: str, y: SSAValue) -> SSAValue:
        normed = b.layer_norm(y, f"{at}.{name}.norm", None, 1e-5, group=16, per_group=True)
        return b.rope(normed, a.head_dim, ROPES["default"])

    return b.add(b.add(x, _heads(b, h, at, a, turn)), _gated(b, h, at))


def _gpt2(b: Builder, x: SSAValue, at: str) -> SSAValue:
    h = b.layer_norm(x, f"{at}.in", f"{at}.in.b", 1e-5)
    x = b.add(x, _heads(b, h, at, Attention(heads=3, kv_heads=3), lambda name, y: y, bias=True))
    h = b.layer_norm(x, f"{at}.mlp", f"{at}.mlp.b", 1e-5)
    h = b.gelu(b.linear(h, f"{at}.fc", 80, f"{at}.fc.b"), "tanh")
    return b.add(x, b.linear(h, f"{at}.proj", HIDDEN, f"{at}.proj.b"))


def _neox(b: Builder, x: SSAValue, at: str) -> SSAValue:
    """Attention and MLP side by side, of two norms; a quarter of each head turns."""
    a = Attention(heads=2, kv_heads=2, head_dim=24)
    h = b.layer_norm(x, f"{at}.in", f"{at}.in.b", 1e-5)
    y = _heads(b, h, at, a, lambda name, z: b.rope(z, 24, ROPES["llama3"], 6), bias=True)
    h = b.layer_norm(x, f"{at}.mlp", f"{at}.mlp.b", 1e-5)
    h = b.gelu(b.linear(h, f"{at}.fc", 80, f"{at}.fc.b"))
    return b.add(b.add(y, b.linear(h, f"{at}.proj", HIDDEN, f"{at}.proj.b")), x)


def _granite(b: Builder, x: SSAValue, at: str) -> SSAValue:
    a = Attention(scale=0.1)
    h = _heads(b, b.rms_norm(x, f"{at}.in", 1e-6), at, a, lambda name, y: b.rope(y, 16, ROPES["default"]))
    x = b.add(x, b.scale(h, 0.22))
    return b.add(x, b.scale(_gated(b, b.rms_norm(x, f"{at}.mlp", 1e-6), at), 0.22))


def _olmo(b: Builder, x: SSAValue, at: str) -> SSAValue:
    """Norms after, and of q and k over their whole width."""

    def turn(name: str, y: SSAValue) -> SSAValue:
        return b.rope(b.rms_norm(y, f"{at}.{name}.norm", 1e-6), 16, YARN)

    x = b.add(x, b.rms_norm(_heads(b, x, at, Attention(), turn), f"{at}.attended", 1e-6))
    return b.add(x, b.rms_norm(_gated(b, x, at), f"{at}.mlp", 1e-6))


def _phi(rope: Rope | None) -> Callable[[Builder, SSAValue, str], SSAValue]:
    """Heads of 24, of which half turn, or none in layers without positions."""

    def block(b: Builder, x: SSAValue, at: str) -> SSAValue:
        h = b.rms_norm(x, f"{at}.in", 1e-6)
        a = Attention(heads=2, kv_heads=1, head_dim=24)
        x = b.add(x, _heads(b, h, at, a, lambda name, y: y if rope is None else b.rope(y, 24, rope, 12)))
        return b.add(x, _gated(b, b.rms_norm(x, f"{at}.mlp", 1e-6), at))

    return block


FAMILIES: dict[str, Build] = {
    "gemma": _stack(
        lambda b: b.scale(_embed(b), HIDDEN**0.5),
        _gemma(Attention(head_dim=24, window=8, scale=1.0, softcap=5.0), ROPES["default"]),
        _gemma(Attention(head_dim=24, scale=1.0), ROPES["linear"]),
        softcap=3.0,
    ),
    "cohere": _stack(_embed, _cohere, _cohere, scale=0.25),
    "gpt2": _stack(lambda b: b.add(_embed(b), b.embed_positions("wpe", 512, HIDDEN)), _gpt2, _gpt2),
    "neox": _stack(_embed, _neox, _neox),
    "granite": _stack(lambda b: b.scale(_embed(b), 12.0), _granite, _granite, scale=0.125),
    "olmo": _stack(_embed, _olmo, _olmo),
    "phi-nope": _stack(_embed, _phi(LONGROPE), _phi(None), _phi(LONGROPE)),
}


def _run(build: Build, script: str, tolerance: Mapping[str, float], dtype: str, subject: str, folder: Path) -> None:
    backend, target = SUBJECTS[subject]
    _against_oracle(build, script, tolerance)(Bench(backend, target, folder), dtype)


@pytest.mark.parametrize(("dtype", "subject"), [("float32", "cuda"), ("bfloat16", "rocm")])
@pytest.mark.parametrize("name", OPS)
def test_ops(name: str, dtype: str, subject: str, tmp_path: Path) -> None:
    _run(OPS[name], "short", OP_TOLERANCE, dtype, subject, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("name", FAMILIES)
def test_families(name: str, tmp_path: Path) -> None:
    """Beyond the window, a page, and the rope's original length."""
    _run(FAMILIES[name], "pages4", MODEL_TOLERANCE, "float32", "cuda", tmp_path)


@pytest.mark.parametrize("name", ["gemma", "cohere"])
def test_families_in_a_few_steps(name: str, tmp_path: Path) -> None:
    _run(FAMILIES[name], "short", MODEL_TOLERANCE, "float32", "cuda", tmp_path)


@pytest.mark.parametrize("head_dim", [24, 96, 256])
def test_attention_of_any_head_dim(head_dim: int, tmp_path: Path) -> None:
    build = attention(Attention(heads=2, kv_heads=1, head_dim=head_dim, scale=head_dim**-0.5, window=8))
    _run(build, "short", OP_TOLERANCE, "float32", "cuda", tmp_path)


def test_a_greedy_step_chooses_among_the_capped_scores(tmp_path: Path) -> None:
    """Scores far beyond the cap are equal once they are capped; then the first of them is the best."""
    made = module(families.OPS["logits-softcap"])
    reference = _Reference(made, SCRIPTS["short"])
    tensors = random_weights(made)
    tensors["w"] = tensors["w"] * 1e4  # type: ignore[operator]
    backend, target = SUBJECTS["cuda"]
    turn = reference.player.script.turns[0]
    with closing(Bench(backend, target, tmp_path).load(made, reference.player, tensors=tensors)) as executable:
        batch, _ = reference.step(turn)
        (scores,) = executable.step(batch, {}).values()
        (best,) = executable.step(replace(batch, greedy=True), {}).values()
    assert (scores == 1.5).sum() > 10 and np.abs(scores).max() == 1.5
    np.testing.assert_array_equal(best, best_tokens(scores))
    np.testing.assert_array_equal(best, scores.argmax(axis=1))


@pytest.mark.slow
@pytest.mark.parametrize("target", ["cuda:sm_90a", "rocm:gfx942"])
@pytest.mark.parametrize("name", ["gemma", "gpt2"])
def test_families_are_machine_code(name: str, target: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of every launch, without a spill."""
    monkeypatch.setenv("PLAIT_CACHE", str(tmp_path))
    arch = ARCHS[target.partition(":")[2]]
    made = make(
        module(FAMILIES[name], "bfloat16"), target, arch, CompileOptions(), lambda *asked: table.candidates(*asked)[:1]
    )
    assert all(binary.file in made.files for binary in made.plan.binaries)
    assert {choice.binary.facts.spills for _, choice in made.choices} == {0}


# What is fused.


def _kernels(made: LaunchPlan, block: int | None = None) -> list[str]:
    steps = [step for step in made.steps if block is None or step.op.endswith(f"(block {block})")]
    return [made.binaries[step.choices[0].binary].kernel for step in steps]


ATTENTION = ["rope_write", "attention_decode", "attention_combine", "attention_prefill"]


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        # Gate, up and their activation are one product, and q, k, v another: both read the same rows.
        ("cohere", ["layer_norm", "gemm_gated", "gemm", "layer_norm", "layer_norm", *ATTENTION, "gemm", "gemm"]),
        ("gpt2", ["layer_norm", "gemm", *ATTENTION, "gemm", "layer_norm", "gemm", "gemm"]),
        ("granite", ["rms_norm", "gemm", *ATTENTION, "gemm", "rms_norm", "gemm_gated", "gemm"]),
        ("neox", ["layer_norm", "gemm", *ATTENTION, "gemm", "layer_norm", "gemm", "gemm"]),
        ("phi-nope", ["rms_norm", "gemm", *ATTENTION, "gemm", "rms_norm", "gemm_gated", "gemm"]),
        ("olmo", ["gemm", "rms_norm", "rms_norm", *ATTENTION, "gemm", "rms_norm", "add", "gemm_gated", "gemm",
                  "rms_norm"]),
        ("gemma", ["add_rms_norm", "gemm", "rms_norm", "rms_norm", *ATTENTION, "gemm", "rms_norm", "add_rms_norm",
                   "gemm_gated", "gemm", "rms_norm"]),
    ],
)  # fmt: skip
def test_the_launches_of_a_block(name: str, expected: list[str]) -> None:
    """Of the last one, whose last sum is made with the norm that follows."""
    made = plan(module(FAMILIES[name]))
    assert _kernels(made, 1) == expected


def test_a_multiplier_goes_into_the_launch_before_it() -> None:
    made = plan(module(FAMILIES["granite"]))
    assert "scale" not in _kernels(made)
    scaled = [step for step in made.steps if step.scalars.get("factor", 1.0) != 1.0]
    assert [step.scalars["factor"] for step in scaled] == [12.0, 0.22, 0.22, 0.22, 0.22, 0.125]
    products = [made.binaries[step.choices[0].binary] for step in scaled[1:]]
    assert {binary.constants["ACTIVATION"] for binary in products} == {"scale"}
    capped = plan(module(FAMILIES["gemma"]))
    assert _kernels(capped)[-4:] == ["gather_rows", "gemm", "softcap", "argmax"]


def test_gelu_of_a_product_that_others_share_is_one_launch_with_it() -> None:
    """Where attention and MLP share their input (Falcon), five products would be one."""

    def build(b: Builder, rows: Callable[[str, int], SSAValue]) -> dict[str, SSAValue]:
        x = rows("x", HIDDEN)
        return {"y": b.linear(x, "a", 40), "z": b.gelu(b.linear(x, "b", 80)), "u": b.linear(x, "c", 24)}

    made = plan(module(op(build)))
    assert _kernels(made) == ["embed", "gemm", "gemm"]
    names = {weight.names for weight in made.weights.values()}
    assert {("b",), ("a", "c")} <= names


def test_a_product_that_others_read_is_activated_apart() -> None:
    def build(b: Builder, rows: Callable[[str, int], SSAValue]) -> dict[str, SSAValue]:
        y = b.linear(rows("x", HIDDEN), "a", 40)
        return {"y": y, "z": b.gelu(y), "u": b.scale(y, 3.0)}

    assert _kernels(plan(module(op(build)))) == ["embed", "gemm", "gelu", "scale"]


def test_a_plan_with_every_kind_of_rope_goes_to_json_and_back() -> None:
    for name in ("phi-nope", "olmo", "neox"):
        made = plan(module(FAMILIES[name]))
        again = from_json(LaunchPlan, to_json(made))
        assert again == made
        assert {fact.rope for fact in again.facts.values() if fact.rope is not None}, name
        turned = {fact.kind: fact for fact in made.facts.values() if fact.kind in ("cos", "sin")}
        assert {fact.shape for fact in turned.values()} == {("T", str(_turned(name) // 2))}


def _turned(name: str) -> int:
    return {"phi-nope": 12, "olmo": 16, "neox": 6}[name]


def test_layers_have_ropes_of_their_own() -> None:
    made = plan(module(FAMILIES["gemma"]))
    assert Counter(fact.kind for fact in made.facts.values())["cos"] == 2
