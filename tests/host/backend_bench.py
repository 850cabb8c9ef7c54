"""Shared by the tests of backends: a small model, loaded."""

from __future__ import annotations

from pathlib import Path

from plait.backends.base import Backend, Executable
from plait.backends.conformance.models import MODELS, Model
from plait.backends.conformance.script import Player, Script
from plait.backends.conformance.suite import Bench
from plait.ir import kv_classes
from plait.ir.passes import SLICE_PIPELINE, run_passes

MIXED_WINDOWS = MODELS["window-and-full"]


def load(
    backend: Backend, target: str, folder: Path, script: Script, model: Model = MIXED_WINDOWS, dtype: str = "float32"
) -> tuple[Executable, Player]:
    """The model on the backend, and who plays the script to it."""
    module = model(dtype)
    run_passes(module, SLICE_PIPELINE)
    player = Player(script, kv_classes(module), 61)
    return Bench(backend, target, folder, shapes_only=False, device_code=False).load(module, player), player
