"""A backend of whole numbers: what it computes depends on every key in the cache, on its page, and on its position.

The model works modulo a prime that float32 holds exactly, so results do not depend on the order of sums, and any wrong
page, slot, position or window changes them. Pages start full of garbage. `reference` is the same model without pages,
batches or slices.

Tokens from `FIRST_FAULT` on are never sampled; put into a prompt, they make a slice with `faulty` misbehave.
"""

from __future__ import annotations

import itertools
import json
import os
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from plait.backends.base import TOKENS, Array, Batch, Int32, LoadOptions, best_tokens
from plait.errors import FitError, UnsupportedError
from plait.spec import Boundary, KVLayout, Manifest, ManifestSlice, kv_class

PRIME, HIDDEN, VOCAB, FIRST_FAULT = 65521, 4, 97, 90
RAISE, HANG, EXIT, REFUSE, NAN, SHORT = range(FIRST_FAULT, FIRST_FAULT + 6)
ENTRY = "tests.fakes:BACKEND"


def embed(token: int, position: int) -> list[int]:
    return [(token * 31 + position * 17 + j * 7 + 1) % PRIME for j in range(HIDDEN)]


def scores(hidden: Sequence[int]) -> list[float]:
    mix = sum((j + 2) * value for j, value in enumerate(hidden)) % PRIME
    known = [float((mix * (13 * v + 5) + v * v) % PRIME) for v in range(FIRST_FAULT)]
    return known + [-1.0] * (VOCAB - FIRST_FAULT)


def reference_logits(ids: Sequence[int], windows: Sequence[int | None]) -> list[list[float]]:
    """The scores after every token."""
    keys: list[list[list[int]]] = [[] for _ in windows]
    rows = []
    for position, token in enumerate(ids):
        hidden = embed(token, position)
        for layer, window in enumerate(windows):
            keys[layer].append([(3 * value + layer + 1) % PRIME for value in hidden])
            first = 0 if window is None else max(position - window + 1, 0)
            for j in range(HIDDEN):
                seen = sum((1 + q % 5) * keys[layer][q][j] for q in range(first, position + 1))
                hidden[j] = (hidden[j] + (layer + 2) * seen) % PRIME
        rows.append(scores(hidden))
    return rows


def reference(prompt: Sequence[int], count: int, windows: Sequence[int | None], eos: Sequence[int] = ()) -> list[int]:
    """`count` greedy tokens, one after the other."""
    ids = list(prompt)
    for _ in range(count):
        row = reference_logits(ids, windows)[-1]
        ids.append(row.index(max(row)))
        if ids[-1] in eos:
            break
    return ids[len(prompt) :]


