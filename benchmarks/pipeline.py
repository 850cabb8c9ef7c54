"""What splitting costs: one process against 1, 2 and 3 slices of one backend, and transformers on the same weights.

    python benchmarks/pipeline.py [--model models/smollm2] [--batches 1,8] [--rounds 5] [--json]

Every round measures every engine once, in turn, so a noisy machine is noisy for all; figures are medians over the
rounds and `ratio` is the median of each round's ratio to `one process`. All compute in float32 with the same number of
threads.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

import plait

Run = Callable[[list[list[int]], int], list[list[int]]]


def main() -> None:
    args = _arguments()
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")
    blocks = plait.plan(args.model, "h100", dtype="float32").blocks
    with tempfile.TemporaryDirectory() as folder:
        pipes = {"one process": _open(args, Path(folder), blocks, 1, in_process=True)}
        pipes |= {f"{n} slice{'s' * (n > 1)}": _open(args, Path(folder), blocks, n) for n in (1, 2, 3)}
        engines: dict[str, Run] = {name: _runner(pipe) for name, pipe in pipes.items()}
        engines["transformers"] = _transformers(args)
        rows = [row for batch in args.batches for row in _measure(engines, batch, args)]
        hops = {name: _hop(pipe) for name, pipe in pipes.items()}
        for pipe in pipes.values():
            pipe.close()
    _print(rows, hops, args)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--model", default="models/smollm2")
    parser.add_argument("--batches", type=lambda text: [int(n) for n in text.split(",")], default=[1, 8])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--prompt", type=int, default=128)
    parser.add_argument("--new", type=int, default=32)
    parser.add_argument("--threads", type=int, default=os.cpu_count())
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    if not Path(args.model).exists():
        sys.exit(f"{args.model} is not there; try: plait pull smollm2 -o {args.model}")
    return args


def _open(args: argparse.Namespace, folder: Path, blocks: int, slices: int, in_process: bool = False) -> plait.Pipeline:
    """Equal shares of the blocks, so that only the split differs."""
    layers = [blocks // slices + (i < blocks % slices) for i in range(slices)]
    output = folder / f"{slices}.plait"
    plait.compile_artifact(args.model, f"{slices}xh100", layers=layers, dtype="float32", output=output)
    return plait.open(output, threads=args.threads, in_process=in_process)


def _runner(pipe: plait.Pipeline) -> Run:
    return lambda prompts, new: pipe.generate_ids(prompts, new)


def _transformers(args: argparse.Namespace) -> Run:
    import torch
    from transformers import AutoModelForCausalLM

    torch.set_num_threads(args.threads)
    model = AutoModelForCausalLM.from_pretrained(args.model, dtype=torch.float32).eval()

    def run(prompts: list[list[int]], new: int) -> list[list[int]]:
        with torch.inference_mode():
            out = model.generate(
                torch.tensor(prompts),
                attention_mask=torch.ones(len(prompts), len(prompts[0]), dtype=torch.long),
                do_sample=False,
                min_new_tokens=new,
                max_new_tokens=new,
                pad_token_id=0,
            )
        return [row[len(prompts[0]) :] for row in out.tolist()]

    return run


def _measure(engines: dict[str, Run], batch: int, args: argparse.Namespace) -> list[dict[str, Any]]:
    """Prefill (prompt tokens per second) and decode (new tokens per second) of every engine."""
    rng = np.random.default_rng(0)
    prompts = [rng.integers(1000, 40000, args.prompt).tolist() for _ in range(batch)]
    times: dict[str, list[tuple[float, float]]] = {name: [] for name in engines}
    for name, run in engines.items():
        run(prompts, 2)  # warm: caches, compiled shapes
        _progress(f"batch {batch}: warm {name}")
    for number in range(args.rounds):
        for name, run in engines.items():
            _progress(f"batch {batch}: round {number + 1} of {args.rounds}, {name}")
            prefill = _seconds(run, prompts, 1)
            times[name].append((prefill, _seconds(run, prompts, args.new + 1) - prefill))
    _progress("")
    base = times["one process"]
    return [
        {
            "engine": name,
            "batch": batch,
            "prefill_tokens_per_s": batch * args.prompt / statistics.median(p for p, _ in measured),
            "decode_tokens_per_s": batch * args.new / statistics.median(d for _, d in measured),
            "decode_ratio": statistics.median(b[1] / m[1] for b, m in zip(base, measured, strict=True)),
            "decode_ratio_worst": min(b[1] / m[1] for b, m in zip(base, measured, strict=True)),
        }
        for name, measured in times.items()
    ]


def _progress(text: str) -> None:
    """One line that overwrites itself; silent without a terminal."""
    if sys.stderr.isatty():
        sys.stderr.write(f"\r{text:60}\r")


def _seconds(run: Run, prompts: list[list[int]], new: int) -> float:
    start = time.perf_counter()
    out = run(prompts, new)
    seconds = time.perf_counter() - start
    short = [len(row) for row in out if len(row) != new]
    if short:
        sys.exit(f"an engine stopped after {short[0]} tokens instead of {new}: choose other prompts")
    return seconds


def _hop(pipe: plait.Pipeline) -> dict[str, Any]:
    """Mean seconds per step from the hand-over by the slice before to the start, for each boundary."""
    slices = pipe.stats()["slices"]
    return {f"{i}": row["hop_s"] / max(1, row["steps"]) for i, row in enumerate(slices) if i}


def _print(rows: list[dict[str, Any]], hops: dict[str, Any], args: argparse.Namespace) -> None:
    if args.json:
        print(json.dumps({"rows": rows, "hops": hops, "threads": args.threads, "rounds": args.rounds}, indent=2))
        return
    print(f"{args.model}, float32, {args.threads} threads, {args.prompt} + {args.new} tokens, {args.rounds} rounds")
    print(f"{'engine':14} {'batch':>5} {'prefill tok/s':>14} {'decode tok/s':>13} {'ratio':>7} {'worst':>7}")
    for row in rows:
        print(
            f"{row['engine']:14} {row['batch']:5} {row['prefill_tokens_per_s']:14.1f} "
            f"{row['decode_tokens_per_s']:13.1f} {row['decode_ratio']:7.3f} {row['decode_ratio_worst']:7.3f}"
        )
    for name, boundaries in hops.items():
        for index, seconds in boundaries.items():
            print(f"{name}: hop into slice {index} {seconds * 1e6:.0f} us per step")


if __name__ == "__main__":
    main()
