"""Grouped-query attention over paged KV in torch. Legend: see `step`."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from plait.backends.kernels.arrays import FP8_DTYPES, TORCH_DTYPES, of_codes, to_codes
from plait.backends.kernels.step import Paging, Part, Step

_EVEN_ROWS = 4
"""MKL adds up fewer than four rows, and those left over, in an order that depends on where they lie in memory."""


class Cache:
    """K and V pages of one layer: `pages` is (2, page, token, kv_head, head_dim), FP8 as codes."""

    def __init__(self, pages: int, page_tokens: int, kv_heads: int, head_dim: int, dtype: str) -> None:
        self._fp8 = FP8_DTYPES.get(dtype)
        # Zeros, not whatever memory holds: a masked key counts 0 times, and 0 * NaN is not 0.
        held = torch.uint8 if self._fp8 is not None else TORCH_DTYPES[dtype]
        self.pages = torch.zeros(2, pages, page_tokens, kv_heads, head_dim, dtype=held)
        self._k, self._v = self.pages.view(2, pages * page_tokens, kv_heads * head_dim).unbind(0)

    def append(self, paging: Paging, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Write this step's k and v (T, N * D). What was stored, in their dtype."""
        if paging.fresh is not None:
            self.pages.index_fill_(1, paging.fresh, 0)
        dtype = k.dtype
        if self._fp8 is not None:
            k, v = to_codes(k, self._fp8), to_codes(v, self._fp8)
        self._k.index_copy_(0, paging.slots, k)
        self._v.index_copy_(0, paging.slots, v)
        return self._wide(k, dtype), self._wide(v, dtype)

    def gather(self, pages: Tensor, sequences: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Keys and values (S, L, N, D) of [S * P] pages."""
        held = self.pages.index_select(1, pages).view(2, sequences, -1, *self.pages.shape[3:])
        k, v = self._wide(held, dtype).unbind(0)
        return k, v

    def _wide(self, held: Tensor, dtype: torch.dtype) -> Tensor:
        return held if self._fp8 is None else of_codes(held, self._fp8, dtype)


@dataclass(frozen=True)
class Attention:
    """`plait.attention` with its attributes; None means off."""

    heads: int
    kv_heads: int
    head_dim: int
    scale: float
    window: int | None
    softcap: float | None

    def __call__(
        self, step: Step, cache: Cache, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None = None
    ) -> Tensor:
        """q (T, H * D), k and v (T, N * D), sinks (H) -> (T, H * D)."""
        paging = step.paging(self.window, q.dtype)
        k, v = cache.append(paging, k, v)
        parts = paging.parts
        sink = None if sinks is None else sinks.float().view(self.kv_heads, -1)
        if parts[0].rows is None:
            return self._part(parts[0], cache, q, k, v, sink)
        out = torch.empty_like(q)
        for part in parts:
            out[part.rows] = self._part(part, cache, q, k, v, sink)
        return out

    def _part(self, part: Part, cache: Cache, q: Tensor, k: Tensor, v: Tensor, sink: Tensor | None) -> Tensor:
        """`sink` is (N, G) float32."""
        if part.rows is not None:
            q = q[part.rows]
        groups, rows = self.heads // self.kv_heads, len(q)
        if part.pages is not None:
            k, v = cache.gather(part.pages, part.sequences, q.dtype)
        else:
            k, v = (x[part.rows].view(1, rows, self.kv_heads, self.head_dim) for x in (k, v))
        if rows == part.sequences and part.pages is not None:
            # One token each: the heads of a group are the queries, and K and V are read once for all of them.
            queries = q.view(rows, self.kv_heads, groups, self.head_dim)
            if groups % _EVEN_ROWS:
                queries = torch.nn.functional.pad(queries, (0, 0, 0, -groups % _EVEN_ROWS))
                sink = None if sink is None else torch.nn.functional.pad(sink, (0, -groups % _EVEN_ROWS))
            sink = None if sink is None else sink[..., None]
            out = self._attend(queries, k.transpose(1, 2), v.transpose(1, 2), part.mask, sink)
            return out[:, :, :groups].reshape(rows, -1)
        queries = q.view(rows, self.kv_heads, groups, self.head_dim).permute(2, 1, 0, 3)  # (G, N, Q, D)
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
