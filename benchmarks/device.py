"""The kernels on the GPU that is here: every candidate tile of an 8B model's block, and whole steps.

    python benchmarks/device.py [--chip h200] [--context 2048] [--only gemm] [--json FILE]

One block of a Llama of 8B parameters (hidden 4096, 32 heads, 8 KV heads, FFN 14336) with a head of 32768 words is
compiled and loaded; its launches are timed alone, by the device's events, with cold caches. A line per launch and
bucket of rows:

    model    the tile that is compiled, which the time model chose: predicted and measured time
    best     the fastest candidate, and how much slower than it the chosen one is
    tau      Kendall's rank correlation of predicted and measured times over the candidates: 1 is the same order
    roof     what the operations or bytes take at the chip's dense peak or bandwidth (`cost_models/devices/`), and
             which part of that speed the measured time is
    torch    the same by torch (matmul, scaled_dot_product_attention, rms_norm), where torch sees the GPU

Then decode steps of that slice: from the call to the result on the host, facts of the batch included.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import combinations
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
from xdsl.dialects.builtin import ModuleOp, TensorType

from plait.backends.base import Batch, CompileOptions, LoadOptions
from plait.backends.conformance.models import write_slice
from plait.backends.cuda import BACKEND as CUDA
from plait.backends.kernels.gpu import table
from plait.backends.kernels.gpu.archs import ARCHS, Arch
from plait.backends.kernels.gpu.backend import PLAN
from plait.backends.kernels.gpu.build import Binary, Job, compile_many
from plait.backends.kernels.gpu.choose import FATAL, predict, shape, variants_of
from plait.backends.kernels.gpu.cupy_clock import FLUSH_BYTES, CupyClock
from plait.backends.kernels.gpu.cupy_device import CupyDevice
from plait.backends.kernels.gpu.executor import LaunchSlice
from plait.backends.kernels.gpu.expression import evaluate
from plait.backends.kernels.gpu.facts import check, expectations
from plait.backends.kernels.gpu.here import Devices, devices
from plait.backends.kernels.gpu.pick import Asked, asked, make
from plait.backends.kernels.gpu.steps import batch
from plait.backends.kernels.gpu.tune import Candidate, SliceStand, Stand
from plait.backends.rocm import BACKEND as ROCM
from plait.cost_models.catalogue import device_of, lookup
from plait.ir import Builder, Rope, weights
from plait.ir.passes import SLICE_PIPELINE, run_passes
from plait.spec import Device, to_json


@dataclass(frozen=True)
class Shape:
    """A block, and the batches it is compiled for."""

    hidden: int = 4096
    heads: int = 32
    kv_heads: int = 8
    head_dim: int = 128
    ffn: int = 14336
    vocabulary: int = 32768
    tokens: int = 2048
    sequences: int = 64
    context: int = 2048
    page_tokens: int = 16

    @property
    def options(self) -> CompileOptions:
        return CompileOptions(self.tokens, self.sequences, self.page_tokens, self.context)

    @property
    def pages(self) -> dict[str, int]:
        return {"full": self.sequences * -(-self.context // self.page_tokens)}


@dataclass(frozen=True)
class Row:
    """One launch, in microseconds; `torch_us` is None where torch has nothing like it or sees no GPU."""

    kernel: str
    nature: str
    rows: int
    sizes: Mapping[str, int]
    tile: str
    predicted_us: float
    measured_us: float
    best_tile: str
    best_us: float
    tau: float | None
    candidates: Sequence[tuple[str, float, float]]
    roof_us: float
    torch_us: float | None


@dataclass(frozen=True)
class StepRow:
    """A decode step of so many sequences, each with so many keys: median time on the host's clock."""

    sequences: int
    keys: int
    step_us: float


