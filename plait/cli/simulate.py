"""`plait simulate`: serve made-up or recorded requests with a plan's pipeline, on paper."""

from __future__ import annotations

import shlex
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from plait.cli.options import Json
from plait.cli.traffic import Load
from plait.errors import UsageError
from plait.words import count_text, seconds_text

if TYPE_CHECKING:
    from collections.abc import Callable

    from plait.cli.screen import Screen
    from plait.cost_models.profile import ModelProfile
    from plait.cost_models.simulator import Result, Spread, Summary
    from plait.cost_models.simulator.costs import Costs
    from plait.cost_models.simulator.planned import Limits
    from plait.spec import Estimate, Plan

NAME = "simulate"

HELP = """Say what requests would see of a plan under load.

Every step of every slice is simulated with the times of the cost model: queues, continuous batching with chunked
prefill, KV pages, links that are busy. Nothing is run; the devices need not be here. An artifact says itself what model
it is of; of a plan.yaml, --model says it.

Without a rate or a trace, as many requests as the plan is for are always in flight. The same seed gives the same
result.

\b
    plait simulate smollm2.plait
    plait simulate smollm2.plait --rate 20 --prompt 512 --output 128 --requests 1000
    plait simulate plan.yaml --model smollm2 --trace AzureLLMInferenceTrace_conv.csv --max-ttft 0.5
    plait simulate smollm2.plait --concurrency 32 --replicas 4 --json
"""

#: Busier than this, a stage is what limits the rate.
_MOST_BUSY = 0.95

#: A load is borne where more than this keep the limits.
_MOSTLY = 0.9

_MOST_REPLICAS = 1000

#: Of the rate that was reached, what the next command asks for: queues are short there.
_COMFORTABLE = 0.7


@dataclass(frozen=True)
class _Source:
    """What is simulated, and its arguments in a command line."""

    plan: Plan
    model: ModelProfile
    limits: Limits
    words: tuple[str, ...]


def command(
    path: Annotated[
        Path,
        typer.Argument(metavar="PLAN_OR_ARTIFACT", show_default=False, help="A plan.yaml, or what compile wrote."),
    ],
    model: Annotated[
        Path | None, typer.Option("--model", metavar="MODEL", help="The checkpoint or config.json of a plan.yaml.")
    ] = None,
    trace: Annotated[
        Path | None,
        typer.Option("--trace", metavar="FILE", help="Recorded requests: CSV or JSON lines, columns as Azure's."),
    ] = None,
    speed: Annotated[
        float | None, typer.Option("--speed", metavar="X", help="Replay the trace so many times as fast.")
    ] = None,
    rate: Annotated[
        float | None, typer.Option("--rate", metavar="R", help="Requests per second, at random (Poisson).")
    ] = None,
    burstiness: Annotated[
        float | None,
        typer.Option("--burstiness", metavar="CV", help="Of --rate: 1 is Poisson, above it bursts, 0 a steady beat."),
    ] = None,
    concurrency: Annotated[
        int | None, typer.Option("--concurrency", metavar="N", help="Keep so many requests in flight instead.")
    ] = None,
    prompt: Annotated[
        int | None, typer.Option("--prompt", metavar="N", help="Tokens of a prompt on average; default: the plan's.")
    ] = None,
    output: Annotated[
        int | None, typer.Option("--output", metavar="N", help="Tokens of an answer on average; default: the plan's.")
    ] = None,
    spread: Annotated[
        float,
        typer.Option("--spread", metavar="CV", help="Of both lengths: 0 all alike, 1 as varied as chats (lognormal)."),
    ] = 0.0,
    requests: Annotated[
        int | None, typer.Option("--requests", metavar="N", help="How many; of a trace, the first so many.")
    ] = None,
    prefix_hit: Annotated[
        float, typer.Option("--prefix-hit", metavar="F", help="Fraction of each prompt found in a prefix cache.")
    ] = 0.0,
    replicas: Annotated[
        int, typer.Option("--replicas", metavar="N", help="Pipelines like this one, each on devices of its own.")
    ] = 1,
    grow: Annotated[
        bool,
        typer.Option("--grow", help="Take KV pages as they are needed and pre-empt, instead of plait's reservation."),
    ] = False,
    max_ttft: Annotated[
        float | None, typer.Option("--max-ttft", metavar="S", help="A good request's first token comes within this.")
    ] = None,
    max_tpot: Annotated[
        float | None, typer.Option("--max-tpot", metavar="S", help="And each further one within this, on average.")
    ] = None,
    seed: Annotated[int, typer.Option("--seed", metavar="N", help="Of everything random.")] = 0,
    as_json: Json = False,
) -> None:
    from plait.cli.screen import Screen
    from plait.cost_models.prices import rate_of
    from plait.cost_models.simulator import Slo, simulate
    from plait.cost_models.simulator.costs import costs
    from plait.cost_models.simulator.planned import at_end, device_of, setup_of
    from plait.spec import to_dict

    _check(replicas, max_ttft, max_tpot)
    load = Load(trace, speed, rate, burstiness, concurrency, prompt, output, spread, requests, prefix_hit)
    screen = Screen(as_json=as_json)
    with screen.phases() as progress:
        source = _source(path, model, progress)
        work = source.plan.workload
        progress("ask", 0, 1)
        traffic, asked = load.traffic(work, replicas=replicas, seed=seed)
        progress("simulate", 0, 1)
        setup = setup_of(source.plan, source.model, source.limits, replicas=replicas, grow=grow)
        slo = Slo(_either(max_ttft, work.max_ttft_s), _either(max_tpot, work.max_tpot_s))
        result = simulate(setup, traffic, slo)
        progress("range", 0, 2)
        fast, slow = (simulate(at_end(setup, source.plan, end), traffic, slo).summary for end in ("low", "high"))
    by_id = {device.id: rate_of(device) for device in source.plan.cluster.devices}
    spent = costs(result, {stage.name: by_id[device_of(stage)] for stage in result.stages})
    ranges = _ranges(result.summary, fast, slow)
    _show(screen, source, asked, result, spent, ranges)
    same = {"--replicas": replicas > 1 and replicas, "--max-ttft": max_ttft, "--max-tpot": max_tpot, "--seed": seed}
    command = _next(source, result, load, [*_words(same), *(["--grow"] if grow else [])])
    screen.note("simulated with predicted times; nothing was run")
    screen.next(command)
    screen.result({"asked": asked, "seed": seed, **to_dict(result), "ranges": to_dict(ranges),
                   "costs": to_dict(spent), "next": command})  # fmt: skip


