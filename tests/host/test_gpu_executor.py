"""What runs launch plans: the facts of a batch, and slices in Triton's interpreter beyond what conformance asks."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence
from contextlib import closing
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from plait.backends.base import Batch, CompileOptions
from plait.backends.conformance.models import MODELS, VOCABULARY, Model, random_weights
from plait.backends.conformance.script import SCRIPTS, Player, Script, Turn
from plait.backends.kernels.gpu.batch import Facts, fill
from plait.backends.kernels.gpu.device import Call
from plait.backends.kernels.gpu.executor import LaunchSlice
from plait.backends.kernels.gpu.interpret_device import RUBBISH, InterpretDevice
from plait.backends.kernels.gpu.launch import Fact, Step
from plait.errors import ArtifactError, CheckpointError
from plait.ir import Rope, kv_classes
from plait.ir.oracle import Oracle
from plait.ir.rope import angles
from tests.host.gpu_slices import SCRIPT, Slice, plan, write

ROPE = Rope(10000.0)


def _load(made: Slice, device: InterpretDevice | None = None, **options: Any) -> LaunchSlice:
    return LaunchSlice(
        made.folder, made.plan, device or InterpretDevice(), "interpreted", replace(made.options, **options)
    )


def _reference(made: Slice) -> tuple[Player, Oracle]:
    player = made.player()
    return player, Oracle(made.module, random_weights(made.module), player.plain_pages, made.script.page_tokens)


def _batches(script: Script) -> list[Batch]:
    player = Player(script, {"full": None, "window8": 8}, VOCABULARY)
    return [player.batches(turn)[0] for turn in script.turns]


@pytest.mark.parametrize("batch", [*_batches(SCRIPTS["pages4"]), *_batches(SCRIPTS["long"])])
def test_facts_say_where_every_token_is(batch: Batch) -> None:
    size = 16 if len(batch.tokens) > 100 or batch.kv_lens.max() > 200 else 4
    facts = Facts(batch, size)
    facts.tiles([3, 8])
    names = facts.symbols
    owners = [s for s in range(batch.sequence_count) for _ in range(*batch.query_starts[s : s + 2])]
    for name in ("full", "window8"):
        slots = facts.array(Fact("slots", "i32", ("T",), kv_class=name))
        for token, (owner, position) in enumerate(zip(owners, batch.positions, strict=True)):
            assert slots[token] == batch.page_tables[name][owner, position // size] * size + position % size
        table = np.full((names["S"], names["W"]), 99, np.int32)
        fill(table, Fact("table", "i32", ("S", "W"), kv_class=name), facts)
        wide = batch.page_tables[name].shape[1]
        assert (table[:, :wide] == batch.page_tables[name]).all()
        assert (table[:, wide:] == -1).all()
    lens = np.diff(batch.query_starts)
    decodes = facts.array(Fact("decodes", "i32", ("D", "2")))
    assert names["D"] == len(decodes) == (lens == 1).sum()
    assert names["L"] >= max((batch.kv_lens[s] for s, _ in decodes), default=0)
    assert names["W"] * size >= batch.kv_lens.max()
    for rows in (3, 8):
        tiles = facts.array(Fact("tiles", "i32", (f"P{rows}", "2"), queries=rows))
        assert names[f"P{rows}"] == len(tiles)
        covered = [(s, first + i) for s, first in tiles for i in range(min(rows, lens[s] - first))]
        wanted = [(s, i) for s in range(batch.sequence_count) if lens[s] > 1 for i in range(lens[s])]
        assert sorted(covered) == wanted
    seen = {(int(s), int(batch.query_starts[s])) for s in np.flatnonzero(lens == 1)}
    assert {(int(s), int(row)) for s, row in decodes} == seen
    cos, sin = (facts.array(Fact(kind, "fp32", ("T", "8"), rope=ROPE, head_dim=16)) for kind in ("cos", "sin"))  # type: ignore[arg-type]
    np.testing.assert_allclose(cos + 1j * sin, np.exp(1j * angles(ROPE, 16, batch.positions).astype(float)))


def test_the_longest_prompts_come_first() -> None:
    (batch,) = _batches(Script((Turn({0: 3, 1: 9}),), 4))
    tiles = Facts(batch, 4).array(Fact("tiles", "i32", ("P4", "2"), queries=4))
    assert tiles.tolist() == [[1, 8], [1, 4], [0, 0], [1, 0]]


def test_padded_sequences_do_nothing() -> None:
    batch = _batches(SCRIPT)[1]
    facts = Facts(batch, 4, padded=5)
    facts.tiles([8])
    assert {facts.symbols[name] for name in "TSAD"} == {5}
    wanted: dict[str, tuple[Fact, list[int]]] = {
        "slots": (Fact("slots", "i32", ("T",), kv_class="full"), [-1] * 3),
        "decodes": (Fact("decodes", "i32", ("D", "2")), [-1] * 6),
        "tokens": (Fact("tokens", "i32", ("T",)), [0] * 3),
        "kv_lens": (Fact("kv_lens", "i32", ("S",)), [0] * 3),
        "logit_rows": (Fact("logit_rows", "i32", ("A",)), [0] * 3),
    }
    for fact, padding in wanted.values():
        target = np.full((5, 2) if fact.kind == "decodes" else 5, 77, np.int32)
        fill(target, fact, facts)
        assert (target[:2] == facts.array(fact)).all()
        assert target[2:].reshape(-1).tolist() == padding


class _Capturing(InterpretDevice):
    """Decode steps are padded and captured, as on a GPU."""

    graphs = True

    def capture(self, calls: Sequence[Call]) -> Call:
        return partial(self.run, calls)


def test_steps_are_padded_to_no_more_than_there_is_memory_for(tmp_path: Path) -> None:
    """Five sequences are padded to eight, and a step has five tokens at most."""
    turn = Turn(dict.fromkeys(range(5), 1), "all")
    made = write(tmp_path / "slice", Script((turn, turn, turn), 4), MODELS["gqa"])
    made = replace(made, plan=plan(made.module, options=CompileOptions(5, 8, 4)))
    assert made.plan.bounds.symbols == {"T": 5, "S": 8, "R": 8, "D": 8}
    with closing(_load(made, _Capturing())) as executable:
        _against(made, executable)
        assert executable.stats()["graphs"] == 1


def _against(made: Slice, executable: LaunchSlice) -> None:
    player, oracle = _reference(made)
    for turn in made.script.turns:
        batch, plain = player.batches(turn)
        got, want = executable.step(batch, {}), oracle.step(plain)  # type: ignore[arg-type]
        for name, values in want.items():
            np.testing.assert_allclose(got[name], values, rtol=0, atol=1e-4 * np.abs(values).max(initial=1))


def test_nobody_reads_what_was_released(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """After a buffer's last step it is overwritten with NaN."""
    original, released = LaunchSlice._call, Counter[str]()

    def poisoning(self: LaunchSlice, step: Step, *facts: Any) -> Call | None:
        call = original(self, step, *facts)
        index = next(i for i, other in enumerate(self._plan.steps) if other is step)
        dead = [name for name, buffer in self._plan.activations.items() if buffer.last == index]
        if call is None:
            return None

        def run() -> None:
            call()
            for memory, offset, nbytes in map(self.memory, dead):
                memory[offset : offset + nbytes] = RUBBISH
            released.update(dead)

        return run

    monkeypatch.setattr(LaunchSlice, "_call", poisoning)
    made = write(tmp_path / "slice")
    with closing(_load(made)) as executable:
        _against(made, executable)
    kept = [b for n, b in made.plan.activations.items() if b.last < len(made.plan.steps) and n not in released]
    assert {buffer.rows for buffer in kept} == {"D * 32"}, "parts of long sequences, of which there are none"


