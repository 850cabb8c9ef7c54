"""The options of `plait simulate` that say what is asked, and the requests they mean."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from plait.errors import UsageError

if TYPE_CHECKING:
    from plait.cost_models.simulator import Arrivals, Traffic
    from plait.spec import Workload

#: Requests of a simulation that nobody gave a number for: so many, or so many rounds of a closed loop.
_REQUESTS, _ROUNDS = 200, 8


@dataclass(frozen=True)
class Load:
    """What was said on the command line; None and 0 are what nobody said."""

    trace: Path | None = None
    speed: float | None = None
    rate: float | None = None
    burstiness: float | None = None
    concurrency: int | None = None
    prompt: int | None = None
    output: int | None = None
    spread: float = 0.0
    requests: int | None = None
    prefix_hit: float = 0.0

    def traffic(self, work: Workload, *, replicas: int, seed: int) -> tuple[Traffic, str]:
        """The requests, and what they are in words; what was not said is the workload's.

        Raises:
            UsageError: `simulate-traffic`: options that contradict each other; a number that is out of range.
            UserError: what `read_trace` says of the trace.
        """
        from plait.cost_models.simulator import Lengths, draw

        if self.requests is not None and self.requests < 1:
            raise UsageError("requests", f"cannot simulate {self.requests} requests", why="it must be 1 or more")
        self._check()
        if self.trace is not None:
            return self._replayed(self.trace)
        arrivals, words = self._arrivals(work.concurrency * replicas)
        prompt = work.prompt_tokens if self.prompt is None else self.prompt
        output = work.output_tokens if self.output is None else self.output
        kind: Any = "lognormal" if self.spread else "fixed"
        count = max(_REQUESTS, _ROUNDS * arrivals.concurrency) if self.requests is None else self.requests
        lengths = [Lengths(kind, mean, cv=self.spread) for mean in (prompt, output)]
        traffic = draw(count, arrivals, *lengths, seed=seed, prefix_hit=self.prefix_hit)
        varied = f", spread {self.spread:g}" if self.spread else ""
        return traffic, f"{count:,} requests of {prompt} + {output} tokens{varied}, {words}"

    def words(self, **changed: Any) -> list[str]:
        """The options that say the same, with some changed."""
        said = replace(self, **changed)._said().items()
        texts = [(_option(name), f"{value:g}" if isinstance(value, float) else str(value)) for name, value in said]
        return [word for pair in texts for word in pair]

    def _said(self) -> dict[str, Any]:
        """The fields that are not as they are where nobody said anything."""
        return {f.name: value for f in fields(self) if (value := getattr(self, f.name)) != f.default}

    def _check(self) -> None:
        given = [_option(name) for name in self._said() if name not in ("trace", "speed", "requests")]
        trace, rate = self.trace is not None, self.rate is not None
        rules = (
            (trace and given, f"--trace and {', '.join(given)}", "a trace says itself what is asked and when"),
            (not trace and self.speed is not None, "--speed without --trace", "it is how fast one is replayed"),
            (rate and self.concurrency is not None, "--rate and --concurrency", "requests come, or follow others"),
            (not rate and self.burstiness is not None, "--burstiness without --rate", "it is that of a rate"),
        )
        for wrong, what, why in rules:
            if wrong:
                raise UsageError("simulate-traffic", f"{what}: these do not fit together", why=why)

    def _replayed(self, trace: Path) -> tuple[Traffic, str]:
        from plait.cost_models.simulator import read_trace, replayed

        traffic = replayed(read_trace(trace, self.requests), speed=1.0 if self.speed is None else self.speed)
        fast = "" if self.speed is None else f", {self.speed:g} times as fast"
        return traffic, f"{len(traffic.asks):,} requests of {trace}{fast}"

    def _arrivals(self, together: int) -> tuple[Arrivals, str]:
        from plait.cost_models.simulator import Arrivals

        if self.rate is None:
            kept = together if self.concurrency is None else self.concurrency
            return Arrivals("closed", concurrency=kept), f"{kept} at once"
        bursts = 1.0 if self.burstiness is None else self.burstiness
        kind: Any = {0.0: "constant", 1.0: "poisson"}.get(bursts, "gamma")
        return Arrivals(kind, self.rate, bursts or 1.0), f"{self.rate:g} a second ({kind})"


def _option(name: str) -> str:
    return "--" + name.replace("_", "-")
