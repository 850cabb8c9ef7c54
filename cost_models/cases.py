"""A measured point, and the steps of an engine that it is made of."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from math import ceil
from typing import Any

from plait.cost_models.op_time import Shard, unit_rows
from plait.cost_models.profile import ModelProfile
from plait.cost_models.speeds import Phase
from plait.ir.facts import Step
from plait.spec import Device

#: Tokens that one step takes of prompts.
STEP_TOKENS = 8192

#: Of the memory that weights leave, what engines give to KV; and what they keep for activations and workspaces.
KV_SHARE, KEPT_BYTES = 0.9, 2e9

#: Tokens of a prompt that are run again where its prefix is kept: the last page.
CACHED_PAGE = 16

#: The most requests an engine runs at once where nobody says. Of 1024, 1536 and 2048 it explains those rows of the fit
#: best that have the shortest requests of dense models. Where heads are too few for all devices, each group of devices
#: that share them runs requests of its own (attention data parallelism).
MOST_RUNNING = 1536


PHASES: dict[str, Phase] = {
    "ttft": "prefill",
    "prompt": "prefill",
    "tpot": "decode",
    "token": "decode",
    "latency": "decode",
    "throughput": "throughput",
}


@dataclass(frozen=True, eq=False)
class Point:
    """One measurement and all that the model needs to say what it expects.

    Attributes:
        device_label: whose quantities apply; the same chip under other terms has another label.
        shard, stages: tensor and pipeline parallelism.
        concurrency: requests in flight, or the batch; None where load is unlimited.
        scenario: `serving` (continuous), `static` (one batch), `repeated` (one batch that an engine that keeps prefixes
            ran before), `offline` (all at once, as many as fit).
        metric: ttft, tpot, prompt, token, latency (seconds), throughput (output tokens per second).
        group: what a held-out split keeps together.
    """

    id: str
    profile: ModelProfile
    device: Device
    device_label: str
    link_bytes_per_s: float
    units: int
    engine: str
    generation: str
    shard: Shard
    stages: int
    matmul_dtype: str
    expert_dtype: str
    prompt_tokens: int
    output_tokens: int
    concurrency: int | None
    scenario: str
    metric: str
    value: float
    group: tuple[str, str]

    @property
    def phase(self) -> Phase:
        return PHASES[self.metric]


def kv_room(point: Point) -> int:
    """Requests whose KV fits beside the weights, over all devices and stages.

    Weights of a stage are its share of the model; KV is counted at the full length where the engine admits a request
    only if all of it fits (TensorRT-LLM), at half of the output where it counts on requests ending (vLLM, SGLang).
    """
    profile, shard = point.profile, point.shard
    weights = _stored_bytes(profile, shard)
    devices = shard.devices * point.stages
    room = devices * (point.device.memory_bytes - KEPT_BYTES) - weights
    heads = _heads(profile)
    # Too few heads for all devices: they hold copies, or each device the KV of other requests where throughput counts.
    copies = 1.0 if point.scenario == "offline" else max(1.0, shard.devices / heads)
    grown = point.output_tokens * (1.0 if point.engine.startswith("trtllm") else 0.5)
    tokens = point.prompt_tokens + grown
    each = sum(
        kv.bytes_per_token * shard.kv_ratio * copies * (tokens if kv.window is None else min(tokens, kv.window))
        for unit in profile.blocks
        for kv in unit.facts.kv
    )
    return max(1, int(KV_SHARE * room / each))


def _heads(profile: ModelProfile) -> int:
    return min((kv.kv_heads for unit in profile.blocks for kv in unit.facts.kv), default=1)


def _stored_bytes(profile: ModelProfile, shard: Shard) -> float:
    """Weights as they are stored: those of blocks by the ratio of their kind, tables as they are."""
    total = float(profile.embed.weight_bytes + profile.head.weight_bytes)
    for unit in profile.blocks:
        experts = sum(size for name, size in unit.weights if "expert" in name)
        total += experts * shard.expert_ratio + (unit.weight_bytes - experts) * shard.weight_ratio
    return total


@dataclass(frozen=True, eq=False)
class Steps:
    """One kind of step of a point: its ops (on one device, all stages), and its all-reduces."""

    rows: tuple[tuple[float, ...], ...]
    reduces: float
    reduced_bytes: float
    requests: float
    times: float = 1.0
    """How many such steps make up what is asked."""

    ends: tuple[tuple[float, ...], ...] = ()
    """Those of the rows that no stage but the first and the last have."""


def steps_of(profile: ModelProfile, shard: Shard, step: Step, times: float = 1.0) -> Steps:
    counts = Counter(unit.facts for unit in profile.units)
    rows = [row for facts, count in counts.items() for row in unit_rows(facts, step, shard, count)]
    width = profile.boundary_bytes_per_token[0] if profile.boundary_bytes_per_token else 0
    ends = [row for unit in (profile.embed, profile.head) for row in unit_rows(unit.facts, step, shard)]
    return Steps(
        tuple(rows),
        2.0 * len(profile.blocks),
        float(step.tokens * width),
        float(len(step.query_lens)),
        times,
        tuple(ends),
    )


@dataclass(frozen=True, eq=False)
class Case:
    """A point as steps: `decode` with `running` requests, `prompt` (one prompt beside them, or the batch's prompts)."""

    point: Point
    decode: Steps
    prompts: tuple[Steps, ...]
    prompt_share: float
    """Prompts that `prompts` runs."""
    running: float


def case_of(point: Point, cache: dict[Any, Any]) -> Case:
    """Cut a point into steps; equal ones are shared through `cache`."""
    static = point.scenario in ("static", "repeated")
    wanted = point.concurrency or MOST_RUNNING * ceil(point.shard.devices / _heads(point.profile))
    running = wanted if static else min(wanted, kv_room(point))
    batch = max(1, round(running / point.stages))
    half = point.prompt_tokens + (point.output_tokens + 1) // 2
    prompt: tuple[Steps, ...]
    isl = point.prompt_tokens

    def made(name: str, *what: Any) -> Steps:
        key = (id(point.profile), point.shard, name, *what)
        if key not in cache:
            cache[key] = steps_of(point.profile, point.shard, *what)
        found: Steps = cache[key]
        return found

    decode = made("decode", Step.decode(batch, half))
    if static:
        new = isl if point.scenario == "static" else min(isl, CACHED_PAGE)
        prompt = (made("prompt", Step((new,) * running, (isl,) * running, running)),)
        share = float(running)
    elif point.scenario == "offline":
        together = max(1, min(running, STEP_TOKENS // isl))
        prompt = _chunks(made, isl, together, ())
        share = float(together)
    else:
        prompt = _chunks(made, isl, 1, (half,) * max(0, batch - 1))
        share = 1.0
    return Case(point, decode, prompt, share, float(running))


def _chunks(made: Callable[..., Steps], isl: int, together: int, beside: tuple[int, ...]) -> tuple[Steps, ...]:
    """Steps that run prompts in chunks, with decoding requests beside them; equal full chunks are costed once at their
    mean context."""
    if isl <= STEP_TOKENS:
        step = Step((isl,) * together + (1,) * len(beside), (isl,) * together + beside, together + len(beside))
        return (made("prompt", step),)
    full, rest = divmod(isl, STEP_TOKENS)
    middle = STEP_TOKENS * (full + 1) // 2
    out = [made("prompt", Step((STEP_TOKENS,) + (1,) * len(beside), (middle, *beside), 1 + len(beside)), float(full))]
    if rest:
        out.append(made("prompt", Step((rest,) + (1,) * len(beside), (isl, *beside), 1 + len(beside))))
    return tuple(out)
