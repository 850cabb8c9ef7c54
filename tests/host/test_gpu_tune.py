"""Tuning: the measuring loop on scripted devices, what is kept, when it counts and when it does not."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from plait.backends.base import CompileOptions, LoadOptions
from plait.backends.conformance.models import OPS, random_weights, write_slice
from plait.backends.kernels.gpu import build, choose, loader, table
from plait.backends.kernels.gpu.archs import ARCHS
from plait.backends.kernels.gpu.backend import PLAN
from plait.backends.kernels.gpu.cache import Cache
from plait.backends.kernels.gpu.cupy_clock import FLUSH_BYTES, CupyClock
from plait.backends.kernels.gpu.cupy_device import CupyDevice
from plait.backends.kernels.gpu.device import Call
from plait.backends.kernels.gpu.executor import LaunchSlice
from plait.backends.kernels.gpu.here import Devices
from plait.backends.kernels.gpu.interpret_device import InterpretDevice
from plait.backends.kernels.gpu.kernel import Tile
from plait.backends.kernels.gpu.lower import lower
from plait.backends.kernels.gpu.pick import Asked, asked, first, make
from plait.backends.kernels.gpu.report import report
from plait.backends.kernels.gpu.tune import Candidate, Round, SliceStand, tune, tune_slice
from plait.backends.kernels.gpu.tuned import Store, Timed
from plait.errors import ArtifactError
from plait.spec import to_json
from tests.host.cupy_double import Double
from tests.host.gpu_slices import SMALL, module, write

TARGET, ARCH = "cuda:sm_90a", ARCHS["sm_90a"]
OPTIONS = CompileOptions(max_step_tokens=32, max_sequences=4, page_tokens=4, max_context_tokens=20)
PRODUCT = OPS["linear"]


def few(*words: Any) -> tuple[Tile, ...]:
    """Two candidates of everything."""
    return table.candidates(*words)[:2]


def wanted() -> list[Asked]:
    return asked(module(PRODUCT, "bfloat16"), TARGET, ARCH, OPTIONS)


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Cache:
    """Compiled kernels of the product; nothing is measured yet where `clean` is used."""
    return Cache(tmp_path_factory.mktemp("tune") / "kernels")


@pytest.fixture
def clean(cache: Cache) -> Store:
    store = Store.beside(cache)
    for file in store.cache.folder.glob("*/*"):
        file.unlink()
    return store


class Scripted:
    """A stand on which a launch takes what the script says of its tile."""

    device = "a scripted device"

    def __init__(self, us: Mapping[int, Sequence[float]]) -> None:
        self.us, self.now, self.asked = us, dict[tuple[str, int | None], Candidate](), list[tuple[str, Tile]]()

    def take(self, candidates: Round) -> None:
        self.now = dict(candidates)

    def times_us(self, asked: Asked) -> Sequence[float]:
        candidate = self.now[asked.key, asked.most]
        self.asked.append((asked.request.kernel.name, candidate.variant.tile))
        return self.us[candidate.variant.tile.constants.get("BLOCK_N", 0)]


def test_the_measured_winner_is_chosen_against_the_model_and_the_report_says_so(cache: Cache, clean: Store) -> None:
    gemms = [item for item in wanted() if item.request.kernel.name == "gemm"]
    assert [item.most for item in gemms] == [16, None]
    requests = [item.request for item in gemms]
    before = choose.choose_many(requests, candidates=few, cache=cache)
    assert all(choice.measured is None and "predicted" in choice.reason for choice in before)
    predicted = before[0].variant.tile.constants["BLOCK_N"]
    tiles = {tile.constants["BLOCK_N"] for r in requests for tile in few(r.kernel, r.types, r.constants, ARCH, r.rows)}
    assert len(tiles) > 1 and predicted in tiles
    # One slow launch of the winner does not count: medians are compared.
    stand = Scripted({n: (50.0, 60.0, 70.0) if n == predicted else (5.0, 6.0, 1000.0) for n in tiles})
    tuned = tune(gemms, stand, candidates=few, cache=cache)
    after = choose.choose_many(requests, candidates=few, cache=cache)
    for request, found, choice in zip(requests, tuned, after, strict=True):
        assert found is not None and choice.measured == found
        assert choice.variant.tile == found.best.tile
        own = few(request.kernel, request.types, request.constants, ARCH, request.rows)
        assert {choose.shape(timed.tile) for timed in found.times} == set(map(choose.shape, own))
    assert after[0].variant.tile.constants["BLOCK_N"] != predicted
    assert after[0].measured is not None and after[0].measured.best.us == 6.0
    assert "6.0 us measured on a scripted device; next" in after[0].reason


@pytest.fixture
def stored(clean: Store) -> tuple[Store, choose.Request]:
    request = wanted()[-1].request
    clean.put(request, "a device", [Timed(Tile({}, 8), 3.0), Timed(Tile({}, 4), 2.0)])
    return clean, request


def test_times_are_kept_with_the_fastest_first(stored: tuple[Store, choose.Request]) -> None:
    store, request = stored
    found = store.get(request)
    assert found is not None and found.device == "a device"
    assert [timed.us for timed in found.times] == [2.0, 3.0] and found.best.tile == Tile({}, 4)
    assert store.get(wanted()[-1].request) == found, "an equal request of another lowering finds it"


@pytest.mark.parametrize("what", ["triton", "source", "arch", "rows", "sizes", "types"])
def test_what_was_measured_of_something_else_does_not_count(
    what: str, stored: tuple[Store, choose.Request], monkeypatch: pytest.MonkeyPatch
) -> None:
    store, request = stored
    other = {
        "arch": replace(request, arch="sm_100a"),
        "rows": replace(request, rows=16),
        "sizes": replace(request, names={**request.names, "N": 4096}),
        "types": replace(request, types={**request.types, "out": "fp32"}),
    }
    if what == "triton":
        monkeypatch.setattr(loader, "require_triton", lambda: "0.0.1")
    if what == "source":
        monkeypatch.setattr(loader, "source_digest", lambda source: "another text")
    assert store.get(other.get(what, request)) is None


def test_a_tile_that_is_no_candidate_any_more_does_not_count(cache: Cache, clean: Store) -> None:
    request = wanted()[-1].request
    clean.put(request, "a device", [Timed(Tile({"BLOCK_M": 1}, 4), 2.0)])
    (choice,) = choose.choose_many([request], candidates=few, cache=cache)
    assert choice.measured is None and "predicted" in choice.reason


# The slice's own launches.


class Zeros(InterpretDevice):
    """New memory is zero: launches are timed out of their order, and would make NaN of rubbish."""

    def allocate(self, nbytes: int) -> Any:
        memory = super().allocate(nbytes)
        memory.fill(0)
        return memory


class HostClock:
    """Runs what it is to time, and takes the launches' number for the time."""

    device = "the interpreter"

    def __init__(self) -> None:
        self.runs = 0

    def times_us(self, call: Call) -> Sequence[float]:
        call()
        self.runs += 1
        return [float(self.runs)]


