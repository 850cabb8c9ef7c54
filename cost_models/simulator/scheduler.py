"""Which tokens run in the next step: the policy of `plait.runtime.scheduler`, in sums.

The same requests get the same tokens in the same steps as there (tests/host/test_simulator_scheduler.py holds the two
against each other); beyond it this one can grow KV page by page and pre-empt, share prefixes, and take over requests
that another pipeline has prefilled.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import deque
from dataclasses import dataclass, field
from operator import attrgetter

from plait.cost_models.simulator.batch import Batch
from plait.cost_models.simulator.kv import KvPages
from plait.cost_models.simulator.sequence import Cohort, Sequence
from plait.cost_models.simulator.setup import PipelineSpec

_STAMP, _ID = attrgetter("stamp"), attrgetter("id")


@dataclass(slots=True)
class Step:
    """One batch: the cohort that decodes in it, the prompts that end in it, and those of which it has a part."""

    batch: Batch
    cohort: Cohort | None
    ending: list[Sequence]
    chunked: list[Sequence]
    stamp: int
    pipeline: int = -1


@dataclass(slots=True)
class Outcome:
    """What became of a step's sequences: `started` got their first token of a prefill, `ended` their last one."""

    started: list[Sequence] = field(default_factory=list)
    ended: list[Sequence] = field(default_factory=list)
    tokens: int = 0


