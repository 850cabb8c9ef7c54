"""How well a profile of this host predicts what a model really does on it: prefill and decode, predicted and measured.

    python benchmarks/profile.py [--model models/smollm2] [--profile FILE | --quick] [--rounds 7] [--json]

Without `--profile` this host is measured first. Then every round measures every prompt length and batch once, in turn;
what is printed are medians over the rounds, and what most of them lay between. On a machine that does other work too,
profile and rounds may meet different load: run it again, and quote the worst.
"""

from __future__ import annotations

import argparse
import json
import os
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
    predicted: plait.spec.Estimate
    measured: list[float] = field(default_factory=list)

    def facts(self) -> dict[str, Any]:
        low, middle, high = np.quantile(self.measured, (0.1, 0.5, 0.9))
        return {
            "what": self.name,
            "size": self.size,
            "predicted_s": self.predicted.value,
            "measured_s": middle,
            "ratio": self.predicted.value / middle,
            "measured_range_s": [low, high],
            "predicted_range_s": [self.predicted.low, self.predicted.high],
            "source": self.predicted.source,
        }


def main() -> None:
    args = _arguments()
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")
    with tempfile.TemporaryDirectory() as folder:
        profile = args.profile
        if profile is None:
            profile = Path(folder) / "profile.json"
            profile_device("cpu", output=profile, quick=args.quick, threads=args.threads)
        made = plait.compile_artifact(
            args.model, "cpu", dtype=args.dtype, profile=profile, concurrency=max(args.batches), output=Path(folder) / "m"
        )
        rows = _predicted(args, profile)
        with plait.open(made, threads=args.threads) as pipe:
            for number in range(args.rounds + 1):
                _progress(f"round {number} of {args.rounds}")
                for row in rows:
                    taken = _measured(pipe, row, args.new, np.random.default_rng((number, row.size)))
                    if number:  # the first warms up
                        row.measured.append(taken)
    _progress("")
    _print([row.facts() for row in rows], args)


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
    parser.add_argument("--threads", type=int)
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    if not Path(args.model).exists():
        sys.exit(f"{args.model} is not there; try: plait pull smollm2 -o {args.model}")
    return args


def _predicted(args: argparse.Namespace, profile: Path) -> list[Row]:
    def of(prompt: int, output: int, batch: int) -> plait.spec.Prediction:
        asked = plait.Workload("measured", prompt, output, batch)
        made = plait.plan(args.model, "cpu", dtype=args.dtype, profile=profile, workload=asked)
        assert made.prediction is not None
        return made.prediction

    rows = [Row("prefill", size, of(size, 1, 1).ttft_s) for size in args.prompts]
    return rows + [Row("decode", size, of(_DECODE_PROMPT, args.new, size).tpot_s) for size in args.batches]


def _measured(pipe: plait.Pipeline, row: Row, new: int, rng: np.random.Generator) -> float:
    """Prompts differ every time, so that nothing of them is held already; those that the model ends early on are not
    counted."""

    def run(count: int, tokens: int, new: int) -> float:
        while True:
            prompts = rng.integers(1000, 40000, (count, tokens)).tolist()
            start = time.perf_counter()
            out = pipe.generate_ids(prompts, new)
            seconds = time.perf_counter() - start
            if all(len(made) == new for made in out):
                return seconds

    if row.name == "prefill":
        return run(1, row.size, 1)
    first = run(row.size, _DECODE_PROMPT, 1)
    return (run(row.size, _DECODE_PROMPT, 1 + new) - first) / new


def _progress(text: str) -> None:
    if sys.stderr.isatty():
        sys.stderr.write(f"\r{text:60}\r")


def _print(rows: list[dict[str, Any]], args: argparse.Namespace) -> None:
    if args.json:
        print(json.dumps({"model": str(args.model), "dtype": args.dtype, "rounds": args.rounds, "rows": rows}, indent=2))
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
