"""Decode steps that were captured, against the same steps launched one by one: bit by bit, whatever comes between."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path

import numpy as np
import pytest

from plait.backends.conformance.script import Script, Turn
from plait.backends.kernels.gpu.executor import LaunchSlice
from plait.spec import kv_class
from tests.device.machine import Machine
from tests.host import gpu_slices

pytestmark = pytest.mark.device


def _decode(*sequences: int) -> Turn:
    return Turn(dict.fromkeys(sequences, 1), "all")


#: Three sequences (padded to four), two and one in turn, while their KV grows over page edges and over the lengths at
#: which launches change; then a prompt whose facts need more memory, which moves them; then all, at the plan's bound.
GROWING = Script(
    (
        Turn({0: 37, 1: 5, 2: 59}),
        Turn({3: 3, 4: 11}),
        *(turn for _ in range(12) for turn in (_decode(0, 1, 2), _decode(3, 4), _decode(2, 0, 1), _decode(1))),
        Turn({5: 200, 0: 1}, "all"),
        *(turn for _ in range(12) for turn in (_decode(5, 1, 2), _decode(0, 1, 2, 3, 4, 5), _decode(4))),
    ),
    4,
)
SHORT = Script((Turn({0: 3, 1: 1}), _decode(0, 1), _decode(1, 0), _decode(0), _decode(0)), 4)
SCRIPTS = {"short": SHORT, "growing": GROWING}


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", list(SCRIPTS))
def test_captured_steps_give_the_same_bits(gpu: Machine, name: str, dtype: str, tmp_path: Path) -> None:
    made = gpu_slices.write(tmp_path / "slice", SCRIPTS[name], dtype=dtype, target=gpu.target, code=True)
    if not gpu.device().graphs:
        pytest.skip(f"cupy captures nothing on {gpu.arch.name}")
    found: dict[bool, list[np.ndarray]] = {}
    for graphs in (False, True):
        player, device = made.player(), gpu.device(graphs=graphs)
        with closing(LaunchSlice(made.folder, made.plan, device, "gpu", made.options)) as executable:
            pages = [
                np.arange(player.pages[kv_class(layout.window)], dtype=np.int32) for layout in executable.kv_layouts
            ]
            for layer, (layout, all_pages) in enumerate(zip(executable.kv_layouts, pages, strict=True)):
                shape = (len(all_pages), layout.page_tokens, layout.kv_heads, layout.head_dim)
                zeros = np.zeros(shape, executable.export_pages(layer, all_pages[:1])[0].dtype)
                executable.import_pages(layer, all_pages, zeros, zeros)
            steps = [executable.step(player.batches(turn)[0], {})["logits"] for turn in made.script.turns]
            # Padding writes nothing: every byte of every page is the same.
            kept = [side for layer, own in enumerate(pages) for side in executable.export_pages(layer, own)]
            found[graphs] = [*steps, *kept]
            assert (executable.stats()["graphs"] > 1) == graphs
    assert all(np.isfinite(step).all() for step in found[True][: len(made.script.turns)])
    for index, (one, other) in enumerate(zip(found[False], found[True], strict=True)):
        assert one.tobytes() == other.tobytes(), f"step {index} of {len(made.script.turns)}"


def test_torch_sees_the_memory_of_a_slice(gpu: Machine, tmp_path: Path) -> None:
    """By DLPack, without a copy."""
    torch = pytest.importorskip("torch")
    made = gpu_slices.write(tmp_path / "slice", target=gpu.target, code=True)
    if not torch.cuda.is_available():
        pytest.skip("torch sees no GPU")
    device = gpu.device()
    with closing(LaunchSlice(made.folder, made.plan, device, "gpu", made.options)) as executable:
        layout = executable.kv_layouts[0]
        shape = (1, layout.page_tokens, layout.kv_heads, layout.head_dim)
        ours = np.random.default_rng(0).standard_normal(shape).astype(np.float32)
        executable.import_pages(0, np.array([0], np.int32), ours, ours)
        tensor = torch.from_dlpack(device.array(executable.memory("k0"), np.float32, shape))
        assert (tensor.cpu().numpy() == ours).all()
        tensor.add_(1.0)
        torch.cuda.synchronize()
        assert (executable.export_pages(0, np.array([0], np.int32))[0] == ours + 1).all()
