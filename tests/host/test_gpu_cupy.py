"""The way through cupy, on a stand-in for it: what is launched, with which bytes, on which memory; and that what is
launched gives the oracle's numbers. Then the stand-in itself against the cupy that is installed."""

from __future__ import annotations

import ast
import inspect
import re
import subprocess
import sys
from collections.abc import Callable
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from plait.backends.conformance.models import random_weights
from plait.backends.kernels.gpu import cupy_clock, cupy_device, here
from plait.backends.kernels.gpu.cupy_device import CupyDevice
from plait.backends.kernels.gpu.device import Region
from plait.backends.kernels.gpu.executor import LaunchSlice
from plait.backends.kernels.gpu.expression import evaluate
from plait.backends.kernels.gpu.facts import resources
from plait.backends.kernels.gpu.launch import Binary
from plait.errors import FitError
from plait.ir.oracle import Oracle
from tests.device.double import interpret
from tests.host import cupy_double
from tests.host.cupy_double import Double, Launch
from tests.host.gpu_slices import Slice, write

TARGETS = {"sm_90": "cuda:sm_90a", "gfx942": "rocm:gfx942"}
FORMATS = {"i32": np.int32, "f32": np.float32}


@pytest.fixture(scope="session")
def slices(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Slice]:
    """A slice with machine code for an architecture; made once."""
    made: dict[str, Slice] = {}

    def get(arch: str) -> Slice:
        if arch not in made:
            folder = tmp_path_factory.mktemp(arch) / "slice"
            made[arch] = write(folder, target=TARGETS[arch], dtype="bfloat16", code=True)
        return made[arch]

    return get


def _load(made: Slice, double: Double) -> LaunchSlice:
    return LaunchSlice(made.folder, made.plan, CupyDevice(double), "gpu", made.options)


def _binary(made: Slice, launch: Launch) -> Binary:
    return next(b for b in made.plan.binaries if b.file == launch.file)


def _interpreter(made: Slice) -> Double:
    """A double whose launches run in Triton's interpreter, from their bytes alone."""
    double = Double(
        (made.plan.arch.removesuffix("a"),), lambda launch: interpret(double, _binary(made, launch), launch)
    )
    return double


@pytest.mark.parametrize(
    "arch", ["sm_90", *(pytest.param(arch, marks=pytest.mark.slow) for arch in TARGETS if arch != "sm_90")]
)
def test_what_is_launched_gives_the_oracles_numbers(arch: str, slices: Callable[[str], Slice]) -> None:
    """Prompts, decode steps as they are, captured and repeated, on both vendors."""
    made = slices(arch)
    double = _interpreter(made)
    player = made.player()
    oracle = Oracle(made.module, random_weights(made.module), player.plain_pages, made.script.page_tokens)
    with closing(_load(made, double)) as executable:
        for index, turn in enumerate(made.script.turns if made.plan.arch == "sm_90a" else made.script.turns[:5]):
            batch, plain = player.batches(turn)
            got, want = executable.step(batch, {})["logits"], oracle.step(plain)["logits"]  # type: ignore[arg-type]
            assert got.shape == want.shape
            off = np.abs(got - want).max(initial=0) / np.abs(want).max(initial=1)
            assert off < 6 * 2.0**-8, f"step {index} is off by {off:.3g}"
            if arch == "sm_90" and batch.token_count == batch.sequence_count:  # what is captured
                best = executable.step(replace(batch, greedy=True), {})
                assert {name: list(x) for name, x in best.items()} == {"tokens": got.argmax(axis=1).tolist()}
        graphs = executable.stats()["graphs"]
    if arch == "sm_90":
        assert graphs == len(double.log.captures) == 4, "two sequences, and one; greedy and not"
        assert double.log.replays == 8
    else:
        assert graphs == double.log.replays == 0, "cupy captures nothing on ROCm"