def block(s: Shape) -> ModuleOp:
    """As a backend sees it."""
    b, rope = Builder("block", "bfloat16"), Rope(500000.0)
    x = b.embed("embed", s.vocabulary, s.hidden)
    b.block = 0
    normed = b.rms_norm(x, "norm1", 1e-5)
    q = b.rope(b.linear(normed, "q", s.heads * s.head_dim), s.head_dim, rope)
    k = b.rope(b.linear(normed, "k", s.kv_heads * s.head_dim), s.head_dim, rope)
    v = b.linear(normed, "v", s.kv_heads * s.head_dim)
    widths = {"heads": s.heads, "kv_heads": s.kv_heads, "head_dim": s.head_dim, "scale": s.head_dim**-0.5}
    x = b.add(x, b.linear(b.attention(q, k, v, **widths), "o", s.hidden))
    normed = b.rms_norm(x, "norm2", 1e-5)
    gated = b.silu_mul(b.linear(normed, "gate", s.ffn), b.linear(normed, "up", s.ffn))
    x = b.add(x, b.linear(gated, "down", s.hidden))
    b.block = None
    module = b.finish({"logits": b.logits(b.rms_norm(x, "norm", 1e-5), "embed", s.vocabulary)})
    run_passes(module, SLICE_PIPELINE)
    return module


def random_weights(module: ModuleOp) -> Iterator[tuple[str, Any]]:
    """Numbers about 1/64; the same million of them over and over, which is soon made and no easier to multiply."""
    some = (np.random.default_rng(0).standard_normal(1 << 20) / 64).astype(np.float32)
    for name, weight in weights(module).items():
        kind = weight.result.type
        assert isinstance(kind, TensorType)
        yield name, np.resize(some, kind.get_shape())


def measure(
    wanted: Sequence[Asked],
    arch: Arch,
    chip: Device,
    stand: Stand,
    only: str = "",
    torch: Callable[[Asked, int], float | None] = lambda item, rows: None,
) -> list[Row]:
    """Time every candidate of the launches of kernels with `only` in their name; the others are there, with one."""
    able = candidates(wanted, arch, only)
    times: list[list[float]] = [[] for _ in wanted]
    turns = max(map(len, able))
    for turn in range(turns):
        _progress(f"candidate {turn + 1} of {turns}")
        pairs = zip(wanted, able, strict=True)
        stand.take({(item.key, item.most): own[min(turn, len(own) - 1)] for item, own in pairs})
        for item, own, found in zip(wanted, able, times, strict=True):
            if turn < len(own) and only in item.request.kernel.name and (measured := stand.times_us(item)):
                found.append(statistics.median(measured))
    _progress("")
    measured = [(item, own, found) for item, own, found in zip(wanted, able, times, strict=True) if found]
    return [_row(item, own, found, chip, torch) for item, own, found in measured]


def candidates(wanted: Sequence[Asked], arch: Arch, only: str) -> list[list[Candidate]]:
    """What can be launched of each, the one that `choose` would take first."""
    variants = [variants_of(item.request, table.candidates) for item in wanted]
    jobs = [Job(item.request.kernel, v, arch.name) for item, own in zip(wanted, variants, strict=True) for v in own]
    made = iter(compile_many(jobs, progress=lambda done, total, label: _progress(f"compile {done} of {total}")))
    found = []
    for item, own in zip(wanted, variants, strict=True):
        ranked = []
        for variant, binary in [(variant, next(made)) for variant in own]:
            if isinstance(binary, Binary):
                kernel = item.request.kernel
                failures = check(binary.facts, arch, kernel, variant, expectations(kernel, variant, arch))
                if not FATAL & {failure.name for failure in failures}:
                    us = predict(item.request, variant, binary.facts).total_us
                    ranked.append((len(failures), us, Candidate(variant, binary)))
        assert ranked, f"no tile of {item.request.kernel.name} can be launched"
        in_order = [candidate for *_, candidate in sorted(ranked, key=lambda one: one[:2])]
        found.append(in_order if only in item.request.kernel.name else in_order[:1])
    return found


def at(item: Asked, s: Shape) -> Asked:
    """With the sizes of the launch that is timed: a decode step at the longest context."""
    names = dict(item.request.names) | {"L": s.context, "W": s.context}
    numbers = {name: value for name, value in names.items() if isinstance(value, int)}
    kinds = item.need.kernel.scalars.items()
    names |= {name: evaluate(str(item.need.scalars[name]), numbers) for name, kind in kinds if kind == "i32"}
    return replace(item, request=replace(item.request, names=names))


