"""Programs made ahead of time: for TPUs, as far as that can be seen without one, and for this host, where they run."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path

import numpy as np
import pytest

from plait.backends.base import CompileOptions, Executable, LoadOptions
from plait.backends.conformance.models import MODELS, VOCABULARY, random_weights, write_slice
from plait.backends.conformance.script import SCRIPTS, Player
from plait.backends.xla import BACKEND
from plait.backends.xla.aot import Built, compile_slice
from plait.ir import kv_classes
from plait.ir.passes import SLICE_PIPELINE, run_passes

SCRIPT = SCRIPTS["pages4"]


@pytest.fixture(autouse=True, scope="session")
def cache(tmp_path_factory: pytest.TempPathFactory) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PLAIT_CACHE", str(tmp_path_factory.mktemp("cache")))
        yield


def test_programs_of_this_host_run_and_agree_with_what_xla_compiles_here(tmp_path: Path) -> None:
    module = MODELS["window-and-full"]("float32")
    run_passes(module, SLICE_PIPELINE)
    options = CompileOptions(
        page_tokens=4, max_step_tokens=SCRIPT.step_tokens, max_sequences=4, max_context_tokens=64, max_kv_tokens=400
    )
    built = compile_slice(module, "tpu-v5e", options, platform="cpu")
    found = {}
    for name, files in (("ahead", built.files), ("here", {})):
        write_slice(tmp_path / name, module, random_weights(module), files)
        player = Player(SCRIPT, kv_classes(module), VOCABULARY)
        bounds = LoadOptions(player.pages, 4, SCRIPT.step_tokens, 4, 1, tmp_path / name)
        with closing(BACKEND.load(tmp_path / name, "v5e", bounds)) as executable:
            found[name] = [executable.step(player.batches(turn)[0], {})["logits"] for turn in SCRIPT.turns]
            stats = executable.stats()
        print(stats)
    for ahead, here in zip(found["ahead"], found["here"], strict=True):
        np.testing.assert_allclose(ahead, here, atol=2e-5)