@pytest.mark.parametrize("arch", list(TARGETS))
def test_arguments_are_those_of_the_binary(arch: str, slices: Callable[[str], Slice]) -> None:
    """Order, size and value of every argument; grid, block and shared memory: from the file and the plan."""
    made = slices(arch)
    double = Double((arch,))
    player = made.player()
    with closing(_load(made, double)) as executable:
        batch, _ = player.batches(made.script.turns[0])
        executable.step(batch, {})
        places = {name: executable.memory(name) for name in (*made.plan.weights, *made.plan.pages)}
        places |= {name: executable.memory(name) for name in made.plan.activations}
        addresses = {name: region.memory.pointer.ptr + region.offset for name, region in places.items()}
    seen = 0
    launches = iter(double.log.launches)
    symbols = {"T": 6, "S": 2, "R": 2, "A": 2, "D": 1, "W": 16, "L": 64}
    for step in made.plan.steps:
        binary = made.plan.binaries[step.choices[0].binary]  # few rows: the first
        if binary.kernel in ("attention_combine", "argmax"):
            continue  # no sequence is so long, and logits are wanted
        launch = next(launches)
        seen += 1
        assert (launch.file, launch.symbol) == (binary.file, binary.symbol)
        assert tuple(map(len, launch.arguments)) == resources((made.folder / binary.file).read_bytes()).argument_bytes
        assert launch.block == (binary.threads, 1, 1)
        assert launch.shared_bytes == binary.shared_bytes
        for name, raw in zip(binary.types, launch.arguments, strict=False):
            pointer, address = step.pointers[name], int.from_bytes(raw, "little")
            if pointer is None:
                assert address == 0
            elif pointer.buffer in addresses:
                assert address == addresses[pointer.buffer] + pointer.offset
            if name in binary.aligned:
                assert address % 16 == 0
        values = launch.arguments[len(binary.types) : -2]
        known: dict[str, int] = {}
        for (name, kind), raw in zip(binary.scalars.items(), values, strict=True):
            said = step.scalars[name]
            wanted = evaluate(said, symbols) if isinstance(said, str) else said
            assert raw == FORMATS[kind](wanted).tobytes(), name
            known[name] = int(wanted)
        tiles = {"P": sum(-(-n // _queries(made, step)) for n in (5,))}
        names = {**symbols, **known, **{k: int(v) for k, v in binary.constants.items() if isinstance(v, int)}}
        wanted_grid = tuple(evaluate(axis, {**names, **binary.tile, **tiles}) for axis in binary.grid)
        assert launch.grid == wanted_grid
    assert next(launches, None) is None
    assert seen > 15


def _queries(made: Slice, step: Any) -> int:
    """Tokens of a prefill tile; any number for the others."""
    pointer = step.pointers.get("tiles")
    queries = None if pointer is None else made.plan.facts[pointer.buffer].queries
    return queries or 1


def test_a_decode_step_is_one_copy_and_one_graph(slices: Callable[[str], Slice]) -> None:
    made = slices("sm_90")
    double = Double(("sm_90",))
    player = made.player()
    with closing(_load(made, double)) as executable:
        executable.step(player.batches(made.script.turns[0])[0], {})
        for turn in made.script.turns[1:4]:
            double.log.copies.clear()
            double.log.launches.clear()
            executable.step(player.batches(turn)[0], {})
            assert [way for way, _ in double.log.copies] == ["to", "from"]
        assert double.log.captures == [len(double.log.launches)]
        assert double.log.replays == 2


def test_memory_is_there_for_as_long_as_it_is_used(slices: Callable[[str], Slice]) -> None:
    """`Double.find` knows no memory whose pointer is gone; here everything is let go at the end."""
    made = slices("sm_90")
    double = Double(("sm_90",))
    executable = _load(made, double)
    stats = executable.stats()
    wanted = sum(int(stats[name]) for name in ("weight_bytes", "kv_bytes", "arena_bytes"))
    assert double.held == wanted
    executable.step(made.player().batches(made.script.turns[0])[0], {})
    assert double.held > wanted, "the facts of the batch"
    executable.close()
    assert double.held == 0
    executable.close()


def test_every_file_is_loaded_before_the_first_step(slices: Callable[[str], Slice]) -> None:
    made = slices("sm_90")
    double = Double(("sm_90",))
    with closing(_load(made, double)) as executable:
        assert sorted(double.log.modules) == sorted(b.file for b in made.plan.binaries)
        before = len(double.log.modules)
        executable.step(made.player().batches(made.script.turns[0])[0], {})
        assert len(double.log.modules) == before


def test_a_slice_that_does_not_fit_says_so(slices: Callable[[str], Slice]) -> None:
    double = Double(("sm_90",), capacity_bytes=100_000)
    with pytest.raises(FitError, match="does not fit") as caught:
        _load(slices("sm_90"), double)
    assert "bytes were asked for" in caught.value.why and "of 100000 are free" in caught.value.why
    assert sum(double.log.allocations) > 10_000, "some of it did"
    assert double.held == 0, "although the error is still here"


def test_large_shared_memory_is_asked_for() -> None:
    asked: list[int] = []

    class Kernel:
        compile = staticmethod(lambda: None)
        max_dynamic_shared_size_bytes = property(lambda self: 0, lambda self, value: asked.append(value))

    double = Double(("sm_90",))
    double.RawModule = lambda path: type("Module", (), {"get_function": lambda self, name: Kernel()})()
    for size in (48 * 1024, 48 * 1024 + 1, 200 * 1024):
        binary = Binary("gemm", {}, {}, {}, {}, 8, 3, (), (), ("1", "1", "1"), "gemm", "gemm.cubin", 256, size)
        CupyDevice(double).load(binary, Path())
    assert asked == [48 * 1024 + 1, 200 * 1024]


def test_torch_can_have_a_region() -> None:
    device = CupyDevice(Double(("sm_90",)))
    memory = device.allocate(4096)
    array = device.array(Region(memory, 1024, 64), np.float32, (4, 4))
    assert array.memptr.ptr == memory.pointer.ptr + 1024
    assert (array.shape, array.dtype) == ((4, 4), np.float32)


def test_no_compiler_is_imported_where_the_artifact_runs(slices: Callable[[str], Slice], tmp_path: Path) -> None:
    made = slices("sm_90")
    code = f"""
import sys
from pathlib import Path
from tests.host.cupy_double import Double
from plait.backends.kernels.gpu import here
sys.modules["cupy"] = double = Double(("sm_90",))
here._DRIVERS["nvidia"] = (sys.executable,)
import importlib.util
found = importlib.util.find_spec
importlib.util.find_spec = lambda name: True if name == "cupy" else found(name)
from plait.backends.base import Batch, LoadOptions
from plait.backends.cuda import BACKEND
import numpy as np
i32 = lambda *values: np.array(values, np.int32)
options = LoadOptions({made.options.pages!r}, {made.options.page_tokens}, {made.options.max_step_tokens},
                      {made.options.max_sequences}, 1, Path({str(made.folder)!r}))
executable = BACKEND.load(Path({str(made.folder)!r}), "h100", options)
tables = {{name: i32([0]) for name in ("full", "window8")}}
for position in range(3):
    batch = Batch(i32(1), i32(position), i32(0, 1), i32(position + 1), tables, i32(0))
    assert executable.step(batch, {{}})["logits"].shape == (1, 61)
print(executable.runs_on, executable.stats()["graphs"], len(double.log.launches) > 30)
print(sorted({{name.partition(".")[0] for name in sys.modules}} & {{"triton", "torch", "jax", "libtpu", "torch_mlir"}}))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=Path(__file__).parents[2])
    assert done.returncode == 0, done.stderr
    assert done.stdout.split("\n")[:2] == ["h100 1 True", "[]"]


# The double against the real one.

REAL = {
    "RawModuleDouble": "RawModule",
    "RawKernelDouble": "RawKernel",
    "MemoryPoolDouble": "cuda.MemoryPool",
    "MemoryPointerDouble": "cuda.MemoryPointer",
    "StreamDouble": "cuda.Stream",
    "GraphDouble": "cuda.Graph",
    "EventDouble": "cuda.Event",
}


def _real(path: str) -> Any:
    cupy = pytest.importorskip("cupy")
    found: Any = cupy
    for name in path.split("."):
        found = getattr(found, name)
    return found


@pytest.mark.parametrize("name", list(REAL))
def test_the_double_has_nothing_that_cupy_has_not(name: str) -> None:
    double, real = getattr(cupy_double, name), _real(REAL[name])
    for member, value in vars(double).items():
        if member.startswith("_") and member not in ("__call__", "__add__", "__enter__", "__exit__"):
            continue
        if member in ("TYPES", "capturing"):
            continue
        assert hasattr(real, member), f"{real} has no {member}"
        if inspect.isfunction(value) and not member.startswith("__"):
            _same_arguments(value, getattr(real, member))


def _same_arguments(double: Callable[..., Any], real: Any) -> None:
    """Every argument of the double's is one of cupy's, in the same order; those cupy adds have defaults."""
    ours = [p for p in inspect.signature(double).parameters if p != "self"]
    theirs = _arguments(real)
    assert theirs[: len(ours)] == ours, f"{real}: {theirs}, the double has {ours}"


def _arguments(real: Any) -> list[str]:
    try:
        return [p for p in inspect.signature(real).parameters if p != "self"]
    except ValueError:  # Cython: the signature is in the docstring's first lines
        text = next((line for line in reversed((real.__doc__ or "").splitlines()[:3]) if "(" in line), "")
        inside = text[text.index("(") + 1 : text.rindex(")")].replace("\\*", "*")
        words = [part.split("=")[0].split()[-1].strip("*") for part in inside.split(",") if part.split("=")[0].split()]
        return [word for word in words if word not in ("self", "")]


@pytest.mark.parametrize(
    ("path", "wanted"),
    [
        ("RawModule", {"path"}),
        ("cuda.Stream", {"non_blocking"}),
        ("cuda.MemoryPool.malloc", {"size"}),
        ("cuda.alloc_pinned_memory", {"size"}),
        ("cuda.runtime.getDeviceProperties", {"device"}),
        ("cuda.MemoryPointer.copy_from_host_async", {"mem", "size", "stream"}),
        ("cuda.MemoryPointer.copy_to_host_async", {"mem", "size", "stream"}),
        ("cuda.MemoryPointer.memset_async", {"value", "size", "stream"}),
        ("cuda.get_elapsed_time", {"start_event", "end_event"}),
        ("RawKernel.__call__", {"grid", "block", "args", "shared_mem"}),
        ("cuda.Graph.launch", {"stream"}),
        ("ndarray", {"shape", "dtype", "memptr"}),
    ],
)
def test_cupy_takes_what_it_is_given(path: str, wanted: set[str]) -> None:
    real = _real(path)
    documented = real.__doc__ or ""
    try:
        names = set(inspect.signature(real).parameters)
    except ValueError:
        names = set()
    names |= set(re.findall(r"\w+", documented.split("Args:")[0]))
    assert wanted <= names, f"{path}: {documented[:300]}"


@pytest.mark.parametrize("module", [cupy_clock, cupy_device, here])
def test_everything_asked_of_cupy_is_there_on_both(module: Any) -> None:
    """Attribute chains that start at the module: `self._cupy.cuda.memory.OutOfMemoryError`."""
    double = Double(("sm_90",))
    chains = set()
    for node in ast.walk(ast.parse(inspect.getsource(module))):
        chain, inner = list[str](), node
        while isinstance(inner, ast.Attribute):
            chain.insert(0, inner.attr)
            inner = inner.value
        if isinstance(inner, ast.Name) and inner.id in ("cupy", "runtime") and chain:
            chains.add(".".join((["cuda", "runtime"] if inner.id == "runtime" else []) + chain))
        if isinstance(inner, ast.Name) and inner.id == "self" and chain[:1] == ["_cupy"]:
            chains.add(".".join(chain[1:]))
    chains -= {""}
    assert len(chains) >= 3, chains
    for path in chains:
        _real(path)
        found: Any = double
        for name in path.split("."):
            found = getattr(found, name)


def test_the_shared_memory_of_a_kernel_can_be_set_on_the_real_one() -> None:
    assert inspect.isgetsetdescriptor(_real("RawKernel").max_dynamic_shared_size_bytes)
