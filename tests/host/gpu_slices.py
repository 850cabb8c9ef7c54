"""Small slices with launch plans, for the tests of what runs them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from xdsl.dialects.builtin import ModuleOp

from plait.backends.base import CompileOptions, LoadOptions
from plait.backends.conformance.models import MODELS, VOCABULARY, Attention, Model, random_weights, write_slice
from plait.backends.conformance.script import Player, Script, Turn
from plait.backends.kernels.gpu import table
from plait.backends.kernels.gpu.archs import ARCHS
from plait.backends.kernels.gpu.backend import PLAN
from plait.backends.kernels.gpu.launch import LaunchPlan
from plait.backends.kernels.gpu.lower import lower
from plait.backends.kernels.gpu.pick import first, make
from plait.ir import kv_classes
from plait.ir.passes import SLICE_PIPELINE, run_passes
from plait.spec import to_json

#: Every launch of a decoder, two shapes of attention, one block with each.
SMALL = Model((Attention(window=8), Attention(heads=4, kv_heads=4, head_dim=32)), bias=True)

#: Prompts, decode steps of two sequences and of one (each twice: the second time is captured), and both mixed.
SCRIPT = Script(
    (
        Turn({0: 5, 1: 1}),
        Turn({0: 1, 1: 1}, "all"),
        Turn({1: 1, 0: 1}),
        Turn({0: 1, 1: 1}),
        Turn({1: 9, 0: 1}, "all"),
        Turn({1: 1}),
        Turn({1: 1}),
        Turn({1: 1}),
    ),
    4,
)


def module(model: Callable[[str], ModuleOp] = SMALL, dtype: str = "float32") -> ModuleOp:
    """As a backend sees it."""
    made = model(dtype)
    run_passes(made, SLICE_PIPELINE)
    return made


def plan(made: ModuleOp, target: str = "cuda:sm_90a", options: CompileOptions | None = None) -> LaunchPlan:
    """Its launch plan, without code."""
    arch = ARCHS[target.partition(":")[2]]
    return lower(made, target, arch, options or CompileOptions(), first(arch))


@dataclass(frozen=True)
class Slice:
    """A slice's folder, and what to load it with."""

    folder: Path
    module: ModuleOp
    plan: LaunchPlan
    script: Script

    def player(self) -> Player:
        return Player(self.script, kv_classes(self.module), VOCABULARY)

    @property
    def options(self) -> LoadOptions:
        script = self.script
        return LoadOptions(
            self.player().pages, script.page_tokens, script.step_tokens, script.sequences, 1, self.folder
        )


def write(
    folder: Path,
    script: Script = SCRIPT,
    model: Callable[[str], ModuleOp] = SMALL,
    dtype: str = "float32",
    target: str = "cuda:sm_90a",
    *,
    code: bool = False,
) -> Slice:
    """A slice on disk. `code`: with machine code, of the first tile of every kernel."""
    made = module(model, dtype)
    options = CompileOptions(script.step_tokens, script.sequences, script.page_tokens)
    files: dict[str, bytes] = {}
    if code:
        arch = ARCHS[target.partition(":")[2]]
        built = make(made, target, arch, options, lambda *asked: table.candidates(*asked)[:1])
        launches, files = built.plan, dict(built.files)
    else:
        launches = plan(made, target, options)
    files[PLAN] = to_json(launches).encode()
    write_slice(folder, made, random_weights(made), files)
    return Slice(folder, made, launches, script)


__all__ = ["MODELS", "SCRIPT", "SMALL", "Slice", "module", "plan", "write"]