@pytest.mark.parametrize(("tokens", "sequences"), [(18, 3), (5, 8)])
def test_every_candidate_is_launched_as_the_slice_would(tokens: int, sequences: int, tmp_path: Path) -> None:
    """In the interpreter, which checks every address: each kernel in a batch of its rows, whatever its tile."""
    options = CompileOptions(tokens, sequences, page_tokens=4, max_context_tokens=20)
    made, source = write(tmp_path / "slice"), module(SMALL)
    load = LoadOptions({"full": 9, "window8": 3}, 4, tokens, sequences, 1, made.folder)
    items = asked(source, TARGET, ARCH, options)
    plan = lower(source, TARGET, ARCH, options, first(ARCH))
    clock = HostClock()
    with SliceStand(
        source,
        TARGET,
        ARCH,
        options,
        LaunchSlice(made.folder, plan, Zeros(), "host", load),
        load.pages,
        clock,
    ) as stand:
        seen = set()
        for turn in (0, -1):
            stand.take({(item.key, item.most): uncompiled(item, turn) for item in items})
            seen |= {item.request.kernel.name for item in items if stand.times_us(item)}
    # No sequence of 20 tokens is split, so nothing is combined.
    assert seen == {item.request.kernel.name for item in items} - {"attention_combine"}
    assert clock.runs == 2 * sum(item.request.kernel.name != "attention_combine" for item in items)


