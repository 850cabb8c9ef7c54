"""The machine code of attention and of the kernels bound by memory: matrix units, wide loads, no spills, on every chip.

`check` holds a binary to its architecture (registers, shared memory, spills, the matrix units for attention); what is
asked beyond that is written here.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import pytest

from plait.backends.kernels.gpu.archs import ARCHS
from plait.backends.kernels.gpu.build import Binary, Job, compile_many
from plait.backends.kernels.gpu.cache import Cache
from plait.backends.kernels.gpu.facts import Failure, check, expectations
from plait.backends.kernels.gpu.kernel import Constant, Tile, Variant
from plait.backends.kernels.gpu.table import KERNELS, candidates

#: What attention is made of, in bf16: for one token, and for many.
INSTRUCTIONS = {
    "sm_90a": ("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32", "wgmma.mma_async.sync.aligned.m64n64k16.f32."),
    "sm_100a": ("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32", "tcgen05.mma.cta_group::1.kind::f16"),
    "gfx942": ("v_mfma_f32_16x16x16_bf16", "v_mfma_f32_32x32x8_bf16"),
    "gfx950": ("v_mfma_f32_16x16x32_bf16", "v_mfma_f32_32x32x16_bf16"),
}  # fmt: skip
CHIPS = tuple(INSTRUCTIONS)
PHASES = ("attention_decode", "attention_prefill")
STREAMS = (
    *("embed", "gather_rows", "rms_norm", "add_rms_norm", "layer_norm"),
    *("add", "silu_mul", "gelu_mul", "gelu", "scale", "softcap", "argmax"),
)

CONSTANTS: Mapping[str, Constant] = {
    **{"KV_HEADS": 8, "GROUP": 4, "HEAD_DIM": 128, "PAGE_TOKENS": 16, "WINDOW": 0, "SOFTCAP": 0.0, "HAS_SINKS": False},
    **{"SPLIT_KEYS": 256, "MAX_SPLITS": 32, "HEADS": 32, "ROTARY_DIM": 128, "BLOCK": 4096, "APPROXIMATE": False},
    **{"GROUPS": 1, "HAS_BIAS": True},
}
TYPES: Mapping[str, str] = {
    **dict.fromkeys(("tokens", "index", "slots", "decodes", "kv_lens", "tiles", "query_starts"), "i32"),
    **dict.fromkeys(("cos", "sin", "part", "part_max", "part_sum", "logits"), "fp32"),
}


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Cache:
    return Cache(tmp_path_factory.mktemp("kernels"))


def jobs(name: str, arch: str, dtype: str = "bf16", pages: str = "", **constants: Constant) -> list[Job]:
    """One for each tile."""
    kernel = KERNELS[name]
    types = {pointer: TYPES.get(pointer, dtype) for pointer in kernel.pointers}
    if kernel.nature == "attend":
        types["table"] = "i32"
    if name == "argmax":
        types["out"] = "i32"
    if pages:
        types |= dict.fromkeys(("k_pages", "v_pages"), pages)
    given = {constant: {**CONSTANTS, **constants}[constant] for constant in kernel.constants}
    ragged = {"rows", "splits", "table_stride", *kernel.constants, *kernel.tile}
    aligned = frozenset(set(kernel.arguments) - ragged)
    return [
        Job(kernel, Variant(name, types, given, tile, aligned), arch)
        for tile in candidates(kernel, types, given, ARCHS[arch])
    ]


def compiled(wanted: Iterable[Job], cache: Cache) -> list[tuple[Binary, tuple[Failure, ...]]]:
    wanted = list(wanted)
    found = []
    for job, binary in zip(wanted, compile_many(wanted, cache=cache), strict=True):
        assert isinstance(binary, Binary), binary
        arch = ARCHS[job.arch]
        expected = expectations(job.kernel, job.variant, arch)
        found.append((binary, check(binary.facts, arch, job.kernel, job.variant, expected)))
    return found


def made(wanted: Iterable[Job], cache: Cache) -> list[Binary]:
    """Sound binaries."""
    wanted = list(wanted)
    found = compiled(wanted, cache)
    for job, (_, failures) in zip(wanted, found, strict=True):
        assert failures == (), job.label
    return [binary for binary, _ in found]


def hold_choice(wanted: list[Job], cache: Cache) -> None:
    """Some tile is sound, so that one is chosen; what is wrong with others is that they spill, no more."""
    found = [failures for _, failures in compiled(wanted, cache)]
    assert () in found, found
    assert {failure.name for failures in found for failure in failures} <= {"spills"}, found


def kv_loads(tile: Tile, threads: int, head_dim: int, value_bytes: int) -> int:
    """Widest loads of a thread that K and V of one block of keys take."""
    return 2 * tile.constants["BLOCK_KEYS"] * head_dim * value_bytes // (16 * threads)


def hold_attention(wanted: list[Job], cache: Cache) -> None:
    """The matrix units in bf16, and K and V in nothing but the widest loads."""
    for job, binary in zip(wanted, made(wanted, cache), strict=True):
        instruction = INSTRUCTIONS[job.arch][PHASES.index(job.kernel.name)]
        assert any(name.startswith(instruction) for name in binary.facts.matrix), (job.label, binary.facts.matrix)
        head_dim = job.variant.constants["HEAD_DIM"]
        assert isinstance(head_dim, int)
        wide = kv_loads(job.variant.tile, binary.facts.threads, head_dim, 2)
        assert binary.facts.loads[16] >= wide > 0, (job.label, binary.facts.loads)
        assert all(width in (4, 16) for width in binary.facts.loads), (job.label, binary.facts.loads)


def test_attention(cache: Cache) -> None:
    hold_attention([jobs(name, arch)[0] for name in PHASES for arch in CHIPS], cache)


@pytest.mark.parametrize("head_dim", [96, 256])
def test_attention_of_other_heads(cache: Cache, head_dim: int) -> None:
    """No power of two, and the widest of any family: on the matrix units, without spills."""
    made([jobs(name, arch, HEAD_DIM=head_dim)[0] for name in PHASES for arch in ("sm_90a", "gfx942")], cache)


@pytest.mark.slow
@pytest.mark.parametrize("arch", CHIPS)
@pytest.mark.parametrize(
    ("head_dim", "attributes"),
    [
        (64, {}),
        (96, {}),
        (128, {"WINDOW": 1024, "SOFTCAP": 30.0, "HAS_SINKS": True}),
        (256, {"WINDOW": 4096, "SOFTCAP": 50.0, "GROUP": 2}),
    ],
    ids=str,
)
def test_every_tile_of_attention(cache: Cache, arch: str, head_dim: int, attributes: Mapping[str, Constant]) -> None:
    for name in PHASES:
        hold_choice(jobs(name, arch, HEAD_DIM=head_dim, **attributes), cache)


def fp8_pages(arch: str) -> set[str]:
    """What an architecture's pages of FP8 are."""
    return {*ARCHS[arch].fp8, "fp8e4nv" if "fp8e4nv" in ARCHS[arch].fp8 else "u8"}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("arch", "pages"),
    [(arch, pages) for arch in ("sm_80", "gfx90a", "gfx1100", *CHIPS) for pages in sorted(fp8_pages(arch))],
)
@pytest.mark.parametrize("dtype", ["bf16", "fp32"])
def test_fp8_pages(cache: Cache, arch: str, pages: str, dtype: str) -> None:
    head_dim = 64 if arch == "gfx1100" else 128  # wider heads of float32 spill there, whatever the pages
    for name in (*PHASES, "rope_write"):
        hold_choice(jobs(name, arch, dtype, pages, HEAD_DIM=head_dim)[:2], cache)


