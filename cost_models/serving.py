"""What clients see of an engine with continuous batching, in closed form, from the times of its steps.

`concurrency` requests are always in flight; one that ends is replaced at once. Each brings a prompt that takes
`prefill_s` of the engine's time, and then a token in every step of `decode_s`. Prefill work of the others delays a
token: with T the time of a request, the engine spends the share rho = (C - 1) * prefill / T on it, so that

    TPOT = decode / (1 - rho),    TTFT = first + decode + prefill + wait,    T = TTFT + output * TPOT

of which T is the fixed point. `wait` is what a prompt waits for others ahead of it: of an M/D/1 queue,
rho / (2 (1 - rho)) prefills, but no more than all others. Where KV has room for fewer requests than C, the rest wait
outside (Little's law): TTFT grows by (C / room - 1) T.

Benchmarks start all C requests together: that first round waits (C + 1) / 2 prefills on average, and `burst` is its
share of all requests.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from plait.cost_models.op_time import smooth_max
from plait.cost_models.tables import Floats

_ROUNDS = 40
_FULLEST = 0.98


@dataclass(frozen=True)
class Load:
    """Requests as arrays: in flight in all, in the engine at once (`running` <= concurrency), tokens out."""

    concurrency: Any
    running: Any
    output_tokens: Any


@dataclass(frozen=True)
class Served:
    ttft_s: Floats
    tpot_s: Floats


def step_s(device_s: Any, host_s: Any) -> Floats:
    """One step: the device's work and the host's, which overlap in part."""
    return smooth_max(device_s, host_s, 2.0)


def steady(
    decode_s: Any, prefill_s: Any, load: Load, *, first_s: Any = 0.0, queue: Any = 1.0, stretch: Any = 1.0
) -> Served:
    """The steady state of continuous batching.

    Args:
        first_s: before a prompt reaches the engine, and after its token leaves it.
        queue: how many times the wait of an M/D/1 queue a prompt waits.
        stretch: how many times its own time a prompt takes, since its chunks alternate with those of others.
    """
    n = np.maximum(np.asarray(load.running, dtype=float), 1.0)
    out = np.asarray(load.output_tokens, dtype=float)
    alone = first_s + decode_s + stretch * prefill_s
    total = alone + out * decode_s
    wait, tpot = np.zeros_like(total), np.zeros_like(total) + decode_s
    for _ in range(_ROUNDS):
        # Damped, since more waiting means less interference, which means less waiting.
        rho = np.minimum((n - 1) * prefill_s / total, _FULLEST)
        wait = np.minimum(queue * rho / (2 * (1 - rho)), (n - 1) / 2) * prefill_s
        tpot = decode_s / (1 - rho)
        total = np.sqrt(total * (alone + wait + out * tpot))
    outside = np.maximum(np.asarray(load.concurrency) / n - 1, 0.0) * total
    return Served(np.asarray(alone + wait + outside), np.asarray(tpot))


def burst(decode_s: Any, prefill_s: Any, load: Load, *, first_s: Any = 0.0) -> Served:
    """All requests start together and prompts go before tokens: half of the prompts are ahead of one's own, half delay
    its tokens."""
    n = np.maximum(np.asarray(load.running, dtype=float), 1.0)
    tpot = decode_s + (n - 1) / 2 * prefill_s / load.output_tokens
    outside = np.maximum(np.asarray(load.concurrency) / n - 1, 0.0) * (load.output_tokens * tpot) / 2
    return Served(np.asarray(first_s + decode_s + (n + 1) / 2 * prefill_s + outside), np.asarray(tpot))


def mixed(first: Served, then: Served, share: Any) -> Served:
    return Served(
        share * first.ttft_s + (1 - share) * then.ttft_s,
        share * first.tpot_s + (1 - share) * then.tpot_s,
    )


def offline_tokens_per_s(decode_s: Any, prefill_s: Any, running: Any, output_tokens: Any) -> Floats:
    """Output tokens per second where requests never lack: in the time of a request every place prefills once.

    Args:
        decode_s: of a step through all stages of a pipeline, with the requests of one of its batches.
        prefill_s: that one prompt keeps the busiest stage.
    """
    return np.asarray(running * output_tokens / (output_tokens * decode_s + running * prefill_s))


def static_batch_s(decode_s: Any, prefill_s: Any, output_tokens: Any) -> Floats:
    """A batch that starts and ends together: its prompts, then one step per further token."""
    return np.asarray(prefill_s + (output_tokens - 1) * decode_s)
