"""What is known of each architecture: how Triton names it, what one of its units holds, and how fast one chip of it is.

A unit is a streaming multiprocessor (NVIDIA) or a compute unit (AMD). Sources: NVIDIA's CUDA C++ Programming Guide,
table "Technical Specifications per Compute Capability", and the chips' datasheets; AMD's instruction set guides (CDNA2,
CDNA3, CDNA4, RDNA3), LLVM's AMDGPU user guide (register files, machine numbers of ELF files) and ROCm's accelerator
specifications. Peaks are dense; they only rank tiles, predictions of plans come from `plait.cost_models`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

KIB = 1024


@dataclass(frozen=True)
class Arch:
    """One architecture.

    Attributes:
        name: what a target says: `sm_90a`, `gfx942`.
        triton: the arch of Triton's GPUTarget.
        warp: threads of a warp or wave.
        simds: schedulers of a unit; each has its share of the registers and runs its own warps.
        registers: 32-bit registers of a unit.
        most_registers: that one thread can have, register_step: they are given out in such steps.
        most_warps, most_blocks: at once on a unit.
        shared_unit_bytes, shared_block_bytes: shared memory (LDS) of a unit, and the most one block can have;
            shared_extra_bytes: what the system takes of it for each block.
        tensor_columns: columns of tensor memory of a unit; 0: it has none.
        stages: depth of software pipelines that a tile has where nobody says.
        fp8: element types that its matrix units multiply.
        machine: number of the ELF file's instruction set (`plait.backends.kernels.gpu.facts`).
        matrix: what instructions that use the matrix units start with.
        chip: the chip, as the catalogue calls it, that the following describe: units, peak tera-operations per second
            by width of what is multiplied (bits; 32 is without matrix units), and memory bandwidth in GB/s.
        chiplets: dies with an L2 of their own that share a launch, one block each in turn.
    """

    name: str
    vendor: Literal["nvidia", "amd"]
    triton: int | str
    warp: int
    simds: int
    registers: int
    most_registers: int
    register_step: int
    most_warps: int
    most_blocks: int
    shared_unit_bytes: int
    shared_block_bytes: int
    shared_extra_bytes: int
    tensor_columns: int
    stages: int
    fp8: tuple[str, ...]
    machine: int
    matrix: tuple[str, ...]
    chip: str
    units: int
    tera_ops: Mapping[int, float]
    bandwidth_gb_per_s: float
    chiplets: int = 1

    @property
    def backend(self) -> Literal["cuda", "hip"]:
        """The backend of Triton's GPUTarget."""
        return "cuda" if self.vendor == "nvidia" else "hip"

    @property
    def suffix(self) -> Literal["cubin", "hsaco"]:
        return "cubin" if self.vendor == "nvidia" else "hsaco"


def _nvidia(
    capability: int,
    *,
    warps: int,
    blocks: int,
    shared_kib: int,
    fp8: bool,
    matrix: tuple[str, ...],
    chip: str,
    units: int,
    tera_ops: Mapping[int, float],
    bandwidth: float,
    tensor_columns: int = 0,
) -> Arch:
    return Arch(
        name=f"sm_{capability}a" if capability >= 90 else f"sm_{capability}",
        vendor="nvidia",
        triton=capability,
        warp=32,
        simds=4,
        registers=64 * KIB,
        most_registers=255,
        register_step=8,
        most_warps=warps,
        most_blocks=blocks,
        shared_unit_bytes=shared_kib * KIB,
        shared_block_bytes=(shared_kib - 1) * KIB,
        shared_extra_bytes=KIB,
        tensor_columns=tensor_columns,
        stages=3,
        fp8=("fp8e4nv", "fp8e5") if fp8 else (),
        machine=capability,
        matrix=matrix,
        chip=chip,
        units=units,
        tera_ops=tera_ops,
        bandwidth_gb_per_s=bandwidth,
    )


