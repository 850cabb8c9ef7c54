"""How fast the simulator is, and how near to what was measured: `python benchmarks/simulator.py [PART ...] [--json]`.

    speed     simulated steps per second of one core (processor time, so that others' work does not count)
    replay    a trace on the real runtime of this machine, SmolLM2 over two cpu slices, against the simulation of it
              with stage times measured just before and after; in the end the ratio of the means of all
              rounds, since other work on the machine changes its speed from minute to minute
    tensorrt  TensorRT-LLM's published offline throughput (Llama-3.3-70B FP4, RTX PRO 6000, one and several stages)
    serving   LLMServingSim's published vLLM run (Qwen3-30B-A3B, 300 ShareGPT requests, 10 a second)

Without a PART all of them. Every published point is printed, near or far.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import yaml
from points import DATA, device, link_bytes_per_s, model, points, rows

import plait
from plait.cost_models.cases import Point, kv_room
from plait.cost_models.collectives import all_gather_s
from plait.cost_models.op_time import ATTENTION, EXPERTS, KINDS, MATMUL, OTHER, Shard, Work, seconds, unit_rows
from plait.cost_models.profile import OpFacts, UnitFacts
from plait.cost_models.roofline import Rates, speeds_of
from plait.cost_models.serving import step_s
from plait.cost_models.simulator import (
    Arrivals,
    Batch,
    Hop,
    Lengths,
    PipelineSpec,
    PointTimes,
    Pool,
    Setup,
    Stage,
    StageTimes,
    Traffic,
    Wire,
    draw,
    simulate,
)
from plait.cost_models.simulator.op_times import OpTimes, UnitPrices, prices_of, slice_times
from plait.cost_models.speeds import device_speeds, fitted, quantities
from plait.ir.facts import Cost, Step
from plait.runtime.pipeline import Pipeline
from plait.spec import Device

Row = dict[str, Any]


# Speed


class Formula:
    """Stage times that cost nothing to look up: what is left is the simulator itself."""

    def step_s(self, batch: Batch) -> float:
        return 1e-3 + 1e-5 * batch.tokens


def speed(args: argparse.Namespace) -> list[Row]:
    """Steps of all stages per second: of the simulator alone, and with the cost model, its tables empty and filled."""
    llama, chip = model("llama-3-70b"), device("h100")
    blocks = len(llama.blocks)
    out = []
    for stages, together in ((1, 8), (2, 64), (4, 64), (4, 256)):
        cuts = [blocks * i // stages for i in range(stages + 1)]
        prices = prices_of(llama, chip)
        modelled = [slice_times(llama, chip, a, b, prices) for a, b in pairwise(cuts)]
        lengths = Lengths("lognormal", 500, 0.8, high=4000), Lengths("lognormal", 250, 0.8, high=2000)
        traffic = draw(12 * together + 100, Arrivals("closed", concurrency=together), *lengths)
        for name, times in (
            ("formula", [Formula()] * stages),
            ("cost model, first run", modelled),
            ("cost model, again", modelled),
        ):
            setup = Setup((_pipeline(times, max_sequences=together, pools=(Pool(together * 400),)),))
            start = time.process_time()
            steps = simulate(setup, traffic).summary.stage_steps
            took = time.process_time() - start
            out.append(
                {"stages": stages, "at once": together, "times": name, "steps": steps, "steps/s": round(steps / took)}
            )
    return out


def _pipeline(times: Sequence[StageTimes], hop: Hop | None = None, **options: Any) -> PipelineSpec:
    stages = tuple(Stage(f"stage{i}", own) for i, own in enumerate(times))
    hops = tuple(
        None if hop is None else replace(hop, wire=replace(hop.wire, name=f"link{i}")) for i in range(len(stages) - 1)
    )
    return PipelineSpec(stages, hops, **options)


# Replay


@dataclass(frozen=True)
class Measured:
    """One calibration: points of every slice, the hop into the second, what is left of a step."""

    prompt: tuple[tuple[tuple[float, float], ...], ...]
    decode: tuple[tuple[tuple[float, float], ...], ...]
    kv_s: tuple[float, ...]
    hop_s: float
    driver_s: float


_CHUNKS, _DECODES = (16, 64, 192, 448), (1, 3, 8)
_SHORT, _FEW, _MANY = 16, 4, 16


def replay(args: argparse.Namespace) -> list[Row]:
    """A burst of requests of mixed lengths, more than the pipeline can bear, so that throughput is its own."""
    if not Path(args.model).exists():
        sys.exit(f"{args.model} is not there; try: plait pull smollm2 -o {args.model}")
    prompts, outputs = Lengths("lognormal", 96, 0.8, high=400), Lengths("lognormal", 32, 0.6, low=4, high=96)
    traffic = draw(args.requests, Arrivals("poisson", 6.0), prompts, outputs, seed=1)
    found = []
    with tempfile.TemporaryDirectory() as folder:
        made = Path(folder) / "two.plait"
        options: dict[str, Any] = {"context": 512, "concurrency": 8, "layers": args.layers}
        artifact = plait.compile_artifact(args.model, "2xcpu", output=made, device_code=False, **options)
        with Pipeline.open(artifact.manifest, artifact.folder, threads=1) as pipe:
            _calibrated(pipe)  # warm: caches, compiled shapes
            for number in range(args.rounds):
                before = _calibrated(pipe)
                ttft, tpot, rate = _replayed(pipe, traffic)
                after = _calibrated(pipe)
                setup = Setup((_spec(pipe, [before, after]),))
                s = simulate(setup, traffic).summary
                assert s.tpot_s is not None
                drift = sum(after.decode[i][-1][1] for i in (0, 1)) / sum(before.decode[i][-1][1] for i in (0, 1))
                for metric, real, ours in (
                    ("TTFT mean s", ttft, s.ttft_s.mean),
                    ("TPOT mean ms", 1e3 * tpot, 1e3 * s.tpot_s.mean),
                    ("output tokens/s", rate, s.output_tokens_per_s),
                ):
                    found.append(
                        {"round": number, "metric": metric, "measured": real, "simulated": ours, "ratio": ours / real,
                         "calibration drift": drift}
                    )  # fmt: skip
    for metric in ("TTFT mean s", "TPOT mean ms", "output tokens/s"):
        mine = [row for row in found if row["metric"] == metric]
        means = {
            name: statistics.fmean(row[name] for row in mine) for name in ("measured", "simulated", "calibration drift")
        }
        ratio = means["simulated"] / means["measured"]
        found.append({"round": "mean", "metric": metric, "measured": means["measured"],
                      "simulated": means["simulated"], "ratio": ratio,
                      "calibration drift": means["calibration drift"]})  # fmt: skip
    return found


def _calibrated(pipe: Pipeline) -> Measured:
    """Stage times from the runtime's own counters: prompts alone, then decodes as the difference of two lengths."""
    rng = np.random.default_rng(0)

    def run(count: int, prompt: int, new: int) -> tuple[np.ndarray, np.ndarray, float, int]:
        """Seconds of each slice and into each, of all together, and steps; of `count` requests."""
        asked = [rng.integers(1000, 40000, prompt).tolist() for _ in range(count)]
        before, start = pipe.stats(), time.perf_counter()
        pipe.generate_ids(asked, max_tokens=new, eos_ids=())
        wall, after = time.perf_counter() - start, pipe.stats()
        busy, hop = (
            np.array([b[name] - a[name] for a, b in zip(before["slices"], after["slices"], strict=True)])
            for name in ("busy_s", "hop_s")
        )
        return busy, hop, wall, after["steps"] - before["steps"]

    def decode(count: int, prompt: int) -> tuple[np.ndarray, float, float]:
        """Of one step: seconds of each slice, into the second, and what is left."""
        few, many = run(count, prompt, _FEW), run(count, prompt, _MANY)
        steps = many[3] - few[3]
        busy, hop = (many[0] - few[0]) / steps, float((many[1] - few[1])[1]) / steps
        return busy, hop, (many[2] - few[2]) / steps - float(busy.sum()) - hop

    long = 400
    at = {count: decode(count, _SHORT) for count in _DECODES}
    kv_s = np.maximum((decode(1, long)[0] - at[1][0]) / (long - _SHORT), 0.0)
    held = _SHORT + (_FEW + _MANY) / 2
    chunks = {new: np.mean([run(1, new, 1)[0] for _ in range(2)], axis=0) for new in _CHUNKS}
    slices = range(len(kv_s))
    return Measured(
        tuple(tuple((float(n), float(max(t[i] - n * kv_s[i], 1e-6))) for n, t in chunks.items()) for i in slices),
        tuple(tuple((float(n), float(max(t[0][i] - n * held * kv_s[i], 1e-6))) for n, t in at.items()) for i in slices),
        tuple(kv_s.tolist()),
        max(statistics.median(t[1] for t in at.values()), 0.0),
        max(statistics.median(t[2] for t in at.values()), 0.0),
    )


