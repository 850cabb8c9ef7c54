"""The machine code of the matrix products: the chip's own matrix units, wide loads, no spills, pipelined."""

from __future__ import annotations

import re
from collections.abc import Mapping

import pytest

from plait.backends.kernels.gpu.archs import ARCHS, Arch
from plait.backends.kernels.gpu.build import Binary, BuildError, Job, compile_many
from plait.backends.kernels.gpu.cache import Cache
from plait.backends.kernels.gpu.facts import Expectations, Failure, check
from plait.backends.kernels.gpu.gemm import KERNELS, candidates
from plait.backends.kernels.gpu.kernel import Constant, Kernel, Tile, Variant

BY_NAME = {kernel.name: kernel for kernel in KERNELS}
PRODUCTS = tuple(name for name in BY_NAME if name != "quantize_rows")

#: What a 16-bit product, and one of fp8 by fp8, is made of where there are many rows.
INSTRUCTIONS = {
    "sm_90a": (
        "wgmma.mma_async.sync.aligned.m64n128k16.f32.bf16.bf16",
        "wgmma.mma_async.sync.aligned.m64n128k32.f32.e4m3.e4m3",
    ),
    "sm_100a": ("tcgen05.mma.cta_group::1.kind::f16", "tcgen05.mma.cta_group::1.kind::f8f6f4"),
    "gfx942": ("v_mfma_f32_32x32x8_bf16", "v_mfma_f32_32x32x16_fp8_fp8"),
    "gfx950": ("v_mfma_f32_32x32x16_bf16", "v_mfma_f32_32x32x64_f8f6f4"),
}
CHIPS = tuple(INSTRUCTIONS)

CONSTANTS: Mapping[str, Mapping[str, Constant]] = {
    "gemm": {},
    "gemm_gated": {"ACTIVATION": "silu"},
    "gemm_int8": {"GROUP": 128, "HAS_ZEROS": False},
    "gemm_int4": {"GROUP": 32, "HAS_ZEROS": True},
    "gemm_fp8": {"SCALE_N": 128, "SCALE_K": 128},
    "gemm_fp8_fp8": {"X_GROUP": 128, "SCALE_N": 128, "SCALE_K": 128},
}


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Cache:
    return Cache(tmp_path_factory.mktemp("kernels"))


def types(kernel: Kernel, arch: Arch, x: str = "bf16") -> dict[str, str]:
    found = dict.fromkeys(kernel.pointers, x)
    fp8 = arch.fp8[0] if arch.fp8 else ""
    own = {
        "gemm_int8": {"w": "i8", "scales": "fp16", "zeros": "fp16"},
        "gemm_int4": {"w": "i8", "scales": "fp16", "zeros": "fp16"},
        "gemm_fp8": {"w": fp8, "scale": "fp32"},
        "gemm_fp8_fp8": {"x": fp8, "w": fp8, "x_scale": "fp32", "w_scale": "fp32"},
    }
    return found | own.get(kernel.name, {})


def job(name: str, arch: str, tile: Tile, x: str = "bf16", **constants: Constant) -> Job:
    kernel = BY_NAME[name]
    rest: dict[str, Constant] = {"HAS_BIAS": False, "HAS_RESIDUAL": False, "ACTIVATION": "none", "EVEN_K": 256}
    given = {**rest, **CONSTANTS[name], **constants}
    variant = Variant(
        name,
        types(kernel, ARCHS[arch], x),
        {constant: given[constant] for constant in kernel.constants},
        tile,
        aligned=frozenset(set(kernel.arguments) - {"rows", *kernel.constants, *kernel.tile}),
        small=frozenset(kernel.pointers),
    )
    return Job(kernel, variant, arch)


def tiles(name: str, arch: str, rows: int | None, x: str = "bf16") -> tuple[Tile, ...]:
    kernel = BY_NAME[name]
    return candidates(kernel, types(kernel, ARCHS[arch], x), {"EVEN_K": 256, **CONSTANTS[name]}, ARCHS[arch], rows)


