"""Every op of a slice for export against the oracle: two sequences, a prefill and a decode step, what KV was not yet
written infinite."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np
import pytest
import torch
from xdsl.dialects.builtin import ModuleOp

from plait.backends.conformance import families
from plait.backends.conformance.models import ATTENTIONS, MODELS, OPS, Build, attention, random_weights
from plait.backends.conformance.script import Player, Script, Turn
from plait.backends.kernels.arrays import to_numpy
from plait.backends.kernels.stateless import Shape, StatelessSlice
from plait.backends.xla.opaque import array_kind, stablehlo_function
from plait.frontend.torch_mlir import mlir_text
from plait.ir import kv_classes
from plait.ir.oracle import Oracle
from plait.ir.passes import SLICE_PIPELINE, run_passes

CONTEXT, PROMPT = 48, 40  # beyond windows, and beyond the length that ropes were trained on
TURNS = (Turn({0: PROMPT, 1: PROMPT}), Turn({0: 1, 1: 1}))

CASES: dict[str, Build] = {
    **{f"op-{name}": build for name, build in (OPS | families.OPS).items()},
    **{f"attention-{name}": attention(given) for name, given in ATTENTIONS.items()},
    **{f"latent-{name}": build for name, build in families.LATENTS.items()},
    **{f"model-{name}": build for name, build in (MODELS | families.MODELS).items()},
}


class Torch:
    """The module itself, run by torch."""

    def __init__(self, module: ModuleOp, shape: Shape) -> None:
        self.slice = StatelessSlice(module, shape)

    def __call__(self, args: list[torch.Tensor]) -> list[Any]:
        with torch.no_grad():
            return [value.numpy() for value in self.slice(*args)]


class TorchMlir(Torch):
    """The same through torch-mlir, StableHLO and XLA's CPU backend."""

    def __init__(self, module: ModuleOp, shape: Shape) -> None:
        super().__init__(module, shape)
        text = mlir_text(self.slice, self.slice.example(), "stablehlo")
        dtypes = {kind: to_numpy(torch.empty(0, dtype=kind)).dtype for kind in (torch.float32, torch.int32)}
        kinds = [
            [array_kind(a.shape, dtypes[a.dtype]) for a in side] for side in (self.slice.arguments, self.slice.results)
        ]
        self._run = jax.jit(stablehlo_function(text, *kinds))

    def __call__(self, args: list[torch.Tensor]) -> list[Any]:
        return [np.asarray(value) for value in self._run(*[value.numpy() for value in args])]


def check(kind: type[Torch], build: Build) -> None:
    torch.set_num_threads(1)
    module = build("float32")
    tensors = random_weights(module)
    player = Player(Script(TURNS, 4), kv_classes(module) or {"full": None}, 61)
    oracle = Oracle(module.clone(), tensors, player.plain_pages, 4)
    run_passes(module, SLICE_PIPELINE)
    kept: dict[str, Any] = {}
    for turn in TURNS:
        (count, _) = turn.tokens.values()
        _, batch = player.batches(turn)
        run = kind(module, Shape(2, count, CONTEXT))
        given = {name: torch.from_numpy(np.asarray(value)) for name, value in tensors.items()} | {
            "tokens": torch.from_numpy(batch.tokens.reshape(2, -1)),
            "kv_lens": torch.from_numpy(batch.kv_lens),
            "logit_rows": torch.from_numpy(batch.logit_rows),
        }
        args = []
        for argument in run.slice.arguments:
            if argument.name in given:
                args.append(given[argument.name])
            else:
                before = kept.get(argument.name, np.full(argument.shape, np.inf, np.float32))
                args.append(torch.from_numpy(np.array(before)))
        made = dict(zip((result.name for result in run.slice.results), run(args), strict=True))
        for result in run.slice.results:
            assert made[result.name].shape == result.shape
        for name, want in oracle.step(batch).items():  # type: ignore[arg-type]
            error = np.abs(made[name] - want).max() / np.abs(want).max()
            assert error < 1e-5, f"{name} is off by {error:.3g} of its largest value"
        kept = made


@pytest.mark.parametrize("name", CASES)
def test_torch(name: str) -> None:
    check(Torch, CASES[name])


#: What is written otherwise than torch itself would, and models of it. torch-mlir takes seconds for each.
WRITTEN = (
    *(
        name
        for name in CASES
        if name.startswith(("op-router", "op-experts-clamped", "latent-heads6", "op-rope-longrope"))
    ),
    *(f"model-{name}" for name in families.MODELS if name != "latent"),
)


@pytest.mark.parametrize("name", ["model-latent", *(pytest.param(n, marks=pytest.mark.slow) for n in WRITTEN)])
def test_through_torch_mlir(name: str) -> None:
    check(TorchMlir, CASES[name])