class FakeExecutable:
    def __init__(self, folder: Path, device: str, options: LoadOptions) -> None:
        self.config: dict[str, Any] = json.loads((folder / "slice.json").read_text())
        self.runs_on, self.kv_layouts = f"{device} (fake)", ()
        self.start, self.windows = self.config["start"], self.config["windows"]
        self.page_tokens, self.steps, self.closed = options.page_tokens, 0, False
        rng = np.random.default_rng(1)
        self.caches = [
            rng.integers(0, PRIME, (options.pages[kv_class(window)], options.page_tokens, HIDDEN))
            for window in self.windows
        ]

    def step(self, batch: Batch, inputs: Mapping[str, Array]) -> dict[str, Array]:
        batch.check()
        self.steps += 1
        time.sleep(self.config["sleep_s"])
        if self.config["faulty"]:
            misbehave(batch.tokens)
        pairs = zip(batch.tokens.tolist(), batch.positions.tolist(), strict=True)
        embedded = np.array([embed(token, position) for token, position in pairs])
        hidden = inputs["hidden"].astype(np.int64) if self.start else embedded
        if "skip" in inputs:
            assert (inputs["skip"] == embedded).all()
        for i, window in enumerate(self.windows):
            hidden = self.attend(batch, hidden, i, window)
        if not self.config["last"]:
            short = self.config["faulty"] and SHORT in batch.tokens
            skip = {"skip": embedded.astype(self.config["dtype"])} if self.config["skip"] else {}
            return {"hidden": hidden[: len(hidden) - short].astype(self.config["dtype"]), **skip}
        rows = [scores(row) for row in hidden[batch.logit_rows].tolist()]
        logits = np.array(rows, np.float32).reshape(-1, VOCAB)
        logits = np.full_like(logits, np.nan) if NAN in batch.tokens else logits
        return {TOKENS: best_tokens(logits)} if batch.greedy else {"logits": logits}

    def attend(self, batch: Batch, hidden: Array, i: int, window: int | None) -> Array:
        cache, table, layer = self.caches[i], batch.page_tables[kv_class(window)], self.start + i
        out = hidden.copy()
        keys = (3 * hidden + layer + 1) % PRIME
        for s, t in tokens_of(batch):
            page, slot = divmod(int(batch.positions[t]), self.page_tokens)
            assert table[s, page] >= 0
            cache[table[s, page], slot] = keys[t]
        for s, t in tokens_of(batch):
            position = int(batch.positions[t])
            seen = np.arange(0 if window is None else max(position - window + 1, 0), position + 1)
            held = cache[table[s, seen // self.page_tokens], seen % self.page_tokens]
            out[t] = (hidden[t] + (layer + 2) * ((1 + seen % 5)[:, None] * held).sum(0)) % PRIME
        return out

    def export_pages(self, layer: int, pages: Int32) -> tuple[Array, Array]:
        raise NotImplementedError

    def import_pages(self, layer: int, pages: Int32, k: Array, v: Array) -> None:
        raise NotImplementedError

    def stats(self) -> dict[str, int | float | str]:
        return {"calls": self.steps, "pid": os.getpid(), "vendor": vendor()}

    def close(self) -> None:
        self.closed = True


class FakeBackend:
    name = "fake"

    def load(self, folder: Path, device: str, options: LoadOptions) -> FakeExecutable:
        if device == "unloadable":
            raise UnsupportedError("fake-refusal", "the fake device says no", why="it always does", hint="ask another")
        if device == "small":
            raise FitError("the weights do not fit", why="needed 3, free 2")
        if device == "crash":
            raise ZeroDivisionError("crash on load")
        if device == "sleepy":
            time.sleep(60)
        return FakeExecutable(folder, device, options)


BACKEND = FakeBackend()


def tokens_of(batch: Batch) -> Iterator[tuple[int, int]]:
    """(sequence, token) of every token."""
    for s in range(batch.sequence_count):
        for t in range(batch.query_starts[s], batch.query_starts[s + 1]):
            yield s, t


def misbehave(tokens: Int32) -> None:
    if RAISE in tokens:
        raise ArithmeticError("op plait.linear @up overflowed")
    if REFUSE in tokens:
        raise UnsupportedError("fake-op", "op plait.rope is not implemented", why="kind llama3")
    if HANG in tokens:
        time.sleep(60)
    if EXIT in tokens:
        os._exit(7)


def vendor() -> str:
    """What the interpreter's own wheel says, where it has one."""
    try:
        import vendor_wheel  # type: ignore[import-not-found]
    except ImportError:
        return "none"
    return str(vendor_wheel.NAME)


def make_artifact(
    folder: Path,
    windows: Sequence[int | None] = (None, 8, None),
    cuts: Sequence[int] = (1, 2),
    *,
    devices: Sequence[str] = ("h100", "mi300", "v5e"),
    environments: Sequence[str] = ("a", "b", "c"),
    dtype: str = "float32",
    sleep_s: float = 0.0,
    faulty: int | None = None,
    skip: bool = False,
    **changes: Any,
) -> Manifest:
    """Write the slices of a fake model of one layer per window, cut before the layers `cuts`.

    Args:
        faulty: the slice that obeys the fault tokens.
        skip: every slice but the last also returns `skip`, the embedded tokens; one that is given it checks it.
        changes: other fields of the manifest.
    """
    edges = [0, *cuts, len(windows)]
    boundary = Boundary("hidden", (None, HIDDEN), dtype)
    slices = []
    for i, (start, end) in enumerate(itertools.pairwise(edges)):
        part = folder / f"slices/{i}-{devices[i]}"
        part.mkdir(parents=True, exist_ok=True)
        last = end == len(windows)
        config = {"start": start, "windows": list(windows[start:end]), "last": last, "dtype": dtype, "skip": skip}
        (part / "slice.json").write_text(json.dumps(config | {"sleep_s": sleep_s, "faulty": faulty == i}))
        slices.append(
            ManifestSlice(
                folder=str(part.relative_to(folder)),
                device=devices[i],
                backend="fake",
                entry=ENTRY,
                target="fake",
                environment=environments[i],
                runs_on=f"{devices[i]} (emulated on host)",
                blocks=(start, end),
                inputs=(boundary,) if start else (),
                outputs=(Boundary("logits", (None, VOCAB), "float32"),) if last else (boundary,),
                kv=tuple(KVLayout(1, HIDDEN, dtype, 4, window=window) for window in windows[start:end]),
                dtype=dtype,
            )
        )
    fields: dict[str, Any] = {
        "max_positions": 512,
        "page_tokens": 4,
        "max_sequences": 16,
        "max_step_tokens": 12,
        "max_kv_tokens": 1200,
    }
    return Manifest(
        model="fake",
        family="fake",
        plait_version="0",
        vocab_size=VOCAB,
        dtype=dtype,
        plan_digest="",
        module_digest="",
        slices=tuple(slices),
        **(fields | changes),
    )
