"""What a binary is, read from the binary itself: registers, spills, matrix instructions; and the proof drawn from it.

Numbers come from the ELF file (`.nv.info` of a cubin, as NVIDIA's binary utilities print it; the AMDGPU metadata note
of an hsaco, as LLVM's user guide describes it), instructions from the assembly text that the file was made of.
"""

from __future__ import annotations

import re
import struct
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import msgspec

from plait.backends.kernels.gpu.archs import Arch
from plait.backends.kernels.gpu.kernel import Kernel, Variant
from plait.errors import PlaitError

_MACHINE_NVIDIA, _MACHINE_AMD = 190, 224


@dataclass(frozen=True)
class Facts:
    """One binary.

    Attributes:
        machine: the ELF file's, in `Arch.machine`'s numbers; specific: it runs on that very architecture only.
        registers: vector registers of a thread, accumulation registers too.
        spills: 32-bit registers of a thread kept in memory for want of registers.
        shared_bytes: shared memory (LDS) of a block.
        tensor_columns: of tensor memory, of a block.
        matrix: matrix instructions, by name with types -> how many.
        loads: bytes a thread loads from global memory with one instruction -> how many such instructions.
        instructions: of the whole text.
        argument_bytes: sizes of the run-time arguments in order.
        blocks: at once on a unit; warps: of them; limit: what allows no more.
    """

    machine: int
    specific: bool
    threads: int
    registers: int
    spills: int
    shared_bytes: int
    tensor_columns: int
    matrix: Mapping[str, int]
    loads: Mapping[int, int]
    instructions: int
    argument_bytes: tuple[int, ...]
    blocks: int = 0
    warps: int = 0
    limit: str = ""

    @property
    def widest_load_bytes(self) -> int:
        return max(self.loads, default=0)


@dataclass(frozen=True)
class Resources:
    """What an ELF file says about its one kernel."""

    vendor: str
    machine: int
    specific: bool
    symbol: str
    registers: int
    spills: int
    static_shared_bytes: int
    argument_bytes: tuple[int, ...]


@dataclass(frozen=True)
class Expectations:
    """What a binary must be, beside fitting its architecture and not spilling.

    Attributes:
        matrix: starts of instructions, one of which it must use; empty asks for none.
        matrix_type: what the names of those instructions must match.
        load_bytes: the widest load must be at least so wide.
    """

    matrix: tuple[str, ...] = ()
    matrix_type: str = ""
    load_bytes: int = 0


@dataclass(frozen=True)
class Failure:
    """A broken expectation: its short name and the numbers."""

    name: str
    why: str


class BinaryError(PlaitError):
    """Code that was made is not what its target needs. `failures` say how."""

    def __init__(self, what: str, failures: tuple[Failure, ...]) -> None:
        super().__init__("binary-wrong", what, why="; ".join(f"{f.name}: {f.why}" for f in failures))
        self.failures = failures


def read(code: bytes, assembly: str, arch: Arch, threads: int, shared_bytes: int, tensor_columns: int) -> Facts:
    """The facts of a binary. What a block gets at launch (shared and tensor memory) is known to the compiler only."""
    elf = resources(code)
    text = _INSTRUCTIONS[arch.vendor](assembly)
    shared = shared_bytes + (elf.static_shared_bytes if arch.vendor == "amd" else 0)
    blocks, limit = occupancy(arch, threads, elf.registers, shared, tensor_columns)
    return Facts(
        machine=elf.machine,
        specific=elf.specific,
        threads=threads,
        registers=elf.registers,
        spills=elf.spills,
        shared_bytes=shared,
        tensor_columns=tensor_columns,
        matrix=text.matrix,
        loads=text.loads,
        instructions=text.count,
        argument_bytes=elf.argument_bytes,
        blocks=blocks,
        warps=blocks * threads // arch.warp,
        limit=limit,
    )


