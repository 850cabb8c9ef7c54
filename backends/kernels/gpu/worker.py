"""The process that compiles: `python -m plait.backends.kernels.gpu.worker`.

It reads a job a line from its standard input (`build.job_from`) and answers a line: `made`, a packed `Binary` in
base64, and `error`, the fields of a `BuildError`; one of them is null.
"""

from __future__ import annotations

import base64
import contextlib
import json
import sys
import tempfile
import zlib
from typing import Any

from plait.backends.kernels.gpu import facts, loader
from plait.backends.kernels.gpu.archs import ARCHS, Arch
from plait.backends.kernels.gpu.build import Binary, BuildError, Job, job_from, pack
from plait.backends.kernels.gpu.kernel import Kernel, Variant


def make(job: Job) -> Binary:
    """Compile with Triton, in this process.

    Raises:
        BuildError: `kernel-compile`.
    """
    from triton import knobs
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource, compile

    arch, kernel, variant = ARCHS[job.arch], job.kernel, job.variant
    function = loader.load(kernel.source)
    if tuple(function.arg_names) != kernel.arguments:
        raise _wrong(
            job, f"the source takes {', '.join(function.arg_names)}; its row says {', '.join(kernel.arguments)}"
        )
    source = ASTSource(
        function,
        signature=_signature(kernel, variant),
        constexprs={**variant.constants, **variant.tile.constants},
        attrs=_attributes(kernel, variant, arch),
    )
    options = {"num_warps": variant.tile.num_warps, "num_stages": variant.tile.num_stages}
    with tempfile.TemporaryDirectory() as folder, knobs.cache.scope(), knobs.compilation.scope():
        knobs.cache.dir = folder
        knobs.compilation.disable_line_info = True  # line numbers would put paths into the code
        try:
            made = compile(source, target=GPUTarget(arch.backend, arch.triton, arch.warp), options=options)
        except Exception as error:
            raise _wrong(job, f"{type(error).__name__}: {error}") from error
    return _binary(job, arch, made)


def _binary(job: Job, arch: Arch, made: Any) -> Binary:
    meta = made.metadata
    if meta.global_scratch_size or meta.profile_scratch_size:
        raise _wrong(job, "it wants scratch memory, which launch plans do not give")
    assembly = made.asm["ptx" if arch.vendor == "nvidia" else "amdgcn"]
    code = made.asm[arch.suffix]
    threads = meta.num_warps * arch.warp  # the metadata's: a specialising compiler may have added warps
    return Binary(
        code=code,
        suffix=arch.suffix,
        symbol=meta.name,
        num_warps=meta.num_warps,
        threads=threads,
        shared_bytes=meta.shared,
        facts=facts.read(code, assembly, arch, threads, meta.shared, getattr(meta, "tmem_size", 0) or 0),
        packed_assembly=zlib.compress(assembly.encode()),
    )


def _signature(kernel: Kernel, variant: Variant) -> dict[str, str]:
    pointers = {name: f"*{variant.types[name]}" for name in kernel.pointers}
    scalars = {name: {"i32": "i32", "f32": "fp32"}[kind] for name, kind in kernel.scalars.items()}
    return {**pointers, **scalars, **dict.fromkeys((*kernel.constants, *kernel.tile), "constexpr")}


def _attributes(kernel: Kernel, variant: Variant, arch: Arch) -> dict[tuple[int], list[list[object]]]:
    """What Triton may take for granted of each argument."""
    found: dict[tuple[int], list[list[object]]] = {}
    for index, name in enumerate(kernel.arguments):
        if name in variant.aligned:
            found.setdefault((index,), []).append(["tt.divisibility", 16])
        if name in variant.small and arch.vendor == "amd":
            found.setdefault((index,), []).append(["tt.pointer_range", 32])
    return found


def _wrong(job: Job, why: str) -> BuildError:
    return BuildError("kernel-compile", f"{job.label} does not compile", why=why)


def main() -> None:
    """Serve until the input ends."""
    for line in sys.stdin:
        made: str | None = None
        error: dict[str, str] | None = None
        try:
            with contextlib.redirect_stdout(sys.stderr):  # Triton prints what ptxas said
                made = base64.b64encode(pack(make(job_from(json.loads(line))))).decode()
        except BuildError as wrong:
            error = {"code": wrong.code, "what": wrong.what, "why": wrong.why, "hint": wrong.hint}
        print(json.dumps({"made": made, "error": error}), flush=True)


if __name__ == "__main__":
    main()
