"""Building modules op by op. Families (`plait.frontend.families`) use this and nothing below it."""

from __future__ import annotations

from collections.abc import Sequence

from xdsl.dialects.builtin import ModuleOp, StringAttr
from xdsl.dialects.func import FuncOp, ReturnOp
from xdsl.ir import Block, Region, SSAValue

from plait.ir import ops
from plait.ir.dialect import verify
from plait.ir.module import MODEL, name_list
from plait.ir.ops.base import tensor_type
from plait.ir.ops.opaque import HISTORY
from plait.ir.rope import Rope
from plait.ir.types import DTYPES, FP8, BatchType, KVType, element, tensor


class Builder:
    """Appends ops to the function of a new module.

    Every weight is one `plait.weight` op however often it is used, so a tied embedding is one reference. `block` is the
    layer that ops are added to from now on: None before the first and after the last.

        b = Builder("llama", dtype="float32")
        x = b.embed("model.embed_tokens.weight", vocabulary, hidden)
        b.block = 0
        ...
        module = b.finish({"logits": b.logits(x, "lm_head.weight", vocabulary)})
    """

    def __init__(self, model: str, dtype: str) -> None:
        self.element = element(dtype)
        self.block: int | None = None
        self._model = model
        self._block = Block(arg_types=[BatchType()])
        self._arg_names = ["batch"]
        self._weights: dict[str, SSAValue] = {}
        self._batch = self._block.args[0]

    def weight(self, name: str, shape: Sequence[int], dtype: str | None = None) -> SSAValue:
        """The tensor `name` of the checkpoint, in `dtype`; the compute dtype where not given."""
        kind = tensor(shape, self.element if dtype is None else element(dtype))
        known = self._weights.get(name)
        if known is None:
            known = self._weights[name] = self._add(ops.WeightOp(name, kind, self.block))
        assert known.type == kind, f"{name} is {known.type}, asked for as {kind}"
        return known

    def embed(self, table: str, vocabulary: int, hidden: int) -> SSAValue:
        """Rows of the table for the batch's tokens: (tokens, hidden)."""
        return self._add(ops.EmbedOp(self.weight(table, (vocabulary, hidden)), self._batch, self.element, self.block))

    def embed_positions(self, table: str, positions: int, hidden: int) -> SSAValue:
        """Rows of the table (positions, hidden) for the batch's positions: (tokens, hidden)."""
        return self._add(ops.EmbedPositionsOp(self.weight(table, (positions, hidden)), self._batch, self.block))

    def rms_norm(
        self,
        x: SSAValue,
        weight: str,
        eps: float,
        *,
        group: int | None = None,
        per_group: bool = False,
        offset: float | None = None,
    ) -> SSAValue:
        """x (tokens, hidden), scaled by the weight (hidden); with a `group`, by (group), or with `per_group` by a scale
        for each feature of each group, (hidden)."""
        scale = self._norm_weight(x, weight, group, per_group)
        return self._add(ops.RmsNormOp(x, scale, eps, self.block, group=group, offset=offset))

    def layer_norm(
        self,
        x: SSAValue,
        weight: str,
        bias: str | None,
        eps: float,
        *,
        group: int | None = None,
        per_group: bool = False,
    ) -> SSAValue:
        """As `rms_norm`; the bias has the shape of the weight."""
        parts = [None if name is None else self._norm_weight(x, name, group, per_group) for name in (weight, bias)]
        assert parts[0] is not None
        return self._add(ops.LayerNormOp(x, parts[0], parts[1], eps, self.block, group=group))

    def _norm_weight(self, x: SSAValue, name: str, group: int | None, per_group: bool) -> SSAValue:
        return self.weight(name, _width(x) if group is None or per_group else (group,))

    def linear(self, x: SSAValue, weight: str, out: int, bias: str | None = None) -> SSAValue:
        """x (tokens, in) to (tokens, out); weight (out, in), bias (out)."""
        matrix = self.weight(weight, (out, *_width(x)))
        offset = None if bias is None else self.weight(bias, (out,))
        return self._add(ops.LinearOp(x, matrix, offset, self.block))

    def head_linear(
        self, x: SSAValue, weight: str, shape: tuple[int, int, int], *, transposed: bool = False
    ) -> SSAValue:
        """Each head of x by its own matrix of the weight, whose `shape` is (heads, out, in), or transposed."""
        return self._add(ops.HeadLinearOp(x, self.weight(weight, shape), self.block, transposed=transposed))

    def rope(self, x: SSAValue, head_dim: int, rope: Rope, rotary_dim: int | None = None) -> SSAValue:
        """Rotate the heads of x (tokens, heads * head_dim) to the batch's positions; of each head the first
        `rotary_dim` features, where it is not the whole."""
        part = None if rotary_dim == head_dim else rotary_dim
        return self._add(ops.RopeOp(x, self._batch, head_dim, rope, self.block, part))

    def attention(
        self,
        q: SSAValue,
        k: SSAValue,
        v: SSAValue,
        *,
        heads: int,
        kv_heads: int,
        head_dim: int,
        scale: float,
        window: int | None = None,
        softcap: float | None = None,
        sinks: str | None = None,
        kv_dtype: str | None = None,
    ) -> SSAValue:
        """Attention with a KV value of its own, an argument of the function named `kv.BLOCK`.

        Args:
            sinks: the tensor of one sink per head.
            kv_dtype: what K and V are stored in (a compute dtype or FP8); the module's dtype where not given.
        """
        stored = self.element if kv_dtype is None else (DTYPES | FP8)[kv_dtype]
        return self._add(
            ops.AttentionOp(
                q,
                k,
                v,
                self._cache(KVType.get(kv_heads, head_dim, stored, window)),
                self._batch,
                None if sinks is None else self.weight(sinks, (heads,)),
                heads=heads,
                scale=scale,
                window=window,
                softcap=softcap,
                block=self.block,
            )
        )

    def latent_attention(
        self, q_latent: SSAValue, q_rope: SSAValue, latent: SSAValue, k_rope: SSAValue, *, heads: int, scale: float
    ) -> SSAValue:
        """Latent attention with a KV value of its own; see `LatentAttentionOp`."""
        (values,), (rope,) = _width(latent), _width(k_rope)
        cache = self._cache(KVType.get(1, values + rope, self.element, values=values))
        return self._add(
            ops.LatentAttentionOp(
                q_latent, q_rope, latent, k_rope, cache, self._batch, heads=heads, scale=scale, block=self.block
            )
        )

    def _cache(self, kind: KVType) -> SSAValue:
        """An argument of the function named `kv.BLOCK`."""
        assert self.block is not None, "attention stands in a block"
        self._arg_names.append(f"kv.{self.block}")
        return self._block.insert_arg(kind, len(self._block.args))

    def silu_mul(self, gate: SSAValue, up: SSAValue) -> SSAValue:
        return self._add(ops.SiluMulOp(gate, up, self.block))

    def gelu_mul(self, gate: SSAValue, up: SSAValue, approximate: str = "none") -> SSAValue:
        return self._add(ops.GeluMulOp(gate, up, approximate, self.block))

    def gelu(self, x: SSAValue, approximate: str = "none") -> SSAValue:
        return self._add(ops.GeluOp(x, approximate, self.block))

    def scale(self, x: SSAValue, factor: float) -> SSAValue:
        """x times one number."""
        return self._add(ops.ScaleOp(x, factor, self.block))

    def router(
        self,
        x: SSAValue,
        weight: str,
        experts: int,
        *,
        bias: str | None = None,
        selection_bias: str | None = None,
        experts_per_token: int,
        scoring: str = "softmax",
        normalise: float | None = None,
        scale: float | None = None,
        groups: int | None = None,
        groups_per_token: int | None = None,
        group_score: str | None = None,
    ) -> SSAValue:
        """float32 (tokens, experts); see `RouterOp`. The weight is (experts, hidden), the biases (experts)."""
        plain = None if bias is None else self.weight(bias, (experts,))
        selecting = None if selection_bias is None else self.weight(selection_bias, (experts,), "float32")
        return self._add(
            ops.RouterOp(
                x,
                self.weight(weight, (experts, *_width(x))),
                plain,
                selecting,
                experts_per_token=experts_per_token,
                scoring=scoring,
                normalise=normalise,
                scale=scale,
                groups=groups,
                groups_per_token=groups_per_token,
                group_score=group_score,
                block=self.block,
            )
        )

    def experts(
        self,
        x: SSAValue,
        routing: SSAValue,
        weights: tuple[str, str, str],
        inner: int,
        *,
        biases: tuple[str, str, str] | None = None,
        experts_per_token: int,
        activation: str = "silu",
        alpha: float | None = None,
        limit: float | None = None,
    ) -> SSAValue:
        """The chosen experts' MLPs; see `ExpertsOp`. Names of the stacks of gate, up and down, and of their biases."""
        (hidden,), (count,) = _width(x), _width(routing)
        shapes = ((count, inner, hidden), (count, inner, hidden), (count, hidden, inner))
        gate, up, down = (self.weight(name, shape) for name, shape in zip(weights, shapes, strict=True))
        offsets = [self.weight(name, shape[:2]) for name, shape in zip(biases or (), shapes, strict=False)]
        return self._add(
            ops.ExpertsOp(
                x,
                routing,
                (gate, up, down),
                tuple(offsets),  # type: ignore[arg-type]  # three or none
                experts_per_token=experts_per_token,
                activation=activation,
                alpha=alpha,
                limit=limit,
                block=self.block,
            )
        )

    def add(self, x: SSAValue, y: SSAValue) -> SSAValue:
        return self._add(ops.AddOp(x, y, self.block))

    def logits(
        self, x: SSAValue, weight: str, vocabulary: int, *, scale: float | None = None, softcap: float | None = None
    ) -> SSAValue:
        """float32 (rows asked for, vocabulary)."""
        table = self.weight(weight, (vocabulary, *_width(x)))
        return self._add(ops.LogitsOp(x, table, self._batch, self.block, scale=scale, softcap=softcap))

    def opaque(
        self,
        weights: dict[str, tuple[Sequence[int], str]],
        *,
        programs: Sequence[str],
        lengths: Sequence[int],
        flops: Sequence[int],
        vocabulary: int,
    ) -> SSAValue:
        """Logits by StableHLO programs, see `OpaqueOp`; weights are name -> shape and dtype, in the programs' order."""
        assert self.block is not None, "what keeps KV stands in a block"
        values = []
        for name, (shape, dtype) in weights.items():
            kind = tensor(shape, element(dtype))
            values.append(self._add(ops.WeightOp(name, kind, self.block)))
        history = self._block.insert_arg(HISTORY, len(self._block.args))
        self._arg_names.append(f"kv.{self.block}")
        return self._add(
            ops.OpaqueOp(
                self._batch,
                history,
                values,
                programs=programs,
                lengths=lengths,
                flops=flops,
                vocabulary=vocabulary,
                block=self.block,
            )
        )

    def finish(self, outputs: dict[str, SSAValue]) -> ModuleOp:
        """The verified module. The builder is spent."""
        self._block.add_op(ReturnOp(*outputs.values()))
        function = FuncOp(
            "main",
            ([arg.type for arg in self._block.args], [value.type for value in outputs.values()]),
            Region(self._block),
            arg_attrs=name_list(self._arg_names),
            res_attrs=name_list(list(outputs)),
        )
        module = ModuleOp([function], attributes={MODEL: StringAttr(self._model)})
        verify(module)
        return module

    def _add(self, op: ops.PlaitOp) -> SSAValue:
        self._block.add_op(op)
        return op.results[0]


def _width(x: SSAValue) -> tuple[int]:
    """The width of (tokens, width)."""
    return (tensor_type(x, "x", 2).get_shape()[1],)
