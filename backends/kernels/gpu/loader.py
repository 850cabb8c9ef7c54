"""Where a kernel's source is: found, read, and told apart by content.

A source file is a plain module in `sources/` (or anywhere else, in tests) whose functions carry `@triton.jit`
themselves, helper functions too. It imports nothing but `triton`, `triton.language as tl`, and helpers of other source
files by `from plait.backends.kernels.gpu.sources.<file> import <helper>`. It has no `from __future__ import
annotations`, and compile-time arguments are annotated `tl.constexpr`:

    import triton
    import triton.language as tl

    @triton.jit
    def scale(x, out, rows, factor, BLOCK: tl.constexpr):
        at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
        value = tl.load(x + at, mask=at < rows, other=0).to(tl.float32)
        tl.store(out + at, (value * factor).to(out.dtype.element_ty), mask=at < rows)

The same function is compiled (`build`) and interpreted (`interpret`) in one process, so nobody sets TRITON_INTERPRET:
Triton then decorates for its interpreter alone, and `load` refuses to go on. Reading a source for its digest imports
nothing, so that a warm cache is served without Triton.
"""

from __future__ import annotations

import ast
import functools
import hashlib
import importlib
import importlib.metadata
import importlib.util
from pathlib import Path
from typing import Any

from plait.errors import MissingDependencyError, UserError

#: Modules of this package may be imported by sources; they count as part of the source.
SOURCES = "plait.backends.kernels.gpu.sources"


def load(source: str) -> Any:
    """The `triton.JITFunction` at `module:function`.

    Raises:
        MissingDependencyError: `triton-missing`.
        UserError: `triton-interprets`: TRITON_INTERPRET is set.
    """
    require_triton()
    from triton import knobs

    if knobs.runtime.interpret:
        raise UserError(
            "triton-interprets",
            "no machine code can be made while TRITON_INTERPRET is set",
            why="Triton then decorates every kernel for its interpreter",
            hint="unset TRITON_INTERPRET",
        )
    module, _, function = source.partition(":")
    return getattr(importlib.import_module(module), function)


@functools.cache
def require_triton() -> str:
    """The version of Triton that is installed, found without importing it.

    Raises:
        MissingDependencyError: `triton-missing`.
    """
    try:
        return importlib.metadata.version("triton")
    except importlib.metadata.PackageNotFoundError:
        raise MissingDependencyError(
            "triton-missing",
            "making code for GPUs needs Triton, which is not installed",
            hint="pip install 'plait[gpu]'",
        ) from None


@functools.cache
def source_digest(source: str) -> str:
    """sha256 over the text of the source's module and of every source module it imports, however deep."""
    module = source.partition(":")[0]
    texts = [_path(name).read_bytes() for name in (module, *sorted(_imported(module)))]
    return hashlib.sha256(b"\0".join(texts)).hexdigest()


def _imported(module: str) -> set[str]:
    found: set[str] = set()
    waiting = [module]
    while waiting:
        tree = ast.parse(_path(waiting.pop()).read_text())
        imports = {node.module or "" for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}
        imports |= {alias.name for node in ast.walk(tree) if isinstance(node, ast.Import) for alias in node.names}
        new = {name for name in imports if name.startswith(f"{SOURCES}.")} - found
        found |= new
        waiting += new
    return found


def _path(module: str) -> Path:
    spec = importlib.util.find_spec(module)
    assert spec is not None and spec.origin is not None, f"no source file for {module}"
    return Path(spec.origin)
