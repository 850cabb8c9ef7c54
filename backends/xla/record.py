"""`programs.json`: what compile made of a slice, and what loading it must do alike."""

from __future__ import annotations

from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Literal

from plait.backends.base import CompileOptions
from plait.backends.xla.buckets import Buckets, Shape
from plait.spec import from_json, ring_pages

FILE = "programs.json"

Attention = Literal["gather", "pallas"]


@dataclass(frozen=True)
class Bounds:
    """The fields of `CompileOptions` that shapes depend on."""

    max_step_tokens: int
    max_sequences: int
    page_tokens: int
    max_context_tokens: int
    max_kv_tokens: int
    group_size: int

    @staticmethod
    def of(options: CompileOptions) -> Bounds:
        tokens = options.max_kv_tokens
        if tokens is None:
            tokens = options.max_sequences * options.max_context_tokens
        return Bounds(
            options.max_step_tokens,
            options.max_sequences,
            options.page_tokens,
            options.max_context_tokens,
            tokens,
            options.group_size,
        )


@dataclass(frozen=True)
class StoredWeight:
    """One array of weights as the programs take it: the tensors of each layer, and the layout that XLA chose for it.

    Attributes:
        order: the dimensions from the one that varies slowest in memory to the one that varies fastest.
        tiling: XLA's tiles, of the last dimensions in that order.
    """

    layers: tuple[tuple[str, ...], ...]
    order: tuple[int, ...]
    tiling: tuple[tuple[int, ...], ...]


@dataclass(frozen=True)
class StoredProgram:
    """One executable: the shape it is for and its file."""

    file: str
    sequences: int
    queries: int
    keys: int
    every_row: bool

    @property
    def shape(self) -> Shape:
        return Shape(self.sequences, self.queries, self.keys, self.every_row)


@dataclass(frozen=True)
class Record:
    """The programs of one slice.

    Attributes:
        platform: JAX's name of it: `tpu`, or `cpu` where tests make code for this host.
        device_kind: what the chip calls itself.
        versions: of the libraries that made them, by name; XLA loads what the same version made.
        pages: pages of a layer, by KV class.
        sequences, queries, keys: the sizes that steps are padded to.
    """

    platform: str
    device_kind: str
    versions: dict[str, str]
    group_size: int
    attention: Attention
    page_tokens: int
    pages: dict[str, int]
    sequences: tuple[int, ...]
    queries: tuple[int, ...]
    keys: tuple[int, ...]
    weights: tuple[StoredWeight, ...]
    programs: tuple[StoredProgram, ...]
    schema: Literal[1] = 1

    @property
    def buckets(self) -> Buckets:
        return Buckets(self.sequences, self.queries, self.keys)


def read_record(folder: Path) -> Record | None:
    """The record of a slice's folder; None where it has no programs."""
    path = folder / FILE
    return from_json(Record, path.read_text("utf-8")) if path.is_file() else None


def versions(platform: str) -> dict[str, str]:
    """The libraries here whose serialised programs can be read by no other version."""
    return {name: metadata.version(name) for name in ("jaxlib", *(("libtpu",) if platform == "tpu" else ()))}


def pages_of(windows: dict[str, int | None], options: Bounds) -> dict[str, int]:
    """Pages of a layer by KV class: what `max_kv_tokens` fill, and in a window class no more than all rings."""
    pages = -(-options.max_kv_tokens // options.page_tokens)
    return {
        name: pages
        if window is None
        else min(pages, options.max_sequences * ring_pages(window, options.page_tokens, options.max_step_tokens))
        for name, window in windows.items()
    }


def buckets_of(options: Bounds) -> Buckets:
    """Few sizes, because each combination is a program: the largest that can come, and one for small steps."""
    context = _up(options.max_context_tokens, 128)
    return Buckets(
        # A product of fewer rows than a tile's 8 is no product to XLA but a sum, estimated at 2.6 times the time of 8.
        sequences=_two(8, _up(options.max_sequences, 8), options.max_sequences),
        queries=_two(128, _up(options.max_step_tokens, 16), options.max_step_tokens),
        keys=_two(1024, context, context),
    )


def _two(small: int, large: int, most: int) -> tuple[int, ...]:
    return (small, large) if small < most else (large,)


def _up(count: int, step: int) -> int:
    return -(-count // step) * step


def shapes_of(buckets: Buckets, has_logits: bool) -> list[Shape]:
    """The programs to make, the largest decode first. Prefill returns the logits of one row, the prompt's last."""
    decode = [Shape(n, 1, keys, has_logits) for n in reversed(buckets.sequences) for keys in reversed(buckets.keys)]
    return decode + [Shape(1, n, keys, False) for n in buckets.queries for keys in buckets.keys]


def name_of(shape: Shape) -> str:
    """`decode-8-1024`: sequences and keys; `prefill-512-1024`: queries and keys."""
    if shape.queries == 1:
        return f"decode-{shape.sequences}-{shape.keys}"
    return f"prefill-{shape.queries}-{shape.keys}"
