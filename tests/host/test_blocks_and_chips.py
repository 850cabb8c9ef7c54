"""Scales of blocks in a group of chips: what a chip holds need not be whole blocks, and means the same."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from xdsl.dialects.builtin import ModuleOp, TensorType

from plait.backends.base import CompileOptions
from plait.backends.conformance.models import VOCABULARY, random_weights, write_slice
from plait.backends.conformance.script import SCRIPTS, Player
from plait.backends.xla.aot import compile_slice
from plait.backends.xla.split import split_module
from plait.ir import kv_classes, weights
from plait.ir.oracle import Oracle
from plait.ir.quant import quantise_types
from plait.ir.types import QuantType
from tests.host.test_xla_aot import play
from tests.host.test_xla_families import dense, model, normed

BLOCK = 32
"""Of the 80 rows of an MLP a chip of two has 40, which is a block and a quarter."""


def in_blocks() -> ModuleOp:
    """Matrices of MLPs in FP8 with a scale for each block."""
    module = model((normed, dense))
    kind = QuantType.get("e4m3fn", "float32", (BLOCK, BLOCK))
    quantise_types(module, {name: kind for name in weights(module) if name[2:] in ("gate", "up", "down")})
    return module


def test_a_shard_that_is_no_whole_number_of_blocks(tmp_path: Path) -> None:
    module, script = in_blocks(), SCRIPTS["short"]
    quantised = [op for op in weights(module).values() if isinstance(op.result.type, TensorType)]
    assert sum(isinstance(op.result.type.element_type, QuantType) for op in quantised) == 6
    assert split_module(module, 2).rows_per_chip("0.gate", 80) % BLOCK
    stored = random_weights(module)
    player = Player(script, kv_classes(module), VOCABULARY)
    oracle = Oracle(module, stored, player.plain_pages, script.page_tokens)
    steps: list[Any] = [oracle.step(player.batches(turn)[1])["logits"] for turn in script.turns]
    options = CompileOptions(
        page_tokens=4,
        max_step_tokens=script.step_tokens,
        max_sequences=script.sequences,
        max_context_tokens=64,
        max_kv_tokens=128,
        group_size=2,
    )
    built = compile_slice(module, "tpu-v5e", options, platform="cpu")
    write_slice(tmp_path / "slice", module, stored, built.files)
    found = play(tmp_path / "slice", 2)
    for index, want in enumerate(steps):
        np.testing.assert_allclose(found[f"step{index}"], want, atol=1e-4)
