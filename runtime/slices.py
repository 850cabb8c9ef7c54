"""From a manifest to what every slice and every worker is told."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path

from plait.errors import ArtifactError, UsageError, did_you_mean
from plait.runtime.messages import SliceSpec
from plait.runtime.pages import PageAllocator, make_pools
from plait.runtime.stage import LOGITS
from plait.runtime.workers import WorkerSetup
from plait.spec import Boundary, Manifest, kv_class


def label(index: int, device: str) -> str:
    """The name of a slice in every message."""
    return f"{device} (slice {index})"


def page_allocator(manifest: Manifest, max_sequences: int) -> PageAllocator:
    """The KV pages that the plan has memory for, by KV class."""
    windows = {kv_class(layout.window): layout.window for part in manifest.slices for layout in part.kv}
    if manifest.max_kv_tokens < manifest.page_tokens:
        raise ArtifactError(
            "kv-pages",
            "the artifact has no KV page to run with",
            why=f"{manifest.max_kv_tokens} KV tokens, a page is {manifest.page_tokens}",
            hint="compile again with more memory for KV",
        )
    return PageAllocator(
        make_pools(windows, manifest.max_kv_tokens, manifest.page_tokens, manifest.max_step_tokens, max_sequences)
    )


def slice_specs(
    manifest: Manifest, folder: Path, pages: PageAllocator, *, max_sequences: int, threads: int | None
) -> list[SliceSpec]:
    """What each slice is told.

    Raises:
        ArtifactError: `boundary`: a slice reads a tensor that no slice before it writes in that shape and dtype.
    """
    keeps = _kept(manifest)
    return [
        SliceSpec(
            index=i,
            label=label(i, part.device),
            device=part.device,
            entry=part.entry,
            folder=str(folder / part.folder),
            weight_root=str(folder / manifest.weight_root),
            inputs=tuple(boundary.name for boundary in part.inputs),
            outputs=part.outputs,
            keep=keeps[i],
            pages={name: pages.pools[name].pages for name in {kv_class(layout.window) for layout in part.kv}},
            page_tokens=manifest.page_tokens,
            max_step_tokens=manifest.max_step_tokens,
            max_sequences=max_sequences,
            threads=threads,
            ordinal=[before.target for before in manifest.slices[:i]].count(part.target),
        )
        for i, part in enumerate(manifest.slices)
    ]


def worker_setups(
    manifest: Manifest, specs: list[SliceSpec], *, share: bool, pythons: Mapping[str, str]
) -> list[WorkerSetup]:
    """The workers in order: one per slice, or one per run of slices with the same environment and interpreter.

    Args:
        pythons: interpreter by device name or environment name; the device's entry counts first.

    Raises:
        UsageError: `interpreter`: a name that no slice has, or a path that is no program.
    """
    homes = []
    for part in manifest.slices:
        python = pythons.get(part.device, pythons.get(part.environment, sys.executable))
        if shutil.which(python) is None:
            raise UsageError("interpreter", f"{python!r} is not a program", why=f"asked for {part.device}")
        homes.append((part.environment, python))
    known = {name for part in manifest.slices for name in (part.device, part.environment)}
    for name in pythons:
        if name not in known:
            raise UsageError(
                "interpreter",
                f"no slice runs on {name!r}, an interpreter was given for it",
                why="devices and environments here: " + ", ".join(sorted(known)),
                hint=did_you_mean(name, known),
            )
    setups: list[WorkerSetup] = []
    for i, spec in enumerate(specs):
        if share and i and homes[i] == homes[i - 1]:
            setups[-1] = WorkerSetup((*setups[-1].slices, spec), homes[i][1])
        else:
            setups.append(WorkerSetup((spec,), homes[i][1]))
    return setups


def _kept(manifest: Manifest) -> list[tuple[str, ...]]:
    """For each slice, the tensors that have to go on after it."""
    written: dict[str, Boundary] = {}
    for i, part in enumerate(manifest.slices):
        for boundary in part.inputs:
            if written.get(boundary.name) != boundary:
                raise ArtifactError(
                    "boundary",
                    f"{label(i, part.device)} reads {boundary.name!r} as {_type(boundary)}",
                    why=f"written before it: {', '.join(map(_named, written.values())) or 'nothing'}",
                )
        written |= {boundary.name: boundary for boundary in part.outputs}
    return list(_keeps(manifest))


def _keeps(manifest: Manifest) -> Iterator[tuple[str, ...]]:
    last = len(manifest.slices) - 1
    for i in range(last):
        have = {b.name for part in manifest.slices[: i + 1] for b in part.outputs}
        # A tensor goes on while a later slice reads it before another one writes it anew.
        wanted: dict[str, None] = {}
        written: set[str] = set()
        for part in manifest.slices[i + 1 :]:
            wanted |= dict.fromkeys(b.name for b in part.inputs if b.name in have and b.name not in written)
            written |= {b.name for b in part.outputs}
        yield tuple(wanted)
    yield (LOGITS,)


def _type(boundary: Boundary) -> str:
    return f"{boundary.dtype} {['tokens' if size is None else size for size in boundary.shape]}"


def _named(boundary: Boundary) -> str:
    return f"{boundary.name!r} {_type(boundary)}"