def made(jobs: list[Job], cache: Cache) -> list[Binary]:
    outcomes = compile_many(jobs, cache=cache)
    for outcome in outcomes:
        if isinstance(outcome, BuildError):
            raise outcome
    return [outcome for outcome in outcomes if isinstance(outcome, Binary)]


def middle(name: str, arch: str) -> Tile:
    """128 by 128 columns of products, eight warps: what every chip has among its tiles for many rows."""
    return next(
        tile
        for tile in tiles(name, arch, 4096)
        if tile.num_warps == 8
        and tile.constants["BLOCK_M"] == 128
        and tile.constants["BLOCK_N"] == (64 if name == "gemm_gated" else 128)
    )


@pytest.fixture(scope="module")
def many(cache: Cache) -> list[tuple[Job, Binary]]:
    """Every product on every chip, for many rows, with a residual."""
    jobs = [job(name, arch, middle(name, arch), HAS_RESIDUAL=True) for arch in CHIPS for name in PRODUCTS]
    return list(zip(jobs, made(jobs, cache), strict=True))


@pytest.mark.parametrize("arch", CHIPS)
def test_products_of_many_rows_use_the_chips_own_units(arch: str, many: list[tuple[Job, Binary]]) -> None:
    own = [(one, binary) for one, binary in many if one.arch == arch]
    assert len(own) == len(PRODUCTS)
    for one, binary in own:
        instruction = INSTRUCTIONS[arch][one.kernel.name == "gemm_fp8_fp8"]
        expected = Expectations(matrix=(instruction,), load_bytes=16)
        assert check(binary.facts, ARCHS[arch], one.kernel, one.variant, expected) == (), one.label
        assert set(binary.facts.matrix) == {instruction}, one.label


def test_products_of_few_rows_load_nothing_but_whole_vectors(cache: Cache) -> None:
    jobs = [job("gemm", arch, tile) for arch in CHIPS for tile in tiles("gemm", arch, 1)]
    jobs += [job("gemm", arch, tiles("gemm", arch, 1)[1], EVEN_K=16) for arch in CHIPS]

    for one, binary in zip(jobs, made(jobs, cache), strict=True):
        arch = ARCHS[one.arch]
        assert check(binary.facts, arch, one.kernel, one.variant, Expectations(arch.matrix)) == (), one.label
        assert set(binary.facts.loads) == {16}, one.label


def test_as_many_steps_are_in_flight_as_the_tile_says(cache: Cache) -> None:
    jobs = [job("gemm", arch, tiles("gemm", arch, 4096)[-1]) for arch in ("sm_80", "sm_90a", "sm_100a")]

    for one, binary in zip(jobs, made(jobs, cache), strict=True):
        tile = one.variant.tile
        m, n, k = (tile.constants[name] for name in ("BLOCK_M", "BLOCK_N", "BLOCK_K"))
        assert binary.facts.shared_bytes >= (tile.num_stages - 1) * (m + n) * k * 2, one.label
        waits = re.findall(r"cp\.async\.wait_group\s+(?:0x)?(\d+)", binary.assembly)
        assert max(map(int, waits)) >= tile.num_stages - 2, one.label


def test_float32_is_multiplied_as_float32(cache: Cache) -> None:
    jobs = [job("gemm", arch, tile, "fp32") for arch in ("sm_90a", "gfx942") for tile in tiles("gemm", arch, 1, "fp32")]

    for one, binary in zip(jobs, made(jobs, cache), strict=True):
        failures = check(binary.facts, ARCHS[one.arch], one.kernel, one.variant, Expectations(load_bytes=16))
        assert failures == (), one.label
        assert not re.search(r"tf32|xf32|bf16", binary.assembly), one.label


