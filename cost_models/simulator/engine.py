"""The event loop.

Steps enter a pipeline in order and no stage lets one overtake another, so a step's times at the stages of its own
pipeline follow from those of the step before it and need no event. Events are what pipelines have to do with each
other and with requests: arrivals, ends of steps, messages on shared links, KV that moves. Those of one moment are taken
in the order in which they were made, which makes a run repeatable.
"""

from __future__ import annotations

import heapq
import itertools
from collections import Counter
from collections.abc import Callable
from typing import Any

from plait.cost_models.simulator.result import (
    PipelineUse,
    RequestResult,
    Result,
    Slo,
    StageUse,
    WireUse,
    summary,
)
from plait.cost_models.simulator.scheduler import Scheduler, Step
from plait.cost_models.simulator.sequence import Sequence
from plait.cost_models.simulator.setup import PipelineSpec, Setup, Stage, Wire
from plait.cost_models.simulator.timeline import Queue, Timeline
from plait.cost_models.simulator.traffic import Traffic
from plait.errors import FitError, UsageError, UserError


def simulate(setup: Setup, traffic: Traffic, slo: Slo | None = None) -> Result:
    """Run the requests through the pipelines until the last one has ended.

    Raises:
        UsageError: `simulation`: the setup is no system.
        UserError, FitError: a request can never run: too many positions, or more KV than there is.
    """
    setup.check()
    if not traffic.asks:
        raise UsageError("requests", "there is no request to simulate")
    _check_fits(setup, traffic)
    return _Engine(setup, traffic).run(slo or Slo())


def _check_fits(setup: Setup, traffic: Traffic) -> None:
    room = min(pool.pages * pool.page_tokens for pipe in setup.pipelines for pool in pipe.pools if pool.ring is None)
    tight = [pool for pipe in setup.pipelines for pool in pipe.pools]
    for number, ask in enumerate(traffic.asks):
        total = ask.prompt_tokens + ask.output_tokens
        asked = f"{ask.prompt_tokens} prompt + {ask.output_tokens} new = {total} tokens"
        if setup.max_positions is not None and total > setup.max_positions:
            raise UserError(
                "too-many-positions",
                f"request {number} is longer than the model's {setup.max_positions} positions",
                why=asked,
                hint="ask for shorter prompts or outputs",
            )
        if any(pool.needed(total) > pool.pages for pool in tight):
            raise FitError(
                f"request {number} needs more KV pages than a pipeline has",
                why=f"{asked}; a pipeline holds {room} KV tokens",
                hint="ask for shorter prompts or outputs, or plan for a longer --context",
            )


class _Wire:
    """A link at work."""

    __slots__ = ("busy", "free", "messages", "nbytes", "shared", "spec", "waited")

    def __init__(self, spec: Wire, shared: bool) -> None:
        self.spec, self.shared = spec, shared
        self.free = self.busy = self.nbytes = self.waited = 0.0
        self.messages = 0

    def send(self, now: float, nbytes: float) -> float:
        """When a message that is ready `now` is there."""
        start = max(now, self.free)
        seconds = nbytes / self.spec.bytes_per_s
        self.free = start + seconds
        self.busy += seconds
        self.nbytes += nbytes
        self.waited += start - now
        self.messages += 1
        return self.free + self.spec.latency_s


class _Stage:
    """A slice at work, and the hop behind it."""

    __slots__ = ("busy", "bytes_per_token", "free", "spec", "steps", "timeline", "wire")

    def __init__(self, spec: Stage, wire: _Wire | None, bytes_per_token: float) -> None:
        self.spec, self.wire, self.bytes_per_token = spec, wire, bytes_per_token
        self.free = self.busy = 0.0
        self.steps, self.timeline = 0, Timeline()


class _Pipe:
    """A pipeline at work."""

    def __init__(self, number: int, spec: PipelineSpec, wires: dict[str, _Wire]) -> None:
        self.number, self.spec, self.scheduler = number, spec, Scheduler(spec)
        hops = spec.hops or (None,) * (len(spec.stages) - 1)
        self.stages = [
            _Stage(stage, wires[hop.wire.name] if hop else None, hop.bytes_per_token if hop else 0.0)
            for stage, hop in zip(spec.stages, (*hops, None), strict=True)
        ]
        self.queue, self.under_way, self.steps, self.requests = Queue(), 0, 0, 0
        self.driver_free = 0.0
        self.load = 0  # tokens that are asked of it and not there yet


