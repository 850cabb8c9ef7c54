"""What is simulated: pipelines of stages, the links between them, KV pages, and who gets which request."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from plait.cost_models.simulator.batch import StageTimes
from plait.errors import UsageError

Role = Literal["both", "prefill", "decode"]
Router = Literal["round-robin", "least-loaded"]


@dataclass(frozen=True)
class Pool:
    """Pages of one KV class. `ring`: the most pages of one request in a window class; None keeps every token."""

    pages: int
    page_tokens: int = 16
    ring: int | None = None

    def needed(self, tokens: int) -> int:
        pages = -(-tokens // self.page_tokens)
        return pages if self.ring is None else min(pages, self.ring)


@dataclass(frozen=True)
class Wire:
    """A link, by name: hops that name the same one share it. It serves one message at a time, first come first served:
    busy for bytes / `bytes_per_s`; the message is there `latency_s` after that."""

    name: str
    bytes_per_s: float
    latency_s: float = 0.0


@dataclass(frozen=True)
class Hop:
    """From a stage to the next: what one token of a batch puts on which link."""

    wire: Wire
    bytes_per_token: float


@dataclass(frozen=True)
class Stage:
    """One slice on its group. `name` is unique among all pipelines."""

    name: str
    times: StageTimes


@dataclass(frozen=True)
class PipelineSpec:
    """One replica, and the scheduler in front of it (`plait.runtime.scheduler`).

    Attributes:
        hops: one less than stages; None hands on at once.
        pools: KV pages of the tightest stage, by KV class; the first keeps every token.
        kv: `reserve` takes at admission all pages that a request can need, as plait's runtime does; `grow` takes those
            of the prompt, then one at a time, and pre-empts the youngest request when none is left: its pages are
            freed, and what it had is computed again.
        in_flight: steps under way at once; None: as many as stages.
        driver_s: the scheduler's own time for a step; it makes one step at a time.
        role: `prefill` hands a request to a `decode` pipeline after its first token.
    """

    stages: tuple[Stage, ...]
    hops: tuple[Hop | None, ...] = ()
    pools: tuple[Pool, ...] = (Pool(1 << 40),)
    max_sequences: int = 64
    max_step_tokens: int = 512
    in_flight: int | None = None
    kv: Literal["reserve", "grow"] = "reserve"
    driver_s: float = 0.0
    role: Role = "both"

    @property
    def depth(self) -> int:
        """Steps under way at once."""
        return self.in_flight or len(self.stages)


@dataclass(frozen=True)
class Setup:
    """`kv_wire` and `kv_bytes_per_token`: how KV gets from prefill to decode pipelines."""

    pipelines: tuple[PipelineSpec, ...]
    router: Router = "least-loaded"
    kv_wire: Wire | None = None
    kv_bytes_per_token: float = 0.0
    max_positions: int | None = None

    def check(self) -> None:
        """Raises UsageError `simulation` where the parts do not fit together."""
        wrong = _wrong(self)
        if wrong:
            raise UsageError("simulation", wrong)


def _wrong(setup: Setup) -> str:
    roles = {pipeline.role for pipeline in setup.pipelines}
    names = [stage.name for pipeline in setup.pipelines for stage in pipeline.stages]
    if not setup.pipelines or not all(pipeline.stages for pipeline in setup.pipelines):
        return "a simulation needs a pipeline, and a pipeline a stage"
    if len(set(names)) < len(names):
        return f"two stages are called {next(name for name in names if names.count(name) > 1)}"
    if roles not in ({"both"}, {"prefill", "decode"}):
        return f"pipelines are {' and '.join(sorted(roles))}: either all do both, or some prefill and some decode"
    if "prefill" in roles and setup.kv_wire is None:
        return "prefill pipelines need a link for the KV cache"
    for number, pipeline in enumerate(setup.pipelines):
        counts = (pipeline.max_sequences, pipeline.max_step_tokens, pipeline.depth)
        if len(pipeline.hops) not in (0, len(pipeline.stages) - 1):
            return f"pipeline {number} has {len(pipeline.stages)} stages and {len(pipeline.hops)} hops"
        if min(counts) < 1 or pipeline.driver_s < 0:
            return f"pipeline {number}: sequences, step tokens and steps in flight must be 1 or more"
        if not pipeline.pools or pipeline.pools[0].ring is not None:
            return f"pipeline {number}: the first KV class keeps every token"
    return ""
