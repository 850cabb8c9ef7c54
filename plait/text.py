"""The pipeline that speaks text: the runtime's token-level pipeline with the model's tokenizer in front."""

from __future__ import annotations

import json
import os
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from math import prod
from numbers import Integral
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self, cast, overload

from plait import artifact as artifacts
from plait.backends.targets import is_emulated
from plait.backends.weights import read_weights_json
from plait.cost_models.host import memory_bytes
from plait.errors import FitError, UsageError, did_you_mean
from plait.frontend.tokenizer import Tokenizer
from plait.ir.numbers import NUMPY
from plait.ir.quant import quant_type
from plait.present import accelerators
from plait.runtime.pipeline import Pipeline as TokenPipeline
from plait.runtime.request import Request
from plait.runtime.sampler import SamplingParams
from plait.spec import Manifest, ManifestSlice, MemoryEstimate, Plan
from plait.words import bytes_text

if TYPE_CHECKING:
    from plait.backends.base import Array

Ids = Sequence[int]
Message = Mapping[str, str]


class Pipeline:
    """A running pipeline: one worker per slice, weights loaded. Close it, or use it as a context manager."""

    def __init__(
        self, artifact: artifacts.Artifact, pipeline: TokenPipeline, on_close: Callable[[], None] | None = None
    ) -> None:
        self._artifact, self._pipeline = artifact, pipeline
        self._tokenizer: Tokenizer | None = None
        # A pipeline that is forgotten ends like one that is closed.
        self._finalizer = weakref.finalize(self, _end, os.getpid(), pipeline, on_close)

    @classmethod
    def open(
        cls,
        path: str | os.PathLike[str] | artifacts.Artifact,
        *,
        weights: str | os.PathLike[str] | None = None,
        on_close: Callable[[], None] | None = None,
        **options: Any,
    ) -> Self:
        """Check the artifact, then start the workers side by side.

        Args:
            path: an artifact that `compile` wrote; an `Artifact` has been checked and is not read again.
            weights: the checkpoint's folder, where it has moved since.
            on_close: called once, after the workers have ended.
            options: those of `plait.runtime.pipeline.Pipeline.open`: threads, share_workers, in_process, debug,
                timeout_s, in_flight, pythons.
        """
        artifact = path if isinstance(path, artifacts.Artifact) else artifacts.read_artifact(path)
        if weights is not None:
            root = os.path.relpath(Path(weights).resolve(), artifact.folder.resolve())
            moved = replace(artifact.manifest, weight_root=root)
            artifact = replace(artifact, manifest=moved)
        artifacts.check_weights(artifact)
        _check_host_memory(artifact)
        return cls(artifact, TokenPipeline.open(artifact.manifest, artifact.folder, **options), on_close)

    @property
    def plan(self) -> Plan:
        """The plan it was compiled from."""
        return self._artifact.plan

    @property
    def manifest(self) -> Manifest:
        return self._artifact.manifest

    @property
    def chat_template(self) -> str | None:
        """The model's chat template, a jinja2 text; None where the checkpoint had none."""
        template = json.loads((self._artifact.folder / "generation.json").read_bytes())["chat_template"]
        return template if isinstance(template, str) else None

    @property
    def tokenizer(self) -> Tokenizer:
        """The model's tokenizer. Raises CheckpointError when the checkpoint had none."""
        if self._tokenizer is None:
            self._tokenizer = Tokenizer.open(
                self._artifact.folder / "tokenizer.json",
                chat_template=self.chat_template,
                bos_token_id=self.manifest.bos_token_id,
                eos_token_ids=self.manifest.eos_token_ids,
            )
        return self._tokenizer

    @overload
    def generate(self, prompts: str, max_tokens: int = ..., **sampling: Any) -> str: ...
    @overload
    def generate(self, prompts: Sequence[str] | Sequence[Ids], max_tokens: int = ..., **sampling: Any) -> list[str]: ...
    @overload
    def generate(self, prompts: Ids | Sequence[Message], max_tokens: int = ..., **sampling: Any) -> str: ...

    def generate(self, prompts: Any, max_tokens: int = 64, *, chat: bool = False, **sampling: Any) -> str | list[str]:
        """Continue a prompt, or several at once.

        Args:
            prompts: a string, token ids or the messages of a chat, or a list of strings or token ids, run together:
                one prompt in gives a string, a list gives a list.
            max_tokens: the most new tokens per prompt; generation ends before at an end-of-text token.
            chat: put each string into the model's chat template as one user message first.
            sampling: `temperature`, `top_k`, `top_p`, `seed`; greedy without them.

        Returns:
            The new text, without the prompt and without special tokens.
        """
        whole = list(_listed(prompts))
        single = isinstance(prompts, str) or (len(whole) > 0 and isinstance(whole[0], Integral | Mapping))
        batch = [prompts] if single else whole
        ids = self.generate_ids([self.encode(prompt, chat=chat) for prompt in batch], max_tokens, **sampling)
        texts = [self.tokenizer.decode(new) for new in ids]
        return texts[0] if single else texts

    def generate_ids(self, prompts: Sequence[Ids], max_tokens: int = 64, **sampling: Any) -> list[list[int]]:
        """Token ids in, new token ids out (with the end-of-text token where one ended it). Needs no tokenizer."""
        params = _params(sampling)
        return self._pipeline.generate_ids(prompts, params, max_tokens=max_tokens)

    def stream(
        self, prompt: str | Ids | Sequence[Message], max_tokens: int = 64, *, chat: bool = False, **sampling: Any
    ) -> Iterator[str]:
        """Yield text as it comes. Stopping the iteration cancels the request, and so does forgetting the iterator."""
        request = self._pipeline.submit(self.encode(prompt, chat=chat), _params(sampling), max_tokens=max_tokens)
        pieces = self._pieces(request)
        # A generator that was never begun does not come to its `finally`.
        weakref.finalize(pieces, request.cancel).atexit = False
        return pieces

    def _pieces(self, request: Request) -> Iterator[str]:
        decoder = self.tokenizer.stream()
        try:
            for token in request:
                piece = decoder.push(token)
                if piece:
                    yield piece
            rest = decoder.finish()
            if rest:
                yield rest
        finally:
            request.cancel()

    def encode(self, prompt: str | Ids | Sequence[Message], *, chat: bool = False) -> list[int]:
        """Token ids of a prompt; of a chat, through the model's template."""
        if isinstance(prompt, str) and not chat:
            return self.tokenizer.encode(prompt)
        if isinstance(prompt, str):
            return self.tokenizer.encode_chat([{"role": "user", "content": prompt}])
        items = list(_listed(prompt))
        if items and all(isinstance(item, Mapping) for item in items):
            return self.tokenizer.encode_chat(cast(list[Message], items))
        return cast(list[int], items)

    def logits(self, ids: Ids, chunk: int | None = None) -> Array:
        """float32 [len(ids), vocabulary]: the scores after every token of `ids`, in steps of at most `chunk` tokens."""
        return self._pipeline.logits(ids, chunk)

    def stats(self) -> dict[str, Any]:
        """Counters since the start: tokens, steps, per slice where it runs and how long it was busy."""
        return self._pipeline.stats()

    def close(self) -> None:
        """End the workers. Idempotent."""
        self._finalizer()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def _check_host_memory(artifact: artifacts.Artifact) -> None:
    """Refuse slices that this host would have to emulate and cannot hold: the system kills what asks for too much,
    and not always that alone.

    Raises:
        FitError: weights and KV of the emulated slices exceed the memory that is available.
    """
    if accelerators():
        return  # which slices they take is for the backends to say
    parts = [
        (planned, _weight_bytes(artifact, part, planned.memory) + planned.memory.kv_bytes)
        for planned, part in zip(artifact.plan.slices, artifact.manifest.slices, strict=True)
        if planned.memory is not None and (part.backend == "cpu" or is_emulated(part.runs_on))
    ]
    needed, free = sum(size for _, size in parts), memory_bytes()[1]
    if needed <= free:
        return
    rows: list[dict[str, int | str]] = [
        {"device": part.devices[0], "blocks": "{}:{}".format(*part.blocks), "needed": size, "free": 0, "short_by": 0}
        for part, size in parts
    ]
    rows.append({"device": "this host", "blocks": "", "needed": needed, "free": free, "short_by": needed - free})
    raise FitError(
        f"{artifact.manifest.model} does not fit this host",
        why=f"weights and KV of the slices it emulates need {bytes_text(needed)}, {bytes_text(free)} are available",
        hint="compile for fewer requests (--concurrency) or shorter ones (--context)",
        rows=tuple(rows),
    )