def _source(path: Path, model: Path | None, progress: Any) -> _Source:
    """Read the plan or artifact.

    Raises:
        UsageError: `simulate-model`: a plan without a model, or an artifact with one.
    """
    from plait import api
    from plait.artifact import MANIFEST, read_artifact
    from plait.assemble import compile_options
    from plait.cost_models.profile import profile
    from plait.cost_models.simulator.planned import Limits
    from plait.ir.dialect import read_module

    if path.is_dir() or (path / MANIFEST).is_file():
        if model is not None:
            raise UsageError("simulate-model", f"{path} is no plan.yaml", why="an artifact says itself what it is of")
        progress("read", 0, 1)
        artifact = read_artifact(path)
        manifest, plan = artifact.manifest, artifact.plan
        known = profile(read_module(artifact.folder / "module.mlir"), manifest.max_positions)
        limits = Limits(manifest.max_sequences, manifest.max_step_tokens, manifest.max_kv_tokens, _in_flight(plan))
        return _Source(plan, known, limits, (str(path),))
    if model is None:
        raise UsageError(
            "simulate-model",
            f"a plan does not hold its model: {path}",
            why="the times of its slices come from the model's ops",
            hint=f"plait simulate {path} --model MODEL",
        )
    planned = api.make_plan(api.request(model, plan=path), progress)
    options = compile_options(planned.plan)
    assert options.max_kv_tokens is not None
    limits = Limits(options.max_sequences, options.max_step_tokens, options.max_kv_tokens, _in_flight(planned.plan))
    known = profile(planned.module, planned.checkpoint.max_positions)
    return _Source(planned.plan, known, limits, (str(path), "--model", str(model)))


def _in_flight(plan: Plan) -> int | None:
    """As the runtime has it: slices that share this host's cores take one step at a time."""
    names = {device.id: device.name for device in plan.cluster.devices}
    return 1 if any(names[item.devices[0]] == "cpu" for item in plan.slices) else None


def _show(
    screen: Screen, source: _Source, asked: str, result: Result, spent: Costs, ranges: dict[str, Estimate]
) -> None:
    from plait.cli.tables import facts, table

    summary, plan = result.summary, source.plan
    limits = [
        f"{name} {seconds_text(s)}" for name, s in (("TTFT", result.slo.ttft_s), ("TPOT", result.slo.tpot_s)) if s
    ]
    copies = len(result.pipelines)
    rows = [
        ("model", f"{plan.model}, {plan.blocks} layers in {plan.dtype}"),
        ("pipelines", f"{copies} of {' > '.join('+'.join(item.devices) for item in plan.slices)}"),
        ("asked", asked),
        ("limits", ", ".join(limits)),
    ]
    screen.show(facts(rows, title="simulated"))
    columns = ("seconds", "mean", "p50", "p90", "p99", "most")
    named = (("first token", summary.ttft_s), ("token after", summary.tpot_s), ("whole request", summary.e2e_s))
    times = [(name, *_cells(found)) for name, found in named if found is not None]
    screen.show(table(columns, times, right=columns[1:]))
    uses = ("device", "busy", "steps", "prompt tokens", "decode tokens")
    used = [
        (
            stage.name,
            f"{stage.utilisation:.0%}",
            f"{stage.steps:,}",
            *(f"{sum(getattr(i, name) for i in stage.timeline):,}" for name in ("prompt_tokens", "decode_tokens")),
        )
        for stage in result.stages
    ]
    screen.show(table(uses, used, right=uses[1:]))
    screen.show(facts([*_rates(result, ranges), *_costs(spent)], title="together"))