def _spec(pipe: Pipeline, runs: list[Measured]) -> PipelineSpec:
    """The pipeline as the runtime has it, with the mean of some calibrations."""

    def mean(points: Callable[[Measured], Sequence[tuple[float, float]]]) -> list[tuple[float, float]]:
        return [(p[0][0], statistics.fmean(y for _, y in p)) for p in zip(*map(points, runs), strict=True)]

    def times(i: int) -> PointTimes:
        return PointTimes(mean(lambda m: m.prompt[i]), mean(lambda m: m.decode[i]),
                          statistics.fmean(m.kv_s[i] for m in runs))  # fmt: skip

    known = pipe.manifest
    return _pipeline(
        [times(i) for i in range(len(known.slices))],
        Hop(Wire("hop", 1e12, statistics.fmean(m.hop_s for m in runs)), 1.0),
        pools=(Pool(known.max_kv_tokens // known.page_tokens, known.page_tokens),),
        max_sequences=known.max_sequences,
        max_step_tokens=known.max_step_tokens,
        in_flight=1,
        driver_s=statistics.fmean(m.driver_s for m in runs),
    )


def _replayed(pipe: Pipeline, traffic: Traffic) -> tuple[float, float, float]:
    """Mean TTFT and TPOT in seconds, and output tokens per second, of the trace on the real runtime."""
    rng = np.random.default_rng(2)
    texts = [rng.integers(1000, 40000, ask.prompt_tokens).tolist() for ask in traffic.asks]
    start, asked = time.perf_counter(), []
    for ask, text in zip(traffic.asks, texts, strict=True):
        time.sleep(max(0.0, ask.arrival_s - (time.perf_counter() - start)))
        asked.append(pipe.submit(text, max_tokens=ask.output_tokens, eos_ids=()))
    results = [request.result() for request in asked]
    took = time.perf_counter() - start
    assert [len(r.token_ids) for r in results] == [ask.output_tokens for ask in traffic.asks]
    ttft = [r.ttft_s for r in results if r.ttft_s is not None]
    tpot = [(r.total_s - r.ttft_s) / (len(r.token_ids) - 1) for r in results if r.ttft_s is not None]
    return statistics.fmean(ttft), statistics.fmean(tpot), sum(len(r.token_ids) for r in results) / took


# Published points


class EngineTimes:
    """A slice's time and its collectives, beside the host's for a step, which overlap in part; and its share of what
    further stages cost a round through the pipeline: as the fit has them for an engine."""

    def __init__(
        self,
        device_times: StageTimes,
        engine: str,
        stages: int = 1,
        collectives_s: Callable[[int], float] = lambda tokens: 0.0,
    ) -> None:
        self._collectives_s = collectives_s
        self._times, known = device_times, fitted().engines[engine]
        self._host, self._each = known["host_s"].value, known["host_request_s"].value
        self._further = known["stage_s"].value * (stages - 1) / stages
        self._more = max(known["prefill"].value, 1.0) - 1.0

    def step_s(self, batch: Batch) -> float:
        own = self._times.step_s(batch)
        own = own * (1 + self._more * batch.prompt_tokens / batch.tokens) + self._collectives_s(batch.tokens)
        return self._further + float(step_s(own, self._host + self._each * (batch.decodes + len(batch.chunks))))


def _price(chip: Device, shard: Shard, dtype: str, launches: float) -> Callable[[UnitFacts, Step], float]:
    """Of a unit whose blocks' matrices are multiplied in `dtype`; attention, tables and the head in 16 bits."""
    narrow, wide = device_speeds(chip, dtype), device_speeds(chip, "bfloat16")
    flops = {MATMUL: narrow.flops[MATMUL], EXPERTS: narrow.flops[EXPERTS], ATTENTION: wide.flops[ATTENTION],
             OTHER: wide.flops[OTHER]}  # fmt: skip

    def price(facts: UnitFacts, step: Step) -> float:
        work = Work.of(unit_rows(facts, step, shard))
        per_op = np.where(work.wide & (work.kind == KINDS.index(MATMUL)), wide.flops[MATMUL],
                          np.array([flops[kind] for kind in KINDS])[work.kind])  # fmt: skip
        at = speeds_of(work, Rates(0.0, 0.0, narrow))
        return float(seconds(work, replace(at, flops_per_s=per_op, launch_s=at.launch_s * launches)).sum())

    return price


def _stages(point: Point, dtype: str, engine: str) -> list[EngineTimes]:
    launches = fitted().engines[engine]["launches"].value
    prices = UnitPrices(_price(point.device, point.shard, dtype, launches))
    units, blocks, count = point.profile.units, len(point.profile.blocks), point.stages
    out = []
    for i in range(count):
        start, end = blocks * i // count, blocks * (i + 1) // count
        mine = units[start + 1 : end + 1]
        mine = (*(units[:1] if i == 0 else ()), *mine, *(units[-1:] if i == count - 1 else ()))
        out.append(EngineTimes(OpTimes([unit.facts for unit in mine], prices), engine, count))
    return out


#: Tokens that TensorRT-LLM's benchmark lets into a step, and rounds of requests that make a long run.
_STEP_TOKENS, _ROUNDS = 8192, 3


def tensorrt(args: argparse.Namespace) -> list[Row]:
    """All requests at the start, KV pages for what fits beside the weights. The fit has seen the rows that are not held
    out; nobody has fitted the simulator."""
    out = []
    chosen = [
        row for row in rows()
        if row.software.startswith("TensorRT-LLM 1.0") and row.device == "rtxpro6000" and row.tp == 1
        and row.metric == "throughput" and row.model == "llama-3-70b" and row.prompt_tokens <= 5000
    ]  # fmt: skip
    seen = {(row.pp, row.prompt_tokens, row.output_tokens) for row in chosen}
    base = next(row for row in chosen if (row.prompt_tokens, row.output_tokens) == (1000, 1000))
    # Two and eight stages stand in a table of the same source, not among the rows.
    scaling = yaml.safe_load((DATA / "pipeline.yaml").read_text(encoding="utf-8"))["tokens_per_s"]
    more = [replace(base, pp=pp, value=float(value), id=f"pp{pp}", held_out=True)
            for pp, value in scaling.items() if (pp, 1000, 1000) not in seen]  # fmt: skip
    for row, point in zip([*chosen, *more], points([*chosen, *more]), strict=True):
        room = min(kv_room(point), 2048)
        total = point.prompt_tokens + point.output_tokens
        wire = Wire("link", point.link_bytes_per_s, 1e-5)
        spec = _pipeline(
            _stages(point, point.matmul_dtype, f"{point.engine}/{point.generation}"),
            Hop(wire, point.profile.boundary_bytes_per_token[0]),
            pools=(Pool(room * -(-total // 16), 16),),
            max_sequences=room,
            max_step_tokens=_STEP_TOKENS * point.stages,
        )
        lengths = Lengths("fixed", point.prompt_tokens), Lengths("fixed", point.output_tokens)
        s = simulate(Setup((spec,)), draw(_ROUNDS * room, Arrivals("at-once"), *lengths)).summary
        out.append(
            {"id": row.id, "stages": row.pp, "prompt": row.prompt_tokens, "output": row.output_tokens, "at once": room,
             "measured": row.value, "simulated": s.output_tokens_per_s, "ratio": s.output_tokens_per_s / row.value,
             "fit saw it": not row.held_out}
        )  # fmt: skip
    return sorted(out, key=lambda row: (row["prompt"], row["output"], row["stages"]))


#: Of LLMServingSim's README (bench/examples, vLLM 0.19.0): Qwen3-30B-A3B in bf16, two RTX PRO 6000, experts over both.
_SERVED = {"TTFT mean s": 1.086, "TPOT mean ms": 47.3, "request mean s": 32.3446}

#: Its trace is not published with the numbers. Output: what the three means leave, (32.3 - 1.1) s / 47.3 ms. Prompt:
#: assumed, a usual mean of ShareGPT; both as varied as there.
_SHAREGPT = Lengths("lognormal", 220, 1.2, high=4000), Lengths("lognormal", 661, 0.8, high=4000)


def serving(args: argparse.Namespace) -> list[Row]:
    """Two engines that share the experts: each reads half of them, for the tokens of both. Nothing of vLLM's on this
    chip is among the points of the fit; that the engines wait for each other in every step is left out."""
    chip, qwen = device("rtxpro6000"), model("qwen3-30b-a3b")
    launches = fitted().engines["vllm"]["launches"].value

    def shared(op: OpFacts) -> OpFacts:
        if op.name != "plait.experts":
            return op

        def cost(step: Step) -> Cost:
            both = op.cost(Step(step.query_lens * 2, step.kv_lens * 2, step.logit_rows))
            return Cost(both.flops / 2, both.weight_bytes / 2, both.activation_bytes / 2, both.kv_bytes / 2)

        return replace(op, cost=cost)

    kinds = {facts: replace(facts, ops=tuple(map(shared, facts.ops))) for facts in {u.facts for u in qwen.units}}
    prices, reached = UnitPrices(_price(chip, Shard(), "bfloat16", launches)), quantities(chip)
    assert reached is not None
    rate, width = link_bytes_per_s("rtxpro6000") * reached["link"].value, qwen.boundary_bytes_per_token[0]

    def collectives_s(tokens: int) -> float:
        """Before and after the experts of every block, the rows of both engines go over PCIe."""
        each = all_gather_s(2.0 * tokens * width, 2, rate, reached["reduce_latency_s"].value)
        return 2 * len(qwen.blocks) * float(each)

    times = EngineTimes(OpTimes([kinds[u.facts] for u in qwen.units], prices), "vllm", 1, collectives_s)
    pipes = tuple(
        PipelineSpec(
            (Stage(f"gpu{i}", times),), pools=(Pool(30_000),), max_sequences=256, max_step_tokens=2048, kv="grow"
        )
        for i in range(2)
    )
    seeds = [simulate(Setup(pipes), draw(300, Arrivals("poisson", 10.0), *_SHAREGPT, seed=seed)).summary
             for seed in range(args.rounds)]  # fmt: skip
    ours = {
        "TTFT mean s": [s.ttft_s.mean for s in seeds],
        "TPOT mean ms": [1e3 * s.tpot_s.mean for s in seeds if s.tpot_s],
        "request mean s": [s.e2e_s.mean for s in seeds],
    }
    return [
        {"metric": name, "measured": value, "simulated": statistics.median(ours[name]),
         "ratio": statistics.median(ours[name]) / value,
         "over seeds": f"{min(ours[name]):.3g} to {max(ours[name]):.3g}"}
        for name, value in _SERVED.items()
    ]  # fmt: skip


# The table

PARTS: dict[str, Callable[[argparse.Namespace], list[Row]]] = {
    "speed": speed, "replay": replay, "tensorrt": tensorrt, "serving": serving,
}  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("part", nargs="*", choices=[[], *PARTS])
    parser.add_argument("--model", default="models/smollm2", help="of the replay")
    parser.add_argument("--layers", type=lambda text: [int(n) for n in text.split(",")], default=None)
    parser.add_argument("--requests", type=int, default=24, help="of the replay")
    parser.add_argument("--rounds", type=int, default=5, help="of the replay; seeds of `serving`")
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    found = {name: PARTS[name](args) for name in args.part or PARTS}
    if args.json:
        print(json.dumps(found, indent=2))
        return
    for name, table in found.items():
        print(f"\n{name}\n| " + " | ".join(table[0]) + " |\n|" + " --- |" * len(table[0]))
        for row in table:
            print(
                "| "
                + " | ".join(f"{cell:.3g}" if isinstance(cell, float) else str(cell) for cell in row.values())
                + " |"
            )


if __name__ == "__main__":
    main()
