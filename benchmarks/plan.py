"""Planning time: a 405B Llama of 126 layers over eight mixed groups, from building the IR to the plan.

    python benchmarks/plan.py [--targets 2xh100@a,...] [--rounds 5] [--json]

Every figure is the median over the rounds, in seconds.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from typing import Any

from plait.cost_models import cluster_for
from plait.cost_models.profile import ModelProfile, profile
from plait.ir import Builder, Rope
from plait.partitioner import Problem, solve
from plait.spec import WORKLOADS, parse_targets

#: Eight kinds on eight hosts: nothing is interchangeable, every order is a plan of its own.
TARGETS = "h100,h200,b200,gh200,mi300x,mi325x,mi355x,tpu-v5p"
OBJECTIVES = ("throughput", "latency", "capacity")


def llama_405b() -> Any:
    """Llama 3.1 405B in bfloat16: 126 blocks, hidden 16384, 128 heads, 8 KV heads, FFN 53248, vocabulary 128256."""
    hidden, heads, kv_heads, head_dim, ffn, vocabulary = 16384, 128, 8, 128, 53248, 128256
    b, rope = Builder("llama-405b", "bfloat16"), Rope(500000.0)
    x = b.embed("embed", vocabulary, hidden)
    for block in range(126):
        b.block = block
        name = f"layers.{block}."
        normed = b.rms_norm(x, name + "norm1", 1e-5)
        q = b.rope(b.linear(normed, name + "q", heads * head_dim), head_dim, rope)
        k = b.rope(b.linear(normed, name + "k", kv_heads * head_dim), head_dim, rope)
        v = b.linear(normed, name + "v", kv_heads * head_dim)
        shape = {"heads": heads, "kv_heads": kv_heads, "head_dim": head_dim, "scale": head_dim**-0.5}
        x = b.add(x, b.linear(b.attention(q, k, v, **shape), name + "o", hidden))
        normed = b.rms_norm(x, name + "norm2", 1e-5)
        gated = b.silu_mul(b.linear(normed, name + "gate", ffn), b.linear(normed, name + "up", ffn))
        x = b.add(x, b.linear(gated, name + "down", hidden))
    b.block = None
    return b.finish({"logits": b.logits(b.rms_norm(x, "norm", 1e-5), "head", vocabulary)})


def main() -> None:
    args = _arguments()
    seconds: dict[str, list[float]] = {}

    def timed(name: str, run: Callable[[], Any]) -> Any:
        start = time.perf_counter()
        result = run()
        seconds.setdefault(name, []).append(time.perf_counter() - start)
        return result

    cluster = cluster_for(parse_targets(args.targets))
    for _ in range(args.rounds):
        module = timed("build the IR", llama_405b)
        model: ModelProfile = timed("profile", lambda module=module: profile(module))
        for objective in OBJECTIVES:
            problem = Problem(model, cluster, WORKLOADS["chat"], objective)
            timed(f"plan for {objective}", lambda problem=problem: solve(problem))
    medians = {name: statistics.median(times) for name, times in seconds.items()}
    if args.json:
        print(json.dumps({"targets": args.targets, "rounds": args.rounds, "median_s": medians}, indent=2))
        return
    print(f"{len(cluster.devices)} devices ({args.targets}), 126 layers, median of {args.rounds}")
    for name, value in medians.items():
        print(f"{name:24} {value:8.3f} s")


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--targets", default=TARGETS)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", action="store_true")
    return parser.parse_args()


if __name__ == "__main__":
    main()
