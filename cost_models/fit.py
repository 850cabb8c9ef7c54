"""Fits what devices and engines reach on measured points.

A quantity of a device (its bandwidth, the speed of its matrices ...) is a default times what its backend, its
architecture and the device itself add, each on a log scale with a normal prior: a device without points takes its
architecture's value, an architecture without points its backend's. Residuals are log ratios under a soft-l1 loss, so
that an outlier counts linearly. scipy's trust-region least squares finds the mode; its curvature there gives the range
of every value.

Points are made elsewhere; nothing here reads files or models.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from plait.cost_models import serving
from plait.cost_models.collectives import all_reduce_s
from plait.cost_models.op_time import ATTENTION, EXPERTS, KINDS, MATMUL, Shard, Speeds, Work, seconds, unit_rows
from plait.cost_models.profile import ModelProfile
from plait.cost_models.speeds import MOST_BANDWIDTH, FittedSpeeds, Phase
from plait.cost_models.speeds import Fitted as Number
from plait.cost_models.tables import Floats
from plait.ir.facts import Step
from plait.spec import Device, Source

#: Tokens that one step takes of prompts.
STEP_TOKENS = 8192

#: Of the memory that weights leave, what engines give to KV; and what they keep for activations and workspaces.
KV_SHARE, KEPT_BYTES = 0.9, 2e9

#: The most requests an engine runs at once where nobody says.
MOST_RUNNING = 2048


@dataclass(frozen=True)
class Quantity:
    """A number to fit: its default, and how far (as a log ratio) backends, architectures and devices stray from it."""

    default: float
    strays: tuple[float, float, float] = (0.4, 0.2, 0.15)
    unit: str = ""
    what: str = ""


#: Shares are of what a large matmul or a streaming kernel reaches (`achieved`, `bandwidth_achieved`).
DEVICE: dict[str, Quantity] = {
    "bandwidth": Quantity(1.0, what="share of the achieved bandwidth: weights and activations"),
    "expert_bandwidth": Quantity(0.8, what="share of the achieved bandwidth: weights of experts"),
    "kv_bandwidth": Quantity(0.7, what="share of the achieved bandwidth: KV in attention"),
    "matmul": Quantity(0.85, what="share of the achieved peak: matrices in 16 bits"),
    "matmul_fp8": Quantity(0.75, what="the same in FP8"),
    "matmul_fp4": Quantity(0.5, what="the same in FP4"),
    "experts": Quantity(0.4, what="share of the achieved peak of their dtype: experts"),
    "attention": Quantity(0.5, what="share of the achieved 16-bit peak: attention"),
    "launch_s": Quantity(3e-6, (0.7, 0.3, 0.2), "s", "one kernel"),
    "expert_launch_s": Quantity(2e-5, (0.7, 0.3, 0.2), "s", "what sorts tokens by expert and sums what experts give"),
    "reduce_latency_s": Quantity(8e-6, (0.7, 0.3, 0.2), "s", "one round of an all-reduce"),
    "link": Quantity(0.6, what="share of the nominal bandwidth to all peers"),
}

#: Strays: of an engine, of one of its generations.
ENGINE: dict[str, Quantity] = {
    "launches": Quantity(1.0, (0.3, 0.3, 0.0), what="times the launches of a device: what is fused, graphs"),
    "prefill": Quantity(1.2, (0.2, 0.3, 0.0), what="times the device's time for prompts, at least once"),
    "host_s": Quantity(2e-3, (1.0, 0.7, 0.0), "s", "host work of a step"),
    "host_request_s": Quantity(1e-5, (1.0, 0.7, 0.0), "s", "host work of a step for each request"),
    "first_s": Quantity(0.03, (0.7, 0.7, 0.0), "s", "before a prompt is run and after its token is made"),
    "stretch": Quantity(1.2, (0.4, 0.4, 0.0), what="times its own time until a prompt is done, beside others, at least once"),
    "queue": Quantity(1.0, (0.7, 0.5, 0.0), what="times the wait of an M/D/1 queue"),
    "burst": Quantity(0.1, (1.0, 1.0, 0.0), what="share of requests that the benchmark starts together"),
}

GLOBAL: dict[str, Quantity] = {
    "overlap": Quantity(3.0, (0.3, 0.0, 0.0), what="p of the norm of arithmetic and traffic")
}


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
        scenario: `serving` (continuous), `static` (one batch), `offline` (all at once, as many as fit).
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
    heads = min((kv.kv_heads for unit in profile.blocks for kv in unit.facts.kv), default=1)
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


def steps_of(profile: ModelProfile, shard: Shard, step: Step, times: float = 1.0) -> Steps:
    counts = Counter(unit.facts for unit in profile.units)
    rows = [row for facts, count in counts.items() for row in unit_rows(facts, step, shard, count)]
    width = profile.boundary_bytes_per_token[0] if profile.boundary_bytes_per_token else 0
    return Steps(tuple(rows), 2.0 * len(profile.blocks), float(step.tokens * width), float(len(step.query_lens)), times)


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
    static = point.scenario == "static"
    wanted = point.concurrency or MOST_RUNNING
    running = wanted if static else min(wanted, kv_room(point), MOST_RUNNING)
    batch = max(1, round(running / point.stages))
    half = point.prompt_tokens + (point.output_tokens + 1) // 2
    prompt, isl = (), point.prompt_tokens

    def made(name: str, *what: Any) -> Steps:
        key = (id(point.profile), point.shard, name, *what)
        if key not in cache:
            cache[key] = steps_of(point.profile, point.shard, *what)
        found: Steps = cache[key]
        return found

    decode = made("decode", Step.decode(batch, half))
    if static:
        prompt = (made("prompt", Step((isl,) * running, (isl,) * running, running)),)
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


def _config(point: Point) -> tuple[Any, ...]:
    """What makes two points one case: all but what was measured of it."""
    return (
        id(point.profile), point.device_label, point.engine, point.generation, point.shard, point.stages,
        point.matmul_dtype, point.expert_dtype, point.prompt_tokens, point.output_tokens, point.concurrency, point.scenario,
    )  # fmt: skip


@dataclass(frozen=True, eq=False)
class Names:
    """Which node of the hierarchy each quantity of a device or an engine adds up from.

    Attributes:
        nodes: (quantity, level name) in the order of the vector; levels are `backend/arch/device`, `engine/generation`.
    """

    nodes: tuple[tuple[str, str], ...]

    @staticmethod
    def of(points: Sequence[Point]) -> Names:
        found: dict[tuple[str, str], None] = {}
        for point in points:
            for quantity in GLOBAL:
                found[quantity, ""] = None
            for level in device_levels(point):
                found.update(dict.fromkeys((quantity, level) for quantity in DEVICE))
            for level in engine_levels(point):
                found.update(dict.fromkeys((quantity, level) for quantity in ENGINE))
        return Names(tuple(found))

    def index(self) -> dict[tuple[str, str], int]:
        return {node: i for i, node in enumerate(self.nodes)}

    def strays(self) -> Floats:
        return np.array([_quantity(name).strays[level.count("/")] for name, level in self.nodes])

    def independent(self, points: Sequence[Point]) -> list[tuple[list[int], list[Any]]]:
        """Nodes that no point shares, to be moved at once: of one quantity on one level. With the points of each."""
        levels = [("", *device_levels(point), *engine_levels(point)) for point in points]
        rows = {level: np.array([level in mine for mine in levels]) for _, level in self.nodes}
        sets: dict[tuple[str, int], list[int]] = {}
        for j, (name, level) in enumerate(self.nodes):
            sets.setdefault((name, level.count("/")), []).append(j)
        return [(members, [rows[self.nodes[j][1]] for j in members]) for members in sets.values()]


def _quantity(name: str) -> Quantity:
    return (GLOBAL | DEVICE | ENGINE)[name]


def device_levels(point: Point) -> tuple[str, ...]:
    backend, arch = point.device.backend, point.device.arch
    return backend, f"{backend}/{arch}", f"{backend}/{arch}/{point.device_label}"


def engine_levels(point: Point) -> tuple[str, ...]:
    return point.engine, f"{point.engine}/{point.generation}"


def value_of(name: str, levels: Sequence[str], logs: Mapping[tuple[str, str], float]) -> float:
    """A quantity with what all its levels add; levels that were not fitted add nothing."""
    return float(_quantity(name).default * np.exp(sum(logs.get((name, level), 0.0) for level in levels)))


def _distinct(levels: Sequence[tuple[str, ...]]) -> tuple[list[tuple[str, ...]], Any]:
    """The different ones, and where each stands among them."""
    kinds = list(dict.fromkeys(levels))
    return kinds, np.array([kinds.index(level) for level in levels])


class Sheet:
    """Cases as arrays: every op of every step of every case in one table, so that one call predicts all of them."""

    def __init__(self, points: Sequence[Point]) -> None:
        cache: dict[Any, Any] = {}
        cases: dict[tuple[Any, ...], Case] = {}
        place: dict[tuple[Any, ...], int] = {}
        self.at = np.empty(len(points), dtype=int)
        for i, point in enumerate(points):
            key = _config(point)
            if key not in cases:
                place[key] = len(cases)
                cases[key] = case_of(point, cache)
            self.at[i] = place[key]
        self.points, self.cases = list(points), list(cases.values())
        self._rows()
        self._cases()
        self.metric = np.array([point.metric for point in points])
        self.value = np.array([point.value for point in points])

    def _rows(self) -> None:
        rows, step, self.owner, self.is_decode, times = [], [], [], [], []
        reduces, reduced, requests = [], [], []
        for c, case in enumerate(self.cases):
            for steps, decode in ((case.decode, True), *((s, False) for s in case.prompts)):
                merged: dict[tuple[float, ...], float] = {}
                for row in steps.rows:
                    merged[row[:-1]] = merged.get(row[:-1], 0.0) + row[-1]
                rows += [(*row, count) for row, count in merged.items()]
                step += [len(self.owner)] * len(merged)
                self.owner.append(c)
                self.is_decode.append(decode)
                times.append(steps.times)
                reduces.append(steps.reduces)
                reduced.append(steps.reduced_bytes)
                requests.append(steps.requests)
        self.work, self.step = Work.of(rows), np.array(step)
        self.owner, self.is_decode = np.array(self.owner), np.array(self.is_decode)
        self.times, self.reduces, self.reduced, self.requests = map(np.array, (times, reduces, reduced, requests))

    def _cases(self) -> None:
        points = [case.point for case in self.cases]

        def column(read: Callable[[Point], float]) -> Floats:
            return np.array([read(point) for point in points], dtype=float)

        self.bandwidth = column(lambda p: p.device.bandwidth_bytes_per_s)
        self.bandwidth_achieved = column(lambda p: p.device.bandwidth_achieved)
        self.link_rate = column(lambda p: p.link_bytes_per_s)
        self.units = column(lambda p: p.units)
        self.devices = column(lambda p: p.shard.devices)
        self.output = column(lambda p: p.output_tokens)
        self.stages = column(lambda p: p.stages)
        self.running = np.array([case.running for case in self.cases])
        self.prompts = np.array([case.prompt_share for case in self.cases])
        self.concurrency = np.array([c.point.concurrency or c.running for c in self.cases], dtype=float)
        self.scenario = np.array([point.scenario for point in points])
        self.device_levels = _distinct([device_levels(point) for point in points])
        self.engine_levels = _distinct([engine_levels(point) for point in points])
        # Of each op: the peak it multiplies at, what a large matmul reaches of it, and the quantity that scales it.
        owner = self.owner[self.step]
        kinds = np.array(KINDS)[self.work.kind]
        dtype = np.array([(p.matmul_dtype, p.expert_dtype) for p in points])[owner]
        chosen = np.where(kinds == EXPERTS, dtype[:, 1], dtype[:, 0])
        chosen = np.where(self.work.wide | ~np.isin(kinds, (MATMUL, EXPERTS)), "bfloat16", chosen)
        rates = {
            (c, name): (p.device.peak_flops_per_s[name], p.device.achieved.get(name, 1.0))
            for c, p in enumerate(points)
            for name in {"bfloat16", p.matmul_dtype, p.expert_dtype}
        }
        pairs = np.array([rates[c, name] for c, name in zip(owner, chosen, strict=True)])
        self.peak, self.achieved = pairs[:, 0], pairs[:, 1]
        speed = np.where(kinds == EXPERTS, "experts", np.where(kinds == ATTENTION, "attention", "matmul"))
        for narrow in ("fp8", "fp4"):
            speed = np.where((kinds == MATMUL) & (chosen == narrow), f"matmul_{narrow}", speed)
        names = list(DEVICE)
        self.speed = np.array([names.index(name) for name in speed])
        self.is_expert = kinds == EXPERTS

    def predict(self, logs: Mapping[tuple[str, str], float]) -> Floats:
        """What nodes of the hierarchy lead to, for every point."""
        return self._expected(lambda name, levels: value_of(name, levels, logs))

    def expected(self, speeds: FittedSpeeds) -> Floats:
        """The same from the numbers of the file: those of the deepest level that it has."""
        tables = speeds.devices | speeds.engines

        def value(name: str, levels: Sequence[str]) -> float:
            if name == "overlap":
                return speeds.overlap.value
            found = next((tables[level] for level in reversed(levels) if level in tables), None)
            return _quantity(name).default if found is None else found[name].value

        return self._expected(value)

    def _quantities(self, value: Callable[[str, Sequence[str]], float]) -> tuple[dict[str, Floats], float]:
        """Values per case, and the overlap."""
        out = {}
        for table, (levels, place) in ((DEVICE, self.device_levels), (ENGINE, self.engine_levels)):
            for name in table:
                out[name] = np.array([value(name, level) for level in levels])[place]
        return out, value("overlap", ("",))

    def _expected(self, value: Callable[[str, Sequence[str]], float]) -> Floats:
        q, overlap = self._quantities(value)
        owner = self.owner[self.step]
        per_device = np.stack([q[name] for name in DEVICE])
        efficiency = np.minimum(1.0, self.achieved * per_device[self.speed, owner])
        weights = np.where(self.is_expert, q["expert_bandwidth"][owner], q["bandwidth"][owner])
        stream = self.bandwidth[owner] * np.minimum(MOST_BANDWIDTH, self.bandwidth_achieved[owner] * weights)
        kv = self.bandwidth[owner] * np.minimum(MOST_BANDWIDTH, (self.bandwidth_achieved * q["kv_bandwidth"])[owner])
        launch = (q["launch_s"] * q["launches"])[owner]
        at = Speeds(
            self.peak * efficiency, stream, kv, launch, q["expert_launch_s"][owner], self.units[owner], overlap
        )
        link = (self.link_rate * np.minimum(1.0, q["link"]))[self.owner]
        reduce = self.reduces * all_reduce_s(
            self.reduced, self.devices[self.owner], link, q["reduce_latency_s"][self.owner]
        )
        slower = np.where(self.is_decode, 1.0, np.maximum(1.0, q["prefill"][self.owner]))
        host = q["host_s"][self.owner] + q["host_request_s"][self.owner] * self.requests
        decode, prompt, chunks = self._phases(serving.step_s(self._ops(at) * slower + reduce, host))
        # Beside decoding requests a prompt costs what it adds to their steps.
        added = np.where(self.scenario == "serving", np.maximum(prompt - chunks * decode, 0.2 * prompt), prompt)
        return self._metrics(decode, prompt, added, q["first_s"], q["queue"], np.minimum(q["burst"], 1.0), q["stretch"])

    def roofline(self) -> Floats:
        """What nominal peaks, bandwidths and links promise, through the same closed forms, without any overhead."""
        owner = self.owner[self.step]
        stream = self.bandwidth[owner]
        each = self._ops(Speeds(self.peak, stream, stream, 0.0, 0.0, 0, 64.0))
        each = each + self.reduces * all_reduce_s(
            self.reduced, self.devices[self.owner], self.link_rate[self.owner], 0.0
        )
        decode, prompt, chunks = self._phases(each)
        added = np.where(self.scenario == "serving", np.maximum(prompt - chunks * decode, 0.2 * prompt), prompt)
        return self._metrics(decode, prompt, added, 0.0, 1.0, ENGINE["burst"].default)

    def from_phases(self, decode_s: Floats, prompt_s: Floats) -> Floats:
        """What another model's times of the two phases of every case come to, through the same closed forms."""
        return self._metrics(decode_s, prompt_s, prompt_s, 0.0, 1.0, ENGINE["burst"].default)

    def _ops(self, at: Speeds) -> Floats:
        """Seconds of the ops of every step."""
        return np.bincount(self.step, seconds(self.work, at) * self.work.count, len(self.owner))

    def _phases(self, each: Floats) -> tuple[Floats, Floats, Floats]:
        """Of every case: seconds of a decode step, of all steps of its prompts, and their number."""
        cases, decode = len(self.cases), self.is_decode
        each = each * self.times
        return (
            np.bincount(self.owner[decode], each[decode], cases),
            np.bincount(self.owner[~decode], each[~decode], cases),
            np.bincount(self.owner[~decode], self.times[~decode], cases),
        )

    def _metrics(
        self, decode: Floats, prompt: Floats, added: Floats, first: Any, queue: Any, share: Any, stretch: Any = 1.0
    ) -> Floats:
        added = added / self.prompts
        load = serving.Load(self.concurrency, self.running, self.output)
        served = serving.mixed(
            serving.burst(decode, added, load, first_s=first),
            serving.steady(decode, added, load, first_s=first, queue=queue, stretch=np.maximum(stretch, 1.0)),
            share,
        )
        offline = serving.offline_tokens_per_s(decode, added / self.stages, self.running, self.output)
        online = self.concurrency * self.output / (served.ttft_s + self.output * served.tpot_s)
        by_metric = {
            "ttft": served.ttft_s,
            "tpot": served.tpot_s,
            "prompt": prompt,
            "token": decode,
            "latency": serving.static_batch_s(decode, prompt, self.output),
            "throughput": np.where(self.scenario == "offline", offline, online),
        }
        out = np.empty(len(self.points))
        for name, values in by_metric.items():
            mine = self.metric == name
            out[mine] = values[self.at[mine]]
        return out


