"""What will be asked of the pipeline."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class Workload:
    """`concurrency` requests in flight, each with `prompt_tokens` in and `output_tokens` out.

    `max_ttft_s` (time to first token) and `max_tpot_s` (time per output token) are hard limits where given.
    """

    name: str = "chat"
    prompt_tokens: int = 512
    output_tokens: int = 256
    concurrency: int = 8
    max_ttft_s: float | None = None
    max_tpot_s: float | None = None
    schema: Literal[1] = 1

    @property
    def context_tokens(self) -> int:
        """Tokens one request holds when it ends."""
        return self.prompt_tokens + self.output_tokens


WORKLOADS: dict[str, Workload] = {
    w.name: w
    for w in (
        Workload("chat", 512, 256, 8),
        Workload("single", 512, 256, 1),
        Workload("batch", 1024, 512, 64),
        Workload("summarize", 8192, 512, 8),
        Workload("code", 2048, 1024, 4),
    )
}