def test_a_batch_beyond_the_bounds_is_not_run(tmp_path: Path) -> None:
    """It would write beside its memory."""
    made = write(tmp_path / "slice", Script((Turn({0: 6}),), 4), MODELS["gqa"])
    made = replace(made, plan=replace(made.plan, bounds=replace(made.plan.bounds, tokens=5)))
    with closing(_load(made, max_step_tokens=5)) as executable, pytest.raises(AssertionError, match="plan's bounds"):
        executable.step(made.player().batches(made.script.turns[0])[0], {})


def test_more_logit_rows_than_memory_go_over_the_head_again(tmp_path: Path) -> None:
    script = Script((Turn({0: 19}, "all"), Turn({0: 1}, "all"), Turn({0: 11}, "some")), 4)
    made = write(tmp_path / "slice", script, MODELS["gqa"])
    assert made.plan.bounds.rows == 4
    with closing(_load(made)) as executable:
        _against(made, executable)


def test_keys_in_many_parts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Decode splits its keys, and a second launch adds up the parts."""
    monkeypatch.setattr("plait.backends.kernels.gpu.lower_attention.SPLIT_KEYS", 16)
    script = Script((Turn({0: 70, 1: 3}), Turn({0: 1, 1: 1}, "all"), Turn({1: 1, 0: 1}, "all")), 4)
    made = write(tmp_path / "slice", script, Model())
    with closing(_load(made)) as executable:
        _against(made, executable)


def test_stats_count_what_is_held(tmp_path: Path) -> None:
    made = write(tmp_path / "slice")
    executable = _load(made)
    stats = executable.stats()
    weights = {name: values.nbytes for name, values in random_weights(made.module).items()}  # type: ignore[union-attr]
    assert stats["weight_bytes"] == sum(weights.values())
    pages = made.player().pages
    assert stats["kv_bytes"] == 2 * 4 * 4 * (pages["window8"] * 2 * 16 + pages["full"] * 4 * 32)
    assert (stats["arena_bytes"], stats["steps"], stats["graphs"]) == (made.plan.arena_bytes, 0, 0)
    executable.close()
    executable.close()


def test_pages_go_out_and_in(tmp_path: Path) -> None:
    made = write(tmp_path / "slice")
    with closing(_load(made)) as executable:
        rng = np.random.default_rng(0)
        for layer, layout in enumerate(executable.kv_layouts):
            pages = np.array([3, 0], np.int32)
            shape = (2, layout.page_tokens, layout.kv_heads, layout.head_dim)
            k, v = (rng.standard_normal(shape).astype(np.float32) for _ in range(2))
            executable.import_pages(layer, pages, k, v)
            assert all((a == b).all() for a, b in zip(executable.export_pages(layer, pages), (k, v), strict=True))
            swapped = executable.export_pages(layer, pages[::-1])[0]
            assert (swapped == k[::-1]).all()


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"max_step_tokens": 513}, "max_step_tokens 513"),
        ({"max_sequences": 99}, "max_sequences 99"),
        ({"page_tokens": 8}, "page_tokens 8 instead of 4"),
    ],
)
def test_batches_that_do_not_fit_are_refused(options: dict[str, int], said: str, tmp_path: Path) -> None:
    made = write(tmp_path / "slice")
    with pytest.raises(ArtifactError, match=said) as caught:
        _load(made, **options)
    assert caught.value.code == "launch-bounds"


@pytest.mark.parametrize(
    ("field", "value", "code"),
    [("shape", [48, 47], "weight-shape"), ("name", "another", "weight-missing")],
)
def test_weights_that_the_plan_does_not_know_are_refused(field: str, value: Any, code: str, tmp_path: Path) -> None:
    made = write(tmp_path / "slice")
    file = made.folder / "weights.json"
    listed = json.loads(file.read_text())
    next(item for item in listed["weights"] if item["name"] == "0.o")[field] = value
    file.write_text(json.dumps(listed))
    with pytest.raises(CheckpointError, match=r"0\.o") as caught:
        _load(made)
    assert caught.value.code == code


def test_a_boundary_goes_in_and_out(tmp_path: Path) -> None:
    """Strided results are handed out without what lies between."""
    from plait.ir.passes import slice_modules

    whole = MODELS["gqa"]("bfloat16")
    first, second = slice_modules(whole, [(0, 1), (1, 2)])
    script = Script((Turn({0: 6, 1: 1}), Turn({0: 1, 1: 1}, "all")), 4)
    parts = [write(tmp_path / f"{i}", script, lambda dtype, m=m: m, "bfloat16") for i, m in enumerate((first, second))]  # type: ignore[misc]
    one = write(tmp_path / "one", script, lambda dtype: whole, "bfloat16")
    loaded = [_load(made) for made in (*parts, one)]
    player = Player(script, kv_classes(whole), VOCABULARY)
    for turn in script.turns:
        batch = player.batches(turn)[0]
        middle = loaded[0].step(batch, {})
        assert {x.dtype.name for x in middle.values()} == {"bfloat16"}
        assert (loaded[1].step(batch, middle)["logits"] == loaded[2].step(batch, {})["logits"]).all()


def test_products_side_by_side_are_handed_out_apart(tmp_path: Path) -> None:
    from plait.backends.conformance.models import OPS

    made = write(tmp_path / "slice", Script((Turn({0: 3}),), 4), OPS["linears-bias"])
    with closing(_load(made)) as executable:
        _against(made, executable)