@dataclass(frozen=True, eq=False)
class Fitted:
    """The mode of every node and their covariance, on a log scale."""

    names: Names
    at: Floats
    covariance: Floats

    @property
    def logs(self) -> dict[tuple[str, str], float]:
        return dict(zip(self.names.nodes, self.at.tolist(), strict=True))

    def number(self, name: str, levels: Sequence[str]) -> Number:
        """A quantity as its levels add up, with its range: 80 % of what the fit leaves open, and of how far levels that
        are not given stray."""
        quantity, index = _quantity(name), self.names.index()
        mine = [index[name, level] for level in levels if (name, level) in index]
        prior = sum(stray**2 for stray in quantity.strays)
        left = float(self.covariance[np.ix_(mine, mine)].sum()) + sum(s**2 for s in quantity.strays[len(mine) :])
        value = quantity.default * float(np.exp(self.at[mine].sum()))
        reach = float(np.exp(_EIGHTY * left**0.5))
        known = left < _INFORMED * prior
        source: Source = "assumed" if not known else "measured" if len(levels) > 1 or levels[-1] == "" else "interpolated"
        return Number(_short(value), _short(value / reach), _short(value * reach), source)

    def speeds(self, units: Mapping[str, int], spread: Mapping[str, Mapping[Phase, float]]) -> FittedSpeeds:
        """All numbers as the file holds them."""
        levels = {name for _, name in self.names.nodes if name}
        devices = [name for name in sorted(levels) if ("launch_s", name) in self.names.index()]
        engines = [name for name in sorted(levels) if ("host_s", name) in self.names.index()]

        def path(name: str) -> list[str]:
            parts = name.split("/")
            return ["/".join(parts[: i + 1]) for i in range(len(parts))]

        def table(quantities: Mapping[str, Quantity], name: str, depth: int) -> dict[str, Number]:
            found = {key: self.number(key, path(name)) for key in quantities}
            if name.count("/") == depth:
                return found
            # What holds for all devices of an architecture is a neighbour's number.
            return {
                key: replace(number, source="interpolated" if number.source == "measured" else number.source)
                for key, number in found.items()
            }

        return FittedSpeeds(
            overlap=self.number("overlap", [""]),
            compute_units=dict(units),
            devices={name: table(DEVICE, name, 2) for name in devices},
            engines={name: table(ENGINE, name, 1) for name in engines},
            spread={backend: dict(phases) for backend, phases in spread.items()},
        )