def _cdna(
    name: str,
    *,
    lds_kib: int,
    fp8: tuple[str, ...],
    machine: int,
    chip: str,
    units: int,
    tera_ops: Mapping[int, float],
    bandwidth: float,
    chiplets: int,
) -> Arch:
    return Arch(
        name=name,
        vendor="amd",
        triton=name,
        warp=64,
        simds=4,
        registers=4 * 512 * 64,
        most_registers=512,
        register_step=8,
        most_warps=32,
        most_blocks=16,
        shared_unit_bytes=lds_kib * KIB,
        shared_block_bytes=lds_kib * KIB,
        shared_extra_bytes=0,
        tensor_columns=0,
        stages=2,
        fp8=fp8,
        machine=machine,
        matrix=("v_mfma_", "v_smfmac_"),
        chip=chip,
        units=units,
        tera_ops=tera_ops,
        bandwidth_gb_per_s=bandwidth,
        chiplets=chiplets,
    )


_MMA = ("mma.sync",)
_ALL = (
    _nvidia(80, warps=64, blocks=32, shared_kib=164, fp8=False, matrix=_MMA, chip="a100-80-sxm", units=108,
            tera_ops={32: 19.5, 16: 312, 8: 624}, bandwidth=2039),
    _nvidia(86, warps=48, blocks=16, shared_kib=100, fp8=False, matrix=_MMA, chip="a10", units=72,
            tera_ops={32: 31.2, 16: 125, 8: 250}, bandwidth=600),
    _nvidia(89, warps=48, blocks=24, shared_kib=100, fp8=True, matrix=_MMA, chip="l40s", units=142,
            tera_ops={32: 91.6, 16: 362, 8: 733}, bandwidth=864),
    _nvidia(90, warps=64, blocks=32, shared_kib=228, fp8=True, matrix=("wgmma.mma_async", *_MMA), chip="h100-sxm",
            units=132, tera_ops={32: 67, 16: 989.4, 8: 1978.9}, bandwidth=3350),
    _nvidia(100, warps=64, blocks=32, shared_kib=228, fp8=True, matrix=("tcgen05.mma", *_MMA), chip="b200",
            units=148, tera_ops={32: 75, 16: 2250, 8: 4500}, bandwidth=8000, tensor_columns=512),
    _nvidia(103, warps=64, blocks=32, shared_kib=228, fp8=True, matrix=("tcgen05.mma", *_MMA), chip="b300",
            units=148, tera_ops={32: 75, 16: 2250, 8: 4500}, bandwidth=8000, tensor_columns=512),
    _nvidia(120, warps=48, blocks=24, shared_kib=100, fp8=True, matrix=_MMA, chip="rtxpro6000", units=188,
            tera_ops={32: 126, 16: 503.8, 8: 1007.6}, bandwidth=1792),
    _cdna("gfx90a", lds_kib=64, fp8=(), machine=0x3F, chip="mi210", units=104,
          tera_ops={32: 45.3, 16: 181, 8: 181}, bandwidth=1638, chiplets=1),
    _cdna("gfx942", lds_kib=64, fp8=("fp8e4b8",), machine=0x4C, chip="mi300x", units=304,
          tera_ops={32: 163.4, 16: 1307.4, 8: 2614.9}, bandwidth=5300, chiplets=8),
    _cdna("gfx950", lds_kib=160, fp8=("fp8e4nv", "fp8e5"), machine=0x4F, chip="mi355x", units=256,
          tera_ops={32: 157.3, 16: 2516.6, 8: 5033.2}, bandwidth=8000, chiplets=8),
    Arch(
        name="gfx1100",
        vendor="amd",
        triton="gfx1100",
        warp=32,
        simds=2,
        registers=2 * 1536 * 32,
        most_registers=256,
        register_step=24,
        most_warps=32,
        most_blocks=16,
        shared_unit_bytes=64 * KIB,
        shared_block_bytes=64 * KIB,
        shared_extra_bytes=0,
        tensor_columns=0,
        stages=2,
        fp8=(),
        machine=0x41,
        matrix=("v_wmma_",),
        chip="rx7900xtx",
        units=96,
        tera_ops={32: 61.4, 16: 122.8, 8: 122.8},
        bandwidth_gb_per_s=960,
    ),
)  # fmt: skip

#: By the name of a target's arch. From sm_90 on, Triton makes code for that chip alone (`sm_90a`), whatever the name.
ARCHS: Mapping[str, Arch] = {arch.name: arch for arch in _ALL} | {
    arch.name.removesuffix("a"): arch for arch in _ALL if arch.vendor == "nvidia"
}