def uncompiled(item: Asked, turn: int) -> Candidate:
    """A candidate without code: the interpreter needs none."""
    r = item.request
    tile = table.candidates(r.kernel, r.types, r.constants, ARCH, r.rows)[turn]
    facts: Any = None
    return Candidate(r.variant(tile), build.Binary(b"", "cubin", r.kernel.name, tile.num_warps, 32, 0, facts, b""))


# On the stand-in for cupy.


def test_the_clock_times_each_launch_alone_and_cold() -> None:
    double = Double(("sm_90",))
    device = CupyDevice(double)
    clock = CupyClock(double, device, 0)
    assert clock.device == "NVIDIA"
    took = iter([9.0, 9.0, 9.0, *range(1, 21)])

    def call() -> None:
        double.milliseconds += next(took)

    times = clock.times_us(call)
    assert times == [1000.0 * n for n in range(1, 21)], "the warm-up does not count"
    assert double.log.copies == [("set", FLUSH_BYTES)] * 20, "caches are emptied before every launch"


@pytest.fixture
def folder(tmp_path: Path, cache: Cache, clean: Store, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A slice with code for sm_90a, compiled with two candidates of each kernel."""
    monkeypatch.setenv("PLAIT_CACHE", str(cache.folder.parent))
    source = module(PRODUCT, "bfloat16")
    built = make(source, TARGET, ARCH, OPTIONS, few)
    folder = tmp_path / "slice"
    write_slice(folder, source, random_weights(source), {PLAN: to_json(built.plan).encode(), **built.files})
    return folder


def test_a_slice_is_tuned_and_the_next_compile_takes_what_was_fastest(folder: Path) -> None:
    double = Double(("sm_90",))
    # The fewer blocks the faster, whatever the model thinks.
    double._execute = lambda launch: setattr(double, "milliseconds", double.milliseconds + launch.grid[0])
    load = LoadOptions({}, 4, 32, 4, 1, folder)
    heard: list[tuple[Any, ...]] = []
    found = tune_slice(folder, TARGET, Devices(double, ("sm_90",)), OPTIONS, load, lambda *words: heard.append(words))
    count = len([phase for phase, *_ in heard if phase == "measure"])
    assert heard[-1] == ("measure", count, count)
    assert all(result.tuned is not None for result in found)
    product = next(r for r in found if r.asked.request.kernel.name == "gemm" and r.asked.most == 16)
    gemm = product.tuned
    assert gemm is not None and product.now in [timed.tile for timed in gemm.times]
    blocks = [-(-80 // timed.tile.constants["BLOCK_N"]) for timed in gemm.times]
    assert len(blocks) > 1 and blocks == sorted(blocks) and blocks[0] < blocks[-1]
    assert [timed.us for timed in gemm.times] == [1000.0 * count for count in blocks]

    source = module(PRODUCT, "bfloat16")
    again = make(source, TARGET, ARCH, OPTIONS)
    rows = {(row["kernel"], row["rows"]): row for row in report(again, ARCH, OPTIONS)["kernels"]}
    assert all(row["measured"]["on"] == "NVIDIA" for row in rows.values())
    assert rows["gemm", "up to 16"]["tile"] == gemm.best.tile.constants
    assert double.held == 0, "everything was freed"


def test_a_slice_without_code_is_not_tuned(folder: Path) -> None:
    (folder / PLAN).unlink()
    with pytest.raises(ArtifactError) as caught:
        tune_slice(folder, TARGET, Devices(Double(), ("sm_90",)), OPTIONS, LoadOptions({}), lambda *words: None)
    assert caught.value.code == "no-device-code"