def _ranges(value: Summary, fast: Summary, slow: Summary) -> dict[str, Estimate]:
    """Means with what they are where every device is as fast, or as slow, as the cost model's range has it."""
    from plait.spec import Estimate

    def range_of(pick: Callable[[Summary], float | None]) -> Estimate | None:
        found = [x for x in map(pick, (value, fast, slow)) if x is not None]
        return Estimate(found[0], min(found), max(found), "interpolated") if found else None

    wanted: dict[str, Callable[[Summary], float | None]] = {
        "ttft_s": lambda s: s.ttft_s.mean,
        "tpot_s": lambda s: None if s.tpot_s is None else s.tpot_s.mean,
        "output_tokens_per_s": lambda s: s.output_tokens_per_s,
    }
    return {name: found for name, pick in wanted.items() if (found := range_of(pick)) is not None}


def _rates(result: Result, ranges: dict[str, Estimate]) -> list[tuple[str, str]]:
    s, pipes = result.summary, result.pipelines
    good = f"{s.good_fraction:.1%} of requests, {s.goodput_per_s:.3g} a second"
    peak = max(pipes, key=lambda pipe: pipe.most_kv_pages / pipe.kv_pages)
    links = [f"{wire.name} {wire.utilisation:.0%}" for wire in result.wires]
    rate, waits = ranges["output_tokens_per_s"], []
    for name, found in (("first token", ranges["ttft_s"]), ("token after", ranges.get("tpot_s"))):
        if found is not None:
            waits.append((f"range, {name}", f"{seconds_text(found.low)} to {seconds_text(found.high)} on average"))
    return [
        *waits,
        ("output tokens/s", f"{count_text(rate.value)} ({count_text(rate.low)} to {count_text(rate.high)})"),
        ("with prompts", f"{count_text(s.total_tokens_per_s)} tokens/s"),
        ("requests/s", f"{s.requests_per_s:.3g} over {seconds_text(s.makespan_s)}"),
        ("within the limits", good if result.slo.ttft_s or result.slo.tpot_s else ""),
        ("longest queue", f"{max(pipe.most_waiting for pipe in pipes)} requests"),
        ("KV pages", f"at most {peak.most_kv_pages:,} of {peak.kv_pages:,}"),
        ("pre-empted", f"{s.preemptions:,} times" if s.preemptions else ""),
        ("links", ", ".join(links[:4])),
    ]


def _costs(spent: Costs) -> list[tuple[str, str]]:
    def text(found: Estimate, unit: str) -> str:
        low, high = (f"{x:.3g}" for x in (found.low, found.high))
        return f"{found.value:.3g} {unit} ({low} to {high}, {found.source})"

    rows = []
    if spent.joules_per_output_token is not None:
        rows.append(("energy", text(spent.joules_per_output_token, "J per output token")))
    if spent.usd_per_million_output_tokens is not None:
        rows.append(("price", text(spent.usd_per_million_output_tokens, "$ per million output tokens")))
    if spent.unknown:
        rows.append(("not known", ", ".join(spent.unknown[:4])))
    return [*rows, ("devices busy", f"{spent.utilisation:.0%}: energy and price are those of this load")]


def _cells(found: Spread) -> tuple[str, ...]:
    return tuple(seconds_text(x) for x in (found.mean, found.p50, found.p90, found.p99, found.most))


def _words(options: dict[str, Any]) -> list[str]:
    return [word for name, value in options.items() if value for word in (name, f"{value:g}")]


def _next(source: _Source, result: Result, load: Load, same: list[str]) -> str:
    """A load that says more: of a trace, as many requests as fit at once; else a rate that is comfortable, or twice the
    one that was borne easily."""
    summary = result.summary
    busiest = max(stage.utilisation for stage in result.stages)
    if load.trace is not None:
        words = ["--concurrency", str(source.limits.max_sequences * len(result.pipelines))]
    else:
        rate = _COMFORTABLE * summary.requests_per_s
        if load.rate is not None and busiest < _MOST_BUSY and summary.good_fraction > _MOSTLY:
            rate = 2 * load.rate
        words = load.words(rate=float(f"{rate:.2g}"), concurrency=None)
    return shlex.join(["plait", "simulate", *source.words, *words, *same])


def _check(replicas: int, max_ttft: float | None, max_tpot: float | None) -> None:
    if not 1 <= replicas <= _MOST_REPLICAS:
        raise UsageError("replicas", f"cannot simulate {replicas} pipelines", why=f"it must be 1 to {_MOST_REPLICAS:,}")
    for name, limit in (("--max-ttft", max_ttft), ("--max-tpot", max_tpot)):
        if limit is not None and not limit > 0:
            raise UsageError("limits", f"{name} {limit:g}", why="a limit is a time above 0, in seconds")


def _either(said: float | None, otherwise: float | None) -> float | None:
    return otherwise if said is None else said