@pytest.mark.slow
@pytest.mark.parametrize("arch", ["sm_80", "gfx90a", "gfx1100", *CHIPS])
@pytest.mark.parametrize("dtype", ["bf16", "fp32"])
def test_small_heads_on_every_architecture(cache: Cache, arch: str, dtype: str) -> None:
    for name in PHASES:
        hold_choice(jobs(name, arch, dtype, HEAD_DIM=64)[:2], cache)


def hold_streams(wanted: list[Job], cache: Cache) -> None:
    """Nothing but the widest loads of rows; the number of a token's row is 4 bytes."""
    for job, binary in zip(wanted, made(wanted, cache), strict=True):
        narrow = {width: count for width, count in binary.facts.loads.items() if width != 16}
        number = {4: 1} if job.kernel.name in ("embed", "gather_rows") else {}
        assert narrow in (number, {}), (job.label, binary.facts.loads)


def test_streams(cache: Cache) -> None:
    hold_streams([jobs(name, arch)[0] for name in STREAMS for arch in ("sm_90a", "gfx942")], cache)


def test_norms_of_heads(cache: Cache) -> None:
    names, archs = ("rms_norm", "layer_norm"), ("sm_90a", "gfx942")
    hold_streams(
        [job for name in names for arch in archs for job in jobs(name, arch, GROUPS=32, BLOCK=128)[-1:]], cache
    )


def hold_heads(wanted: list[Job], cache: Cache) -> None:
    """Values in 16 bytes; rotary tables, slots and maxima of splits may be narrower."""
    for job, binary in zip(wanted, made(wanted, cache), strict=True):
        values = KERNELS[job.kernel.name].pointers[0]
        width = {"bf16": 2, "fp32": 4}[job.variant.types[values]]
        loads = binary.facts.loads
        assert loads[16] * 16 // width >= 8, (job.label, loads)


def test_rope_and_combine(cache: Cache) -> None:
    names = ("rope", "rope_write", "attention_combine")
    hold_heads([jobs(name, arch)[-1] for name in names for arch in ("sm_100a", "gfx950")], cache)


@pytest.mark.slow
@pytest.mark.parametrize("arch", CHIPS)
@pytest.mark.parametrize("dtype", ["bf16", "fp32"])
def test_every_tile_of_what_is_bound_by_memory(cache: Cache, arch: str, dtype: str) -> None:
    hold_streams([job for name in STREAMS for job in jobs(name, arch, dtype)], cache)
    hold_heads([job for name in ("rope", "attention_combine") for job in jobs(name, arch, dtype)], cache)
    hold_choice(jobs("rope_write", arch, dtype), cache)