class Scheduler:
    """The scheduler of one pipeline."""

    def __init__(self, spec: PipelineSpec) -> None:
        self.kv = KvPages(spec.pools, grows=spec.kv == "grow")
        self._most, self._step_tokens, self._depth = spec.max_sequences, spec.max_step_tokens, spec.depth
        self._chunk = -(-spec.max_step_tokens // spec.depth)
        self._hands_over = spec.role == "prefill"
        self.waiting: deque[Sequence] = deque()
        self.running = 0
        self._ready: deque[Cohort] = deque()  # by stamp
        self._prompts: list[Sequence] = []  # with prompt tokens left, by stamp
        self._stamp = 0
        self.preemptions = 0

    def submit(self, sequence: Sequence) -> None:
        self.waiting.append(sequence)

    def next_step(self, now: float) -> tuple[Step | None, list[Sequence]]:
        """The next step, or None where nothing can run now; and those that were admitted with their prompt read
        elsewhere, so that their KV has to come."""
        fetched = self._admit(now) if self.waiting else []
        cohort, prompts = self._choose()
        if cohort is not None and self.kv.grows:
            before = self.preemptions
            cohort = self._grow(cohort)
            if self.preemptions > before:
                prompts = [s for s in prompts if s in self._prompts]
        decodes = len(cohort.members) if cohort is not None else 0
        ending, chunked, chunks = self._share(prompts, decodes) if prompts else ([], [], ())
        if not decodes and not chunks:
            return None, fetched
        self._stamp += 2  # one for the cohort and the prompts that end in the step, one for those that go on
        kv = 0 if cohort is None else cohort.kv + decodes
        batch = Batch(chunks, decodes, kv, decodes + len(ending))
        return Step(batch, cohort, ending, chunked, self._stamp - 1), fetched

    def complete(self, step: Step) -> Outcome:
        """Take back a step, the oldest under way."""
        out = Outcome(tokens=step.batch.logit_rows)
        cohort = step.cohort
        if cohort is not None:
            for s in cohort.tick():
                s.generated = s.output
                self._leave(s, s.kv_base + cohort.clock)
                out.ended.append(s)
        for s in step.chunked:
            s.in_flight -= 1
        if step.ending:
            cohort = self._start(step, cohort, out)
        if cohort is not None and cohort.members:
            cohort.stamp = step.stamp
            self._back(cohort)
        return out

    def join(self, sequence: Sequence) -> None:
        """The KV of a sequence that was prefilled elsewhere is here."""
        self._stamp += 1
        self._back(Cohort.of([sequence], self._stamp))

    def free(self, sequence: Sequence) -> None:
        """The KV of a sequence that goes on elsewhere has left."""
        self._leave(sequence, sequence.prompt)

    def _admit(self, now: float) -> list[Sequence]:
        fetched = []
        while self.waiting and self.running < self._most and self.kv.admit(self.waiting[0]):
            s = self.waiting.popleft()
            if s.admitted_s < 0:
                s.admitted_s = now
            self.running += 1
            if s.scheduled >= s.prompt:
                fetched.append(s)
                continue
            s.cached += s.scheduled
            self._stamp += 1
            s.stamp = self._stamp
            self._prompts.append(s)
        return fetched

    def _choose(self) -> tuple[Cohort | None, list[Sequence]]:
        """Who is in the next step: those that wait longest, as many as make equal groups."""
        left = min(-(-self.running // self._depth), self._step_tokens)
        ready, prompts, taken = self._ready, self._prompts, 0
        cohort: Cohort | None = None
        while left:
            most = min(taken + left, len(prompts))
            until = bisect_left(prompts, ready[0].stamp, taken, most, key=_STAMP) if ready and prompts else most
            left -= until - taken
            taken = until
            if not ready or not left:
                break
            part = ready.popleft() if len(ready[0].members) <= left else ready[0].split(left)
            left -= len(part.members)
            if cohort is None:
                cohort = part
            else:
                cohort.join(part)
        return cohort, prompts[:taken]

    def _share(
        self, prompts: list[Sequence], decodes: int
    ) -> tuple[list[Sequence], list[Sequence], tuple[tuple[int, int], ...]]:
        """Deal out what the decodes leave to prompts, the oldest first: those that end, all of them, their chunks."""
        spare = max(self._chunk - decodes, 1)
        ending, chunked, chunks = list[Sequence](), list[Sequence](), list[tuple[int, int]]()
        for s in sorted(prompts, key=_ID):
            count = min(s.prompt - s.scheduled, spare)
            if not count:
                break
            spare -= count
            s.scheduled += count
            s.in_flight += 1
            chunks.append((count, s.scheduled))
            chunked.append(s)
            self._prompts.remove(s)
            if s.scheduled == s.prompt:
                ending.append(s)
            else:
                s.stamp = self._stamp + 2
                self._prompts.append(s)
        return ending, chunked, tuple(chunks)

    def _start(self, step: Step, cohort: Cohort | None, out: Outcome) -> Cohort | None:
        """Sequences whose prompt was read have one token more, and decode from now on."""
        going = []
        for s in step.ending:
            s.generated += 1
            self.kv.publish(s)
            out.started.append(s)
            if s.generated == s.output:
                self._leave(s, s.prompt)
                out.ended.append(s)
            elif not self._hands_over:
                going.append(s)
        if not going:
            return cohort
        fresh = Cohort.of(going, step.stamp)
        if cohort is None or not cohort.members:
            return fresh
        cohort.join(fresh)
        return cohort

    def _back(self, cohort: Cohort) -> None:
        """Among the ready ones, in order: mostly the last."""
        if not self._ready or self._ready[-1].stamp <= cohort.stamp:
            self._ready.append(cohort)
        else:
            insort(self._ready, cohort, key=_STAMP)

    def _leave(self, sequence: Sequence, tokens: int) -> None:
        self.running -= 1
        self.kv.release(sequence, tokens)

    def _grow(self, cohort: Cohort) -> Cohort | None:
        """Take the pages of one more token for all of a cohort; pre-empt the youngest while there are too few."""
        while cohort.members:
            if self.kv.take(cohort.new_pages(self.kv.full.page_tokens)):
                return cohort
            self._preempt(cohort)
        return None

    def _preempt(self, cohort: Cohort) -> None:
        """Send the youngest sequence that no step holds back to the queue. One of `cohort` is always there."""
        places: list[tuple[int, Sequence, Cohort | None]] = [
            (s.id, s, group) for group in (cohort, *self._ready) for s in group.members
        ]
        places += [(s.id, s, None) for s in self._prompts if not s.in_flight]
        _, victim, group = max(places, key=lambda place: place[0])
        if group is None:
            self._prompts.remove(victim)
            held = victim.prompt
        else:
            held = group.kv_of(victim)
            victim.generated = victim.output - (victim.end - group.clock)
            group.remove(victim)
            if not group.members and group is not cohort:
                self._ready.remove(group)
        self._leave(victim, held)
        if group is not None:
            victim.prompt = held + 1  # the token generated last was not in the cache yet
            victim.recomputed += held
        victim.scheduled, victim.preempted = 0, victim.preempted + 1
        self.preemptions += 1
        self.waiting.appendleft(victim)
