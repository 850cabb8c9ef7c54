"""The artifact: the directory that compile writes and open checks.

    model.plait/  manifest.json  plan.yaml  module.mlir  report.html  tokenizer.json  generation.json
                  slices/0-h100/  slice.mlir  weights.json  report.json  and what the backend adds;
                                  changed.safetensors, where weights were merged or quantised; weights.bin, embedded

Nothing half-written survives: everything goes to a temporary directory beside the target, renamed at the end.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import shutil
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from plait.errors import ArtifactError, UserError
from plait.spec import FORMAT_VERSION, Manifest, Plan, from_dict, from_yaml, to_json

MANIFEST = "manifest.json"
OLDEST_FORMAT = 1


@dataclass(frozen=True)
class Artifact:
    """An artifact whose files match their digests."""

    folder: Path
    manifest: Manifest

    @property
    def plan(self) -> Plan:
        return from_yaml(Plan, (self.folder / "plan.yaml").read_text("utf-8"))

    @property
    def weight_root(self) -> Path:
        """Where the weight files lie, absolute."""
        return (self.folder / self.manifest.weight_root).resolve()


def sha256(path: Path) -> str:
    """`sha256:...` of a file's bytes."""
    with path.open("rb") as file:
        return "sha256:" + hashlib.file_digest(file, "sha256").hexdigest()


@contextlib.contextmanager
def writing(target: Path) -> Iterator[None]:
    """Raises UserError `output-unwritable` where the system does not let the block write."""
    try:
        yield
    except OSError as err:
        raise UserError("output-unwritable", f"cannot write {target}", why=err.strerror or str(err)) from err


@contextlib.contextmanager
def staged(target: Path) -> Iterator[Path]:
    """A temporary directory that takes the place of `target` when the block ends well, and vanishes when it does not.

    A link stays: the directory that it names is replaced.

    Raises:
        UserError: `output-exists`: the target is there and is not an artifact, or holds something else too; it is left
            alone. `output-unwritable`.
    """
    target = target.resolve()
    _check_replaceable(target)
    new_parents = [parent for parent in target.parents if not parent.exists()]
    with writing(target):
        target.parent.mkdir(parents=True, exist_ok=True)
        folder = Path(tempfile.mkdtemp(prefix=f".{target.name}.", dir=target.parent))
    old = folder.with_name(folder.name + ".old")
    try:
        with writing(target):
            yield folder
            folder.chmod(0o755)
            _swap(folder, target, old)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        shutil.rmtree(old, ignore_errors=True)
        for parent in new_parents:
            with contextlib.suppress(OSError):  # it holds the target
                parent.rmdir()


def _swap(folder: Path, target: Path, old: Path) -> None:
    """Put `folder` in the place of `target`, which moves to `old`; on any failure `target` is what it was."""
    try:
        if target.exists():
            target.rename(old)
        folder.rename(target)
    except BaseException:
        if old.exists() and not target.exists():
            old.rename(target)
        raise


def _check_replaceable(target: Path) -> None:
    """Only what compile wrote may be replaced: a `manifest.json` alone makes no artifact, and notes in one stay."""
    hint = "choose another -o/--output"
    if not target.exists() or (target.is_dir() and not any(target.iterdir())):
        return
    try:
        manifest = json.loads((target / MANIFEST).read_bytes())
        written = manifest["files"].keys() if "format_version" in manifest else None
    except (OSError, ValueError, RecursionError, LookupError, TypeError, AttributeError):
        written = None
    if written is None:
        raise UserError("output-exists", f"{target} exists and is not an artifact", hint=hint)
    if foreign := sorted(_present(target) - written):
        raise UserError(
            "output-exists",
            f"{target} is an artifact and holds {foreign[0]}",
            why="compile did not write it, and would remove it",
            hint=hint,
        )


def _present(folder: Path) -> set[str]:
    """Every file of an artifact but its manifest."""
    return {path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()} - {MANIFEST}


def seal(folder: Path, manifest: Manifest) -> None:
    """Write `manifest.json` with the digest of every file in the folder."""
    files = {name: sha256(folder / name) for name in sorted(_present(folder))}
    (folder / MANIFEST).write_text(to_json(replace(manifest, files=files)) + "\n", "utf-8")


def read_artifact(path: str | os.PathLike[str]) -> Artifact:
    """Check and read an artifact.

    Raises:
        ArtifactError: not an artifact, another format version, or files that are missing, added or changed; names them.
    """
    folder = Path(path)
    if not (folder / MANIFEST).is_file():
        what = f"{folder} does not exist" if not folder.exists() else f"{folder} is not an artifact"
        raise ArtifactError(
            "not-an-artifact", what, why=f"no {MANIFEST} in it", hint="make one with: plait compile MODEL --targets ..."
        )
    try:
        data = json.loads((folder / MANIFEST).read_bytes())
    except (ValueError, RecursionError) as err:
        raise ArtifactError("manifest", f"{folder / MANIFEST} is not valid JSON", why=str(err)) from err
    version = data.get("format_version") if isinstance(data, dict) else None
    if not isinstance(version, int) or not OLDEST_FORMAT <= version <= FORMAT_VERSION:
        raise ArtifactError(
            "format-version",
            f"{folder} has format version {version}",
            why=f"this plait reads versions {OLDEST_FORMAT} to {FORMAT_VERSION}",
            hint="compile the model again",
        )
    manifest = from_dict(Manifest, data, "manifest")
    _check_files(folder, manifest)
    return Artifact(folder, manifest)


def _check_files(folder: Path, manifest: Manifest) -> None:
    present = _present(folder)
    problems = [f"{name} is missing" for name in sorted(manifest.files.keys() - present)]
    problems += [f"{name} is not part of it" for name in sorted(present - manifest.files.keys())]
    problems += [
        f"{name} has changed"
        for name in sorted(present & manifest.files.keys())
        if sha256(folder / name) != manifest.files[name]
    ]
    if problems:
        raise ArtifactError(
            "artifact-changed",
            f"{folder} is not what compile wrote: " + "; ".join(problems[:5]),
            why=f"{len(problems)} in all, by the digests in {MANIFEST}",
            hint="compile again; to run an edited plan: plait compile MODEL --plan plan.yaml",
        )


def weights_identity(path: Path) -> tuple[int, str]:
    """Size in bytes and digest of the header of a weights file."""
    from plait.frontend.identity import identity

    return identity(path)


def check_weights(artifact: Artifact) -> None:
    """The checkpoint's files are there, with the sizes and headers that the artifact was compiled from.

    Their data is not read again: that would take as long as loading them.

    Raises:
        ArtifactError: names the file and what differs.
    """
    for name, (size, header) in artifact.manifest.weights.items():
        path = artifact.weight_root / name
        if not path.is_file():
            raise ArtifactError(
                "weights-missing",
                f"the weights {path} are not there",
                why="an artifact refers to the checkpoint's bytes where they lie",
                hint="put the checkpoint back, name its folder with --weights, or compile with --embed-weights",
            )
        now_size, now_header = weights_identity(path)
        if (now_size, now_header) != (size, header):
            what = f"{now_size} bytes instead of {size}" if now_size != size else "another header"
            raise ArtifactError(
                "weights-changed", f"{path} changed since it was compiled: it has {what}", hint="compile again"
            )
