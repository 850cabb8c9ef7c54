"""The pipeline: loaded slices in order with a scheduler in front, in token ids."""

from __future__ import annotations

import itertools
import sys
import weakref
from collections.abc import Iterable, Mapping, Sequence
from numbers import Integral
from pathlib import Path
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from plait.backends.targets import is_emulated
from plait.errors import UnsupportedError, UsageError
from plait.runtime import scheduler
from plait.runtime.chain import Chain, LocalChain
from plait.runtime.engine import Engine
from plait.runtime.request import Request
from plait.runtime.sampler import SamplingParams
from plait.runtime.slices import page_allocator, slice_specs, worker_setups
from plait.runtime.workers import WorkerChain
from plait.spec import Manifest

TIMEOUT_S = 300.0
"""Default for one step. Long enough for a full prefill chunk of a large model emulated on few cores, compilation
included. A worker that dies is noticed at once, whatever this is."""

MAX_THREADS = 1024
"""Of one worker. Numeric libraries do not refuse a number that they cannot stand: they crash."""

START_TIMEOUT_S = 900.0
"""Default for loading: weights may come from a slow disk."""


class Pipeline:
    """A running pipeline. Any thread may use it; close it, or use it as a context manager.

    Tokens in and out; `plait.open` puts the tokenizer in front of it.
    """

    def __init__(self, manifest: Manifest, engine: Engine) -> None:
        self.manifest = manifest
        self._engine, self._ids = engine, itertools.count()
        # Ends the workers when the pipeline is forgotten, and at interpreter exit.
        self._finalizer = weakref.finalize(self, engine.close)

    @classmethod
    def open(
        cls,
        manifest: Manifest,
        folder: Path,
        *,
        share_workers: bool = False,
        in_process: bool = False,
        in_flight: int | None = None,
        threads: int | None = None,
        debug: bool = False,
        max_sequences: int | None = None,
        timeout_s: float = TIMEOUT_S,
        start_timeout_s: float = START_TIMEOUT_S,
        pythons: Mapping[str, str] | None = None,
    ) -> Self:
        """Load every slice, side by side, and start the driver's thread.

        Args:
            folder: the artifact.
            share_workers: put neighbouring slices of the same environment into one worker.
            in_process: run all slices in this process: no workers, no sockets. For one backend, and for tests.
            in_flight: steps under way at once, so that slices work at the same time. None means 1 where the slices
                share this host's cores, else one per worker.
            threads: host threads of each worker; None leaves the libraries' defaults.
            debug: digests in every frame, checked by the receiver; workers write to this process's stderr.
            max_sequences: requests that run at once; at most the artifact's own bound, which is the default.
            timeout_s: the longest one step may take; the error names the slice.
            start_timeout_s: the longest that loading may take.
            pythons: interpreter by device or environment name, for slices whose wheels live elsewhere.

        Raises:
            UsageError: an option is out of range.
            PlaitError: a slice could not be loaded; named with its device. No process is left.
        """
        _check_options(manifest, in_flight, threads, max_sequences, timeout_s, start_timeout_s)
        sequences = max_sequences or manifest.max_sequences
        pages = page_allocator(manifest, sequences)
        specs = slice_specs(manifest, folder, pages, max_sequences=sequences, threads=threads)
        setups = worker_setups(manifest, specs, share=share_workers, pythons=pythons or {})
        schedule = scheduler.Scheduler(
            pages,
            max_sequences=sequences,
            max_step_tokens=manifest.max_step_tokens,
            max_positions=manifest.max_positions,
            in_flight=in_flight or (1 if in_process or _shares_cores(manifest) else len(setups)),
        )
        chain: Chain
        if in_process:
            chain = LocalChain(specs)
        elif sys.platform != "linux":
            raise UnsupportedError(
                "platform", f"worker processes need Linux, this is {sys.platform}", hint="in_process=True works here"
            )
        else:
            chain = WorkerChain(setups, threads=threads, timeout_s=timeout_s, debug=debug)
        engine = Engine(chain, schedule, timeout_s)
        engine.start(start_timeout_s)
        return cls(manifest, engine)

    def submit(
        self,
        token_ids: Sequence[int],
        params: SamplingParams | None = None,
        *,
        max_tokens: int = 64,
        eos_ids: Iterable[int] | None = None,
        want_logits: bool = False,
    ) -> Request:
        """Queue a prompt; returns at once.

        Args:
            token_ids: the prompt, one token or more.
            params: how to sample; greedy without.
            max_tokens: the most new tokens.
            eos_ids: tokens that end the request; None takes the model's own.
            want_logits: keep the logits that every new token was sampled from: `Result.logits` [tokens, vocabulary].

        Raises:
            UsageError: `empty-prompt`, `token-type`, `token-range` or `max-tokens`.
            UserError, FitError: the request can never run; with the numbers.
            PlaitError: what ended the pipeline before.
        """
        _check_count("max-tokens", "max_tokens", max_tokens)
        return self._engine.submit(
            scheduler.Sequence(
                id=next(self._ids),
                prompt=self._prompt(token_ids),
                max_tokens=max_tokens,
                eos_ids=frozenset(self.manifest.eos_token_ids if eos_ids is None else eos_ids),
                params=params or SamplingParams(),
                output_logits=want_logits,
            )
        )

    def generate_ids(
        self,
        prompts: Sequence[Sequence[int]],
        params: SamplingParams | None = None,
        *,
        max_tokens: int = 64,
        eos_ids: Iterable[int] | None = None,
    ) -> list[list[int]]:
        """The new tokens of several prompts, run together. When one is refused, none runs on."""
        eos = None if eos_ids is None else tuple(eos_ids)
        requests: list[Request] = []
        try:
            requests.extend(self.submit(ids, params, max_tokens=max_tokens, eos_ids=eos) for ids in prompts)
            return [list(request.result().token_ids) for request in requests]
        finally:
            for request in requests:
                request.cancel()

    def logits(self, token_ids: Sequence[int], chunk: int | None = None) -> NDArray[np.float32]:
        """[tokens, vocabulary]: the scores after every token of a given text.

        Args:
            chunk: most tokens in one step; None takes as many as a step holds. But for rounding, the result does not
                depend on it.
        """
        if chunk is not None:
            _check_count("chunk", "chunk", chunk)
        sequence = scheduler.Sequence(
            id=next(self._ids), prompt=self._prompt(token_ids), max_tokens=0, prompt_logits=True, chunk=chunk
        )
        logits = self._engine.submit(sequence).result().logits
        assert logits is not None
        return logits

    def stats(self) -> dict[str, Any]:
        """Counters since the start.

        `requests`, `prompt_tokens`, `tokens` (generated), `steps`, `hop_s` (sum over the slices); `running` and
        `waiting` requests now; `kv_pages` by class (`used`, `total`, `page_tokens`); `slices` in order: `slice`,
        `runs_on`, `steps`, `busy_s` (computing), `hop_s` (from the hand-over by the slice before to the start; with
        several steps in flight this includes waiting in line), `executable` (its own counters).
        """
        return self._engine.stats()

    def close(self) -> None:
        """End the workers; requests that still run end with an error. Idempotent."""
        self._finalizer()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _prompt(self, token_ids: Sequence[int]) -> tuple[int, ...]:
        strange = next((token for token in token_ids if not isinstance(token, Integral)), None)
        if strange is not None:
            raise UsageError("token-type", f"{strange!r:.100} is no token id", why="a prompt is whole numbers")
        prompt = tuple(int(token) for token in token_ids)
        if not prompt:
            raise UsageError("empty-prompt", "the prompt has no tokens", hint="start with the model's BOS token")
        wrong = next((token for token in prompt if not 0 <= token < self.manifest.vocab_size), None)
        if wrong is not None:
            raise UsageError(
                "token-range",
                f"token id {wrong} is not in the vocabulary",
                why=f"{self.manifest.model} has tokens 0 to {self.manifest.vocab_size - 1}",
            )
        return prompt