#: Standard deviations on each side that hold 80 % of a normal; the share of the prior's variance below which the points
#: have said something.
_EIGHTY, _INFORMED = 1.28, 0.5


def _short(value: float) -> float:
    return float(f"{value:.4g}")


#: Noise of one log residual, and the size from which points of one group count as fewer than they are.
NOISE, GROUP = 0.08, 40

#: Step of the differences that make the Jacobian, in standard deviations of the prior.
_MOVE = 1e-4


def fit(points: Sequence[Point], *, rounds: int = 40) -> Fitted:
    """The quantities that explain the points best. Deterministic."""
    from scipy.optimize import least_squares  # only the fit needs it

    sheet, names = Sheet(points), Names.of(points)
    sizes = Counter((point.group, point.metric) for point in points)
    weight = np.array([min(1.0, (GROUP / sizes[p.group, p.metric]) ** 0.5) for p in points]) / NOISE
    wanted, strays = np.log(sheet.value), names.strays()

    def errors(x: Floats) -> Floats:
        r = (np.log(sheet.predict(dict(zip(names.nodes, x * strays, strict=True)))) - wanted) * weight
        return np.asarray(np.sign(r) * np.sqrt(2 * (np.sqrt(1 + r * r) - 1)))  # soft l1

    def residuals(x: Floats) -> Floats:
        return np.concatenate([errors(x), x])

    together = names.independent(points)

    def jacobian(x: Floats) -> Floats:
        base, out = errors(x), np.zeros((len(points), len(x)))
        for members, mine in together:
            moved = x.copy()
            moved[members] += _MOVE
            slope = (errors(moved) - base) / _MOVE
            for j, rows in zip(members, mine, strict=True):
                out[rows, j] = slope[rows]
        return np.concatenate([out, np.eye(len(x))])

    done = least_squares(residuals, np.zeros(len(names.nodes)), jac=jacobian, max_nfev=rounds, ftol=1e-5)
    covariance = np.linalg.inv(done.jac.T @ done.jac) * np.outer(strays, strays)
    return Fitted(names, done.x * strays, covariance)


