"""Play a script on a slice's folder with several XLA:CPU devices: `python -m tests.host.xla_probe FOLDER OUT ORDINAL`.

A process of its own, because XLA asks once how many devices a host shall show.
"""

from __future__ import annotations

import sys
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import jax
import numpy as np

from plait.backends.base import LoadOptions
from plait.backends.conformance.models import VOCABULARY
from plait.backends.conformance.script import SCRIPTS, Player
from plait.backends.xla import BACKEND
from plait.ir import kv_classes, read_module

SCRIPT = SCRIPTS["short"]


def main(folder: Path, out: Path, ordinal: int) -> None:
    """Write the logits of every step, the first layer's pages after the last one, counters, and the devices used."""
    player = Player(SCRIPT, kv_classes(read_module(folder / "slice.mlir")), VOCABULARY)
    options = LoadOptions(player.pages, SCRIPT.page_tokens, SCRIPT.step_tokens, SCRIPT.sequences, 1, folder, ordinal)
    with closing(BACKEND.load(folder, "v5e", options)) as executable:
        steps = []
        for turn in SCRIPT.turns:
            batch, _ = player.batches(turn)
            best = executable.step(replace(batch, greedy=True), {})["tokens"]
            steps.append(executable.step(batch, {})["logits"])
            assert np.array_equal(best, steps[-1].argmax(axis=1)), "a group's columns beyond the vocabulary count"
        pages = player.physical("full", 1)
        k, v = executable.export_pages(1, pages)
        executable.import_pages(1, pages, k, v)
        again = executable.export_pages(1, pages)
        assert np.array_equal(k, again[0]) and np.array_equal(v, again[1])
        stats = executable.stats()
        used = sorted({device.id for array in jax.live_arrays() for device in array.devices()})
    counters = {name: np.array(value) for name, value in stats.items()}
    np.savez(out, k=k, v=v, used=used, **{f"step{i}": step for i, step in enumerate(steps)}, **counters)


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3]))
