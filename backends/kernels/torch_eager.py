"""The emitters of torch: each op becomes a closure that is bound to weights and KV when a slice is loaded.

`LOWERING.emit(op)` checks the op and needs neither a device nor weights; what it returns is bound by `bind` on loading
to a kernel: `kernel(step, *activations) -> tensor, or a tuple of them`. Weights, KV and batch are no activations.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor
from xdsl.ir import SSAValue

from plait.backends.kernels.attention import Attention, Cache
from plait.backends.kernels.lowering import (
    ROPE_TABLE,
    Lowering,
    attribute_dtype,
    operand_dtype,
    refuse,
    rope_of,
    weight_kind,
    weight_name,
)
from plait.backends.kernels.matmul import product
from plait.backends.kernels.step import Step
from plait.ir.ops import (
    AddOp,
    AddRmsNormOp,
    AttentionOp,
    EmbedOp,
    GeluMulOp,
    LinearOp,
    LinearsOp,
    LogitsOp,
    RmsNormOp,
    RopeOp,
    SiluMulOp,
    WeightOp,
)

Kernel = Callable[..., Any]


class Slice(Protocol):
    """What kernels are bound to."""

    def weight(self, name: str, dtype: str) -> Tensor:
        """A tensor of the checkpoint."""

    def stacked(self, names: Sequence[str], dtype: str) -> Tensor:
        """Tensors of the checkpoint as one, stacked along their first dimension."""

    def is_shared(self, name: str) -> bool:
        """Whether several ops of the slice use the tensor."""

    def cache(self, value: SSAValue) -> Cache:
        """The pages behind a KV argument."""


Bind = Callable[[Slice], Kernel]

LOWERING: Lowering[Bind] = Lowering("torch")


@LOWERING.emits(WeightOp, "symbol")
def _weight(op: WeightOp) -> Bind:
    """Its users read it by name, in the dtype they compute in."""
    weight_kind(op)
    return lambda where: lambda step: ()


@LOWERING.emits(EmbedOp)
def _embed(op: EmbedOp) -> Bind:
    name, dtype = weight_name(op, op.table), operand_dtype(op, op.result)

    def bind(where: Slice) -> Kernel:
        table = where.weight(name, dtype)
        return lambda step: table.index_select(0, step.tokens)

    return bind


def _norm(weight: Tensor, eps: float) -> Callable[[Tensor], Tensor]:
    """x / sqrt(mean(x^2) + eps) * weight in float32, rounded once."""
    scale, floor, part = weight.float(), torch.tensor(eps), 1 / len(weight)

    def run(x: Tensor) -> Tensor:
        wide = x.float()
        length = torch.linalg.vector_norm(wide, 2, -1, True)  # the fewest passes over x
        mean = torch.addcmul(floor, length, length, value=part)
        return torch.mul(wide, mean.rsqrt_()).mul_(scale).to(x.dtype)

    return run


@LOWERING.emits(RmsNormOp, "eps")
def _rms_norm(op: RmsNormOp) -> Bind:
    name, eps = weight_name(op, op.weight), op.eps.value.data
    dtype = operand_dtype(op, op.x)

    def bind(where: Slice) -> Kernel:
        norm = _norm(where.weight(name, dtype), eps)
        return lambda step, x: norm(x)

    return bind


@LOWERING.emits(AddRmsNormOp, "eps")
def _add_rms_norm(op: AddRmsNormOp) -> Bind:
    name, eps = weight_name(op, op.weight), op.eps.value.data
    dtype = operand_dtype(op, op.x)

    def bind(where: Slice) -> Kernel:
        norm = _norm(where.weight(name, dtype), eps)

        def run(step: Step, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
            total = x + y
            return total, norm(total)

        return run

    return bind


@LOWERING.emits(LinearOp)
def _linear(op: LinearOp) -> Bind:
    name, dtype = weight_name(op, op.weight), operand_dtype(op, op.x)
    bias = None if op.bias is None else weight_name(op, op.bias)

    def bind(where: Slice) -> Kernel:
        offset = None if bias is None else where.weight(bias, dtype)
        run = product(where.weight(name, dtype), offset, shared=where.is_shared(name))
        return lambda step, x: run(x)

    return bind


@LOWERING.emits(LinearsOp)
def _linears(op: LinearsOp) -> Bind:
    names, dtype = [weight_name(op, weight) for weight in op.weights], operand_dtype(op, op.x)
    biases = [weight_name(op, bias) for bias in op.biases]
    widths = [kind.get_shape()[1] for kind in op.products.types]

    def bind(where: Slice) -> Kernel:
        run = product(where.stacked(names, dtype), where.stacked(biases, dtype) if biases else None)
        return lambda step, x: torch.split(run(x), widths, 1)

    return bind


@LOWERING.emits(RopeOp, "head_dim", *ROPE_TABLE)
def _rope(op: RopeOp) -> Bind:
    operand_dtype(op, op.x)
    rope, head_dim = rope_of(op), op.head_dim.value.data

    def run(step: Step, x: Tensor) -> Tensor:
        cos, sin = step.rope(rope, head_dim)
        heads = x.reshape(len(x), -1, head_dim).float()
        # Rolled by half a head, b stands where a was and a where b was.
        return torch.addcmul(heads * cos, heads.roll(head_dim // 2, -1), sin).to(x.dtype).view(x.shape)

    return lambda where: run


@LOWERING.emits(AttentionOp, "heads", "scale", "window", "softcap", "sinks")
def _attention(op: AttentionOp) -> Bind:
    dtype = operand_dtype(op, op.q)
    if not op.cache.is_fp8 and attribute_dtype(op, op.cache.dtype) != dtype:
        raise refuse(op, "KV dtype", op.cache.dtype, f"q is {dtype}; KV is stored in the same dtype or in FP8")
    attend = Attention(
        heads=op.heads.value.data,
        kv_heads=op.kv_heads,
        head_dim=op.head_dim,
        scale=op.scale.value.data,
        window=op.window_tokens,
        softcap=None if op.softcap is None else op.softcap.value.data,
    )
    kv = op.kv
    sinks = None if op.sinks is None else weight_name(op, op.sinks)

    def bind(where: Slice) -> Kernel:
        cache, sink = where.cache(kv), None if sinks is None else where.weight(sinks, dtype)
        return lambda step, q, k, v: attend(step, cache, q, k, v, sink)

    return bind


@LOWERING.emits(SiluMulOp)
def _silu_mul(op: SiluMulOp) -> Bind:
    operand_dtype(op, op.x)

    def run(step: Step, gate: Tensor, up: Tensor) -> Tensor:
        return torch.nn.functional.silu(gate.float()).mul_(up).to(gate.dtype)

    return lambda where: run


@LOWERING.emits(GeluMulOp, "approximate")
def _gelu_mul(op: GeluMulOp) -> Bind:
    operand_dtype(op, op.x)
    approximate = op.approximate.data

    def run(step: Step, gate: Tensor, up: Tensor) -> Tensor:
        return torch.nn.functional.gelu(gate.float(), approximate=approximate).mul_(up).to(gate.dtype)

    return lambda where: run


@LOWERING.emits(AddOp)
def _add(op: AddOp) -> Bind:
    operand_dtype(op, op.x)
    return lambda where: lambda step, x, y: x + y


@LOWERING.emits(LogitsOp)
def _logits(op: LogitsOp) -> Bind:
    name, dtype = weight_name(op, op.weight), operand_dtype(op, op.x)

    def bind(where: Slice) -> Kernel:
        # Logits are float32 whatever the dtype of the model; in 16 bits the best two tokens would often tie.
        # A 16-bit weight, rounded to the model's dtype, is held in float32: twice what the plan counts.
        weight = where.weight(name, dtype).float()
        run = product(weight, None, shared=dtype == "float32" and where.is_shared(name))
        return lambda step, x: run((x if step.logit_rows is None else x.index_select(0, step.logit_rows)).float())

    return bind
