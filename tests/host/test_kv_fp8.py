"""KV in FP8 as a module and a plan have it, and what TPUs' programs make of it. Numbers: the conformance suite."""

from __future__ import annotations

from typing import Any

import pytest

from plait.backends.base import CompileOptions
from plait.backends.conformance.models import Attention, Model
from plait.backends.xla import XlaBackend
from plait.cost_models.profile import at_element_bytes, profile, with_fp8_kv
from plait.errors import UnsupportedError
from plait.ir import Builder, kv_layouts, parse_module, print_module
from plait.ir.kv import store_kv
from plait.ir.passes import SLICE_PIPELINE, run_passes

WIDE = Model((Attention(heads=8, kv_heads=2, head_dim=128, window=24), Attention(heads=8, kv_heads=2, head_dim=128)))


def stored(code: str = "e4m3fn") -> Any:
    made = WIDE("bfloat16")
    store_kv(made, code)
    return made


def test_every_attention_stores_it_and_the_module_says_so() -> None:
    text = print_module(stored("e5m2"))
    assert text.count("!plait.kv<2x128xf8E5M2, window 24>") >= 2, "of the argument and of the op"
    assert "!plait.kv<2x128xbf16" not in text
    layouts = kv_layouts(parse_module(text), 16)
    assert [(layout.dtype, layout.window) for layout in layouts] == [("e5m2", 24), ("e5m2", None)]


def test_what_keeps_no_keys_is_refused() -> None:
    b = Builder("program", "float32")
    b.block = 0
    weights: dict[str, Any] = {"w": ((3, 4), "float32")}
    text = "module { func.func @main(%a: tensor<3x4xf32>) { return } }"
    made = b.finish({"logits": b.opaque(weights, programs=[text], lengths=[8], flops=[1], vocabulary=4)})
    with pytest.raises(UnsupportedError, match=r"plait\.opaque keeps no K and V"):
        store_kv(made, "e4m3fn")


def test_memory_counts_a_byte_a_value() -> None:
    plain, fp8 = profile(WIDE("bfloat16")), profile(stored())
    per_token = [[kv.bytes_per_token for unit in model.blocks for kv in unit.facts.kv] for model in (plain, fp8)]
    assert per_token == [[1024, 1024], [512, 512]]
    assert [unit.facts.kv for unit in with_fp8_kv(plain).blocks] == [unit.facts.kv for unit in fp8.blocks]
    for ratio, dtype in ((0.5, "none"), (2.0, "float32")):
        assert [kv for unit in at_element_bytes(fp8, ratio, dtype).blocks for kv in unit.facts.kv] == [
            kv for unit in fp8.blocks for kv in unit.facts.kv
        ]


@pytest.mark.slow
@pytest.mark.parametrize("arch", ["tpu-v5e", "tpu-v7x"])
def test_pools_of_a_tpu_take_half_and_are_written_in_place(arch: str) -> None:
    options = CompileOptions(max_step_tokens=16, max_sequences=1, max_context_tokens=128)
    aliased = []
    for made in (WIDE("bfloat16"), stored()):
        run_passes(made, SLICE_PIPELINE)
        report: Any = XlaBackend("gather").compile(made, f"xla:{arch}", options).report
        aliased.append({row["aliased_bytes"] for row in report["programs"].values()})
    assert len(aliased[0]) == 1
    assert {size // 2 for size in aliased[0]} == aliased[1]


def test_pallas_attention_refuses_it() -> None:
    made = Model((Attention(heads=8, kv_heads=2, head_dim=128, kv_dtype="e4m3fn"),))("bfloat16")
    run_passes(made, SLICE_PIPELINE)
    with pytest.raises(UnsupportedError, match="Pallas attention stores KV in the dtype of q"):
        XlaBackend("pallas").compile(made, "xla:tpu-v5e", CompileOptions(max_step_tokens=16, max_sequences=1))