class _Engine:
    def __init__(self, setup: Setup, traffic: Traffic) -> None:
        self._traffic, self._router = traffic, setup.router
        hops = [(hop.wire, i) for i, pipe in enumerate(setup.pipelines) for hop in pipe.hops if hop is not None]
        users = Counter(wire.name for wire, _ in hops)
        if setup.kv_wire is not None:
            users[setup.kv_wire.name] += 2  # messages of many pipelines
            hops.append((setup.kv_wire, -1))
        self._wires = {wire.name: _Wire(wire, users[wire.name] > 1) for wire, _ in hops}
        if any(self._wires[wire.name].spec != wire for wire, _ in hops):
            raise UsageError("simulation", "two links of one name have other rates")
        self._kv_wire = None if setup.kv_wire is None else self._wires[setup.kv_wire.name]
        self._kv_bytes = setup.kv_bytes_per_token
        self._pipes = [_Pipe(i, spec, self._wires) for i, spec in enumerate(setup.pipelines)]
        self._entry = [pipe for pipe in self._pipes if pipe.spec.role != "decode"]
        self._decoders = [pipe for pipe in self._pipes if pipe.spec.role == "decode"]
        self._turns: Counter[str] = Counter()
        self._events: list[tuple[float, int, Callable[[float, Any], None], Any]] = []
        self._number = itertools.count()
        self._asked = 0
        self._inside, self._area, self._since = 0, 0.0, 0.0
        self._done: list[Sequence] = []

    def run(self, slo: Slo) -> Result:
        asks, closed = self._traffic.asks, self._traffic.concurrency
        for _ in range(len(asks) if closed is None else min(closed, len(asks))):
            self._ask_next(0.0)
            if closed is None:
                break  # each arrival brings the next one, so that the heap stays small
        events, pop = self._events, heapq.heappop
        while events:
            now, _, handle, what = pop(events)
            handle(now, what)
        assert len(self._done) == len(asks), "every request ends"
        return self._result(slo)

    def _at(self, when: float, handle: Callable[[float, Any], None], what: Any) -> None:
        heapq.heappush(self._events, (when, next(self._number), handle, what))

    def _ask_next(self, now: float) -> None:
        """Have the next request come: at its own time, or now in a closed loop."""
        if self._asked < len(self._traffic.asks):
            ask = self._traffic.asks[self._asked]
            when = ask.arrival_s if self._traffic.concurrency is None else now
            self._at(when, self._arrive, Sequence(self._asked, ask, when))
            self._asked += 1

    def _arrive(self, now: float, sequence: Sequence) -> None:
        if self._traffic.concurrency is None:
            self._ask_next(now)
        self._count(now, 1)
        self._route(now, sequence, self._entry, sequence.prompt + sequence.output)

    def _route(self, now: float, sequence: Sequence, pipes: list[_Pipe], tokens: int) -> None:
        if self._router == "round-robin":
            role = pipes[0].spec.role
            pipe = pipes[self._turns[role] % len(pipes)]
            self._turns[role] += 1
        else:
            pipe = min(pipes, key=lambda pipe: pipe.load)
        pipe.load += tokens
        pipe.requests += 1
        sequence.pipeline = pipe.number
        pipe.scheduler.submit(sequence)
        self._dispatch(now, pipe)

    def _dispatch(self, now: float, pipe: _Pipe) -> None:
        """Keep the pipeline full."""
        scheduler = pipe.scheduler
        while pipe.under_way < pipe.spec.depth:
            step, fetched = scheduler.next_step(now)
            for sequence in fetched:
                self._fetch(now, sequence)
            if step is None:
                break
            pipe.under_way += 1
            pipe.steps += 1
            step.pipeline = pipe.number
            pipe.driver_free = max(now, pipe.driver_free) + pipe.spec.driver_s
            self._walk(pipe, step, 0, pipe.driver_free)
        pipe.queue.add(now, len(scheduler.waiting), scheduler.running, scheduler.kv.used)

    def _walk(self, pipe: _Pipe, step: Step, index: int, ready: float) -> None:
        """A step through the stages from `index` on, to the next shared link or to the end."""
        batch, stages = step.batch, pipe.stages
        prompt, decodes, last = batch.prompt_tokens, batch.decodes, len(stages) - 1
        while True:
            stage = stages[index]
            start = ready if ready > stage.free else stage.free
            stage.free = end = start + stage.spec.times.step_s(batch)
            stage.busy += end - start
            stage.steps += 1
            stage.timeline.add(start, end, prompt, decodes)
            if index == last:
                self._at(end, self._end_step, step)
                return
            wire = stage.wire
            index += 1
            if wire is None:
                ready = end
            elif wire.shared:
                self._at(end, self._on_wire, (pipe, step, index))
                return
            else:
                ready = wire.send(end, stage.bytes_per_token * batch.tokens)

    def _on_wire(self, now: float, what: tuple[_Pipe, Step, int]) -> None:
        pipe, step, index = what
        stage = pipe.stages[index - 1]
        assert stage.wire is not None
        self._walk(pipe, step, index, stage.wire.send(now, stage.bytes_per_token * step.batch.tokens))

    def _end_step(self, now: float, step: Step) -> None:
        pipe = self._pipes[step.pipeline]
        pipe.under_way -= 1
        outcome = pipe.scheduler.complete(step)
        pipe.load -= outcome.tokens
        for sequence in outcome.started:
            if sequence.first_s < 0:
                sequence.first_s = now
                pipe.load -= sequence.prompt
        for sequence in outcome.ended:
            sequence.end_s = now
            self._done.append(sequence)
            self._count(now, -1)
            if self._traffic.concurrency is not None:
                self._ask_next(now)
        self._dispatch(now, pipe)
        for sequence in outcome.started if pipe.spec.role == "prefill" else ():
            if sequence.end_s < 0:
                pipe.load -= sequence.output - 1
                self._route(now, sequence.handed_over(), self._decoders, sequence.output - 1)

    def _fetch(self, now: float, sequence: Sequence) -> None:
        """KV pages wait for a sequence that was prefilled elsewhere: have it sent."""
        assert self._kv_wire is not None
        there = self._kv_wire.send(now, self._kv_bytes * sequence.prompt)
        self._at(there, self._kv_there, sequence)

    def _kv_there(self, now: float, sequence: Sequence) -> None:
        origin, target = sequence.origin, self._pipes[sequence.pipeline]
        assert origin is not None
        source, sequence.origin = self._pipes[origin.pipeline], None
        source.scheduler.free(origin)
        target.scheduler.join(sequence)
        self._dispatch(now, target)
        self._dispatch(now, source)

    def _count(self, now: float, change: int) -> None:
        """Requests in the system, integrated over time."""
        self._area += self._inside * (now - self._since)
        self._inside, self._since = self._inside + change, now

    def _result(self, slo: Slo) -> Result:
        requests = tuple(map(_request, sorted(self._done, key=lambda s: s.id)))
        start = min(r.arrival_s for r in requests)
        makespan = max(r.end_s for r in requests) - start
        stages = [(pipe.number, stage) for pipe in self._pipes for stage in pipe.stages]

        def share(busy: float) -> float:
            return busy / makespan if makespan else 0.0

        return Result(
            summary=summary(
                requests,
                slo,
                mean_in_system=share(self._area),
                stage_steps=sum(stage.steps for _, stage in stages),
                preemptions=sum(pipe.scheduler.preemptions for pipe in self._pipes),
            ),
            slo=slo,
            stages=tuple(
                StageUse(
                    stage.spec.name, number, stage.busy, share(stage.busy), stage.steps, stage.timeline.intervals()
                )
                for number, stage in stages
            ),
            wires=tuple(
                WireUse(name, wire.busy, share(wire.busy), wire.messages, wire.nbytes, wire.waited)
                for name, wire in self._wires.items()
            ),
            pipelines=tuple(
                PipelineUse(
                    pipe.requests,
                    pipe.steps,
                    pipe.scheduler.preemptions,
                    pipe.scheduler.kv.full.pages,
                    pipe.scheduler.kv.most_used,
                    pipe.queue.most_waiting,
                    pipe.queue.points(),
                )
                for pipe in self._pipes
            ),
            requests=requests,
        )


def _request(s: Sequence) -> RequestResult:
    return RequestResult(
        id=s.id,
        arrival_s=s.arrival_s,
        admitted_s=s.admitted_s,
        first_token_s=s.first_s,
        end_s=s.end_s,
        prompt_tokens=s.ask.prompt_tokens,
        output_tokens=s.ask.output_tokens,
        cached_tokens=s.cached,
        preemptions=s.preempted,
        recomputed_tokens=s.recomputed,
        pipeline=s.pipeline,
    )