def test_rows_are_quantised(cache: Cache) -> None:
    kernel = BY_NAME["quantize_rows"]
    aligned = frozenset({"x", "out", "scale", "K", "x_stride", "out_stride"})
    jobs = []
    for arch in CHIPS:
        given = {"x": "bf16", "out": ARCHS[arch].fp8[0], "scale": "fp32"}
        for group in (0, 128):
            for tile in candidates(kernel, given, {"GROUP": group}, ARCHS[arch]):
                variant = Variant(kernel.name, given, {"GROUP": group}, tile, aligned, frozenset(kernel.pointers))
                jobs.append(Job(kernel, variant, arch))

    for one, binary in zip(jobs, made(jobs, cache), strict=True):
        failures = check(binary.facts, ARCHS[one.arch], kernel, one.variant, Expectations(load_bytes=16))
        assert failures == (), one.label


@pytest.mark.slow
@pytest.mark.parametrize("rows", [1, 4096])
@pytest.mark.parametrize("name", PRODUCTS)
@pytest.mark.parametrize("arch", CHIPS)
def test_every_candidate_compiles_and_one_is_right(arch: str, name: str, rows: int, cache: Cache) -> None:
    jobs = [job(name, arch, tile, HAS_BIAS=True) for tile in tiles(name, arch, rows)]

    _one_is_right(jobs, cache)


def test_an_activation_costs_no_spills(cache: Cache) -> None:
    """Of few rows and of many."""
    archs = ("sm_90a", "gfx942")
    chosen = [(arch, tile) for arch in archs for tile in (middle("gemm", arch), tiles("gemm", arch, 1)[1])]
    _sound([job("gemm", arch, tile, HAS_BIAS=True, ACTIVATION="gelu") for arch, tile in chosen], cache)


@pytest.mark.slow
@pytest.mark.parametrize("rows", [1, 4096])
@pytest.mark.parametrize("activation", ["scale", "gelu", "gelu_tanh"])
@pytest.mark.parametrize("arch", CHIPS)
def test_every_candidate_with_an_activation(arch: str, activation: str, rows: int, cache: Cache) -> None:
    own = {"HAS_BIAS": True, "HAS_RESIDUAL": activation == "scale", "ACTIVATION": activation}
    _one_is_right([job("gemm", arch, tile, **own) for tile in tiles("gemm", arch, rows)], cache)


@pytest.mark.slow
@pytest.mark.parametrize("rows", [1, 4096])
@pytest.mark.parametrize("arch", sorted({arch.name for arch in ARCHS.values()} - set(CHIPS)))
def test_other_chips(arch: str, rows: int, cache: Cache) -> None:
    _one_is_right([job("gemm", arch, tile, HAS_RESIDUAL=True) for tile in tiles("gemm", arch, rows)], cache)


def _one_is_right(jobs: list[Job], cache: Cache) -> None:
    failures = _failures(jobs, cache)
    assert () in failures, failures


def _sound(jobs: list[Job], cache: Cache) -> None:
    for one, failures in zip(jobs, _failures(jobs, cache), strict=True):
        assert failures == (), one.label


def _failures(jobs: list[Job], cache: Cache) -> list[tuple[Failure, ...]]:
    return [
        check(
            binary.facts,
            ARCHS[one.arch],
            one.kernel,
            one.variant,
            Expectations(matrix=ARCHS[one.arch].matrix, load_bytes=16),
        )
        for one, binary in zip(jobs, made(jobs, cache), strict=True)
    ]


@pytest.mark.parametrize("arch", ARCHS)
def test_tiles_fit_and_suit_the_constants(arch: str) -> None:
    for name in PRODUCTS:
        if "fp8" in name and not ARCHS[arch].fp8:
            continue
        kernel = BY_NAME[name]
        for even in (0, 16, 64, 256):
            constants = {**CONSTANTS[name], "EVEN_K": even}
            every = candidates(kernel, types(kernel, ARCHS[arch]), constants, ARCHS[arch])
            assert {tile.constants["BLOCK_M"] for tile in every} >= {16, 64}
            for tile in every:
                assert set(tile.constants) == set(kernel.tile)
                assert tile.constants["BLOCK_K"] <= even or even < 64
                assert int(constants.get("SCALE_K", 0)) % tile.constants["BLOCK_K"] == 0
                assert tile.constants["XCDS"] == ARCHS[arch].chiplets
