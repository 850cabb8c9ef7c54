"""`plait.attention`: grouped-query attention over paged KV."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

import numpy as np
from xdsl.dialects.builtin import TensorType
from xdsl.ir import Attribute, SSAValue
from xdsl.irdl import irdl_op_definition, operand_def, opt_operand_def, opt_prop_def, prop_def, result_def

from plait.ir.facts import Cost, Step, visible_pairs
from plait.ir.numbers import saturate
from plait.ir.ops.base import (
    FORMAT,
    BatchFacts,
    F64Attr,
    Float64,
    I64Attr,
    OracleKV,
    PlaitOp,
    activation_type,
    properties,
    require,
    require_positive,
    tensor_type,
    weight_type,
)
from plait.ir.types import BatchType, KVType, dtype_bytes, tensor, tensor_bytes, tokens_by
from plait.spec import kv_class


@irdl_op_definition
class AttentionOp(PlaitOp):
    """Append this step's k and v to the pages of `kv`, then attend causally.

    For query head h and KV head h // (heads / kv_heads): softmax over the visible keys of scale * q k, times v. With a
    `softcap` c the scores become c * tanh(score / c) before the mask. Key j is visible to query i when j <= i and,
    under a `window` w, i - j < w. Absent attributes are off.

    `sinks` (heads) are scores that every query of a head sees beside its keys and that have no value: the softmax's
    denominator gains exp(sink). They are neither scaled nor capped. An FP8 `kv` rounds k and v as they are appended
    (see `!plait.kv`), and the new tokens attend to what was stored.
    """

    name = "plait.attention"
    FORMULA: ClassVar[str] = "softmax(mask(cap(scale q k^T))) v"

    q = operand_def(TensorType)
    k = operand_def(TensorType)
    v = operand_def(TensorType)
    kv = operand_def(KVType)
    batch = operand_def(BatchType)
    sinks = opt_operand_def(TensorType)
    heads = prop_def(I64Attr)
    scale = prop_def(F64Attr)
    window = opt_prop_def(I64Attr)
    softcap = opt_prop_def(F64Attr)
    result = result_def(TensorType)

    assembly_format = FORMAT

    def __init__(
        self,
        q: SSAValue,
        k: SSAValue,
        v: SSAValue,
        kv: SSAValue,
        batch: SSAValue,
        sinks: SSAValue | None = None,
        *,
        heads: int,
        scale: float,
        window: int | None = None,
        softcap: float | None = None,
        block: int | None = None,
    ) -> None:
        super().__init__(
            operands=[q, k, v, kv, batch, sinks],
            result_types=[q.type],
            properties=properties(
                heads=heads,
                scale=float(scale),
                window=window,
                softcap=None if softcap is None else float(softcap),
                block=block,
            ),
        )

    @property
    def cache(self) -> KVType:
        kind = self.kv.type
        assert isinstance(kind, KVType)
        return kind

    @property
    def kv_heads(self) -> int:
        return self.cache.kv_heads.data

    @property
    def head_dim(self) -> int:
        return self.cache.head_dim.data

    @property
    def window_tokens(self) -> int | None:
        return None if self.window is None else self.window.value.data

    def infer(self) -> Sequence[Attribute]:
        q, k, v = (activation_type(value, name) for value, name in ((self.q, "q"), (self.k, "k"), (self.v, "v")))
        heads, kv_heads, head_dim = self.heads.value.data, self.kv_heads, self.head_dim
        require(heads > 0, "heads must be positive, not {}", heads)
        require(not self.cache.is_latent, "{} keeps no values", self.cache)
        require(heads % kv_heads == 0, "{} query heads do not divide over {} KV heads", heads, kv_heads)
        wide, narrow = tokens_by(heads * head_dim, q.element_type), tokens_by(kv_heads * head_dim, q.element_type)
        require(q == wide, "q is {}, but {} heads of {} make {}", q, heads, head_dim, wide)
        for name, kind in (("k", k), ("v", v)):
            require(kind == narrow, "{} is {}, but {} KV heads of {} make {}", name, kind, kv_heads, head_dim, narrow)
        require(
            self.window_tokens == self.cache.window_tokens,
            "the op's window is {} but its KV is {}",
            self.window_tokens,
            self.cache,
        )
        same = self.cache.is_fp8 or self.cache.dtype == q.element_type
        require(same, "q, k and v are {} but their KV is {}", q.element_type, self.cache)
        if self.sinks is not None:
            sinks = weight_type(self.sinks, "the sinks", 1)
            wanted = tensor((heads,), q.element_type)
            require(sinks == wanted, "the sinks are {} where {} is due", sinks, wanted)
        require_positive(self.scale.value.data, "scale")
        if self.softcap is not None:
            require_positive(self.softcap.value.data, "softcap (leave it out for none)")
        return (q,)

    def oracle(self, *operands: Any) -> tuple[Float64, ...]:
        q, k, v, cache, batch, *sinks = operands
        assert isinstance(cache, OracleKV)
        sink = np.full(self.heads.value.data, -np.inf) if not sinks else sinks[0]
        if self.cache.is_fp8:
            k, v = (saturate(x, self.cache.dtype) for x in (k, v))
        table = batch.page_tables[kv_class(self.window_tokens)]
        shape = (-1, self.kv_heads, self.head_dim)
        k, v = k.reshape(shape), v.reshape(shape)
        out = np.zeros((len(q), self.heads.value.data, self.head_dim))
        for s in range(len(batch.kv_lens)):
            rows = slice(batch.query_starts[s], batch.query_starts[s + 1])
            self._append(cache, table[s], batch.positions[rows], k[rows], v[rows])
            out[rows] = self._attend(cache, table[s], batch, rows, q[rows], sink.reshape(self.kv_heads, -1, 1))
        return (out.reshape(len(q), -1),)

    @staticmethod
    def _append(cache: OracleKV, table: Any, positions: Any, k: Float64, v: Float64) -> None:
        pages, slots = table[positions // cache.page_tokens], positions % cache.page_tokens
        assert (pages >= 0).all(), "a token has no page"
        cache.k[pages, slots], cache.v[pages, slots] = k, v

    def _attend(
        self, cache: OracleKV, table: Any, batch: BatchFacts, rows: slice, q: Float64, sink: Float64
    ) -> Float64:
        queries = q.reshape(len(q), self.kv_heads, -1, self.head_dim)  # (query, kv_head, group, head_dim)
        out = np.empty_like(queries)
        for i, position in enumerate(batch.positions[rows]):
            window = self.window_tokens
            oldest = 0 if window is None else max(0, position - window + 1)
            keys = np.arange(oldest, position + 1)
            pages, slots = table[keys // cache.page_tokens], keys % cache.page_tokens
            assert (pages >= 0).all(), "a visible key has no page"
            k, v = cache.k[pages, slots], cache.v[pages, slots]
            scores = np.einsum("hgd,khd->hgk", queries[i], k) * self.scale.value.data
            if self.softcap is not None:
                cap = self.softcap.value.data
                scores = cap * np.tanh(scores / cap)
            top = np.maximum(scores.max(axis=-1, keepdims=True), sink)
            weights = np.exp(scores - top)
            weights /= weights.sum(axis=-1, keepdims=True) + np.exp(sink - top)
            out[i] = np.einsum("hgk,khd->hgd", weights, v)
        return out.reshape(len(q), -1, self.head_dim)

    def cost(self, step: Step) -> Cost:
        heads, window = self.heads.value.data, self.window_tokens
        size = dtype_bytes(tensor_type(self.q, "q", 2).element_type)
        kv_row = 2 * self.kv_heads * self.head_dim
        pairs = sum(visible_pairs(q, kv, window) for q, kv in zip(step.query_lens, step.kv_lens, strict=True))
        read = sum(
            kv if window is None else min(kv, window + q - 1)
            for q, kv in zip(step.query_lens, step.kv_lens, strict=True)
        )
        tokens = step.tokens
        # A score costs 2 head_dim flops and its share of the output another 2; scale, maximum, difference, exponential
        # and sum are 5 more, a soft-cap's division, tanh and product 3. A sink is a score that needs no scale.
        per_pair = 4.0 * self.head_dim + 5.0 + (3.0 if self.softcap is not None else 0.0)
        return Cost(
            flops=heads * pairs * per_pair + (4.0 * heads * tokens if self.sinks is not None else 0.0),
            weight_bytes=0.0 if self.sinks is None else float(tensor_bytes(tensor_type(self.sinks, "the sinks", 1))),
            activation_bytes=(2.0 * heads * self.head_dim + kv_row) * tokens * size,
            kv_bytes=float((read + tokens) * kv_row * dtype_bytes(self.cache.dtype)),
        )
