"""Plans: slices placed on devices, the numbers predicted for them and the causes.

`plan.yaml` is meant to be read and edited. What a hand-written plan decides is `dtype`, `page_tokens`, the workload
and, for each slice, `devices`, `blocks`, `quantize` and `group_size`; everything marked predicted below is computed
again when it is read.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from plait.spec.cluster import Cluster
from plait.spec.estimate import Cause, Estimate, MemoryEstimate
from plait.spec.workload import Workload

Objective = Literal["throughput", "latency", "capacity"]

#: What weights can be quantised to by compile; see `plait.ir.quantise`.
QuantKind = Literal["int8", "int4", "fp8"]


@dataclass(frozen=True)
class PlannedSlice:
    """Blocks `[start, end)` on one group. The embedding goes with block 0, the final norm and the head with the last.

    `quantize`: what the linears of its blocks are quantised to; None leaves them as the checkpoint has them.
    `group_size`: neighbours of a row that share a scale then; 0 the whole row; None the kind's own.

    Predicted: `memory`, `prefill_s` (the workload's prompt, one request), `decode_s` (one step at the workload's
    concurrency), `hop_s` (decode boundary to the next slice), `kv_tokens` (KV tokens that fit beside the weights),
    `cause`.
    """

    devices: tuple[str, ...]
    blocks: tuple[int, int]
    memory: MemoryEstimate | None = None
    prefill_s: Estimate | None = None
    decode_s: Estimate | None = None
    hop_s: Estimate | None = None
    kv_tokens: int | None = None
    cause: Cause | None = None
    quantize: QuantKind | None = None
    group_size: int | None = None


@dataclass(frozen=True)
class IdleDevice:
    device: str
    cause: Cause


@dataclass(frozen=True)
class Prediction:
    """What the whole pipeline is predicted to do for the workload.

    Attributes:
        max_context_tokens: the longest that all its requests can be at once.
        max_kv_tokens: over all requests.
        max_requests: the most at once that are as long as it says; None where memory sets no limit.
    """

    ttft_s: Estimate
    tpot_s: Estimate
    output_tokens_per_s: Estimate
    max_context_tokens: int
    max_kv_tokens: int
    max_requests: int | None = None


@dataclass(frozen=True)
class Plan:
    """`notes`: what a user should know of the model beside all that; `kv_dtype`: what K and V are stored in where that
    is not `dtype`."""

    model: str
    blocks: int
    dtype: str
    page_tokens: int
    objective: Objective
    workload: Workload
    slices: tuple[PlannedSlice, ...]
    cluster: Cluster
    idle: tuple[IdleDevice, ...] = ()
    pins: dict[str, str] | None = None
    forbidden_cuts: tuple[int, ...] = ()
    prediction: Prediction | None = None
    cause: Cause | None = None
    notes: tuple[str, ...] | None = None
    kv_dtype: str | None = None
    schema: int = 1