def _weight_bytes(artifact: artifacts.Artifact, part: ManifestSlice, planned: MemoryEstimate) -> int:
    """What the weights of a slice take here: the host keeps none quantised, whatever its device does."""
    refs = read_weights_json(artifact.folder / part.folder / "weights.json").values()
    if all(quant_type(ref) is None for ref in refs):
        return planned.weights_bytes
    return sum(prod(ref.shape) for ref in refs) * NUMPY[part.dtype].itemsize


def _end(owner: int, pipeline: TokenPipeline, on_close: Callable[[], None] | None) -> None:
    if os.getpid() != owner:
        return  # a fork's copy: workers and artifact are still in use
    pipeline.close()
    if on_close is not None:
        on_close()


def _listed(prompt: Any) -> Iterable[Any]:
    """A prompt that is a string or a list of something. Bytes are whole numbers too, but hardly meant as token ids."""
    if isinstance(prompt, bytes | bytearray | Mapping) or not isinstance(prompt, Iterable):
        raise UsageError(
            "prompt-type",
            f"a prompt of type {type(prompt).__name__} cannot be read",
            why="it is a string, token ids or the messages of a chat",
        )
    return prompt


def _params(sampling: Mapping[str, Any]) -> SamplingParams:
    known = SamplingParams.__dataclass_fields__
    unknown = sorted(sampling.keys() - known.keys())
    if unknown:
        raise UsageError(
            "sampling",
            f"no sampling option {unknown[0]!r}",
            why="known: " + ", ".join(known),
            hint=did_you_mean(unknown[0], known),
        )
    return SamplingParams(**sampling)
