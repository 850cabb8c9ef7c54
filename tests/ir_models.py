"""Small modules, weights and batches for tests of the IR: built with `Builder` alone, no frontend, no scheduler."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray
from xdsl.dialects.builtin import ModuleOp

from plait.backends.base import Batch
from plait.ir import Builder, Rope, kv_classes, weights
from plait.ir.oracle import Oracle
from plait.spec import kv_class, ring_pages

Weights = dict[str, NDArray[Any]]


@dataclass(frozen=True)
class Shape:
    """A decoder of the Llama family. `windows` and `ropes` repeat over the blocks."""

    blocks: int = 2
    hidden: int = 16
    heads: int = 4
    kv_heads: int = 2
    head_dim: int = 4
    ffn: int = 24
    vocabulary: int = 32
    eps: float = 1e-5
    windows: tuple[int | None, ...] = (None,)
    ropes: tuple[Rope, ...] = (Rope(10000.0),)
    softcap: float | None = None
    bias: bool = False
    tied: bool = True
    dtype: str = "float32"


def build(shape: Shape) -> ModuleOp:
    """The whole model, with Hugging Face's names for the weights."""
    b = Builder("llama", shape.dtype)
    x = b.embed("model.embed_tokens.weight", shape.vocabulary, shape.hidden)
    for block in range(shape.blocks):
        b.block = block
        prefix = f"model.layers.{block}."

        def linear(value: Any, name: str, out: int, biased: bool = False, at: str = prefix) -> Any:
            return b.linear(value, f"{at}{name}.weight", out, f"{at}{name}.bias" if biased else None)

        rope = shape.ropes[block % len(shape.ropes)]
        h = b.rms_norm(x, prefix + "input_layernorm.weight", shape.eps)
        q = linear(h, "self_attn.q_proj", shape.heads * shape.head_dim, shape.bias)
        k = linear(h, "self_attn.k_proj", shape.kv_heads * shape.head_dim, shape.bias)
        v = linear(h, "self_attn.v_proj", shape.kv_heads * shape.head_dim, shape.bias)
        a = b.attention(
            b.rope(q, shape.head_dim, rope),
            b.rope(k, shape.head_dim, rope),
            v,
            heads=shape.heads,
            kv_heads=shape.kv_heads,
            head_dim=shape.head_dim,
            scale=shape.head_dim**-0.5,
            window=shape.windows[block % len(shape.windows)],
            softcap=shape.softcap,
        )
        x = b.add(x, linear(a, "self_attn.o_proj", shape.hidden))
        h = b.rms_norm(x, prefix + "post_attention_layernorm.weight", shape.eps)
        up = b.silu_mul(linear(h, "mlp.gate_proj", shape.ffn), linear(h, "mlp.up_proj", shape.ffn))
        x = b.add(x, linear(up, "mlp.down_proj", shape.hidden))
    b.block = None
    x = b.rms_norm(x, "model.norm.weight", shape.eps)
    head = "model.embed_tokens.weight" if shape.tied else "lm_head.weight"
    return b.finish({"logits": b.logits(x, head, shape.vocabulary)})


def random_weights(module: ModuleOp, seed: int = 0) -> Weights:
    """Random tensors of the shapes that the module asks for, large enough that every part changes the logits."""
    rng = np.random.default_rng(seed)
    return {name: rng.normal(0, 0.4, op.result.type.get_shape()) for name, op in sorted(weights(module).items())}


class Feed:
    """Sequences of random tokens, fed step by step through page tables whose pages lie in random order.

    A full class has a page for every logical one; a window class has a ring as large as `ring_pages` says, no larger
    (without `rings`, it has every page too).
    """

    def __init__(
        self,
        classes: Mapping[str, int | None],
        lengths: Sequence[int],
        *,
        page_tokens: int = 4,
        max_step_tokens: int = 64,
        vocabulary: int = 32,
        seed: int = 0,
        page_seed: int = 0,
        rings: bool = True,
    ) -> None:
        rng = np.random.default_rng(seed)
        pages = np.random.default_rng(page_seed)
        self.page_tokens = page_tokens
        self.tokens = [rng.integers(0, vocabulary, length).astype(np.int32) for length in lengths]
        self.done = [0] * len(lengths)
        self.pages: dict[str, int] = {}
        self._tables: dict[str, NDArray[np.int32]] = {}
        for name, window in classes.items():
            assert name == kv_class(window)
            counts = [-(-length // page_tokens) for length in lengths]
            held = counts
            if window is not None and rings:
                held = [min(count, ring_pages(window, page_tokens, max_step_tokens)) for count in counts]
            self.pages[name] = sum(held) + 3  # a few that nobody owns
            free = iter(pages.permutation(self.pages[name]))
            table = np.full((len(lengths), max(counts)), -1, np.int32)
            for s, (count, own) in enumerate(zip(counts, held, strict=True)):
                ring = [next(free) for _ in range(own)]
                table[s, :count] = [ring[logical % own] for logical in range(count)]
            self._tables[name] = table

    def step(self, chunk: Mapping[int, int]) -> Batch:
        """The next `chunk[s]` tokens of every sequence s in `chunk`; logits of all of them."""
        rows = sorted(chunk)
        lens = [chunk[s] for s in rows]
        total = sum(lens)
        batch = Batch(
            tokens=np.concatenate([self.tokens[s][self.done[s] : self.done[s] + chunk[s]] for s in rows]),
            positions=np.concatenate([np.arange(self.done[s], self.done[s] + chunk[s], dtype=np.int32) for s in rows]),
            query_starts=np.concatenate(([0], np.cumsum(lens))).astype(np.int32),
            kv_lens=np.array([self.done[s] + chunk[s] for s in rows], np.int32),
            page_tables={name: table[rows] for name, table in self._tables.items()},
            logit_rows=np.arange(total, dtype=np.int32),
        )
        batch.check()
        for s in rows:
            self.done[s] += chunk[s]
        return batch


def run(
    stages: Sequence[ModuleOp],
    tensors: Mapping[str, NDArray[Any]],
    lengths: Sequence[int],
    steps: Sequence[Mapping[int, int]],
    **options: Any,
) -> list[NDArray[np.float64]]:
    """Oracle logits of every sequence, [length, vocabulary]: the stages one after another, step by step."""
    classes: dict[str, int | None] = {}
    for stage in stages:
        classes |= kv_classes(stage)
    feed = Feed(classes, lengths, **options)
    oracles = [Oracle(stage, tensors, feed.pages, feed.page_tokens) for stage in stages]
    rows: list[list[NDArray[np.float64]]] = [[] for _ in lengths]
    for chunk in steps:
        batch = feed.step(chunk)
        values: dict[str, Any] = {}
        for oracle in oracles:
            values = oracle.step(batch, values)
        for index, s in enumerate(sorted(chunk)):
            rows[s].append(values["logits"][batch.query_starts[index] : batch.query_starts[index + 1]])
    assert feed.done == list(lengths)
    return [np.concatenate(parts) for parts in rows]


def in_chunks(lengths: Sequence[int], size: int) -> list[dict[int, int]]:
    """Every sequence in chunks of `size`, all sequences together in each step."""
    left = list(lengths)
    steps = []
    while any(left):
        step = {s: min(size, rest) for s, rest in enumerate(left) if rest}
        left = [rest - step.get(s, 0) for s, rest in enumerate(left)]
        steps.append(step)
    return steps
