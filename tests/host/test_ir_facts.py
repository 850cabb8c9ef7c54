"""Costs of whole models whose figures are known from elsewhere."""

from __future__ import annotations

import math

import pytest
from xdsl.dialects.builtin import ModuleOp

from plait.ir import Cost, Rope, Step, ops, weights
from plait.ir.ops import LinearOp, LogitsOp
from tests.ir_models import Shape, build

LLAMA_8B = Shape(
    blocks=32, hidden=4096, heads=32, kv_heads=8, head_dim=128, ffn=14336, vocabulary=128256, tied=False,
    ropes=(Rope(500000.0, "llama3", 8.0, 1.0, 4.0, 8192),), dtype="bfloat16",
)  # fmt: skip
SMOLLM2 = Shape(blocks=30, hidden=576, heads=9, kv_heads=3, head_dim=64, ffn=1536, vocabulary=49152, dtype="bfloat16")


def parameters(module: ModuleOp) -> int:
    return sum(math.prod(op.result.type.get_shape()) for op in weights(module).values())


def total(module: ModuleOp, step: Step) -> Cost:
    return sum((op.cost(step) for op in ops(module)), Cost())


def test_llama_8b() -> None:
    """8,030,261,248 parameters (the model card's 8.03 B); every one but the embedding's rows is used once per token."""
    module = build(LLAMA_8B)
    count = parameters(module)
    assert count == 8_030_261_248
    embedding = LLAMA_8B.vocabulary * LLAMA_8B.hidden
    norms = LLAMA_8B.hidden * (2 * LLAMA_8B.blocks + 1)
    one = total(module, Step.decode(1, 1))
    assert one.flops == pytest.approx(2 * (count - embedding), rel=1e-3)
    assert one.flops / (2 * count) == pytest.approx(1, abs=0.07)
    matrices = sum(op.cost(Step.decode(1, 1)).flops for op in ops(module) if isinstance(op, LinearOp | LogitsOp))
    assert matrices == 2 * (count - embedding - norms)
    # All weights are read in a decode step but for the table, of which one row is.
    assert one.weight_bytes == 2 * (count - embedding + LLAMA_8B.hidden)
    # 128 KiB of KV per token: 32 layers, K and V, 8 heads of 128, bf16. All read, the new token's written.
    at_8k = total(module, Step.decode(1, 8192))
    assert at_8k.kv_bytes == (8192 + 1) * 128 * 1024


def test_smollm2_decode() -> None:
    """Independent figures of the same model: 106.2 M parameters in linears, 28.3 M in the head, 0.282 GFLOP per token
    of decode (mean over 128 tokens after a prompt of 128) and 0.217 per token of a prefill of 128."""
    module = build(SMOLLM2)
    linear = sum(math.prod(op.weight.type.get_shape()) for op in ops(module) if isinstance(op, LinearOp))
    assert linear == pytest.approx(106.2e6, rel=1e-3)
    assert parameters(module) - linear == pytest.approx(28.3e6, rel=2e-3)
    decode = sum(total(module, Step.decode(1, 128 + n)).flops for n in range(1, 129)) / 128
    assert decode == pytest.approx(0.282e9, rel=5e-3)
    # The bare matrices are 0.269; attention over 192 tokens on average is the rest.
    assert total(module, Step.decode(1, 1)).flops == pytest.approx(2 * (linear + 28.3e6), rel=3e-3)
    prefill = total(module, Step.prefill(128))
    head = 2 * SMOLLM2.vocabulary * SMOLLM2.hidden
    assert (prefill.flops - head) / 128 == pytest.approx(0.217e9, rel=5e-3)
    # bf16 bytes of one decode step.
    assert total(module, Step.decode(1, 192)).weight_bytes == pytest.approx(269e6, rel=3e-3)


def test_eight_requests_read_the_weights_once() -> None:
    module = build(SMOLLM2)
    one, eight = total(module, Step.decode(1, 192)), total(module, Step.decode(8, 192))
    rows = 2 * SMOLLM2.hidden  # of the embedding
    assert eight.weight_bytes == one.weight_bytes + 7 * rows
    assert eight.flops == 8 * one.flops
    assert eight.kv_bytes == 8 * one.kv_bytes


def test_a_window_bounds_what_decode_reads() -> None:
    full, narrow = build(Shape(windows=(None,))), build(Shape(windows=(8,)))
    assert total(full, Step.decode(1, 8)) == total(narrow, Step.decode(1, 8))
    assert total(narrow, Step.decode(1, 8)) == total(narrow, Step.decode(1, 4096))
    assert total(full, Step.decode(1, 4096)).kv_bytes > 100 * total(narrow, Step.decode(1, 4096)).kv_bytes