def _row(
    item: Asked, able: list[Candidate], times: list[float], chip: Device, torch: Callable[[Asked, int], float | None]
) -> Row:
    request, rows = item.request, item.most or item.need.most
    predictions = [predict(request, c.variant, c.binary.facts) for c in able]
    predicted = [p.total_us for p in predictions]
    best = min(range(len(able)), key=times.__getitem__)
    return Row(
        kernel=request.kernel.name,
        nature=request.kernel.nature,
        rows=rows,
        sizes={name: value for name, value in item.need.scalars.items() if name in ("N", "K", "H")},
        tile=shape(able[0].variant.tile),
        predicted_us=predicted[0],
        measured_us=times[0],
        best_tile=shape(able[best].variant.tile),
        best_us=times[best],
        tau=kendall(predicted, times),
        candidates=[(shape(c.variant.tile), p, t) for c, p, t in zip(able, predicted, times, strict=True)],
        roof_us=1e6 * max(
            predictions[0].nbytes / chip.bandwidth_bytes_per_s,
            predictions[0].flops / chip.peak_flops_per_s["bfloat16"] * (request.kernel.nature != "stream"),
        ),
        torch_us=torch(item, rows),
    )  # fmt: skip


def kendall(a: Sequence[float], b: Sequence[float]) -> float | None:
    """Kendall's tau: pairs in the same order less pairs in the other, of all pairs. None of fewer than two."""
    pairs = list(combinations(range(len(a)), 2))
    if not pairs:
        return None
    return sum(float(np.sign(a[i] - a[j]) * np.sign(b[i] - b[j])) for i, j in pairs) / len(pairs)


class Torch:
    """The same by torch, timed in the same way."""

    def __init__(self, s: Shape) -> None:
        import torch

        self._torch, self._shape = torch, s
        self._flush = torch.empty(FLUSH_BYTES, dtype=torch.uint8, device="cuda")

    def __call__(self, item: Asked, rows: int) -> float | None:
        torch, s, f = self._torch, self._shape, self._torch.nn.functional
        scalars, name = item.need.scalars, item.request.kernel.name

        def some(*size: int) -> Any:
            return torch.randn(*size, dtype=torch.bfloat16, device="cuda") / 64

        if name == "gemm":
            x, w = some(rows, scalars["K"]), some(scalars["N"], scalars["K"]).T
            added = some(rows, scalars["N"])
            residual = item.need.constants["HAS_RESIDUAL"]
            return self._us(lambda: torch.addmm(added, x, w) if residual else x @ w)
        if name == "gemm_gated":
            x, w = some(rows, scalars["K"]), some(2 * scalars["N"], scalars["K"]).T

            def gated() -> Any:
                gate, up = (x @ w).chunk(2, dim=1)
                return f.silu(gate) * up

            return self._us(gated)
        if name in ("attention_decode", "attention_prefill"):
            count, queries = (rows, 1) if name == "attention_decode" else (1, rows)
            keys = s.context if name == "attention_decode" else rows
            q = some(count, s.heads, queries, s.head_dim)
            k, v = (some(count, s.kv_heads, keys, s.head_dim) for _ in "kv")
            causal = name == "attention_prefill"
            return self._us(lambda: f.scaled_dot_product_attention(q, k, v, is_causal=causal, enable_gqa=True))
        if name == "rms_norm":
            x, weight = some(rows, s.hidden), some(s.hidden)
            return self._us(lambda: f.rms_norm(x, (s.hidden,), weight, 1e-5))
        return None

    def _us(self, call: Callable[[], Any]) -> float:
        cuda = self._torch.cuda
        pairs = [(cuda.Event(enable_timing=True), cuda.Event(enable_timing=True)) for _ in range(20)]
        for _ in range(3):
            call()
        for begin, end in pairs:
            self._flush.zero_()
            begin.record()
            call()
            end.record()
        cuda.synchronize()
        return statistics.median(1e3 * begin.elapsed_time(end) for begin, end in pairs)


def decode_steps(running: LaunchSlice, s: Shape, repeats: int = 30) -> list[StepRow]:
    """Whole decode steps, from the call to the result on the host."""
    rows = []
    for sequences in sorted({1, min(16, s.sequences), s.sequences}):
        made = paged(batch([1] * sequences, [s.context] * sequences), s)
        seconds = []
        for _ in range(repeats + 3):
            start = time.perf_counter()
            running.step(made, {})
            seconds.append(time.perf_counter() - start)
        rows.append(StepRow(sequences, s.context, 1e6 * statistics.median(seconds[3:])))
    return rows


