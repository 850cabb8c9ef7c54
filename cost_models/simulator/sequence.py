"""A request inside the simulator, and a cohort of them that decode in step."""

from __future__ import annotations

from collections import Counter

from plait.cost_models.simulator.traffic import Ask


class Sequence:
    """One request as a pipeline's scheduler sees it.

    Attributes:
        prompt: tokens to read before the next token is sampled: the request's, and after a pre-emption also those that
            it had generated.
        scheduled: of them, given to steps.
        generated: output tokens so far; while it is in a cohort, see `Cohort`.
        stamp: when it was last given to a step or admitted: a number that only grows.
        in_flight: steps under way with a part of its prompt.
        origin: the same request in the pipeline that prefilled it, while its KV lies there.
    """

    __slots__ = (
        "admitted_s", "arrival_s", "ask", "cached", "end", "end_s", "first_s", "generated", "group", "id", "in_flight",
        "kv_base", "origin", "output", "pipeline", "preempted", "prefix_tokens", "prompt", "recomputed", "scheduled",
        "shared_pages", "stamp", "total_tokens",
    )  # fmt: skip

    def __init__(self, number: int, ask: Ask, arrival_s: float) -> None:
        self.id, self.ask, self.arrival_s = number, ask, arrival_s
        self.prompt, self.output = ask.prompt_tokens, ask.output_tokens
        self.total_tokens = self.prompt + self.output
        self.group, self.prefix_tokens = ask.prefix_group, ask.prefix_tokens
        self.scheduled = min(ask.cached_tokens, self.prompt - 1)
        self.generated = self.stamp = self.in_flight = self.shared_pages = 0
        self.end = self.kv_base = self.cached = self.preempted = self.recomputed = 0
        self.admitted_s = self.first_s = self.end_s = -1.0
        self.pipeline = -1
        self.origin: Sequence | None = None

    def handed_over(self) -> Sequence:
        """The same request for another pipeline: its prompt is read and its first token there."""
        moved = Sequence(self.id, self.ask, self.arrival_s)
        moved.scheduled, moved.generated, moved.origin = self.prompt, 1, self
        for name in ("admitted_s", "first_s", "cached", "preempted", "recomputed"):
            setattr(moved, name, getattr(self, name))
        return moved


class Cohort:
    """Sequences that decode together, so that a step costs the same whatever their number.

    `clock` counts the tokens that the cohort was given. A member ends at clock `end` and holds `kv_base + clock` KV
    tokens, so nothing but the clock changes in a step.

    Attributes:
        kv: KV tokens of all members.
        next_end: no member ends before this clock.
        stamp: as in `Sequence`, of all members.
    """

    __slots__ = ("_phases", "clock", "kv", "members", "next_end", "stamp")

    def __init__(self, members: list[Sequence], clock: int, kv: int, next_end: int, stamp: int) -> None:
        self.members, self.clock, self.kv, self.next_end, self.stamp = members, clock, kv, next_end, stamp
        self._phases: Counter[int] | None = None

    @classmethod
    def of(cls, sequences: list[Sequence], stamp: int) -> Cohort:
        """Of sequences that have read their prompts: `prompt` KV tokens each."""
        for s in sequences:
            s.end, s.kv_base = s.output - s.generated, s.prompt
        ends = min(s.end for s in sequences)
        return cls(list(sequences), 0, sum(s.prompt for s in sequences), ends, stamp)

    def kv_of(self, sequence: Sequence) -> int:
        return sequence.kv_base + self.clock

    def split(self, count: int) -> Cohort:
        """Take the first `count` members out, into a cohort of their own."""
        taken = self.members[:count]
        self.members = self.members[count:]
        kv = sum(s.kv_base for s in taken) + count * self.clock
        self.kv -= kv
        self._phases = None
        return Cohort(taken, self.clock, kv, self.next_end, self.stamp)

    def join(self, other: Cohort) -> None:
        """Take the members of another cohort in, behind our own."""
        delta = self.clock - other.clock
        moved, sign = other.members, 1
        if len(other.members) > len(self.members):
            moved, sign = self.members, -1
            self.clock, self.next_end = other.clock, self.next_end - delta
        else:
            other.next_end += delta
        if delta:
            shift = sign * delta
            for s in moved:
                s.end += shift
                s.kv_base -= shift
        self.members = self.members + other.members
        self.kv += other.kv
        self.next_end = min(self.next_end, other.next_end)
        self._phases = None

    def remove(self, sequence: Sequence) -> None:
        self.members.remove(sequence)
        self.kv -= self.kv_of(sequence)
        self._phases = None

    def new_pages(self, page_tokens: int) -> int:
        """Pages that one more token of every member takes."""
        if self._phases is None:
            self._phases = Counter(s.kv_base % page_tokens for s in self.members)
        return self._phases[-self.clock % page_tokens]

    def tick(self) -> list[Sequence]:
        """A token came for every member. Returns those that it was the last one of, no longer members."""
        self.clock += 1
        self.kv += len(self.members)
        if self.clock < self.next_end:
            return []
        ended = [s for s in self.members if s.end <= self.clock]
        if ended:
            self.members = [s for s in self.members if s.end > self.clock]
            self.kv -= sum(map(self.kv_of, ended))
            self._phases = None
        self.next_end = min((s.end for s in self.members), default=self.clock)
        return ended
