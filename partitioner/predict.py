"""From a placement to a plan with its predicted numbers. The search, a hand-written plan and `layers` all end here."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from plait.cost_models.network import hop_s, link_between
from plait.cost_models.roofline import PESSIMISTIC, UnitTimes, estimate, unit_times
from plait.cost_models.tables import slice_sums
from plait.partitioner.tables import Tables
from plait.spec import Device, Estimate, Plan, PlannedSlice, Prediction

#: A device and its blocks [start, end).
Stage = tuple[Device, int, int]


def plan_of(tables: Tables, stages: Sequence[Stage]) -> Plan:
    """A complete plan but for causes and idle devices."""
    problem = tables.problem
    slices = tuple(_slice(tables, stages, i) for i in range(len(stages)))
    return Plan(
        model=problem.profile.model,
        blocks=problem.blocks,
        dtype=problem.profile.dtype,
        page_tokens=problem.page_tokens,
        objective=problem.objective,
        workload=problem.workload,
        slices=slices,
        cluster=problem.cluster,
        pins=dict(problem.pins) or None,
        forbidden_cuts=problem.forbidden_cuts,
        prediction=_prediction(tables, stages, slices),
    )


def kind_index(tables: Tables, device: Device) -> int:
    return next(k for k, kind in enumerate(tables.kinds) if device in kind.devices)


def busy_s(tables: Tables, stages: Sequence[Stage]) -> list[float]:
    """What one request keeps each stage busy, its hop included."""
    work = tables.problem.workload
    decodes = work.output_tokens / work.concurrency
    out = []
    for i, (device, start, end) in enumerate(stages):
        hop = 0.0
        if i + 1 < len(stages):
            hop = sum(
                count * _hop(tables, stages, i, tokens).value
                for count, tokens in ((1, work.prompt_tokens), (decodes, work.concurrency))
            )
        out.append(float(tables.busy.stage[kind_index(tables, device), start, end]) + hop)
    return out


def _slice(tables: Tables, stages: Sequence[Stage], i: int) -> PlannedSlice:
    device, start, end = stages[i]
    problem, at = tables.problem, (kind_index(tables, device), start, end)
    nominal = unit_times(problem.profile_on(device), device, problem.workload, problem.max_step_tokens, nominal=True)
    tokens = float(tables.kv_tokens[at])
    return PlannedSlice(
        devices=(device.id,),
        blocks=(start, end),
        memory=tables.memory.estimate(start, end, device),
        prefill_s=estimate(float(tables.prefill.stage[at]), _part(nominal, "prefill_s", start, end), device, "prefill"),
        decode_s=estimate(float(tables.decode.stage[at]), _part(nominal, "decode_s", start, end), device, "decode"),
        hop_s=_hop(tables, stages, i, problem.workload.concurrency) if i + 1 < len(stages) else None,
        kv_tokens=int(tokens) if np.isfinite(tokens) else None,
    )


def _part(times: UnitTimes, name: str, start: int, end: int) -> float:
    return float(slice_sums(getattr(times, name))[start, end])


def _hop(tables: Tables, stages: Sequence[Stage], i: int, tokens: int) -> Estimate:
    """From stage i to the next; its low end leaves the latency out, its source is the link's."""
    device, _, end = stages[i]
    link = link_between(tables.problem.cluster, device, stages[i + 1][0])
    nbytes = tokens * tables.problem.profile.boundary_bytes_per_token[end - 1]
    value = hop_s(link, nbytes)
    return Estimate(value, nbytes / link.bytes_per_s, value * PESSIMISTIC, "assumed")


def _prediction(tables: Tables, stages: Sequence[Stage], slices: Sequence[PlannedSlice]) -> Prediction:
    """Of the whole pipeline.

    TTFT and TPOT are the sums over slices and hops. Output tokens/s is what the busiest stage lets through with several
    batches in flight, but no more than the requests in flight allow (Little's law: concurrency / time of a request).
    Its low end is one batch at a time at the pessimistic end of every time.
    """
    work = tables.problem.workload
    hops = [_hop(tables, stages, i, work.prompt_tokens) for i in range(len(stages) - 1)]
    ttft = _sum([*(s.prefill_s for s in slices), *hops])
    tpot = _sum([*(s.decode_s for s in slices), *(s.hop_s for s in slices)])
    requests, output = work.concurrency, work.output_tokens
    stage_rate = output / max(busy_s(tables, stages))
    fastest = max(s.prefill_s.low + output / requests * s.decode_s.low for s in slices if s.prefill_s and s.decode_s)
    contexts = [tables.memory.max_context_tokens(start, end, device) for device, start, end in stages]
    limits = [c for c in (*contexts, tables.problem.profile.max_positions) if c is not None]
    context = min(limits, default=work.context_tokens)
    tokens = [s.kv_tokens for s in slices if s.kv_tokens is not None]
    batches = [tables.memory.max_requests(start, end, device) for device, start, end in stages]
    value = min(stage_rate, requests * output / (ttft.value + output * tpot.value))
    return Prediction(
        ttft_s=ttft,
        tpot_s=tpot,
        output_tokens_per_s=Estimate(
            value,
            min(value, requests * output / (requests * ttft.high + output * tpot.high)),
            max(value, min(output / fastest, requests * output / (ttft.low + output * tpot.low))),
            ttft.source if ttft.source == tpot.source else "roofline",
        ),
        max_context_tokens=context,
        max_kv_tokens=min(tokens, default=requests * context),
        max_requests=min((batch for batch in batches if batch is not None), default=None),
    )


def _sum(parts: Sequence[Estimate | None]) -> Estimate:
    known = [part for part in parts if part is not None]
    sources = {part.source for part in known}
    source = sources.pop() if len(sources) == 1 else "roofline"
    return Estimate(sum(p.value for p in known), sum(p.low for p in known), sum(p.high for p in known), source)
