"""`plait.head_linear` and `plait.latent_attention`: multi-head latent attention (DeepSeek-V2, 2024), whose cache holds
one compressed row for all heads."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

import numpy as np
from xdsl.dialects.builtin import TensorType, UnitAttr
from xdsl.ir import Attribute, SSAValue
from xdsl.irdl import irdl_op_definition, operand_def, opt_prop_def, prop_def, result_def

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
    stack_type,
    tensor_type,
)
from plait.ir.types import BatchType, KVType, dtype_bytes, tensor_bytes, tokens_by
from plait.spec import kv_class


@irdl_op_definition
class HeadLinearOp(PlaitOp):
    """A matrix of its own for each head: head h of y (heads * out) is weight[h] times head h of x (heads * in).

    weight is (heads, out, in); `transposed` says that it is (heads, in, out), as the keys' half of DeepSeek's kv_b_proj
    stands when queries are taken into the latent space.
    """

    name = "plait.head_linear"
    FORMULA: ClassVar[str] = "y_h = x_h weight_h^T"

    x = operand_def(TensorType)
    weight = operand_def(TensorType)
    transposed = opt_prop_def(UnitAttr)
    result = result_def(TensorType)

    assembly_format = FORMAT

    def __init__(self, x: SSAValue, weight: SSAValue, block: int | None = None, *, transposed: bool = False) -> None:
        heads, rows, columns = tensor_type(weight, "the weight", 3).get_shape()
        kind = tensor_type(x, "x", 2)
        super().__init__(
            operands=[x, weight],
            result_types=[tokens_by(heads * (columns if transposed else rows), kind.element_type)],
            properties={**properties(block=block), **({"transposed": UnitAttr()} if transposed else {})},
        )

    @property
    def sizes(self) -> tuple[int, int, int]:
        """heads, out, in."""
        heads, rows, columns = tensor_type(self.weight, "the weight", 3).get_shape()
        return (heads, columns, rows) if self.transposed is not None else (heads, rows, columns)

    def infer(self) -> Sequence[Attribute]:
        kind = activation_type(self.x, "x")
        stack = stack_type(self.weight, "the weight", kind.element_type)
        heads, out, inner = self.sizes
        require(kind.get_shape()[1] == heads * inner, "x is {} but the weight is {}", kind, stack)
        return (tokens_by(heads * out, kind.element_type),)

    def oracle(self, *operands: Any) -> tuple[Float64, ...]:
        x, weight = operands
        matrix = weight if self.transposed is not None else weight.swapaxes(1, 2)
        return (np.einsum("thi,hio->tho", x.reshape(len(x), len(matrix), -1), matrix).reshape(len(x), -1),)

    def cost(self, step: Step) -> Cost:
        (heads, out, inner), kind = self.sizes, tensor_type(self.x, "x", 2)
        return Cost(
            2.0 * step.tokens * heads * out * inner,
            float(tensor_bytes(tensor_type(self.weight, "the weight", 3))),
            float(step.tokens * heads * (out + inner) * dtype_bytes(kind.element_type)),
        )


@irdl_op_definition
class LatentAttentionOp(PlaitOp):
    """Append this step's latent rows and their rotary part to the pages of `kv`, then attend causally.

    The key of a token is [latent, k_rope], the same for all heads, and its value is the latent alone, so that one row
    is kept: `kv` has one KV head of latent + rope features and `values` of the latent's. A query head is
    [q_latent_h, q_rope_h]. Scores, mask and softmax are those of `plait.attention`.

    q_latent is (tokens, heads * latent), q_rope (tokens, heads * rope), latent (tokens, latent), k_rope (tokens, rope);
    the result is (tokens, heads * latent).
    """

    name = "plait.latent_attention"
    FORMULA: ClassVar[str] = "softmax(mask(scale (q_latent latent^T + q_rope k_rope^T))) latent"

    q_latent = operand_def(TensorType)
    q_rope = operand_def(TensorType)
    latent = operand_def(TensorType)
    k_rope = operand_def(TensorType)
    kv = operand_def(KVType)
    batch = operand_def(BatchType)
    heads = prop_def(I64Attr)
    scale = prop_def(F64Attr)
    result = result_def(TensorType)

    assembly_format = FORMAT

    def __init__(
        self,
        q_latent: SSAValue,
        q_rope: SSAValue,
        latent: SSAValue,
        k_rope: SSAValue,
        kv: SSAValue,
        batch: SSAValue,
        *,
        heads: int,
        scale: float,
        block: int | None = None,
    ) -> None:
        super().__init__(
            operands=[q_latent, q_rope, latent, k_rope, kv, batch],
            result_types=[q_latent.type],
            properties=properties(heads=heads, scale=float(scale), block=block),
        )

    @property
    def cache(self) -> KVType:
        kind = self.kv.type
        assert isinstance(kind, KVType)
        return kind

    @property
    def window_tokens(self) -> None:
        """Every key is visible."""
        return None

    @property
    def widths(self) -> tuple[int, int]:
        """Features of the latent and of the rotary part."""
        values = self.cache.value_features
        return values, self.cache.head_dim.data - values

    def infer(self) -> Sequence[Attribute]:
        kind, heads = activation_type(self.q_latent, "q_latent"), self.heads.value.data
        require(heads > 0, "heads must be positive, not {}", heads)
        require(self.cache.is_latent and self.cache.kv_heads.data == 1, "{} keeps no latent rows", self.cache)
        require(self.cache.window_tokens is None, "{} has a window where every key is visible", self.cache)
        latent, rope = self.widths
        require(rope > 0, "{} has no rotary part", self.cache)
        widths = {"q_latent": heads * latent, "q_rope": heads * rope, "latent": latent, "k_rope": rope}
        for name, width in widths.items():
            found, wanted = activation_type(getattr(self, name), name), tokens_by(width, kind.element_type)
            require(found == wanted, "{} is {} where {} is due", name, found, wanted)
        same = self.cache.is_fp8 or self.cache.dtype == kind.element_type
        require(same, "q and k are {} but their KV is {}", kind.element_type, self.cache)
        require_positive(self.scale.value.data, "scale")
        return (kind,)

    def oracle(self, *operands: Any) -> tuple[Float64, ...]:
        q_latent, q_rope, latent, k_rope, cache, batch = operands
        assert isinstance(cache, OracleKV)
        heads, table = self.heads.value.data, batch.page_tables[kv_class(None)]
        key = np.concatenate((latent, k_rope), axis=1)
        if self.cache.is_fp8:
            key = saturate(key, self.cache.dtype)
        parts = [q.reshape(len(q), heads, -1) for q in (q_latent, q_rope)]
        queries = np.concatenate(parts, axis=2)
        out = np.zeros((len(key), heads, self.widths[0]))
        for s in range(len(batch.kv_lens)):
            rows = slice(batch.query_starts[s], batch.query_starts[s + 1])
            pages, slots = self._places(cache, table[s], batch.positions[rows])
            cache.k[pages, slots, 0] = key[rows]
            out[rows] = self._attend(cache, table[s], batch, rows, queries[rows])
        return (out.reshape(len(key), -1),)

    @staticmethod
    def _places(cache: OracleKV, table: Any, positions: Any) -> tuple[Any, Any]:
        pages = table[positions // cache.page_tokens]
        assert (pages >= 0).all(), "a token has no page"
        return pages, positions % cache.page_tokens

    def _attend(self, cache: OracleKV, table: Any, batch: BatchFacts, rows: slice, queries: Float64) -> Float64:
        out = []
        for query, position in zip(queries, batch.positions[rows], strict=True):
            pages, slots = self._places(cache, table, np.arange(position + 1))
            keys = cache.k[pages, slots, 0]
            scores = query @ keys.T * self.scale.value.data
            weights = np.exp(scores - scores.max(axis=1, keepdims=True))
            out.append(weights / weights.sum(axis=1, keepdims=True) @ keys[:, : self.widths[0]])
        return np.asarray(out)

    def cost(self, step: Step) -> Cost:
        heads, (latent, rope) = self.heads.value.data, self.widths
        size, row = dtype_bytes(tensor_type(self.q_latent, "q", 2).element_type), latent + rope
        pairs = sum(visible_pairs(q, kv, None) for q, kv in zip(step.query_lens, step.kv_lens, strict=True))
        tokens = step.tokens
        return Cost(
            flops=heads * pairs * (2.0 * row + 2.0 * latent + 5.0),
            activation_bytes=float((heads * (row + latent) + row) * tokens * size),
            kv_bytes=float((sum(step.kv_lens) + tokens) * self.cache.token_bytes),
        )