def expected(points: Sequence[Point], fitted: Fitted) -> Floats:
    """What the fit says of points, whether it saw them or not."""
    return Sheet(points).predict(fitted.logs)


def left_out(points: Sequence[Point], rounds: int = 25) -> Floats:
    """Of every point, the log ratio of what is expected to what was measured by a fit that saw nothing of its group."""
    out = np.zeros(len(points))
    for group in sorted({point.group for point in points}):
        mine = np.array([point.group == group for point in points])
        others = [point for point in points if point.group != group]
        rest = [point for point in points if point.group == group]
        out[mine] = np.log(expected(rest, fit(others, rounds=rounds)) / [point.value for point in rest])
    return out


def spread_of(points: Sequence[Point], errors: Floats, share: float = 0.8) -> dict[str, dict[Phase, float]]:
    """The |log error| that `share` of points stay below, by backend and phase: the conformal quantile, the
    ceil((n + 1) share)-th smallest (Vovk et al. 2005, "Algorithmic learning in a random world"). Where a backend has
    fewer points than that takes, the widest of all backends stands in."""
    found: dict[tuple[str, Phase], list[float]] = {}
    for point, error in zip(points, np.abs(errors), strict=True):
        found.setdefault((point.device.backend, PHASES[point.metric]), []).append(float(error))
    widest: dict[Phase, float] = {}
    known: dict[tuple[str, Phase], float] = {}
    for (backend, phase), values in found.items():
        rank = int(np.ceil((len(values) + 1) * share))
        if rank <= len(values):
            known[backend, phase] = _short(sorted(values)[rank - 1])
            widest[phase] = max(widest.get(phase, 0.0), known[backend, phase])
    phases: tuple[Phase, ...] = ("prefill", "decode", "throughput")
    backends = sorted({point.device.backend for point in points})
    return {b: {phase: known.get((b, phase), widest.get(phase, 0.7)) for phase in phases} for b in backends}
