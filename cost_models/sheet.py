"""Measured points as arrays: every op of every step in one table, so that one call predicts all of them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from plait.cost_models import serving
from plait.cost_models.cases import Case, Point, case_of
from plait.cost_models.collectives import all_reduce_s
from plait.cost_models.op_time import ATTENTION, EXPERTS, KINDS, MATMUL, Speeds, Work, seconds
from plait.cost_models.quantities import DEVICE, ENGINE, device_levels, engine_levels, quantity, value_of
from plait.cost_models.speeds import MOST_BANDWIDTH, FittedSpeeds
from plait.cost_models.tables import Floats


def _config(point: Point) -> tuple[Any, ...]:
    """What makes two points one case: all but what was measured of it."""
    return (
        id(point.profile),
        *(point.device_label, point.engine, point.generation),
        *(point.shard, point.stages, point.matmul_dtype, point.expert_dtype),
        *(point.prompt_tokens, point.output_tokens, point.concurrency, point.scenario),
    )


def _sums(place: Any, values: Floats, size: int) -> Floats:
    return np.asarray(np.bincount(place, values, size), dtype=np.float64)


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
        """The table of ops, and the steps that own them."""
        rows: list[tuple[float, ...]] = []
        step: list[int] = []
        is_end: list[bool] = []
        steps = [(c, s, s is case.decode) for c, case in enumerate(self.cases) for s in (case.decode, *case.prompts)]
        for number, (_, made, _) in enumerate(steps):
            merged: dict[tuple[float, ...], float] = {}
            for row in made.rows:
                merged[row[:-1]] = merged.get(row[:-1], 0.0) + row[-1]
            ends = {row[:-1] for row in made.ends}
            rows += [(*row, count) for row, count in merged.items()]
            is_end += [row in ends for row in merged]
            step += [number] * len(merged)
        self.work, self.step, self.is_end = Work.of(rows), np.array(step), np.array(is_end)
        self.owner = np.array([case for case, _, _ in steps])
        self.is_decode = np.array([decode for _, _, decode in steps])
        self.times = np.array([made.times for _, made, _ in steps])
        self.reduces = np.array([made.reduces for _, made, _ in steps])
        self.reduced = np.array([made.reduced_bytes for _, made, _ in steps])
        self.requests = np.array([made.requests for _, made, _ in steps])

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
            return quantity(name).default if found is None else found[name].value

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
        efficiency = self.achieved * np.minimum(1.0, per_device[self.speed, owner])
        weights = np.where(self.is_expert, q["expert_bandwidth"][owner], q["bandwidth"][owner])
        stream = self.bandwidth[owner] * np.minimum(MOST_BANDWIDTH, self.bandwidth_achieved[owner] * weights)
        kv = self.bandwidth[owner] * np.minimum(MOST_BANDWIDTH, (self.bandwidth_achieved * q["kv_bandwidth"])[owner])
        launch = (q["launch_s"] * q["launches"])[owner]
        at = Speeds(
            self.peak * efficiency,
            q["idle_rows"][owner],
            *(stream, kv),
            *(launch, q["expert_launch_s"][owner]),
            *(self.units[owner], overlap),
        )
        link = (self.link_rate * np.minimum(1.0, q["link"]))[self.owner]
        reduce = self.reduces * all_reduce_s(
            self.reduced, self.devices[self.owner], link, q["reduce_latency_s"][self.owner]
        )
        slower = np.where(self.is_decode, 1.0, np.maximum(1.0, q["prefill"][self.owner]))
        # What a step needs of the host overlaps with the device; what is done with each token that comes back does not.
        each = serving.step_s(self._ops(at) * slower + reduce, q["host_s"][self.owner])
        decode, prompt, chunks = self._phases(each + q["host_request_s"][self.owner] * self.requests)
        # A pipeline goes at the pace of its last stage, which has the head too, and of what hands a batch on.
        in_ends = self.is_end & self.is_decode[self.step]
        ends = _sums(owner, seconds(self.work, at) * self.work.count * in_ends, len(self.cases))
        decode = decode + (self.stages - 1) * (ends + q["stage_s"])
        # Beside decoding requests a prompt costs what it adds to their steps.
        added = np.where(self.scenario == "serving", np.maximum(prompt - chunks * decode, 0.2 * prompt), prompt)
        return self._metrics(decode, prompt, added, q["first_s"], q["queue"], np.minimum(q["burst"], 1.0), q["stretch"])

    def roofline(self) -> Floats:
        """What nominal peaks, bandwidths and links promise, through the same closed forms, without any overhead."""
        owner = self.owner[self.step]
        stream = self.bandwidth[owner]
        each = self._ops(Speeds(self.peak, 0.0, stream, stream, 0.0, 0.0, 0, 64.0))
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
        return _sums(self.step, seconds(self.work, at) * self.work.count, len(self.owner))

    def _phases(self, each: Floats) -> tuple[Floats, Floats, Floats]:
        """Of every case: seconds of a decode step, of all steps of its prompts, and their number."""
        cases, decode = len(self.cases), self.is_decode
        each = each * self.times
        return (
            _sums(self.owner[decode], each[decode], cases),
            _sums(self.owner[~decode], each[~decode], cases),
            _sums(self.owner[~decode], self.times[~decode], cases),
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
