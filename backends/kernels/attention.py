"""Grouped-query and latent attention over paged KV in torch. Legend: see `step`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from plait.backends.kernels.arrays import FP8_DTYPES, TORCH_DTYPES, of_codes, to_codes
from plait.backends.kernels.step import Paging, Part, Step

_EVEN_ROWS = 4
"""MKL adds up fewer than four rows, and those left over, in an order that depends on where they lie in memory."""


class Cache:
    """K and V pages of one layer: `pages` is (2, page, token, kv_head, head_dim), FP8 as codes. Where the first
    `values` features of a key are its value, there is K alone: (1, page, token, 1, head_dim)."""

    def __init__(
        self, pages: int, page_tokens: int, kv_heads: int, head_dim: int, dtype: str, values: int | None = None
    ) -> None:
        self._fp8, self._values = FP8_DTYPES.get(dtype), values
        sides = 2 if values is None else 1
        # Zeros, not whatever memory holds: a masked key counts 0 times, and 0 * NaN is not 0.
        held = torch.uint8 if self._fp8 is not None else TORCH_DTYPES[dtype]
        self.pages = torch.zeros(sides, pages, page_tokens, kv_heads, head_dim, dtype=held)
        self._rows = self.pages.view(sides, pages * page_tokens, kv_heads * head_dim).unbind(0)

    def append(self, paging: Paging, k: Tensor, v: Tensor | None) -> tuple[Tensor, Tensor]:
        """Write this step's k and v (T, N * D), or k alone. Keys and values as they were stored, in the dtype of k."""
        if paging.fresh is not None:
            self.pages.index_fill_(1, paging.fresh, 0)
        given = [side for side in (k, v) if side is not None]
        new = [side if self._fp8 is None else to_codes(side, self._fp8) for side in given]
        for held, side in zip(self._rows, new, strict=True):
            held.index_copy_(0, paging.slots, side)
        return self._sides([self._wide(side, k.dtype) for side in new])

    def gather(self, pages: Tensor, sequences: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Keys and values (S, L, N, D) of [S * P] pages."""
        held = self.pages.index_select(1, pages).view(len(self.pages), sequences, -1, *self.pages.shape[3:])
        return self._sides(self._wide(held, dtype).unbind(0))

    def _sides(self, held: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
        """Keys and values of what is stored."""
        return held[0], held[0][..., : self._values] if self._values is not None else held[1]

    def _wide(self, held: Tensor, dtype: torch.dtype) -> Tensor:
        return held if self._fp8 is None else of_codes(held, self._fp8, dtype)


@dataclass(frozen=True)
class Attention:
    """`plait.attention` with its attributes; None means off. Keys and values may differ in width."""

    heads: int
    kv_heads: int
    scale: float
    window: int | None
    softcap: float | None

    def __call__(
        self, step: Step, cache: Cache, q: Tensor, k: Tensor, v: Tensor | None, sinks: Tensor | None = None
    ) -> Tensor:
        """q (T, H * D), k and v (T, N * D), sinks (H) -> (T, H * D). Without v a value is the first part of its key."""
        paging = step.paging(self.window, q.dtype)
        k, values = cache.append(paging, k, v)
        parts = paging.parts
        sink = None if sinks is None else sinks.float().view(self.kv_heads, -1)
        if parts[0].rows is None:
            return self._part(parts[0], cache, q, k, values, sink)
        out = q.new_empty(len(q), self.heads * values.shape[1] // self.kv_heads)
        for part in parts:
            out[part.rows] = self._part(part, cache, q, k, values, sink)
        return out

    def _part(self, part: Part, cache: Cache, q: Tensor, k: Tensor, v: Tensor, sink: Tensor | None) -> Tensor:
        """`sink` is (N, G) float32."""
        if part.rows is not None:
            q = q[part.rows]
        groups, rows = self.heads // self.kv_heads, len(q)
        if part.pages is not None:
            k, v = cache.gather(part.pages, part.sequences, q.dtype)
        else:
            k, v = (x[part.rows].view(1, rows, self.kv_heads, -1) for x in (k, v))
        if rows == part.sequences and part.pages is not None:
            # One token each: the heads of a group are the queries, and K and V are read once for all of them.
            queries = q.view(rows, self.kv_heads, groups, -1)
            if groups % _EVEN_ROWS:
                queries = torch.nn.functional.pad(queries, (0, 0, 0, -groups % _EVEN_ROWS))
                sink = None if sink is None else torch.nn.functional.pad(sink, (0, -groups % _EVEN_ROWS))
            sink = None if sink is None else sink[..., None]
            out = self._attend(queries, k.transpose(1, 2), v.transpose(1, 2), part.mask, sink)
            return out[:, :, :groups].reshape(rows, -1)
        queries = q.view(rows, self.kv_heads, groups, -1).permute(2, 1, 0, 3)  # (G, N, Q, D)
        k, v = (x.transpose(1, 2).expand(groups, -1, -1, -1) for x in (k, v))  # no copy
        sink = None if sink is None else sink.t()[..., None, None]
        return self._attend(queries, k, v, part.mask, sink).permute(2, 1, 0, 3).reshape(rows, -1)

    def _attend(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, sink: Tensor | None) -> Tensor:
        """(B, N, Q, D) on (B, N, L, D); float32 softmax. Without a mask L = Q and the mask is causal. `sink` can be
        expanded to (B, N, Q, 1)."""
        if self.softcap is None and sink is None:
            return torch.nn.functional.scaled_dot_product_attention(
                q, k, v, attn_mask=mask, is_causal=mask is None, scale=self.scale
            )
        scores = torch.matmul(q.float(), k.float().transpose(-1, -2)) * self.scale
        if self.softcap is not None:
            scores = torch.tanh(scores / self.softcap) * self.softcap
        if mask is None:
            mask = torch.full(scores.shape[-2:], -torch.inf).triu(1)
        scores = scores + mask
        if sink is not None:  # a key more, without a value
            scores = torch.cat((scores, sink.expand(*scores.shape[:-1], 1)), -1)
        return torch.matmul(torch.softmax(scores, -1)[..., : v.shape[-2]], v.float()).to(q.dtype)
