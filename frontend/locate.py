"""Finding the one file that stands for a checkpoint."""

from __future__ import annotations

from pathlib import Path

from plait.errors import CheckpointError, UnsupportedError, did_you_mean
from plait.frontend.files import read_json, read_text, some, unreadable
from plait.words import counted

INDEX_SUFFIX = ".safetensors.index.json"
SUFFIXES = (".safetensors", ".json", ".gguf", ".pt2", ".onnx")
_WEIGHTS = tuple(suffix for suffix in SUFFIXES if suffix != ".json")
ADAPTER = "adapter_config.json"
"""Of PEFT."""

OTHER_FORMATS = {
    ".bin": "a pickle, which can run code when it is opened",
    ".pt": "a pickle, which can run code when it is opened",
    ".pth": "a pickle, which can run code when it is opened",
    ".ckpt": "a pickle, which can run code when it is opened",
    ".h5": "a Keras file",
    ".msgpack": "a Flax file",
}


def find(path: Path) -> Path:
    """The file with one of `SUFFIXES` that `path` means: itself, or the one in a directory or hub cache folder.

    Raises:
        CheckpointError: nothing there, or several.
        UnsupportedError: another format, by name.
    """
    try:
        return _find(path)
    except OSError as err:
        raise unreadable(path, err) from err


def index_of(path: Path) -> Path | None:
    """An index beside the file that lists it as a shard."""
    for index in sorted(path.parent.glob(f"*{INDEX_SUFFIX}")):
        shards = read_json(index).get("weight_map")
        if isinstance(shards, dict) and path.name in shards.values():
            return index
    return None


def _find(path: Path) -> Path:
    """The one file that stands for the checkpoint."""
    _refuse_adapter(path)
    if path.is_dir():
        return _find_in(_snapshot(path))
    if not path.exists():
        siblings = [entry.name for entry in path.parent.iterdir()] if path.parent.is_dir() else []
        raise CheckpointError("checkpoint-missing", f"there is no {path}", hint=did_you_mean(path.name, siblings))
    if path.suffix in OTHER_FORMATS:
        raise UnsupportedError(
            "checkpoint-format",
            f"{path} is not read",
            why=f"it is {OTHER_FORMATS[path.suffix]}",
            hint="save the model as safetensors: `model.save_pretrained(DIR, safe_serialization=True)`",
        )
    if path.suffix not in SUFFIXES:
        raise UnsupportedError(
            "checkpoint-format",
            f"{path} is not a checkpoint that plait knows",
            why=f"known are {', '.join(SUFFIXES)} and directories",
        )
    return path


def _refuse_adapter(path: Path) -> None:
    """An adapter is no model: a folder with its config and no model's, or one of its files."""
    folder, own = (path, True) if path.is_dir() else (path.parent, path.name.startswith("adapter_"))
    folder = _snapshot(folder) if path.is_dir() else folder
    config = folder / ADAPTER
    models = (*folder.glob(f"*{INDEX_SUFFIX}"), folder / "model.safetensors", folder / "config.json")
    if not own or not config.is_file() or (path.is_dir() and any(file.is_file() for file in models)):
        return
    base = read_json(config).get("base_model_name_or_path")
    named = f", an adapter of {base!r:.200}" if isinstance(base, str) and base else ""
    raise CheckpointError(
        "checkpoint-adapter",
        f"{path} is no model but a LoRA adapter as PEFT saves it",
        why=f"it holds {ADAPTER}{named}; an adapter means nothing without the model it was made for",
        hint=f"give the base model, and the adapter with it: --lora {folder}",
    )


def _snapshot(folder: Path) -> Path:
    """The snapshot that `refs/main` names, if this is a folder of the hub's cache; otherwise the folder itself."""
    snapshots = folder / "snapshots"
    if not snapshots.is_dir():
        return folder
    ref = folder / "refs" / "main"
    if ref.is_file():
        revision = read_text(ref).strip()
        if "/" in revision or not (snapshots / revision).is_dir():
            raise CheckpointError(
                "checkpoint-snapshot",
                f"{folder} has no snapshot {revision!r}, which its refs/main names",
                hint="download the model again",
            )
        return snapshots / revision
    revisions = sorted(entry.name for entry in snapshots.iterdir() if entry.is_dir())
    if len(revisions) != 1:
        raise CheckpointError(
            "checkpoint-ambiguous",
            f"{folder} has {counted(len(revisions), 'snapshot')} and no refs/main",
            hint="give the path of one: " + some(revisions),
        )
    return snapshots / revisions[0]


def _find_in(folder: Path) -> Path:
    names = sorted(entry.name for entry in folder.iterdir() if entry.is_file())
    indexes = [name for name in names if name.endswith(INDEX_SUFFIX)]
    singles = [name for name in names if name == "model.safetensors"]
    # Repositories carry other formats beside the standard one (consolidated.safetensors); the standard names win.
    candidates = indexes + singles or [name for name in names if Path(name).suffix in _WEIGHTS]
    if len(candidates) > 1:
        raise CheckpointError(
            "checkpoint-ambiguous",
            f"{folder} holds several checkpoints: {some(candidates)}",
            why="they may be shards whose index is missing" if not indexes else "",
            hint="give the path of one of them",
        )
    if candidates:
        return folder / candidates[0]
    others = [name for name in names if Path(name).suffix in OTHER_FORMATS]
    if others:
        return _find(folder / others[0])
    if "config.json" in names:
        return folder / "config.json"
    raise CheckpointError(
        "checkpoint-missing",
        f"{folder} holds no checkpoint",
        why="looked for *.safetensors, an index, *.gguf, *.pt2, *.onnx and config.json",
        hint="it looks like an artifact: `plait run` it" if "manifest.json" in names else "did the download finish?",
    )
