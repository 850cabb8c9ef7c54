"""The machine code of experts and latent attention at DeepSeek-V3's sizes: the chips' own matrix units, wide loads,
nothing spilled although a row of latent sums is 512 wide."""

from __future__ import annotations

from collections.abc import Mapping

import pytest

from plait.backends.kernels.gpu import experts, latent
from plait.backends.kernels.gpu.archs import ARCHS
from plait.backends.kernels.gpu.build import Binary, BuildError, Job, compile_many
from plait.backends.kernels.gpu.cache import Cache, default_folder
from plait.backends.kernels.gpu.choose import FATAL
from plait.backends.kernels.gpu.facts import Failure, check, expectations
from plait.backends.kernels.gpu.kernel import Constant, Kernel, Variant

KERNELS: dict[str, tuple[object, Kernel]] = {
    kernel.name: (area, kernel) for area in (experts, latent) for kernel in area.KERNELS
}
CHIPS = ("sm_90a", "sm_100a", "gfx942", "gfx950")

PLAIN: dict[str, Constant] = {"CODES": "none", "PACK": 1, "SCALE_N": 0, "GROUP": 0, "HAS_ZEROS": False}

CONSTANTS: Mapping[str, Constant] = {
    **{"EXPERTS": 256, "TOP": 8, "SCORING": "sigmoid", "NORMALISE": True, "HAS_SELECTION": True},
    **{"GROUPS": 8, "TOP_GROUPS": 4, "GROUP_SCORE": "top2", "DENSE": False},
    **{"ACTIVATION": "silu", "ALPHA": 0.0, "LIMIT": 0.0, "HAS_BIAS": False, "EVEN_K": 256},
    **PLAIN,
    **{"HEADS": 128, "LATENT": 512, "ROPE": 64, "PAGE_TOKENS": 16, "SPLIT_KEYS": 256, "MAX_SPLITS": 16},
    "TRANSPOSED": False,
}
_HEADS_OF_A_PROGRAM = 16

#: How stacks are held, beside numbers: element types, and what the kernels are told.
HELD: dict[str, tuple[dict[str, str], dict[str, Constant]]] = {
    "fp8": ({}, {"CODES": "fp8", "SCALE_N": 128, "GROUP": 128}),
    "i8": ({"w": "i8", "scales": "fp16"}, {"CODES": "i8", "SCALE_N": 1}),
    "u4": (
        {"w": "i8", "scales": "fp16", "zeros": "fp16"},
        {"CODES": "u4", "PACK": 2, "SCALE_N": 1, "GROUP": 128, "HAS_ZEROS": True},
    ),
    "e2m1": ({"w": "i8", "scales": "bf16"}, {"CODES": "e2m1", "PACK": 2, "SCALE_N": 1, "GROUP": 32}),
}

_INTEGERS = ("choices", "counts", "pairs", "places", "table", "decodes", "kv_lens", "tiles", "query_starts", "slots")
_WIDE = ("scales", "zeros", "selection_bias", "shares", "scores", "routing", "part", "part_max", "part_sum")
_BATCH = frozenset({"rows", "splits", "table_stride", "count"})
"""Scalars that no plan knows."""


def jobs(
    name: str, arch: str, dtype: str = "bf16", pages: str = "", rows: int | None = None, **own: Constant
) -> list[Job]:
    """One for every tile."""
    area, kernel = KERNELS[name]
    constants = {**CONSTANTS, **({"GROUP": _HEADS_OF_A_PROGRAM} if name == "latent_prefill" else {}), **own}
    types = {key: "i32" if key in _INTEGERS else "fp32" if key in _WIDE else dtype for key in kernel.pointers}
    types |= {key: pages for key in types if key == "k_pages" and pages}
    types |= {"out": "fp32"} if name == "route" else {}
    if own.get("CODES") == "fp8":
        types["w"] = ARCHS[arch].fp8[0]
    elif "CODES" in own:
        types |= {key: kind for key, kind in HELD[str(own["CODES"])][0].items() if key in types}
    given = {key: constants[key] for key in kernel.constants}
    tiles = area.candidates(kernel, types, given, ARCHS[arch], rows)  # type: ignore[attr-defined]
    aligned = frozenset((*kernel.pointers, *kernel.scalars)) - _BATCH
    small = frozenset(kernel.pointers) - {"k_pages", "w"}
    return [Job(kernel, Variant(name, types, given, tile, aligned, small), arch) for tile in tiles]