def occupancy(arch: Arch, threads: int, registers: int, shared_bytes: int, tensor_columns: int = 0) -> tuple[int, str]:
    """Blocks that a unit holds at once, and what allows no more. A scheduler gets whole warps, a unit whole blocks."""
    warps = -(-threads // arch.warp)
    given = -(-max(registers, 1) // arch.register_step) * arch.register_step
    per_simd = arch.registers // arch.simds // (given * arch.warp)
    limits = {
        "registers": per_simd * arch.simds // warps,
        "shared memory": arch.shared_unit_bytes // (shared_bytes + arch.shared_extra_bytes)
        if shared_bytes + arch.shared_extra_bytes
        else arch.most_blocks,
        "warps": arch.most_warps // warps,
        "blocks": arch.most_blocks,
    }
    if tensor_columns:
        limits["tensor memory"] = arch.tensor_columns // tensor_columns
    limit = min(limits, key=lambda name: limits[name])
    return limits[limit], limit


def check(facts: Facts, arch: Arch, kernel: Kernel, variant: Variant, expected: Expectations) -> tuple[Failure, ...]:
    """What is wrong with a binary; empty where nothing is."""
    found = []

    def fail(wrong: bool, name: str, why: str) -> None:
        if wrong:
            found.append(Failure(name, why))

    fail(
        facts.machine != arch.machine, "arch", f"the file is for machine {facts.machine}, {arch.name} is {arch.machine}"
    )
    must = arch.name.endswith("a") and arch.machine == 90  # files of sm_100 on do not say
    fail(
        must and not facts.specific, "arch", f"the file is not made for {arch.name} alone, so it uses none of its units"
    )
    fail(facts.spills > 0, "spills", f"{facts.spills} registers of each thread are kept in memory")
    most = arch.shared_block_bytes
    fail(facts.shared_bytes > most, "shared-memory", f"{facts.shared_bytes} bytes of {most} that a block can have")
    fail(facts.registers > arch.most_registers, "registers", f"{facts.registers} of {arch.most_registers}")
    fail(facts.blocks < 1, "occupancy", f"no block fits a unit, for {facts.limit}")
    wanted = (8,) * len(kernel.pointers) + (4,) * len(kernel.scalars) + (8, 8)
    fail(facts.argument_bytes != wanted, "arguments", f"sizes {facts.argument_bytes}, wanted {wanted}")
    names = ", ".join(facts.matrix) or "none"
    used = [name for name in facts.matrix if name.startswith(expected.matrix)]
    fail(bool(expected.matrix) and not used, "matrix", f"no {' or '.join(expected.matrix)} among {names}")
    typed = [name for name in used if re.search(expected.matrix_type, name)]
    fail(bool(used) and not typed, "matrix-type", f"none of {expected.matrix_type} among {names}")
    widest = facts.widest_load_bytes
    fail(widest < expected.load_bytes, "narrow-loads", f"the widest loads {widest} bytes, wanted {expected.load_bytes}")
    return tuple(found)


#: How matrix instructions name what they multiply: PTX's mma, wgmma and tcgen05, then AMD's.
_MATRIX_TYPES = {
    "fp16": r"(?<!b)f16|kind::f16",
    "bf16": r"bf16|kind::f16",
    "fp8e4nv": r"e4m3|kind::f8f6f4|fp8",
    "fp8e4b8": r"fp8",
    "fp8e5": r"e5m2|kind::f8f6f4|bf8",
}
_SIZES = {"fp32": 4, "i32": 4, "fp16": 2, "bf16": 2}

#: From so many rows of a tile on, a warp group or tensor memory multiplies; below, single warps do.
_GROUP_ROWS = 64


def expectations(kernel: Kernel, variant: Variant, arch: Arch) -> Expectations:
    """What good code of a variant is like: products on the matrix units in their own type, wide loads of streams."""
    if kernel.nature == "stream":
        return Expectations(load_bytes=_wanted_load(kernel, variant, arch))
    multiplied = variant.types["q" if kernel.nature == "attend" else "x"]
    if multiplied not in _MATRIX_TYPES:
        return Expectations()
    native = multiplied in ("fp16", "bf16", *arch.fp8)
    large = kernel.nature == "multiply" and variant.tile.constants.get("BLOCK_M", 0) >= _GROUP_ROWS
    grouped = large and variant.tile.num_warps >= 4
    # Where warp groups multiply fp8, single warps widen it to fp16 first.
    widened = multiplied in arch.fp8 and not grouped and len(arch.matrix) > 1 and arch.vendor == "nvidia"
    return Expectations(
        matrix=arch.matrix[:1] if grouped else arch.matrix,
        matrix_type=_MATRIX_TYPES[multiplied] if native and not widened else "",
    )


def _wanted_load(kernel: Kernel, variant: Variant, arch: Arch) -> int:
    """Bytes: 16, or what a thread gets of a block's widest input; 0 where not all of it is promised to be aligned."""
    block = variant.tile.constants.get("BLOCK", variant.constants.get("BLOCK"))
    read = [variant.types[name] for name in kernel.pointers if name in variant.aligned and name not in kernel.written]
    inside = {name for name, kind in kernel.scalars.items() if kind == "i32" and name != "rows"}
    if not isinstance(block, int) or not read or inside - variant.aligned:
        return 0
    each = max(1, block // (variant.tile.num_warps * arch.warp))
    return min(16, each * max(_SIZES.get(name, 1) for name in read))


# ---- ELF files ----


_NO_BITS = 8


@dataclass(frozen=True)
class _Section:
    name: str
    kind: int
    data: bytes


def resources(code: bytes) -> Resources:
    """What the file says.

    Raises:
        PlaitError: `binary-unreadable`: no cubin or hsaco with one kernel.
    """
    try:
        (machine,) = struct.unpack_from("<H", code, 18)
        (flags,) = struct.unpack_from("<I", code, 48)
        if code[:5] != b"\x7fELF\x02":
            raise ValueError("no 64-bit ELF file")
        sections = list(_sections(code))
        if machine == _MACHINE_NVIDIA:
            return _nvidia(sections, flags, abi=code[8])
        if machine == _MACHINE_AMD:
            return _amd(sections, flags)
        raise ValueError(f"machine {machine}")
    except (ValueError, LookupError, struct.error, msgspec.DecodeError) as error:
        raise PlaitError("binary-unreadable", "a GPU binary cannot be read", why=str(error)) from error


def _sections(code: bytes) -> Iterator[_Section]:
    (start,) = struct.unpack_from("<Q", code, 40)
    size, count, names_at = struct.unpack_from("<HHH", code, 58)
    headers = [struct.unpack_from("<IIQQQQ", code, start + i * size) for i in range(count)]
    programs, program_size, program_count = *struct.unpack_from("<Q", code, 32), *struct.unpack_from("<HH", code, 54)
    ends = [at + length for _, kind, _, _, at, length in headers if kind != _NO_BITS]
    if max(*ends, programs + program_size * program_count) > len(code):
        raise ValueError("it is cut off")
    at, length = headers[names_at][4:6]
    names = code[at : at + length]
    for name, kind, _, _, at, length in headers:
        yield _Section(names[name : names.index(b"\0", name)].decode(), kind, code[at : at + length])


#: Attributes of `.nv.info` sections.
_REGISTERS, _FRAME, _PARAMETER = 0x2F, 0x11, 0x17
_SIZED = 4


def _nvidia(sections: list[_Section], flags: int, abi: int) -> Resources:
    by_name = {section.name: section.data for section in sections}
    (symbol,) = [name.removeprefix(".nv.info.") for name in by_name if name.startswith(".nv.info.")]
    whole, own = _attributes(by_name[".nv.info"]), _attributes(by_name[f".nv.info.{symbol}"])
    (registers,) = [struct.unpack("<II", value)[1] for key, value in whole if key == _REGISTERS]
    frames = [struct.unpack("<II", value)[1] for key, value in whole if key == _FRAME]
    # index, ordinal, offset, and flags whose bits from 18 on are the size
    parameters = sorted(struct.unpack("<IHHI", value)[1:] for key, value in own if key == _PARAMETER)
    return Resources(
        vendor="nvidia",
        machine=(flags >> 8) & 0xFF if abi >= 8 else flags & 0xFF,
        specific=abi < 8 and bool(flags & 0x800),
        symbol=symbol,
        registers=registers,
        spills=max(frames) // 4,  # Triton keeps nothing else on the stack
        static_shared_bytes=0,
        argument_bytes=tuple(bits >> 18 for _, _, bits in parameters),
    )


def _attributes(data: bytes) -> list[tuple[int, bytes]]:
    """Keys and values; only those that say how long they are have one of more than two bytes."""
    found, at = [], 0
    while at < len(data):
        form, key, value = struct.unpack_from("<BBH", data, at)
        at += 4
        if form == _SIZED:
            found.append((key, data[at : at + value]))
            at += value
    return found


class _Argument(msgspec.Struct, rename=lambda name: f".{name}"):
    size: int
    value_kind: str


class _AmdKernel(msgspec.Struct, rename=lambda name: f".{name}"):
    name: str
    args: list[_Argument]
    vgpr_count: int
    vgpr_spill_count: int
    private_segment_fixed_size: int
    group_segment_fixed_size: int


class _AmdNote(msgspec.Struct):
    kernels: list[_AmdKernel] = msgspec.field(name="amdhsa.kernels")


def _amd(sections: list[_Section], flags: int) -> Resources:
    (note,) = [section.data for section in sections if section.name == ".note"]
    name, size, _ = struct.unpack_from("<III", note)
    (kernel,) = msgspec.msgpack.decode(note[12 + -(-name // 4) * 4 :][:size], type=_AmdNote).kernels
    return Resources(
        vendor="amd",
        machine=flags & 0xFF,
        specific=True,
        symbol=kernel.name,
        registers=kernel.vgpr_count,
        spills=max(kernel.vgpr_spill_count, kernel.private_segment_fixed_size // 4),
        static_shared_bytes=kernel.group_segment_fixed_size,
        argument_bytes=tuple(a.size for a in kernel.args if not a.value_kind.startswith("hidden_")),
    )


# ---- Assembly ----


@dataclass(frozen=True)
class _Text:
    matrix: Mapping[str, int]
    loads: Mapping[int, int]
    count: int


_PTX_LINE = re.compile(r"^\s+(?:@!?%?\w+\s+)?([a-z][\w.:]*)", re.MULTILINE)
_PTX_MATRIX = re.compile(r"^(?:wgmma\.mma_async|tcgen05\.mma|mma\.sync)\b")
_PTX_LOAD = re.compile(r"^ld\.global\S*?(?:\.v(\d))?\.[bufs](\d+)$")
_PTX_COPY = re.compile(r"cp\.async\.c[ag]\.shared\S*\s[^,]*,[^,]*,\s*(0x[0-9a-f]+|\d+)")

_GCN_LINE = re.compile(r"^\t([a-z]\w+)", re.MULTILINE)
_GCN_MATRIX = re.compile(r"^v_(?:mfma|smfmac|wmma)_")
_GCN_LOAD = re.compile(r"^(?:global|buffer|flat)_load_.*?(dwordx?\d?|b\d+|[us]byte|[us]?short|[iu]8|[iu]16)")
_GCN_WIDTHS = {
    **{"dword": 4, "dwordx2": 8, "dwordx3": 12, "dwordx4": 16, "b32": 4, "b64": 8, "b96": 12, "b128": 16},
    **{"ubyte": 1, "sbyte": 1, "u8": 1, "i8": 1, "ushort": 2, "sshort": 2, "short": 2, "u16": 2, "i16": 2, "b16": 2},
}


def _ptx(assembly: str) -> _Text:
    names = _PTX_LINE.findall(assembly)
    loads: Counter[int] = Counter()
    for name in names:
        if match := _PTX_LOAD.match(name):
            loads[int(match[1] or 1) * int(match[2]) // 8] += 1
    for size in _PTX_COPY.findall(assembly):
        loads[int(size, 0)] += 1
    matrix = Counter(name for name in names if _PTX_MATRIX.match(name))
    return _Text(dict(sorted(matrix.items())), dict(sorted(loads.items())), len(names))


def _gcn(assembly: str) -> _Text:
    names = _GCN_LINE.findall(assembly)
    loads: Counter[int] = Counter()
    for name in names:
        if match := _GCN_LOAD.match(name):
            loads[_GCN_WIDTHS[match[1]]] += 1
    matrix = Counter(name for name in names if _GCN_MATRIX.match(name))
    return _Text(dict(sorted(matrix.items())), dict(sorted(loads.items())), len(names))


_INSTRUCTIONS = {"nvidia": _ptx, "amd": _gcn}
