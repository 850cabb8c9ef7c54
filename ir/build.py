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

    def weight(self, name: str, shape: Sequence[int]) -> SSAValue:
        """The tensor `name` of the checkpoint, in the compute dtype."""
        kind = tensor(shape, self.element)
        known = self._weights.get(name)
        if known is None:
            known = self._weights[name] = self._add(ops.WeightOp(name, kind, self.block))
        assert known.type == kind, f"{name} is {known.type}, asked for as {kind}"
        return known

    def embed(self, table: str, vocabulary: int, hidden: int) -> SSAValue:
        """Rows of the table for the batch's tokens: (tokens, hidden)."""
        return self._add(ops.EmbedOp(self.weight(table, (vocabulary, hidden)), self._batch, self.element, self.block))

    def rms_norm(self, x: SSAValue, weight: str, eps: float) -> SSAValue:
        """x (tokens, hidden), scaled by the weight (hidden)."""
        return self._add(ops.RmsNormOp(x, self.weight(weight, _width(x)), eps, self.block))

    def linear(self, x: SSAValue, weight: str, out: int, bias: str | None = None) -> SSAValue:
        """x (tokens, in) to (tokens, out); weight (out, in), bias (out)."""
        matrix = self.weight(weight, (out, *_width(x)))
        offset = None if bias is None else self.weight(bias, (out,))
        return self._add(ops.LinearOp(x, matrix, offset, self.block))

    def rope(self, x: SSAValue, head_dim: int, rope: Rope) -> SSAValue:
        """Rotate the heads of x (tokens, heads * head_dim) to the batch's positions."""
        return self._add(ops.RopeOp(x, self._batch, head_dim, rope, self.block))

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
        assert self.block is not None, "attention stands in a block"
        stored = self.element if kv_dtype is None else (DTYPES | FP8)[kv_dtype]
        kind = KVType.get(kv_heads, head_dim, stored, window)
        cache = self._block.insert_arg(kind, len(self._block.args))
        self._arg_names.append(f"kv.{self.block}")
        return self._add(
            ops.AttentionOp(
                q,
                k,
                v,
                cache,
                self._batch,
                None if sinks is None else self.weight(sinks, (heads,)),
                heads=heads,
                scale=scale,
                window=window,
                softcap=softcap,
                block=self.block,
            )
        )

    def silu_mul(self, gate: SSAValue, up: SSAValue) -> SSAValue:
        return self._add(ops.SiluMulOp(gate, up, self.block))

    def gelu_mul(self, gate: SSAValue, up: SSAValue, approximate: str = "none") -> SSAValue:
        return self._add(ops.GeluMulOp(gate, up, approximate, self.block))

    def add(self, x: SSAValue, y: SSAValue) -> SSAValue:
        return self._add(ops.AddOp(x, y, self.block))

    def logits(self, x: SSAValue, weight: str, vocabulary: int) -> SSAValue:
        """float32 (rows asked for, vocabulary)."""
        return self._add(ops.LogitsOp(x, self.weight(weight, (vocabulary, *_width(x))), self._batch, self.block))

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
