"""The assembly of a kernel of an artifact: made again, and held against the binary that the artifact has."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from plait.backends.kernels.gpu.backend import read_plan
from plait.backends.kernels.gpu.build import compile_variant
from plait.backends.kernels.gpu.loader import require_triton, source_digest
from plait.backends.kernels.gpu.table import KERNELS
from plait.errors import ArtifactError


@dataclass(frozen=True)
class Again:
    """PTX or AMD's assembly; `differs` says why the artifact's binary is other code, and is empty where it is not."""

    text: str
    differs: str


def again(folder: Path, file: str, row: Mapping[str, Any]) -> Again:
    """Compile one binary of a slice's folder again.

    Args:
        row: of report.json's `kernels`.

    Raises:
        ArtifactError: `kernel-unknown`: this plait has no such kernel.
        MissingDependencyError: `triton-missing`.
        BuildError: it does not compile any more.
    """
    plan = read_plan(folder)
    assert plan is not None, "its report has kernels"
    binary = next(binary for binary in plan.binaries if binary.file == file)
    if binary.kernel not in KERNELS:
        why = "the artifact was made by another plait"
        raise ArtifactError("kernel-unknown", f"there is no kernel {binary.kernel} any more", why=why)
    kernel = KERNELS[binary.kernel]
    made = compile_variant(kernel, binary.variant, plan.arch)
    if made.code == (folder / file).read_bytes():
        return Again(made.assembly, "")
    report = json.loads((folder / "report.json").read_text("utf-8"))
    then, now = report.get("versions", {}).get("triton"), require_triton()
    if then not in (None, now):
        return Again(made.assembly, f"it was made with Triton {then}, this is {now}")
    if row.get("source") not in (None, source_digest(kernel.source)):
        return Again(made.assembly, f"the source of {binary.kernel} has changed since")
    return Again(made.assembly, "what compiles it has changed since")