def _check_count(code: str, name: str, value: int) -> None:
    """A number that the scheduler counts with: one that is not whole would end the pipeline for everybody."""
    if not isinstance(value, Integral) or isinstance(value, bool) or value < 1:
        raise UsageError(code, f"{name} is {value!r}", why="it must be a whole number, 1 or more")


def _check_options(
    manifest: Manifest,
    in_flight: int | None,
    threads: int | None,
    max_sequences: int | None,
    timeout_s: float,
    start_timeout_s: float,
) -> None:
    rules = {
        "in_flight": (in_flight is None or in_flight >= 1, in_flight, "1 or more"),
        "threads": (threads is None or 1 <= threads <= MAX_THREADS, threads, f"1 to {MAX_THREADS}"),
        "max_sequences": (
            max_sequences is None or 1 <= max_sequences <= manifest.max_sequences,
            max_sequences,
            f"1 to {manifest.max_sequences}, which the artifact was compiled for",
        ),
        "timeout_s": (timeout_s > 0, timeout_s, "above 0"),
        "start_timeout_s": (start_timeout_s > 0, start_timeout_s, "above 0"),
    }
    for name, (ok, value, allowed) in rules.items():
        if not ok:
            raise UsageError("option", f"{name} is {value!r}", why=f"it must be {allowed}")


def _shares_cores(manifest: Manifest) -> bool:
    """Whether slices run on this host's cores: then two steps at once only get in each other's way."""
    return any(part.device == "cpu" or is_emulated(part.runs_on) for part in manifest.slices)