def paged(made: Batch, s: Shape) -> Batch:
    entries = -(-s.context // s.page_tokens)
    places = np.arange(made.sequence_count * entries, dtype=np.int32).reshape(-1, entries)
    return replace(made, page_tables={"full": places})


def print_rows(rows: Sequence[Row], steps: Sequence[StepRow], title: str) -> None:
    print(title)
    print(
        f"{'kernel':18} {'rows':>5} {'N x K':>12} {'model us':>9} {'took us':>8} {'best us':>8} {'slower':>7} "
        f"{'tau':>5} {'roof us':>8} {'of roof':>7} {'torch us':>8}  tile"
    )
    for r in rows:
        size = "x".join(str(r.sizes[name]) for name in ("N", "K", "H") if name in r.sizes)
        tau, torch = ("" if x is None else f"{x:.2f}" for x in (r.tau, r.torch_us))
        print(
            f"{r.kernel:18} {r.rows:5} {size:>12} {r.predicted_us:9.1f} {r.measured_us:8.1f} {r.best_us:8.1f} "
            f"{r.measured_us / r.best_us - 1:7.0%} {tau:>5} {r.roof_us:8.1f} {r.roof_us / r.measured_us:7.0%} "
            f"{torch:>8}  {r.tile}"
        )
    for step in steps:
        print(f"decode step of {step.sequences} sequences with {step.keys} keys: {step.step_us:.0f} us")


def main() -> None:
    args = _arguments()
    found = _found()
    if found is None:
        sys.exit("there is no GPU here that code can be made for: nothing to measure")
    target, arch, here, ordinal = found
    s = Shape(context=args.context)
    chip = device_of(lookup(args.chip or arch.chip))
    module = block(s)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name) / "slice"
        made = make(module, target, arch, s.options)
        write_slice(folder, module, dict(random_weights(module)), {**made.files, PLAN: to_json(made.plan).encode()})
        device = CupyDevice(here.cupy, ordinal)
        clock = CupyClock(here.cupy, device, ordinal)
        load = LoadOptions(s.pages, s.page_tokens, s.tokens, s.sequences, 1, folder)
        running = LaunchSlice(folder, made.plan, device, clock.device, load)
        some = np.random.default_rng(0).standard_normal((64, s.page_tokens, s.kv_heads, s.head_dim))
        for first in range(0, s.pages["full"], len(some)):  # zeros would be easier on the chip than keys are
            places = np.arange(first, min(first + len(some), s.pages["full"]), dtype=np.int32)
            filler = some[: len(places)].astype(ml_dtypes.bfloat16)
            running.import_pages(0, places, filler, filler)
        steps = decode_steps(running, s)
        with SliceStand(module, target, arch, s.options, running, s.pages, clock) as stand:
            wanted = [at(item, s) for item in asked(module, target, arch, s.options)]
            rows = measure(wanted, arch, chip, stand, args.only, _torch(s))
    title = f"{clock.device} ({arch.name}), roof of {chip.name}, context {s.context}, bfloat16"
    print_rows(rows, steps, title)
    if args.json:
        said = {"device": clock.device, "arch": arch.name, "chip": chip.name, "shape": asdict(s)}
        found_rows = {"rows": [asdict(row) for row in rows], "steps": [asdict(step) for step in steps]}
        args.json.write_text(json.dumps({**said, **found_rows}, indent=1) + "\n")


def _found() -> tuple[str, Arch, Devices, int] | None:
    for backend in (CUDA, ROCM):
        here = devices(backend.vendor)
        for ordinal, name in enumerate(here.archs if here is not None else ()):
            if name in ARCHS:
                assert here is not None
                return f"{backend.name}:{ARCHS[name].name}", ARCHS[name], here, ordinal
    return None


def _torch(s: Shape) -> Callable[[Asked, int], float | None]:
    try:
        import torch
    except ImportError:
        return lambda item, rows: None
    return Torch(s) if torch.cuda.is_available() else lambda item, rows: None


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--chip", help="whose peaks the roofline has; by default the architecture's best known")
    parser.add_argument("--context", type=int, default=2048, help="keys of a decode sequence")
    parser.add_argument("--only", default="", help="kernels with this in their name")
    parser.add_argument("--json", type=Path, metavar="FILE")
    return parser.parse_args()


def _progress(text: str) -> None:
    """One line that overwrites itself; silent without a terminal."""
    if sys.stderr.isatty():
        sys.stderr.write(f"\r{text:60}\r")


if __name__ == "__main__":
    main()