def failures(wanted: list[Job]) -> list[tuple[Failure, ...]]:
    """What is wrong with each."""
    found = []
    for job, made in zip(wanted, compile_many(wanted, cache=Cache(default_folder())), strict=True):
        if isinstance(made, BuildError):
            raise made
        assert isinstance(made, Binary)
        arch = ARCHS[job.arch]
        found.append(check(made.facts, arch, job.kernel, job.variant, expectations(job.kernel, job.variant, arch)))
    return found


@pytest.mark.parametrize("arch", ["sm_90a", "gfx942"])
def test_the_first_tiles_are_right(arch: str) -> None:
    wanted = [jobs(name, arch)[0] for name in KERNELS]
    wanted.append(jobs("gemm_heads", arch, TRANSPOSED=True, EVEN_K=128)[0])
    assert [(job.label, found) for job, found in zip(wanted, failures(wanted), strict=True) if found] == []


@pytest.mark.slow
@pytest.mark.parametrize("rows", [1, 64 * 256])
@pytest.mark.parametrize("name", ["experts_gated", "experts_down", "gemm_heads", "gemm_heads-transposed"])
@pytest.mark.parametrize("arch", CHIPS)
def test_products(arch: str, name: str, rows: int) -> None:
    """Every tile compiles and can be launched, and one has all that is expected."""
    transposed = name.endswith("transposed")
    given = {"TRANSPOSED": transposed, "EVEN_K": 128 if transposed else 256}
    _usable(failures(jobs(name.partition("-")[0], arch, rows=rows, **given)))


@pytest.mark.slow
@pytest.mark.parametrize("rows", [1, 64 * 256])
@pytest.mark.parametrize("held", HELD)
@pytest.mark.parametrize("name", ["experts_gated", "experts_down"])
@pytest.mark.parametrize("arch", ["sm_90a", "gfx942"])
def test_products_with_codes(arch: str, name: str, held: str, rows: int) -> None:
    _usable(failures(jobs(name, arch, rows=rows, **HELD[held][1])))


@pytest.mark.slow
@pytest.mark.parametrize("name", ["latent_decode", "latent_prefill"])
@pytest.mark.parametrize(("arch", "dtype", "pages"), [
    *((arch, "bf16", "") for arch in (*CHIPS, "sm_80", "sm_120a", "gfx90a")),
    *((arch, "fp32", "") for arch in ("sm_90a", "gfx942")),
    ("sm_90a", "bf16", "fp8e4nv"),
    ("gfx942", "bf16", "fp8e4b8"),
    ("gfx942", "fp16", "u8"),
])  # fmt: skip
def test_latent_attention(arch: str, dtype: str, pages: str, name: str) -> None:
    _usable(failures(jobs(name, arch, dtype, pages)))


def _usable(found: list[tuple[Failure, ...]]) -> None:
    assert () in found, found
    assert not [failure for tile in found for failure in tile if failure.name in FATAL]


@pytest.mark.parametrize("arch", ARCHS)
def test_tiles_suit_the_constants(arch: str) -> None:
    for name, (_, kernel) in KERNELS.items():
        for dtype in ("bf16", "fp32"):
            for job in jobs(name, arch, dtype):
                assert set(job.variant.tile.constants) == set(kernel.tile)
                block = job.variant.tile.constants.get("BLOCK_M", 16)
                assert block % _HEADS_OF_A_PROGRAM == 0, "a tile has whole tokens"
    few = {job.variant.tile.constants["BLOCK_M"] for job in jobs("experts_gated", arch, rows=256)}
    assert few == {16}, "256 tokens give each of 256 experts eight"


def test_fewer_keys_where_pages_are_converted() -> None:
    wide, narrow = (jobs("latent_decode", "sm_90a", pages=pages) for pages in ("", "fp8e4nv"))
    assert max(job.variant.tile.constants["BLOCK_KEYS"] for job in wide) == 32
    assert {job.variant.tile.constants["BLOCK_KEYS"] for job in narrow} == {16}
