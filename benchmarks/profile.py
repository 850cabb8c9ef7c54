"""How well a profile of this host predicts what a model really does on it: prefill and decode, predicted and measured.

    python benchmarks/profile.py [--model models/smollm2] [--profile FILE | --quick] [--cycles 3] [--rounds 7] [--json]

Without `--profile` this host is measured first, in every cycle again. Then every round measures every prompt length and
batch once, in turn. Printed are the medians over cycles of what was predicted, and over rounds of what was measured,
with what most of them lay between; the ratio is the median over cycles of each cycle's own, so that load that comes and
goes meets both sides. On a machine that does other work too, `--processor-time` counts the seconds that the processor
worked for this process, on one thread and in one process, which others disturb less.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

import plait
from plait.api import profile_device

_DECODE_PROMPT = 64


@dataclass
class Row:
    """One thing that is measured. `name` is `prefill` (of `size` tokens, to the first token out) or `decode` (a step of
    `size` requests)."""

    name: str
    size: int
    predicted: list[plait.spec.Estimate] = field(default_factory=list)
    measured: list[list[float]] = field(default_factory=list)

    def facts(self) -> dict[str, Any]:
        low, middle, high = np.quantile(np.concatenate(self.measured), (0.1, 0.5, 0.9))
        ratios = [p.value / statistics.median(m) for p, m in zip(self.predicted, self.measured, strict=True)]
        return {
            "what": self.name,
            "size": self.size,
            "predicted_s": statistics.median(p.value for p in self.predicted),
            "measured_s": float(middle),
            "ratio": statistics.median(ratios),
            "ratios": ratios,
            "measured_range_s": [float(low), float(high)],
            "source": self.predicted[0].source,
        }


def main() -> None:
    args = _arguments()
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")
    rows = [Row("prefill", size) for size in args.prompts] + [Row("decode", size) for size in args.batches]
    for cycle in range(args.cycles):
        _progress(f"cycle {cycle + 1} of {args.cycles}: profile")
        with tempfile.TemporaryDirectory() as folder:
            _cycle(args, rows, Path(folder), cycle)
    _progress("")
    _print([row.facts() for row in rows], args)


def _cycle(args: argparse.Namespace, rows: list[Row], folder: Path, cycle: int) -> None:
    """Profile, predict, measure."""
    profile = args.profile
    if profile is None:
        clock = time.process_time if args.processor_time else None
        _, profile = profile_device("cpu", output=folder / "p", quick=args.quick, threads=args.threads, clock=clock)
    options = {"dtype": args.dtype, "profile": profile, "concurrency": max(args.batches)}
    made = plait.compile_artifact(args.model, "cpu", output=folder / "m", **options)
    for row in rows:
        row.predicted.append(_predicted(args, row, profile))
        row.measured.append([])
    with plait.open(made, threads=args.threads, in_process=args.processor_time) as pipe:
        for number in range(args.rounds + 1):
            _progress(f"cycle {cycle + 1} of {args.cycles}: round {number} of {args.rounds}")
            for row in rows:
                taken = _measured(pipe, row, args, np.random.default_rng((cycle, number, row.size)))
                if number:  # the first warms up
                    row.measured[-1].append(taken)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    numbers = lambda text: [int(n) for n in text.split(",")]  # noqa: E731
    parser.add_argument("--model", default="models/smollm2")
    parser.add_argument("--profile", type=Path)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--prompts", type=numbers, default=[16, 64, 128, 256, 512, 1024])
    parser.add_argument("--batches", type=numbers, default=[1, 4, 16])
    parser.add_argument("--new", type=int, default=16)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--cycles", type=int, default=1)
    parser.add_argument("--threads", type=int)
    parser.add_argument("--processor-time", action="store_true")
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    if args.processor_time:
        args.threads = 1
    if not Path(args.model).exists():
        sys.exit(f"{args.model} is not there; try: plait pull smollm2 -o {args.model}")
    return args


def _predicted(args: argparse.Namespace, row: Row, profile: Path) -> plait.spec.Estimate:
    prefill = row.name == "prefill"
    sizes = (row.size, 1, 1) if prefill else (_DECODE_PROMPT, args.new, row.size)
    asked = plait.Workload("measured", *sizes)
    made = plait.plan(args.model, "cpu", dtype=args.dtype, profile=profile, workload=asked)
    assert made.prediction is not None
    return made.prediction.ttft_s if prefill else made.prediction.tpot_s


def _measured(pipe: plait.Pipeline, row: Row, args: argparse.Namespace, rng: np.random.Generator) -> float:
    """Prompts differ every time, so that nothing of them is held already; those that the model ends early on are not
    counted."""
    clock = time.process_time if args.processor_time else time.perf_counter

    def run(count: int, tokens: int, new: int) -> float:
        while True:
            prompts = rng.integers(1000, 40000, (count, tokens)).tolist()
            start = clock()
            out = pipe.generate_ids(prompts, new)
            seconds = clock() - start
            if all(len(made) == new for made in out):
                return seconds

    if row.name == "prefill":
        return run(1, row.size, 1)
    first = run(row.size, _DECODE_PROMPT, 1)
    return (run(row.size, _DECODE_PROMPT, 1 + args.new) - first) / args.new


def _progress(text: str) -> None:
    if sys.stderr.isatty():
        sys.stderr.write(f"\r{text:60}\r")


def _print(rows: list[dict[str, Any]], args: argparse.Namespace) -> None:
    if args.json:
        print(
            json.dumps({"model": str(args.model), "dtype": args.dtype, "rounds": args.rounds, "rows": rows}, indent=2)
        )
        return
    print(f"{args.model}, {args.dtype}, {args.rounds} rounds; load average {os.getloadavg()[0]:.1f}")
    print(f"{'':8} {'size':>5} {'predicted':>11} {'measured':>11} {'ratio':>6}   measured, 80 % of rounds")
    for row in rows:
        low, high = row["measured_range_s"]
        print(
            f"{row['what']:8} {row['size']:5} {row['predicted_s'] * 1e3:8.1f} ms {row['measured_s'] * 1e3:8.1f} ms "
            f"{row['ratio']:6.2f}   {low * 1e3:.1f} to {high * 1e3:.1f} ms"
        )


if __name__ == "__main__":
    main()
