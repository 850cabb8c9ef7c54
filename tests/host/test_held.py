"""What the cost model says of how a device holds quantised weights is what the kernels' plans do."""

from __future__ import annotations

from functools import cache
from itertools import product
from typing import Any

import pytest
from xdsl.dialects.builtin import ModuleOp

from plait.backends.base import CompileOptions
from plait.backends.kernels.gpu.archs import ARCHS
from plait.backends.kernels.gpu.build import arch_named
from plait.backends.kernels.gpu.lower import lower
from plait.backends.kernels.gpu.pick import first
from plait.cost_models.catalogue import device_of, devices
from plait.cost_models.memory import keeps_quantised
from plait.cost_models.profile import profile
from plait.frontend.families import read_config
from plait.frontend.families.decoder import build_decoder
from plait.ir import weights
from plait.ir.ops import RouterOp
from plait.ir.quant import GGUF, quantise_types
from plait.ir.types import Quant, QuantType
from tests.host.test_every_config_key import written

#: Of GGUF, and of every layout of scales that quantisers write: rows, groups, blocks, one for all.
KINDS: list[Quant] = [
    *GGUF.values(),
    *(QuantType.get(code, "float32", (1, 0), zero=zero) for code, zero in (("i8", None), ("u4", 8), ("e4m3fn", None))),
    *(QuantType.get("e4m3fn", "float32", block) for block in ((0, 0), (128, 128), (32, 48), (1, 96), (64, 16))),
    *(
        QuantType.get("u4", scale, (1, group), zero="float16")
        for scale, group in product(("float16", "float32"), (32, 64, 48))
    ),
    QuantType.get("u4", "float16", (1, 32), zero=8, ordered=True),
    QuantType.get("u4", "float16", (1, 16), zero=3),
    QuantType.get("u4", "float16", (1, 8), zero=8),
    QuantType.get("e5m2", "float32", (1, 0)),
    QuantType.get("e2m1", "e4m3fn", (1, 16), outer=True),
    QuantType.get("e2m1", "e8m0", (1, 32)),
    QuantType.get("i8", "float16", (1, 32), minimum="float16"),
]

SIZES: dict[str, dict[str, Any]] = {
    "llama": {"head_dim": 16, "hidden_size": 768, "intermediate_size": 768, "vocab_size": 768},
    "qwen3_moe": {
        "hidden_size": 768,
        "moe_intermediate_size": 768,
        "intermediate_size": 768,
        "vocab_size": 768,
        "mlp_only_layers": [],
    },
    "deepseek_v3": {"kv_lora_rank": 768, "hidden_size": 768, "vocab_size": 768},
}


#: One of the catalogue for each architecture that kernels are made for; those that run now have everything that tells
#: formats apart: whether and how FP8 is multiplied, products, stacks, tables.
ENTRIES = {entry.arch: entry for entry in devices() if entry.arch in ARCHS}
FIRST = {("qwen3_moe", "sm_80"), ("qwen3_moe", "sm_90a"), ("qwen3_moe", "gfx942")}
CASES = [
    pytest.param(family, arch, marks=[] if (family, arch) in FIRST else [pytest.mark.slow])
    for family in SIZES
    for arch in ENTRIES
]


@cache
def plain(family: str) -> ModuleOp:
    config = written(family) | SIZES[family] | {"num_hidden_layers": 1}
    return build_decoder(read_config(config, family), "bfloat16")


def quantised(family: str, kind: Quant) -> ModuleOp:
    """A module whose every matrix that `kind` fits is of it, but those of routers, which take none."""
    module = plain(family).clone()
    matrices = {
        name: tuple(op.result.type.get_shape())
        for name, op in weights(module).items()
        if not any(isinstance(use.operation, RouterOp) for use in op.result.uses)
    }
    kinds = {name: kind for name, shape in matrices.items() if len(shape) > 1 and not kind.problem(shape)}
    assert len(kinds) > 5, kind
    quantise_types(module, kinds)
    return module


@pytest.mark.parametrize(("family", "arch"), CASES)
def test_what_is_kept_is_what_the_kernels_are_given(family: str, arch: str) -> None:
    device, made = device_of(ENTRIES[arch]), arch_named(arch)
    wrong = []
    for kind in KINDS:
        module = quantised(family, kind)
        plan = lower(module, arch, made, CompileOptions(), first(made))
        kept = {name for weight in plan.weights.values() if weight.part == "codes" for name in weight.names}
        for own in {own.name: own for unit in profile(module).units for own in unit.quantised}.values():
            if keeps_quantised(device, own.kind, own.readers) != (own.name in kept):
                wrong.append(f"{own.name} of {kind}, kept: {own.name in kept}")
    assert not wrong


def test_both_answers_come_up() -> None:
    """The test above sees weights of both kinds, in products and in stacks."""
    device = device_of(ENTRIES["sm_90a"])
    answers = {
        (reader, keeps_quantised(device, kind, frozenset({f"plait.{reader}"})))
        for kind in KINDS
        for reader in ("linear", "experts", "embed")
    }
    assert answers == {(r, a) for r in ("linear", "experts") for a in (True, False)} | {("embed", False)}
